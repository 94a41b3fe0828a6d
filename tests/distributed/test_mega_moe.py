"""A fused MoE layer under DeepGEMM's names, on the CPU against the reference of FusedMoE."""

from __future__ import annotations

import copy
import dataclasses
import random
import re
from typing import Any

import pytest
import torch

from fanfold import deep_gemm
from fanfold.errors import ArgumentError, CopyError, FanfoldError, PeerRefused, UsageError
from fanfold.formats import quantize
from fanfold.fused_moe import ExpertWeights, difference
from fanfold.group import Group
from fanfold.thread_ranks import ThreadRanks
from tests.distributed.fused_layers import (
    FusedShape,
    FusedTokens,
    expected,
    split,
    tokens_of,
    weights_of,
)
from tests.process_defaults import ProcessDefaults

SHAPE = FusedShape()
CLOSE = 1e-8  # as in test_fused_moe.py


def open_buffer(shape: FusedShape, group: Group | None = None, **changes: Any) -> Any:
    """A buffer for layers of this shape. Collective."""
    sizes = {
        "num_experts": shape.num_experts,
        "num_max_tokens_per_rank": shape.max_tokens,
        "num_topk": shape.top_k,
        "hidden": shape.hidden,
        "intermediate_hidden": shape.intermediate,
    }
    return deep_gemm.get_symm_buffer_for_mega_moe(group, **{**sizes, **changes})


def pairs_of(weights: ExpertWeights) -> tuple[Any, Any]:
    """The weights as the functions take them."""
    l1, l2 = (weights.l1, weights.l1_scales), (weights.l2, weights.l2_scales)
    return deep_gemm.transform_weights_for_mega_moe_sm90(l1, l2)


def write(buffer: Any, call: FusedTokens) -> None:
    """Writes the tokens to the first rows of the buffer."""
    values, scales = quantize(call.x)
    tokens = slice(0, len(call.x))
    buffer.x[tokens].copy_(values)
    buffer.x_sf[tokens].copy_(scales)
    buffer.topk_idx[tokens].copy_(call.topk_idx)
    buffer.topk_weights[tokens].copy_(call.topk_weights)


def run(buffer: Any, call: FusedTokens, weights: ExpertWeights, **options: Any) -> torch.Tensor:
    """The result of one call."""
    write(buffer, call)
    y = torch.full(call.x.shape, float("nan"), dtype=torch.bfloat16, device="cpu")
    assert deep_gemm.fp8_mega_moe(y, *pairs_of(weights), buffer, **options) is None
    return y


# ---- results ------------------------------------------------------------------------------------


def _results(
    group: Group, shape: FusedShape, calls: list[FusedTokens], weights: ExpertWeights
) -> tuple[torch.Tensor, torch.Tensor]:
    buffer = open_buffer(shape, group)
    local = shape.num_experts // group.size
    counts = torch.full((local,), 5, dtype=torch.int32)
    y = run(
        buffer, calls[group.rank], weights.shard(group.rank, group.size),
        cumulative_local_expert_recv_stats=counts, activation_clamp=shape.activation_clamp,
    )  # fmt: skip
    buffer.destroy()
    return y, counts - 5


@pytest.mark.parametrize("seed", range(6))
def test_random_geometries(seed: int) -> None:
    draw = random.Random(seed)
    ranks = draw.choice([1, 2, 3, 4])
    shape = FusedShape(
        num_experts=ranks * draw.randint(1, 5),
        top_k=draw.choice([1, 2, 6, 8]),
        hidden=128 * draw.randint(1, 4),
        intermediate=128 * draw.randint(1, 4),
        max_tokens=draw.randint(1, 20),
        activation_clamp=draw.choice([None, 0.25, 10]),
    )
    weights = weights_of(shape, seed)
    counts = [draw.choice([0, 1, shape.max_tokens]) for _ in range(ranks)]
    calls = [tokens_of(shape, n, seed + rank) for rank, n in enumerate(counts)]
    found = ThreadRanks(ranks).run(_results, shape, calls, weights)
    for call, (y, _) in zip(calls, found, strict=True):
        assert bool(y.isfinite().all())
        assert difference(y, expected(shape, call, weights)) < CLOSE
    every = torch.cat([call.topk_idx[call.topk_idx >= 0] for call in calls])
    received = torch.bincount(every, minlength=shape.num_experts)
    assert torch.equal(torch.cat([counts for _, counts in found]).long(), received)


