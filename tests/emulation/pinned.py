"""Pinned memory where there is no GPU to pin it for."""

from __future__ import annotations

import types

import torch

__all__ = ["PAGEABLE"]


def _zeros(size: int, *, dtype: torch.dtype, device: str, pin_memory: bool) -> torch.Tensor:
    assert pin_memory
    return torch.zeros(size, dtype=dtype, device=device)


PAGEABLE = types.SimpleNamespace(zeros=_zeros, uint8=torch.uint8, int32=torch.int32)
"""Stands where a module that makes pinned memory has ``torch``."""
