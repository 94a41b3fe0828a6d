"""The high-throughput mode against loops over plain tensors, bit by bit; refusals and faults."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist

import fanfold
from fanfold.backends.high_throughput import Dispatched, HostHighThroughput, Plan, dispatch_layout
from fanfold.config import Config
from fanfold.group import as_group
from fanfold.launch import RankPool
from fanfold.memory.host import SymmetricMemory
from tests.distributed.routings import (
    Case,
    Round,
    distinct,
    expected_combine,
    expert_output,
    lane_number,
    random_case,
    weight_of,
)

pytestmark = pytest.mark.placements("threads")

Pools = Callable[[int], RankPool]
BF16_EIGHT = Case(tokens=(9, 0, 30, 17), experts_per_rank=4, top_k=5, hidden=48)


@contextmanager
def opened(
    group: dist.ProcessGroup, staging_bytes: int = 1 << 16, timeout_s: float = 60.0
) -> Iterator[HostHighThroughput]:
    """A HostHighThroughput of its own memory. Collective."""
    config = Config.resolve(staging_bytes=staging_bytes, timeout_s=timeout_s)
    ranks = as_group(group)
    nbytes = HostHighThroughput.staging_bytes(ranks.size, config)
    with SymmetricMemory(ranks, nbytes, config) as memory:
        yield HostHighThroughput(memory, 0, nbytes)


def same_bits(actual: torch.Tensor, expected: torch.Tensor) -> bool:
    """Whether two tensors are equal in shape, dtype and every bit."""
    if actual.dtype != expected.dtype or actual.shape != expected.shape:
        return False
    # A clone, because one element of any stride counts as contiguous, but not for view.
    pair = (t.clone(memory_format=torch.contiguous_format).view(-1) for t in (actual, expected))
    return torch.equal(*(t.view(torch.uint8) for t in pair))


# ---- one round of everything, checked -------------------------------------------------------


def check_plan(expect: Round, plan: Plan) -> None:
    case, rows = expect.case, expect.rows
    assert (plan.ranks, plan.num_experts, plan.top_k) == (case.ranks, case.experts, case.top_k)
    assert plan.tokens == case.tokens[expect.rank]
    assert plan.received == len(rows)
    assert plan.source_token.tolist() == [row.token for row in rows]
    sources = [row.source for row in rows]
    prefix = [sum(source <= rank for source in sources) for rank in range(case.ranks)]
    assert plan.source_prefix.tolist() == prefix
    assert plan.topk_idx.tolist() == [row.lanes for row in rows]
    if case.weighted:
        assert plan.topk_weights is not None
        weights = torch.tensor([row.weights for row in rows]).reshape(len(rows), case.top_k)
        assert same_bits(plan.topk_weights, weights)
    else:
        assert plan.topk_weights is None
    assert plan.tokens_per_expert.tolist() == expect.counts
    assert plan.offsets.tolist() == expect.offsets
    assert plan.rows_of.tolist() == [
        [expect.place_of[n, lane] if lane >= 0 else -1 for lane in row.lanes]
        for n, row in enumerate(rows)
    ]


def check_rows(expect: Round, got: Dispatched, layout: str) -> None:
    filled, places = expect.places(layout)
    assert got.tokens.shape[0] == places
    tokens = torch.zeros_like(got.tokens.view(torch.uint8)).view(got.tokens.dtype)
    scales = None if got.scales is None else torch.zeros_like(got.scales)
    weights = torch.zeros(places)
    sources = torch.full((places, 2), -1, dtype=torch.int32)
    for place, (row, expert) in filled.items():
        given = expect.inputs[row.source]
        tokens[place] = given.x[row.token]
        sources[place] = torch.tensor([row.source, row.token])
        weights[place] = weight_of(row, expert)
        if scales is not None:
            assert given.scales is not None
            scales[place] = given.scales[row.token]
    assert same_bits(got.tokens, tokens)
    assert torch.equal(got.row_source_rank, sources[:, 0])
    assert torch.equal(got.row_source_token, sources[:, 1])
    if scales is not None:
        assert got.scales is not None
        assert same_bits(got.scales, scales)
    assert (got.scales is None) == (expect.case.scales == 0)
    if layout == "expert_major" and expect.case.weighted:
        assert got.row_weights is not None
        assert same_bits(got.row_weights, weights)
    else:
        assert got.row_weights is None


def outputs_of(expect: Round, layout: str, weighted: bool) -> torch.Tensor:
    """What the experts of this rank make of its rows, in place; NaN where there is no row."""
    filled, places = expect.places(layout)
    y = torch.full((places, expect.case.hidden), float("nan"), dtype=torch.bfloat16)
    first = expect.rank * expect.case.experts_per_rank
    for place, (row, expert) in filled.items():
        given = expect.inputs[row.source]
        if expert >= 0:
            y[place] = expert_output(given, row.token, first + expert)
            continue
        part = torch.zeros(expect.case.hidden)
        for local in distinct(row.lanes):
            value = expert_output(given, row.token, first + local).float()
            part = part + (weight_of(row, local) * value if weighted else value)
        y[place] = part.bfloat16()
    return y


def lanes_of(expect: Round, layout: str) -> torch.Tensor:
    """Numbers to travel back: NaN where none may be looked at."""
    filled, places = expect.places(layout)
    if layout == "expert_major":
        lanes = torch.full((places,), float("nan"))
        for place, (row, expert) in filled.items():
            lanes[place] = lane_number(row.source, row.token, expert, expect.rank)
        return lanes
    lanes = torch.full((places, expect.case.top_k), float("nan"))
    for place, (row, _) in filled.items():
        lanes[place] = torch.tensor(
            [lane_number(row.source, row.token, k, expect.rank) for k in range(expect.case.top_k)]
        )
    return lanes


def expected_lanes(expect: Round, layout: str) -> torch.Tensor:
    case, rank = expect.case, expect.rank
    total = torch.zeros((case.tokens[rank], case.top_k))
    for peer, rows in enumerate(expect.rows_by_rank):
        for row in rows:
            if row.source != rank:
                continue
            for k, lane in enumerate(row.lanes):
                if layout == "token_major":
                    total[row.token, k] += lane_number(rank, row.token, k, peer)
                elif lane >= 0:
                    total[row.token, k] += lane_number(rank, row.token, lane, peer)
    return total


def check_combine(mode: HostHighThroughput, expect: Round, got: Dispatched, layout: str) -> None:
    plan, weighted = got.plan, expect.case.weighted
    wanted = expected_combine(
        expect.case, expect.inputs, expect.rows_by_rank, expect.rank, weighted
    )
    bias = expect.own.bias
    out, lanes = mode.combine(
        outputs_of(expect, layout, weighted),
        plan,
        layout=layout,
        row_weights=got.row_weights,
        topk_weights=lanes_of(expect, layout),
        bias=bias[0] if len(bias) == 1 else bias or None,
    )
    assert same_bits(out, wanted)
    assert lanes is not None
    assert same_bits(lanes, expected_lanes(expect, layout))
    assert same_bits(mode.combine_weights(lanes_of(expect, layout), plan, layout=layout), lanes)
    if weighted and layout == "expert_major":
        unweighted = expected_combine(
            expect.case, expect.inputs, expect.rows_by_rank, expect.rank, False
        )
        into = torch.full_like(out, float("nan"))
        result, none = mode.combine(
            outputs_of(expect, layout, False), plan, layout=layout, bias=bias or None, out=into
        )
        assert result is into
        assert none is None
        assert same_bits(into, unweighted)


def run_case(mode: HostHighThroughput, case: Case, rank: int, layout: str) -> None:
    """Dispatches, reuses and combines ``case``, and checks every bit of what this rank gets."""
    expect = Round(case, rank)
    given = expect.own
    got = mode.dispatch(
        expect.sent(),
        given.topk_idx,
        given.topk_weights,
        num_experts=case.experts,
        layout=layout,
        expert_alignment=case.alignment,
        capacity=expect.capacity(layout),
    )
    check_plan(expect, got.plan)
    check_rows(expect, got, layout)
    check_combine(mode, expect, got, layout)
    again = mode.dispatch_cached(expect.sent(), got.plan, layout=layout)
    check_rows(expect, again, layout)


def run_cases(group: dist.ProcessGroup, cases: list[Case], staging_bytes: int = 1 << 16) -> int:
    with opened(group, staging_bytes) as mode:
        for number, case in enumerate(cases):
            layout = ("expert_major", "token_major")[number % 2]
            try:
                run_case(mode, case, as_group(group).rank, layout)
            except AssertionError as error:
                raise AssertionError(f"case {number}, {layout}: {case}") from error
    return len(cases)


# ---- tests ----------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 5, 8])
def test_random_geometries(pools: Pools, ranks: int) -> None:
    numbers = random.Random(ranks)
    cases = [random_case(numbers, ranks) for _ in range(24)]
    assert pools(ranks).run(run_cases, cases) == [len(cases)] * ranks


@pytest.mark.long
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 5, 8])
def test_many_random_geometries(pools: Pools, ranks: int) -> None:
    numbers = random.Random(ranks + 100)
    cases = [random_case(numbers, ranks) for _ in range(300)]
    assert pools(ranks).run(run_cases, cases) == [len(cases)] * ranks


@pytest.mark.placements("processes", "threads")
@pytest.mark.parametrize(
    ("dtype", "scales"),
    [
        (torch.float8_e4m3fn, 3),
        (torch.uint8, 1),
        (torch.float8_e4m3fn, 0),
        (torch.float32, 0),
        (torch.float16, 0),
    ],
)
def test_row_formats(pools: Pools, dtype: torch.dtype, scales: int) -> None:
    case = dataclasses.replace(BF16_EIGHT, dtype=dtype, scales=scales, alignment=4)
    assert pools(4).run(run_cases, [case, case]) == [2] * 4


def test_tensors_larger_than_staging(pools: Pools) -> None:
    many = Case(tokens=(700, 0, 400), experts_per_rank=2, top_k=2, hidden=64)
    # A single row is larger than what its ring can hold: it travels in pieces.
    long = Case(tokens=(3, 5, 2), experts_per_rank=2, top_k=3, hidden=16384, biases=2)
    longest = Case(tokens=(2, 1, 2), experts_per_rank=1, top_k=2, hidden=65528)
    cases = [many, many, long, long, longest, longest]
    assert pools(3).run(run_cases, cases) == [len(cases)] * 3


def test_many_experts(pools: Pools) -> None:
    case = Case(tokens=(20, 31), experts_per_rank=2048, top_k=32, hidden=16, alignment=8)
    assert pools(2).run(run_cases, [case, case]) == [2, 2]


def _soak(group: dist.ProcessGroup, rounds: int) -> int:
    numbers = random.Random(7)
    rank, ranks = as_group(group).rank, as_group(group).size
    with opened(group) as mode:
        for _ in range(rounds):
            case = dataclasses.replace(random_case(numbers, ranks), slack=None)
            expect = Round(case, rank)
            got = mode.dispatch(
                expect.own.x,
                expect.own.topk_idx,
                expect.own.topk_weights,
                num_experts=case.experts,
                expert_alignment=case.alignment,
            )
            assert got.plan.received == len(expect.rows)
            for _ in range(numbers.randrange(3)):
                got = mode.dispatch_cached(expect.own.x, got.plan, layout="expert_major")
            out, _ = mode.combine(
                got.tokens, got.plan, layout="expert_major", row_weights=got.row_weights
            )
            assert out.shape == expect.own.x.shape
    return rounds


def test_changing_shapes(pools: Pools) -> None:
    assert pools(3).run(_soak, 300) == [300] * 3


def _same_bits_twice(group: dist.ProcessGroup) -> None:
    case = dataclasses.replace(BF16_EIGHT, tokens=(60, 50, 40, 30), hidden=1024, biases=1)
    expect = Round(case, as_group(group).rank)
    given = expect.own
    with opened(group) as mode:
        results = []
        for _ in range(5):
            got = mode.dispatch(
                given.x, given.topk_idx, given.topk_weights, num_experts=case.experts
            )
            out, _ = mode.combine(
                got.tokens, got.plan, layout="expert_major", row_weights=got.row_weights,
                bias=given.bias,
            )  # fmt: skip
            results.append((got.tokens, out))
    for tokens, out in results[1:]:
        assert same_bits(tokens, results[0][0])
        assert same_bits(out, results[0][1])


def test_equal_input_gives_equal_bits(pools: Pools) -> None:
    pools(4).run(_same_bits_twice)


def _other_rows_by_an_old_plan(group: dist.ProcessGroup) -> None:
    rank = as_group(group).rank
    case = dataclasses.replace(BF16_EIGHT, slack=7)
    expect = Round(case, rank)
    with opened(group) as mode:
        got = mode.dispatch(expect.own.x, expect.own.topk_idx, expect.own.topk_weights,
                            num_experts=case.experts, capacity=10_000)  # fmt: skip
        # Wider rows, of another dtype, in the other order.
        other = dataclasses.replace(case, hidden=96, dtype=torch.float32)
        wide = Round(other, rank)
        by_token = mode.dispatch_cached(wide.own.x, got.plan, layout="token_major")
        assert by_token.tokens.shape == (10_000, 96)
        for place, row in enumerate(expect.rows):
            sent = wide.inputs[row.source].x[row.token]
            assert same_bits(by_token.tokens[place], sent)
        assert not by_token.tokens[len(expect.rows) :].view(torch.uint8).any()
        # Combine may get the rows that arrived, or all there is room for.
        y = torch.ones((got.plan.received, 16), dtype=torch.bfloat16)
        out, _ = mode.combine(y, got.plan, layout="token_major")
        assert torch.equal(out[:, 0].float(), got.plan.is_token_in_rank.sum(1).float())
        padded = torch.cat([y, torch.full((10_000 - y.shape[0], 16), float("nan")).bfloat16()])
        again, _ = mode.combine(padded, got.plan, layout="token_major")
        assert torch.equal(again, out)


def test_a_plan_serves_other_rows(pools: Pools) -> None:
    pools(4).run(_other_rows_by_an_old_plan)


def test_dispatch_layout_counts_duplicates() -> None:
    topk_idx = torch.tensor([[0, 0, 5], [-1, 3, 4], [-1, -1, -1]])
    layout = dispatch_layout(topk_idx, 6, 3)
    assert layout.tokens_per_rank.tolist() == [1, 1, 2]
    assert layout.tokens_per_expert.tolist() == [2, 0, 0, 1, 1, 1]
    assert layout.is_token_in_rank.tolist() == [
        [True, False, True],
        [False, True, True],
        [False, False, False],
    ]
    with pytest.raises(fanfold.ArgumentError, match=r"topk_idx\[0, 2\] is 5"):
        dispatch_layout(topk_idx, 4, 2)


def test_dispatch_layout_is_where_the_indices_are() -> None:
    topk_idx = torch.empty((5, 2), dtype=torch.int64, device="meta")
    layout = dispatch_layout(topk_idx, 6, 3)
    found = (layout.tokens_per_rank, layout.tokens_per_expert, layout.is_token_in_rank)
    assert [tuple(each.shape) for each in found] == [(3,), (6,), (5, 3)]
    assert {each.device.type for each in found} == {"meta"}
