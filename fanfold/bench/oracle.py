"""What dispatch and combine must give, worked out from the ranks' inputs in plain PyTorch.

Nothing here is shared with the backends, and nothing imports them. Everything but LogFMT is exact:
the same bits must come out of every backend.

R ranks, E experts, E_l = E / R local experts, T tokens of a rank, K top_k, N rows: tokens of any
rank that name a local expert, by source rank, then source token.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from fanfold.bench.workload import Batch

__all__ = [
    "Arrivals",
    "CombinedLogFmt",
    "ExpertMajor",
    "Fp8Rows",
    "arrivals",
    "combine",
    "combine_logfmt",
    "combine_rows",
    "dequantize_fp8",
    "expert_major",
    "pack_ue8m0",
    "quantize_fp8",
    "rows_arriving",
]

_BLOCK = 128
_E4M3_MAX = 448.0
_SMALLEST_AMAX = 1e-4


# ---- rows ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Fp8Rows:
    """Rows in fp8.

    Attributes:
        values: ``[T, hidden]`` float8_e4m3fn.
        scales: ``[T, ceil(hidden / 128)]`` float32.
    """

    values: torch.Tensor
    scales: torch.Tensor


def _blocked(x: torch.Tensor) -> torch.Tensor:
    """``[T, hidden]`` as ``[T, blocks, 128]``, the last block filled up with zeros."""
    blocks = -(-x.shape[1] // _BLOCK)
    filled = torch.nn.functional.pad(x, (0, blocks * _BLOCK - x.shape[1]))
    return filled.reshape(x.shape[0], blocks, _BLOCK)


def _unblocked(x: torch.Tensor, hidden: int) -> torch.Tensor:
    return x.flatten(1)[:, :hidden].contiguous()


def quantize_fp8(x: torch.Tensor, *, power_of_two: bool = False) -> Fp8Rows:
    """DeepEP's fp8 of ``[T, hidden]`` bfloat16: scale = max(amax, 1e-4) / 448 per 128 columns and
    e4m3(x * (448 / amax)), or the scale raised to a power of two and e4m3(x * (1 / scale))."""
    blocks = _blocked(x.float())
    amax = blocks.abs().amax(dim=2).clamp(min=_SMALLEST_AMAX)
    scales = amax / _E4M3_MAX
    # Not 448.0 / amax, which PyTorch computes as the rounded reciprocal times 448.
    factor = torch.full_like(amax, _E4M3_MAX) / amax
    if power_of_two:
        mantissa, exponent = torch.frexp(scales)  # mantissa in [0.5, 1)
        exponent = exponent - (mantissa == 0.5).int()
        scales = ((exponent + 127) << 23).view(torch.float32)
        factor = 1.0 / scales
    scaled = (blocks * factor.unsqueeze(2)).clamp(-_E4M3_MAX, _E4M3_MAX)
    return Fp8Rows(_unblocked(scaled, x.shape[1]).to(torch.float8_e4m3fn), scales)


def dequantize_fp8(rows: Fp8Rows) -> torch.Tensor:
    """``[T, hidden]`` float32."""
    blocks = _blocked(rows.values.float()) * rows.scales.unsqueeze(2)
    return _unblocked(blocks, rows.values.shape[1])


def pack_ue8m0(scales: torch.Tensor) -> torch.Tensor:
    """``[T, ceil(blocks / 4)]`` int32 of power-of-two ``[T, blocks]`` scales: exponent + 127 in a
    byte, the first block in the lowest; bytes without a block are 0."""
    exponents = torch.frexp(scales).exponent - 1 + 127
    filled = torch.nn.functional.pad(exponents.long(), (0, -scales.shape[1] % 4)).unflatten(
        1, (-1, 4)
    )
    packed = (filled << torch.tensor([0, 8, 16, 24], dtype=torch.int64, device="cpu")).sum(dim=2)
    return torch.where(packed >= 2**31, packed - 2**32, packed).int()


# ---- dispatch -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Arrivals:
    """The rows that come to one rank, once each: token-major.

    Attributes:
        source_rank: ``[N]`` int64.
        source_token: ``[N]`` int64.
        row: ``[N]`` int64: index of the row among the tokens of all ranks, one after the other.
        topk_idx: ``[N, K]`` int64: local expert ids, -1 for experts elsewhere and for none;
            duplicates as they came.
        topk_weights: ``[N, K]`` float32, 0 where topk_idx is -1.
        expert_weight: ``[N, E_l]`` float32: the sum, in top-k order, of the weights that the token
            gives this expert.
        is_for: ``[N, E_l]`` bool: whether the token names this expert.
    """

    source_rank: torch.Tensor
    source_token: torch.Tensor
    row: torch.Tensor
    topk_idx: torch.Tensor
    topk_weights: torch.Tensor
    expert_weight: torch.Tensor
    is_for: torch.Tensor

    @property
    def tokens_per_expert(self) -> torch.Tensor:
        """``[E_l]`` int64: rows of each local expert; a token counts once."""
        return self.is_for.sum(dim=0)


def arrivals(batches: Sequence[Batch], rank: int, experts: int) -> Arrivals:
    """What comes to ``rank`` when every rank dispatches its batch."""
    local = experts // len(batches)
    counts = torch.tensor(
        [batch.topk_idx.shape[0] for batch in batches], dtype=torch.int64, device="cpu"
    )
    topk_idx = torch.cat([batch.topk_idx for batch in batches])
    weights = torch.cat([batch.topk_weights for batch in batches])
    topk_idx = topk_idx - rank * local
    topk_idx = torch.where((topk_idx < 0) | (topk_idx >= local), -1, topk_idx)
    named = (topk_idx >= 0).any(dim=1)
    row = named.nonzero().squeeze(1)
    source_rank = torch.arange(len(batches), dtype=torch.int64, device="cpu").repeat_interleave(
        counts
    )
    source_token = torch.cat(
        [torch.arange(int(count), dtype=torch.int64, device="cpu") for count in counts]
    )
    topk_idx, weights = topk_idx[row], weights[row]
    expert_weight = torch.zeros((len(row), local + 1), dtype=torch.float32, device="cpu")
    is_for = torch.zeros((len(row), local + 1), dtype=torch.bool, device="cpu")
    for lane in range(topk_idx.shape[1]):
        # Lanes that lead nowhere go to one more column, which is dropped.
        column = torch.where(topk_idx[:, lane] < 0, local, topk_idx[:, lane]).unsqueeze(1)
        expert_weight.scatter_add_(1, column, weights[:, lane : lane + 1])
        is_for.scatter_(1, column, True)
    return Arrivals(
        source_rank=source_rank[row],
        source_token=source_token[row],
        row=row,
        topk_idx=topk_idx,
        topk_weights=torch.where(topk_idx < 0, 0.0, weights),
        expert_weight=expert_weight[:, :local],
        is_for=is_for[:, :local],
    )


@dataclass(frozen=True)
class ExpertMajor:
    """The same rows once for each local expert that their token names, sorted by expert.

    Attributes:
        offsets: ``[E_l + 1]`` int64: where each expert's rows begin, in multiples of the alignment.
        arrival: ``[rows]`` int64: which of the N arrivals each row is, -1 in padding.
        expert: ``[rows]`` int64: local expert of each row, -1 in padding.
        weight: ``[rows]`` float32, 0 in padding.
    """

    offsets: torch.Tensor
    arrival: torch.Tensor
    expert: torch.Tensor
    weight: torch.Tensor

    def gather(self, values: torch.Tensor, padding: float) -> torch.Tensor:
        """``values[arrival]``, and ``padding`` in the rows that are none."""
        gathered = values[self.arrival.clamp(min=0)] if len(values) else values.new_empty(
            (len(self.arrival), *values.shape[1:])
        )  # fmt: skip
        gathered[self.arrival < 0] = padding
        return gathered


def expert_major(arrived: Arrivals, alignment: int = 1) -> ExpertMajor:
    """Where each row goes when every expert's rows are padded to a multiple of ``alignment``."""
    counts = arrived.tokens_per_expert
    padded = -(-counts // alignment) * alignment
    offsets = torch.nn.functional.pad(padded.cumsum(0), (1, 0))
    rows = int(offsets[-1])
    expert, arrival = arrived.is_for.T.nonzero(as_tuple=True)  # by expert, then arrival
    within = (
        torch.arange(len(expert), dtype=torch.int64, device="cpu")
        - (counts.cumsum(0) - counts)[expert]
    )
    places = offsets[expert] + within
    layout = ExpertMajor(
        offsets=offsets,
        arrival=torch.full((rows,), -1, dtype=torch.int64, device="cpu"),
        expert=torch.full((rows,), -1, dtype=torch.int64, device="cpu"),
        weight=torch.zeros(rows, dtype=torch.float32, device="cpu"),
    )
    layout.arrival[places] = arrival
    layout.expert[places] = expert
    layout.weight[places] = arrived.expert_weight[arrival, expert]
    return layout


def rows_arriving(
    batches: Sequence[Batch], experts: int, *, token_major: bool, alignment: int = 1
) -> list[int]:
    """How many rows come to each rank, in expert-major order with all padding."""
    ranks = len(batches)
    if token_major:
        goes = sum(_names(batch, experts).view(-1, ranks, experts // ranks).any(2).sum(0)
                   for batch in batches)  # fmt: skip
        return torch.as_tensor(goes, dtype=torch.int64, device="cpu").tolist()
    counts = torch.as_tensor(
        sum(_names(batch, experts).sum(0) for batch in batches), dtype=torch.int64, device="cpu"
    )
    padded = -(-counts // alignment) * alignment
    return padded.view(ranks, -1).sum(1).tolist()


def _names(batch: Batch, experts: int) -> torch.Tensor:
    """``[T, experts]`` bool: whether a token names an expert."""
    names = torch.zeros((batch.topk_idx.shape[0], experts + 1), dtype=torch.bool, device="cpu")
    # Lanes that lead nowhere go to one more column, which is dropped.
    names.scatter_(1, batch.topk_idx.where(batch.topk_idx >= 0, experts), True)
    return names[:, :experts]


# ---- combine ------------------------------------------------------------------------------------

LaneOutput = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""``output(tokens, experts)``: for ``[n]`` tokens of one rank and ``[n]`` experts (global ids) the
``[n, hidden]`` bfloat16 that these experts make of these tokens."""


def _expert_sums(
    batch: Batch, output: LaneOutput, low: int, high: int, weighted: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """What the rank of experts low to high - 1 sums for a source's tokens: the tokens that have any
    of them, and their float32 sums: 0 + w * y over distinct experts, in order of first lane."""
    topk_idx, weights = batch.topk_idx, batch.topk_weights
    here = (topk_idx >= low) & (topk_idx < high)
    tokens = here.any(dim=1).nonzero().squeeze(1)
    topk_idx, weights, here = topk_idx[tokens], weights[tokens], here[tokens]
    sums = torch.zeros((len(tokens), batch.x.shape[1]), dtype=torch.float32, device="cpu")
    for lane in range(topk_idx.shape[1]):
        expert = topk_idx[:, lane : lane + 1]
        first = here[:, lane] & ~(topk_idx[:, :lane] == expert).any(dim=1)
        rows = first.nonzero().squeeze(1)
        weight = torch.zeros(len(tokens), dtype=torch.float32, device="cpu")
        for other in range(topk_idx.shape[1]):
            same = topk_idx[:, other] == expert[:, 0]
            weight = torch.where(same, weight + weights[:, other], weight)
        y = output(tokens[rows], expert[rows, 0]).float()
        product = y * weight[rows].unsqueeze(1) if weighted else y
        sums[rows] += product
    return tokens, sums


def combine(
    batch: Batch,
    output: LaneOutput,
    ranks: int,
    experts: int,
    *,
    weighted: bool = True,
    biases: Sequence[torch.Tensor] = (),
    far_hosts: Sequence[Sequence[int]] = (),
) -> torch.Tensor:
    """``[T, hidden]`` bfloat16 that a rank with this batch gets back, bit for bit.

    Each expert rank sums in float32 and rounds to bfloat16; the source adds the ranks' rows in rank
    order to 0, or to the biases in order, in float32, and rounds again. ``far_hosts`` is as in
    :func:`combine_rows`.
    """
    parts = []
    for rank in range(ranks):
        low, high = rank * experts // ranks, (rank + 1) * experts // ranks
        tokens, sums = _expert_sums(batch, output, low, high, weighted)
        parts.append((tokens, sums.bfloat16()))
    return combine_rows(batch.x.shape, parts, biases, far_hosts)


def combine_rows(
    shape: Sequence[int],
    parts: Sequence[tuple[torch.Tensor, torch.Tensor]],
    biases: Sequence[torch.Tensor] = (),
    far_hosts: Sequence[Sequence[int]] = (),
) -> torch.Tensor:
    """The last step alone.

    Args:
        shape: of the result.
        parts: ``(tokens, [n, hidden] bfloat16)`` of each rank, in rank order.
        biases: what the sums begin with.
        far_hosts: the ranks of each host that sums its rows, in rank order from 0, and rounds the
            sums before they travel: in high throughput every host but the source's. A host's sums
            are added where its first rank's rows would be.
    """
    total = torch.zeros(tuple(shape), dtype=torch.float32, device="cpu")
    for place, bias in enumerate(biases):
        total = bias.float() if place == 0 else total + bias.float()
    host_of = {rank: ranks for ranks in far_hosts for rank in ranks}
    for rank, (tokens, rows) in enumerate(parts):
        ranks = host_of.get(rank)
        if ranks is None:
            total[tokens] += rows.float()
        elif rank == ranks[0]:
            tokens, rows = _sums_of_host(shape, [parts[each] for each in ranks])
            total[tokens] += rows.float()
    return total.bfloat16()


def _sums_of_host(
    shape: Sequence[int], parts: Sequence[tuple[torch.Tensor, torch.Tensor]]
) -> tuple[torch.Tensor, torch.Tensor]:
    """What one host returns for all its ranks: the tokens that any of ``parts`` has, and their sums
    rounded to bfloat16."""
    sums = torch.zeros(tuple(shape), dtype=torch.float32, device="cpu")
    for tokens, rows in parts:
        sums[tokens] += rows.float()
    tokens = torch.cat([tokens for tokens, _ in parts]).unique()
    return tokens, sums[tokens].bfloat16()


@dataclass(frozen=True)
class CombinedLogFmt:
    """What combine gives with LogFMT-10 rows, and how far off each value may be.

    Attributes:
        values: ``[T, hidden]`` float32.
        tolerance: ``[T, hidden]`` float32, absolute: one code more or less for each rank's row, and
            the last rounding to bfloat16.
    """

    values: torch.Tensor
    tolerance: torch.Tensor


def combine_logfmt(
    batch: Batch, output: LaneOutput, ranks: int, experts: int, *, weighted: bool = True
) -> CombinedLogFmt:
    """As :func:`combine`, with every rank's row sent as LogFMT-10."""
    values, tolerance = (
        torch.zeros(batch.x.shape, dtype=torch.float32, device="cpu"),
        torch.zeros(batch.x.shape, dtype=torch.float32, device="cpu"),
    )
    for rank in range(ranks):
        low, high = rank * experts // ranks, (rank + 1) * experts // ranks
        tokens, sums = _expert_sums(batch, output, low, high, weighted)
        decoded, step = _logfmt(sums)
        values[tokens] += decoded
        tolerance[tokens] += decoded.abs() * (torch.exp2(step) - 1.0)
    return CombinedLogFmt(values, tolerance + values.abs() * 2.0**-8 + 1e-30)


def _logfmt(sums: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The decoded values of float32 rows, and for each value the octaves between two codes.

    Per 128 columns: hi and lo are the bfloat16 next above and below log2 of the largest and
    smallest nonzero magnitude, lo at least hi - 32; 511 codes spread evenly between them.
    """
    blocks = _blocked(sums)
    magnitude = blocks.abs()
    nonzero = magnitude > 0
    largest = magnitude.amax(dim=2, keepdim=True)
    smallest = magnitude.masked_fill(~nonzero, torch.inf).amin(dim=2, keepdim=True)
    empty = largest == 0
    high = torch.log2(largest).masked_fill(empty, 0.0)
    low = torch.maximum(torch.log2(smallest).masked_fill(empty, 0.0), high - 32.0)
    high, low = -_bf16_floor(-high), _bf16_floor(low)
    step = (high - low) / 510.0
    codes = ((torch.log2(magnitude) - low) / step).nan_to_num(0.0).round().clamp(0.0, 510.0)
    decoded = torch.exp2(low + codes * step) * blocks.sign()
    decoded = decoded.masked_fill(~nonzero, 0.0)
    hidden = sums.shape[1]
    return _unblocked(decoded, hidden), _unblocked(step.expand_as(blocks), hidden)


def _bf16_floor(x: torch.Tensor) -> torch.Tensor:
    """The bfloat16 value next below or equal, as float32."""
    nearest = x.bfloat16()
    bits = nearest.view(torch.int16).int()
    below = torch.where(nearest > 0, bits - 1, bits + 1)
    below = torch.where(
        nearest == 0, torch.tensor(0x8001 - 0x10000, dtype=torch.int64, device="cpu"), below
    )
    lower = below.short().view(torch.bfloat16)
    return torch.where(nearest.float() > x, lower.float(), nearest.float())
