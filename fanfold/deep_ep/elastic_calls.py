"""Dispatch and combine of DeepEP's second interface in terms of a high-throughput backend."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from dataclasses import dataclass
from typing import Any

import torch

from fanfold.backends.high_throughput import Rows
from fanfold.backends.high_throughput.cuda import CudaHighThroughput
from fanfold.backends.high_throughput.plan import CudaPlan, sums_of_rows
from fanfold.backends.high_throughput.protocol import (
    MOST_ALIGNMENT,
    MOST_ROWS,
    MOST_SMS,
    HighThroughputBackend,
    RowOrder,
)
from fanfold.backends.low_latency.token_major import RowOptions
from fanfold.deep_ep.ep_handle import EPHandle, first_rows
from fanfold.deep_ep.events import EventHandle, EventOverlap, event_of
from fanfold.deep_ep.few_tokens import AnyPlan, FewTokens, RoutedFew
from fanfold.deep_ep.names import ELASTIC
from fanfold.deep_ep.routes import Bias, tokens_of
from fanfold.deep_ep.routing_sizes import RoutingSizes, worst_expanded_rows, worst_rows
from fanfold.deep_ep.streams import HostStreams, Streams
from fanfold.errors import ArgumentError, UsageError
from fanfold.geometry import MAX_EXPERTS, MAX_TOKENS, Geometry, check_flag, check_tensor
from fanfold.refusal import Refusing
from fanfold.representation import show_fields, worded

__all__ = [
    "Asked",
    "Call",
    "Event",
    "Received",
    "check_whole",
    "combine",
    "dispatch",
    "rows_of_experts",
]

Event = EventOverlap | EventHandle | None

_LEAST_COLUMNS = 16  # of a row
_PLAIN = frozenset((int, bool, type(None)))
_MOST_KNOWN = 64  # sizes that are remembered
_SIZES = ("num_experts", "num_max_tokens_per_rank", "expert_alignment")


@dataclass(eq=False, slots=True)
class Call:
    """What dispatch and combine have in common.

    Attributes:
        backend, streams, ranks: of the ElasticBuffer.
        most_tokens: its num_max_tokens_per_rank.
        num_sms, num_qps: as asked for.
        most_sms: that the mode takes by itself.
        automatic_sms: what it gets then.
        previous: the events to wait for.
        asynchronous: whether the call runs on the communication stream.
        sizes: those of earlier dispatches, by the arguments that they were computed from.
        few: the protocol of few tokens, if the ElasticBuffer has it.
    """

    backend: HighThroughputBackend
    streams: Streams | HostStreams
    ranks: int
    most_tokens: int
    num_sms: int
    num_qps: int
    most_sms: int
    automatic_sms: int | None
    previous: tuple[Event, Event]
    asynchronous: bool
    sizes: dict[tuple[object, ...], RoutingSizes]
    few: FewTokens | None = None

    def check(self) -> tuple[EventHandle | None, EventHandle | None]:
        """The events, after checks of what both calls take."""
        check_whole("num_sms", self.num_sms, 0, MOST_SMS)
        check_whole("num_qps", self.num_qps, 0)
        first, second = self.previous
        return event_of("previous_event", first), event_of("previous_event_before_epilogue", second)

    def sms(self, handle: EPHandle | None) -> int | None:
        """What was asked for, now or for the handle; None for what the mode chooses."""
        if self.num_sms != 0:
            return self.num_sms
        return None if handle is None else handle._sizes.sms

    def few_geometry(self, tensors: Tensors, asked: Asked) -> Geometry | None:
        """That of a dispatch without a handle that goes by the protocol of few tokens. The
        arguments may not have been checked."""
        if self.few is None or asked.do_expand:
            return None
        most = asked.most_tokens(self)
        found = self.few.geometry_of(tensors[0], tensors[1], asked.num_experts, most)
        if found is not None:
            self.few.last = found
        return found

    def refuse_dispatch(
        self, error: BaseException, geometry: Geometry | None, handle: object, asked: Asked
    ) -> None:
        """Takes part in the dispatch that the peers make, which goes by the protocol of few tokens
        if there is a geometry."""
        if geometry is None and handle is None and self.few is not None:
            geometry = self.few.to_refuse(asked.most_tokens(self), expands=asked.do_expand)
        mode = None if self.few is None else self.few.mode
        if geometry is not None and mode is not None:
            mode.refuse_dispatch(error, geometry)
        else:
            self.backend.refuse_dispatch(error, self._plan_to_refuse(handle))

    def refuse_combine(
        self, error: BaseException, routed: RoutedFew | None, handle: object, *, bare: bool
    ) -> None:
        """The same for a combine, which is ``bare`` without weights."""
        lost = bare and not isinstance(handle, EPHandle)
        mode = None if self.few is None else self.few.mode
        if routed is not None:
            assert mode is not None
            mode.refuse_combine(error, routed.rows.routing)
        elif lost and mode is not None and self.few is not None and self.few.last is not None:
            mode.refuse_combine(error)
        else:
            self.backend.refuse_combine(error, self._plan_to_refuse(handle))

    def _plan_to_refuse(self, handle: object) -> AnyPlan | None:
        """Of what a caller passes for a handle, which need not be one. One that has no plan yet
        gets it first, as on the peers."""
        if not isinstance(handle, EPHandle) or handle._plan.ranks != self.ranks:
            return None
        return handle._plan_for(self.backend)

    def use_sms(self, sms: int | None) -> None:
        """Has the backend take them."""
        self.backend.use_sms(self.automatic_sms if sms is None else sms)


@dataclass(eq=False, slots=True)
class Asked:
    """The sizes of a dispatch, as the caller gave them."""

    num_experts: int | None
    num_max_tokens_per_rank: int | None
    expert_alignment: int | None
    do_cpu_sync: bool | None
    do_expand: bool
    do_handle_copy: bool
    do_zero_padding: bool
    scales_by_columns: bool

    def most_tokens(self, call: Call) -> int | None:
        """Of a rank."""
        most = self.num_max_tokens_per_rank
        return call.most_tokens if most is None else most


@dataclass(eq=False)
class Received:
    """What a dispatch returns. ``kept`` are the tensors of the handle, used on both streams."""

    rows: torch.Tensor
    scales: torch.Tensor | None
    topk_idx: torch.Tensor | None
    topk_weights: torch.Tensor | None
    handle: EPHandle
    kept: tuple[torch.Tensor, ...] = ()

    __repr__ = show_fields


Tensors = tuple[Rows, torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]
"""x, topk_idx, topk_weights and the statistics."""


def dispatch(
    call: Call, tensors: Tensors, handle: EPHandle | None, asked: Asked
) -> tuple[Received, EventOverlap]:
    """See :meth:`fanfold.deep_ep.ElasticBuffer.dispatch`."""
    geometry = call.few_geometry(tensors, asked) if handle is None else None
    with Refusing(lambda error: call.refuse_dispatch(error, geometry, handle, asked)):
        previous, before_epilogue = call.check()
        check_flag("do_zero_padding", asked.do_zero_padding)
        if handle is None:
            sizes = _sizes_of(call, tensors, asked)
        else:
            _check_reuse(call, tensors, handle, asked)

    def body() -> tuple[Received, None]:
        if before_epilogue is not None:
            before_epilogue.current_stream_wait()
        call.backend.use_zero_padding(asked.do_zero_padding)
        if geometry is not None and _has_memory(call, geometry, tensors):
            received = _route_few(call, geometry, tensors, sizes, asked)
        elif handle is None:
            received = _route(call, tensors, sizes, asked)
        else:
            received = _route_again(call, tensors, handle)
        by_rows = received.scales is not None and received.scales.stride(0) != 1
        if asked.scales_by_columns and received.scales is not None and by_rows:
            received = dataclasses.replace(received, scales=_by_columns(received.scales))
        return received, None

    received, _, event = call.streams.run(
        body, async_finish=call.asynchronous, inputs=tensors, previous=previous
    )
    return received, event


def combine(
    call: Call,
    x: torch.Tensor,
    handle: EPHandle,
    topk_weights: torch.Tensor | None,
    bias: Bias,
) -> tuple[torch.Tensor, torch.Tensor | None, EventOverlap]:
    """See :meth:`fanfold.deep_ep.ElasticBuffer.combine`."""
    few = _few_of(call, handle) if topk_weights is None else None
    bare = topk_weights is None
    with Refusing(lambda error: call.refuse_combine(error, few, handle, bare=bare)):
        previous, before_epilogue = call.check()
        _check_handle(call, handle)

    def body() -> tuple[tuple[torch.Tensor, torch.Tensor | None], None]:
        if before_epilogue is not None:
            before_epilogue.current_stream_wait()
        if few is not None:
            with ELASTIC:
                assert call.few is not None
                sums = call.few.combine(few.geometry, x, few.rows.routing, few.received, bias)
            call.backend.check()  # what dispatches by the other protocol found
            return (sums, None), None
        call.use_sms(call.sms(handle))
        plan = handle._plan_for(call.backend)
        with ELASTIC:
            combined = call.backend.combine(
                x, plan, layout=_layout(handle), topk_weights=topk_weights, bias=bias
            )
        if call.few is not None:
            call.few.check()
        return combined, None

    (out, summed), _, event = call.streams.run(
        body, async_finish=call.asynchronous, inputs=(x, topk_weights, bias), previous=previous
    )
    return out, summed, event


# ---- a new routing ------------------------------------------------------------------------------


def _new_sizes(call: Call, tensors: Tensors, asked: Asked) -> RoutingSizes:
    """The sizes of a dispatch without a handle, checked."""
    x, topk_idx, topk_weights, stats = tensors
    experts = asked.num_experts
    if experts is None:
        raise ArgumentError("num_experts", None, "the number of experts, unless a handle is given")
    check_whole("num_experts", experts, 1, MAX_EXPERTS)
    if experts % call.ranks:
        bound = f"a multiple of the {call.ranks} ranks"
        raise ArgumentError("num_experts", experts, bound)
    most = call.most_tokens
    if asked.num_max_tokens_per_rank is not None:
        most = asked.num_max_tokens_per_rank
    check_whole("num_max_tokens_per_rank", most, 1, MAX_TOKENS)
    alignment = 1 if asked.expert_alignment is None else asked.expert_alignment
    check_whole("expert_alignment", alignment, 1, MOST_ALIGNMENT)
    tokens = tokens_of(x)
    if tokens > most:
        bound = f"at most num_max_tokens_per_rank = {most}"
        raise ArgumentError("x.shape[0]", tokens, bound)
    call.backend.check_devices(
        x=x, topk_idx=topk_idx, topk_weights=topk_weights, cumulative_local_expert_recv_stats=stats
    )
    if topk_idx is None:
        raise ArgumentError("topk_idx", None, "given, unless a handle is")
    check_tensor("topk_idx", topk_idx, (tokens, "top_k"), (torch.int64,))
    _check_stats(stats, experts // call.ranks)
    check_flag("do_handle_copy", asked.do_handle_copy)
    sms = call.sms(None)
    sizes = RoutingSizes(
        num_experts=experts,
        expert_alignment=alignment,
        num_max_tokens_per_rank=most,
        do_expand=check_flag("do_expand", asked.do_expand),
        sms=sms,
        num_sms=call.most_sms if sms is None else sms,
        knows_counts=asked.do_cpu_sync is None or check_flag("do_cpu_sync", asked.do_cpu_sync),
    )
    if not sizes.knows_counts:
        rows = _worst(call.ranks, topk_idx.shape[1], sizes)
        if rows > MOST_ROWS:
            bound = f"such that at most {MOST_ROWS} rows can come, or do_cpu_sync"
            raise ArgumentError("num_max_tokens_per_rank", most, bound)
    return sizes


def _sizes_of(call: Call, tensors: Tensors, asked: Asked) -> RoutingSizes:
    """The sizes of a dispatch without a handle. Where an earlier one was asked for the same, what
    is left to check of the tensors is checked by the mode."""
    x, topk_idx, _, stats = tensors
    top_k = None
    if isinstance(topk_idx, torch.Tensor) and topk_idx.dim() == 2:
        top_k = topk_idx.shape[1]
    given = (
        asked.num_experts,
        asked.num_max_tokens_per_rank,
        asked.expert_alignment,
        asked.do_cpu_sync,
        asked.do_expand,
        asked.do_handle_copy,
        call.num_sms,
        top_k,
    )
    kinds = tuple(map(type, given))
    plain = top_k is not None and _PLAIN.issuperset(kinds)
    known = call.sizes.get((given, kinds)) if plain else None
    if known is None or tokens_of(x) > known.num_max_tokens_per_rank:
        known = _new_sizes(call, tensors, asked)
        if plain and len(call.sizes) == _MOST_KNOWN:
            call.sizes.clear()
        if plain:
            call.sizes[given, kinds] = known
    elif stats is not None:
        call.backend.check_devices(cumulative_local_expert_recv_stats=stats)
        _check_stats(stats, known.num_experts // call.ranks)
    return known


def _worst(ranks: int, top_k: int, sizes: RoutingSizes) -> int:
    """Rows of a result that has room for all that could come."""
    if sizes.do_expand:
        return worst_expanded_rows(ranks, top_k, sizes)
    return worst_rows(ranks, sizes)


def _route(call: Call, tensors: Tensors, sizes: RoutingSizes, asked: Asked) -> Received:
    x, topk_idx, topk_weights, stats = tensors
    assert topk_idx is not None
    if sizes.knows_counts and topk_idx.is_cuda and torch.cuda.is_current_stream_capturing():
        raise UsageError("a dispatch in a CUDA graph needs do_cpu_sync=False")
    if call.few is not None:
        call.few.last = None
    top_k = topk_idx.shape[1]
    listed: list[int] = []
    options: dict[str, Any] = {}
    if sizes.knows_counts and isinstance(call.backend, CudaHighThroughput):
        # The CPU knows the plan then, and no rows are on their way that a copy would wait for.
        options["planned"] = lambda plan: listed.extend(rows_of_experts(plan))
    call.use_sms(sizes.sms)
    with ELASTIC:
        dispatched = call.backend.dispatch(
            x,
            topk_idx,
            topk_weights,
            num_experts=sizes.num_experts,
            layout="expert_major" if sizes.do_expand else "token_major",
            expert_alignment=sizes.expert_alignment,
            capacity=None if sizes.knows_counts else _worst(call.ranks, top_k, sizes),
            **options,
        )
    plan: AnyPlan = dispatched.plan
    if sizes.knows_counts and not options:
        listed = rows_of_experts(plan)
    kept_idx = topk_idx.clone() if asked.do_handle_copy else topk_idx
    handle = EPHandle(plan, sizes, kept_idx, _expanded_rows(plan, sizes), listed)
    _add_stats(stats, plan)
    rows, idx, weights = dispatched.tokens.shape[0], None, dispatched.row_weights
    if not sizes.do_expand:
        assert plan.topk_idx is not None
        idx = first_rows(plan.topk_idx, rows, -1).to(topk_idx.device, copy=True)
        weights = plan.topk_weights
        if weights is not None:
            weights = first_rows(weights, rows, 0).to(topk_idx.device)
    kept = handle._tensors() if call.asynchronous else ()
    return Received(dispatched.tokens, dispatched.scales, idx, weights, handle, kept)


def _has_memory(call: Call, geometry: Geometry, tensors: Tensors) -> bool:
    """Whether the protocol of few tokens has its memory, which the first call makes."""
    few, topk_idx = call.few, tensors[1]
    assert few is not None
    assert topk_idx is not None
    if few.mode is not None:
        return True
    assert isinstance(call.backend, CudaHighThroughput)
    with ELASTIC:
        scaled = isinstance(tensors[0], tuple)
        return few.open_memory(call.backend, geometry, topk_idx, scaled=scaled)


def _route_few(
    call: Call, geometry: Geometry, tensors: Tensors, sizes: RoutingSizes, asked: Asked
) -> Received:
    x, topk_idx, topk_weights, stats = tensors
    assert call.few is not None
    assert topk_idx is not None
    if sizes.knows_counts and topk_idx.is_cuda and torch.cuda.is_current_stream_capturing():
        raise UsageError("a dispatch in a CUDA graph needs do_cpu_sync=False")
    few, waits = call.few, sizes.knows_counts
    by_columns = asked.scales_by_columns and not waits
    most, alignment = sizes.num_max_tokens_per_rank, sizes.expert_alignment
    options = _row_options(most, alignment, by_columns, waits)
    with ELASTIC:
        rows = few.dispatch(geometry, x, topk_idx, topk_weights, options, stats)
    received, scales, idx, weights = rows.tokens, rows.scales, rows.topk_idx, rows.topk_weights
    count, listed = len(rows.tokens), []
    if waits:
        assert few.mode is not None
        count, ends = few.mode.await_counts()
        listed = [end - begin for begin, end in itertools.pairwise((0, *ends))]
        expanded = sum(listed)
        received, idx = received[:count], idx[:count]
        scales = None if scales is None else scales[:count]
        weights = None if weights is None else weights[:count]
    else:
        expanded = worst_expanded_rows(geometry.ranks, geometry.top_k, sizes)
    routed = RoutedFew(few.token, geometry, rows, sizes.expert_alignment, count)
    kept_idx = None if asked.do_handle_copy else topk_idx
    handle = EPHandle(routed, sizes, kept_idx, expanded, listed)
    kept = handle._tensors() if call.asynchronous else ()
    return Received(received, scales, idx, weights, handle, kept)


_row_options = functools.lru_cache(maxsize=64)(RowOptions)


def rows_of_experts(plan: AnyPlan) -> list[int]:
    """Of each local expert, with padding."""
    offsets: list[int] = plan.offsets.tolist()
    return [end - begin for begin, end in itertools.pairwise(offsets)]


def _by_columns(scales: torch.Tensor) -> torch.Tensor:
    """The same by columns, each on 16 bytes, as copies by TMA take them."""
    rows, columns = scales.shape
    strides = (1, max(-(-rows // 4) * 4, 1))
    made = torch.empty_strided((rows, columns), strides, dtype=scales.dtype, device=scales.device)
    return made.copy_(scales)


def _expanded_rows(plan: AnyPlan, sizes: RoutingSizes) -> int:
    if not sizes.knows_counts:
        return worst_expanded_rows(plan.ranks, plan.top_k, sizes)
    if isinstance(plan, CudaPlan):
        return plan.row_count("expert_major")
    return int(plan.offsets[-1])


# ---- an earlier routing -------------------------------------------------------------------------


def _check_reuse(call: Call, tensors: Tensors, handle: EPHandle, asked: Asked) -> None:
    _check_handle(call, handle)
    _, topk_idx, topk_weights, stats = tensors
    if topk_idx is not None:
        raise ArgumentError("topk_idx", "given", "None with a handle, which has the routing")
    sizes = (asked.num_experts, asked.num_max_tokens_per_rank, asked.expert_alignment)
    if sizes != (None, None, None):
        for name, given in zip(_SIZES, sizes, strict=True):
            of_handle = getattr(handle, name)
            if given not in (None, of_handle):
                raise ArgumentError(name, given, f"None or {of_handle}, as for the handle")
    if asked.do_cpu_sync:
        raise ArgumentError("do_cpu_sync", True, "False or None with a handle, which has the sizes")
    if asked.do_expand != handle.do_expand:
        raise ArgumentError("do_expand", asked.do_expand, f"{handle.do_expand}, as for the handle")
    if topk_weights is not None:
        call.backend.check_devices(topk_weights=topk_weights)
        shape = (handle._plan.tokens, handle._plan.top_k)
        check_tensor("topk_weights", topk_weights, shape, (torch.float32,))
    if stats is not None:
        call.backend.check_devices(cumulative_local_expert_recv_stats=stats)
        _check_stats(stats, handle.num_experts // call.ranks)


def _route_again(call: Call, tensors: Tensors, handle: EPHandle) -> Received:
    x, _, topk_weights, stats = tensors
    call.use_sms(call.sms(handle))
    plan = handle._plan_for(call.backend)
    with ELASTIC:
        dispatched = call.backend.dispatch_cached(x, plan, layout=_layout(handle))
    _add_stats(stats, plan)
    rows, device = dispatched.tokens.shape[0], dispatched.tokens.device
    idx = weights = None
    if not handle.do_expand:
        assert plan.topk_idx is not None
        idx = first_rows(plan.topk_idx, rows, -1).to(device, copy=True)
    if topk_weights is not None:
        entries = _send_entries(call, topk_weights, plan)
        weights = _of_rows(entries, plan, rows) if idx is None else entries.where(idx >= 0, 0)
    return Received(dispatched.tokens, dispatched.scales, idx, weights, handle)


def _send_entries(call: Call, topk_weights: torch.Tensor, plan: AnyPlan) -> torch.Tensor:
    """``[rows, K]`` float32: the numbers of each received token.

    They travel as the scales of short rows, which hardly any rows of a caller look like: ranks of
    which only some send numbers find that they disagree, at the latest in the next call.
    """
    columns = -(-plan.top_k // _LEAST_COLUMNS) * _LEAST_COLUMNS
    values = torch.zeros((plan.tokens, columns), dtype=torch.uint8, device=topk_weights.device)
    sent = (values, topk_weights.detach())
    with ELASTIC:
        dispatched = call.backend.dispatch_cached(sent, plan, layout="token_major")
    received: torch.Tensor = dispatched.scales
    return received


def _of_rows(entries: torch.Tensor, plan: AnyPlan, rows: int) -> torch.Tensor:
    """``[rows]`` float32: of each expanded row the sum, in top-k order, of its entries' numbers."""
    assert plan.rows_of is not None
    device = entries.device
    count = entries.shape[0]
    places = first_rows(plan.rows_of.to(device), count, -1)
    numbers = torch.arange(count, dtype=torch.int32, device=device)
    known = (numbers < plan.source_prefix.to(device)[-1]).unsqueeze(1)
    return sums_of_rows(places.where(known, -1), entries.where(known, 0), rows)


