"""High throughput of GPUs on several hosts, which the ranks of one machine act as: rings, proxies
and networks are the real ones. The tests are those of one host, so every bit is as there."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

import fanfold
from tests.gpu import test_high_throughput_cuda as rounds
from tests.gpu.hosts import Run
from tests.gpu.support import own_device
from tests.gpu.test_high_throughput_cuda import case_of

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

ROOMY_RING = 1 << 22


@pytest.mark.parametrize("style", ["spread", "one_rank", "none", "holes"])
def test_rounds(run_on_hosts: Run, most_ranks: int, style: str) -> None:
    case = case_of(most_ranks, style=style, biases=1)
    run_on_hosts(most_ranks, rounds._rounds, [case, case], ROOMY_RING)


def test_rounds_through_short_rings(run_on_hosts: Run, most_ranks: int) -> None:
    case = case_of(most_ranks, biases=1)
    run_on_hosts(most_ranks, rounds._rounds, [case, case], 4 * 8 * 1152)


def test_two_ranks_on_each_host(run_on_hosts: Run) -> None:
    """Rows come from the same host and from the other at once."""
    run_on_hosts(4, rounds._rounds, [case_of(4)] * 2, ROOMY_RING)


def test_refusals(run_on_hosts: Run, most_ranks: int) -> None:
    run_on_hosts(most_ranks, rounds._refused, case_of(most_ranks), 3000)


def _captured(group: dist.ProcessGroup) -> int:
    """Replays of a graph that holds a routing, its dispatch and its combine."""
    device, rank = own_device(), dist.get_rank(group)
    config = fanfold.Config.resolve(backend="cuda", timeout_s=60.0)
    sizes = {"num_experts": 16, "top_k": 4, "hidden": 1024, "max_tokens": 256}
    with fanfold.HighThroughput(group, **sizes, config=config) as ep:
        numbers = torch.Generator(device).manual_seed(rank)
        x = torch.randn(256, 1024, dtype=torch.bfloat16, device=device, generator=numbers)
        idx = torch.stack([torch.randperm(16, device=device, generator=numbers)[:4]
                           for _ in range(256)])  # fmt: skip
        weights = torch.ones(256, 4, dtype=torch.float32, device=device)

        def turn() -> torch.Tensor:
            received = ep.dispatch(x, idx, weights, capacity=4096)
            return ep.combine(received.tokens, received)

        wanted = turn().clone()
        ep.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = turn()
        wrong = 0
        for _ in range(5):
            out.fill_(torch.nan)
            graph.replay()
            torch.cuda.synchronize()
            wrong += int(not torch.equal(out, wanted))
        ep.check()
        return wrong


def test_graphs(run_on_hosts: Run, most_ranks: int) -> None:
    assert run_on_hosts(most_ranks, _captured) == [0] * most_ranks
