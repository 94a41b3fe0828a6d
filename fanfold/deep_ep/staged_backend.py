"""High throughput on the host. Tensors of other devices are copied there and their results back, on
the current stream, for which the CPU waits."""

from __future__ import annotations

import torch

from fanfold.backends.high_throughput import HostHighThroughput
from fanfold.backends.staging import Staging
from fanfold.deep_ep.calls_backend import (
    CallsBackend,
    ReceivedTensors,
    gather_counts,
    received_rows,
)
from fanfold.deep_ep.ep_handle import first_rows
from fanfold.deep_ep.handles import Received, Routing, check_channels, make_handle, read_handle
from fanfold.deep_ep.names import HIGH_THROUGHPUT
from fanfold.deep_ep.routes import Bias, Route, Rows
from fanfold.deep_ep.runtime import Runtime
from fanfold.deep_ep.streams import HostStreams

__all__ = ["StagedBackend"]


class StagedBackend(CallsBackend[Routing]):
    """Calls on the host's mode; see :class:`CallsBackend`.

    Args:
        runtime: of the Buffer.
        mode: its high-throughput mode.
    """

    device = torch.device("cpu")
    looks = True

    def __init__(self, runtime: Runtime, mode: HostHighThroughput) -> None:
        super().__init__(runtime)
        self._mode = mode
        self.streams = HostStreams()

    def refuse_dispatch(self, error: BaseException, handle: object) -> None:
        """See :meth:`CallsBackend.refuse_dispatch`."""
        del handle
        self._mode.refuse_dispatch(error)

    def refuse_combine(self, error: BaseException, handle: object) -> None:
        """See :meth:`CallsBackend.refuse_combine`."""
        del handle
        self._mode.refuse_combine(error)

    def staging(self, **tensors: object) -> Staging:
        """See :meth:`CallsBackend.staging`."""
        return Staging(**tensors)

    def validate_handle(self, handle: object, channels: int) -> Routing:
        """See :meth:`CallsBackend.validate_handle`."""
        routing = read_handle(handle, self._runtime.rank, self._runtime.ranks)
        check_channels(routing.channels, channels)
        return routing

    def send(self, x: Rows, route: Route, num_worst_tokens: int, channels: int) -> ReceivedTensors:
        """See :meth:`CallsBackend.send`."""
        with HIGH_THROUGHPUT:
            dispatched = self._mode.dispatch(
                x,
                route.topk_idx,
                route.topk_weights,
                num_experts=route.num_experts,
                layout="token_major",
                capacity=num_worst_tokens or None,
            )
        self._runtime.check_complete("high_throughput dispatch")
        plan, rows = dispatched.plan, dispatched.tokens.shape[0]
        numbers = torch.cat([route.tokens_per_rank, route.tokens_per_expert])
        counts = gather_counts(self._runtime, plan.tokens, numbers, channels)
        received = Received(
            rank=self._runtime.rank,
            rank_prefix=counts.rank_prefix,
            num_tokens=counts.num_tokens,
            is_token_in_rank=plan.is_token_in_rank,
            source_token=first_rows(plan.source_token, rows, -1),
        )
        known, weights = route.topk_weights is not None, plan.topk_weights
        return ReceivedTensors(
            rows=received_rows(dispatched),
            topk_idx=first_rows(plan.topk_idx, rows, -1) if known else None,
            topk_weights=None if weights is None else first_rows(weights, rows, 0),
            named=[] if num_worst_tokens else counts.named,
            handle=make_handle(received, channels),
        )

    def send_again(self, x: Rows, handle: Routing) -> Rows:
        """See :meth:`CallsBackend.send_again`."""
        with HIGH_THROUGHPUT:
            dispatched = self._mode.dispatch_cached(x, handle.plan(1), layout="token_major")
        self._runtime.check_complete("high_throughput dispatch")
        return received_rows(dispatched)

    def combine(
        self, y: torch.Tensor, handle: Routing, weights: torch.Tensor | None, bias: Bias
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """See :meth:`CallsBackend.combine`."""
        plan = handle.plan(1 if weights is None else weights.shape[1])
        with HIGH_THROUGHPUT:
            combined = self._mode.combine(
                y, plan, layout="token_major", topk_weights=weights, bias=bias
            )
        self._runtime.check_complete("high_throughput combine")
        return combined
