"""The high-throughput half of ``Buffer``: DeepEP's calls in terms of
:mod:`fanfold.high_throughput`.

The mode works on the host. Tensors of other devices are staged: copied there and their results
back, on the current stream, for which the CPU waits.
"""

from __future__ import annotations

import torch

from fanfold.deep_ep.base import BufferBase
from fanfold.deep_ep.events import EventHandle, EventOverlap, check_ordering, finished
from fanfold.deep_ep.handles import Handle, Received, Routing, make_handle, read_handle
from fanfold.deep_ep.routes import (
    Bias,
    Given,
    Route,
    Rows,
    channels_of,
    new_route,
    tokens_of,
)
from fanfold.deep_ep.runtime import Runtime
from fanfold.deep_ep.sizes import Config, check_count
from fanfold.errors import ArgumentError
from fanfold.geometry import check_tensor
from fanfold.high_throughput import Dispatched, HighThroughput, Plan, dispatch_layout
from fanfold.staging import Staging

__all__ = ["HighThroughputCalls"]

_CPU = torch.device("cpu")

Event = EventOverlap | EventHandle | None
DispatchResult = tuple[
    Rows, torch.Tensor | None, torch.Tensor | None, list[int] | None, Handle | None, EventOverlap
]
CombineResult = tuple[torch.Tensor, torch.Tensor | None, EventOverlap]


