"""The MoE layer through FusedMoE on a GPU, also in a CUDA graph, against the exact reference."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import fanfold
from fanfold.errors import UsageError
from fanfold.fused_moe import ExpertWeights, difference, reference
from fanfold.nn import MoE, MoEOptions
from tests.gpu.fused_moe_rounds import CLOSE

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300), pytest.mark.usefixtures("hopper")]

EXPERTS, TOP_K, HIDDEN, INTERMEDIATE, TOKENS = 8, 3, 512, 384, 100
OPTIONS = MoEOptions(dtype=torch.bfloat16)


@pytest.fixture
def moe() -> Iterator[fanfold.FusedMoE]:
    with fanfold.FusedMoE(
        num_experts=EXPERTS, top_k=TOP_K, hidden=HIDDEN, intermediate=INTERMEDIATE,
        max_tokens=TOKENS,
    ) as moe:  # fmt: skip
        assert moe.backend == "cuda"
        yield moe
        moe.check()


def tokens_of(seed: int) -> torch.Tensor:
    generator = torch.Generator("cpu").manual_seed(seed)
    return torch.randn((TOKENS, HIDDEN), generator=generator).bfloat16().cuda()


def check(layer: MoE, x: torch.Tensor, out: torch.Tensor) -> None:
    """``out`` is what the layer must give for ``x`` with its weights as they are now."""
    indices, weights, _ = layer.router(x)
    experts = ExpertWeights.quantize(layer.w_in.detach(), layer.w_out.detach())
    assert difference(out, reference(x, indices, weights, experts)) < CLOSE


@torch.no_grad()
def test_a_graph_holds_the_layer(moe: fanfold.FusedMoE) -> None:
    layer = MoE(HIDDEN, INTERMEDIATE, EXPERTS, TOP_K, dispatcher=moe, options=OPTIONS)
    x = tokens_of(1)
    check(layer, x, layer(x))
    layer.w_in.mul_(2)
    check(layer, x, layer(x))
    layer.w_out.mul_(2)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph), pytest.raises(UsageError, match=r"layer\.quantize_experts"):
        layer(x)
    layer.quantize_experts()
    layer.statistics.reset()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = layer(x)
    for seed in (2, 3):
        x.copy_(tokens_of(seed))
        graph.replay()
        check(layer, x, out)
    layer.w_in.mul_(-0.5)
    layer.quantize_experts()
    graph.replay()
    check(layer, x, out)
    assert layer.statistics.tokens == 3 * TOKENS
    assert int(layer.statistics.expert_rows.sum()) == 3 * TOKENS * TOP_K
    layer.statistics.reset()
    graph.replay()
    layer(x)
    assert layer.statistics.tokens == 2 * TOKENS
    assert int(layer.statistics.expert_rows.sum()) == 2 * TOKENS * TOP_K


@torch.no_grad()
def test_a_pass_does_not_wait_for_the_gpu(moe: fanfold.FusedMoE) -> None:
    layer = MoE(HIDDEN, INTERMEDIATE, EXPERTS, TOP_K, dispatcher=moe, options=OPTIONS)
    x = tokens_of(1)
    layer(x)
    torch.cuda.set_sync_debug_mode("error")
    try:
        out = layer(x)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    check(layer, x, out)
