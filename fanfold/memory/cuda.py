"""Symmetric memory between the GPUs of one host, from PyTorch.

Every rank owns one region of its GPU's memory and has the regions of all its peers mapped, so that
a kernel reads and writes them by address. PyTorch allocates, exchanges handles and maps
(``torch.distributed._symmetric_memory``). Ranks of one process need nothing of that: one alone, or
threads on one GPU (:mod:`fanfold.thread_ranks`), whose kernels run at the same time, each rank's on
a stream and on a share of the SMs of its own.
"""

from __future__ import annotations

import contextlib
import importlib
from types import ModuleType
from typing import Any

import torch

from fanfold.config import symmetric_memory_environment
from fanfold.copying import not_copied
from fanfold.errors import FanfoldError, SystemFailure, UnavailableError
from fanfold.group import Group, agree, in_one_process, process_group
from fanfold.memory import PeerMemory
from fanfold.memory.gpu_regions import GpuRegions

__all__ = ["CudaSymmetricMemory", "are_threads", "own_sms", "unavailable", "wait_for_kernels"]

_MODULE = "torch.distributed._symmetric_memory"


def _allocator() -> Any:
    """PyTorch's class of symmetric memory.

    Raises:
        UnavailableError: this PyTorch has none.
    """
    module: ModuleType | None = None
    with contextlib.suppress(ImportError):
        module = importlib.import_module(_MODULE)
    allocator = getattr(module, "_SymmetricMemory", None)
    missing = [name for name in ("empty_strided_p2p", "rendezvous") if not hasattr(allocator, name)]
    if missing:
        raise UnavailableError(
            f"PyTorch {torch.__version__} has no {_MODULE} with {' and '.join(missing)}, from "
            "which Fanfold takes memory that GPUs share: install PyTorch 2.6 or later with CUDA, "
            "or use the host backend (backend='host', FANFOLD_BACKEND=host)"
        )
    return allocator


def unavailable(group: Group) -> str | None:
    """Why there can be no such memory between these ranks, whatever their devices; None if not."""
    try:
        _check_meeting(group)
    except UnavailableError as error:
        return str(error)
    return None


def are_threads(group: Group) -> bool:
    """Whether the ranks are several threads of one process, which share a GPU."""
    return group.size > 1 and in_one_process(group)


def own_sms(memory: PeerMemory) -> int:
    """The SMs that kernels of this rank may hold. Every kernel waits for kernels of the other
    ranks, so those of threads must all fit on their GPU together."""
    sms = torch.cuda.get_device_properties(memory.device.index).multi_processor_count
    return int(sms) // (memory.ranks if are_threads(memory.group) else 1)


def wait_for_kernels(memory: PeerMemory) -> None:
    """Waits for the kernels of this rank: for all of its GPU or, if ranks are threads, for those on
    the current stream. Other ranks' kernels may wait for the next one of this rank.
    """
    if are_threads(memory.group):
        torch.cuda.current_stream(memory.device).synchronize()
    else:
        torch.cuda.synchronize(memory.device)


def _check_meeting(group: Group) -> None:
    """Raises UnavailableError unless the ranks can meet on their GPUs."""
    if are_threads(group) and torch.cuda.current_stream() == torch.cuda.default_stream():
        raise UnavailableError(
            f"the {group.size} ranks are threads of one process, and the current stream of rank "
            f"{group.rank} is its GPU's default one, on which kernels of ranks would wait for each "
            "other: start the ranks with fanfold.thread_ranks.ThreadRanks(ranks) where "
            "FANFOLD_BACKEND is not 'host', which gives each a stream, or use the host backend"
        )
    if in_one_process(group):
        return
    _allocator()
    if process_group(group) is None:
        raise UnavailableError(
            "ranks meet on their GPUs through a torch.distributed group, which an mpi4py "
            "communicator (or a group object of another kind) is not: call "
            "torch.distributed.init_process_group in each process (fanfold.launch.join() does so "
            "under mpirun and srun) and pass that group, or use the host backend "
            "(backend='host', FANFOLD_BACKEND=host)"
        )