class HighThroughputCalls(BufferBase):
    """High-throughput dispatch and combine with DeepEP's arguments."""

    def get_dispatch_layout(
        self,
        topk_idx: torch.Tensor,
        num_experts: int,
        previous_event: Event = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor, torch.Tensor, EventOverlap]:
        """Where this rank's tokens go. Local: nothing is communicated.

        Args:
            topk_idx: ``[T, K]`` int64, -1 for none.
            num_experts: of all ranks.
            previous_event: what to wait for first.
            async_finish: return an event.
            allocate_on_comm_stream: needs previous_event and async_finish; changes nothing here.

        Returns:
            tokens for each rank ``[R]`` int32; None, as all ranks are on one host; tokens for each
            expert ``[E]`` int32, which counts an expert as often as a token names it; ``[T, R]``
            bool, whether a token goes to a rank; and the event.

        Raises:
            ArgumentError: bad input.
            UsageError: destroyed.
        """
        self._open()
        check_ordering(previous_event, async_finish, allocate_on_comm_stream)
        staging = Staging(topk_idx=topk_idx)
        layout = dispatch_layout(staging.host(topk_idx), num_experts, self.group_size)
        return (
            staging.back(layout.tokens_per_rank),
            None,
            staging.back(layout.tokens_per_expert),
            staging.back(layout.is_token_in_rank),
            finished(async_finish, topk_idx),
        )

    def dispatch(
        self,
        x: Rows,
        handle: Handle | None = None,
        num_tokens_per_rank: torch.Tensor | None = None,
        num_tokens_per_rdma_rank: torch.Tensor | None = None,
        is_token_in_rank: torch.Tensor | None = None,
        num_tokens_per_expert: torch.Tensor | None = None,
        topk_idx: torch.Tensor | None = None,
        topk_weights: torch.Tensor | None = None,
        expert_alignment: int = 1,
        num_worst_tokens: int = 0,
        config: Config | None = None,
        previous_event: Event = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> DispatchResult:
        """Sends each token once to every rank that it goes to. Collective.

        Args:
            x: ``[T, hidden]`` bfloat16 (or any dtype whose rows are multiples of 16 bytes),
                contiguous; or a pair of values ``[T, hidden]`` of a 1-byte dtype and scales
                ``[T, S]`` float32 or int32 of any strides, sent as they are.
            handle: reuse the routing of an earlier dispatch; then everything about routing must be
                None.
            num_tokens_per_rank, num_tokens_per_rdma_rank, is_token_in_rank, num_tokens_per_expert:
                what get_dispatch_layout returned; all but the second must be given for a new
                routing.
            topk_idx: ``[T, K]`` int64, -1 for none, or None if the receivers need not know.
            topk_weights: ``[T, K]`` float32; given with topk_idx, and only then.
            expert_alignment: what the counts of the list are rounded up to.
            num_worst_tokens: rows to allocate whatever arrives; needs topk_idx.
            config: num_sms // 2 is the number of channels in the handle; of a given handle it must
                be the same. The default is get_dispatch_config.
            previous_event: what to wait for first.
            async_finish: return an event, of the current stream. On the CPU the work is done.
            allocate_on_comm_stream: needs previous_event and async_finish; changes nothing here.

        Returns:
            With N rows received (or num_worst_tokens):

            - rows ``[N, hidden]``, or a pair with scales ``[N, S]``, row-major, ordered by source
              rank, then source token;
            - ``[N, K]`` int64: local expert ids, -1 for experts elsewhere and for unused rows;
            - ``[N, K]`` float32: weights, 0 for experts elsewhere;
            - list of the rows for each local expert, counted as often as named, rounded up to
              expert_alignment; [] with num_worst_tokens;
            - the handle (:mod:`fanfold.deep_ep.handles`);
            - the event, which holds None without async_finish.

            With a handle all but the first and the last are None; without topk_idx the second and
            the third are.

        Raises:
            ArgumentError: bad input, or ranks that disagree: the call is void on all ranks.
            PeerRefused: another rank refused its input.
            PeerTimeout: a rank did not arrive in time.
            UsageError: no memory for this mode, a masked rank, or destroyed.
        """
        runtime = self._open()
        mode = runtime.high_throughput
        given: Given = {
            "num_tokens_per_rank": num_tokens_per_rank,
            "num_tokens_per_rdma_rank": num_tokens_per_rdma_rank,
            "is_token_in_rank": is_token_in_rank,
            "num_tokens_per_expert": num_tokens_per_expert,
            "topk_idx": topk_idx,
            "topk_weights": topk_weights,
        }
        route = routing = None
        try:
            check_ordering(previous_event, async_finish, allocate_on_comm_stream)
            channels = channels_of(config, self.get_dispatch_config(self.group_size))
            check_count("expert_alignment", expert_alignment, 1)
            check_count("num_worst_tokens", num_worst_tokens, 0)
            staging = Staging(x=x, **given)
            x = staging.host(x)
            if handle is None:
                given = {name: staging.host(tensor) for name, tensor in given.items()}
                route = new_route(given, self.group_size, tokens_of(x))
                _check_worst(num_worst_tokens, route)
            else:
                routing = self._routing(staging.host(handle), channels)
                _check_reuse(given, routing, num_worst_tokens)
        except ArgumentError as error:
            mode.refuse_dispatch(error)
            raise
        if routing is not None:
            again = mode.dispatch_cached(x, self._plan(routing, 1), layout="token_major")
            runtime.check_complete("high_throughput dispatch")
            rows = staging.back(_rows_of(again))
            return rows, None, None, None, None, finished(async_finish)
        assert route is not None
        dispatched = _send(mode, x, route, num_worst_tokens)
        runtime.check_complete("high_throughput dispatch")
        counts, made = _describe(runtime, route, dispatched, channels)
        aligned = [-(-count // expert_alignment) * expert_alignment for count in counts.tolist()]
        listed = aligned if num_worst_tokens == 0 else []
        rows, *topk = staging.back((_rows_of(dispatched), *_topk_of(dispatched, route)))
        return rows, topk[0], topk[1], listed, staging.back(made), finished(async_finish)

    def combine(
        self,
        x: torch.Tensor,
        handle: Handle,
        topk_weights: torch.Tensor | None = None,
        bias: Bias = None,
        config: Config | None = None,
        previous_event: Event = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> CombineResult:
        """Brings rows back to the ranks they came from and sums them, unweighted. Collective.

        Works from the handle alone.

        Args:
            x: ``[N, hidden]`` bfloat16, contiguous: a row for each received one.
            handle: what dispatch returned.
            topk_weights: ``[N, K]`` float32 that travel back to the lanes they came from.
            bias: one or two ``[T, hidden]`` bfloat16 that each sum starts from.
            config: as in dispatch; the default is get_combine_config.
            previous_event: what to wait for first.
            async_finish: as in dispatch.
            allocate_on_comm_stream: needs previous_event and async_finish; changes nothing here.

        Returns:
            ``[T, hidden]`` bfloat16: the sum over ranks in order, in fp32, rounded once (zeros, or
            the bias, for a token that went nowhere); ``[T, K]`` float32: the sums of topk_weights
            for each lane, or None; and the event.

        Raises:
            ArgumentError, PeerRefused, PeerTimeout, UsageError: as dispatch.
        """
        runtime = self._open()
        mode = runtime.high_throughput
        try:
            check_ordering(previous_event, async_finish, allocate_on_comm_stream)
            channels = channels_of(config, self.get_combine_config(self.group_size))
            staging = Staging(x=x, topk_weights=topk_weights, bias=bias)
            y, weights, biases = staging.host((x, topk_weights, bias))
            routing = self._routing(staging.host(handle), channels)
            check_tensor("x", y, (routing.rows, None), (torch.bfloat16,), device=_CPU)
            lanes = 1
            if weights is not None:
                check_tensor("topk_weights", weights, (routing.rows, None), (torch.float32,),
                             device=_CPU)  # fmt: skip
                lanes = weights.shape[1]
        except ArgumentError as error:
            mode.refuse_combine(error)
            raise
        combined = mode.combine(
            y,
            self._plan(routing, lanes),
            layout="token_major",
            lane_weights=weights,
            bias=biases,
        )
        runtime.check_complete("high_throughput combine")
        out, summed = staging.back(combined)
        return out, summed, finished(async_finish, x, topk_weights, out)

    def internode_dispatch(
        self,
        x: Rows,
        handle: Handle | None = None,
        num_tokens_per_rank: torch.Tensor | None = None,
        num_tokens_per_rdma_rank: torch.Tensor | None = None,
        is_token_in_rank: torch.Tensor | None = None,
        num_tokens_per_expert: torch.Tensor | None = None,
        topk_idx: torch.Tensor | None = None,
        topk_weights: torch.Tensor | None = None,
        expert_alignment: int = 1,
        num_worst_tokens: int = 0,
        config: Config | None = None,
        previous_event: Event = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> DispatchResult:
        """The same as :meth:`dispatch`, as all ranks are on one host."""
        return self.dispatch(
            x,
            handle,
            num_tokens_per_rank,
            num_tokens_per_rdma_rank,
            is_token_in_rank,
            num_tokens_per_expert,
            topk_idx,
            topk_weights,
            expert_alignment,
            num_worst_tokens,
            config,
            previous_event,
            async_finish,
            allocate_on_comm_stream,
        )

    def internode_combine(
        self,
        x: torch.Tensor,
        handle: Handle,
        topk_weights: torch.Tensor | None = None,
        bias: Bias = None,
        config: Config | None = None,
        previous_event: Event = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> CombineResult:
        """The same as :meth:`combine`, as all ranks are on one host."""
        return self.combine(
            x,
            handle,
            topk_weights,
            bias,
            config,
            previous_event,
            async_finish,
            allocate_on_comm_stream,
        )

    def _routing(self, handle: object, channels: int) -> Routing:
        routing = read_handle(handle, self.rank, self.group_size)
        if routing.channels != channels:
            raise ArgumentError(
                "config.num_sms",
                f"{2 * channels}",
                f"{2 * routing.channels}, as for the dispatch that made the handle",
            )
        return routing

    def _plan(self, routing: Routing, lanes: int) -> Plan:
        """The plan of a handle: of what it does not say, nothing is needed for whole rows."""
        received, ranks = routing.received, self.group_size
        return Plan(
            ranks=ranks,
            num_experts=ranks,
            top_k=lanes,
            tokens=routing.is_token_in_rank.shape[0],
            is_token_in_rank=routing.is_token_in_rank,
            received=received,
            source_prefix=routing.source_prefix,
            source_token=routing.source_token,
            topk_idx=torch.full((received, lanes), -1),
            topk_weights=None,
            tokens_per_expert=torch.zeros(1, dtype=torch.int32),
            offsets=torch.zeros(2, dtype=torch.int64),
            rows_of=torch.full((received, lanes), -1, dtype=torch.int32),
            capacity=routing.rows if routing.rows > received else None,
        )


def _send(mode: HighThroughput, x: Rows, route: Route, num_worst_tokens: int) -> Dispatched:
    try:
        return mode.dispatch(
            x,
            route.topk_idx,
            route.topk_weights,
            num_experts=route.num_experts,
            layout="token_major",
            capacity=num_worst_tokens or None,
        )
    except ArgumentError as error:
        if error.argument == "capacity":  # known only once the counts are
            raise ArgumentError("num_worst_tokens", error.value, error.bound) from error
        raise


def _check_worst(num_worst_tokens: int, route: Route) -> None:
    if num_worst_tokens and route.topk_weights is None:
        raise ArgumentError(
            "num_worst_tokens", num_worst_tokens, "0 without topk_idx and topk_weights"
        )


def _check_reuse(given: Given, routing: Routing, num_worst_tokens: int) -> None:
    """Raises ArgumentError for what does not go with a handle."""
    for name, tensor in given.items():
        if tensor is not None:
            raise ArgumentError(name, "given", "None with a handle, which has the routing")
    if num_worst_tokens not in (0, routing.rows):
        bound = f"0 or {routing.rows}, as for the handle"
        raise ArgumentError("num_worst_tokens", num_worst_tokens, bound)


def _rows_of(dispatched: Dispatched) -> Rows:
    if dispatched.scales is None:
        return dispatched.tokens
    return dispatched.tokens, dispatched.scales


def _topk_of(
    dispatched: Dispatched, route: Route
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """The received top-k, -1 and 0 in rows that no token fills."""
    plan = dispatched.plan
    if route.topk_weights is None:
        return None, None
    assert plan.topk_weights is not None
    rows, received = dispatched.tokens.shape[0], plan.received
    if rows == received:
        return plan.topk_idx, plan.topk_weights
    topk_idx = torch.full((rows, plan.topk_idx.shape[1]), -1)
    topk_weights = torch.zeros((rows, plan.topk_idx.shape[1]))
    topk_idx[:received], topk_weights[:received] = plan.topk_idx, plan.topk_weights
    return topk_idx, topk_weights


def _describe(
    runtime: Runtime, route: Route, dispatched: Dispatched, channels: int
) -> tuple[torch.Tensor, Handle]:
    """Rows of each local expert ``[E_l]``, as often as named, and the handle. Collective."""
    plan = dispatched.plan
    ranks, experts = runtime.ranks, route.tokens_per_expert.shape[0]
    tokens = torch.tensor([plan.tokens], dtype=torch.int32)
    numbers = torch.cat([tokens, route.tokens_per_rank, route.tokens_per_expert])
    facts = {"config.num_sms": 2 * channels, "num_experts": experts}
    gathered = runtime.exchange.gather("dispatch", facts, numbers)
    runtime.check_complete("exchange of handles")
    num_tokens, per_rank, per_expert = gathered.split([1, ranks, experts], dim=1)
    local = experts // ranks
    counts = per_expert[:, runtime.rank * local : (runtime.rank + 1) * local].sum(0)
    received = Received(
        rank=runtime.rank,
        tokens_per_rank=per_rank,
        num_tokens=num_tokens.flatten(),
        is_token_in_rank=plan.is_token_in_rank,
        source_token=plan.source_token,
    )
    return counts, make_handle(received, channels, dispatched.tokens.shape[0])