# ---- checks -------------------------------------------------------------------------------------


def check_whole(name: str, value: object, low: int, high: int | None = None) -> None:
    """Raises ArgumentError unless ``value`` is an integer from ``low`` to ``high``."""
    if type(value) is int and low <= value and (high is None or value <= high):
        return
    bound = f"an integer from {low}" + ("" if high is None else f" to {high}")
    if not isinstance(value, int) or isinstance(value, bool):
        raise ArgumentError(name, worded(value), bound)
    if value < low or (high is not None and value > high):
        raise ArgumentError(name, value, bound)


def _check_handle(call: Call, handle: object) -> None:
    if not isinstance(handle, EPHandle):
        raise ArgumentError("handle", worded(handle), "the EPHandle that dispatch returned")
    if handle._plan.ranks != call.ranks:
        bound = f"one of {call.ranks} ranks, as this group"
        raise ArgumentError("handle", f"one of {handle._plan.ranks} ranks", bound)


def _check_stats(stats: object, experts: int) -> None:
    if stats is not None:
        check_tensor("cumulative_local_expert_recv_stats", stats, (experts,), (torch.int32,))


def _add_stats(stats: torch.Tensor | None, plan: AnyPlan) -> None:
    if stats is not None:
        stats += plan.tokens_per_expert.to(stats.device)


def _few_of(call: Call, handle: object) -> RoutedFew | None:
    """What a handle has, if that is of the call's own protocol of few tokens."""
    routed = handle._plan if isinstance(handle, EPHandle) else None
    if not isinstance(routed, RoutedFew) or call.few is None:
        return None
    return routed if routed.token is call.few.token else None


def _layout(handle: EPHandle) -> RowOrder:
    return "expert_major" if handle.do_expand else "token_major"