@not_copied(
    why="it maps the memory of other processes' GPUs",
    instead="Make one in each process; construction is collective.",
)
class CudaSymmetricMemory(GpuRegions):
    """The :class:`fanfold.memory.GpuPeerMemory` of the ranks' current CUDA devices. Construction is
    collective.

    Args:
        group: the ranks; a torch.distributed group of any backend, threads of one process on one
            GPU, or a rank alone.
        bytes_per_rank: size of each region.

    Attributes:
        device: of the own region.
        rank, ranks, group: as given.
        bytes_per_rank: as given.

    Raises:
        UnavailableError: PyTorch lacks symmetric memory, the group is none of torch.distributed, or
            the GPUs do not reach each other's memory.
        SystemFailure: the device has not that much memory.
        ArgumentError: the ranks ask for different sizes.
        FanfoldError: another rank failed in one of these ways, or did not come.
    """

    def __init__(self, group: Group, bytes_per_rank: int) -> None:
        super().__init__(group, bytes_per_rank)
        self._handle: Any = None  # keeps the peers' regions mapped
        try:
            self._open()
        except RuntimeError as failure:
            self._handle = self._tensor = None
            if isinstance(failure, FanfoldError):
                raise
            raise self._absent(failure) from failure
        self._keep((self._handle, self._tensor))
        self._handle = None

    def _open(self) -> None:
        error: Exception | None = None
        try:
            self._tensor = self._allocate()
        except FanfoldError as failure:
            error = failure
        # From here on all ranks are known to be there, so the rendezvous is a matter of moments.
        agree(self.group, {"bytes_per_rank": self.bytes_per_rank}, error)
        if in_one_process(self.group):
            self._bases = self.group.all_gather(self.tensor.data_ptr())
            return
        indices = self.group.all_gather(self.device.index)
        with symmetric_memory_environment(same_index=len(set(indices)) < self.ranks):
            self._bases = self._map()

    def _allocate(self) -> torch.Tensor:
        size = (self.bytes_per_rank,)
        _check_meeting(self.group)
        try:
            if in_one_process(self.group):
                return torch.empty(size, dtype=torch.uint8, device=self.device)
            # Not torch's empty(): that draws from a pool, which may hand out a region that some
            # ranks have shared before and others have not, and these would wait for each other.
            allocate = _allocator().empty_strided_p2p
            return allocate(size, (1,), torch.uint8, self.device)  # type: ignore[no-any-return]
        except RuntimeError as failure:
            if isinstance(failure, FanfoldError):
                raise
            raise SystemFailure(
                f"rank {self.rank} got no {self.bytes_per_rank} bytes of symmetric memory on "
                f"{self.device} ({_headline(failure)}): free memory there, or lower max_tokens"
            ) from failure

    def _map(self) -> list[int]:
        """Addresses of all ranks' regions in this process. Collective."""
        error: Exception | None = None
        offset = 0
        try:
            meeting = process_group(self.group)
            assert meeting is not None
            self._handle = _allocator().rendezvous(self.tensor, meeting.group_name)
            # The handle tells where allocations begin, of which the tensor may be a part.
            offset = self.tensor.data_ptr() - int(self._handle.buffer_ptrs[self.rank])
        except (RuntimeError, AssertionError) as failure:
            error = self._explain(failure)
        offsets = self.group.all_gather(offset)
        agree(self.group, {}, error)
        pointers = self._handle.buffer_ptrs
        return [int(pointers[peer]) + offsets[peer] for peer in range(self.ranks)]

    def _explain(self, failure: Exception) -> FanfoldError:
        text = str(failure).lower()
        if "timeout" in text or "timed out" in text:
            return self._absent(failure)
        others = [peer for peer in range(self.ranks) if peer != self.rank]
        return UnavailableError(
            f"rank {self.rank} could not map the memory of ranks {others} from {self.device} "
            f"({_headline(failure)}): the GPUs need peer access (nvidia-smi topo -p2p r says OK) "
            "and the processes one PID namespace and user; use the host backend otherwise "
            "(backend='host', FANFOLD_BACKEND=host)"
        )

    def _absent(self, failure: Exception) -> FanfoldError:
        others = [peer for peer in range(self.ranks) if peer != self.rank]
        return FanfoldError(
            f"rank {self.rank} waited in vain for one of the ranks {others} to share symmetric "
            f"memory ({_headline(failure)}): it has ended or is in another call; look for its "
            "error. How long such a wait lasts is the timeout of the torch.distributed group "
            "(init_process_group, new_group)"
        )


def _headline(failure: Exception) -> str:
    """The first line of what PyTorch says, without its stack of C++ calls."""
    lines = str(failure).strip().splitlines()
    return lines[0] if lines else type(failure).__name__
