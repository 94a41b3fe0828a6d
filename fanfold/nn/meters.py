"""What a layer's exchanges with other ranks cost: a dispatcher that keeps count."""

from __future__ import annotations

import time
from typing import Any

import torch

from fanfold.base_dispatcher import BaseDispatcher
from fanfold.geometry import Mode
from fanfold.nn.statistics import MoEStatistics
from fanfold.operators import Registration, register
from fanfold.results import DispatchResult

__all__ = ["Meter", "Meters"]


class Meters:
    """Makes a meter for each dispatch of a layer, also where a compiled graph calls it."""

    def __init__(self, ep: BaseDispatcher, statistics: MoEStatistics) -> None:
        self._ep, self._statistics = ep, statistics
        self.registration = register(self, ep.registration.shapes, kind=Meter)

    def for_routing(self, topk_idx: torch.Tensor) -> Meter:
        """The meter of a dispatch by ``topk_idx`` and of the calls that belong to it."""
        return Meter(self._ep, self._statistics, topk_idx, self.registration)


class Meter:
    """A dispatcher that adds its times and bytes to a layer's statistics."""

    def __init__(
        self,
        ep: BaseDispatcher,
        statistics: MoEStatistics,
        topk_idx: torch.Tensor,
        registration: Registration,
    ) -> None:
        self._ep, self._statistics = ep, statistics
        self.registration, self.owner = registration, ep
        self._remote_rows = _remote_rows(ep, topk_idx)

    @property
    def mode(self) -> Mode:
        """The mode of the wrapped dispatcher."""
        return self._ep.mode

    def refuse_dispatch(self, error: BaseException) -> None:
        """See :meth:`fanfold.HighThroughput.refuse_dispatch`."""
        self._ep.refuse_dispatch(error)

    def refuse_combine(self, error: BaseException) -> None:
        """See :meth:`fanfold.HighThroughput.refuse_combine`."""
        self._ep.refuse_combine(error)

    def dispatch(
        self,
        x: torch.Tensor,
        topk_idx: torch.Tensor | None = None,
        topk_weights: torch.Tensor | None = None,
        **options: Any,
    ) -> DispatchResult:
        """See :meth:`fanfold.HighThroughput.dispatch`."""
        begin = time.perf_counter()
        received: DispatchResult = self._ep.dispatch(x, topk_idx, topk_weights, **options)
        self._statistics.dispatch_seconds += time.perf_counter() - begin
        if options.get("previous") is None:
            self._statistics.count_rows(x.shape[0], received.tokens_per_expert)
        self._statistics.count_bytes("bytes_sent", self._remote_rows, _row_bytes(received))
        return received

    def combine(
        self,
        y: torch.Tensor,
        received: DispatchResult,
        *,
        weighted: bool = True,
        **options: Any,
    ) -> torch.Tensor:
        """See :meth:`fanfold.HighThroughput.combine`."""
        begin = time.perf_counter()
        out: torch.Tensor = self._ep.combine(y, received, weighted=weighted, **options)
        self._statistics.combine_seconds += time.perf_counter() - begin
        row_bytes = y.shape[-1] * y.element_size()
        self._statistics.count_bytes("bytes_returned", self._remote_rows, row_bytes)
        return out

    def combine_weights(self, row_values: torch.Tensor, received: DispatchResult) -> torch.Tensor:
        """See :meth:`fanfold.HighThroughput.combine_weights`."""
        begin = time.perf_counter()
        values: torch.Tensor = self._ep.combine_weights(row_values, received)  # type: ignore[attr-defined]
        self._statistics.combine_seconds += time.perf_counter() - begin
        return values


def _remote_rows(ep: BaseDispatcher, topk_idx: torch.Tensor) -> torch.Tensor:
    """Pairs of one of this rank's tokens and another rank that holds one of its experts: an int64
    scalar where ``topk_idx`` is, as reading it would wait."""
    ranks = torch.where(topk_idx < 0, ep.rank, topk_idx // ep.experts_per_rank)
    reached = topk_idx.new_zeros((topk_idx.shape[0], ep.ranks), dtype=torch.bool)
    reached.scatter_(1, ranks, True)
    reached[:, ep.rank] = False
    return reached.sum()


def _row_bytes(received: DispatchResult) -> int:
    """Bytes of one row as it travelled."""
    row = received.tokens.shape[-1] * received.tokens.element_size()
    if received.scales is not None:
        row += received.scales.shape[-1] * received.scales.element_size()
    return row
