"""Memory for results on the CPU that comes back when the last tensor over it is gone.

The system's allocator returns large blocks to the kernel, so a result allocated anew for each call
costs a page fault for every 4 KiB it touches: three times the copy itself. PyTorch caches memory on
GPUs; here is the same for the results of the host backend.
"""

from __future__ import annotations

import math
import mmap
import weakref

import torch

__all__ = ["OutputPool"]

# Below this the system's allocator keeps its blocks itself.
_SMALL_BYTES = 1 << 16


class OutputPool:
    """Uninitialised CPU tensors over recycled memory.

    Keeps at most as many bytes unused as were ever in use at once.
    """

    def __init__(self) -> None:
        self._free: list[mmap.mmap] = []  # the one unused for longest first
        self._lent: dict[int, weakref.ref[memoryview]] = {}
        self._lent_bytes = 0
        self._most_lent_bytes = 0

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """An uninitialised contiguous tensor; its memory is reused once nothing refers to it."""
        nbytes = math.prod(shape) * dtype.itemsize
        if nbytes < _SMALL_BYTES:
            return torch.empty(shape, dtype=dtype, device="cpu")
        block = self._take(_rounded(nbytes))
        view = memoryview(block)
        key = id(view)
        self._lent_bytes += len(block)
        self._most_lent_bytes = max(self._most_lent_bytes, self._lent_bytes)

        def take_back(_: weakref.ref[memoryview]) -> None:
            del self._lent[key]
            self._lent_bytes -= len(block)
            self._free.append(block)
            self._trim()

        # The tensor's storage holds the view, so the view dies with the last tensor over it.
        self._lent[key] = weakref.ref(view, take_back)
        return torch.frombuffer(view, dtype=dtype, count=math.prod(shape)).view(shape)

    def _take(self, size: int) -> mmap.mmap:
        """The smallest unused block of at least ``size`` and less than twice that, or a new one."""
        fitting = [block for block in self._free if size <= len(block) < 2 * size]
        if fitting:
            best = min(reversed(fitting), key=len)  # of equals the last used, warm in the caches
            self._free.remove(best)
            return best
        return mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)

    def _trim(self) -> None:
        while sum(map(len, self._free)) > self._most_lent_bytes:
            self._free.pop(0)


def _rounded(nbytes: int) -> int:
    """``nbytes`` rounded up by at most an eighth, so that sizes that vary a little share blocks."""
    step = max(mmap.PAGESIZE, 1 << (nbytes.bit_length() - 4))
    return -(-nbytes // step) * step
