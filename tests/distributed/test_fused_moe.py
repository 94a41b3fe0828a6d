"""FusedMoE on the CPU against its reference: results, statistics, equal bits."""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

import fanfold
from fanfold.formats import dequantize, quantize
from fanfold.fused_moe import ExpertWeights, dequantize_weights, difference
from fanfold.fused_moe.experts import run_expert
from fanfold.group import Group
from fanfold.launch import RankPool
from fanfold.thread_ranks import ThreadRanks
from tests.distributed.fused_layers import (
    FusedShape,
    FusedTokens,
    expected,
    results,
    split,
    tokens_of,
    weights_of,
)
from tests.process_defaults import ProcessDefaults, UnderDefaults

SHAPE = FusedShape()
# Where no rounding falls the other way, results are those of the reference, bit for bit. The
# FP64 sums differ by 1e-16, so among some thousand values none does.
CLOSE = 1e-8


def counts_of(call: FusedTokens, num_experts: int) -> torch.Tensor:
    """Slots of each expert."""
    valid = call.topk_idx[call.topk_idx >= 0]
    return torch.bincount(valid, minlength=num_experts).int()


def assert_right(
    shape: FusedShape,
    calls: list[FusedTokens],
    weights: ExpertWeights,
    found: list[tuple[torch.Tensor, torch.Tensor]],
    **options: Any,
) -> None:
    """Each rank's result is the reference's, and the statistics are exact."""
    for call, (y, _) in zip(calls, found, strict=True):
        assert (y.dtype, y.shape) == (torch.bfloat16, call.x.shape)
        assert bool(y.isfinite().all())
        assert difference(y, expected(shape, call, weights, **options)) < CLOSE
    every = sum(counts_of(call, shape.num_experts) for call in calls)
    assert torch.equal(torch.cat([counts for _, counts in found]), every)


@pytest.mark.parametrize("seed", range(12))
def test_random_geometries(seed: int) -> None:
    draw = random.Random(seed)
    ranks = draw.choice([1, 2, 3, 4])
    shape = FusedShape(
        num_experts=ranks * draw.randint(1, 5),
        top_k=draw.choice([1, 2, 6, 8, 32]),
        hidden=128 * draw.randint(1, 4),
        intermediate=128 * draw.randint(1, 4),
        max_tokens=draw.randint(1, 20),
        activation_clamp=draw.choice([None, 0.25, 1.0]),
    )
    weights = weights_of(shape, seed)
    counts = [draw.choice([0, 1, shape.max_tokens]) for _ in range(ranks)]
    masked = draw.choice([0.0, 0.3, 1.0])
    calls = [tokens_of(shape, n, seed + rank, masked=masked) for rank, n in enumerate(counts)]
    found = ThreadRanks(ranks).run(results, shape, calls, weights)
    assert_right(shape, calls, weights, found)


def test_one_expert_takes_all() -> None:
    calls = [tokens_of(SHAPE, n, n, masked=0.0, skewed=True) for n in (24, 0, 7, 1)]
    weights = weights_of(SHAPE)
    found = ThreadRanks(4).run(results, SHAPE, calls, weights)
    assert_right(SHAPE, calls, weights, found)
    assert found[3][1].tolist() == [0, SHAPE.top_k * 32]


def test_more_rows_than_are_computed_at_a_time() -> None:
    shape = FusedShape(num_experts=2, top_k=8, hidden=128, max_tokens=150)
    call, weights = tokens_of(shape, 150, 1, masked=0.0, skewed=True), weights_of(shape)
    assert_right(shape, [call], weights, ThreadRanks(1).run(results, shape, [call], weights))


def test_without_quantisation_the_difference_is_that_of_e4m3() -> None:
    shape = FusedShape(hidden=384, intermediate=256)
    call, weights = tokens_of(shape, 24, 3), weights_of(shape)
    ((y, _),) = ThreadRanks(1).run(results, shape, [call], weights)
    l1 = dequantize_weights(weights.l1, weights.l1_scales).double()
    l2 = dequantize_weights(weights.l2, weights.l2_scales).double()
    total = torch.zeros(y.shape, dtype=torch.float64)
    for token, slot in (call.topk_idx >= 0).nonzero().tolist():
        expert = call.topk_idx[token, slot]
        gate, up = (l1[expert] @ call.x[token].double()).chunk(2)
        total[token] += call.topk_weights[token, slot] * (
            l2[expert] @ (torch.nn.functional.silu(gate) * up)
        )
    assert 1e-4 < difference(y, total) < 2e-3


