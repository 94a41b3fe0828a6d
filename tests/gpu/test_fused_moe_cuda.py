"""FusedMoE on a GPU against its exact reference."""

from __future__ import annotations

import dataclasses
import functools
import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import fanfold
from fanfold.errors import ArgumentError, UsageError
from fanfold.formats import quantize
from fanfold.fused_moe import ExpertWeights, FusedMoeTuning, difference, reference
from fanfold.fused_moe.tuning import FORMS
from tests.distributed.fused_layers import FusedShape, FusedTokens, tokens_of, weights_of
from tests.gpu.fused_moe_rounds import CLOSE, FAST, TOKENS, there, tuning_of, weights_there

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300), pytest.mark.usefixtures("hopper")]

LIMIT = 1e-3  # for each rank

SHAPE = FusedShape(num_experts=8, top_k=3, hidden=512, intermediate=384, max_tokens=300)


def exact(
    shape: FusedShape, call: FusedTokens, weights: ExpertWeights, **options: Any
) -> torch.Tensor:
    clamp = shape.activation_clamp
    rest = (call.topk_idx, call.topk_weights, weights)
    return reference(call.x, *rest, activation_clamp=clamp, **options)


@dataclasses.dataclass
class Layer:
    """A layer with its weights, and what it gives for a call into a poisoned result."""

    shape: FusedShape
    moe: fanfold.FusedMoE
    weights: ExpertWeights

    def run(
        self, call: FusedTokens, out: torch.Tensor | None = None, **options: Any
    ) -> torch.Tensor:
        out = torch.full_like(call.x, float("nan")) if out is None else out
        rest = (call.topk_idx, call.topk_weights, self.weights)
        y = self.moe.forward(call.x, *rest, out=out, **options)
        assert y is out
        return y

    def run_and_check(self, call: FusedTokens, out: torch.Tensor) -> None:
        """What the call finds is raised, by itself if the GPU is quick."""
        self.run(call, out)
        torch.cuda.synchronize()
        self.moe.check()

    def check(self, call: FusedTokens) -> torch.Tensor:
        close = FAST if self.shape.fast_accumulation else CLOSE
        statistics = torch.full((self.shape.num_experts,), 5, dtype=torch.int32, device="cuda")
        y = self.run(call, statistics=statistics)
        assert difference(y, exact(self.shape, call, self.weights)) < close, (self.shape, len(y))
        assert torch.equal(statistics, self.slots(call) + 5)
        return y

    def slots(self, call: FusedTokens) -> torch.Tensor:
        """What statistics count in a call."""
        valid = call.topk_idx[call.topk_idx >= 0]
        return torch.bincount(valid, minlength=self.shape.num_experts).int()


def layer_of(
    shape: FusedShape, seed: int = 0, spread: int = 0, tuning: FusedMoeTuning | None = None
) -> Layer:
    moe = shape.open(tuning=tuning)
    assert moe.backend == "cuda"
    return Layer(shape, moe, weights_there(weights_of(shape, seed, spread)))


def core_of(layer: Layer) -> Any:
    return layer.moe._layer._main._core  # type: ignore[union-attr]


def layer_with(fast: bool, seed: int = 0, spread: int = 0) -> Layer:
    """Of SHAPE; with ``fast`` all calls have fast sums."""
    shape = dataclasses.replace(SHAPE, fast_accumulation=fast)
    return layer_of(shape, seed, spread, tuning_of(fast))


BOTH_SUMS = pytest.mark.parametrize("layer", [False, True], ids=["fp32", "fast"], indirect=True)


@pytest.fixture
def layer(request: pytest.FixtureRequest) -> Iterator[Layer]:
    """Of SHAPE, with FP32 sums where the test is not marked with BOTH_SUMS."""
    made = layer_with(getattr(request, "param", False))
    yield made
    made.moe.check()
    made.moe.close()


def random_shape(draw: random.Random) -> FusedShape:
    return FusedShape(
        num_experts=draw.choice([1, 2, 3, 7, 16, 40, 97, 130]),
        top_k=draw.choice([1, 2, 3, 6, 8, 11, 22, 32]),
        hidden=128 * draw.choice([1, 2, 3, 4, 7, 8, 9, 16, 21, 33]),
        intermediate=128 * draw.choice([1, 2, 3, 5, 8, 11]),
        max_tokens=draw.choice([1, 20, 200, 700, 2500]),
        activation_clamp=draw.choice([None, 0.25, 1.0]),
        fast_accumulation=draw.random() < 0.3,
    )


