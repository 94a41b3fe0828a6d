"""High throughput of GPUs on several hosts, which the ranks of one machine act as: rings, proxies
and networks are the real ones. The tests are those of one host, so every bit is as there."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

import fanfold
from fanfold.launch import RankPool
from tests.distributed import test_functional as calls
from tests.gpu import test_deep_ep_elastic_cuda as elastic
from tests.gpu import test_deep_ep_high_throughput_cuda as buffers
from tests.gpu import test_deep_ep_hybrid_cuda as hybrid
from tests.gpu import test_high_throughput_cuda as rounds
from tests.gpu import test_training_cuda as training
from tests.gpu.hosts import (
    NETWORKS,
    Run,
    call_after_a_kill,
    check_ended,
    patience,
    two_hosts,
    with_rows_apart,
)
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
    run_on_hosts(most_ranks, rounds._rounds, [case, case], rounds.FEW_SLOTS)


def test_rows_apart(run_by_proxies: Run, most_ranks: int) -> None:
    case = case_of(most_ranks, biases=1)
    run_by_proxies(most_ranks, with_rows_apart, rounds._rounds, [case, case], ROOMY_RING)


def test_two_ranks_on_each_host(run_on_hosts: Run) -> None:
    """Rows come from the same host and from the other at once."""
    run_on_hosts(4, rounds._rounds, [case_of(4)] * 2, ROOMY_RING)


def test_refusals(run_on_hosts: Run, most_ranks: int) -> None:
    run_on_hosts(most_ranks, rounds._refused, case_of(most_ranks), 3000)


SIZES = {"num_experts": 16, "top_k": 4, "hidden": 1024, "max_tokens": 256}
ROOM = 4096  # rows of a dispatch


def _opened(group: dist.ProcessGroup, timeout_s: float) -> fanfold.HighThroughput:
    config = fanfold.Config.resolve(backend="cuda", timeout_s=timeout_s)
    return fanfold.HighThroughput(group, **SIZES, config=config)


def _batch(rank: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Tokens, their experts and weights."""
    device = own_device()
    numbers = torch.Generator(device).manual_seed(rank)
    x = torch.randn(256, 1024, dtype=torch.bfloat16, device=device, generator=numbers)
    idx = torch.stack([torch.randperm(16, device=device, generator=numbers)[:4]
                       for _ in range(256)])  # fmt: skip
    return x, idx, torch.ones(256, 4, dtype=torch.float32, device=device)


def _captured(group: dist.ProcessGroup) -> int:
    """Replays of a graph that holds a routing, its dispatch and its combine."""
    given = _batch(dist.get_rank(group))
    with _opened(group, 60.0) as ep:

        def turn() -> torch.Tensor:
            received = ep.dispatch(*given, capacity=ROOM)
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


def _killed(group: dist.ProcessGroup, network: str, phase: str) -> tuple[Exception | None, float]:
    """What a rank sees when another one is killed, and after how long."""
    rank = dist.get_rank(group)
    given = _batch(rank)
    with two_hosts(group, network):
        ep = _opened(group, patience(network))
    received = ep.dispatch(*given, capacity=ROOM)
    ep.synchronize()

    def call() -> None:
        if phase == "plan":
            ep.dispatch(*given)  # waits for its counts
        elif phase == "dispatch":
            ep.dispatch(given[0], previous=received)
        else:
            ep.combine(received.tokens, received)
        ep.synchronize()

    return call_after_a_kill(group, call)


@pytest.mark.parametrize("network", NETWORKS)
@pytest.mark.parametrize("phase", ["plan", "dispatch", "combine"])
def test_a_killed_rank_ends_the_others(most_ranks: int, network: str, phase: str) -> None:
    with RankPool(most_ranks, timeout_s=100.0) as pool:
        outcomes = pool.outcomes(_killed, network, phase)
    check_ended(outcomes)


@pytest.mark.parametrize("number", [2, 5])
def test_gradients(run_on_hosts: Run, most_ranks: int, number: int) -> None:
    case = training._case(calls.CASES[number], most_ranks)
    training.check_gradients(case, run_on_hosts(most_ranks, training._gradients, case))


# ---- DeepEP's interfaces ------------------------------------------------------------------------


@pytest.mark.parametrize("program", ["_bias", "_asynchronous", "_without_top_k"])
def test_programs_of_a_buffer(run_on_hosts: Run, most_ranks: int, program: str) -> None:
    run_on_hosts(most_ranks, buffers._conformance, program)


@pytest.mark.parametrize("program", ["_plain", "_expanded"])
def test_programs_of_an_elastic_buffer(run_on_hosts: Run, most_ranks: int, program: str) -> None:
    case = elastic.small_case(most_ranks)
    run_on_hosts(most_ranks, elastic._conformance, program, case, case, True, 8)


def test_fp8_of_an_elastic_buffer(run_on_hosts: Run, most_ranks: int) -> None:
    case = elastic.small_case(most_ranks)
    run_on_hosts(most_ranks, elastic._conformance, "_fp8", case, True, True)


@pytest.mark.parametrize("number", [0, 1])
def test_a_hybrid_buffer(run_on_hosts: Run, most_ranks: int, number: int) -> None:
    run_on_hosts(most_ranks, hybrid._conformance, "_round", hybrid.layers_of(most_ranks)[number])
