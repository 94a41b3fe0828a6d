"""Comparing what came with what the oracle says, before anything is timed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from fanfold.bench import oracle
from fanfold.bench.baseline import Routed
from fanfold.bench.workload import Batch, expert_output
from fanfold.errors import FanfoldError
from fanfold.results import DispatchResult

__all__ = ["CheckFailed", "Expectation", "PackedRows", "TokenMajorRows", "packed_fp8", "same_bits"]

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


def _check_room(tokens: torch.Tensor, needed: int, capacity: int | None) -> None:
    rows = needed if capacity is None else capacity
    if tokens.shape[0] != rows:
        raise CheckFailed(f"tokens has {tokens.shape[0]} rows instead of {rows}")


@dataclass(frozen=True)
class TokenMajorRows:
    """What a token-major dispatch brought, in host memory. With a capacity only the first N rows
    are valid.

    Attributes:
        tokens: ``[rows, hidden]``, dtype as sent.
        scales: ``[rows, S]`` float32; None if rows came without.
        count: N.
        source_rank: ``[rows]`` int32.
        source_token: ``[rows]`` int32.
        topk_idx: ``[rows, K]`` int64: local expert ids, -1 for experts elsewhere and for none.
        topk_weights: ``[rows, K]`` float32, 0 where topk_idx is -1; None if there were none.
        tokens_per_expert: ``[E_l]`` int32.
    """

    tokens: torch.Tensor
    scales: torch.Tensor | None
    count: int
    source_rank: torch.Tensor
    source_token: torch.Tensor
    topk_idx: torch.Tensor
    topk_weights: torch.Tensor | None
    tokens_per_expert: torch.Tensor


@dataclass(frozen=True)
class PackedRows:
    """What a dispatch of DeepEP's interfaces brought of which rows are sorted by expert, in host
    memory.

    Attributes:
        tokens: ``[E_l, C, hidden]`` or ``[rows, hidden]``, bfloat16 or float8_e4m3fn.
        scales: as many ``S`` float32; None if rows came without.
        tokens_per_expert: ``[E_l]`` int32.
        offsets: ``[E_l + 1]`` int64: where each expert begins in the flattened tokens.
        source_rank, source_token: ``[E_l, C]`` or ``[rows]`` int32; None where an interface has
            none.
        weights: ``[rows]`` float32; None in low latency, where they come with combine.
    """

    tokens: torch.Tensor
    scales: torch.Tensor | None
    tokens_per_expert: torch.Tensor
    offsets: torch.Tensor
    source_rank: torch.Tensor | None
    source_token: torch.Tensor | None
    weights: torch.Tensor | None = None


@dataclass(frozen=True)
class Expectation:
    """What one rank must get when all ranks dispatch their batches.

    Attributes:
        batches: of all ranks.
        rank: this one.
        experts: of all ranks together.
        fp8: rows travel as fp8 with float32 scales, instead of bfloat16.
        far_hosts: as in :func:`fanfold.bench.oracle.combine_rows`.
    """

    batches: Sequence[Batch]
    rank: int
    experts: int
    fp8: bool
    far_hosts: Sequence[Sequence[int]] = ()

    @property
    def own(self) -> Batch:
        """This rank's batch."""
        return self.batches[self.rank]

    @property
    def tokens_per_expert(self) -> torch.Tensor:
        """``[E_l]`` int64: rows that each local expert gets."""
        return self._arrived.tokens_per_expert

    # Worked out once, for however many calls are checked.

    @cached_property
    def _arrived(self) -> oracle.Arrivals:
        return oracle.arrivals(self.batches, self.rank, self.experts)

    @cached_property
    def _all_x(self) -> torch.Tensor:
        return torch.cat([batch.x for batch in self.batches])

    @cached_property
    def _all_fp8(self) -> oracle.Fp8Rows:
        return oracle.quantize_fp8(self._all_x)

    @cached_property
    def _combined(self) -> torch.Tensor:
        return oracle.combine(
            self.own,
            self._own_output,
            len(self.batches),
            self.experts,
            far_hosts=self.far_hosts,
        )

    def received(
        self,
        received: DispatchResult | PackedRows,
        alignment: int = 1,
        capacity: int | None = None,
        *,
        zero_padding: bool = True,
    ) -> None:
        """Checks all that a dispatch brought.

        Args:
            received: in host memory.
            alignment: of high throughput.
            capacity: rows asked for, of which those behind the last expert's hold anything.
            zero_padding: whether the rows between experts must be zeros. They are marked as no rows
                either way.

        Raises:
            CheckFailed: naming the first thing that is wrong.
        """
        arrived = self._arrived
        layout = oracle.expert_major(arrived, 1)
        counts = arrived.tokens_per_expert
        same_bits("tokens_per_expert", received.tokens_per_expert.long(), counts)
        places = self._places(received, counts)
        if received.tokens.dim() == 2:
            padded = oracle.expert_major(arrived, alignment)
            same_bits("offsets", received.offsets, padded.offsets)
            rows = int(padded.offsets[-1])
            _check_room(received.tokens, rows, capacity)
            is_row = torch.zeros(rows, dtype=torch.bool, device="cpu")
            is_row[places] = True
            if zero_padding:
                padding = _bits(received.tokens[:rows])[~is_row]
                same_bits("rows of padding", padding, torch.zeros_like(padding))
            if isinstance(received, DispatchResult):
                self._marked(received, ~is_row)
        for name in ("source_rank", "source_token"):
            found: torch.Tensor | None = getattr(received, name)
            if found is not None:
                wanted = getattr(arrived, name)[layout.arrival]
                same_bits(name, found.flatten()[places].long(), wanted)
        if received.weights is not None:
            same_bits("weights", received.weights.flatten()[places], layout.weight)
        self._rows(received, places, arrived.row[layout.arrival])

    @staticmethod
    def _marked(received: DispatchResult, padding: torch.Tensor) -> None:
        """Checks the marks of the rows between experts."""
        marks = {"source_rank": received.source_rank, "source_token": received.source_token}
        for name, found in marks.items():
            said = found[: len(padding)][padding]
            same_bits(f"{name} of padding", said, torch.full_like(said, -1))
        if received.weights is not None:
            said = received.weights[: len(padding)][padding]
            same_bits("weights of padding", said, torch.zeros_like(said))

    def token_major(self, received: TokenMajorRows, capacity: int | None = None) -> None:
        """Checks all that a token-major dispatch brought.

        Raises:
            CheckFailed: naming the first thing that is wrong.
        """
        arrived = self._arrived
        counts = arrived.tokens_per_expert
        same_bits("tokens_per_expert", received.tokens_per_expert.long(), counts)
        same_bits(
            "rows",
            torch.tensor(received.count, dtype=torch.int64, device="cpu"),
            torch.tensor(len(arrived.row), dtype=torch.int64, device="cpu"),
        )
        _check_room(received.tokens, received.count, capacity)
        first = slice(0, received.count)
        for name in ("source_rank", "source_token", "topk_idx"):
            same_bits(name, getattr(received, name)[first].long(), getattr(arrived, name))
        if received.topk_weights is not None:
            same_bits("topk_weights", received.topk_weights[first], arrived.topk_weights)
        self._rows(
            received, torch.arange(received.count, dtype=torch.int64, device="cpu"), arrived.row
        )

    def _rows(
        self,
        received: DispatchResult | PackedRows | TokenMajorRows,
        places: torch.Tensor,
        row: torch.Tensor,
    ) -> None:
        tokens = received.tokens.flatten(0, -2)
        if not self.fp8:
            same_bits("tokens", tokens[places], self._all_x[row])
            return
        expected = self._all_fp8
        same_bits("tokens", _bits(tokens)[places], _bits(expected.values)[row])
        if received.scales is None:
            raise CheckFailed("scales are missing")
        same_bits("scales", received.scales.flatten(0, -2)[places], expected.scales[row])

    @staticmethod
    def _places(received: DispatchResult | PackedRows, counts: torch.Tensor) -> torch.Tensor:
        """Where the valid rows are in the flattened tokens, by expert."""
        within = torch.arange(int(counts.sum()), dtype=torch.int64, device="cpu") - (
            counts.cumsum(0) - counts
        ).repeat_interleave(counts)
        return received.offsets[:-1].repeat_interleave(counts) + within

    def outputs(self, received: DispatchResult | PackedRows) -> torch.Tensor:
        """What the experts make of the rows received, in their places (bfloat16); NaN elsewhere,
        where nothing may be read."""
        y = torch.full(received.tokens.shape, torch.nan, dtype=torch.bfloat16, device="cpu")
        counts = received.tokens_per_expert.long()
        places = self._places(received, counts)
        rows = _bits(received.tokens.flatten(0, -2))[places].view(received.tokens.dtype).float()
        if received.scales is not None:
            scales = received.scales.flatten(0, -2)[places]
            rows = oracle.dequantize_fp8(oracle.Fp8Rows(rows, scales))
        y.flatten(0, -2)[places] = expert_output(rows, self._experts_of(counts))
        return y

    def token_major_outputs(self, received: TokenMajorRows) -> torch.Tensor:
        """What this rank makes of the rows received, as if it were one expert (bfloat16); NaN
        behind them."""
        y = torch.full(received.tokens.shape, torch.nan, dtype=torch.bfloat16, device="cpu")
        first = slice(0, received.count)
        rows = _bits(received.tokens)[first].view(received.tokens.dtype).float()
        if received.scales is not None:
            rows = oracle.dequantize_fp8(oracle.Fp8Rows(rows, received.scales[first]))
        y[first] = expert_output(
            rows, torch.full((received.count,), self.rank, dtype=torch.int64, device="cpu")
        )
        return y

    def _experts_of(self, counts: torch.Tensor) -> torch.Tensor:
        """Global expert of each valid row."""
        first = self.rank * self.experts // len(self.batches)
        return first + torch.arange(len(counts), dtype=torch.int64, device="cpu").repeat_interleave(
            counts
        )

    def _own_output(self, tokens: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
        """What ``experts`` make of this rank's ``tokens``."""
        x = self.own.x[tokens]
        rows = oracle.dequantize_fp8(oracle.quantize_fp8(x)) if self.fp8 else x.float()
        return expert_output(rows, experts)

    def combined(self, out: torch.Tensor) -> None:
        """Checks what a combine of :meth:`outputs` gave, bit for bit."""
        same_bits("combined tokens", out, self._combined)

    def token_major_combined(self, out: torch.Tensor) -> None:
        """Checks what a combine of :meth:`token_major_outputs` gave, bit for bit."""
        rank_of = self.own.topk_idx.div(self.experts // len(self.batches), rounding_mode="floor")
        parts = []
        for rank in range(len(self.batches)):
            tokens = (rank_of == rank).any(dim=1).nonzero().squeeze(1)
            parts.append(
                (
                    tokens,
                    self._own_output(
                        tokens, torch.full((len(tokens),), rank, dtype=torch.int64, device="cpu")
                    ),
                )
            )
        expected = oracle.combine_rows(self.own.x.shape, parts, far_hosts=self.far_hosts)
        same_bits("combined tokens", out, expected)

    # ---- the rival --------------------------------------------------------------------------

    def routed(self, routed: Routed) -> None:
        """Checks what the rival's dispatch brought."""
        arrived = self._arrived
        layout = oracle.expert_major(arrived)
        counts = arrived.tokens_per_expert
        same_bits("tokens_per_expert of the baseline", routed.tokens_per_expert, counts)
        x = packed_fp8(self._all_fp8) if self.fp8 else self._all_x
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
        expected = self._combined.float()
        magnitude = oracle.combine(
            own, lambda t, e: self._own_output(t, e).abs(), ranks, self.experts
        ).float()
        error = (out.float() - expected).abs() - _RIVAL_TOLERANCE * magnitude
        if error.numel() and float(error.max()) > 1e-6:
            raise CheckFailed(f"combined tokens of the baseline are off by {float(error.max())}")


def packed_fp8(rows: oracle.Fp8Rows) -> torch.Tensor:
    """Values and scales side by side: ``[T, hidden + 4 * blocks]`` uint8, one row to send."""
    return torch.cat([rows.values.view(torch.uint8), rows.scales.view(torch.uint8)], dim=1)
