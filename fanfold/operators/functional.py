"""``fanfold.functional`` as ``torch.compile`` traces it.

Operators make the calls that they can make. The others run between two graphs. Imported where
something is traced. ``eager`` is the function that is traced, ``trained`` whether a gradient is
wanted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from fanfold.operators import Dispatcher
from fanfold.operators.calls import check_weights
from fanfold.operators.traced import between_graphs, traceable, traced_combine, traced_dispatch
from fanfold.results import DispatchResult

__all__ = ["combine", "dispatch"]

Eager = Callable[..., Any]


def dispatch(
    eager: Eager,
    ep: Dispatcher,
    x: torch.Tensor,
    topk_idx: torch.Tensor,
    topk_weights: torch.Tensor | None,
    capacity: int | None,
    trained: bool,
) -> tuple[torch.Tensor, torch.Tensor | None, DispatchResult]:
    """See :func:`fanfold.functional.dispatch`."""
    if not traceable(ep):
        return between_graphs(eager, ep, x, topk_idx, topk_weights, capacity=capacity)  # type: ignore[no-any-return]
    registration = ep.registration  # type: ignore[attr-defined]
    name = registration.name
    trainable = registration.shapes.trainable
    if not trainable:  # the operator raises, and has no backward pass to trace
        x = x.detach()
        topk_weights = None if topk_weights is None else topk_weights.detach()
    tokens, weights, received = traced_dispatch(
        ep, name, x, topk_idx, topk_weights, capacity=capacity, trained=trained
    )
    if trained and trainable:
        return tokens, weights, received
    return received.tokens, received.weights, received


def combine(
    eager: Eager,
    ep: Dispatcher,
    y: torch.Tensor,
    received: DispatchResult,
    weights: torch.Tensor | None,
    bias: torch.Tensor | None,
    trained: bool,
) -> torch.Tensor:
    """See :func:`fanfold.functional.combine`."""
    if not traceable(ep, received):
        return between_graphs(eager, ep, y, received, weights, bias=bias)  # type: ignore[no-any-return]
    weighted = weights is not None
    if not trained:
        check_weights(ep, received, weights)
    if ep.mode == "low_latency":
        # If a gradient is wanted, the operator raises, and has no backward pass to trace.
        y, weights = y.detach(), None
    return traced_combine(y, received, weights, weighted=weighted, bias=bias, trained=trained)
