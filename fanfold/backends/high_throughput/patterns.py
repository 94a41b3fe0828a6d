"""What tensors look like that were checked once. Others that look the same need no checks, but for
what depends on where they are."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fanfold import _core
from fanfold.backends.high_throughput.protocol import Rows

__all__ = ["DispatchPattern", "address_if_same", "pattern_of", "pattern_of_rows"]

_ROW_ALIGNMENT = 16  # bytes; whatever the tensor that was checked happens to have
_ANY_ADDRESS = 1  # a multiple of it


def pattern_of_rows(rows: torch.Tensor) -> _core.TensorPattern:
    """The pattern of rows that kernels copy: aligned ones."""
    return _core.TensorPattern(rows, _ROW_ALIGNMENT)


def pattern_of(tensor: torch.Tensor | None) -> _core.TensorPattern | None:
    """The pattern of any other tensor; None where there is none."""
    return None if tensor is None else _core.TensorPattern(tensor, _ANY_ADDRESS)


def address_if_same(pattern: _core.TensorPattern | None, tensor: object) -> int | None:
    """Where a tensor lies, 0 where there is none; None if it looks different."""
    if pattern is None:
        return 0 if tensor is None else None
    return pattern.address(tensor) or None


@dataclass(eq=False, slots=True)
class DispatchPattern:
    """What the tensors of a dispatch look like: rows, and their scales and a new routing, if there
    are any."""

    values: _core.TensorPattern
    scales: _core.TensorPattern | None
    topk_idx: _core.TensorPattern | None
    topk_weights: _core.TensorPattern | None

    @classmethod
    def of(
        cls,
        x: Rows,
        topk_idx: torch.Tensor | None = None,
        topk_weights: torch.Tensor | None = None,
    ) -> DispatchPattern:
        """That of such tensors."""
        values, scales = x if isinstance(x, tuple) else (x, None)
        others = (pattern_of(tensor) for tensor in (scales, topk_idx, topk_weights))
        return cls(pattern_of_rows(values), *others)

    def addresses(
        self,
        x: Rows,
        topk_idx: torch.Tensor | None = None,
        topk_weights: torch.Tensor | None = None,
    ) -> tuple[int, int] | None:
        """Where the rows and their scales are, 0 for none; None if anything looks different."""
        parts: tuple[object, ...] = x if isinstance(x, tuple) else (x, None)
        if len(parts) != 2 or (parts is x and parts[1] is None):
            return None
        for pattern, tensor in (self.topk_idx, topk_idx), (self.topk_weights, topk_weights):
            if address_if_same(pattern, tensor) is None:
                return None
        at = address_if_same(self.values, parts[0])
        scales_at = address_if_same(self.scales, parts[1])
        return None if at is None or scales_at is None else (at, scales_at)
