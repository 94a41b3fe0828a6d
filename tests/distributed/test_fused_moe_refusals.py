"""What FusedMoE and its weights refuse, with which words, and that the layer goes on afterwards."""

from __future__ import annotations

import copy
import dataclasses
import math
import re
from collections.abc import Callable
from typing import Any, Literal

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import fanfold
from fanfold.backends.choose import BackendChoice
from fanfold.errors import (
    ArgumentError,
    CopyError,
    FanfoldError,
    PeerRefused,
    UnavailableError,
    UsageError,
)
from fanfold.fused_moe import (
    ExpertWeights,
    dequantize_weights,
    difference,
    layer,
    quantize_weights,
)
from fanfold.group import Group
from fanfold.thread_ranks import ThreadRanks
from tests.distributed.fused_layers import FusedShape, FusedTokens, expected, tokens_of, weights_of

SHAPE = FusedShape()
WHERE = "where these ranks run this call (the setting backend is 'host' (from"
OTHER = FusedShape(intermediate=256)


def arguments(tokens: int = 4) -> dict[str, Any]:
    """Good ones of a call with one rank."""
    call = tokens_of(SHAPE, tokens, 1)
    return {**vars(call), "weights": weights_of(SHAPE)}


def replaced(name: str, change: Callable[[Any], Any]) -> Callable[[dict[str, Any]], None]:
    """What spoils one argument."""

    def spoil(good: dict[str, Any]) -> None:
        good[name] = change(good.get(name))

    return spoil


def with_entry(value: int) -> Callable[[torch.Tensor], torch.Tensor]:
    """Sets entry [2, 1]."""

    def change(topk_idx: torch.Tensor) -> torch.Tensor:
        topk_idx[2, 1] = value
        return topk_idx

    return change


