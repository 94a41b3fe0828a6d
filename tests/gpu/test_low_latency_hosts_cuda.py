"""Low latency of GPUs on several hosts, which the ranks of one machine act as: rings, proxies and
networks are the real ones, and so is NCCL, over the plugin for GIN. The tests are those of one
host, so every bit is what it is there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch.distributed as dist

import fanfold
from fanfold.launch import RankPool
from tests.conformance.test_deep_ep_low_latency import FORMATS
from tests.gpu import test_cuda_faults as faults
from tests.gpu import test_deep_ep_cuda as deep_ep
from tests.gpu import test_deep_ep_overlap_cuda as overlap
from tests.gpu import test_graphs_and_streams as graphs
from tests.gpu import test_low_latency_cuda as rounds
from tests.gpu.conftest import GpuPools
from tests.gpu.hosts import (
    NETWORKS,
    Run,
    call_after_a_kill,
    check_ended,
    on_hosts,
    patience,
    two_hosts,
    with_rows_apart,
)
from tests.gpu.support import Case, case_of, open_layer, own_device, tokens_of

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]


def _placed(group: dist.ProcessGroup, case: Case) -> tuple[str, str, set[int]]:
    """The device and the network, and to which peers messages have gone."""
    mine = tokens_of(case, dist.get_rank(group)).to(own_device())
    with open_layer(group, case) as ep:
        received = ep.dispatch(mine.x, mine.topk_idx, mine.topk_weights)
        ep.combine(received.tokens, received)
        ep.synchronize()
        sent = ep.metrics()["channel_sent_messages_total"]
        network: str = ep.memory.network  # type: ignore[attr-defined]
        return ep.device.type, network, {peer for peer, count in sent.items() if count}


def test_other_hosts_are_reached_through_the_network(run_by_proxies: Run, most_ranks: int) -> None:
    placed = run_by_proxies(most_ranks, _placed, case_of(most_ranks))
    for rank, (device, network, peers) in enumerate(placed):
        host = [peer * 2 // most_ranks for peer in range(most_ranks)]
        assert device == "cuda"
        assert network.startswith("libfabric:")
        assert peers == {peer for peer in range(most_ranks) if host[peer] != host[rank]}


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"dtype": "fp8"},
        {"dtype": "fp8", "scale_format": "ue8m0", "routing": "duplicates"},
        {"logfmt": True, "hidden": 768},
        {"weighted": False},
        {"hidden": 7168, "dtype": "fp8", "experts_per_rank": 64, "top_k": 8},
        {"hidden": 1024, "dtype": "fp8", "experts_per_rank": 128, "top_k": 22},
    ],
    ids=str,
)
def test_rounds(run_on_hosts: Run, most_ranks: int, changes: dict[str, Any]) -> None:
    run_on_hosts(most_ranks, rounds._round, case_of(most_ranks, **changes))


@pytest.mark.parametrize("dtype", ["bf16", "fp8"])
def test_two_ranks_on_each_host(run_on_hosts: Run, dtype: str) -> None:
    """Rows come from the same host and from the other at once."""
    run_on_hosts(4, rounds._round, case_of(4, dtype=dtype))


@pytest.mark.parametrize(
    "changes", [{}, {"dtype": "fp8"}, {"logfmt": True, "hidden": 768}], ids=str
)
def test_rows_apart(run_by_proxies: Run, most_ranks: int, changes: dict[str, Any]) -> None:
    case = case_of(most_ranks, **changes)
    run_by_proxies(most_ranks, with_rows_apart, rounds._round, case)
    run_by_proxies(most_ranks, with_rows_apart, graphs._captured_rounds, case, 3, False)


@pytest.mark.parametrize("number", range(6))
def test_any_geometry(run_on_hosts: Run, most_ranks: int, number: int) -> None:
    case = rounds.random_case(number, most_ranks)
    run_on_hosts(case.ranks, rounds._round, case)


@pytest.mark.parametrize("dtype", ["bf16", "fp8"])
def test_hooks(run_on_hosts: Run, most_ranks: int, dtype: str) -> None:
    run_on_hosts(most_ranks, rounds._two_in_flight, case_of(most_ranks, dtype=dtype))
    run_on_hosts(most_ranks, rounds._work_between, case_of(most_ranks, dtype=dtype))


@pytest.mark.parametrize("hooks", [False, True])
def test_graphs(run_on_hosts: Run, most_ranks: int, hooks: bool) -> None:
    run_on_hosts(most_ranks, graphs._captured_rounds, case_of(most_ranks, dtype="fp8"), 3, hooks)


@pytest.mark.parametrize("dtype", ["bf16", "fp8"])
def test_many_rounds(run_on_hosts: Run, most_ranks: int, dtype: str) -> None:
    case = case_of(most_ranks, hidden=512, max_tokens=24, experts_per_rank=8, top_k=6, dtype=dtype)
    assert run_on_hosts(most_ranks, rounds._many_rounds, case, 2_000, 1) == [0] * most_ranks


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_ten_thousand_rounds(run_on_hosts: Run, most_ranks: int) -> None:
    case = case_of(most_ranks, hidden=512, max_tokens=24, experts_per_rank=8, top_k=6, dtype="fp8")
    for _ in range(5):
        assert run_on_hosts(most_ranks, rounds._many_rounds, case, 2_000, 1) == [0] * most_ranks


# ---- the interface of DeepEP --------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["", "async", "hook"])
@pytest.mark.parametrize("form", FORMATS)
def test_rounds_of_a_buffer(run_on_hosts: Run, most_ranks: int, form: str, mode: str) -> None:
    run_on_hosts(most_ranks, deep_ep._round_trip, deep_ep.case_of(most_ranks), form, mode)


@pytest.mark.parametrize("mode", ["", "hook"])
@pytest.mark.parametrize("by_expert", [False, True])
def test_outputs_that_are_still_being_written(
    run_on_hosts: Run, most_ranks: int, by_expert: bool, mode: str
) -> None:
    run_on_hosts(most_ranks, overlap._overlap, deep_ep.case_of(most_ranks), by_expert, mode)


@pytest.mark.parametrize("mode", ["", "hook"])
def test_graphs_of_a_buffer(run_on_hosts: Run, most_ranks: int, mode: str) -> None:
    run_on_hosts(most_ranks, deep_ep._captured, deep_ep.case_of(most_ranks), mode)


# ---- what goes wrong ----------------------------------------------------------------------------


@pytest.mark.parametrize("phase", ["dispatch", "combine"])
@pytest.mark.parametrize("network", NETWORKS)
def test_a_rank_that_never_calls(
    of_network: Callable[[str], GpuPools], most_ranks: int, network: str, phase: str
) -> None:
    """The error of a rank on another host says over which way, if the network has addresses."""
    args = (case_of(most_ranks), phase)
    pools = of_network(network)
    outcomes = pools.run(most_ranks, on_hosts, network, faults._never_comes, args)
    for rank, (error, _, after) in enumerate(outcomes):
        if rank == faults.BAD:
            continue
        assert isinstance(error, fanfold.PeerTimeout)
        assert (error.rank, error.peer) == (rank, faults.BAD)
        assert phase in error.phase
        elsewhere = rank * 2 // most_ranks != faults.BAD * 2 // most_ranks
        assert bool(error.path) == (elsewhere and network == "libfabric:tcp")
        assert isinstance(after, fanfold.FanfoldError)


def test_late_ranks_are_masked(run_on_hosts: Run, most_ranks: int) -> None:
    assert all(right for right, _ in run_on_hosts(most_ranks, faults._mask, case_of(most_ranks)))


def test_bad_input(run_on_hosts: Run, most_ranks: int) -> None:
    seen = run_on_hosts(most_ranks, faults._bad_dispatch, case_of(most_ranks), "shape")
    assert isinstance(seen[faults.BAD], fanfold.ArgumentError)
    assert sum(isinstance(error, fanfold.PeerRefused) for error in seen) == most_ranks - 1


def _killed(
    group: dist.ProcessGroup, case: Case, network: str, phase: str
) -> tuple[Exception | None, float]:
    """What a rank sees when another one is killed, and after how long."""
    rank = dist.get_rank(group)
    mine = tokens_of(case, rank).to(own_device())
    with two_hosts(group, network):
        ep = open_layer(group, case, timeout_s=patience(network))
    received = ep.dispatch(mine.x, mine.topk_idx, mine.topk_weights)
    ep.synchronize()

    def call() -> None:
        if phase == "combine":
            ep.combine(received.tokens, received)
        ep.dispatch(mine.x, mine.topk_idx, mine.topk_weights)
        ep.synchronize()

    return call_after_a_kill(group, call)


@pytest.mark.parametrize("network", NETWORKS)
@pytest.mark.parametrize("phase", ["dispatch", "combine"])
def test_a_killed_rank_ends_the_others(most_ranks: int, network: str, phase: str) -> None:
    with RankPool(most_ranks, timeout_s=100.0) as pool:
        outcomes = pool.outcomes(_killed, case_of(most_ranks), network, phase)
    check_ended(outcomes)
