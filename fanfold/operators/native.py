"""The calls of :class:`fanfold.LowLatency` and :class:`fanfold.HighThroughput` as
``torch.compile`` traces them.

Operators make the calls that they can make. The others run between two graphs. Imported where
something is traced."""

from __future__ import annotations

from typing import Any

import torch

from fanfold.operators.traced import (
    between_graphs,
    traceable,
    traced_combine,
    traced_dispatch,
    traced_weights,
)
from fanfold.results import DispatchResult, HighThroughputResult

__all__ = ["combine", "combine_weights", "dispatch"]


def dispatch(
    ep: Any,
    x: Any,
    topk_idx: torch.Tensor | None,
    topk_weights: torch.Tensor | None,
    *,
    previous: HighThroughputResult | None = None,
    capacity: int | None = None,
    global_scale: torch.Tensor | None = None,
    **options: bool,
) -> Any:
    """See the classes' ``dispatch``; ``global_scale`` and ``options`` are what no operator
    takes."""
    special = any(options.values()) or global_scale is not None or not isinstance(x, torch.Tensor)
    misused = previous is not None and (topk_idx is not None or capacity is not None)
    if special or misused or not traceable(ep, previous):
        given: dict[str, Any] = dict(options)
        if global_scale is not None:
            given["global_scale"] = global_scale
        if previous is not None:
            given["previous"] = previous
        if capacity is not None:
            given["capacity"] = capacity
        eager = ep.registration.base.dispatch
        return between_graphs(eager, ep, x, topk_idx, topk_weights, **given)
    weights = None if topk_weights is None else topk_weights.detach()
    name = ep.registration.native_name
    _, _, received = traced_dispatch(
        ep, name, x.detach(), topk_idx, weights, previous=previous, capacity=capacity
    )
    return received


def combine(
    ep: Any,
    y: torch.Tensor,
    received: DispatchResult,
    *,
    weighted: bool,
    bias: torch.Tensor | None,
    out: torch.Tensor | None,
    **options: bool,
) -> Any:
    """See the classes' ``combine``; ``options`` are those of low latency."""
    if options.get("return_hook", False) or not traceable(ep, received):
        given: dict[str, Any] = {"weighted": weighted, "out": out, **options}
        if bias is not None:
            given["bias"] = bias
        return between_graphs(ep.registration.base.combine, ep, y, received, **given)
    weights = None
    if ep.mode == "high_throughput":
        weights = received.weights if weighted else None
        weighted = weights is not None
    if bias is not None:
        bias = bias.detach()
    logfmt = options.get("logfmt", False)
    result = traced_combine(
        y.detach(), received, weights, weighted=weighted, bias=bias, logfmt=logfmt
    )
    return result if out is None else out.copy_(result)


def combine_weights(ep: Any, row_values: torch.Tensor, received: HighThroughputResult) -> Any:
    """See :meth:`fanfold.HighThroughput.combine_weights`."""
    if not traceable(ep, received):
        return between_graphs(ep.registration.base.combine_weights, ep, row_values, received)
    return traced_weights(row_values.detach(), received, ep.top_k)
