"""How calls on GPUs allocate what they return: from PyTorch's allocator, and with as little of the
CPU's time as that takes."""

from __future__ import annotations

from collections.abc import Callable

import torch

__all__ = ["Allocator", "Blank", "Empty", "blank"]

Sizes = tuple[int, ...]
Blank = tuple[Sizes, Sizes, torch.dtype]
"""A tensor to be allocated: shape, strides, dtype."""
Empty = Callable[[Sizes, Sizes, torch.dtype], torch.Tensor]


def blank(dtype: torch.dtype, *shape: int) -> Blank:
    """A contiguous one."""
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return shape, tuple(reversed(strides)), dtype


class Allocator:
    """Allocates tensors on one device.

    ``torch.empty`` spends more time on the way to the allocator than in it. PyTorch has a shorter
    way for the code that its own compiler writes, on the current device only; where that is another
    one, or this PyTorch does not have it, :meth:`empty` is the long way.

    Args:
        device: with an index, if it is a GPU.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._index = device.index
        guards = getattr(getattr(torch._C, "_dynamo", None), "guards", None)
        self._short: Empty | None = getattr(guards, f"_empty_strided_{device.type}", None)

    def empty(self) -> Empty:
        """What allocates here and now."""
        if self._short is None or torch._C._cuda_getDevice() != self._index:
            return self._long
        return self._short

    def _long(self, shape: Sizes, strides: Sizes, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty_strided(shape, strides, dtype=dtype, device=self._device)
