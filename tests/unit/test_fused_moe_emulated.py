"""The kernel of FusedMoE, run on the CPU on several ranks, against its exact reference: routing,
copies, schedule, stages, counters, sums and reports without a GPU. What only hardware shows is for
``tests/gpu``.
"""

from __future__ import annotations

import dataclasses
import math
import random
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from fanfold.errors import ArgumentError, PeerRefused, PeerTimeout, UsageError
from fanfold.fused_moe import ExpertWeights, FusedMoeTuning, difference, reference
from fanfold.fused_moe.cuda import CudaLayer
from fanfold.fused_moe.tuning import FORMS
from tests.distributed.fused_layers import (
    FusedShape,
    FusedTokens,
    expected,
    split,
    tokens_of,
    weights_of,
)
from tests.emulation.fused_moe import Received, Settings, World, emulated
from tests.emulation.world import Builder

# Activations that round the other way; the emulated products and divisions are exact.
CLOSE = 5e-5
SHAPE = FusedShape(num_experts=6, top_k=3, hidden=256, intermediate=128, max_tokens=100)
# Two blocks of columns in the first GEMM; five in the second, of which the last is half outside.
WIDE = FusedShape(4, 2, hidden=1152, intermediate=256, max_tokens=40, activation_clamp=0.5)
IN_PLACE = dataclasses.replace(SHAPE, fast_accumulation=True)
BAD = 1
"""The rank that errs or never calls."""

pytestmark = pytest.mark.timeout(200)


@pytest.fixture
def gpu(builder: Builder) -> Iterator[Settings]:
    with emulated(builder) as settings:
        yield settings


def check(world: World, calls: list[FusedTokens], found: list[Received]) -> None:
    """Each rank's result is the reference's, and the statistics are exact."""
    for rank, (call, received) in enumerate(zip(calls, found, strict=True)):
        wanted = expected(world.shape, call, world.weights)
        assert difference(received.y, wanted) < CLOSE, rank
    chosen = torch.cat([call.topk_idx.flatten() for call in calls])
    counts = torch.bincount(chosen[chosen >= 0], minlength=world.shape.num_experts)
    assert torch.equal(torch.cat([received.statistics for received in found]), counts.int() + 5)


def calls_of(
    shape: FusedShape, counts: list[int], seed: int, masked: float = 0.2, skewed: bool = False
) -> list[FusedTokens]:
    """Tokens of each rank."""
    return [
        tokens_of(shape, n, 1000 * seed + rank, masked=masked, skewed=skewed)
        for rank, n in enumerate(counts)
    ]


# ---- results ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ranks", "form", "shape"),
    [
        (1, "rows", SHAPE),
        (1, "swap_ab", SHAPE),
        (2, "swap_ab", WIDE),
        (3, "rows", IN_PLACE),
        (4, "swap_ab", dataclasses.replace(SHAPE, num_experts=8, top_k=5)),
    ],
    ids=lambda value: f"{value}" if not isinstance(value, FusedShape) else "",
)
def test_calls_follow_each_other(gpu: Settings, ranks: int, form: str, shape: FusedShape) -> None:
    world = World(ranks, shape, gpu, clusters=1 + ranks % 2, tuning=FORMS[form])
    for number in range(3):  # counters of both parities, and of the first again
        counts = [0 if rank == number else 3 + 9 * rank for rank in range(ranks)]
        calls = calls_of(shape, counts, number + 1, masked=(0.2, 0.0, 0.9)[number])
        check(world, calls, world.call_all(calls, seed=number + 1))
    world.close()


