"""DeepEP's second interface, ``ElasticBuffer``: one pair of calls for training, prefill and decode,
over :mod:`fanfold.backends.high_throughput`."""

from __future__ import annotations

import warnings
from typing import Any

import torch
import torch.distributed as dist

from fanfold.backends.choose import BackendChoice, choose
from fanfold.backends.high_throughput import HostHighThroughput, Rows
from fanfold.backends.high_throughput.cuda import CudaHighThroughput
from fanfold.backends.high_throughput.kernels import DEFAULT_MOST_CTAS
from fanfold.backends.opening import open_high_throughput
from fanfold.config import Config as Settings
from fanfold.config import Overrides
from fanfold.copying import not_copied
from fanfold.deep_ep import elastic_calls
from fanfold.deep_ep.base import Counted
from fanfold.deep_ep.elastic_calls import Asked, Call, Event, check_whole
from fanfold.deep_ep.ep_handle import EPHandle
from fanfold.deep_ep.events import EventHandle, EventOverlap
from fanfold.deep_ep.few_tokens import FewTokens
from fanfold.deep_ep.routes import Bias
from fanfold.deep_ep.routing_sizes import RoutingSizes
from fanfold.deep_ep.streams import HostStreams, Streams
from fanfold.errors import ArgumentError, UsageError
from fanfold.forks import Owner
from fanfold.geometry import MAX_TOKENS
from fanfold.group import Group, agree, as_group, together
from fanfold.memory.hosts import find_hosts
from fanfold.representation import described

__all__ = ["ElasticBuffer"]

BUFFER_ALIGNMENT = 1 << 21
"""Bytes that sizes of DeepEP's buffers are multiples of."""

_DEFAULT_TIMEOUT_S = 100
_MOST_TOKENS = 65536  # of a call, where the Buffer is made without a number or with less
_MOST_SMS = 64  # that the kernels take
_QPS = 129  # DeepEP's number where it is given none; nothing here has queue pairs

_ELSEWHERE = "DeepEP's experimental calls beside expert parallelism (engram_*, pp_*, agrs_*, "


