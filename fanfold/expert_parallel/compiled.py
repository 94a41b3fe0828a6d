"""The calls of the native face as ``torch.compile`` traces them.

Operators make those that they can make. The others run between two graphs. Imported where
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
from fanfold.received import Received

__all__ = ["combine", "combine_weights", "dispatch"]


def dispatch(
    ep: Any, x: Any, topk_idx: torch.Tensor | None,
    topk_weights: torch.Tensor | None, *, previous: Received | None, capacity: int | None,
    **options: bool,
) -> Any:  # fmt: skip
    """See :meth:`ExpertParallel.dispatch`."""
    special = any(options.values()) or not isinstance(x, torch.Tensor)
    misused = previous is not None and (
        ep.mode == "low_latency" or topk_idx is not None or capacity is not None
    )
    if special or misused or not traceable(ep, previous):
        return between_graphs(
            ep.registration.base.dispatch,
            ep,
            x,
            topk_idx,
            topk_weights,
            previous=previous,
            capacity=capacity,
            **options,
        )
    weights = None if topk_weights is None else topk_weights.detach()
    name = ep.registration.native_name
    _, _, received = traced_dispatch(
        ep, name, x.detach(), topk_idx, weights, previous=previous, capacity=capacity
    )
    return received


def combine(
    ep: Any, y: torch.Tensor, received: Received, *, weighted: bool,
    bias: torch.Tensor | None, out: torch.Tensor | None, **options: bool,
) -> Any:  # fmt: skip
    """See :meth:`ExpertParallel.combine`."""
    if options["return_hook"] or not traceable(ep, received):
        return between_graphs(
            ep.registration.base.combine,
            ep,
            y,
            received,
            weighted=weighted,
            bias=bias,
            out=out,
            **options,
        )
    weights = None
    if ep.mode == "high_throughput":
        weights = received.weights if weighted else None
        weighted = weights is not None
    if bias is not None:
        bias = bias.detach()
    result = traced_combine(
        y.detach(), received, weights, weighted=weighted, bias=bias, logfmt=options["logfmt"]
    )
    return result if out is None else out.copy_(result)


def combine_weights(ep: Any, row_values: torch.Tensor, received: Received) -> torch.Tensor:
    """See :meth:`ExpertParallel.combine_weights`."""
    if not traceable(ep, received):
        return between_graphs(ep.registration.base.combine_weights, ep, row_values, received)  # type: ignore[no-any-return]
    return traced_weights(row_values.detach(), received, ep.top_k)
