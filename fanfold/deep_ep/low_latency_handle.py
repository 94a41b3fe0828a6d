"""DeepEP's low-latency handle: a tuple of two tensors and three sizes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from fanfold.backends.low_latency import Dispatched, LateRouting
from fanfold.deep_ep.sizes import check_count
from fanfold.errors import ArgumentError
from fanfold.geometry import Geometry, check_tensor
from fanfold.representation import show_fields, worded

__all__ = ["LowLatencyHandle", "ReadHandle", "handle_of", "late_routing", "routing_of"]

LowLatencyHandle = tuple[torch.Tensor, torch.Tensor, int, int, int]

_ABORTED = "_fanfold_aborted"  # attribute of a handle's layout_range


@dataclass(frozen=True)
class ReadHandle:
    """What a low-latency handle tuple says; DeepEP's layout and meaning."""

    source_info: torch.Tensor
    layout_range: torch.Tensor
    max_tokens: int
    hidden: int
    num_experts: int

    __repr__ = show_fields

    @classmethod
    def of(cls, handle: object) -> ReadHandle:
        """What ``handle`` says.

        Raises:
            ArgumentError: it is none.
        """
        if not isinstance(handle, tuple | list) or len(handle) != 5:
            raise ArgumentError(
                "handle",
                worded(handle),
                "the tuple (src_info, layout_range, num_max_dispatch_tokens_per_rank, hidden, "
                "num_experts) that low_latency_dispatch returned",
            )
        for place, name in ((2, "num_max_dispatch_tokens_per_rank"), (3, "hidden"),
                            (4, "num_experts")):  # fmt: skip
            check_count(f"handle[{place}] ({name})", handle[place], 0)
        return cls(*handle)

    def sizes(self, topk_idx: torch.Tensor) -> tuple[int, int, torch.Tensor, int]:
        """max_tokens, num_experts, ``topk_idx`` and hidden of a combine with this handle."""
        return self.max_tokens, self.num_experts, topk_idx, self.hidden

    def check(self, geometry: Geometry, device: torch.device) -> None:
        """Raises ArgumentError unless the tensors are those of ``geometry``, on ``device``.

        What is in them is checked on the host only; on a GPU the kernels bound what they read.
        """
        shape = (geometry.experts_per_rank, geometry.expert_capacity)
        name = "handle[0] (src_info)"
        check_tensor(name, self.source_info, shape, (torch.int32,), device=device)
        shape = (geometry.experts_per_rank, geometry.ranks)
        name = "handle[1] (layout_range)"
        check_tensor(name, self.layout_range, shape, (torch.int64,), device=device)
        if device.type != "cpu":
            return
        # Rows of source r begin below r * M; from there combine reads at most M, so no handle that
        # passes this can make it read outside of the experts' outputs.
        begins = self.layout_range >> 32
        limits = torch.arange(geometry.ranks, dtype=torch.int64, device="cpu") * geometry.max_tokens
        if bool(((begins < 0) | (begins > limits)).any()):
            raise ArgumentError(
                name,
                "something that points outside of the received rows",
                "count | begin << 32 as low_latency_dispatch left it",
            )


def handle_of(dispatched: Dispatched, geometry: Geometry) -> LowLatencyHandle:
    """DeepEP's handle.

    Its numbers are the geometry's own objects, so that a fast check can compare by identity. What
    combine must know for certain goes along with ``layout_range``, whose content callers may
    change; it stays with that tensor in whatever tuple or list.
    """
    routing = dispatched.routing
    if isinstance(routing, LateRouting) and routing.aborted is not None:
        setattr(routing.ranges, _ABORTED, routing.aborted)
    return (
        routing.source_tokens,
        routing.ranges,
        geometry.max_tokens,
        geometry.hidden,
        geometry.num_experts,
    )


def late_routing(handle: LowLatencyHandle | list[Any]) -> LateRouting:
    """What a combine takes from its handle."""
    return LateRouting(handle[1], handle[0], getattr(handle[1], _ABORTED, None))


def routing_of(handle: object) -> LateRouting | None:
    """What a combine that is refused needs of its handle, as far as that is one."""
    if isinstance(handle, tuple | list) and len(handle) == 5:
        return late_routing(handle)
    return None