def test_clamp_changes_gate_above_and_up_on_both_sides() -> None:
    shape = FusedShape(num_experts=1, top_k=1, hidden=128, max_tokens=1, activation_clamp=2.0)
    signs = torch.ones((1, 256, 128))
    x = torch.ones((1, 128), dtype=torch.bfloat16)
    one, zero = torch.ones((1, 1)), torch.zeros((1, 1), dtype=torch.int64)
    down = torch.eye(128).expand(1, 128, 128)
    silu = lambda v: v / (1 + torch.exp(torch.tensor(-v)).item())  # noqa: E731
    for gate, up, wanted in (
        (3.0, 5.0, silu(2.0) * 2),
        (3.0, -5.0, silu(2.0) * -2),
        (-3.0, 1.0, silu(-3.0)),  # the gate has no lower bound
        (1.0, -1.5, silu(1.0) * -1.5),
    ):
        signs[0, :128], signs[0, 128:] = gate / 128, up / 128
        with shape.open() as moe:
            y = moe.forward(x, zero, one, ExpertWeights.quantize(signs, down))
        assert y.float().numpy() == pytest.approx(wanted, rel=0.005)


def test_a_call_may_have_a_clamp_of_its_own() -> None:
    call, weights = tokens_of(SHAPE, 7, 2), weights_of(SHAPE)
    shared = weights_of(dataclasses.replace(SHAPE, num_experts=1), 9)
    given = (call.x, call.topk_idx, call.topk_weights, weights)
    with dataclasses.replace(SHAPE, activation_clamp=0.5).open() as moe:
        for asked, clamp in ((None, 0.5), (0.25, 0.25), (math.inf, None), (2, 2.0), (None, 0.5)):
            y = moe.forward(*given, shared_expert=shared, activation_clamp=asked)
            shape = dataclasses.replace(SHAPE, activation_clamp=clamp)
            assert torch.equal(y, expected(shape, call, weights, shared_expert=shared)), asked


def _own_clamp(
    group: Group, calls: list[FusedTokens], weights: ExpertWeights, clamps: list[float]
) -> torch.Tensor:
    call = calls[group.rank]
    given = (call.x, call.topk_idx, call.topk_weights, weights.shard(group.rank, group.size))
    with dataclasses.replace(SHAPE, activation_clamp=0.5).open(group) as moe:
        return moe.forward(*given, activation_clamp=clamps[group.rank])


def test_a_call_s_clamp_is_of_a_rank_s_experts() -> None:
    """Whoever has sent the tokens."""
    calls, weights, clamps = split(tokens_of(SHAPE, 16, 2), (9, 7)), weights_of(SHAPE), [0.25, 2.0]
    for call in calls:  # every second token to the experts of each rank
        local = SHAPE.num_experts // 2
        call.topk_idx.copy_(call.topk_idx.clamp(min=0) % local)
        call.topk_idx[::2] += local
    found = ThreadRanks(2).run(_own_clamp, calls, weights, clamps)
    for call, y in zip(calls, found, strict=True):
        low, high = (
            expected(dataclasses.replace(SHAPE, activation_clamp=clamp), call, weights)
            for clamp in clamps
        )
        assert torch.equal(y[1::2], low[1::2])
        assert torch.equal(y[::2], high[::2])
        assert not torch.equal(low, high)


def test_an_expert_named_twice_counts_twice() -> None:
    shape = dataclasses.replace(SHAPE, top_k=2)
    call, weights = tokens_of(shape, 5, 1), weights_of(shape)
    twice = dataclasses.replace(call, topk_idx=torch.full((5, 2), 4))
    ((y, counts),) = ThreadRanks(1).run(results, shape, [twice], weights)
    assert_right(shape, [twice], weights, [(y, counts)])
    assert counts[4] == 10


