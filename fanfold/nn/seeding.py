"""Random values that are the same on any number of ranks."""

from __future__ import annotations

import hashlib

import torch

__all__ = ["seeded_normal"]


def seeded_normal(
    shape: tuple[int, ...],
    std: float,
    seed: int,
    name: str,
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """Normal values of mean 0 that depend on nothing but the arguments.

        >>> values = fanfold.nn.seeded_normal((2, 3), 1.0, 0, "router")
        >>> torch.equal(values, fanfold.nn.seeded_normal((2, 3), 1.0, 0, "router"))
        True

    Args:
        shape: of the result.
        std: standard deviation.
        seed: any integer.
        name: what the values are for; another name gives other values.
        dtype: of the result; drawn in float32.
    """
    digest = hashlib.sha256(f"{seed} {name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
    drawn = torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu")
    return drawn.mul_(std).to(dtype)
