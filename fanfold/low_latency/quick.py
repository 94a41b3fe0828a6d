"""A quick look at what a low-latency call on a GPU is given, which is part of every call's time."""

from __future__ import annotations

import torch

from fanfold.errors import ArgumentError
from fanfold.geometry import Geometry, is_plain

__all__ = ["QuickLook", "aligned"]


class QuickLook:
    """Tells input that the checks of :mod:`fanfold.low_latency.calls` have nothing to say against.
    What it does not pass may still be right: the checks decide, and say what is wrong.

    Args:
        geometry: of the calls.
        device: where tensors must be.
    """

    def __init__(self, geometry: Geometry, device: torch.device) -> None:
        local, capacity = geometry.experts_per_rank, geometry.expert_capacity
        self._geometry = geometry
        self._device = device
        self._outputs = (local, capacity, geometry.hidden)
        self._ranges = (local, geometry.ranks)
        # Of the last call, as the next one most often has as many tokens.
        self._tokens = 0
        self._x = (0, geometry.hidden)
        self._choices = (0, geometry.top_k)

    def tokens(self, x: object, topk_idx: object, topk_weights: object) -> int | None:
        """The number of tokens of a dispatch; None where ``check_tokens`` must decide."""
        device = self._device
        if type(x) is not torch.Tensor:
            return None
        if x.shape != self._x:
            self._expect(x)
            if x.shape != self._x:
                return None
        if (
            x.dtype is torch.bfloat16
            and x.is_contiguous()
            and x.device == device
            and is_plain(topk_idx, self._choices, torch.int64, device)
            and (
                topk_weights is None or is_plain(topk_weights, self._choices, torch.float32, device)
            )
        ):
            return self._tokens
        return None

    def choices(self, topk_idx: object, late_weights: object) -> int | None:
        """The number of tokens of a combine with late weights; None where ``check_own`` must
        decide."""
        device = self._device
        if type(topk_idx) is not torch.Tensor:
            return None
        if topk_idx.shape != self._choices:
            self._expect(topk_idx)
        if is_plain(topk_idx, self._choices, torch.int64, device) and is_plain(
            late_weights, self._choices, torch.float32, device
        ):
            return self._tokens
        return None

    def outputs(self, y: torch.Tensor) -> bool:
        """Whether ``check_outputs`` would take ``y``, which kernels can read as it is."""
        return is_plain(y, self._outputs, torch.bfloat16, self._device) and y.data_ptr() % 16 == 0

    def ranges(self, ranges: object) -> bool:
        """Whether ``check_outputs`` would take ``ranges``."""
        return is_plain(ranges, self._ranges, torch.int64, self._device)

    def _expect(self, rows: torch.Tensor) -> None:
        """Takes the number of tokens from ``rows``, if it is one that a call may have."""
        if rows.dim() != 2 or rows.shape[0] > self._geometry.max_tokens:
            return
        self._tokens = tokens = rows.shape[0]
        self._x = (tokens, self._geometry.hidden)
        self._choices = (tokens, self._geometry.top_k)


def aligned(name: str, tensor: torch.Tensor) -> int:
    """The address of what kernels read and write 16 bytes at a time.

    Raises:
        ArgumentError: it is no multiple of 16.
    """
    address = tensor.data_ptr()
    if address % 16:
        raise ArgumentError(f"{name}.data_ptr()", hex(address), "on a 16-byte boundary")
    return address