@pytest.mark.parametrize("seed", range(24))
def test_random_geometries(seed: int) -> None:
    draw = random.Random(seed)
    shape = random_shape(draw)
    form = list(FORMS)[seed % 3]
    if form == "groups":  # up to 1024 columns are one group
        shape = dataclasses.replace(shape, hidden=max(shape.hidden, 1152))
    layer = layer_of(shape, seed, tuning=FORMS[form])
    for number, tokens in enumerate((shape.max_tokens, draw.randint(0, shape.max_tokens), 0, 1)):
        masked = draw.choice([0.0, 0.3, 1.0])
        skewed = draw.random() < 0.25
        call = tokens_of(shape, tokens, TOKENS + number, masked=masked, skewed=skewed)
        layer.check(there(call))
    layer.moe.check()


@BOTH_SUMS
def test_thousands_of_calls_give_the_same_bits(layer: Layer) -> None:
    calls = [there(tokens_of(SHAPE, n, TOKENS + n)) for n in (300, 0, 7, 128, 129)]
    first = [layer.check(call) for call in calls]
    for _ in range(400):
        for call, y in zip(calls, first, strict=True):
            assert torch.equal(layer.run(call), y)


@pytest.mark.parametrize("fast", [False, True])
@pytest.mark.parametrize("rows", [0, 1 << 30])
def test_sums_by_groups_of_columns(rows: int, fast: bool) -> None:
    shape = dataclasses.replace(SHAPE, hidden=3200, max_tokens=600, fast_accumulation=fast)
    layer = layer_of(shape, tuning=tuning_of(fast))
    core = core_of(layer)
    core.set_rows_for_groups(rows)
    for tokens in (600, 3):
        layer.check(there(tokens_of(shape, tokens, TOKENS + tokens)))


@pytest.mark.parametrize("seed", range(100, 108))
def test_the_same_bits_with_a_and_b_swapped(seed: int) -> None:
    """Also with several blocks of rows for each expert."""
    draw = random.Random(seed)
    shape = dataclasses.replace(random_shape(draw), fast_accumulation=False)
    layers = [layer_of(shape, seed, tuning=FORMS[form]) for form in ("rows", "swap_ab")]
    for number, tokens in enumerate((shape.max_tokens, draw.randint(0, shape.max_tokens), 1)):
        skewed = draw.random() < 0.25
        call = there(tokens_of(shape, tokens, TOKENS + number, skewed=skewed))
        assert torch.equal(*(layer.check(call) for layer in layers))
    for layer in layers:
        layer.moe.check()


@pytest.mark.parametrize("fast", [False, True])
def test_large(fast: bool) -> None:
    shape = FusedShape(64, 8, 7168, 2048, 2200, fast_accumulation=fast)
    layer = layer_of(shape)
    for tokens in (8, 64, 512, 2200):
        layer.check(there(tokens_of(shape, tokens, TOKENS + tokens, masked=0.0)))


def test_sums_of_one_sign() -> None:
    """Of terms that all add up the tensor cores lose percents, if they keep the sums."""
    shape = FusedShape(2, 1, 4096, 512, 64)
    call = tokens_of(shape, 64, 1, masked=0.0)
    call.x.abs_()
    weights = weights_of(shape, 2)
    weights.l1.view(torch.uint8).bitwise_and_(0x7F)
    found = {}
    for fast in (False, True):
        # The other form adds FP32 sums.
        layer = layer_of(dataclasses.replace(shape, fast_accumulation=fast), tuning=FORMS["rows"])
        layer.weights = weights_there(weights)
        wanted = exact(layer.shape, there(call), layer.weights)
        found[fast] = difference(layer.run(there(call)), wanted)
    assert found[False] < CLOSE
    assert found[True] > 10 * found[False]


def test_the_cpu_has_the_same_result(layer: Layer) -> None:
    call = tokens_of(SHAPE, 30, TOKENS + 1)
    y = layer.run(there(call))
    with SHAPE.open(config=fanfold.Config.resolve(backend="host")) as host:
        there_too = host.forward(call.x, call.topk_idx, call.topk_weights, weights_of(SHAPE))
    assert difference(y.cpu(), there_too) < CLOSE


def test_fp8_tokens_with_scales_of_any_strides(layer: Layer) -> None:
    call = there(tokens_of(SHAPE, 77, TOKENS + 1))
    y = layer.run(call)
    values, scales = quantize(call.x)
    rest = (call.topk_idx, call.topk_weights, layer.weights)
    for given in (scales, scales.T.contiguous().T, scales.repeat_interleave(2, dim=1)[:, ::2]):
        assert torch.equal(layer.moe.forward((values, given), *rest), y)


