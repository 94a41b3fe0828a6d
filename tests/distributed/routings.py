"""Random calls of the high-throughput mode, and what must come of them, in plain loops.

Every rank can make the input of all ranks, so each can say what it has to receive. Nothing here
knows how rows travel.
"""

from __future__ import annotations

import dataclasses
import random
from typing import NamedTuple

import torch

from fanfold.backends.high_throughput import Rows
from fanfold.config import Config

# The host of each rank, where the setting does not say it; ranks of real hosts fill it.
PLACED: list[int] = []

STYLES = ("spread", "one_expert", "none", "duplicates", "one_rank", "holes")


@dataclasses.dataclass(frozen=True)
class Case:
    """One geometry and one way to fill it; the same on all ranks."""

    tokens: tuple[int, ...]  # of each rank
    experts_per_rank: int
    top_k: int
    hidden: int
    style: str = "spread"
    weighted: bool = True
    alignment: int = 1
    slack: int | None = None  # rows of capacity beyond what arrives
    dtype: torch.dtype = torch.bfloat16
    scales: int = 0  # columns of scales, with the values of a 1-byte dtype
    biases: int = 0
    seed: int = 0

    @property
    def ranks(self) -> int:
        return len(self.tokens)

    @property
    def experts(self) -> int:
        return self.ranks * self.experts_per_rank


@dataclasses.dataclass
class Input:
    """What one rank brings."""

    x: torch.Tensor
    scales: torch.Tensor | None
    topk_idx: torch.Tensor
    topk_weights: torch.Tensor | None
    base: torch.Tensor  # [T, hidden] bfloat16: the experts' outputs are made from it
    bias: tuple[torch.Tensor, ...]


def random_case(numbers: random.Random, ranks: int) -> Case:
    """Any geometry of ``ranks``."""
    most = numbers.choice((0, 1, 5, 25))
    return Case(
        tokens=tuple(numbers.randint(0, most) for _ in range(ranks)),
        experts_per_rank=numbers.choice((1, 2, 3, 8, 64)),
        top_k=numbers.choice((1, 2, 3, 8, 22, 32)),
        hidden=8 * numbers.randint(2, 60),
        style=numbers.choice(STYLES),
        weighted=numbers.random() < 0.7,
        alignment=numbers.choice((1, 1, 4, 128)),
        slack=numbers.choice((None, None, 0, 3, 500)),
        biases=numbers.choice((0, 0, 1, 2)),
        seed=numbers.randrange(1 << 30),
    )


def _routing(case: Case, tokens: int, generator: torch.Generator) -> torch.Tensor:
    shape = (tokens, case.top_k)
    idx = torch.randint(0, case.experts, shape, generator=generator)
    if case.style == "one_expert":
        return torch.full(shape, case.experts - 1)
    if case.style == "none":
        return torch.full(shape, -1)
    if case.style == "duplicates":
        return torch.randint(0, min(2, case.experts), shape, generator=generator)
    if case.style == "one_rank":
        return idx % case.experts_per_rank
    if case.style == "holes":
        return torch.where(torch.rand(shape, generator=generator) < 0.6, -1, idx)
    return idx


def make_input(case: Case, rank: int) -> Input:
    """What ``rank`` brings to ``case``."""
    generator = torch.Generator().manual_seed(case.seed * 64 + rank)
    tokens = case.tokens[rank]
    shape = (tokens, case.hidden)
    noise = torch.randint(0, 256, (tokens, case.hidden * case.dtype.itemsize),
                          dtype=torch.uint8, generator=generator)  # fmt: skip
    scales = None
    if case.scales:
        # Column-major, every other column of a larger tensor: strides of no simple kind.
        table = torch.rand((2 * case.scales, tokens + 1), generator=generator)
        scales = table[::2, 1:].T

    def values() -> torch.Tensor:
        # Some are -0.0, which a sum keeps only if it begins with it and nothing else is added.
        some = torch.randn(shape, generator=generator).bfloat16()
        return torch.where(torch.rand(shape, generator=generator) < 0.2, -0.0, some)

    return Input(
        x=noise.view(case.dtype),
        scales=scales,
        topk_idx=_routing(case, tokens, generator),
        topk_weights=(
            torch.randn((tokens, case.top_k), generator=generator) if case.weighted else None
        ),
        base=values(),
        bias=tuple(values() for _ in range(case.biases)),
    )


class Row(NamedTuple):
    """One row that a rank receives."""

    source: int
    token: int
    lanes: list[int]  # local expert or -1, for each of the top-k
    weights: list[float]


def rows_of_rank(case: Case, inputs: list[Input], rank: int) -> list[Row]:
    """The rows that ``rank`` receives, in order."""
    first = rank * case.experts_per_rank
    rows = []
    for source, given in enumerate(inputs):
        idx = given.topk_idx - first
        idx = torch.where(
            (given.topk_idx >= 0) & (idx >= 0) & (idx < case.experts_per_rank), idx, -1
        )
        for token, lanes in enumerate(idx.tolist()):
            if all(lane < 0 for lane in lanes):
                continue
            given_weights = (
                [0.0] * case.top_k
                if given.topk_weights is None
                else given.topk_weights[token].tolist()
            )
            weights = [
                w if lane >= 0 else 0.0 for w, lane in zip(given_weights, lanes, strict=True)
            ]
            rows.append(Row(source, token, lanes, weights))
    return rows