def random_tuning(draw: random.Random, rows: int) -> FusedMoeTuning:
    """``rows``: that all ranks may send to one. Often some ranks have groups and some have none."""
    return FusedMoeTuning(
        swap_ab_rows=draw.choice([0, 0, 5, FORMS["swap_ab"].swap_ab_rows]),
        group_rows=draw.choice([1, rows // 8 + 1, rows // 4 + 1, FORMS["rows"].group_rows]),
    )


def check_random_layer(gpu: Settings, seed: int) -> None:
    draw = random.Random(seed)
    ranks = draw.choice([1, 2, 2, 3, 4])
    shape = FusedShape(
        num_experts=ranks * draw.choice([1, 2, 3, 5]),
        top_k=draw.choice([1, 2, 3, 6, 9]),
        hidden=128 * draw.choice([1, 2, 3, 5, 9, 12]),
        intermediate=128 * draw.choice([1, 2, 3]),
        max_tokens=draw.choice([1, 20, 60, 140]),
        activation_clamp=draw.choice([None, 0.5]),
        fast_accumulation=draw.random() < 0.3,
    )
    tuning = random_tuning(draw, shape.max_tokens * shape.top_k * ranks)
    world = World(ranks, shape, gpu, clusters=draw.choice([1, 2, 3]), tuning=tuning)
    for number in range(3):
        counts = [draw.randint(0, shape.max_tokens) for _ in range(ranks)]
        masked, skewed = draw.choice([0.0, 0.3, 1.0]), draw.random() < 0.3
        calls = calls_of(shape, counts, 10 * seed + number, masked, skewed)
        check(world, calls, world.call_all(calls, seed=number + 1))
    world.close()


@pytest.mark.parametrize("seed", range(8))
def test_random_layers(gpu: Settings, seed: int) -> None:
    check_random_layer(gpu, seed)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(8, 150))
def test_more_random_layers(gpu: Settings, seed: int) -> None:
    check_random_layer(gpu, seed)


def test_a_rank_begins_a_call_before_all_have_begun_the_last(gpu: Settings) -> None:
    world = World(2, SHAPE, gpu, clusters=2)
    gpu.late_us = {1: 400_000}
    # No rank needs CTAs without tokens to end its call.
    calls = [calls_of(SHAPE, [9 - number, 0], number) for number in range(3)]
    found = world.run(lambda rank, _: [world.call(rank, each[rank]) for each in calls])
    for number, call in enumerate(calls):
        check(world, call, [received[number] for received in found])
    world.close()


def test_counters_stay_until_all_ranks_have_ended_the_call(gpu: Settings) -> None:
    """A peer may still wait for results of the last call, which it has not ended before it begins
    this one."""
    world = World(2, SHAPE, gpu)
    calls = calls_of(SHAPE, [9, 8], 4)
    check(world, calls, world.call_all(calls))
    last = world.counters(0, 1).clone()
    assert int(last.count_nonzero()) > 2
    with ThreadPoolExecutor(1) as pool:
        early = pool.submit(world.call, 0, calls[0])
        world.await_counts(1, 2)
        time.sleep(0.3)  # in which the kernel does all that it can without the other rank
        assert torch.equal(world.counters(0, 1), last)
        found = [world.call(1, calls[1])]
        check(world, calls, [early.result(), *found])
    assert int(world.counters(0, 1).count_nonzero()) == 0
    world.close()


def whole_numbers(shape: FusedShape) -> ExpertWeights:
    """Weights with which all sums are exact, and the gate's sigmoid is 0 or 1."""
    weights = weights_of(shape)
    generator = torch.Generator("cpu").manual_seed(3)
    for values in (weights.l1, weights.l2):
        few = torch.randint(-2, 3, values.shape, generator=generator)
        values.copy_(few.to(torch.float8_e4m3fn))
    gates = shape.intermediate // 128
    weights.l1_scales[:, :gates], weights.l1_scales[:, gates:] = 256.0, 0.25
    weights.l2_scales.fill_(0.125)
    return weights


@pytest.mark.parametrize("form", ["rows", "swap_ab"])
def test_whole_numbers_have_all_bits_of_the_reference(gpu: Settings, form: str) -> None:
    weights = whole_numbers(SHAPE)
    world = World(2, SHAPE, gpu, clusters=2, weights=weights, tuning=FORMS[form])
    calls, generator = [], torch.Generator("cpu").manual_seed(4)
    for call in calls_of(SHAPE, [40, 23], 7):
        x = call.x.mul(2).round().clamp(-4, 4)
        exponents = torch.randint(-2, 2, call.topk_weights.shape, generator=generator)
        calls.append(FusedTokens(x, call.topk_idx, exponents.float().exp2()))
    values = [(call.x.to(torch.float8_e4m3fn), torch.ones(len(call.x), 2)) for call in calls]
    found = world.run(lambda rank, _: world.call(rank, calls[rank], x=values[rank]))
    for call, pair, received in zip(calls, values, found, strict=True):
        wanted = reference(pair, call.topk_idx, call.topk_weights, world.weights)
        assert float(wanted.abs().max()) > 1000
        assert torch.equal(received.y, wanted)
    world.close()


def test_the_same_bits_from_any_ranks_clusters_and_orders(gpu: Settings) -> None:
    whole = tokens_of(SHAPE, 60, 5)
    first: torch.Tensor | None = None
    for ranks, clusters, form in ((1, 1, "rows"), (1, 3, "swap_ab"), (2, 2, "swap_ab")):
        world = World(ranks, SHAPE, gpu, clusters=clusters, tuning=FORMS[form])
        calls = split(whole, [60] if ranks == 1 else [13, 47])
        for seed in (1, 77):
            y = torch.cat([received.y for received in world.call_all(calls, seed)])
            first = y if first is None else first
            assert torch.equal(y, first), (ranks, clusters, seed)
        world.close()


@pytest.mark.parametrize(
    ("rows", "swapped"), [(0, [0, 0, 0]), (10, [1, 1, 0]), (50, [1, 1, 1])], ids=str
)
def test_each_call_chooses_by_its_tokens(gpu: Settings, rows: int, swapped: list[int]) -> None:
    """With top-3 of 6 experts an expert gets a row for every second token."""
    world = World(1, SHAPE, gpu, tuning=FusedMoeTuning(swap_ab_rows=rows))
    for tokens in (0, 20, 22):
        calls = calls_of(SHAPE, [tokens], tokens)
        check(world, calls, world.call_all(calls))
    world.close()
    assert [dict(source.pairs)["kSwapsAb"] for source in gpu.launched] == swapped


@pytest.mark.parametrize("tokens", [1, 32, 33, 70, 97, 128, 150])
def test_the_same_bits_with_a_and_b_swapped(gpu: Settings, tokens: int) -> None:
    """In every loop of its own, which wraps around the stages, and in two blocks of rows."""
    shape = FusedShape(2, 1, hidden=1152, intermediate=256, max_tokens=150, activation_clamp=0.5)
    calls = [tokens_of(shape, tokens, 7, masked=0.0)]
    calls[0].topk_idx.fill_(1)
    calls[0].topk_idx[: tokens // 9] = 0
    found = []
    for form in ("rows", "swap_ab"):
        world = World(1, shape, gpu, clusters=2, tuning=FORMS[form])
        found.append(world.call_all(calls))
        check(world, calls, found[-1])
        world.close()
    assert torch.equal(found[0][0].y, found[1][0].y)


@pytest.mark.parametrize("form", ["rows", "swap_ab"])
def test_few_rows_are_stored_by_small_boxes(gpu: Settings, form: str) -> None:
    """Boxes of 64 rows cost a call with few tokens 2 to 3% of its time."""
    shape = FusedShape(1, 1, hidden=384, intermediate=128, max_tokens=128)
    world = World(1, shape, gpu, tuning=FORMS[form])
    memory = [world.stored_rows(0, gemm) for gemm in range(2)]
    for tokens, stored in ((1, 8), (8, 8), (9, 16), (31, 32), (33, 64), (66, 72), (90, 96)):
        for rows in memory:
            rows.fill_(0xFF)  # NaN in both types
        calls = calls_of(shape, [tokens], tokens, masked=0.0)
        check(world, calls, world.call_all(calls))
        assert [int((rows != 0xFF).any(1).sum()) for rows in memory] == [stored] * 2, tokens
    world.close()


# ---- routing ------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["rows", "swap_ab"])
@pytest.mark.parametrize("clusters", [1, 2])
def test_one_expert_takes_all(gpu: Settings, clusters: int, form: str) -> None:
    world = World(2, SHAPE, gpu, clusters=clusters, tuning=FORMS[form])
    # Five blocks of rows: two pairs that share weights, and one of which a half is padding.
    calls = calls_of(SHAPE, [100, 80], 2, masked=0.0, skewed=True)
    found = world.call_all(calls)
    check(world, calls, found)
    assert found[1].statistics.tolist() == [5, 5, 5 + 540]
    world.close()


def test_no_rank_has_tokens(gpu: Settings) -> None:
    world = World(2, SHAPE, gpu)
    for counts, masked in (([0, 0], 0.0), ([9, 4], 1.0), ([9, 4], 0.2)):
        calls = calls_of(SHAPE, counts, 3, masked=masked)
        found = world.call_all(calls)
        check(world, calls, found)
    world.close()


def test_columns_in_one_group_and_in_two(gpu: Settings) -> None:
    calls = calls_of(WIDE, [20, 7], 4)
    found = []
    for rows in (1000, 1):  # from which on there are two groups
        world = World(2, WIDE, gpu, clusters=2, tuning=FusedMoeTuning(group_rows=rows))
        for seed in (1, 2) if rows == 1 else (1,):
            found.append(world.call_all(calls, seed))
            check(world, calls, found[-1])
        world.close()
    for again in found[1:]:
        assert all(torch.equal(a.y, b.y) for a, b in zip(again, found[0], strict=True))


@pytest.mark.parametrize("swapped", [0, 1000], ids=["rows", "swapped"])
def test_a_rank_in_two_groups_and_one_in_one(gpu: Settings, swapped: int) -> None:
    """Each rank reads results where the expert's rank has put them."""
    calls = calls_of(WIDE, [40, 35], 6, masked=0.0)
    for call in calls:
        call.topk_idx.copy_(torch.tensor([0, 2], device="cpu"))  # 75 rows for each rank
        call.topk_idx[:30, 0] = 3  # 60 of rank 0 are for rank 1
    world = World(2, WIDE, gpu, clusters=2, tuning=FusedMoeTuning(swapped, group_rows=135))
    for rank in range(2):
        world.set_timeout(rank, 10.0)
    check(world, calls, world.call_all(calls))
    world.close()


def test_ctas_share_the_count_of_many_entries(gpu: Settings) -> None:
    shape = FusedShape(num_experts=3, top_k=32, hidden=128, intermediate=128, max_tokens=1024)
    world = World(1, shape, gpu, clusters=2)
    for number in range(2):
        calls = calls_of(shape, [1024], number + 1, masked=0.995)
        check(world, calls, world.call_all(calls))
    world.close()


def test_a_shared_expert_is_added(gpu: Settings) -> None:
    world = World(2, SHAPE, gpu)
    shared = weights_of(dataclasses.replace(SHAPE, num_experts=1, intermediate=256), 9)
    world.run(lambda _, layer: layer.prepare_shared_expert(256))
    calls = calls_of(SHAPE, [12, 5], 8)
    found = world.run(lambda rank, _: world.call(rank, calls[rank], shared_expert=shared))
    for call, received in zip(calls, found, strict=True):
        wanted = expected(SHAPE, call, world.weights, shared_expert=shared)
        assert difference(received.y, wanted) < CLOSE
    world.close()


@pytest.mark.parametrize("form", ["rows", "swap_ab"])
def test_a_call_may_have_a_clamp_of_its_own(gpu: Settings, form: str) -> None:
    world = World(2, dataclasses.replace(SHAPE, activation_clamp=0.5), gpu, tuning=FORMS[form])
    shared = weights_of(dataclasses.replace(SHAPE, num_experts=1), 9)
    world.run(lambda _, layer: layer.prepare_shared_expert(SHAPE.intermediate))
    calls = calls_of(SHAPE, [12, 5], 8)
    for clamp in (0.25, math.inf, 0.5):
        found = world.run(
            lambda rank, _, c=clamp: world.call(rank, calls[rank], shared_expert=shared, clamp=c)
        )
        shape = dataclasses.replace(SHAPE, activation_clamp=clamp)
        for call, received in zip(calls, found, strict=True):
            wanted = expected(shape, call, world.weights, shared_expert=shared)
            assert difference(received.y, wanted) < CLOSE, clamp
    world.close()


def test_spans_are_in_order(gpu: Settings) -> None:
    world = World(2, SHAPE, gpu, clusters=2)
    spans = [layer.spans() for layer in world.layers]
    before = time.monotonic_ns()
    world.call_all(calls_of(SHAPE, [70, 20], 2))
    assert [each.shape for each in spans] == [(4, 6), (4, 6)]
    for each in spans:
        for begin, routed, first_end, second_end, end, cycles in each.tolist():
            assert 0 < begin < routed < second_end < end
            assert first_end == 0 or routed < first_end <= second_end  # 0: it had no such tile
            # Emulated SMs have 2 GHz.
            assert 2 * (end - routed) <= cycles <= 2 * (time.monotonic_ns() - before)
        assert int(each[:, 2].max()) > 0
    world.close()


# ---- what goes wrong ----------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [0, 12], ids=["rows", "swapped up to 8 tokens"])
def test_a_refusal_aborts_the_call_on_all_ranks(gpu: Settings, rows: int) -> None:
    """Ranks of one call may take different forms."""
    shape = dataclasses.replace(IN_PLACE, max_tokens=10)
    world = World(3, shape, gpu, tuning=FusedMoeTuning(swap_ab_rows=rows))
    calls = calls_of(shape, [10, 8, 6], 5)

    def refused(rank: int, layer: CudaLayer) -> str:
        if rank == BAD:
            layer.refuse(ValueError("x"))
            return ""
        out = torch.full(calls[rank].x.shape, float("nan"), dtype=torch.bfloat16)
        statistics = torch.zeros(2, dtype=torch.int32)
        with pytest.raises(PeerRefused) as raised:
            world.call(rank, calls[rank], out=out, statistics=statistics)
        assert bool(out.isnan().all())
        assert statistics.tolist() == [0, 0]
        return str(raised.value)

    check(world, calls, world.call_all(calls))
    for number in range(2):
        said = world.run(refused)
        for rank in (0, 2):
            assert said[rank].startswith(f"rank {BAD} refused its input to fused_moe")
            assert said[rank].endswith(f"call {2 + 2 * number}; its own exception says why")
        check(world, calls, world.call_all(calls))
    world.close()


def test_a_rank_that_does_not_come(gpu: Settings) -> None:
    world = World(3, IN_PLACE, gpu)
    calls = calls_of(IN_PLACE, [10, 8, 6], 6)
    check(world, calls, world.call_all(calls))

    def lonely(rank: int, layer: CudaLayer) -> None:
        if rank == BAD:
            return
        world.set_timeout(rank, 0.3)
        with pytest.raises(PeerTimeout, match="in fused_moe: expected 2, have 1") as raised:
            world.call(rank, calls[rank])
        assert raised.value.peer == BAD
        with pytest.raises(PeerTimeout):
            layer.check()

    world.run(lonely)


@pytest.mark.parametrize("form", ["rows", "swap_ab"])
@pytest.mark.parametrize("missing", ["rows", "results"])
def test_a_rank_that_stops_within_a_call(gpu: Settings, form: str, missing: str) -> None:
    """A rank whose waits end at once tells its counts. It sends its rows only if it finds the
    counts of the others, and in no case computes anything."""
    # So small that nothing but the rank makes others wait for seconds.
    shape = FusedShape(num_experts=3, top_k=3, hidden=128, intermediate=128, max_tokens=6)
    world = World(3, shape, gpu, tuning=FORMS[form])
    calls = calls_of(shape, [5, 1, 6], 6)
    for rank, call in enumerate(calls):
        call.topk_idx[:] = torch.arange(3, dtype=torch.int64, device="cpu")
        world.set_timeout(rank, 0.0 if rank == BAD else 3.0)
    has_ended = threading.Event()

    def given_up(rank: int, layer: CudaLayer) -> None:
        del layer
        if rank == BAD:
            if missing == "results":
                world.await_counts(rank)
            with pytest.raises((PeerTimeout, UsageError)):
                world.call(rank, calls[rank])
            has_ended.set()
            return
        if missing == "rows":
            assert has_ended.wait(100.0)
        with pytest.raises(PeerTimeout) as raised:
            world.call(rank, calls[rank])
        assert raised.value.peer == BAD
        assert world.arrived(rank, 1) == (11 if missing == "rows" else 12)

    world.run(given_up)


@pytest.mark.parametrize("ranks", [1, 2])
def test_ctas_that_do_not_share_their_counts(gpu: Settings, ranks: int) -> None:
    """With so many tokens each CTA counts its own. One that does not run is its own rank's fault,
    and that rank takes no part in the call."""
    shape = FusedShape(num_experts=32, top_k=32, hidden=128, intermediate=128, max_tokens=1024)
    world = World(ranks, shape, gpu, clusters=2)
    calls = calls_of(shape, [1024, 3][:ranks], 8)
    gpu.late_us = {0: 2_000_000}
    world.set_timeout(0, 0.2)

    def given_up(rank: int, layer: CudaLayer) -> None:
        del layer
        if rank == 0:
            with pytest.raises(UsageError, match=r"CTA \d of rank 0 has waited for another"):
                world.call(rank, calls[rank])
            return
        with pytest.raises(PeerRefused, match="rank 0 refused its input"):
            world.call(rank, calls[rank])

    world.run(given_up)


def test_a_bad_entry_is_its_own_rank_s(gpu: Settings) -> None:
    world = World(2, SHAPE, gpu)
    calls = calls_of(SHAPE, [10, 8], 7, masked=0.0)
    calls[BAD].topk_idx[3, 2] = SHAPE.num_experts
    y = torch.full(calls[BAD].x.shape, float("nan"), dtype=torch.bfloat16)

    def run(rank: int, layer: CudaLayer) -> torch.Tensor:
        del layer
        if rank != BAD:
            return world.call(rank, calls[rank]).y
        with pytest.raises(ArgumentError, match=r"topk_idx\[3, 2\] of call 1 is 6"):
            world.call(rank, calls[rank], out=y)
        return y

    found = world.run(run)
    calls[BAD].topk_idx[3, 2] = -1
    for call, got in zip(calls, found, strict=True):
        assert difference(got, expected(SHAPE, call, world.weights)) < CLOSE
    world.close()