@pytest.mark.parametrize("intermediate", [128, 384, 1024])
def test_shared_expert(layer: Layer, intermediate: int) -> None:
    one = dataclasses.replace(SHAPE, num_experts=1, intermediate=intermediate)
    shared = weights_there(weights_of(one, 9))
    call = there(tokens_of(SHAPE, 200, TOKENS + 4))
    for _ in range(2):
        y = layer.run(call, shared_expert=shared)
        wanted = exact(SHAPE, call, layer.weights, shared_expert=shared)
        assert difference(y, wanted) < CLOSE
    assert difference(layer.run(call), wanted) > 0.01


# With a spread of 40 fast sums may overflow.
@pytest.mark.parametrize(("spread", "fast"), [(20, False), (20, True), (40, False)])
def test_extreme_scales(spread: int, fast: bool) -> None:
    layer = layer_with(fast, 3, spread)
    call = there(tokens_of(SHAPE, 100, TOKENS + 2))
    wanted = exact(SHAPE, call, layer.weights)
    y = layer.run(call)
    finite = wanted.isfinite()
    assert bool(finite.any())
    assert torch.equal(y.isnan() | y.isinf(), ~finite)
    # A row's largest results only: the others are noise of sums of terms far larger.
    assert difference(y[finite], wanted[finite]) < LIMIT


@pytest.mark.parametrize("fast", [False, True])
@pytest.mark.parametrize("form", FORMS)
def test_scales_times_powers_of_two_change_exponents_only(form: str, fast: bool) -> None:
    shape = dataclasses.replace(SHAPE, fast_accumulation=fast)
    layer = layer_of(shape, 3, tuning=FORMS[form])
    call = there(tokens_of(SHAPE, 100, TOKENS + 2))
    # So that no product of scales is below 2**-60, where fast sums do not tell them apart.
    call.topk_weights.clamp_(min=0.25)
    y = layer.check(call)
    values, scales = quantize(call.x)
    rest, weights = (call.topk_idx, call.topk_weights), layer.weights
    for first, second in ((80, 0), (-80, 0), (0, 90), (0, -32)):
        scaled = dataclasses.replace(
            weights,
            l1_scales=weights.l1_scales * 2.0**first,
            l2_scales=weights.l2_scales * 2.0**second,
        )
        found = layer.moe.forward((values, scales * 2.0**-first), *rest, scaled)
        assert torch.equal(found.double(), y.double() * 2.0**second), (first, second)


@pytest.mark.parametrize("fast", [False, True])
def test_scales_that_change_from_block_to_block(fast: bool) -> None:
    """Between the least and the largest for which no fast sum overflows (gemm/sum.cuh)."""
    layer = layer_with(fast)
    layer.weights.l1_scales.fill_(2.0**-60)
    for expert in range(SHAPE.num_experts):
        layer.weights.l1_scales[expert, :, expert % 2 :: 2] = 2.0**36
    layer.weights.l2_scales.fill_(2.0**-100)  # activations are about 2**108
    call = there(tokens_of(SHAPE, 100, TOKENS + 2))
    values, scales = quantize(call.x)
    tokens = (values, torch.ones_like(scales))
    rest = (call.topk_idx, call.topk_weights, layer.weights)
    wanted = reference(tokens, *rest)
    assert bool(wanted.isfinite().all())
    y = layer.moe.forward(tokens, *rest)
    assert difference(y, wanted) < (FAST if fast else CLOSE)


@pytest.mark.parametrize("fast", [False, True])
def test_blocks_of_zeros(fast: bool) -> None:
    layer = layer_with(fast)
    layer.weights.l1.view(torch.uint8)[:, :128] = 0
    layer.weights.l1_scales[:, 0] = 0
    layer.weights.l1_scales[1] = 0
    layer.weights.l2_scales[2, :, 1] = 0
    call = there(tokens_of(SHAPE, 100, TOKENS + 2))
    call.x[:10] = 0
    layer.check(call)


def test_the_weight_of_no_expert_is_not_read(layer: Layer) -> None:
    call = there(tokens_of(SHAPE, 50, TOKENS + 3, masked=0.5))
    y = layer.run(call)
    call.topk_weights[call.topk_idx < 0] = float("nan")
    assert torch.equal(layer.run(call), y)


