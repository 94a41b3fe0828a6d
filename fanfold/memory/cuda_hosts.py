"""Symmetric memory of the GPUs of several hosts: ranks of one host reach each other's GPUs, and
those of other hosts through a :class:`fanfold.memory.BetweenHosts`."""

from __future__ import annotations

import contextlib
import weakref

import torch

from fanfold import _core
from fanfold.copying import not_copied
from fanfold.deferred_free import free_when_idle
from fanfold.memory import BetweenHosts, GpuPeerMemory, PeerMemory
from fanfold.memory.cuda import wait_for_kernels
from fanfold.memory.host import SymmetricMemory
from fanfold.representation import described

__all__ = ["CudaMemoryAcrossHosts", "counting_cores"]

_Core = _core.SymmetricMemory


def counting_cores(*memories: PeerMemory) -> tuple[_Core | None, list[_Core]]:
    """What counts the waits and rows of memories, of which one at most does, and what counts for
    their proxies."""
    host, proxies = None, []
    for memory in memories:
        if isinstance(memory, SymmetricMemory):
            host = memory.core
            proxies.append(host)
        elif isinstance(memory, CudaMemoryAcrossHosts) and memory.between.core is not None:
            proxies.append(memory.between.core)
    return host, proxies


@not_copied(
    why="it maps the memory of other processes",
    instead="Make one in each process; construction is collective.",
)
class CudaMemoryAcrossHosts:
    """The :class:`fanfold.memory.GpuPeerMemory` of ranks on several hosts. It takes over what it is
    made of, and closes it.

    Args:
        gpu: of the ranks of this host, in their order.
        between: what is between the hosts, for that device.

    Attributes:
        group, rank, ranks: all of them.
        device: of ``gpu``.
        between: as given.
    """

    def __init__(self, gpu: GpuPeerMemory, between: BetweenHosts) -> None:
        self.group, self.rank, self.ranks = between.group, between.group.rank, between.group.size
        self.device = gpu.device
        self.between = between
        self._gpu, self._closed = gpu, False
        members = between.hosts.members(self.rank)
        self._place = {peer: place for place, peer in enumerate(members)}
        # Kernels in flight may outlive this object.
        self._end = weakref.finalize(self, free_when_idle, self.device, self.between)
        self._end.atexit = False

    @property
    def usable_bytes(self) -> int:
        """Of a region on a GPU."""
        return self._gpu.usable_bytes

    @property
    def bytes_per_rank(self) -> int:
        """Of a region on a GPU, and of what is between the hosts."""
        return self._gpu.bytes_per_rank + self.between.bytes_per_rank

    @property
    def tensor(self) -> torch.Tensor:
        """The own region on the GPU, as :class:`GpuPeerMemory` has it."""
        return self._gpu.tensor

    @property
    def network(self) -> str:
        """What carries between hosts, such as ``"libfabric:tcp"``."""
        return self.between.network

    def base(self, peer: int) -> int:
        """Where this rank's kernels store what ``peer`` shall have: in its GPU's memory or, for a
        rank on another host, in memory from which that is sent.

        Raises:
            UsageError: closed, or in a forked child.
        """
        place = self._place.get(peer)
        if place is not None:
            return self._gpu.base(place)
        self._gpu.base(self._place[self.rank])  # raises if it is closed
        return self.between.base(peer)

    def close(self) -> None:
        """Waits for the kernels of this rank and, for some seconds at most, for peers on other
        hosts to close theirs, then lets go of all. Harmless when repeated; while a CUDA graph is
        captured it waits for nothing, and lets go once the GPU is idle."""
        self._gpu.close()
        if self._closed:
            return
        self._closed = True
        if torch.cuda.is_current_stream_capturing():
            self._end()
            return
        self._end.detach()
        with contextlib.suppress(RuntimeError):  # CUDA is lost, so no kernel runs
            wait_for_kernels(self)
        self.between.close()

    def __repr__(self) -> str:
        state = "closed" if self._closed else ""
        names = ("rank", "ranks", "bytes_per_rank", "device")
        return described(self, state, **{name: name for name in names})