def test_fp8_tokens_are_the_same_as_their_bfloat16() -> None:
    call, weights = tokens_of(SHAPE, 9, 2), weights_of(SHAPE)
    values, scales = quantize(call.x)
    with SHAPE.open() as moe:
        rest = (call.topk_idx, call.topk_weights, weights)
        plain = moe.forward(call.x, *rest)
        assert torch.equal(moe.forward((values, scales), *rest), plain)
        # Scales may have any strides, as DeepGEMM's, whose columns are contiguous.
        assert torch.equal(moe.forward((values, scales.T.contiguous().T), *rest), plain)
    assert difference(dequantize(values, scales), call.x) < 1e-3


@pytest.mark.parametrize("spread", [20, 40])
def test_extreme_scales(spread: int) -> None:
    shape = FusedShape(hidden=384, intermediate=256)
    call, weights = tokens_of(shape, 24, 5), weights_of(shape, 5, spread)
    found = ThreadRanks(2).run(results, shape, split(call, (11, 13)), weights)
    assert_right(shape, split(call, (11, 13)), weights, found)
    assert max(float(y.float().abs().max()) for y, _ in found) > 2.0**spread


def test_weights_whose_results_are_small_keep_the_smallest_scale() -> None:
    call, weights = tokens_of(SHAPE, 6, 6, masked=0.0), weights_of(SHAPE)
    weights.l1_scales.mul_(1e-7)
    ((y, _),) = ThreadRanks(1).run(results, SHAPE, [call], weights)
    # Activations are about 1e-14, and 448e6 times that rounds to 0.
    assert torch.equal(y, torch.zeros_like(y))
    assert torch.equal(expected(SHAPE, call, weights), y)


@pytest.mark.parametrize("intermediate", [128, 384])
def test_shared_expert(intermediate: int) -> None:
    calls = [tokens_of(SHAPE, n, n, masked=0.5) for n in (24, 3)]
    shared = weights_of(dataclasses.replace(SHAPE, num_experts=1, intermediate=intermediate), 9)
    weights = weights_of(SHAPE)
    found = ThreadRanks(2).run(_with_shared, SHAPE, calls, weights, shared)
    assert_right(SHAPE, calls, weights, found, shared_expert=shared)


def _with_shared(
    group: Group,
    shape: FusedShape,
    calls: list[FusedTokens],
    weights: ExpertWeights,
    shared: ExpertWeights,
) -> tuple[torch.Tensor, torch.Tensor]:
    return results(group, shape, calls, weights, shared_expert=shared)


def test_the_shared_expert_is_added_before_the_rounding() -> None:
    shape = FusedShape(num_experts=1, top_k=1, hidden=128, max_tokens=1)
    call, weights = tokens_of(shape, 1, 4, masked=0.0), weights_of(shape)
    shared = weights_of(shape, 8)
    with shape.open() as moe:
        rest = (call.x, call.topk_idx, call.topk_weights, weights)
        y = moe.forward(*rest, shared_expert=shared)
    tokens, ones = quantize(call.x), torch.ones(1)
    slot = run_expert(tokens, call.topk_weights[:, 0], weights, 0, None)
    total = slot.float() + run_expert(tokens, ones, shared, 0, None).float()
    assert torch.equal(y, total.bfloat16())


def _repeated(group: Group, calls: list[FusedTokens], weights: ExpertWeights) -> bool:
    """Whether calls of different sizes, in turns, give the same bits and add their statistics."""
    with SHAPE.open(group) as moe:
        mine = weights.shard(moe.rank, moe.ranks)
        call = calls[moe.rank]
        few = call.part(slice(0, moe.rank))
        totals = torch.full((moe.experts_per_rank,), 5, dtype=torch.int32)
        runs = []
        for tokens in (call, few, call, few, call, few):
            rest = (tokens.topk_idx, tokens.topk_weights, mine)
            runs.append(moe.forward(tokens.x, *rest, statistics=totals))
        inputs = call.x.clone()
        into = moe.forward(inputs, call.topk_idx, call.topk_weights, mine, out=inputs)
        again = [torch.equal(run, runs[place % 2]) for place, run in enumerate(runs)]
        first = moe.rank * moe.experts_per_rank
        every = 5 + 3 * sum(
            counts_of(c, 8) + counts_of(c.part(slice(0, rank)), 8) for rank, c in enumerate(calls)
        )
        exact = torch.equal(totals, every[first : first + moe.experts_per_rank].int())
        return all(again) and exact and into is inputs and torch.equal(into, runs[0])