def on_gpu(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """A tensor of a GPU that need not be there."""
    with FakeTensorMode():
        return torch.empty(shape, dtype=dtype, device="cuda:0")


def made(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    """Zeros."""
    return torch.zeros(shape, dtype=dtype, device="cpu")


FP8, BF16 = torch.float8_e4m3fn, torch.bfloat16

WRONG = [
    (replaced("x", lambda x: x.float()), "x.dtype is torch.float32, but must be torch.bfloat16"),
    (replaced("x", lambda x: x[:, :128]), "x.shape is (4, 128), but must be (tokens, 256)"),
    (replaced("x", lambda x: x.T.contiguous().T), "x.stride() is (1, 4), but must be contiguous"),
    (replaced("x", lambda x: (x,)), "x is a tuple of 1, but must be a torch.Tensor, or a pair"),
    (replaced("x", lambda x: (x, x)), "x[0].dtype is torch.bfloat16, but must be torch.float8"),
    (
        replaced("x", lambda _: (made(4, 256, dtype=FP8), made(4, 1, dtype=torch.float32))),
        "x[1].shape is (4, 1), but must be (4, 2)",
    ),
    (
        replaced("x", lambda _: made(25, 256, dtype=BF16)),
        "x.shape[0] is 25, but must be at most max_tokens = 24",
    ),
    (
        replaced("x", lambda _: on_gpu((4, 256), BF16)),
        f"x.device is cuda:0, but must be cpu, {WHERE}",
    ),
    (
        replaced("topk_idx", lambda _: on_gpu((4, 3), torch.int64)),
        f"topk_idx.device is cuda:0, but must be cpu, {WHERE}",
    ),
    (
        replaced("topk_idx", lambda idx: idx.int()),
        "topk_idx.dtype is torch.int32, but must be torch.int64",
    ),
    (replaced("topk_idx", with_entry(8)), "topk_idx[2, 1] is 8, but must be from -1 (none) to 7"),
    (replaced("topk_idx", with_entry(-2)), "topk_idx[2, 1] is -2, but must be from -1 (none) to 7"),
    (
        replaced("topk_weights", lambda weights: weights[:3]),
        "topk_weights.shape is (3, 3), but must be (4, 3)",
    ),
    (
        replaced("topk_weights", lambda _: None),
        "topk_weights is None, but must be a torch.Tensor of shape (4, 3)",
    ),
    (
        replaced("weights", lambda weights: weights.l1),
        "weights is a Tensor, but must be a fanfold.fused_moe.ExpertWeights",
    ),
    (
        replaced("weights", lambda weights: weights.shard(0, 2)),
        "weights.l1.shape is (4, 256, 256), but must be (8, 256, 256)",
    ),
    (
        replaced("shared_expert", lambda _: weights_of(OTHER)),
        "shared_expert.l1.shape is (8, 512, 256), but must be (1, 2 * intermediate, 256)",
    ),
    (
        replaced("statistics", lambda _: made(8, dtype=torch.int64)),
        "statistics.dtype is torch.int64, but must be torch.int32",
    ),
    (
        replaced("statistics", lambda _: on_gpu((8,), torch.int32)),
        f"statistics.device is cuda:0, but must be cpu, {WHERE}",
    ),
    (
        replaced("out", lambda _: made(3, 256, dtype=BF16)),
        "out.shape is (3, 256), but must be (4, 256)",
    ),
]


@pytest.mark.parametrize(("spoil", "message"), WRONG, ids=[message for _, message in WRONG])
def test_a_bad_argument(spoil: Callable[[dict[str, Any]], None], message: str) -> None:
    good, bad = arguments(), arguments()
    spoil(bad)
    with SHAPE.open() as moe:
        with pytest.raises(ArgumentError, match=f"^{re.escape(message)}"):
            moe.forward(**bad)
        wanted = expected(SHAPE, FusedTokens(**_tokens(good)), good["weights"])
        assert torch.equal(moe.forward(**good), wanted)


def _tokens(call: dict[str, Any]) -> dict[str, Any]:
    return {name: call[name] for name in ("x", "topk_idx", "topk_weights")}


def _one_refuses(group: Group, weights: ExpertWeights) -> tuple[str, list[int], bool]:
    with SHAPE.open(group) as moe:
        call, mine = tokens_of(SHAPE, 5, moe.rank), weights.shard(moe.rank, moe.ranks)
        counts = torch.zeros(moe.experts_per_rank, dtype=torch.int32)
        idx = call.topk_idx + (100 if moe.rank == 1 else 0)
        with pytest.raises((ArgumentError, PeerRefused)) as raised:
            moe.forward(call.x, idx, call.topk_weights, mine, statistics=counts)
        after = moe.forward(call.x, call.topk_idx, call.topk_weights, mine)
        right = torch.equal(after, expected(SHAPE, call, weights))
        return f"{type(raised.value).__name__}: {raised.value}", counts.tolist(), right


def test_a_refusal_on_one_rank_ends_the_call_on_all_and_the_next_one_works() -> None:
    (peer, counts, right), (own, _, own_right) = ThreadRanks(2).run(_one_refuses, weights_of(SHAPE))
    assert re.match(r"ArgumentError: topk_idx\[0, \d\] is 10\d, but must be from -1", own)
    assert peer.startswith("PeerRefused: ")
    assert "topk_idx" in peer
    assert (counts, right, own_right) == ([0, 0, 0, 0], True, True)


def _one_fails(group: Group, weights: ExpertWeights, monkeypatch: Any) -> str:
    with SHAPE.open(group) as moe:
        call, mine = tokens_of(SHAPE, 5, moe.rank), weights.shard(moe.rank, moe.ranks)
        if moe.rank == 0:
            monkeypatch.setattr(moe._layer, "_shared_result", _without_memory)
        with pytest.raises((MemoryError, PeerRefused)) as raised:
            moe.forward(call.x, call.topk_idx, call.topk_weights, mine)
        return f"{type(raised.value).__name__}: {raised.value}"


def _without_memory(*args: object) -> None:
    raise MemoryError("no memory is left")


def test_experts_that_fail_on_one_rank_end_the_call_on_all(monkeypatch: pytest.MonkeyPatch) -> None:
    own, peer = ThreadRanks(2).run(_one_fails, weights_of(SHAPE), monkeypatch)
    assert own == "MemoryError: no memory is left"
    assert peer.startswith("PeerRefused: ")
    assert "no memory is left" in peer


SIZES = [
    ("hidden", 192, "hidden is 192, but must be a multiple of 128"),
    ("hidden", 64, "hidden is 64, but must be from 128 to 65536"),
    ("intermediate", 129, "intermediate is 129, but must be a multiple of 128"),
    ("intermediate", 128.0, "intermediate is 128.0 (type float), but must be an integer"),
    ("top_k", 33, "top_k is 33, but must be from 1 to 32"),
    ("num_experts", 0, "num_experts is 0, but must be from 1 to 32767"),
    ("max_tokens", 1 << 23, "max_tokens is 8388608, but must be from 0 to 5592405"),
    ("activation_clamp", 0, "activation_clamp is 0, but must be a number above 0, or None"),
    ("activation_clamp", float("nan"), "activation_clamp is nan, but must be a number"),
    ("activation_clamp", "10", "activation_clamp is '10' (type str), but must be a number"),
    ("activation_clamp", 10**400, "activation_clamp is 1000"),
    ("config", "host", "config is 'host' (type str), but must be a fanfold.Config or None"),
]


@pytest.mark.parametrize(("name", "value", "message"), SIZES)
def test_a_bad_size(name: str, value: object, message: str) -> None:
    with pytest.raises(ArgumentError, match=f"^{re.escape(message)}"):
        SHAPE.open(**{name: value})


@pytest.mark.parametrize(
    ("own", "asked", "message"),
    [
        (None, 1.0, "activation_clamp is 1.0 (type float), but must be None: this layer was made"),
        (0.5, 0, "activation_clamp is 0, but must be a number above 0, or None"),
        (0.5, "1", "activation_clamp is '1' (type str), but must be a number above 0, or None"),
        (0.5, True, "activation_clamp is True (type bool), but must be a number above 0, or None"),
        (0.5, -math.inf, "activation_clamp is -inf, but must be a number above 0, or None"),
        (0.5, math.nan, "activation_clamp is nan, but must be a number above 0, or None"),
        (0.5, torch.tensor([1.0, 2.0], device="cpu"), "activation_clamp is a "),
    ],
)
def test_a_bad_clamp_of_a_call(own: float | None, asked: Any, message: str) -> None:
    shape, weights = dataclasses.replace(SHAPE, activation_clamp=own), weights_of(SHAPE)
    calls = [tokens_of(SHAPE, 3, rank) for rank in range(2)]
    assert ThreadRanks(2).run(_bad_clamp, shape, calls, weights, asked, message) == [True, True]


def _bad_clamp(
    group: Group,
    shape: FusedShape,
    calls: list[FusedTokens],
    weights: ExpertWeights,
    asked: Any,
    message: str,
) -> bool:
    """Rank 1 asks for it; both can go on."""
    call = calls[group.rank]
    given = (call.x, call.topk_idx, call.topk_weights, weights.shard(group.rank, group.size))
    with shape.open(group) as moe:
        if group.rank == 1:
            with pytest.raises(ArgumentError, match=f"^{re.escape(message)}"):
                moe.forward(*given, activation_clamp=asked)
        else:
            with pytest.raises(PeerRefused, match=r"^rank 1 refused its input"):
                moe.forward(*given)
        return torch.equal(moe.forward(*given), expected(shape, call, weights))


def _disagree(group: Group) -> str:
    with pytest.raises(FanfoldError) as raised:
        SHAPE.open(group, activation_clamp=[None, 10][group.rank])
    return str(raised.value)


def test_ranks_that_disagree() -> None:
    first, second = ThreadRanks(2).run(_disagree)
    assert first == (
        "activation_clamp is None on rank 0 and 10.0 on rank 1, but must be the same on all ranks"
    )
    assert second.startswith("activation_clamp is 10.0 on rank 1 and None on rank 0")


def test_a_gpu_is_asked_for() -> None:
    message = "the setting backend is 'cuda' (from argument), but rank 0 cannot use a GPU: "
    with pytest.raises(UnavailableError, match=f"^{re.escape(message)}"):
        SHAPE.open(config=fanfold.Config.resolve(backend="cuda"))


def _open_on_gpu(group: Group, shape: FusedShape, backend: Literal["auto", "cuda"]) -> str:
    config = fanfold.Config.resolve(backend=backend)
    try:
        with shape.open(group, config=config) as moe:
            return f"{moe.backend}: {moe._choice.reason}"
    except UnavailableError as error:
        return str(error)


OBSTACLES = [
    (33, FusedShape(num_experts=33), (9, 0), "serves up to 32 ranks"),
    (1, SHAPE, (10, 0), "needs compute capability 9.0, and this GPU has 10.0"),
    (1, FusedShape(hidden=16384 + 128), (9, 0), "takes hidden and intermediate up to 16384"),
    (1, FusedShape(intermediate=1 << 20), (9, 0), "takes hidden and intermediate up to 16384"),
    (1, FusedShape(num_experts=6145), (9, 0), "takes up to 6144 experts"),
    (
        2,
        FusedShape(top_k=1, max_tokens=1 << 24),
        (9, 0),
        (
            "takes up to 33554304 rows, and 33554944 may come (ranks * max_tokens * top_k, and "
            "blocks of 128 for each expert)"
        ),
    ),
]


@pytest.mark.parametrize(("ranks", "shape", "capability", "obstacle"), OBSTACLES)
def test_what_the_kernel_does_not_serve_runs_on_the_cpu(
    monkeypatch: pytest.MonkeyPatch,
    ranks: int,
    shape: FusedShape,
    capability: tuple[int, int],
    obstacle: str,
) -> None:
    found = BackendChoice("cuda", torch.device("cuda:0"), "a GPU each", capability)
    monkeypatch.setattr(layer, "choose", lambda *_: found)
    on_cpu = ThreadRanks(ranks).run(_open_on_gpu, shape, "auto")
    assert on_cpu == [f"host: the kernel of FusedMoE {obstacle}"] * ranks
    refused = ThreadRanks(ranks).run(_open_on_gpu, shape, "cuda")
    setting = "the setting backend is 'cuda' (from argument), but"
    assert refused == [f"{setting} the kernel of FusedMoE {obstacle}"] * ranks


def test_a_shared_expert_too_wide_for_the_kernel() -> None:
    wide = weights_of(FusedShape(num_experts=1, intermediate=256))
    with SHAPE.open() as moe:
        moe.forward(**arguments(), shared_expert=wide)
        moe._checks = dataclasses.replace(moe._checks, most_shared=128)
        bound = "must be from 128 to 128"
        with pytest.raises(ArgumentError, match=f"^shared_expert.intermediate is 256, but {bound}"):
            moe.forward(**arguments(), shared_expert=wide)
        with pytest.raises(ArgumentError, match=f"^intermediate is 256, but {bound}"):
            moe.prepare_shared_expert(256)


def test_after_close_and_copies() -> None:
    moe = SHAPE.open()
    with pytest.raises(CopyError, match=r"^FusedMoE cannot be copied or pickled"):
        copy.copy(moe)
    moe.close()
    moe.close()
    with pytest.raises(UsageError, match=r"^this FusedMoE is closed; make a new one$"):
        moe.forward(**arguments())


# ---- weights ------------------------------------------------------------------------------------


def tensors() -> dict[str, torch.Tensor]:
    """Of good weights."""
    return dict(vars(weights_of(SHAPE)))


def spoilt_scale(scales: torch.Tensor) -> torch.Tensor:
    """One of them is infinite."""
    scales[3, 1, 0] = float("inf")
    return scales


WEIGHTS: list[tuple[str, Callable[[torch.Tensor], Any], str]] = [
    ("l1", lambda w: w.float(), "l1.dtype is torch.float32, but must be torch.float8_e4m3fn"),
    ("l1", lambda w: w[0], "l1.shape is (256, 256), but must be (experts, 2 * intermediate, hidd"),
    ("l1", lambda w: w[:, :128].contiguous(), "l1.shape is (8, 128, 256), but must be (experts, 2"),
    ("l1", lambda w: w[:0], "l1.shape is (0, 256, 256), but must be (experts, 2 * intermediate"),
    ("l1", lambda w: w.mT, "l1.stride() is (65536, 1, 256), but must be contiguous"),
    ("l2", lambda w: w.mT.contiguous(), "l2.shape is (8, 128, 256), but must be (8, 256, 128)"),
    ("l2", lambda w: w.to("meta"), "l2.device is meta, but must be cpu, as that of l1"),
    ("l1_scales", lambda s: s[:, 1:], "l1_scales.shape is (8, 1, 2), but must be (8, 2, 2)"),
    ("l2_scales", lambda s: s.mT.contiguous(), "l2_scales.shape is (8, 1, 2), but must be (8, 2,"),
    ("l2_scales", lambda s: s.double(), "l2_scales.dtype is torch.float64, but must be torch.fl"),
    ("l1_scales", spoilt_scale, "l1_scales[3, 1, 0] is inf, but must be finite"),
    (
        "l2_scales",
        lambda _: None,
        "l2_scales is None, but must be a torch.Tensor of shape (8, 2, 1",
    ),
]


@pytest.mark.parametrize(("name", "change", "message"), WEIGHTS)
def test_bad_weights(name: str, change: Callable[[torch.Tensor], Any], message: str) -> None:
    changed = {**tensors(), name: change(tensors()[name])}
    with pytest.raises(ArgumentError, match=f"^{re.escape(message)}"):
        ExpertWeights(**changed)


def test_shards_are_views_of_all() -> None:
    weights = weights_of(SHAPE)
    part = weights.shard(1, 4)
    assert part.l2.data_ptr() == weights.l2[2].data_ptr()
    assert (part.experts, part.hidden, part.intermediate) == (2, 256, 128)
    for arguments_, message in (
        ((0, 3), "ranks is 3, but must be a divisor of the 8 experts"),
        ((4, 4), "rank is 4, but must be from 0 to 3"),
    ):
        with pytest.raises(ArgumentError, match=f"^{message}$"):
            weights.shard(*arguments_)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("leading", [(), (3,), (2, 2)])
def test_quantised_weights_are_near(leading: tuple[int, ...], dtype: torch.dtype) -> None:
    generator = torch.Generator("cpu").manual_seed(1)
    weights = torch.randn((*leading, 256, 384), generator=generator).to(dtype)
    weights[..., :128, :128] *= 1e-20  # each block has its own scale
    weights[..., 128:, :128] = 0
    values, scales = quantize_weights(weights)
    assert (values.dtype, values.shape) == (torch.float8_e4m3fn, weights.shape)
    assert (scales.dtype, scales.shape) == (torch.float32, (*leading, 2, 3))
    back = dequantize_weights(values, scales)
    blocks = [(slice(0, 128), slice(0, 128)), (slice(0, 256), slice(128, 384))]
    for rows, columns in blocks:
        assert difference(back[..., rows, columns], weights[..., rows, columns]) < 1e-3
        largest = values[..., rows, columns].float().abs().amax()
        assert float(largest) == 448
    assert not back[..., 128:, :128].any()
    again, same = quantize_weights(back)  # a fixed point, up to the rounding of a scale
    assert difference(dequantize_weights(again, same), back) < 1e-12


def test_what_cannot_be_quantised() -> None:
    for weights, message in (
        (made(128, 100, dtype=BF16), "weights.shape is (128, 100), but must be multiples of 128"),
        (made(128, dtype=BF16), "weights.shape is (128,), but must be (N, K)"),
        (made(128, 128, dtype=FP8), "weights.dtype is torch.float8_e4m3fn, but must be torch.bf"),
        (made(128, 128, dtype=BF16) / 0, "weights is not finite everywhere, but must be finite"),
    ):
        with pytest.raises(ArgumentError, match=f"^{re.escape(message)}"):
            quantize_weights(weights)
    with pytest.raises(ArgumentError, match=r"^scales.shape is \(2, 1\), but must be \(1, 2\)$"):
        dequantize_weights(made(128, 256, dtype=FP8), made(2, 1, dtype=torch.float32))


def test_difference() -> None:
    x, y = torch.tensor([3.0, 0.0, 4.0]), torch.tensor([0.0, 2.0, 0.0])
    assert difference(x, x) == 0.0
    assert difference(x, y) == 1.0
    assert difference(x, -x) == 2.0
    assert difference(x, 2 * x) == pytest.approx(1 - 2 * 2 / (1 + 4))
    assert difference(torch.zeros(3), torch.zeros(3)) == 0.0
    for bad in (float("nan"), float("inf")):
        assert not difference(x, torch.full((3,), bad)) < 1e9
