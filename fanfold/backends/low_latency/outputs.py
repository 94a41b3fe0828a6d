"""What the low-latency mode's calls on GPUs return, and how it is allocated."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fanfold import _core
from fanfold.backends.allocator import Blank, Empty, blank
from fanfold.backends.low_latency.protocol import (
    AnyRouting,
    CudaRouting,
    Dispatched,
    LateRouting,
    RoutingLayout,
)
from fanfold.formats import RowFormat, ScaleFormat, nvfp4_scale_shape, scale_columns
from fanfold.geometry import Geometry

__all__ = [
    "Outputs",
    "aborted_of",
    "read_of",
    "table_of",
    "written_of",
]

_ABORTED = blank(torch.int64, 1)


@dataclass(frozen=True, slots=True)
class Outputs:
    """What the dispatches of one kind return. Fields None are not there.

    Attributes:
        tokens, scales, counts: of :class:`Dispatched`.
        block: of :class:`CudaRouting`, whose weights it holds if ``weighted``.
        ranges, source_tokens: of :class:`LateRouting`.
        row_weights: with a :class:`LateRouting`, the weights of the rows.
        layout: of ``block``.
        weighted: whether weights come along.
    """

    tokens: Blank
    scales: Blank | None
    counts: Blank
    block: Blank | None
    ranges: Blank
    source_tokens: Blank
    row_weights: Blank | None
    layout: RoutingLayout
    weighted: bool

    @classmethod
    def of(
        cls,
        geometry: Geometry,
        row_format: RowFormat,
        scale_format: ScaleFormat,
        *,
        weighted: bool,
        layout: RoutingLayout,
        late: bool,
    ) -> Outputs:
        """The outputs for a geometry, these formats, and weights that come along or not, or with
        combine."""
        local, capacity = geometry.experts_per_rank, geometry.expert_capacity
        scales: Blank | None = None
        if row_format is RowFormat.FP8:
            columns = scale_columns(geometry.hidden, scale_format)
            strides = (columns * capacity, 1, capacity)
            scales = ((local, capacity, columns), strides, scale_format.dtype)
        elif row_format is RowFormat.NVFP4:
            shape = nvfp4_scale_shape(local, capacity, geometry.hidden)
            scales = blank(torch.float8_e4m3fn, *shape)
        words = layout.words if weighted else layout.row_weights_at
        return cls(
            tokens=blank(row_format.dtype, local, capacity, row_format.columns(geometry.hidden)),
            scales=scales,
            counts=blank(torch.int32, local),
            block=None if late else blank(torch.int32, words),
            ranges=blank(torch.int64, *layout.ranges),
            source_tokens=blank(torch.int32, *layout.rows),
            row_weights=blank(torch.float32, *layout.rows) if weighted else None,
            layout=layout,
            weighted=weighted,
        )

    def allocate(
        self,
        empty: Empty,
        fast_path: _core.CudaFastPath,
        args: _core.CudaDispatchArgs,
        tokens: int,
        stream: int,
    ) -> Dispatched:
        """The tensors of one call on ``stream``, of which ``tokens`` are this rank's own; ``args``
        learn where they are."""
        rows, counts = empty(*self.tokens), empty(*self.counts)
        scales = None if self.scales is None else empty(*self.scales)
        if self.block is None:
            ranges, source_tokens = empty(*self.ranges), empty(*self.source_tokens)
            weights = None if self.row_weights is None else empty(*self.row_weights)
            fast_path.place_late(args, rows, scales, counts, ranges, source_tokens, weights)
            aborted = empty(*_ABORTED)
            args.aborted = aborted.data_ptr()
            late = LateRouting(ranges, source_tokens, aborted)
            return Dispatched(rows, scales, counts, late, weights)
        block = empty(*self.block)
        weighted = self.weighted
        fast_path.place(args, rows, scales, counts, block, weighted)
        routing = CudaRouting(block, self.layout, tokens, weighted, stream)
        return Dispatched(rows, scales, counts, routing)


def written_of(dispatched: Dispatched) -> tuple[torch.Tensor | None, ...]:
    """What a dispatch's kernel writes to."""
    routing = dispatched.routing
    written = (dispatched.tokens, dispatched.scales, dispatched.counts)
    if isinstance(routing, CudaRouting):
        return *written, routing.block
    aborted = routing.aborted if isinstance(routing, LateRouting) else None
    return *written, dispatched.own_weights, routing.ranges, routing.source_tokens, aborted


def read_of(routing: AnyRouting) -> tuple[torch.Tensor | None, ...]:
    """What a combine's kernel reads of a routing."""
    if isinstance(routing, CudaRouting):
        return (routing.block,)
    return routing.ranges, routing.aborted if isinstance(routing, LateRouting) else None


def aborted_of(routing: AnyRouting) -> int:
    """The address of the word that tells a combine with late weights whether its dispatch was
    aborted; 0 where the table says so."""
    if not isinstance(routing, LateRouting):
        return 0
    word = routing.ranges if routing.aborted is None else routing.aborted
    return word.data_ptr()


def table_of(routing: AnyRouting) -> int:
    """The address of what a dispatch's kernel left for its combine."""
    assert isinstance(routing, CudaRouting)
    return routing.block.data_ptr() + 4 * routing.layout.table_at