@not_copied(
    why="it holds memory that the ranks of its group share",
    instead="Make one in each process with the same arguments.",
)
class ElasticBuffer(Counted):
    """Dispatch and combine with the arguments and results of DeepEP's ``ElasticBuffer``. Making one
    is collective.

    Where each rank has a GPU of its own as current CUDA device, of compute capability 9.0 or later,
    calls run there and take tensors there; else they run on the host, and tensors of any device
    are copied there and back, which is slow. Ranks may be on several hosts where calls run on the
    host.

        >>> buffer = fanfold.deep_ep.ElasticBuffer(group, num_max_tokens_per_rank=8, hidden=64)
        >>> x = torch.ones((4, 64), dtype=torch.bfloat16, device=buffer.device)
        >>> topk_idx = torch.tensor([[0, 5]] * 4, device=buffer.device)
        >>> topk_weights = torch.ones((4, 2), device=buffer.device)
        >>> rows, idx, weights, handle, event = buffer.dispatch(
        ...     x, topk_idx, topk_weights, num_experts=16
        ... )
        >>> rows.shape, weights.tolist()[0]
        (torch.Size([4, 64]), [1.0, 1.0])
        >>> out, _, event = buffer.combine(rows, handle)
        >>> float(out[0, 0])
        1.0

    Args:
        group: a torch.distributed group of any backend.
        num_bytes: of DeepEP's buffer, a multiple of 2 MiB, kept as an attribute: tensors of any
            length stream through the memory of the settings ``ring_bytes`` and ``staging_bytes``.
            Calls of few tokens (the setting ``few_tokens``) have memory of their own.
            What :meth:`get_buffer_size_hint` says, if None.
        num_cpu_bytes: 0; memory for Engram, which is not here.
        num_max_tokens_per_rank: most tokens that a rank passes to a call that is given no such
            number; the same on all ranks.
        hidden, num_topk: either: calls take any.
        use_fp8_dispatch: either: calls take any rows.
        deterministic: either: rows always come in order of source rank and token.
        allow_hybrid_mode: whether :meth:`get_logical_domain_size` tells hosts apart; calls choose
            their way by themselves.
        allow_multiple_reduction: either: the rows of an expanded result are summed for each rank,
            rounded to bfloat16, then over ranks.
        prefer_overlap_with_compute: whether calls that are given no number of SMs leave most of
            them to other work: 24 at most, else 64. Those of few tokens take all SMs.
        sl_idx: from 0 to 15; no network here has service levels.
        num_allocated_qps: from 0; there are no queue pairs.
        num_cpu_timeout_secs: above 0; changes nothing.
        num_gpu_timeout_secs: bound of a call's wait for its peers; 100, DeepEP's default, means the
            setting ``FANFOLD_TIMEOUT_S``, which is 100, too, if it is not set.
        explicitly_destroy: whether :meth:`destroy` will be called; otherwise memory goes with the
            object.

    Attributes:
        group, num_bytes, num_max_tokens_per_rank: as given.
        deterministic, allow_hybrid_mode, allow_multiple_reduction: as given.
        prefer_overlap_with_compute, explicitly_destroy: as given.
        rank_idx, num_ranks: of the group.
        num_scaleout_ranks, num_scaleup_ranks: :meth:`get_logical_domain_size`.
        scaleout_rank_idx, scaleup_rank_idx: this rank's place in them.
        num_rdma_ranks, num_nvlink_ranks: :meth:`get_physical_domain_size`.
        num_allocated_qps: as given, or 129.
        device: where calls take tensors, on GPUs; where the host's results are made.
        runtime: the memory; None once destroyed.

    Raises:
        ArgumentError: a bad argument, or ranks that disagree about one; on all ranks alike.
        UnavailableError: the ranks cannot share memory, or the setting ``backend`` is ``"cuda"``
            and they cannot run on their GPUs.
    """

    runtime: Any

    def __init__(
        self,
        group: dist.ProcessGroup,
        num_bytes: int | None = None,
        num_cpu_bytes: int = 0,
        num_max_tokens_per_rank: int = 0,
        hidden: int = 0,
        num_topk: int = 0,
        use_fp8_dispatch: bool = False,
        deterministic: bool = False,
        allow_hybrid_mode: bool = True,
        allow_multiple_reduction: bool = True,
        prefer_overlap_with_compute: bool = True,
        sl_idx: int = 3,
        num_allocated_qps: int = 0,
        num_cpu_timeout_secs: int = 300,
        num_gpu_timeout_secs: int = 100,
        explicitly_destroy: bool = False,
    ) -> None:
        self.runtime = None
        self.explicitly_destroy = explicitly_destroy
        self._owner = Owner("this ElasticBuffer")
        if group is None:
            raise ArgumentError("group", None, "a torch.distributed group")
        self.group = group
        self.deterministic, self.allow_hybrid_mode = deterministic, allow_hybrid_mode
        self.allow_multiple_reduction = allow_multiple_reduction
        self.prefer_overlap_with_compute = prefer_overlap_with_compute
        self.num_allocated_qps = num_allocated_qps or _QPS
        self.num_max_tokens_per_rank = num_max_tokens_per_rank
        with together(as_group(group)) as ranks:
            self.rank_idx, self.num_ranks = ranks.rank, ranks.size
            check_whole("num_max_tokens_per_rank", num_max_tokens_per_rank, 0, MAX_TOKENS)
            check_whole("sl_idx", sl_idx, 0, 15)
            check_whole("num_allocated_qps", num_allocated_qps, 0)
            check_whole("num_cpu_timeout_secs", num_cpu_timeout_secs, 1)
            check_whole("num_gpu_timeout_secs", num_gpu_timeout_secs, 1)
            _check_bytes(num_bytes, num_cpu_bytes)
            settings: Overrides = {}
            if num_gpu_timeout_secs != _DEFAULT_TIMEOUT_S:
                settings["timeout_s"] = float(num_gpu_timeout_secs)
            config = Settings.resolve(**settings)
            self._find_domains(ranks, config)
            choice = self._open_modes(ranks, config)
        del hidden, num_topk, use_fp8_dispatch
        self._calls = {"dispatch": 0, "combine": 0}
        self._sizes: dict[tuple[object, ...], RoutingSizes] = {}
        self._measured = self._owner, (self.runtime,)
        self.num_bytes = _buffer_bytes(self.num_ranks) if num_bytes is None else num_bytes
        self.device = choice.device
        on_gpu = choice.backend == "cuda"
        self._streams = Streams(choice.device) if on_gpu else HostStreams()
        self._most_sms = DEFAULT_MOST_CTAS if prefer_overlap_with_compute else _MOST_SMS

    def _open_modes(self, ranks: Group, config: Settings) -> BackendChoice:
        """High throughput, and low latency for few tokens."""
        most, few = self.num_max_tokens_per_rank, config.few_tokens
        agree(ranks, {"num_max_tokens_per_rank": most, "few_tokens": few})
        choice = choose(ranks, config, "high_throughput", may_cross_hosts=True)
        self.runtime, self._backend = open_high_throughput(
            ranks, choice, max(_MOST_TOKENS, most), config
        )
        self._few: FewTokens | None = None
        if choice.backend == "cuda" and not choice.across_hosts and few > 0:
            order = getattr(self._backend, "order", None)
            group = as_group(self.group)  # not `ranks`, as its memory is made later
            self._few = FewTokens(group, choice, config, min(most or few, few), order)
        return choice

    def _find_domains(self, ranks: Any, config: Settings) -> None:
        hosts = find_hosts(ranks, config)
        self.num_rdma_ranks, self.num_nvlink_ranks = len(set(hosts.even)), hosts.even.count(0)
        self.num_scaleout_ranks, self.num_scaleup_ranks = self.get_logical_domain_size()
        domain = hosts.even if self.allow_hybrid_mode else (0,) * self.num_ranks
        self.scaleout_rank_idx = domain[self.rank_idx]
        self.scaleup_rank_idx = domain[: self.rank_idx].count(self.scaleout_rank_idx)

    # ---- the calls ------------------------------------------------------------------------------

    def dispatch(
        self,
        x: Rows,
        topk_idx: torch.Tensor | None = None,
        topk_weights: torch.Tensor | None = None,
        cumulative_local_expert_recv_stats: torch.Tensor | None = None,
        num_experts: int | None = None,
        num_max_tokens_per_rank: int | None = None,
        expert_alignment: int | None = None,
        num_sms: int = 0,
        num_qps: int = 0,
        previous_event: Event = None,
        previous_event_before_epilogue: Event = None,
        async_with_compute_stream: bool = False,
        allocate_on_comm_stream: bool = False,
        handle: EPHandle | None = None,
        do_handle_copy: bool = True,
        do_cpu_sync: bool | None = None,
        do_expand: bool = False,
        do_zero_padding: bool = False,
        use_tma_aligned_col_major_sf: bool = False,
    ) -> tuple[Rows, torch.Tensor | None, torch.Tensor | None, EPHandle, EventOverlap]:
        """Sends each token to the ranks that hold its experts. Collective.

        *Plain*: a row for each (token, rank), ordered by source rank, then source token.
        *Expanded*: a row for each (token, local expert), sorted by expert, each expert's rows from
        a multiple of ``expert_alignment`` on.

        Args:
            x: ``[T, hidden]`` bfloat16, contiguous (or another dtype whose rows are multiples of 16
                bytes); or a pair of values ``[T, hidden]`` of a 1-byte dtype and scales ``[T, S]``
                float32 or int32 of any strides, sent as they are.
            topk_idx: ``[T, K]`` int64, -1 for none; None with a handle. A token goes to an expert
                once, however often it names it.
            topk_weights: ``[T, K]`` float32, on all ranks or on none; also with a handle.
            cumulative_local_expert_recv_stats: ``[E / R]`` int32, to which the rows of each local
                expert are added; not with a handle.
            num_experts: of all ranks; that of the handle if None.
            num_max_tokens_per_rank: most tokens of a rank, the same on all ranks; the Buffer's, or
                the handle's, if None. GPUs take more than the Buffer's up to 65536.
            expert_alignment: what each expert's rows are padded to; 1, or the handle's, if None.
            num_sms: SMs that the kernels take on GPUs; 0 for as many as the mode chooses.
            num_qps: from 0; changes nothing.
            previous_event, previous_event_before_epilogue: what the call waits for. Both are waited
                for at its beginning.
            async_with_compute_stream: run on the communication stream and return an event; else
                the results are ready on the current stream.
            allocate_on_comm_stream: either: results come from the memory of the stream that the
                call runs on.
            handle: route as an earlier dispatch did, of this or another ElasticBuffer of the group.
            do_handle_copy: whether the handle keeps a copy of ``topk_idx``.
            do_cpu_sync: whether results have as many rows as arrive, for which the CPU waits; else
                they have room for all that could arrive, and only the GPU knows the counts (on the
                host the CPU does). None: True, but False with a handle, whose rows the CPU may
                know.
            do_expand: expanded instead of plain, on all ranks or on none; with a handle as it was
                there.
            do_zero_padding: whether padding between experts is zero; else it may hold anything, and
                GPUs need not write it. Ranks need not agree.
            use_tma_aligned_col_major_sf: scales have strides ``(1, rows rounded up to 4)``.

        Returns:
            - rows ``[N, hidden]``, or a pair with scales ``[N, S]``; N of the handle, or its
              num_expanded_tokens if expanded;
            - plain: ``[N, K]`` int64, local expert numbers, -1 for experts elsewhere; expanded:
              None;
            - weights: plain ``[N, K]`` float32, 0 for experts elsewhere; expanded ``[N]``, of the
              row's token and expert, 0 for padding; None without topk_weights;
            - the handle (the same one, if it was given); and the event, which holds None unless
              async_with_compute_stream.

            Without do_cpu_sync rows behind those that came mean nothing.

        Raises:
            ArgumentError: bad input, or ranks that disagree: the call is aborted on all ranks.
            PeerRefused: another rank refused its input. On GPUs without do_cpu_sync a later combine
                raises it, and what else the kernels find.
            PeerTimeout: a rank did not arrive in time.
            UsageError: destroyed, or failed earlier; or a CUDA graph is being captured, and the CPU
                would have to wait.
        """
        previous = previous_event, previous_event_before_epilogue
        call = self._call("dispatch", num_sms, num_qps, previous, async_with_compute_stream)
        del allocate_on_comm_stream
        asked = Asked(
            num_experts,
            num_max_tokens_per_rank,
            expert_alignment,
            do_cpu_sync,
            do_expand,
            do_handle_copy,
            do_zero_padding,
            use_tma_aligned_col_major_sf,
        )
        tensors = (x, topk_idx, topk_weights, cumulative_local_expert_recv_stats)
        received, event = elastic_calls.dispatch(call, tensors, handle, asked)
        rows: Rows = received.rows
        if received.scales is not None:
            rows = received.rows, received.scales
        return rows, received.topk_idx, received.topk_weights, received.handle, event

    def combine(
        self,
        x: torch.Tensor,
        handle: EPHandle,
        topk_weights: torch.Tensor | None = None,
        bias: Bias = None,
        num_sms: int = 0,
        num_qps: int = 0,
        previous_event: Event = None,
        previous_event_before_epilogue: Event = None,
        async_with_compute_stream: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor | None, EventOverlap]:
        """Brings rows back to their tokens' ranks and sums them, unweighted. Collective.

        Args:
            x: bfloat16, contiguous, shaped as the rows of the dispatch.
            handle: of the dispatch.
            topk_weights: numbers that travel back to the top-k entries they came from: ``[N, K]``
                float32, or ``[N]`` of an expanded dispatch.
            bias: one or two ``[T, hidden]`` bfloat16 that each sum starts from.
            num_sms: as in :meth:`dispatch`; 0 for those of the dispatch.
            num_qps: as in :meth:`dispatch`.
            previous_event, previous_event_before_epilogue: as in :meth:`dispatch`.
            async_with_compute_stream, allocate_on_comm_stream: as in :meth:`dispatch`.

        Returns:
            ``[T, hidden]`` bfloat16: the sum, in fp32, over ranks in order, rounded once, of the
            rows, or if expanded of each rank's sum of a token's rows in top-k order, rounded; zeros
            or the bias for a token that went nowhere. ``[T, K]`` float32: the numbers, or None. And
            the event.

        Raises:
            ArgumentError, PeerRefused, PeerTimeout, UsageError: as :meth:`dispatch`.
        """
        previous = previous_event, previous_event_before_epilogue
        call = self._call("combine", num_sms, num_qps, previous, async_with_compute_stream)
        del allocate_on_comm_stream
        return elastic_calls.combine(call, x, handle, topk_weights, bias)

    def _call(
        self,
        name: str,
        num_sms: int,
        num_qps: int,
        previous: tuple[Event, Event],
        asynchronous: bool,
    ) -> Call:
        self._open()
        self._calls[name] += 1
        return Call(
            backend=self._backend,
            streams=self._streams,
            ranks=self.num_ranks,
            most_tokens=self.num_max_tokens_per_rank,
            num_sms=num_sms,
            num_qps=num_qps,
            most_sms=self._most_sms,
            automatic_sms=None if self.prefer_overlap_with_compute else self._most_sms,
            previous=previous,
            asynchronous=asynchronous,
            sizes=self._sizes,
            few=self._few,
        )

    # ---- what programs ask ----------------------------------------------------------------------

    def barrier(
        self, use_comm_stream: bool = True, with_cpu_sync: bool = False, sequential: bool = True
    ) -> None:
        """Waits until all ranks have come here: on GPUs the current stream does. Collective.

        Args:
            use_comm_stream: on GPUs, the communication stream waits, after what the current stream
                was given so far, and the current stream waits for it.
            with_cpu_sync: the CPU waits for the device before and after it.
            sequential: either.
        """
        del sequential
        self._open()
        device = self.device
        waits = with_cpu_sync and device.type == "cuda"
        if waits:
            torch.cuda.synchronize(device)

        def call() -> tuple[None, None]:
            # A call without tokens ends when all ranks have begun it.
            x = torch.empty((0, 16), dtype=torch.bfloat16, device=device)
            topk_idx = torch.empty((0, 1), dtype=torch.int64, device=device)
            self._backend.dispatch(
                x, topk_idx, num_experts=self.num_ranks, layout="token_major", capacity=1
            )
            return None, None

        _, _, event = self._streams.run(call, async_finish=use_comm_stream, inputs=None)
        if use_comm_stream:
            event.current_stream_wait()
        if waits:
            torch.cuda.synchronize(device)

    @staticmethod
    def capture() -> EventHandle:
        """An event of all work so far, for ``previous_event``."""
        return EventHandle()

    def get_comm_stream(self) -> Any:
        """The stream of calls with ``async_with_compute_stream`` on GPUs: a ``torch.cuda.Stream``;
        where calls run on the host, ``torch.cpu.Stream``, which has no queue."""
        self._open()
        return self._streams.comm

    def get_physical_domain_size(self) -> tuple[int, int]:
        """Hosts, and ranks of each; 1 and all ranks where hosts have different numbers."""
        return self.num_rdma_ranks, self.num_nvlink_ranks

    def get_logical_domain_size(self) -> tuple[int, int]:
        """Scale-out and scale-up ranks: hosts and ranks of each, or 1 and all ranks without
        ``allow_hybrid_mode``."""
        hosts, per_host = self.num_rdma_ranks, self.num_nvlink_ranks
        return (hosts, per_host) if self.allow_hybrid_mode else (1, hosts * per_host)

    @staticmethod
    def get_buffer_size_hint(
        group: dist.ProcessGroup,
        num_max_tokens_per_rank: int,
        hidden: int,
        num_topk: int = 0,
        use_fp8_dispatch: bool = False,
        allow_hybrid_mode: bool = True,
        allow_multiple_reduction: bool = True,
    ) -> int:
        """Bytes to pass as ``num_bytes``, a multiple of 2 MiB: what a rank's memory takes at most,
        whatever the sizes of calls, but for that of few tokens.

        Args:
            group: the ranks.
            num_max_tokens_per_rank, hidden, num_topk, use_fp8_dispatch: as given to the Buffer;
                nothing depends on them.
            allow_hybrid_mode, allow_multiple_reduction: likewise.
        """
        del num_max_tokens_per_rank, hidden, num_topk, use_fp8_dispatch
        del allow_hybrid_mode, allow_multiple_reduction
        return _buffer_bytes(as_group(group).size)

    def get_theoretical_num_sms(
        self,
        num_experts: int,
        num_topk: int,
        num_scaleout_topk: int = 0,
        rdma_gbs: float = 0,
        nvlink_gbs: float = 0,
        sm_read_gbs: float = 200,
        sm_write_gbs: float = 50,
    ) -> int:
        """SMs that calls with ``num_sms=0`` take at most, but for those of few tokens.

        Args:
            num_experts: of DeepEP's model, as all arguments; the number here does not depend on it.
            num_topk, num_scaleout_topk: likewise.
            rdma_gbs, nvlink_gbs, sm_read_gbs, sm_write_gbs: likewise.
        """
        del num_experts, num_topk, num_scaleout_topk, rdma_gbs, nvlink_gbs, sm_read_gbs
        del sm_write_gbs
        return self._most_sms

    def get_theoretical_num_qps(self, num_sms: int) -> int:
        """DeepEP's number of queue pairs for so many SMs; there are none here."""
        check_whole("num_sms", num_sms, 0)
        wanted = num_sms * 16 + 1 if self.allow_hybrid_mode else min(num_sms, 9)
        return min(wanted, self.num_allocated_qps)

    def destroy(self) -> None:
        """Releases the memory; afterwards every call raises UsageError. Not collective; harmless
        when repeated.

        Raises:
            UsageError: without ``explicitly_destroy``.
        """
        if not self.explicitly_destroy:
            raise UsageError(
                "destroy() needs an ElasticBuffer made with explicitly_destroy=True; without it "
                "the memory goes with the object"
            )
        if self.runtime is None:
            return
        self._owner.check()
        runtime, few = self.runtime, self._few
        self.runtime = self._few = None
        try:
            runtime.close()
        finally:
            if few is not None:
                few.close()

    def _open(self) -> None:
        if self.runtime is None:
            raise UsageError("this ElasticBuffer was destroyed; make a new one")
        self._owner.check()

    def __getattr__(self, name: str) -> Any:
        if name.startswith(("engram_", "pp_", "agrs_", "create_agrs", "destroy_agrs")) or name in (
            "all_gather", "get_engram_storage_size_hint", "get_pp_buffer_size_hint",
            "get_agrs_num_max_session_bytes", "get_agrs_buffer_size_hint",
        ):  # fmt: skip
            raise AttributeError(f"{_ELSEWHERE}all_gather) are not in Fanfold, {name} among them")
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def __repr__(self) -> str:
        state = "destroyed" if getattr(self, "runtime", self) is None else ""
        names = ("rank_idx", "num_ranks", "num_max_tokens_per_rank", "num_bytes", "device")
        return described(self, state, **{name: name for name in names})

    def __del__(self) -> None:
        runtime = self.__dict__.get("runtime")
        if runtime is not None and self.explicitly_destroy and not self._owner.forked:
            warnings.warn(
                "an ElasticBuffer made with explicitly_destroy=True was dropped without destroy()",
                ResourceWarning,
                stacklevel=2,
            )


def _check_bytes(num_bytes: int | None, num_cpu_bytes: int) -> None:
    if num_cpu_bytes != 0:
        raise ArgumentError("num_cpu_bytes", num_cpu_bytes, "0: Engram is not here")
    if num_bytes is None:
        return
    check_whole("num_bytes", num_bytes, 0)
    if num_bytes % BUFFER_ALIGNMENT:
        bound = f"a multiple of {BUFFER_ALIGNMENT}, as get_buffer_size_hint gives"
        raise ArgumentError("num_bytes", num_bytes, bound)


def _buffer_bytes(ranks: int) -> int:
    settings = Settings.resolve()
    nbytes = max(
        HostHighThroughput.staging_bytes(ranks, settings),
        CudaHighThroughput.required_bytes(ranks, settings),
    )
    return -(-nbytes // BUFFER_ALIGNMENT) * BUFFER_ALIGNMENT
