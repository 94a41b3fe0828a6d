"""Calls that look like an earlier one. What was checked then holds for them; those by a plan also
tell the kernel the same, so they fill in where their own tensors are, and launch."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fanfold import _core
from fanfold.backends.high_throughput.in_place import Results
from fanfold.backends.high_throughput.kernels import DispatchKind
from fanfold.backends.high_throughput.launches import Call, Launches
from fanfold.backends.high_throughput.protocol import RowOrder, Rows

__all__ = ["Asked", "RepeatedCombine", "RepeatedDispatch", "RepeatedRouting", "RowsPattern"]

Asked = tuple[int, RowOrder, int, int | None]
"""num_experts, layout, expert_alignment and capacity of a dispatch."""

_ALIGNMENT = 16  # bytes; of rows, whatever the tensor that was checked happens to have
_ANY_ADDRESS = 1  # a multiple of it


def _pattern(tensor: torch.Tensor | None, alignment: int) -> _core.TensorPattern | None:
    return None if tensor is None else _core.TensorPattern(tensor, alignment)


def _address(pattern: _core.TensorPattern | None, tensor: torch.Tensor | None) -> int | None:
    """Where a tensor lies, 0 where there is none; None if it looks different."""
    if pattern is None:
        return 0 if tensor is None else None
    return pattern.address(tensor) or None


@dataclass(eq=False, slots=True)
class RowsPattern:
    """What the rows of a dispatch look like, and their scales, if they have any."""

    values: _core.TensorPattern
    scales: _core.TensorPattern | None

    @classmethod
    def of(cls, x: Rows) -> RowsPattern:
        """That of rows which have been checked."""
        values, scales = x if isinstance(x, tuple) else (x, None)
        return cls(_core.TensorPattern(values, _ALIGNMENT), _pattern(scales, _ANY_ADDRESS))

    def addresses(self, x: Rows) -> tuple[int, int] | None:
        """Where the rows and their scales are, 0 for none; None if they look different."""
        parts: tuple[torch.Tensor | None, ...] = x if isinstance(x, tuple) else (x, None)
        if len(parts) != 2:
            return None
        at, scales_at = _address(self.values, parts[0]), _address(self.scales, parts[1])
        return None if at is None or scales_at is None else (at, scales_at)


@dataclass(eq=False, slots=True)
class RepeatedDispatch:
    """Cached dispatches by one plan in one order.

    Attributes:
        launches: of the mode and the grid that the first one had.
        call: its kernel, and arguments of their own, of which a repetition changes the addresses of
            rows and results.
        rows: what those of a repetition look like.
        shapes: of the results: rows, and scales if any come.
        dtypes: likewise.
        expert_major: their order; else token-major.
        in_place: whether they are.
    """

    launches: Launches
    call: Call[_core.CudaHighThroughputDispatchArgs]
    rows: RowsPattern
    shapes: tuple[tuple[int, int], ...]
    dtypes: tuple[torch.dtype, ...]
    expert_major: bool
    in_place: bool

    @classmethod
    def of(
        cls,
        launches: Launches,
        call: Call[_core.CudaHighThroughputDispatchArgs],
        sent: Rows,
        results: tuple[torch.Tensor, torch.Tensor | None],
        *,
        in_place: bool,
    ) -> RepeatedDispatch:
        """That of a call which has just been launched."""
        made = [tensor for tensor in results if tensor is not None]
        return cls(
            launches,
            Call(call.args.copy(), call.launch),
            RowsPattern.of(sent),
            tuple((tensor.shape[0], tensor.shape[1]) for tensor in made),
            tuple(tensor.dtype for tensor in made),
            call.args.offsets_copy != 0,
            in_place,
        )

    def finds(self, launches: Launches, x: Rows) -> bool:
        """Whether a dispatch of ``x`` is a repetition; then the arguments tell where ``x`` is."""
        found = self.rows.addresses(x) if launches is self.launches else None
        if found is None:
            return False
        self.call.args.x, self.call.args.scales = found
        return True

    def reads(self, results: Results) -> bool:
        """Whether the rows that were found may lie among results in place."""
        args, rows = self.call.args, self.rows
        if results.touches(args.x, rows.values.bytes):
            return True
        return rows.scales is not None and results.touches(args.scales, rows.scales.bytes)


@dataclass(eq=False, slots=True)
class RepeatedCombine:
    """Combines by one plan in one order, with or without weights, without biases.

    Attributes:
        launches, call: as of :class:`RepeatedDispatch`.
        y, row_weights, topk_weights, out: what those of a repetition look like.
        shape: of ``out``, for one that is made.
    """

    launches: Launches
    call: Call[_core.CudaHighThroughputCombineArgs]
    y: _core.TensorPattern
    row_weights: _core.TensorPattern | None
    topk_weights: _core.TensorPattern | None
    out: _core.TensorPattern
    shape: tuple[int, int]

    @classmethod
    def of(
        cls,
        launches: Launches,
        call: Call[_core.CudaHighThroughputCombineArgs],
        y: torch.Tensor,
        row_weights: torch.Tensor | None,
        topk_weights: torch.Tensor | None,
        out: torch.Tensor,
    ) -> RepeatedCombine:
        """That of a call which has just been launched."""
        return cls(
            launches,
            Call(call.args.copy(), call.launch),
            _core.TensorPattern(y, _ALIGNMENT),
            _pattern(row_weights, _ANY_ADDRESS),
            _pattern(topk_weights, _ANY_ADDRESS),
            _core.TensorPattern(out, _ALIGNMENT),
            (out.shape[0], out.shape[1]),
        )

    def finds(
        self,
        launches: Launches,
        y: torch.Tensor,
        row_weights: torch.Tensor | None,
        topk_weights: torch.Tensor | None,
        out: torch.Tensor | None,
    ) -> bool:
        """Whether a combine of these is a repetition; then the arguments tell where they are."""
        if launches is not self.launches:
            return False
        args, y_at = self.call.args, self.y.address(y)
        weights_at = _address(self.row_weights, row_weights)
        returned_at = _address(self.topk_weights, topk_weights)
        if y_at == 0 or weights_at is None or returned_at is None:
            return False
        args.y, args.row_weights, args.topk_weights = y_at, weights_at, returned_at
        if out is None:
            return True
        args.out = at = self.out.address(out)
        # Where they share memory, the checks of a first call say so.
        return at != 0 and (at + self.out.bytes <= y_at or y_at + self.y.bytes <= at)


@dataclass(eq=False, slots=True)
class RepeatedRouting:
    """Dispatches of new routings.

    Attributes:
        launches: as of :class:`RepeatedDispatch`.
        asked: of each.
        planning, sending, kind: the kernels, which the mode's other calls use, too.
        patterns: what values, scales, topk_idx and topk_weights look like; None for what is absent.
    """

    launches: Launches
    asked: Asked
    planning: Call[_core.CudaPlanArgs]
    sending: Call[_core.CudaHighThroughputDispatchArgs]
    kind: DispatchKind
    patterns: tuple[_core.TensorPattern | None, ...]

    @classmethod
    def of(
        cls,
        launches: Launches,
        asked: Asked,
        planning: Call[_core.CudaPlanArgs],
        sending: Call[_core.CudaHighThroughputDispatchArgs],
        kind: DispatchKind,
        tensors: tuple[torch.Tensor | None, ...],
    ) -> RepeatedRouting:
        """That of a call whose tensors, as ``patterns``, have been checked."""
        values, *others = tensors
        patterns = (
            _pattern(values, _ALIGNMENT),
            *(_pattern(each, _ANY_ADDRESS) for each in others),
        )
        return cls(launches, asked, planning, sending, kind, patterns)

    def finds(
        self,
        launches: Launches,
        asked: Asked,
        x: Rows,
        topk_idx: torch.Tensor,
        topk_weights: torch.Tensor | None,
    ) -> bool:
        """Whether such a dispatch is a repetition."""
        if launches is not self.launches or asked != self.asked:
            return False
        parts: tuple[object, ...] = x if isinstance(x, tuple) else (x, None)
        if len(parts) != 2:
            return False
        for pattern, tensor in zip(self.patterns, (*parts, topk_idx, topk_weights), strict=True):
            if pattern is None:
                if tensor is not None:
                    return False
            elif pattern.address(tensor) == 0:
                return False
        return True
