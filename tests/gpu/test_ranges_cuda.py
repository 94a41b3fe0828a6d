"""Ranges and metrics of calls on GPUs: eager, compiled and captured in a CUDA graph."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

import fanfold
from fanfold.group import as_group
from tests.gpu.conftest import GpuPools

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]


def layer_of(group: dist.ProcessGroup, ranges: bool) -> tuple[fanfold.LowLatency, Any]:
    """A layer, and a function that dispatches, receives through a hook and combines."""
    ranks = as_group(group).size
    sizes = {"num_experts": 4 * ranks, "top_k": 2, "hidden": 512, "max_tokens": 16}
    config = fanfold.Config.resolve(ranges=ranges, share_gpus=True)
    ep = fanfold.LowLatency(**sizes, config=config, group=group)
    x = torch.ones((16, 512), dtype=torch.bfloat16, device=ep.device)
    idx = torch.arange(32, dtype=torch.int64, device=ep.device).view(16, 2) % ep.num_experts
    weights = torch.ones((16, 2), dtype=torch.float32, device=ep.device)

    def call() -> torch.Tensor:
        received, hook = ep.dispatch(x, idx, weights, return_hook=True)
        hook()
        return ep.combine(received.tokens, received)

    return ep, call


def eager_captured_and_compiled(group: dist.ProcessGroup, ranges: bool) -> list[Any]:
    """The sums of the three, and the calls that were counted."""
    ep, call = layer_of(group, ranges)
    with ep:
        eager = call()
        ep.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = call()
        graph.replay()
        ep.synchronize()
        compiled = torch.compile(call, backend="aot_eager")()
        ep.synchronize()
        sums = [float(out.float().sum()) for out in (eager, captured, compiled)]
        return [*sums, ep.metrics()]


@pytest.mark.parametrize("ranges", [False, True])
def test_calls_give_the_same_with_ranges_and_are_counted(
    gpus: GpuPools, ranks: int, ranges: bool
) -> None:
    for *sums, measured in gpus.run(ranks, eager_captured_and_compiled, ranges):
        assert sums == [2.0 * 16 * 512] * 3
        # On GPUs there is nothing but the calls; a replay is none.
        assert measured == {"calls_total": {"dispatch": 3, "combine": 3}}
