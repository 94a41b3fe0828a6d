"""DeepEP's ``Buffer``: construction, tuning and what is common to both modes."""

from __future__ import annotations

import warnings
from typing import Any, ClassVar

import torch
import torch.distributed as dist

from fanfold.config import Config as Settings
from fanfold.config import Overrides
from fanfold.copying import not_copied
from fanfold.deep_ep.events import EventHandle, EventOverlap
from fanfold.deep_ep.high_throughput import HighThroughputCalls
from fanfold.deep_ep.low_latency import LowLatencyCalls
from fanfold.deep_ep.names import GEOMETRY
from fanfold.deep_ep.runtime import Runtime, Sizes
from fanfold.deep_ep.sizes import (
    Config,
    check_count,
    combine_config,
    dispatch_config,
    hint_bytes,
    promised_top_k,
)
from fanfold.errors import ArgumentError, UsageError
from fanfold.geometry import Geometry
from fanfold.group import agree, as_group, together
from fanfold.memory.hosts import find_hosts
from fanfold.representation import described, worded

__all__ = ["Buffer", "get_logical_domain_size", "get_physical_domain_size"]


@not_copied(
    why="it holds memory that the ranks of its group share",
    instead="Make one in each process with the same arguments.",
)
class Buffer(LowLatencyCalls, HighThroughputCalls):
    """Memory shared by the ranks of a group, and DeepEP's calls over it. Making one is collective.

    One Buffer serves both modes: high throughput (``dispatch``, ``combine``) streams through
    ``num_nvl_bytes``, so any tensor passes through any size; low latency (``low_latency_*``) lives
    in ``num_rdma_bytes``, which must hold its geometry.

    Where each rank has a GPU of its own as current CUDA device, both run there and take tensors
    there; else they run on the host and take CPU tensors. High throughput needs compute capability
    9.0 and GPUs of one host; without, it runs on the host and takes tensors of any device, which it
    copies there and back.

        >>> nbytes = fanfold.deep_ep.Buffer.get_low_latency_rdma_size_hint(16, 64, group.size(), 8)
        >>> buffer = fanfold.deep_ep.Buffer(group, num_rdma_bytes=nbytes, low_latency_mode=True)
        >>> x = torch.ones((4, 64), dtype=torch.bfloat16, device=buffer.device)
        >>> topk_idx = torch.tensor([[0, 5]] * 4, device=buffer.device)
        >>> topk_weights = torch.ones((4, 2), device=buffer.device)
        >>> rows, counts, handle, event, hook = buffer.low_latency_dispatch(
        ...     x, topk_idx, 16, 8, use_fp8=False
        ... )
        >>> out, event, hook = buffer.low_latency_combine(rows, topk_idx, topk_weights, handle)
        >>> float(out[0, 0])
        2.0

    Args:
        group: a torch.distributed group of any backend; or None with ``comm``.
        num_nvl_bytes: memory per rank for high throughput; 0 without it. On GPUs at most
            ``ring_bytes`` for each rank are used of it.
        num_rdma_bytes: memory per rank for low latency; 0 without it.
        low_latency_mode: whether low-latency calls may be made.
        num_qps_per_rank: above 0. Shared memory has no queue pairs, so the number does not matter.
        allow_nvlink_for_low_latency_mode: either; there is no NVLink to use or to avoid.
        allow_mnnvl: either, likewise.
        explicitly_destroy: whether ``destroy`` will be called; otherwise memory goes with the
            object.
        enable_shrink: mask a rank that is late in a low-latency call, instead of raising
            PeerTimeout, and allow the mask calls.
        comm: an mpi4py communicator, in case there is no group.
        use_fabric: either; there is no fabric memory.
        is_intranode: either: UCCL-EP's, whether all ranks are on one host, which is found out.

    Attributes:
        num_sms: of the class: SMs that high throughput takes on GPUs, and twice the channels in its
            handles.
        group, group_size: as given, and its size; ``rank`` is this rank of it.
        num_nvl_bytes, num_rdma_bytes, low_latency_mode, explicitly_destroy, enable_shrink: as
            given.
        device: where calls on GPUs, and low latency on the host, take tensors.
        runtime: the memory; None once destroyed.

    Raises:
        ArgumentError: a bad argument, or ranks that disagree about one; on all ranks alike.
        UnavailableError: the ranks cannot share memory, or the setting ``backend`` is ``"cuda"``
            and they cannot run on their GPUs.
    """

    num_sms: ClassVar[int] = 20

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        num_nvl_bytes: int = 0,
        num_rdma_bytes: int = 0,
        low_latency_mode: bool = False,
        num_qps_per_rank: int = 24,
        allow_nvlink_for_low_latency_mode: bool = True,
        allow_mnnvl: bool = False,
        explicitly_destroy: bool = False,
        enable_shrink: bool = False,
        comm: Any = None,
        *,
        use_fabric: bool = False,
        is_intranode: bool = False,
    ) -> None:
        self.runtime: Runtime | None = None
        self.explicitly_destroy = explicitly_destroy
        del allow_nvlink_for_low_latency_mode, allow_mnnvl, use_fabric, is_intranode
        if group is None and comm is None:
            raise ArgumentError("group", None, "a torch.distributed group, or None with comm=")
        ranks = as_group(group, None if group is not None else comm)
        self.group = group if group is not None else comm
        self.rank, self.group_size = ranks.rank, ranks.size
        self.num_nvl_bytes, self.num_rdma_bytes = num_nvl_bytes, num_rdma_bytes
        self.low_latency_mode = low_latency_mode
        self.enable_shrink = enable_shrink
        with together(ranks) as ranks:
            check_count("num_nvl_bytes", num_nvl_bytes, 0)
            check_count("num_rdma_bytes", num_rdma_bytes, 0)
            check_count("num_qps_per_rank", num_qps_per_rank, 1)
            values: dict[str, object] = {
                "num_nvl_bytes": num_nvl_bytes,
                "num_rdma_bytes": num_rdma_bytes,
                "low_latency_mode": low_latency_mode,
                "enable_shrink": enable_shrink,
            }
            agree(ranks, values)
            masks: Overrides = {}
            if enable_shrink and low_latency_mode:
                masks["late_peers"] = "mask"
            runtime = Runtime(
                ranks, Sizes(num_nvl_bytes, num_rdma_bytes), Settings.resolve(**masks)
            )
        self.runtime, self.device = runtime, runtime.choice.device
        self._measured = runtime.owner, runtime.counting
        calls = ("dispatch", "combine", "low_latency_dispatch", "low_latency_combine")
        self._calls = dict.fromkeys(calls, 0)
        super().__init__()

    def destroy(self) -> None:
        """Releases the memory; afterwards every call raises UsageError. Not collective.

        Raises:
            UsageError: without ``explicitly_destroy``, or destroyed already.
        """
        if not self.explicitly_destroy:
            raise UsageError(
                "destroy() needs a Buffer made with explicitly_destroy=True; without it the memory "
                "goes with the object"
            )
        self._open().close()
        self.runtime = None

    def reset_rdma_buffer(self) -> None:
        """Fills what ``get_local_buffer_tensor(use_rdma_buffer=True)`` returns with zeros, if that
        was asked for before. UCCL-EP's; no other call of this Buffer needs it. Local.

        Raises:
            UsageError: destroyed.
        """
        self._open().clear_scratch()

    def connect_atomic_buffer(self, proxy: object) -> None:
        """Does nothing: UCCL-EP's, whose signals have a buffer of their own.

        Args:
            proxy: either.
        """
        del proxy

    def __repr__(self) -> str:
        state = "destroyed" if getattr(self, "runtime", self) is None else ""
        names = ("rank", "group_size", "num_nvl_bytes", "num_rdma_bytes", "low_latency_mode")
        paths = {name: name for name in (*names, "enable_shrink", "device")}
        return described(self, state, **paths, backend="runtime.choice.backend")

    def __del__(self) -> None:
        runtime: Runtime | None = getattr(self, "runtime", None)
        if runtime is not None and self.explicitly_destroy and not runtime.owner.forked:
            warnings.warn(
                "a Buffer made with explicitly_destroy=True was dropped without destroy()",
                ResourceWarning,
                stacklevel=2,
            )

    @staticmethod
    def is_sm90_compiled() -> bool:
        """Whether what DeepEP builds for SM90 only (fp8, low latency) is there: yes, always."""
        return True

    @staticmethod
    def set_num_sms(new_num_sms: int) -> None:
        """Sets ``Buffer.num_sms``, from which the default configurations take it.

        Args:
            new_num_sms: even, from 0.
        """
        check_count("new_num_sms", new_num_sms, 0)
        if new_num_sms % 2:
            raise ArgumentError("new_num_sms", new_num_sms, "even: a channel has two")
        Buffer.num_sms = new_num_sms

    @staticmethod
    def capture() -> EventOverlap:
        """An event of all work so far, for ``previous_event``."""
        return EventOverlap(EventHandle())

    @staticmethod
    def get_low_latency_rdma_size_hint(
        num_max_dispatch_tokens_per_rank: int, hidden: int, num_ranks: int, num_experts: int
    ) -> int:
        """Bytes to pass as ``num_rdma_bytes`` for low-latency calls of this geometry.

        Enough on the host and on GPUs. With M = num_max_dispatch_tokens_per_rank and slot = 2 *
        hidden rounded up to 16 bytes, the host needs ``2 * num_ranks * M * (2 * slot + 8 * K +
        1)``, each of the five terms rounded up to 128 (docs/low_latency.md); GPUs need more only
        where hidden is small. K is the top-k it is enough for: 32, or less where that would exceed
        DeepEP's own buffer (docs/deep_ep.md).

        Args:
            num_max_dispatch_tokens_per_rank: most tokens of one rank in one call.
            hidden: columns of a row.
            num_ranks: size of the group.
            num_experts: of all ranks.
        """
        check_count("num_ranks", num_ranks, 1)
        sizes = (hidden, num_max_dispatch_tokens_per_rank)
        with GEOMETRY:
            Geometry(num_ranks, num_experts, 1, *sizes)  # before anything is made of wrong sizes
        top_k = promised_top_k(num_max_dispatch_tokens_per_rank, hidden, num_ranks, num_experts)
        return hint_bytes(Geometry(num_ranks, num_experts, top_k, *sizes))

    @staticmethod
    def get_dispatch_config(num_ranks: int) -> Config:
        """The configuration that dispatch uses when it is given none.

        Args:
            num_ranks: any; where DeepEP has no entry, that of the next larger number.
        """
        return dispatch_config(Buffer.num_sms, num_ranks)

    @staticmethod
    def get_combine_config(num_ranks: int) -> Config:
        """The configuration that combine uses when it is given none.

        Args:
            num_ranks: any; where DeepEP has no entry, that of the next larger number.
        """
        return combine_config(Buffer.num_sms, num_ranks)

    def get_comm_stream(self) -> Any:
        """The stream of calls on GPUs with ``async_finish``: a ``torch.cuda.Stream``; where calls
        run on the host, ``torch.cpu.Stream``, which has no queue."""
        return self._open().streams.comm

    def get_local_buffer_tensor(
        self,
        dtype: torch.dtype,
        size: torch.Size | None = None,
        offset: int = 0,
        use_rdma_buffer: bool = False,
    ) -> torch.Tensor:
        """Scratch memory as large as one mode's, the same at every call.

        The memory is the caller's alone: no call reads or writes it, so it may be written at any
        time, and kept after ``destroy``. It is allocated at the first call, on the mode's device,
        as ``num_nvl_bytes`` or ``num_rdma_bytes`` more than the modes themselves take.

        Args:
            dtype: of the tensor.
            size: its shape; flat and all there is from ``offset`` on, if not given.
            offset: elements to leave out at the beginning.
            use_rdma_buffer: as large as ``num_rdma_bytes`` and where low latency runs, instead of
                ``num_nvl_bytes`` and where high throughput runs.

        Raises:
            ArgumentError: more is asked for than there is.
            UsageError: destroyed, or a CUDA graph is being captured and memory must be allocated.
        """
        if not isinstance(dtype, torch.dtype):
            raise ArgumentError("dtype", worded(dtype), "a torch.dtype")
        check_count("offset", offset, 0)
        tensor = self._open().local_tensor(dtype, offset, use_rdma_buffer)
        if size is None:
            return tensor
        try:
            wanted = torch.Size(size)
        except TypeError:
            bound = "a torch.Size, or None for all there is"
            raise ArgumentError("size", worded(size), bound) from None
        if wanted.numel() > tensor.numel():
            bound = f"at most the {tensor.numel()} elements there are"
            raise ArgumentError("size", f"{tuple(wanted)}, {wanted.numel()} elements", bound)
        return tensor[: wanted.numel()].view(wanted)


def get_physical_domain_size(group: dist.ProcessGroup) -> tuple[int, int]:
    """Hosts of a group, and ranks of it on each. Collective.

        >>> fanfold.deep_ep.get_physical_domain_size(group)
        (1, 1)

    Args:
        group: a torch.distributed group.

    Raises:
        ArgumentError: hosts have different numbers of ranks.
    """
    hosts = find_hosts(as_group(group), Settings.resolve())
    counts = {hosts.host.count(host) for host in hosts.host}
    if len(counts) != 1:
        raise ArgumentError("group", f"of hosts with {sorted(counts)} ranks", "spread evenly")
    return hosts.count, counts.pop()


def get_logical_domain_size(
    group: dist.ProcessGroup, allow_hybrid_mode: bool = True
) -> tuple[int, int]:
    """Scale-out and scale-up ranks of a group. Collective.

        >>> fanfold.deep_ep.get_logical_domain_size(group)
        (1, 1)

    Args:
        group: a torch.distributed group.
        allow_hybrid_mode: whether to tell hosts apart; if not, all ranks are one scale-up domain.
    """
    hosts, per_host = get_physical_domain_size(group)
    return (hosts, per_host) if allow_hybrid_mode else (1, hosts * per_host)
