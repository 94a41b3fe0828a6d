"""Calls that look like an earlier one. What was checked then holds for them; those by a plan also
have the same arguments, but for the addresses of their own tensors, which they fill in."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fanfold import _core
from fanfold.backends.high_throughput.kernels import DispatchKind
from fanfold.backends.high_throughput.launches import Call, Launches
from fanfold.backends.high_throughput.patterns import (
    DispatchPattern,
    address_if_same,
    pattern_of,
    pattern_of_rows,
)
from fanfold.backends.high_throughput.protocol import RowOrder, Rows, apart

__all__ = ["Asked", "RepeatedCombine", "RepeatedDispatch", "RepeatedRouting"]

Asked = tuple[int, RowOrder, int, int | None]
"""num_experts, layout, expert_alignment and capacity of a dispatch."""


@dataclass(eq=False, slots=True)
class RepeatedDispatch:
    """Cached dispatches by one plan in one order.

    Attributes:
        launches: of the mode and the grid that the first one had.
        call: its kernel, and arguments of their own, of which a repetition changes the addresses of
            rows and results.
        sent: what a repetition sends.
        shapes: of the results: rows, and scales if any come.
        dtypes: likewise.
        expert_major: their order; else token-major.
        in_place: whether they are.
    """

    launches: Launches
    call: Call[_core.CudaHighThroughputDispatchArgs]
    sent: DispatchPattern
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
            DispatchPattern.of(sent),
            tuple((tensor.shape[0], tensor.shape[1]) for tensor in made),
            tuple(tensor.dtype for tensor in made),
            call.args.offsets_copy != 0,
            in_place,
        )

    def finds(self, launches: Launches, x: Rows) -> bool:
        """Whether a dispatch of ``x`` is a repetition; then the arguments have its addresses."""
        found = self.sent.addresses(x) if launches is self.launches else None
        if found is None:
            return False
        self.call.args.x, self.call.args.scales = found
        return True


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
            pattern_of_rows(y),
            pattern_of(row_weights),
            pattern_of(topk_weights),
            pattern_of_rows(out),
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
        """Whether a combine of these is a repetition; then the arguments have their addresses."""
        if launches is not self.launches:
            return False
        args, y_at = self.call.args, self.y.address(y)
        weights_at = address_if_same(self.row_weights, row_weights)
        returned_at = address_if_same(self.topk_weights, topk_weights)
        if y_at == 0 or weights_at is None or returned_at is None:
            return False
        args.y, args.row_weights, args.topk_weights = y_at, weights_at, returned_at
        if out is None:
            return True
        args.out = at = self.out.address(out)
        # Where they overlap, the checks of a first call raise.
        return at != 0 and apart(at, self.out.bytes, y_at, self.y.bytes)


@dataclass(eq=False, slots=True)
class RepeatedRouting:
    """Dispatches of new routings.

    Attributes:
        launches: as of :class:`RepeatedDispatch`.
        asked: of each.
        planning, sending, kind: the kernels, which the mode's other calls use, too.
        sent: what each sends.
    """

    launches: Launches
    asked: Asked
    planning: Call[_core.CudaPlanArgs]
    sending: Call[_core.CudaHighThroughputDispatchArgs]
    kind: DispatchKind
    sent: DispatchPattern

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
        return self.sent.addresses(x, topk_idx, topk_weights) is not None
