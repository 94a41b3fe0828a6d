"""The fast path of a low-latency call on a GPU: validates its tensors in well under a microsecond.

It accepts only tensors that the checks of :mod:`fanfold.backends.low_latency.protocol` accept, and
writes their addresses into the kernel's arguments. A tensor that it does not accept may still be
right: then the checks decide, and raise what is wrong.

There are two versions that accept the same: one in C++, where PyTorch lets tensors be read from
there, and one in Python.
"""

from __future__ import annotations

from typing import Protocol

import torch

from fanfold import _core
from fanfold.backends.low_latency.protocol import RoutingLayout
from fanfold.backends.low_latency.sizes import core_geometry
from fanfold.errors import ArgumentError
from fanfold.geometry import Geometry, is_plain

__all__ = [
    "FastPath",
    "PythonFastPath",
    "check_apart",
    "fast_path_of",
    "set_outputs",
    "set_tokens",
    "set_topk",
]

_UNDECIDED = -1


class FastPath(Protocol):
    """Validates the calls of one geometry. If it does not accept a call, ``args`` stay as they
    were. Objects may be anything."""

    def dispatch(
        self, args: _core.CudaDispatchArgs, x: object, topk_idx: object, topk_weights: object
    ) -> int:
        """The number of tokens of a dispatch; -1 where ``check_tokens`` must decide, or ``x`` is
        not on a 16-byte boundary. ``topk_weights`` may be None."""

    def late(
        self, args: _core.CudaCombineArgs, ranges: object, topk_idx: object, topk_weights: object
    ) -> int:
        """The number of tokens of a combine with late weights; -1 where the checks must decide."""

    def combine(
        self, args: _core.CudaCombineArgs, tokens: int, y: object, out: object, block: object
    ) -> bool:
        """Whether a combine of so many tokens may read ``y`` and write ``out``, as far as can be
        seen; with the ``block`` of its :class:`CudaRouting`, or None."""

    def suits(self, x: object, topk_idx: object) -> bool:
        """Whether a dispatch of these has the geometry, as far as their columns tell."""

    def suits_handle(
        self, y: object, source_tokens: object, ranges: object, topk_idx: object
    ) -> bool:
        """Whether ``y`` and what a dispatch left with its caller are tensors as a combine of the
        geometry takes them, and the columns of ``topk_idx`` as many."""

    def place(
        self,
        args: _core.CudaDispatchArgs,
        rows: torch.Tensor,
        scales: torch.Tensor | None,
        counts: torch.Tensor,
        block: torch.Tensor,
        weighted: bool,
    ) -> None:
        """Tells ``args`` where a dispatch writes that leaves a :class:`CudaRouting`."""

    def place_late(
        self,
        args: _core.CudaDispatchArgs,
        rows: torch.Tensor,
        scales: torch.Tensor | None,
        counts: torch.Tensor,
        ranges: torch.Tensor,
        source_tokens: torch.Tensor,
        row_weights: torch.Tensor | None,
    ) -> None:
        """The same where it leaves a :class:`LateRouting`."""


def fast_path_of(geometry: Geometry, layout: RoutingLayout, device: torch.device) -> FastPath:
    """The quicker of both ways that this PyTorch offers.

    Args:
        geometry: of the calls.
        layout: of the blocks of their routings.
        device: where tensors must be.
    """
    parts = (layout.table_at, layout.source_tokens_at, layout.row_weights_at)
    like, core = torch.empty(0, device=device, dtype=torch.float32), core_geometry(geometry)
    fast_path = _core.CudaFastPath.of(like, core, *(4 * part for part in parts))
    return PythonFastPath(geometry, layout, device) if fast_path is None else fast_path