def test_repeated_calls() -> None:
    calls = [tokens_of(SHAPE, n, n) for n in (24, 10)]
    assert ThreadRanks(2).run(_repeated, calls, weights_of(SHAPE)) == [True, True]


def test_equal_bits_on_any_number_of_ranks() -> None:
    shape = FusedShape(hidden=384, intermediate=256, max_tokens=48, activation_clamp=1.5)
    call, weights = tokens_of(shape, 48, 11), weights_of(shape, 11, spread=3)
    ((alone, _),) = ThreadRanks(1).run(results, shape, [call], weights)
    for counts in ((48, 0), (17, 31), (1, 30, 5, 12), (12, 12, 12, 12)):
        calls = split(call, counts)
        found = ThreadRanks(len(counts)).run(results, shape, calls, weights)
        assert torch.equal(torch.cat([y for y, _ in found]), alone)
    backwards = dataclasses.replace(
        call, **{name: getattr(call, name).flip(0) for name in ("x", "topk_idx", "topk_weights")}
    )
    ((y, _),) = ThreadRanks(1).run(results, shape, [backwards], weights)
    assert torch.equal(y.flip(0), alone)  # no bit depends on the other rows of an expert


def test_slots_are_summed_in_order() -> None:
    shape = FusedShape(num_experts=1, top_k=3, hidden=128, max_tokens=8)
    call, weights = tokens_of(shape, 8, 2, masked=0.0), weights_of(shape)
    large = 2.0**30  # beside which FP32 loses the result of a weight of 1
    with shape.open() as moe:

        def weighted(*slots: float) -> torch.Tensor:
            given = torch.tensor(slots).expand(8, 3).contiguous()
            return moe.forward(call.x, call.topk_idx, given, weights)

        alone = weighted(0.0, 0.0, 1.0)
        assert bool(alone.any(1).all())
        assert torch.equal(weighted(large, -large, 1.0), alone)
        assert not weighted(1.0, large, -large).any()
        assert not weighted(large, 1.0, -large).any()


def test_sums_of_a_block_are_exact() -> None:
    shape = FusedShape(num_experts=1, top_k=1, hidden=128, max_tokens=1)
    values, l1 = torch.zeros((1, 128)), torch.zeros((1, 256, 128))
    # The largest products and the smallest one: 448 * 448 + 2**-18 - 448 * 448. FP32 loses it.
    values[0, :3] = torch.tensor([448, 2.0**-9, 448])
    l1[0, :, :3] = torch.tensor([448, 2.0**-9, -448])
    fp8 = torch.float8_e4m3fn
    scales = torch.full((1, 2, 1), 2.0**18)
    weights = ExpertWeights(l1.to(fp8), scales, torch.eye(128).to(fp8)[None], torch.ones((1, 1, 1)))
    with shape.open() as moe:
        tokens = (values.to(fp8), torch.ones((1, 1)))
        y = moe.forward(tokens, torch.zeros((1, 1), dtype=torch.int64), torch.ones((1, 1)), weights)
    assert y.float().numpy() == pytest.approx(0.731, rel=0.005)  # silu(1) * 1


def test_ranks_that_are_processes(process_pools: Callable[[int], RankPool]) -> None:
    call, weights = tokens_of(SHAPE, 20, 7), weights_of(SHAPE)
    ((alone, _),) = ThreadRanks(1).run(results, SHAPE, [call], weights)
    calls = split(call, (13, 7))
    found = process_pools(2).run(results, SHAPE, calls, weights)
    assert torch.equal(torch.cat([y for y, _ in found]), alone)
    assert_right(SHAPE, calls, weights, found)


