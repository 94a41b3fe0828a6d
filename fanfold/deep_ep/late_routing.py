"""DeepEP's low-latency handle: from a dispatch, and to its combine."""

from __future__ import annotations

from typing import Any

import torch

from fanfold.geometry import Geometry
from fanfold.low_latency import Dispatched, LateRouting

__all__ = ["LowLatencyHandle", "handle_of", "late_routing", "routing_of"]

LowLatencyHandle = tuple[torch.Tensor, torch.Tensor, int, int, int]

_VOIDED = "_fanfold_voided"  # attribute of a handle's layout_range


def handle_of(dispatched: Dispatched, geometry: Geometry) -> LowLatencyHandle:
    """DeepEP's handle.

    Its numbers are the geometry's own objects, so that a fast check can compare by identity. What
    combine must know for certain goes along with ``layout_range``, whose content callers may
    change; it stays with that tensor in whatever tuple or list.
    """
    routing = dispatched.routing
    if isinstance(routing, LateRouting) and routing.voided is not None:
        setattr(routing.ranges, _VOIDED, routing.voided)
    return (
        routing.source_tokens,
        routing.ranges,
        geometry.max_tokens,
        geometry.hidden,
        geometry.num_experts,
    )


def late_routing(handle: LowLatencyHandle | list[Any]) -> LateRouting:
    """What a combine takes from its handle."""
    return LateRouting(handle[1], handle[0], getattr(handle[1], _VOIDED, None))


def routing_of(handle: object) -> LateRouting | None:
    """What a combine that is refused needs of its handle, as far as that is one."""
    if isinstance(handle, tuple | list) and len(handle) == 5:
        return late_routing(handle)
    return None
