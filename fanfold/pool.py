"""Memory for results on the CPU that comes back when the last tensor over it is gone.

The system's allocator returns large blocks to the kernel, so a result allocated anew for each call
costs a page fault for every 4 KiB it touches: three times the copy itself. PyTorch caches memory on
GPUs; here is the same for the results of the host backend.
"""

from __future__ import annotations

import math
import mmap
import weakref
from collections import defaultdict

import torch

__all__ = ["OutputPool"]

# Below this the system's allocator keeps its blocks itself.
_SMALL_BYTES = 1 << 16
# Free blocks kept of each size: two calls in flight and two results being worked on.
_KEPT = 4


class OutputPool:
    """Uninitialised CPU tensors over recycled memory."""

    def __init__(self) -> None:
        self._free: dict[int, list[mmap.mmap]] = defaultdict(list)
        self._lent: dict[int, weakref.ref[memoryview]] = {}

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """An uninitialised contiguous tensor; its memory is reused once nothing refers to it."""
        nbytes = math.prod(shape) * dtype.itemsize
        if nbytes < _SMALL_BYTES:
            return torch.empty(shape, dtype=dtype)
        size = _rounded(nbytes)
        free = self._free[size]
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        block = free.pop() if free else mmap.mmap(-1, size, flags=flags)
        view = memoryview(block)
        key = id(view)

        def take_back(_: weakref.ref[memoryview]) -> None:
            del self._lent[key]
            if len(free) < _KEPT:
                free.append(block)

        # The tensor's storage holds the view, so the view dies with the last tensor over it.
        self._lent[key] = weakref.ref(view, take_back)
        return torch.frombuffer(view, dtype=torch.uint8)[:nbytes].view(dtype).view(shape)


def _rounded(nbytes: int) -> int:
    """``nbytes`` rounded up by at most an eighth, so that sizes that vary a little share blocks."""
    step = max(mmap.PAGESIZE, 1 << (nbytes.bit_length() - 4))
    return -(-nbytes // step) * step