def test_defaults_of_the_process_change_nothing(process_pools: Callable[[int], RankPool]) -> None:
    calls, weights = split(tokens_of(SHAPE, 20, 7), (13, 7)), weights_of(SHAPE)
    shared = weights_of(dataclasses.replace(SHAPE, num_experts=1), 9)
    rest = (SHAPE, calls, weights, shared)
    plain = process_pools(2).run(_with_shared, *rest)
    defaults = ProcessDefaults(torch.bfloat16, "meta")
    for ours, theirs in zip(
        UnderDefaults(process_pools(2), defaults).run(_with_shared, *rest), plain, strict=True
    ):
        assert torch.equal(ours[0], theirs[0])
        assert torch.equal(ours[1], theirs[1])


def test_helpers_and_reference_under_other_defaults() -> None:
    call = tokens_of(SHAPE, 4, 3)
    gate_up, down = torch.randn((8, 256, 256)), torch.randn((8, 256, 128))
    plain = ExpertWeights.quantize(gate_up, down)
    wanted = expected(SHAPE, call, plain)
    with ProcessDefaults(torch.bfloat16, "meta").set():
        weights = ExpertWeights.quantize(gate_up, down)
        found = expected(SHAPE, call, weights)
    assert torch.equal(weights.l1_scales, plain.l1_scales)
    assert torch.equal(found, wanted)


def test_no_gradients_are_recorded() -> None:
    call, weights = tokens_of(SHAPE, 4, 3), weights_of(SHAPE)
    shared = weights_of(dataclasses.replace(SHAPE, num_experts=1))
    values, scales = quantize(call.x)
    weight = call.topk_weights.requires_grad_()
    with SHAPE.open() as moe:
        x = (values, scales.requires_grad_())
        y = moe.forward(x, call.topk_idx, weight, weights, shared_expert=shared)
    assert not y.requires_grad


def test_weights_without_an_expert_are_not_read() -> None:
    call, weights = tokens_of(SHAPE, 6, 8, masked=0.5), weights_of(SHAPE)
    spoilt = call.topk_weights.masked_fill(call.topk_idx < 0, float("nan"))
    with SHAPE.open() as moe:
        plain = moe.forward(call.x, call.topk_idx, call.topk_weights, weights)
        assert torch.equal(moe.forward(call.x, call.topk_idx, spoilt, weights), plain)


def test_public_names() -> None:
    assert "FusedMoE" in dir(fanfold)
    assert fanfold.FusedMoE is fanfold.fused_moe.FusedMoE
    with SHAPE.open() as moe:
        sizes = (moe.rank, moe.ranks, moe.num_experts, moe.experts_per_rank, moe.top_k)
        assert sizes == (0, 1, 8, 8, 3)
        assert (moe.hidden, moe.intermediate, moe.max_tokens) == (256, 128, 24)
        assert (moe.backend, moe.device) == ("host", torch.device("cpu"))
        assert repr(moe) == (
            "FusedMoE(rank=0, ranks=1, num_experts=8, top_k=3, hidden=256, intermediate=128, "
            "max_tokens=24, backend='host')"
        )
    assert repr(moe).endswith(", closed)")


def _prepared(group: Group) -> None:
    with SHAPE.open(group) as moe:
        moe.prepare_shared_expert(256)
        with pytest.raises(
            fanfold.ArgumentError, match="intermediate is 100, but must be from 128"
        ):
            moe.prepare_shared_expert(100)
        with pytest.raises(fanfold.ArgumentError, match="must be the same on all ranks"):
            moe.prepare_shared_expert(128 * (1 + moe.rank))
        with pytest.raises(fanfold.FanfoldError, match="intermediate is 100, but must be from 128"):
            moe.prepare_shared_expert((100, 128)[moe.rank])  # ends it on the other rank, too
        moe.prepare_shared_expert(128)


def test_a_shared_expert_can_be_prepared() -> None:
    ThreadRanks(2).run(_prepared)
