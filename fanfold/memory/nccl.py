"""Symmetric memory between the GPUs of one host, from NCCL: its windows.

Kernels load from and store to the peers' memory by address, as in PyTorch's symmetric memory; NCCL
allocates it and maps it. The window is one of a communicator of its own.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from fanfold.copying import not_copied
from fanfold.deferred_free import free_when_idle
from fanfold.errors import FanfoldError, SystemFailure, UnavailableError
from fanfold.group import Group, agree, in_one_process
from fanfold.memory.gpu_regions import GpuRegions
from fanfold.nccl.communicator import NO_WINDOW, Communicator
from fanfold.nccl.library import NcclLibrary, loaded, version_text

__all__ = ["NcclSymmetricMemory", "Window", "agreed", "library_for", "tensor_over"]

_LOG = logging.getLogger(__name__)
_Made = TypeVar("_Made")

# Of the structure that a window's handle points to, in 2.28.9, which has no function that gives the
# addresses: where rank 0's memory is mapped, and how many times 4 GiB the next rank's is behind it.
_FIRST_ADDRESS, _STRIDE, _WINDOW_BYTES = slice(8, 16), slice(24, 28), 40


class _Span:
    """Memory of a GPU as PyTorch takes it; a tensor over it keeps ``owner``."""

    def __init__(self, address: int, nbytes: int, owner: object) -> None:
        self.owner = owner
        self.__cuda_array_interface__: dict[str, Any] = {
            "shape": (nbytes,), "typestr": "|u1", "data": (address, False), "version": 3,
        }  # fmt: skip


def tensor_over(address: int, nbytes: int, device: torch.device, owner: object) -> torch.Tensor:
    """``[nbytes]`` uint8 over memory of a GPU that lasts as long as ``owner``."""
    span = _Span(address, nbytes, owner)
    tensor = torch.as_tensor(span, dtype=torch.uint8, device=device)
    if tensor.data_ptr() != address:
        raise UnavailableError(
            f"PyTorch takes the memory at {address:#x} for another device's than {device}, and "
            "copies it"
        )
    return tensor


@not_copied(
    why="it maps the memory of other processes' GPUs",
    instead="Make one in each process; construction is collective.",
)
class NcclSymmetricMemory(GpuRegions):
    """The :class:`fanfold.memory.GpuPeerMemory` of the ranks' current CUDA devices, whose memory is
    NCCL's. Construction is collective.

    Args:
        group: the ranks, each with a GPU of its own, or a rank alone.
        bytes_per_rank: size of each region.
        timeout_s: seconds that NCCL may wait for the other ranks.

    Raises:
        UnavailableError: this process has no NCCL with windows, ranks are threads that share a GPU,
            or NCCL does not let all ranks reach each other's memory.
        SystemFailure: the device has not that much memory.
        ArgumentError: the ranks ask for different sizes, or have different versions of NCCL.
        FanfoldError: another rank failed in one of these ways.
    """

    def __init__(self, group: Group, bytes_per_rank: int, timeout_s: float) -> None:
        super().__init__(group, bytes_per_rank)
        error: Exception | None = None
        library = None
        try:
            library = library_for(group)
        except FanfoldError as failure:
            error = failure
        version = None if library is None else version_text(library.version)
        agree(group, {"bytes_per_rank": bytes_per_rank, "NCCL's version": version}, error)
        assert library is not None
        window = Window(group)
        try:
            window.open(library, bytes_per_rank, timeout_s)
            self._bases = agreed(group, lambda: window.addresses(self.device))
            owner = _Owner(self.device, window)
            self._tensor = agreed(
                group,
                lambda: tensor_over(self._bases[self.rank], bytes_per_rank, self.device, owner),
            )
        except BaseException:
            self._bases = []
            window.close()
            raise
        self._keep(self._tensor)


def agreed(group: Group, make: Callable[[], _Made]) -> _Made:
    """What ``make`` returns, or on all ranks an error if it raises one on any."""
    made: list[_Made] = []
    error: Exception | None = None
    try:
        made.append(make())
    except Exception as failure:
        error = failure
    agree(group, {}, error)
    return made[0]


def library_for(group: Group) -> NcclLibrary:
    """The NCCL of this process, for windows of these ranks.

    Raises:
        UnavailableError: there is none, it is too old, or the ranks are threads.
    """
    if group.size > 1 and in_one_process(group):
        raise UnavailableError(
            "NCCL wants a GPU for each rank, but the ranks are threads that share one: take "
            "PyTorch's memory (FANFOLD_GPU_MEMORY=torch)"
        )
    library = loaded()
    library.require("windows")
    return library


class Window:
    """One window, what it needs, and their end.

    Args:
        group: its ranks.
        in_reach: whether kernels of each rank must reach the memory of all.

    Attributes:
        communicator: of the ranks, once the window is open.
        address: of the own memory.
        handle: of the window.
    """

    communicator: Communicator

    def __init__(self, group: Group, *, in_reach: bool = True) -> None:
        self._group, self._in_reach = group, in_reach
        self.address = self.handle = 0

    def open(self, library: NcclLibrary, nbytes: int, timeout_s: float) -> None:
        """Makes it. Collective: what one rank cannot do, none does."""
        agreed(self._group, lambda: self._connect(library, timeout_s))
        agreed(self._group, lambda: self._allocate(nbytes))
        agreed(self._group, lambda: self._register(nbytes))

    def _connect(self, library: NcclLibrary, timeout_s: float) -> None:
        self.communicator = Communicator(library, self._group, timeout_s)

    def _allocate(self, nbytes: int) -> None:
        reached, ranks = self.communicator.ranks_within_reach(), self._group.size
        if self._in_reach and reached != ranks:
            raise UnavailableError(
                f"NCCL lets rank {self._group.rank} reach the memory of {reached} of {ranks} "
                "ranks: they are on several hosts, GPUs lack peer access, or NCCL_HOSTID, "
                "NCCL_P2P_DISABLE or NCCL_CUMEM_ENABLE make it so. Take PyTorch's memory "
                "(FANFOLD_GPU_MEMORY=torch)"
            )
        try:
            self.address = self.communicator.allocate(nbytes)
        except UnavailableError as failure:
            raise SystemFailure(
                f"rank {self._group.rank} got no {nbytes} bytes of NCCL's memory ({failure}): free "
                "memory of its GPU, or lower max_tokens"
            ) from failure

    def _register(self, nbytes: int) -> None:
        self.handle = self.communicator.register(self.address, nbytes)

    def addresses(self, device: torch.device) -> list[int]:
        """Of all ranks' memory, as this rank's kernels reach it."""
        ranks = range(self._group.size)
        if self.communicator.library.has("host_pointers"):
            return [self.communicator.address_of(self.handle, peer) for peer in ranks]
        try:
            words = tensor_over(self.handle, _WINDOW_BYTES, device, self).cpu()
        except RuntimeError as failure:  # a handle of another kind, in memory of the CPU
            raise UnavailableError(
                f"{self.communicator.library} gives no window that kernels reach: {NO_WINDOW}"
            ) from failure
        first = int(words[_FIRST_ADDRESS].view(torch.int64))
        stride = int(words[_STRIDE].view(torch.int32)) << 32
        return [first + peer * stride for peer in ranks]

    def close(self) -> None:
        """Lets go of all of it, as far as NCCL does."""
        communicator = self.__dict__.pop("communicator", None)
        if communicator is None:
            return
        for part, end in (
            (self.handle, communicator.deregister),
            (self.address, communicator.free),
        ):
            if part:
                try:
                    end(part)
                except UnavailableError as failure:
                    _LOG.warning("memory of a GPU is lost: %s", failure)
        self.address = self.handle = 0
        communicator.close()


class _Closing:
    """Closes a window when the last reference to this goes."""

    def __init__(self, window: Window) -> None:
        self._window = window

    def __del__(self) -> None:
        if not sys.is_finalizing():  # the end of the process frees all
            self._window.close()


class _Owner:
    """Whoever uses a window's memory: results that a caller has may outlast the object that made
    them. When the last one is gone, the window closes once the device is idle."""

    def __init__(self, device: torch.device, window: Window) -> None:
        self._device, self._closing = device, _Closing(window)

    def __del__(self) -> None:
        closing = self.__dict__.pop("_closing", None)
        if closing is not None and not sys.is_finalizing():
            free_when_idle(self._device, closing)
