"""Memory that a caller may use as scratch: what ``get_local_buffer_tensor`` returns.

DeepEP returns the very memory through which its ranks talk. Callers zero it, all of it, at any
moment, so here they get memory that no rank and no kernel ever looks at.
"""

from __future__ import annotations

import mmap

import torch

from fanfold.errors import UsageError
from fanfold.letting_go import let_go

__all__ = ["Scratch"]


class Scratch:
    """Up to ``nbytes`` of a caller's own, allocated as far as anybody has asked.

    On the CPU all of it is reserved at once, of which a page that nobody touches costs nothing. A
    GPU has no such pages: there a request that reaches further than all before it moves the content
    to a larger allocation, and earlier tensors keep the smaller one.

    Args:
        nbytes: all there may be.
        device: where.
    """

    def __init__(self, nbytes: int, device: torch.device) -> None:
        self.nbytes = nbytes
        self._device = device
        self._memory: torch.Tensor | None = None

    def bytes(self, begin: int, end: int) -> torch.Tensor:
        """``[end - begin]`` uint8: the bytes from ``begin`` on; at first with any content.

        Raises:
            UsageError: the memory must grow, and a CUDA graph is being captured.
        """
        memory = self._memory
        if memory is None or end > memory.numel():
            memory = self._memory = self._larger(end)
        return memory[begin:end]

    def release(self) -> None:
        """Drops the memory once its device is idle; tensors over it keep it."""
        memory, self._memory = self._memory, None
        if memory is not None and memory.is_cuda:
            let_go(self._device, (memory,))

    def _larger(self, end: int) -> torch.Tensor:
        """Memory of ``end`` bytes or more that begins with the content there is."""
        if self._device.type == "cpu":
            if self.nbytes == 0:
                return torch.empty(0, dtype=torch.uint8, device=self._device)
            pages = mmap.mmap(-1, self.nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            return torch.frombuffer(pages, dtype=torch.uint8)
        if self._device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise UsageError(
                f"get_local_buffer_tensor must allocate {end} bytes, which a CUDA graph cannot "
                "hold; ask for them once before the capture"
            )
        larger = torch.empty(end, dtype=torch.uint8, device=self._device)
        smaller = self._memory
        if smaller is not None:
            larger[: smaller.numel()].copy_(smaller)
            self.release()
        return larger
