"""The calls of the native face as ``torch.compile`` traces them.

Operators make those that they can make. The others run between two graphs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from fanfold.formats import RowFormat, ScaleFormat, scale_columns
from fanfold.geometry import Geometry
from fanfold.operators import (
    Shapes,
    traceable,
    traced_combine,
    traced_dispatch,
    traced_weights,
)
from fanfold.received import Received

__all__ = ["combine", "combine_weights", "dispatch", "shapes_of"]


def shapes_of(
    geometry: Geometry, mode: str, formats: tuple[RowFormat, ScaleFormat], alignment: int
) -> Shapes:
    """What the shapes of results in ``mode`` follow from."""
    row_format, scale_format = formats
    scaled = row_format is RowFormat.FP8
    experts, rows = geometry.experts_per_rank, geometry.expert_capacity
    if mode == "high_throughput":
        rows = experts * -(-rows // alignment) * alignment
    return Shapes(
        mode=mode,
        experts=experts,
        rows=rows,
        hidden=geometry.hidden,
        top_k=geometry.top_k,
        dtype=str(row_format.dtype).removeprefix("torch."),
        scale_columns=scale_columns(geometry.hidden, scale_format) if scaled else 0,
        scale_dtype=str(scale_format.dtype).removeprefix("torch."),
    )


def dispatch(
    ep: Any, outside: Callable[..., Any], x: Any, topk_idx: torch.Tensor | None,
    topk_weights: torch.Tensor | None, *, previous: Received | None, capacity: int | None,
    **options: bool,
) -> Any:  # fmt: skip
    """See :meth:`ExpertParallel.dispatch`, which is ``outside``."""
    special = any(options.values()) or not isinstance(x, torch.Tensor)
    misused = previous is not None and (
        ep.mode == "low_latency" or topk_idx is not None or capacity is not None
    )
    if special or misused or not traceable(ep, previous):
        return outside(
            ep, x, topk_idx, topk_weights, previous=previous, capacity=capacity, **options
        )
    weights = None if topk_weights is None else topk_weights.detach()
    name = ep.registration.native_name
    _, _, received = traced_dispatch(
        ep, name, x.detach(), topk_idx, weights, previous=previous, capacity=capacity
    )
    return received


def combine(
    ep: Any, outside: Callable[..., Any], y: torch.Tensor, received: Received, *, weighted: bool,
    bias: torch.Tensor | None, out: torch.Tensor | None, **options: bool,
) -> Any:  # fmt: skip
    """See :meth:`ExpertParallel.combine`, which is ``outside``."""
    if options["return_hook"] or not traceable(ep, received):
        return outside(ep, y, received, weighted=weighted, bias=bias, out=out, **options)
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


def combine_weights(
    ep: Any, row_values: torch.Tensor, received: Received, outside: Callable[..., torch.Tensor]
) -> torch.Tensor:
    """See :meth:`ExpertParallel.combine_weights`, which is ``outside``."""
    if not traceable(ep, received):
        return outside(ep, row_values, received)
    return traced_weights(row_values.detach(), received, ep.top_k)
