"""What DeepEP's calls must give, from plain torch operations and loops over tokens.

Every rank can make the inputs of all ranks, so nothing here communicates. Nothing here shares code
with the library.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from tests.distributed.routings import host_of_ranks


@dataclass(frozen=True)
class Case:
    """One geometry with random input on each rank."""

    experts: int
    top_k: int
    hidden: int
    tokens: tuple[int, ...]  # of each rank
    seed: int = 0
    duplicates: bool = False
    unrouted: float = 0.2  # share of entries that are -1

    @property
    def ranks(self) -> int:
        return len(self.tokens)

    @property
    def local(self) -> int:
        return self.experts // self.ranks

    @property
    def max_tokens(self) -> int:
        return max(*self.tokens, 1)


@dataclass
class Inputs:
    """What one rank passes to dispatch."""

    x: torch.Tensor
    topk_idx: torch.Tensor
    topk_weights: torch.Tensor


def inputs(case: Case, rank: int) -> Inputs:
    generator = torch.Generator().manual_seed(case.seed * 1009 + rank)
    tokens = case.tokens[rank]
    x = torch.randn(
        (tokens, case.hidden), generator=generator, dtype=torch.float32, device="cpu"
    ).to(torch.bfloat16)
    if case.duplicates or case.top_k > case.experts:
        topk_idx = torch.randint(
            0,
            case.experts,
            (tokens, case.top_k),
            generator=generator,
            dtype=torch.int64,
            device="cpu",
        )
    else:
        scores = torch.rand(
            (tokens, case.experts), generator=generator, dtype=torch.float32, device="cpu"
        )
        topk_idx = scores.topk(case.top_k, dim=1).indices
    topk_idx[
        torch.rand(topk_idx.shape, generator=generator, dtype=torch.float32, device="cpu")
        < case.unrouted
    ] = -1
    weights = torch.rand(
        (tokens, case.top_k), generator=generator, dtype=torch.float32, device="cpu"
    )
    return Inputs(x, topk_idx, weights)


def everybody(case: Case) -> list[Inputs]:
    return [inputs(case, rank) for rank in range(case.ranks)]


# ---- high throughput ----------------------------------------------------------------------------


@dataclass
class Layout:
    """What get_dispatch_layout gives."""

    per_rank: list[int]
    per_expert: list[int]
    in_rank: torch.Tensor


def layout(case: Case, mine: Inputs) -> Layout:
    in_rank = torch.zeros((len(mine.topk_idx), case.ranks), dtype=torch.bool, device="cpu")
    per_expert = [0] * case.experts
    for token, experts in enumerate(mine.topk_idx.tolist()):
        for expert in experts:
            if expert >= 0:
                in_rank[token, expert // case.local] = True
                per_expert[expert] += 1
    return Layout(in_rank.sum(0).tolist(), per_expert, in_rank)


@dataclass
class Arrivals:
    """Rows that one rank receives in high throughput, in order."""

    source_rank: list[int] = field(default_factory=list)
    source_token: list[int] = field(default_factory=list)
    topk_idx: list[list[int]] = field(default_factory=list)
    topk_weights: list[list[float]] = field(default_factory=list)

    def gather(self, of_ranks: list[torch.Tensor]) -> torch.Tensor:
        """The rows of these tokens, each rank's tensor given."""
        rows = [of_ranks[r][t] for r, t in zip(self.source_rank, self.source_token, strict=True)]
        if rows:
            return torch.stack(rows)
        return torch.empty((0, *of_ranks[0].shape[1:]), dtype=of_ranks[0].dtype, device="cpu")


def arrivals(case: Case, rank: int) -> Arrivals:
    found = Arrivals()
    for source, theirs in enumerate(everybody(case)):
        for token, experts in enumerate(theirs.topk_idx.tolist()):
            local = [e - rank * case.local if e // case.local == rank and e >= 0 else -1
                     for e in experts]  # fmt: skip
            if max(local) < 0:
                continue
            weights = theirs.topk_weights[token].tolist()
            found.source_rank.append(source)
            found.source_token.append(token)
            found.topk_idx.append(local)
            found.topk_weights.append(
                [w if e >= 0 else 0.0 for w, e in zip(weights, local, strict=True)]
            )
    return found


