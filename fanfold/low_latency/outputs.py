"""How the low-latency mode on GPUs allocates what its calls return: from PyTorch's allocator, and
with as little of the CPU's time as that takes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from fanfold import _core
from fanfold.formats import RowFormat, ScaleFormat, scale_columns
from fanfold.geometry import Geometry
from fanfold.low_latency.calls import CudaRouting, Dispatched, LateRouting, RoutingLayout

__all__ = ["Allocator", "Blank", "Outputs"]

Sizes = tuple[int, ...]
Blank = tuple[Sizes, Sizes, torch.dtype]
"""A tensor to be allocated: shape, strides, dtype."""
Empty = Callable[[Sizes, Sizes, torch.dtype], torch.Tensor]


def _blank(dtype: torch.dtype, *shape: int) -> Blank:
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return shape, tuple(reversed(strides)), dtype


class Allocator:
    """Allocates tensors on one device.

    ``torch.empty`` spends more time on the way to the allocator than in it. PyTorch has a shorter
    way for the code that its own compiler writes, on the current device only; where that is another
    one, or this PyTorch does not have it, :meth:`empty` is the long way.

    Args:
        device: with an index, if it is a GPU.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._index = device.index
        guards = getattr(getattr(torch._C, "_dynamo", None), "guards", None)
        self._short: Empty | None = getattr(guards, f"_empty_strided_{device.type}", None)

    def empty(self) -> Empty:
        """What allocates here and now."""
        if self._short is None or torch._C._cuda_getDevice() != self._index:
            return self._long
        return self._short

    def _long(self, shape: Sizes, strides: Sizes, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty_strided(shape, strides, dtype=dtype, device=self._device)


@dataclass(frozen=True)
class Outputs:
    """What the dispatches of one kind return. Fields None are not there.

    Attributes:
        tokens, scales, counts, row_weights: of :class:`Dispatched`.
        ranges, source_tokens: of :class:`LateRouting`.
        block: of :class:`CudaRouting`.
        layout: of that block.
    """

    tokens: Blank
    scales: Blank | None
    counts: Blank
    row_weights: Blank | None
    ranges: Blank
    source_tokens: Blank
    block: Blank | None
    layout: RoutingLayout

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
        scales = None
        if row_format is RowFormat.FP8:
            columns = scale_columns(geometry.hidden, scale_format)
            strides = (columns * capacity, 1, capacity)
            scales = ((local, capacity, columns), strides, scale_format.dtype)
        return cls(
            tokens=_blank(row_format.dtype, local, capacity, geometry.hidden),
            scales=scales,
            counts=_blank(torch.int32, local),
            row_weights=_blank(torch.float32, local, capacity) if weighted else None,
            ranges=_blank(torch.int64, *layout.ranges),
            source_tokens=_blank(torch.int32, *layout.source_tokens),
            block=None if late else _blank(torch.int32, layout.words),
            layout=layout,
        )

    def allocate(
        self, empty: Empty, args: _core.CudaDispatchArgs, tokens: int, weighted: bool
    ) -> Dispatched:
        """The tensors of one call, of which ``tokens`` are this rank's own; ``args`` learn where
        they are."""
        rows, counts = empty(*self.tokens), empty(*self.counts)
        args.rows, args.counts = rows.data_ptr(), counts.data_ptr()
        scales = weights = None
        if self.scales is not None:
            scales = empty(*self.scales)
            args.scales = scales.data_ptr()
        if self.row_weights is not None:
            weights = empty(*self.row_weights)
            args.row_weights = weights.data_ptr()
        if self.block is None:
            ranges, source_tokens = empty(*self.ranges), empty(*self.source_tokens)
            args.ranges, args.source_tokens = ranges.data_ptr(), source_tokens.data_ptr()
            return Dispatched(rows, scales, counts, weights, LateRouting(ranges, source_tokens))
        block = empty(*self.block)
        base, layout = block.data_ptr(), self.layout
        args.ranges, args.table = base, base + 4 * layout.table_at
        args.source_tokens = base + 4 * layout.source_tokens_at
        routing = CudaRouting(block, layout, tokens, weighted)
        return Dispatched(rows, scales, counts, weights, routing)