def distinct(lanes: list[int]) -> list[int]:
    """The local experts that a row goes to, each once, in the order of their first lane."""
    return list(dict.fromkeys(lane for lane in lanes if lane >= 0))


def weight_of(row: Row, expert: int) -> torch.Tensor:
    """float32 sum of the weights that ``row`` gives ``expert``, lane by lane."""
    total = torch.zeros(())
    first = True
    for lane, weight in zip(row.lanes, row.weights, strict=True):
        if lane == expert:
            total = torch.tensor(weight) if first else total + torch.tensor(weight)
            first = False
    return total


def expert_output(given: Input, token: int, expert: int) -> torch.Tensor:
    """What global ``expert`` makes of a token: ``[hidden]`` bfloat16."""
    # Sums of these nearly cancel, so that another order, or one rounding less, shows.
    factor = (1024.0, -1024.0, 0.6, -0.35, 3.0)[expert % 5]
    return (given.base[token].float() * factor).bfloat16()


def host_of_ranks(ranks: int) -> list[int]:
    """The host of each rank, by the setting in the environment; one without it."""
    if PLACED:
        return PLACED
    hosts = min(Config.resolve().hosts or 1, ranks)
    return [rank * hosts // ranks for rank in range(ranks)]


def expected_combine(
    case: Case,
    inputs: list[Input],
    rows_by_rank: list[list[Row]],
    rank: int,
    weighted: bool,
    host: list[int] | None = None,
) -> torch.Tensor:
    """``[T, hidden]``: per rank in fp32 over its experts, rounded, then over ranks, rounded. The
    ranks of another ``host`` (:func:`host_of_ranks`) are summed there, and rounded, before."""
    given = inputs[rank]
    host = host or host_of_ranks(case.ranks)
    tokens = case.tokens[rank]
    total = torch.zeros((tokens, case.hidden))
    if given.bias:
        total = given.bias[0].float()
        for bias in given.bias[1:]:
            total = total + bias.float()
    for there in dict.fromkeys(host):
        local = there == host[rank]
        subtotal = total if local else torch.zeros_like(total)
        sent = set()  # tokens of which this host returns a sum
        for peer, rows in enumerate(rows_by_rank):
            if host[peer] != there:
                continue
            first = peer * case.experts_per_rank
            for row in rows:
                if row.source != rank:
                    continue
                part = torch.zeros(case.hidden)
                for expert in distinct(row.lanes):
                    y = expert_output(given, row.token, first + expert).float()
                    part = part + (weight_of(row, expert) * y if weighted else y)
                subtotal[row.token] += part.bfloat16().float()
                sent.add(row.token)
        for token in () if local else sorted(sent):
            total[token] += subtotal[token].bfloat16().float()
    return total.bfloat16()


def lane_number(source: int, token: int, lane: int, rank: int) -> float:
    """A number that travels back with a lane."""
    return source * 1000.0 + token * 10.0 + lane + rank / 16.0


class Round:
    """One case on one rank: its input, and what it expects in each order of the rows."""

    def __init__(self, case: Case, rank: int) -> None:
        self.case, self.rank = case, rank
        self.inputs = [make_input(case, peer) for peer in range(case.ranks)]
        self.rows_by_rank = [rows_of_rank(case, self.inputs, peer) for peer in range(case.ranks)]
        self.own, self.rows = self.inputs[rank], self.rows_by_rank[rank]
        per_expert: list[list[int]] = [[] for _ in range(case.experts_per_rank)]
        for n, row in enumerate(self.rows):
            for expert in distinct(row.lanes):
                per_expert[expert].append(n)
        self.counts = [len(numbers) for numbers in per_expert]
        self.offsets = [0]
        for count in self.counts:
            self.offsets.append(self.offsets[-1] + -(-count // case.alignment) * case.alignment)
        # (row number, expert) to its place in expert-major order
        self.place_of = {
            (n, expert): self.offsets[expert] + number
            for expert, numbers in enumerate(per_expert)
            for number, n in enumerate(numbers)
        }

    def sent(self) -> Rows:
        return self.own.x if self.own.scales is None else (self.own.x, self.own.scales)

    def capacity(self, layout: str) -> int | None:
        needed = self.offsets[-1] if layout == "expert_major" else len(self.rows)
        return None if self.case.slack is None else needed + self.case.slack

    def places(self, layout: str) -> tuple[dict[int, tuple[Row, int]], int]:
        """The row (and, expert-major, the local expert) at each place, and the number of places."""
        if layout == "token_major":
            filled = {place: (row, -1) for place, row in enumerate(self.rows)}
            needed = len(self.rows)
        else:
            filled = {place: (self.rows[n], e) for (n, e), place in self.place_of.items()}
            needed = self.offsets[-1]
        capacity = self.capacity(layout)
        return filled, needed if capacity is None else capacity


def results_of(case: Case, layout: str = "expert_major") -> int:
    """Bytes for the results of a dispatch in place on the rank that gets most, and no more."""
    rounds = [Round(case, rank) for rank in range(case.ranks)]
    rows = max(each.places(layout)[1] for each in rounds)
    return rows * (case.hidden * case.dtype.itemsize + 4 * case.scales) + 128