def test_a_nan_stays_with_its_token(layer: Layer) -> None:
    call = there(tokens_of(SHAPE, 50, TOKENS + 3, masked=0.0))
    y = layer.run(call)
    call.topk_weights[7, 1] = float("nan")
    poisoned = layer.run(call)
    assert bool(poisoned[7].isnan().any())
    others = torch.arange(50, device="cuda") != 7
    assert torch.equal(poisoned[others], y[others])


def test_bad_entries_are_reported_and_count_for_none(layer: Layer) -> None:
    call = there(tokens_of(SHAPE, 50, TOKENS + 3, masked=0.0))
    call.topk_idx[7, 1] = SHAPE.num_experts
    y = torch.empty_like(call.x)
    with pytest.raises(ArgumentError, match=r"topk_idx\[7, 1\] of call 1 is 8, but must be from"):
        layer.run_and_check(call, y)
    layer.moe.check()
    call.topk_idx[7, 1] = -1
    assert torch.equal(layer.check(call), y)


@BOTH_SUMS
def test_graphs_replay_with_what_is_there(layer: Layer) -> None:
    calls = [there(tokens_of(SHAPE, 120, TOKENS + seed)) for seed in (1, 2, 3)]
    ys = [layer.check(call) for call in calls]
    fixed = FusedTokens(*(tensor.clone() for tensor in vars(calls[0]).values()))
    out = torch.empty_like(fixed.x)
    rest = (fixed.topk_idx, fixed.topk_weights, layer.weights)
    statistics = torch.zeros(SHAPE.num_experts, dtype=torch.int32, device="cuda")
    layer.moe.forward(fixed.x, *rest, out=out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(3):
            layer.moe.forward(fixed.x, *rest, statistics=statistics, out=out)
    for _ in range(5):
        for call, y in zip(calls, ys, strict=True):
            for to, tensor in zip(vars(fixed).values(), vars(call).values(), strict=True):
                to.copy_(tensor)
            out.fill_(float("nan"))
            graph.replay()
            assert torch.equal(out, y)
            assert torch.equal(layer.run(call), y)
    slots = torch.stack([layer.slots(call) for call in calls]).sum(0, dtype=torch.int32)
    assert torch.equal(statistics, 5 * 3 * slots)


def test_calls_of_two_layers_on_streams_of_their_own() -> None:
    layers = [layer_of(SHAPE, seed) for seed in (1, 2)]
    call = there(tokens_of(SHAPE, 200, TOKENS + 5))
    ys = [layer.check(call) for layer in layers]
    streams = [torch.cuda.Stream() for _ in layers]
    torch.cuda.synchronize()
    for _ in range(100):
        results = []
        for layer, stream in zip(layers, streams, strict=True):
            with torch.cuda.stream(stream):
                results.append(layer.run(call))
        torch.cuda.synchronize()
        for y, wanted in zip(results, ys, strict=True):
            assert torch.equal(y, wanted)


def test_a_call_whose_waits_last_too_long_is_given_up() -> None:
    layer = layer_of(SHAPE)
    call = there(tokens_of(SHAPE, 100, TOKENS + 2))
    y = layer.check(call)
    core_of(layer).timeout_ns = 1
    out = torch.empty_like(call.x)
    run_and_check = functools.partial(layer.run_and_check, call, out)
    for give_up in (run_and_check, layer.moe.check, run_and_check):
        with pytest.raises(
            UsageError, match=r"call 2 of this FusedMoE was given up: CTA \d+ of rank 0 has"
        ):
            give_up()
    # Other layers go on.
    assert torch.equal(layer_of(SHAPE).check(call), y)


def test_a_kernel_that_is_not_loaded_is_refused_in_a_capture() -> None:
    layer = layer_of(SHAPE)
    call = there(tokens_of(SHAPE, 20, TOKENS + 2))
    layer.run(call)
    other = dataclasses.replace(SHAPE, num_experts=1, intermediate=640)
    shared = weights_there(weights_of(other, 9))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph), pytest.raises(UsageError, match="before the capture"):
        layer.run(call, shared_expert=shared)
    layer.check(call)


def test_no_call_waits_for_the_gpu(layer: Layer) -> None:
    call = there(tokens_of(SHAPE, 100, TOKENS + 2))
    layer.run(call)
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda._sleep(int(2e9))
        busy = torch.cuda.Event()
        busy.record()
        layer.run(call)
        assert not busy.query()
    torch.cuda.synchronize()