def _in_turn(group: Group, calls: list[FusedTokens], weights: ExpertWeights) -> bool:
    """Whether calls of different sizes give the right results, each from its own rows alone."""
    mine, call = weights.shard(group.rank, group.size), calls[group.rank]
    buffer = open_buffer(SHAPE, group)
    few = call.part(slice(0, group.rank))
    right = [
        torch.equal(run(buffer, tokens, mine), expected(SHAPE, tokens, weights))
        for tokens in (call, few, call)
    ]
    return all(right)


def test_calls_of_different_sizes() -> None:
    calls = split(tokens_of(SHAPE, 20, 3), (13, 7))
    assert ThreadRanks(2).run(_in_turn, calls, weights_of(SHAPE)) == [True, True]


def _clamped(
    group: Group,
    calls: list[FusedTokens],
    weights: ExpertWeights,
    clamps: list[float | None],
) -> list[bool]:
    mine, call = weights.shard(group.rank, group.size), calls[group.rank]
    buffer = open_buffer(SHAPE, group)
    right = []
    for clamp in clamps:
        shape = dataclasses.replace(SHAPE, activation_clamp=clamp)
        y = run(buffer, call, mine, activation_clamp=clamp)
        right.append(torch.equal(y, expected(shape, call, weights)))
    buffer.destroy()
    return right


def test_clamps_may_differ_between_calls() -> None:
    clamps = [0.5, 0.25, None, 0.5]
    calls = split(tokens_of(SHAPE, 20, 4), (9, 11))
    right = ThreadRanks(2).run(_clamped, calls, weights_of(SHAPE), clamps)
    assert right == [[True] * len(clamps)] * 2
    wide, narrow = (
        expected(dataclasses.replace(SHAPE, activation_clamp=c), calls[0], weights_of(SHAPE))
        for c in (0.5, 0.25)
    )
    assert not torch.equal(wide, narrow)


def test_options_that_change_nothing() -> None:
    call, weights = tokens_of(SHAPE, 6, 1), weights_of(SHAPE)
    buffer = open_buffer(SHAPE)
    plain = run(buffer, call, weights)
    for options in (
        {"fast_math": False},
        {"recipe": (128, 128, 128), "activation": "swiglu"},
        {"num_tokens_bound": 6},
        {"num_tokens_bound": 128},
        {"num_tokens_bound": 0},
    ):
        assert torch.equal(run(buffer, call, weights, **options), plain)
    for changes in (
        {"use_fp8_dispatch": True, "activation": "swiglu"},
        {"num_experts_per_wave": -1, "l2_act_sf_gran_k": 128},
        {"fast_accumulation": True},  # on the CPU
    ):
        assert torch.equal(run(open_buffer(SHAPE, **changes), call, weights), plain)


def _opened(group: Group, given: list[bool | None]) -> str:
    """The setting of a buffer's layer, or why there is none."""
    try:
        buffer = open_buffer(SHAPE, group, fast_accumulation=given[group.rank])
    except FanfoldError as error:
        return str(error)
    return str(buffer._layer.config.fast_accumulation)


