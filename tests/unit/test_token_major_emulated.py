"""Low latency with token-major rows, its kernels run on the CPU, against a few lines of Python."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from fanfold.backends.low_latency.token_major import CudaTokenMajor, RowOptions, TokenMajorRows
from fanfold.errors import ArgumentError, FanfoldError, PeerRefused
from fanfold.formats import ScaleFormat, quantize
from fanfold.geometry import Geometry
from tests.emulation.world import Builder, World, emulated
from tests.unit.test_kernels_emulated import Batch

CTAS = 7
ALIGNMENT = 4
SMALL = Geometry(ranks=3, num_experts=12, top_k=4, hidden=144, max_tokens=6)


@pytest.fixture(autouse=True)
def gpu(builder: Builder) -> Iterator[None]:
    with emulated(builder, CTAS):
        yield


@dataclasses.dataclass
class Sent:
    """What one rank sends."""

    x: Any
    topk_idx: torch.Tensor
    topk_weights: torch.Tensor | None
    batch: Batch

    @classmethod
    def of(cls, geometry: Geometry, tokens: int, seed: int, scaled: bool, weighted: bool) -> Sent:
        batch = Batch.of(geometry, tokens, seed)
        x: Any = batch.x
        if scaled:
            values, scales = quantize(x, ScaleFormat.FLOAT32)
            x = values, scales.t().contiguous().t()  # scales of any strides
        return cls(x, batch.topk_idx, batch.topk_weights if weighted else None, batch)


@dataclasses.dataclass
class Wanted:
    """The rows of one rank, in order: source, token, and by top-k entry the local expert or -1 and
    its weight or 0."""

    rows: list[tuple[int, int, list[int], list[float]]]

    @classmethod
    def of(cls, geometry: Geometry, every: list[Sent], rank: int) -> Wanted:
        local, rows = geometry.experts_per_rank, []
        for source, sent in enumerate(every):
            for token, named in enumerate(sent.topk_idx.tolist()):
                here = [-1] * geometry.top_k
                of_row = [0.0] * geometry.top_k
                for k, expert in enumerate(named):
                    if expert // local == rank and expert >= 0:
                        here[k] = expert % local
                        of_row[k] = float(sent.batch.topk_weights[token, k])
                if max(here) >= 0:
                    rows.append((source, token, here, of_row))
        return cls(rows)


def check_received(
    geometry: Geometry, every: list[Sent], rank: int, got: TokenMajorRows, most: int
) -> None:
    wanted = Wanted.of(geometry, every, rank).rows
    count = len(wanted)
    assert len(got.tokens) == geometry.ranks * most
    per_rank = [sum(row[0] == source for row in wanted) for source in range(geometry.ranks)]
    assert (
        got.rank_ends.tolist()
        == torch.tensor(per_rank, dtype=torch.int64, device="cpu").cumsum(0).tolist()
    )
    per_expert = [
        sum(expert in row[2] for row in wanted) for expert in range(geometry.experts_per_rank)
    ]
    assert got.expert_rows.tolist() == per_expert
    aligned = [-(-rows // ALIGNMENT) * ALIGNMENT for rows in per_expert]
    assert (
        got.expert_ends.tolist()
        == torch.tensor(aligned, dtype=torch.int64, device="cpu").cumsum(0).tolist()
    )
    assert got.topk_idx[:count].tolist() == [row[2] for row in wanted]
    assert bool((got.topk_idx[count:] == -1).all())
    none = [-1] * geometry.top_k
    sources = [[source * most + token, n, *none] for n, (source, token, *_) in enumerate(wanted)]
    assert got.sources[:count].tolist() == sources
    assert bool((got.sources[count:] == -1).all())
    if every[rank].topk_weights is None:
        assert got.topk_weights is None
    else:
        assert got.topk_weights is not None
        assert got.topk_weights[:count].tolist() == [row[3] for row in wanted]
        assert not got.topk_weights[count:].any()
    for number, (source, token, *_) in enumerate(wanted):
        x = every[source].x
        if not isinstance(x, tuple):
            assert torch.equal(got.tokens[number], x[token])
            continue
        assert torch.equal(got.tokens[number].view(torch.uint8), x[0][token].view(torch.uint8))
        assert got.scales is not None
        assert torch.equal(got.scales[number], x[1][token])


def outputs_of(geometry: Geometry, rank: int, rows: int) -> torch.Tensor:
    numbers = torch.Generator().manual_seed(1000 + rank)
    return torch.randn(
        (rows, geometry.hidden), generator=numbers, dtype=torch.float32, device="cpu"
    ).bfloat16()


def sums_of(geometry: Geometry, every: list[Sent], rank: int, most: int) -> torch.Tensor:
    out = torch.zeros(
        (len(every[rank].topk_idx), geometry.hidden), dtype=torch.float32, device="cpu"
    )
    for peer in range(geometry.ranks):
        y = outputs_of(geometry, peer, geometry.ranks * most).float()
        for number, (source, token, *_) in enumerate(Wanted.of(geometry, every, peer).rows):
            if source == rank:
                out[token] += y[number]
    return out.bfloat16()


def one_round(
    world: World, geometry: Geometry, every: list[Sent], most: int, **options: Any
) -> None:
    def program(rank: int, mode: CudaTokenMajor) -> None:
        sent = every[rank]
        totals = torch.full((geometry.experts_per_rank,), 5, dtype=torch.int32, device="cpu")
        got = mode.dispatch_rows(
            geometry,
            sent.x,
            sent.topk_idx,
            sent.topk_weights,
            RowOptions(most_tokens=most, alignment=ALIGNMENT, **options),
            expert_totals=totals,
        )
        check_received(geometry, every, rank, got, most)
        assert torch.equal(totals, got.expert_rows + 5)
        if got.scales is not None and options:
            assert got.scales.stride() == (1, -(-len(got.scales) // 4) * 4)
        y = outputs_of(geometry, rank, len(got.tokens))
        out = mode.combine_rows(geometry, y, got.routing, len(y))
        assert torch.equal(out, sums_of(geometry, every, rank, most))

    world.run(program)


SIZES = {
    "small": SMALL,
    "one rank": Geometry(ranks=1, num_experts=4, top_k=4, hidden=256, max_tokens=9),
    "several segments": Geometry(ranks=2, num_experts=6, top_k=3, hidden=1168, max_tokens=5),
    "more tokens than a window": Geometry(
        ranks=2, num_experts=4, top_k=2, hidden=16, max_tokens=300
    ),
    "more experts than lanes": Geometry(ranks=2, num_experts=80, top_k=8, hidden=16, max_tokens=9),
    "one expert a rank": Geometry(ranks=4, num_experts=4, top_k=2, hidden=64, max_tokens=4),
}


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("size", SIZES)
def test_rounds(size: str, scaled: bool) -> None:
    geometry = SIZES[size]
    world = World(geometry, token_major=True)
    for number in range(5):
        most = max(1, geometry.max_tokens - number)
        every = [
            Sent.of(geometry, (most + rank * number) % (most + 1), 100 * number + rank, scaled,
                    number % 2 == 0)
            for rank in range(geometry.ranks)
        ]  # fmt: skip
        options = {"scales_by_columns": True} if scaled and number % 3 == 1 else {}
        one_round(world, geometry, every, most, **options)
    world.run(lambda rank, mode: mode.quiesce())
    world.check_absent()


def test_more_ranks_than_a_word_has_bits() -> None:
    geometry = Geometry(ranks=33, num_experts=66, top_k=5, hidden=64, max_tokens=2)
    world = World(geometry, token_major=True)
    for number in range(2):
        every = [
            Sent.of(geometry, (rank + number) % 3, 100 * number + rank, False, True)
            for rank in range(geometry.ranks)
        ]
        one_round(world, geometry, every, 2)


def test_a_refused_call_brings_nothing_and_the_next_works() -> None:
    geometry = SMALL
    world = World(geometry, token_major=True)
    every = [Sent.of(geometry, 4, rank, False, True) for rank in range(geometry.ranks)]
    one_round(world, geometry, every, 6)

    def refused(rank: int, mode: CudaTokenMajor) -> str:
        sent = every[rank]
        x = sent.x[:, :-16].contiguous() if rank == 1 else sent.x
        try:
            got = mode.dispatch_rows(geometry, x, sent.topk_idx, sent.topk_weights)
            assert got.aborted.tolist() == [1]
            assert not any(each.any() for each in (got.rank_ends, got.expert_rows, got.expert_ends))
            assert bool((got.topk_idx == -1).all())
            assert bool((got.sources == -1).all())
            mode.combine_rows(geometry, torch.zeros_like(got.tokens), got.routing, len(got.tokens))
        except FanfoldError as error:  # then rank 1 has nothing to combine, and nobody combines
            return f"{type(error).__name__}: {error}"
        return ""

    first, second, third = world.run(refused)
    assert second.startswith(f"{ArgumentError.__name__}: x.shape[1] is 128, but must be 144")
    assert all(other.startswith(PeerRefused.__name__) for other in (first, third))
    one_round(world, geometry, every, 6)


@pytest.mark.parametrize("what", ["most_tokens", "weights", "format"])
def test_ranks_that_disagree_notice(what: str) -> None:
    geometry = SMALL
    world = World(geometry, token_major=True, timeout_s=5.0)
    every = [Sent.of(geometry, 4, rank, False, True) for rank in range(geometry.ranks)]
    one_round(world, geometry, every, 6)

    def program(rank: int, mode: CudaTokenMajor) -> str:
        sent = Sent.of(geometry, 4, rank, what == "format" and rank == 0, True)
        weights = None if what == "weights" and rank == 0 else sent.topk_weights
        most = 5 if what == "most_tokens" and rank == 0 else 6
        try:
            options = RowOptions(most_tokens=most)
            got = mode.dispatch_rows(geometry, sent.x, sent.topk_idx, weights, options)
            y = torch.zeros((len(got.tokens), 144), dtype=torch.bfloat16, device="cpu")
            mode.combine_rows(geometry, y, got.routing, len(y))
        except FanfoldError as error:
            return str(error)
        return ""

    said = world.run(program)
    assert all("must be the same on all ranks" in each for each in said), said