def channel_of(token: int, tokens: int, channels: int) -> int:
    return token // -(-tokens // channels)


def handle(case: Case, rank: int, channels: int) -> tuple[torch.Tensor, ...]:
    """The six tensors of DeepEP's handle, counted one by one."""
    layouts = [layout(case, theirs) for theirs in everybody(case)]
    ranks = range(case.ranks)
    prefix = torch.zeros((case.ranks, case.ranks), dtype=torch.int32, device="cpu")
    channel = torch.zeros((case.ranks, channels), dtype=torch.int32, device="cpu")
    received = torch.zeros((case.ranks, channels), dtype=torch.int32, device="cpu")
    for i in ranks:
        for j in ranks:
            prefix[i, j] = sum(layouts[source].per_rank[j] for source in range(i + 1))
    mine = layouts[rank].in_rank
    head = torch.full(mine.shape, -1, dtype=torch.int32, device="cpu")
    for r in ranks:
        seen = [0] * channels
        for token in range(case.tokens[rank]):
            own = channel_of(token, case.tokens[rank], channels)
            if mine[token, r]:
                head[token, r] = seen[own]
                seen[own] += 1
        channel[r] = torch.tensor(seen, dtype=torch.int64, device="cpu").cumsum(0)
        before = [0] * channels
        for token in range(case.tokens[r]):
            if layouts[r].in_rank[token, rank]:
                for later in range(channel_of(token, case.tokens[r], channels) + 1, channels):
                    before[later] += 1
        received[r] = torch.tensor(before, dtype=torch.int64, device="cpu")
    source_token = torch.tensor(arrivals(case, rank).source_token, dtype=torch.int32, device="cpu")
    return prefix, channel, received, source_token, mine, head


def combined(
    case: Case,
    rank: int,
    rows_of: list[torch.Tensor],
    bias: tuple[torch.Tensor, ...] = (),
) -> torch.Tensor:
    """The sums that ``rank`` gets when every rank r combines the rows ``rows_of[r]``. The ranks of
    another host are summed there, and rounded, before."""
    hidden = rows_of[0].shape[1]
    out = torch.zeros((case.tokens[rank], hidden), dtype=torch.float32, device="cpu")
    for each in bias:
        out += each.float()
    host = host_of_ranks(case.ranks)
    for there in dict.fromkeys(host):
        sums: dict[int, torch.Tensor] = {}
        for peer in (peer for peer in range(case.ranks) if host[peer] == there):
            found = arrivals(case, peer)
            for row, (source, token) in enumerate(
                zip(found.source_rank, found.source_token, strict=True)
            ):
                if source == rank:
                    before = out[token] if there == host[rank] else sums.get(token, 0.0)
                    sums[token] = before + rows_of[peer][row].float()
                    if there == host[rank]:
                        out[token] = sums[token]
        if there != host[rank]:
            for token, total in sums.items():
                out[token] += total.to(torch.bfloat16).float()
    return out.to(torch.bfloat16)


def combined_lanes(case: Case, rank: int, lanes_of: list[torch.Tensor]) -> torch.Tensor:
    out = torch.zeros((case.tokens[rank], lanes_of[0].shape[1]), dtype=torch.float32, device="cpu")
    for peer in range(case.ranks):
        there = arrivals(case, peer)
        for row, (source, token) in enumerate(
            zip(there.source_rank, there.source_token, strict=True)
        ):
            if source == rank:
                out[token] += lanes_of[peer][row]
    return out


# ---- low latency --------------------------------------------------------------------------------


@dataclass
class Packed:
    """Rows of one local expert in low latency, in order."""

    source_rank: list[int]
    source_token: list[int]

    def range_of(self, source: int) -> int:
        count = self.source_rank.count(source)
        begin = sum(1 for rank in self.source_rank if rank < source)
        return count | begin << 32