@pytest.mark.parametrize("variable", ["0", "1"])
def test_sums_may_be_fast_whatever_the_setting(
    monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    monkeypatch.setenv("FANFOLD_FAST_ACCUMULATION", variable)
    of_setting = str(variable == "1")
    for given, found in ((None, of_setting), (True, "True"), (False, "False")):
        assert ThreadRanks(2).run(_opened, [given, given]) == [found] * 2


def test_ranks_agree_about_fast_sums() -> None:
    for rank, said in enumerate(ThreadRanks(2).run(_opened, [True, False])):
        own = f"{rank == 0} on rank {rank} and {rank == 1} on rank {1 - rank}"
        assert f"fast_accumulation is {own}" in said


def test_transformed_weights_are_no_copies() -> None:
    weights = weights_of(SHAPE)
    (l1, l1_scales), (l2, l2_scales) = pairs_of(weights)
    assert l1.data_ptr() == weights.l1.data_ptr()
    assert l2.data_ptr() == weights.l2.data_ptr()
    assert torch.equal(l1_scales, weights.l1_scales)
    assert torch.equal(l2_scales, weights.l2_scales)


def test_attributes() -> None:
    buffer = open_buffer(SHAPE)
    assert (buffer.num_experts, buffer.num_max_tokens_per_rank, buffer.num_topk) == (8, 24, 3)
    assert (buffer.group, buffer.hidden, buffer.intermediate_hidden) == (None, 256, 128)
    found = {name: getattr(buffer, name) for name in ("x", "x_sf", "topk_idx", "topk_weights")}
    assert {name: (tuple(t.shape), t.dtype) for name, t in found.items()} == {
        "x": ((24, 256), torch.float8_e4m3fn),
        "x_sf": ((24, 2), torch.float32),
        "topk_idx": ((24, 3), torch.int64),
        "topk_weights": ((24, 3), torch.float32),
    }
    assert all(t.is_contiguous() and not t.float().any() for t in found.values())
    assert repr(buffer) == (
        "SymmBuffer(num_experts=8, num_max_tokens_per_rank=24, num_topk=3, hidden=256, "
        "intermediate_hidden=128)"
    )
    assert deep_gemm.get_symm_buffer_for_sm90_mega_moe is deep_gemm.get_symm_buffer_for_mega_moe


def test_defaults_of_the_process_change_nothing() -> None:
    call, weights = tokens_of(SHAPE, 6, 2), weights_of(SHAPE)
    with ProcessDefaults(torch.bfloat16, "meta").set():
        buffer = open_buffer(SHAPE)
        y = run(buffer, call, weights, activation_clamp=0.5)
    shape = dataclasses.replace(SHAPE, activation_clamp=0.5)
    assert buffer.x_sf.dtype == buffer.topk_weights.dtype == torch.float32
    assert torch.equal(y, expected(shape, call, weights))


# ---- refusals -----------------------------------------------------------------------------------


def made(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    """Zeros."""
    return torch.zeros(shape, dtype=dtype, device="cpu")


BF16, FP8, FLOAT = torch.bfloat16, torch.float8_e4m3fn, torch.float32

WRONG = [
    ("y", made(4, 256, dtype=FLOAT), "y.dtype is torch.float32, but must be torch.bfloat16"),
    ("y", made(4, 128, dtype=BF16), "y.shape is (4, 128), but must be (num_tokens, 256)"),
    ("y", made(256, 4, dtype=BF16).T, "y.stride() is (1, 4), but must be contiguous"),
    ("y", made(25, 256, dtype=BF16), "y.shape[0] is 25, but must be at most num_max_tokens_per_r"),
    ("y", None, "y is None, but must be a torch.Tensor of shape (num_tokens, 256)"),
    ("l1_weights", made(8, 256, 256, dtype=FP8), "l1_weights is a Tensor, but must be a pair"),
    (
        "l1_weights",
        (made(8, 256, 256, dtype=FLOAT), made(8, 2, 2, dtype=FLOAT)),
        "l1_weights[0].dtype is torch.float32, but must be torch.float8_e4m3fn",
    ),
    (
        "l1_weights",
        (made(8, 256, 256, dtype=FP8), made(8, 2, 3, dtype=FLOAT)),
        "l1_weights[1].shape is (8, 2, 3), but must be (8, 2, 2)",
    ),
    (
        "l2_weights",
        (made(8, 256, 256, dtype=FP8), made(8, 2, 1, dtype=FLOAT)),
        "l2_weights[0].shape is (8, 256, 256), but must be (8, 256, 128)",
    ),
    (
        "l2_weights",
        (made(8, 256, 128, dtype=FP8), made(8, 2, 2, dtype=FLOAT)),
        "l2_weights[1].shape is (8, 2, 2), but must be (8, 2, 1)",
    ),
    (
        "cumulative_local_expert_recv_stats",
        made(8, dtype=torch.int64),
        "cumulative_local_expert_recv_stats.dtype is torch.int64, but must be torch.int32",
    ),
    (
        "cumulative_local_expert_recv_stats",
        made(7, dtype=torch.int32),
        "cumulative_local_expert_recv_stats.shape is (7,), but must be (8,)",
    ),
    ("sym_buffer", None, "sym_buffer is None, but must be what get_symm_buffer_for_mega_moe"),
    ("recipe", (1, 1, 32), "recipe is (1, 1, 32), but must be (128, 128, 128)"),
    ("activation", "gelu", "activation is 'gelu' (type str), but must be 'swiglu'"),
    ("activation_clamp", 0, "activation_clamp is 0, but must be a number above 0"),
    ("activation_clamp", [1], "activation_clamp is a list of 1, but must be a number"),
    ("fast_math", None, "fast_math is None, but must be a bool"),
    (
        "num_tokens_bound",
        3,
        "num_tokens_bound is 3 (type int), but must be at least the 4 tokens of y, or 0 or None",
    ),
    ("num_tokens_bound", 4.0, "num_tokens_bound is 4.0 (type float), but must be at least the 4"),
]


@pytest.mark.parametrize(("name", "value", "message"), WRONG, ids=[row[2] for row in WRONG])
def test_a_bad_argument(name: str, value: object, message: str) -> None:
    call, weights, buffer = tokens_of(SHAPE, 4, 1), weights_of(SHAPE), open_buffer(SHAPE)
    write(buffer, call)
    l1, l2 = pairs_of(weights)
    y = made(4, 256, dtype=BF16)
    good = {"y": y, "l1_weights": l1, "l2_weights": l2, "sym_buffer": buffer}
    with pytest.raises(ArgumentError, match=f"^{re.escape(message)}"):
        deep_gemm.fp8_mega_moe(**{**good, name: value})
    assert not y.any()
    deep_gemm.fp8_mega_moe(**good)
    assert torch.equal(y, expected(SHAPE, call, weights))


def test_a_bad_entry_in_the_buffer() -> None:
    call, weights, buffer = tokens_of(SHAPE, 4, 1), weights_of(SHAPE), open_buffer(SHAPE)
    wrong = dataclasses.replace(call, topk_idx=call.topk_idx.clone())
    wrong.topk_idx[2, 1] = 8
    message = "sym_buffer.topk_idx[2, 1] is 8, but must be from -1 (none) to 7"
    with pytest.raises(ArgumentError, match=f"^{re.escape(message)}"):
        run(buffer, wrong, weights)
    assert torch.equal(run(buffer, call, weights), expected(SHAPE, call, weights))


def test_tensors_of_the_buffer_that_were_replaced() -> None:
    buffer, y = open_buffer(SHAPE), made(4, 256, dtype=BF16)
    weights = pairs_of(weights_of(SHAPE))
    buffer.x_sf = buffer.x_sf.double()
    with pytest.raises(ArgumentError, match=r"^sym_buffer\.x_sf\.dtype is torch\.float64"):
        deep_gemm.fp8_mega_moe(y, *weights, buffer)
    buffer.x = made(24, 256, dtype=BF16)
    with pytest.raises(ArgumentError, match=r"^sym_buffer\.x\.dtype is torch\.bfloat16"):
        deep_gemm.fp8_mega_moe(y, *weights, buffer)


def _one_refuses(group: Group, weights: ExpertWeights, wrong: str) -> tuple[str, list[int], bool]:
    buffer, call = open_buffer(SHAPE, group), tokens_of(SHAPE, 5, group.rank)
    mine = weights.shard(group.rank, group.size)
    write(buffer, call)
    l1, l2 = pairs_of(mine)
    counts = torch.zeros(4, dtype=torch.int32)
    bad = group.rank == 1
    if bad and wrong == "weights":
        l1 = (l1[0][:, :128].contiguous(), l1[1])
    y = made(5, 128 if bad and wrong == "y" else 256, dtype=BF16)
    with pytest.raises((ArgumentError, PeerRefused)) as raised:
        deep_gemm.fp8_mega_moe(y, l1, l2, buffer, counts)
    right = torch.equal(run(buffer, call, mine), expected(SHAPE, call, weights))
    return f"{type(raised.value).__name__}: {raised.value}", counts.tolist(), right


@pytest.mark.parametrize(
    ("wrong", "text"),
    [("weights", "l1_weights[0].shape is (4, 128, 256)"), ("y", "y.shape is (5, 128)")],
)
def test_a_refusal_on_one_rank_ends_the_call_on_all(wrong: str, text: str) -> None:
    found = ThreadRanks(2).run(_one_refuses, weights_of(SHAPE), wrong)
    (peer, counts, right), (own, _, own_right) = found
    assert own.startswith(f"ArgumentError: {text}")
    assert peer.startswith("PeerRefused: ")
    assert text in peer
    assert (counts, right, own_right) == ([0, 0, 0, 0], True, True)


SIZES = [
    ("use_fp8_dispatch", False, "use_fp8_dispatch is False (type bool), but must be True"),
    ("activation", "gelu", "activation is 'gelu' (type str), but must be 'swiglu'"),
    ("num_experts_per_wave", 1.5, "num_experts_per_wave is 1.5 (type float), but must be an int"),
    ("l2_act_sf_gran_k", 64, "l2_act_sf_gran_k is 64 (type int), but must be 128 or None"),
    ("fast_accumulation", 1, "fast_accumulation is 1 (type int), but must be a bool or None"),
    ("num_topk", 33, "num_topk is 33, but must be from 1 to 32"),
    ("num_experts", 0, "num_experts is 0, but must be from 1 to 32767"),
    ("num_max_tokens_per_rank", -1, "num_max_tokens_per_rank is -1, but must be from 0 to"),
    ("hidden", 192, "hidden is 192, but must be a multiple of 128"),
    ("intermediate_hidden", 100, "intermediate_hidden is 100, but must be from 128 to"),
]


@pytest.mark.parametrize(("name", "value", "message"), SIZES)
def test_a_bad_size(name: str, value: object, message: str) -> None:
    with pytest.raises(ArgumentError, match=f"^{re.escape(message)}"):
        open_buffer(SHAPE, **{name: value})


def _alone(group: Group, changes: dict[str, Any]) -> str:
    """What a buffer says that is made with ``changes`` on rank 0 alone."""
    try:
        open_buffer(SHAPE, group, **(changes if group.rank == 0 else {}))
    except FanfoldError as error:
        return f"{type(error).__name__}: {error}"
    return ""


@pytest.mark.parametrize(
    "changes",
    [{"activation": "gelu"}, {"use_fp8_dispatch": False}, {"l2_act_sf_gran_k": 64},
     {"num_experts_per_wave": "1"}, {"fast_accumulation": 1}],
)  # fmt: skip
def test_a_bad_option_of_one_rank_ends_it_on_all(changes: dict[str, Any]) -> None:
    (name,) = changes
    first, second = ThreadRanks(2, timeout_s=30).run(_alone, changes)
    assert first.startswith(f"ArgumentError: {name} is ")
    assert "rank 0" in second
    assert f"{name} is " in second


def _disagree(group: Group) -> str:
    with pytest.raises(FanfoldError) as raised:
        open_buffer(SHAPE, group, num_max_tokens_per_rank=24 + group.rank)
    return str(raised.value)


def test_ranks_that_disagree() -> None:
    first, _ = ThreadRanks(2).run(_disagree)
    assert first == (
        "num_max_tokens_per_rank is 24 on rank 0 and 25 on rank 1, but must be the same on all "
        "ranks"
    )


def test_bad_weights_to_transform() -> None:
    weights = weights_of(SHAPE)
    l2 = (weights.l2, weights.l2_scales)
    bad = weights.l1_scales.clone()
    bad[3, 1, 0] = float("inf")
    with pytest.raises(ArgumentError, match=re.escape("l1_weights[1][3, 1, 0] is inf")):
        deep_gemm.transform_weights_for_mega_moe_sm90((weights.l1, bad), l2)
    with pytest.raises(ArgumentError, match=r"^l1_weights is a Tensor, but must be a pair"):
        deep_gemm.transform_weights_for_mega_moe_sm90(weights.l1, l2)  # type: ignore[arg-type]


def test_a_destroyed_buffer() -> None:
    call, weights, buffer = tokens_of(SHAPE, 4, 1), weights_of(SHAPE), open_buffer(SHAPE)
    run(buffer, call, weights)
    buffer.destroy()
    buffer.destroy()
    with pytest.raises(UsageError, match="this SymmBuffer is destroyed; make a new one"):
        run(buffer, call, weights)
    assert repr(buffer).endswith(", destroyed)")


def test_a_buffer_is_not_copied() -> None:
    with pytest.raises(CopyError, match="SymmBuffer cannot be copied or pickled"):
        copy.copy(open_buffer(SHAPE))
