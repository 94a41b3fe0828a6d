"""fp8_mega_moe on a GPU against the exact reference of FusedMoE: one rank, and two that are threads
and share the GPU."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

from fanfold import deep_gemm
from fanfold.fused_moe import difference
from fanfold.group import as_group
from tests.distributed.fused_layers import (
    FusedShape,
    FusedTokens,
    expected,
    tokens_of,
    weights_of,
)
from tests.distributed.test_mega_moe import open_buffer, pairs_of, write
from tests.gpu.fused_moe_rounds import (
    CLOSE,
    TOKENS,
    all_there,
    slots_here,
    there,
    weights_there,
)
from tests.gpu.one_gpu import OneGpu, capture, meet, wait

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(300),
    pytest.mark.usefixtures("hopper"),
    pytest.mark.parametrize("ranks", [1, 2]),
]

SHAPE = FusedShape(num_experts=8, top_k=3, hidden=512, intermediate=384, max_tokens=160)


def on_ranks(one_gpu: OneGpu, ranks: int, function: Callable[..., None], *args: Any) -> None:
    """``function(group, *args)``; the only rank has no group."""
    if ranks == 1:
        function(None, *args)
    else:
        one_gpu.run(ranks, function, *args)


class Layer:
    """A buffer of one rank, the weights of its experts, and what the statistics must be."""

    def __init__(self, given: Any, shape: FusedShape = SHAPE, seed: int = 0) -> None:
        self.shape, self.group = shape, as_group(given)
        self.buffer = open_buffer(shape, given)
        assert self.buffer.x.is_cuda
        self.weights = weights_of(shape, seed)
        part = self.weights.shard(self.group.rank, self.group.size)
        self.pairs = pairs_of(weights_there(part))
        self.slots = torch.zeros(part.experts, dtype=torch.int32, device="cpu")
        self.statistics = self.slots.cuda()
        wait()

    def call(self, y: torch.Tensor, clamp: float | None = None) -> None:
        deep_gemm.fp8_mega_moe(y, *self.pairs, self.buffer, self.statistics, activation_clamp=clamp)

    def run(self, call: FusedTokens, clamp: float | None = None) -> torch.Tensor:
        """The result of a call of the GPU's tensors."""
        write(self.buffer, call)
        y = torch.full_like(call.x, float("nan"))
        self.call(y, clamp)
        return y

    def count(self, call: FusedTokens, calls: int = 1) -> None:
        """Adds to what the statistics must be. Collective."""
        self.slots += calls * slots_here(self.group, call, self.shape.num_experts)

    def check(self, call: FusedTokens, clamp: float | None = None) -> torch.Tensor:
        """The result of a call of the CPU's tensors, which is right. Collective."""
        (mine,) = all_there(self.group, [call])
        y = self.run(mine, clamp)
        wait()
        shape = dataclasses.replace(self.shape, activation_clamp=clamp)
        assert difference(y.cpu(), expected(shape, call, self.weights)) < CLOSE
        self.count(call)
        self.check_statistics()
        return y

    def check_statistics(self) -> None:
        wait()
        assert torch.equal(self.statistics.cpu(), self.slots)

    def destroy(self) -> None:
        """Raises what a layer of the buffer has found wrong."""
        wait()
        self.buffer._layer.check()
        meet(self.group)
        self.buffer.destroy()


# ---- results ------------------------------------------------------------------------------------


def _geometry(given: Any, seed: int) -> None:
    draw = random.Random(seed)
    size = as_group(given).size
    shape = FusedShape(
        num_experts=size * draw.choice([1, 3, 5]),
        top_k=draw.choice([1, 2, 6, 8]),
        hidden=128 * draw.choice([1, 3, 9]),
        intermediate=128 * draw.choice([1, 2, 3]),
        max_tokens=draw.choice([1, 20, 200]),
    )
    clamp = draw.choice([None, 0.25, 10])
    layer = Layer(given, shape, seed)
    for number in range(3):
        counts = [draw.choice([0, 1, shape.max_tokens]) for _ in range(size)]
        rank = layer.group.rank
        layer.check(tokens_of(shape, counts[rank], TOKENS + number * 10 + rank), clamp)
    layer.destroy()


@pytest.mark.parametrize("seed", range(3))
def test_random_geometries(one_gpu: OneGpu, ranks: int, seed: int) -> None:
    on_ranks(one_gpu, ranks, _geometry, seed)


def _repeated(given: Any) -> None:
    layer = Layer(given)
    rank = layer.group.rank
    calls = [tokens_of(SHAPE, n, TOKENS + n + rank) for n in (160, rank, 7, 129)]
    ys = [layer.check(call) for call in calls]
    for call in calls:
        layer.count(call, 500)
    calls = all_there(layer.group, calls)
    differs = torch.zeros((), dtype=torch.int32, device="cuda")
    for number in range(500):
        for call, y in zip(calls, ys, strict=True):
            again = layer.run(call)
            differs += (again.view(torch.int16) != y.view(torch.int16)).any().int()
        if number % 8 == 0:
            wait()
    layer.check_statistics()
    assert int(differs) == 0
    layer.destroy()


def test_calls_into_one_buffer_give_the_same_bits(one_gpu: OneGpu, ranks: int) -> None:
    on_ranks(one_gpu, ranks, _repeated)


def _clamped(given: Any) -> None:
    layer = Layer(given)
    call = tokens_of(SHAPE, 50, TOKENS + layer.group.rank)
    clamps = [0.5, 0.25, None, 0.5, 0.25]
    ys = [layer.check(call, clamp).cpu() for clamp in clamps]
    for clamp, y in zip(clamps, ys, strict=True):
        assert torch.equal(y, ys[clamps.index(clamp)])
    assert difference(ys[0], ys[1]) > 0.01
    layer.destroy()


def test_clamps_may_differ_between_calls(one_gpu: OneGpu, ranks: int) -> None:
    on_ranks(one_gpu, ranks, _clamped)


# ---- graphs -------------------------------------------------------------------------------------


def _captured(given: Any) -> None:
    layer = Layer(given)
    rank = layer.group.rank
    calls = [tokens_of(SHAPE, 90, TOKENS + 10 * n + rank) for n in range(3)]
    ys = [layer.check(call, 0.5) for call in calls]
    for call in calls:
        layer.count(call, 4 * 2)
    calls = [there(call) for call in calls]
    out = torch.empty_like(calls[0].x)

    def twice() -> torch.Tensor:
        for _ in range(2):
            layer.call(out, 0.5)
        return out

    graph, _ = capture(layer.group, twice)
    meet(layer.group)
    for _ in range(4):
        for call, y in zip(calls, ys, strict=True):
            write(layer.buffer, call)
            out.fill_(float("nan"))
            graph.replay()
            wait()
            assert torch.equal(out.cpu(), y.cpu())
    layer.check_statistics()
    layer.destroy()
    del graph


def test_graphs_replay_with_what_is_in_the_buffer(one_gpu: OneGpu, ranks: int) -> None:
    on_ranks(one_gpu, ranks, _captured)
