"""Comparing what came with what the oracle says, before anything is timed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from fanfold.bench import oracle
from fanfold.bench.baseline import Routed
from fanfold.bench.workload import Batch, expert_output
from fanfold.errors import FanfoldError
from fanfold.received import Received

__all__ = ["CheckFailed", "Expectation", "same_bits"]

# The rival rounds weights to bfloat16 and sums in another order.
_RIVAL_TOLERANCE = 0.02


class CheckFailed(FanfoldError, AssertionError):
    """A result differs from the oracle's; the message says what, where and by how much."""


def same_bits(what: str, actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Raises CheckFailed unless the tensors are equal, floating ones bit for bit."""
    if actual.shape != expected.shape:
        shapes = f"shape {tuple(actual.shape)} instead of {tuple(expected.shape)}"
        raise CheckFailed(f"{what} has {shapes}")
    differs = _bits(actual) != _bits(expected)
    if differs.any():
        place = tuple(differs.nonzero()[0].tolist())
        raise CheckFailed(
            f"{what}: {int(differs.sum())} of {differs.numel()} values are wrong, the first at "
            f"{place}: {actual[place].item()} instead of {expected[place].item()}"
        )


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    if not tensor.dtype.is_floating_point:
        return tensor
    integer = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.contiguous().view(integer[tensor.element_size()])


@dataclass(frozen=True)
class Expectation:
    """What one rank must get when all ranks dispatch their batches.

    Attributes:
        batches: of all ranks.
        rank: this one.
        experts: of all ranks together.
        fp8: rows travel as fp8 with float32 scales, instead of bfloat16.
    """

    batches: Sequence[Batch]
    rank: int
    experts: int
    fp8: bool

    @property
    def own(self) -> Batch:
        """This rank's batch."""
        return self.batches[self.rank]

    def received(self, received: Received, alignment: int = 1) -> None:
        """Checks all that a dispatch brought.

        Raises:
            CheckFailed: naming the first thing that is wrong.
        """
        arrived = oracle.arrivals(self.batches, self.rank, self.experts)
        layout = oracle.expert_major(arrived, 1)
        counts = arrived.tokens_per_expert
        same_bits("tokens_per_expert", received.tokens_per_expert.long(), counts)
        places = self._places(received, counts)
        if received.tokens.dim() == 2:
            padded = oracle.expert_major(arrived, alignment)
            same_bits("offsets", received.offsets, padded.offsets)
            is_row = torch.zeros(received.tokens.shape[0], dtype=torch.bool)
            is_row[places] = True
            padding = _bits(received.tokens.flatten(0, -2)[~is_row])
            same_bits("rows of padding", padding, torch.zeros_like(padding))
        flat = received.source_rank.flatten(), received.source_token.flatten()
        source_rank = arrived.source_rank[layout.arrival]
        same_bits("source_rank", flat[0][places].long(), source_rank)
        same_bits("source_token", flat[1][places].long(), arrived.source_token[layout.arrival])
        if received.weights is not None:
            same_bits("weights", received.weights.flatten()[places], layout.weight)
        self._rows(received, places, arrived.row[layout.arrival])

    def _rows(self, received: Received, places: torch.Tensor, row: torch.Tensor) -> None:
        x = torch.cat([batch.x for batch in self.batches])
        tokens = received.tokens.flatten(0, -2)
        if not self.fp8:
            same_bits("tokens", tokens[places], x[row])
            return
        expected = oracle.quantize_fp8(x)
        same_bits("tokens", _bits(tokens)[places], _bits(expected.values)[row])
        if received.scales is None:
            raise CheckFailed("scales are missing")
        same_bits("scales", received.scales.flatten(0, -2)[places], expected.scales[row])

    @staticmethod
    def _places(received: Received, counts: torch.Tensor) -> torch.Tensor:
        """Where the valid rows are in the flattened tokens, by expert."""
        within = torch.arange(int(counts.sum())) - (counts.cumsum(0) - counts).repeat_interleave(
            counts
        )
        return received.offsets[:-1].repeat_interleave(counts) + within

    def rows_sent(self) -> tuple[int, int]:
        """Rows that one dispatch of this rank sends, one for each (token, rank with one of its
        experts): to all ranks, and to the others."""
        ranks, topk_idx = len(self.batches), self.own.topk_idx
        rank_of = topk_idx.div(self.experts // ranks, rounding_mode="floor")
        goes = [int((rank_of == rank).any(dim=1).sum()) for rank in range(ranks)]
        return sum(goes), sum(goes) - goes[self.rank]

    def outputs(self, received: Received) -> torch.Tensor:
        """What the experts make of the rows received, in their places (bfloat16); NaN elsewhere,
        where nothing may be read."""
        y = torch.full(received.tokens.shape, torch.nan, dtype=torch.bfloat16)
        counts = received.tokens_per_expert.long()
        places = self._places(received, counts)
        rows = _bits(received.tokens.flatten(0, -2))[places].view(received.tokens.dtype).float()
        if received.scales is not None:
            scales = received.scales.flatten(0, -2)[places]
            rows = oracle.dequantize_fp8(oracle.Fp8Rows(rows, scales))
        y.flatten(0, -2)[places] = expert_output(rows, self._experts_of(counts))
        return y

    def _experts_of(self, counts: torch.Tensor) -> torch.Tensor:
        """Global expert of each valid row."""
        first = self.rank * self.experts // len(self.batches)
        return first + torch.arange(len(counts)).repeat_interleave(counts)

    def _own_output(self, tokens: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
        """What ``experts`` make of this rank's ``tokens``."""
        x = self.own.x[tokens]
        rows = oracle.dequantize_fp8(oracle.quantize_fp8(x)) if self.fp8 else x.float()
        return expert_output(rows, experts)

    def combined(self, out: torch.Tensor) -> None:
        """Checks what a combine of :meth:`outputs` gave, bit for bit."""
        ranks = len(self.batches)
        expected = oracle.combine(self.own, self._own_output, ranks, self.experts)
        same_bits("combined tokens", out, expected)

    # ---- the rival --------------------------------------------------------------------------

    def routed(self, routed: Routed) -> None:
        """Checks what the rival's dispatch brought."""
        arrived = oracle.arrivals(self.batches, self.rank, self.experts)
        layout = oracle.expert_major(arrived)
        counts = arrived.tokens_per_expert
        same_bits("tokens_per_expert of the baseline", routed.tokens_per_expert, counts)
        x = torch.cat([batch.x for batch in self.batches])
        if self.fp8:
            x = packed_fp8(oracle.quantize_fp8(x))
        expected = x[arrived.row[layout.arrival]]
        same_bits("rows of the baseline", routed.rows, expected)

    def rival_outputs(self, routed: Routed) -> torch.Tensor:
        """What the experts make of the rows that the rival brought (bfloat16)."""
        rows = routed.rows
        if self.fp8:
            hidden = self.own.x.shape[1]
            values = rows[:, :hidden].contiguous().view(torch.float8_e4m3fn)
            scales = rows[:, hidden:].contiguous().view(torch.float32)
            rows = oracle.dequantize_fp8(oracle.Fp8Rows(values, scales))
        return expert_output(rows, self._experts_of(routed.tokens_per_expert))

    def rival_combined(self, out: torch.Tensor) -> None:
        """Checks the rival's sums, within what its arithmetic allows."""
        ranks, own = len(self.batches), self.own
        expected = oracle.combine(own, self._own_output, ranks, self.experts).float()
        magnitude = oracle.combine(
            own, lambda t, e: self._own_output(t, e).abs(), ranks, self.experts
        ).float()
        error = (out.float() - expected).abs() - _RIVAL_TOLERANCE * magnitude
        if error.numel() and float(error.max()) > 1e-6:
            raise CheckFailed(f"combined tokens of the baseline are off by {float(error.max())}")


def packed_fp8(rows: oracle.Fp8Rows) -> torch.Tensor:
    """Values and scales side by side: ``[T, hidden + 4 * blocks]`` uint8, one row to send."""
    return torch.cat([rows.values.view(torch.uint8), rows.scales.view(torch.uint8)], dim=1)