def packed(case: Case, rank: int) -> list[Packed]:
    """What each local expert of ``rank`` receives: a token once, however often it names it."""
    experts = []
    for expert in range(rank * case.local, (rank + 1) * case.local):
        found = Packed([], [])
        for source, theirs in enumerate(everybody(case)):
            for token, chosen in enumerate(theirs.topk_idx.tolist()):
                if expert in chosen:
                    found.source_rank.append(source)
                    found.source_token.append(token)
        experts.append(found)
    return experts


def fp8(x: torch.Tensor, power_of_two: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Values and scales of ``[T, hidden]`` rows, by DeepEP's formulas."""
    tokens, hidden = x.shape
    blocks = -(-hidden // 128)
    values = torch.empty((tokens, hidden), dtype=torch.float8_e4m3fn, device="cpu")
    scales = torch.empty((tokens, blocks), dtype=torch.float32, device="cpu")
    for block in range(blocks):
        columns = slice(128 * block, min(128 * (block + 1), hidden))
        part = x[:, columns].float()
        amax = part.abs().amax(1, keepdim=True).clamp(min=1e-4)
        scale = amax / 448
        factor = torch.full_like(amax, 448.0) / amax  # 448 / amax would multiply by a reciprocal
        if power_of_two:
            scale = torch.exp2(torch.ceil(torch.log2(scale)))
            factor = 1 / scale
        values[:, columns] = (part * factor).to(torch.float8_e4m3fn)
        scales[:, block] = scale.squeeze(1)
    return values, scales


def ue8m0(scales: torch.Tensor) -> torch.Tensor:
    """Exponent bytes of power-of-two scales, four to an int32."""
    exponents = (torch.log2(scales).round().to(torch.int64) + 127).tolist()
    words = [
        [sum(row[i] << 8 * (i - at) for i in range(at, min(at + 4, len(row))))
         for at in range(0, len(row), 4)]
        for row in exponents
    ]  # fmt: skip
    shape = (len(exponents), -(-scales.shape[1] // 4))
    return torch.tensor(words, dtype=torch.int64, device="cpu").to(torch.int32).reshape(shape)


def dequantized(values: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    hidden = values.shape[-1]
    return values.float() * scales.repeat_interleave(128, -1)[..., :hidden]


def weighted_sum(case: Case, rank: int, y_of: list[torch.Tensor]) -> torch.Tensor:
    """The result of ``rank``'s low-latency combine when every rank r brings ``y_of[r]``
    ``[E_l, C, hidden]``: rounded to bfloat16 per rank, then over ranks."""
    mine = inputs(case, rank)
    packs = [packed(case, peer) for peer in range(case.ranks)]
    out = torch.zeros((case.tokens[rank], y_of[0].shape[2]), dtype=torch.float32, device="cpu")
    for token, chosen in enumerate(mine.topk_idx.tolist()):
        for peer in range(case.ranks):
            partial = None
            for k, expert in enumerate(chosen):
                if expert < 0 or expert // case.local != peer or expert in chosen[:k]:
                    continue
                weight = torch.tensor(0.0, dtype=torch.float32, device="cpu")
                for other, weight_of in zip(chosen, mine.topk_weights[token], strict=True):
                    weight = weight + weight_of if other == expert else weight
                pack = packs[peer][expert % case.local]
                row = next(i for i, place in enumerate(
                    zip(pack.source_rank, pack.source_token, strict=True)
                ) if place == (rank, token))  # fmt: skip
                product = weight * y_of[peer][expert % case.local, row].float()
                partial = torch.zeros_like(product) + product if partial is None else (
                    partial + product)  # fmt: skip
            if partial is not None:
                out[token] += partial.to(torch.bfloat16).float()
    return out.to(torch.bfloat16)


# ---- sizes --------------------------------------------------------------------------------------


def low_latency_bytes(max_tokens: int, hidden: int, experts: int) -> int:
    """DeepEP's low-latency buffer: 2 * align128(4 E) + 4 E M (2 H + 4 H / 128)."""
    flags = -(-4 * experts // 128) * 128
    return 2 * flags + 4 * experts * max_tokens * (2 * hidden + 4 * hidden // 128)