class PythonFastPath:
    """The fast path in Python; see :func:`fast_path_of`."""

    def __init__(self, geometry: Geometry, layout: RoutingLayout, device: torch.device) -> None:
        local, capacity = geometry.experts_per_rank, geometry.expert_capacity
        self._geometry = geometry
        self._layout = layout
        self._device = device
        self._outputs = (local, capacity, geometry.hidden)
        # Of the last call, as the next one most often has as many tokens.
        self._tokens = 0
        self._x = (0, geometry.hidden)
        self._choices = (0, geometry.top_k)

    def dispatch(
        self, args: _core.CudaDispatchArgs, x: object, topk_idx: object, topk_weights: object
    ) -> int:
        """See :class:`FastPath`."""
        device = self._device
        if type(x) is not torch.Tensor:
            return _UNDECIDED
        if x.shape != self._x:
            self._expect(x)
        if (
            is_plain(x, self._x, torch.bfloat16, device)
            and is_plain(topk_idx, self._choices, torch.int64, device)
            and (
                topk_weights is None or is_plain(topk_weights, self._choices, torch.float32, device)
            )
            and x.data_ptr() % 16 == 0
        ):
            set_tokens(args, x, topk_idx, topk_weights)  # type: ignore[arg-type]
            return self._tokens
        return _UNDECIDED

    def late(
        self, args: _core.CudaCombineArgs, ranges: object, topk_idx: object, topk_weights: object
    ) -> int:
        """See :class:`FastPath`."""
        device = self._device
        if type(topk_idx) is not torch.Tensor:
            return _UNDECIDED
        if topk_idx.shape != self._choices:
            self._expect(topk_idx)
        if (
            is_plain(topk_idx, self._choices, torch.int64, device)
            and is_plain(topk_weights, self._choices, torch.float32, device)
            and is_plain(ranges, self._layout.ranges, torch.int64, device)
        ):
            set_topk(args, ranges, topk_idx, topk_weights)  # type: ignore[arg-type]
            return self._tokens
        return _UNDECIDED

    def combine(
        self, args: _core.CudaCombineArgs, tokens: int, y: object, out: object, block: object
    ) -> bool:
        """See :class:`FastPath`."""
        device, bfloat16 = self._device, torch.bfloat16
        if not is_plain(y, self._outputs, bfloat16, device):
            return False
        if not is_plain(out, (tokens, self._geometry.hidden), bfloat16, device):
            return False
        if block is not None and type(block) is not torch.Tensor:
            return False
        outputs, result = y.data_ptr(), out.data_ptr()  # type: ignore[attr-defined]
        row = 2 * self._geometry.hidden
        expert = row * self._geometry.expert_capacity
        y_ends, out_ends = outputs + expert * self._outputs[0], result + row * tokens
        if outputs % 16 or result % 16 or (outputs < out_ends and result < y_ends):
            return False
        args.tokens, args.y, args.out = tokens, outputs, result
        args.expert_stride, args.row_stride = expert, row
        if block is not None:
            args.table = block.data_ptr() + 4 * self._layout.table_at
        return True

    def suits(self, x: object, topk_idx: object) -> bool:
        """See :class:`FastPath`."""
        geometry = self._geometry
        return _has_columns(x, geometry.hidden) and _has_columns(topk_idx, geometry.top_k)

    def suits_handle(
        self, y: object, source_tokens: object, ranges: object, topk_idx: object
    ) -> bool:
        """See :class:`FastPath`."""
        device = self._device
        return (
            is_plain(y, self._outputs, torch.bfloat16, device)
            and is_plain(source_tokens, self._layout.rows, torch.int32, device)
            and is_plain(ranges, self._layout.ranges, torch.int64, device)
            and _has_columns(topk_idx, self._geometry.top_k)
        )

    def place(
        self,
        args: _core.CudaDispatchArgs,
        rows: torch.Tensor,
        scales: torch.Tensor | None,
        counts: torch.Tensor,
        block: torch.Tensor,
        weighted: bool,
    ) -> None:
        """See :class:`FastPath`."""
        args.rows, args.counts = rows.data_ptr(), counts.data_ptr()
        if scales is not None:
            args.scales = scales.data_ptr()
        base, layout = block.data_ptr(), self._layout
        args.ranges, args.table = base, base + 4 * layout.table_at
        args.source_tokens = base + 4 * layout.source_tokens_at
        if weighted:
            args.row_weights = base + 4 * layout.row_weights_at

    def place_late(
        self,
        args: _core.CudaDispatchArgs,
        rows: torch.Tensor,
        scales: torch.Tensor | None,
        counts: torch.Tensor,
        ranges: torch.Tensor,
        source_tokens: torch.Tensor,
        row_weights: torch.Tensor | None,
    ) -> None:
        """See :class:`FastPath`."""
        args.rows, args.counts = rows.data_ptr(), counts.data_ptr()
        if scales is not None:
            args.scales = scales.data_ptr()
        args.ranges, args.source_tokens = ranges.data_ptr(), source_tokens.data_ptr()
        if row_weights is not None:
            args.row_weights = row_weights.data_ptr()

    def _expect(self, rows: torch.Tensor) -> None:
        """Takes the number of tokens from ``rows``, if it is one that a call may have."""
        if rows.dim() != 2 or rows.shape[0] > self._geometry.max_tokens:
            return
        self._tokens = tokens = rows.shape[0]
        self._x = (tokens, self._geometry.hidden)
        self._choices = (tokens, self._geometry.top_k)


