"""What a fused MoE layer is compared with: the same layer call by call, and PyTorch's own grouped
products."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from fanfold.formats import E4M3_MAX, dequantize, quantize
from fanfold.fused_moe import ExpertWeights, dequantize_weights, difference
from fanfold.grouped_gemm import Operands, multiply, scales_for_kernel
from fanfold.high_throughput import HighThroughput
from fanfold.results import HighThroughputResult

__all__ = ["KINDS", "NotTimed", "TorchGemms", "TorchWeights", "Unfused"]

Pair = tuple[torch.Tensor, torch.Tensor]

KINDS = {
    "fp8": "torch._scaled_grouped_mm, fp8, one scale for each row",
    "bf16": "torch._grouped_mm, bf16",
}
"""PyTorch's grouped products, the preferred one first."""

_SMALLEST_AMAX = 1e-10
_SAMPLED_ROWS = 256
_PROBED_ROWS = 128


class Unfused:
    """The layer in separate calls: a dispatch of FP8 rows that reuses its routing, a grouped
    product, SwiGLU and quantisation, a second grouped product, a weighted combine.

    The grouped products are those of ``fanfold.deep_gemm``, in the contiguous layout.

    Args:
        dispatcher: for rows of fp8, expert-major, aligned to 128.
        weights: of this rank's experts.
        tokens: e4m3 values and float32 scales of this rank's tokens.
        routing: ``topk_idx`` and ``topk_weights``.
        fast: whether the tensor cores keep sums.
    """

    def __init__(
        self,
        dispatcher: HighThroughput,
        weights: ExpertWeights,
        tokens: Pair,
        routing: Pair,
        *,
        fast: bool,
    ) -> None:
        self._dispatcher, self._weights = dispatcher, weights
        self._tokens, self._fast = tokens, fast
        self._routing = dispatcher.dispatch(tokens, *routing)
        self.groups = _groups(self._routing)
        self.ends = self._routing.offsets[1:].int()
        rows, device = self.groups.shape[0], self.groups.device
        self.first, self.second = (
            torch.zeros((rows, columns), dtype=torch.bfloat16, device=device)
            for columns in (2 * weights.intermediate, weights.hidden)
        )
        self.rows = _ready(_rows_of(self._routing))
        self.layer()
        self.activations = _ready(self._activate())

    def layer(self) -> torch.Tensor:
        """One call of the whole layer; the CPU waits for nothing."""
        received = self._dispatcher.dispatch(self._tokens, previous=self._routing)
        weights = self._weights
        self._multiply(_rows_of(received), (weights.l1, weights.l1_scales), self.first)
        self._multiply(self._activate(), (weights.l2, weights.l2_scales), self.second)
        return self._dispatcher.combine(self.second, received)

    def gemms(self) -> None:
        """Both grouped products by themselves."""
        weights = self._weights
        self._multiply(self.rows, (weights.l1, weights.l1_scales), self.first)
        self._multiply(self.activations, (weights.l2, weights.l2_scales), self.second)

    def _activate(self) -> Pair:
        gate, up = self.first.chunk(2, dim=1)
        return quantize(torch.nn.functional.silu(gate).mul_(up))

    def _multiply(self, a: Pair, b: Pair, d: torch.Tensor) -> None:
        values, scales = a
        operands = Operands(values[None], scales[None], *b, self.groups, masked=False)
        multiply(operands, d[None], values.shape[0] // b[0].shape[0], self._fast)


def _rows_of(received: HighThroughputResult) -> Pair:
    assert received.scales is not None
    return received.tokens, received.scales


def _ready(rows: Pair) -> Pair:
    """The rows with their scales as a kernel reads them, so that a product copies nothing."""
    values, scales = rows
    return values, scales_for_kernel(scales[None])[0]


def _groups(received: HighThroughputResult) -> torch.Tensor:
    """``[rows]`` int32: the local expert of each row, -1 for padding."""
    offsets, counts = received.offsets, received.tokens_per_expert
    device = offsets.device
    experts = torch.arange(counts.shape[0], dtype=torch.int32, device=device)
    groups = experts.repeat_interleave(offsets.diff(), output_size=received.tokens.shape[0])
    places = torch.arange(groups.shape[0], dtype=torch.int64, device=device)
    ends = (offsets[:-1] + counts)[groups.long()]
    return groups.masked_fill(places >= ends, -1)


# ---- PyTorch's products -------------------------------------------------------------------------


@dataclass(frozen=True)
class NotTimed:
    """Why PyTorch's grouped products are not timed."""

    reason: str


@dataclass(frozen=True)
class TorchWeights:
    """The weights of this rank's experts as PyTorch's grouped product takes them.

    Attributes:
        kind: of :data:`KINDS`.
        l1, l2: values, and the scale of each row, which bf16 does not read.
        fast: whether the tensor cores keep sums.
    """

    kind: str
    l1: Pair
    l2: Pair
    fast: bool

    @classmethod
    def of(cls, weights: ExpertWeights, *, fast: bool) -> TorchWeights | NotTimed:
        """The weights for the first of :data:`KINDS` that works here, converted expert by expert;
        or why none works."""
        reasons = []
        for kind in KINDS:
            reason = _lacking(kind, weights.l1.device)
            if reason is None:
                l1 = _matrices(kind, weights.l1, weights.l1_scales)
                return cls(kind, l1, _matrices(kind, weights.l2, weights.l2_scales), fast)
            reasons.append(f"{KINDS[kind].partition(',')[0]}: {reason}")
        return NotTimed("; ".join(reasons))


class TorchGemms:
    """PyTorch's grouped products over the rows of an :class:`Unfused`.

    Args:
        weights: of this rank's experts.
        unfused: whose rows and activations are multiplied; its results must be those of
            :meth:`Unfused.gemms`.
    """

    def __init__(self, weights: TorchWeights, unfused: Unfused) -> None:
        self._weights, self._unfused = weights, unfused
        self._rows = _rows(weights.kind, unfused.rows)
        self._activations = _rows(weights.kind, unfused.activations)

    def __call__(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The results of both products, one after the other."""
        weights, ends = self._weights, self._unfused.ends
        return (
            _product(weights.kind, self._rows, weights.l1, ends, weights.fast),
            _product(weights.kind, self._activations, weights.l2, ends, weights.fast),
        )

    def difference(self) -> float:
        """The larger difference of the two products from those of the unfused layer, on some of
        the rows."""
        valid = (self._unfused.groups >= 0).nonzero()[:, 0]
        if len(valid) == 0:
            return 0.0
        some = valid[:: max(1, len(valid) // _SAMPLED_ROWS)]
        wanted = (self._unfused.first, self._unfused.second)
        return max(
            difference(mine[some], theirs[some])
            for mine, theirs in zip(self(), wanted, strict=True)
        )


def _product(kind: str, a: Pair, b: Pair, ends: torch.Tensor, fast: bool) -> torch.Tensor:
    functions: Any = torch
    weights = b[0].transpose(-2, -1)
    product: torch.Tensor
    if kind == "bf16":
        product = functions._grouped_mm(a[0], weights, offs=ends)
    else:
        product = functions._scaled_grouped_mm(
            a[0], weights, a[1], b[1], offs=ends, out_dtype=torch.bfloat16, use_fast_accum=fast
        )
    return product


def _lacking(kind: str, device: torch.device) -> str | None:
    """Why this PyTorch cannot multiply this kind there, or None."""
    ones = torch.ones((_PROBED_ROWS, _PROBED_ROWS), dtype=torch.float32, device=device)
    matrix = _converted(kind, ones)
    ends = torch.full((1,), _PROBED_ROWS, dtype=torch.int32, device=device)
    try:
        _product(kind, matrix, (matrix[0][None], matrix[1][None]), ends, fast=False)
    except (AttributeError, RuntimeError, ValueError) as error:
        return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
    return None


def _matrices(kind: str, values: torch.Tensor, scales: torch.Tensor) -> Pair:
    """The matrices of all experts, converted one by one."""
    dtype = torch.bfloat16 if kind == "bf16" else torch.float8_e4m3fn
    converted = torch.empty(values.shape, dtype=dtype, device=values.device)
    of_rows = torch.empty(values.shape[:2], dtype=torch.float32, device=values.device)
    for expert in range(values.shape[0]):
        matrix = _converted(kind, dequantize_weights(values[expert], scales[expert]))
        converted[expert], of_rows[expert] = matrix
    return converted, of_rows


def _rows(kind: str, rows: Pair) -> Pair:
    return _converted(kind, dequantize(rows[0], rows[1].contiguous()))


def _converted(kind: str, matrix: torch.Tensor) -> Pair:
    """A float32 matrix and the scale of each of its rows."""
    if kind == "bf16":
        return matrix.bfloat16(), torch.ones_like(matrix[:, 0])
    scales = matrix.abs().amax(1).clamp(min=_SMALLEST_AMAX) / E4M3_MAX
    values = (matrix / scales.unsqueeze(1)).clamp(-E4M3_MAX, E4M3_MAX)
    return values.to(torch.float8_e4m3fn), scales