def _has_columns(matrix: object, columns: int) -> bool:
    """Whether this is a plain tensor of two dimensions, and the second is ``columns``."""
    if type(matrix) is not torch.Tensor:
        return False
    shape = matrix.shape
    return len(shape) == 2 and shape[1] == columns


# ---- what has been checked ----------------------------------------------------------------------


def set_tokens(
    args: _core.CudaDispatchArgs,
    x: torch.Tensor,
    topk_idx: torch.Tensor,
    topk_weights: torch.Tensor | None,
) -> None:
    """Sets in ``args`` what a dispatch sends."""
    args.tokens, args.x, args.topk_idx = x.shape[0], x.data_ptr(), topk_idx.data_ptr()
    if topk_weights is not None:
        args.topk_weights = topk_weights.data_ptr()


def set_topk(
    args: _core.CudaCombineArgs,
    ranges: torch.Tensor,
    topk_idx: torch.Tensor,
    topk_weights: torch.Tensor,
) -> None:
    """Sets in ``args`` the routing of a combine with late weights."""
    args.ranges, args.topk_idx = ranges.data_ptr(), topk_idx.data_ptr()
    args.topk_weights = topk_weights.data_ptr()


def set_outputs(args: _core.CudaCombineArgs, y: torch.Tensor, out: torch.Tensor) -> None:
    """Sets in ``args`` what a combine reads and writes; ``y`` may have gaps between its rows."""
    args.tokens, args.y, args.out = out.shape[0], y.data_ptr(), out.data_ptr()
    args.expert_stride, args.row_stride = 2 * y.stride(0), 2 * y.stride(1)


# ---- what the kernels ask for beyond the other backends -----------------------------------------


def check_apart(y: torch.Tensor, out: torch.Tensor) -> None:
    """Checks that ``out`` (contiguous) shares no memory with the rows of ``y``: a peer's sums
    arrive while this rank's rows are still being read.

    Raises:
        ArgumentError: it does.
    """
    experts, rows, hidden = y.shape
    begin, end = out.data_ptr(), out.data_ptr() + out.nbytes
    step, row = 2 * y.stride(1), 2 * hidden
    for expert in range(experts if begin < end else 0):
        first = y.data_ptr() + 2 * expert * y.stride(0)
        # The first row of this expert that ends behind out's beginning.
        place = 0 if step == 0 else max(0, (begin - row - first) // step + 1)
        at = first + place * step
        if place < rows and begin - row < at < end:
            raise ArgumentError(
                "out",
                f"{out.nbytes} bytes at {hex(begin)}, where y has row {place} of expert {expert}",
                "memory of its own: y is read while out is written",
            )
