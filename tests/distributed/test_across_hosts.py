"""Both modes between hosts, of which this machine acts as several. The oracles are those of one
host; that of high throughput rounds the sums of other hosts (docs/across_hosts.md)."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

import fanfold
from fanfold import _core
from fanfold.deep_ep import Buffer, get_physical_domain_size
from fanfold.errors import (
    ArgumentError,
    FanfoldError,
    PeerRefused,
    PeerTimeout,
    TransportError,
    UnavailableError,
)
from fanfold.group import as_group
from fanfold.launch import RankPool
from fanfold.thread_ranks import ThreadRanks
from tests.distributed import test_high_throughput, test_low_latency
from tests.distributed.routings import random_case
from tests.environment import environment

PLACES = [(2, 2), (2, 4), (4, 4), (3, 6)]  # hosts, ranks
NETWORKS = ["libfabric:tcp", "libfabric:shm", "loopback", "loopback:7"]

Pools = Callable[[int], ThreadRanks]

pytestmark = pytest.mark.one_host  # the tests say themselves on how many hosts they run


def need(network: str) -> None:
    """Skips without libfabric, unless the environment says that it must be there."""
    if not network.startswith("libfabric"):
        return
    try:
        _core.libfabric_version()
    except UnavailableError:
        if os.environ.get("REQUIRE_LIBFABRIC") == "ON":
            raise
        pytest.skip("libfabric is not installed")


def threads(ranks: int) -> ThreadRanks:
    return ThreadRanks(ranks, timeout_s=100.0)


@pytest.fixture(params=NETWORKS)
def network(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """What carries between hosts."""
    name: str = request.param
    need(name)
    monkeypatch.setenv("FANFOLD_NETWORK", name)
    return name


def open_mode(group: object, **changes: Any) -> fanfold.LowLatency:
    sizes = {"num_experts": 4 * as_group(group).size, "top_k": 2, "hidden": 64, "max_tokens": 8}
    given = {**sizes, "config": fanfold.Config.resolve(**{"timeout_s": 20.0, **changes})}
    return fanfold.LowLatency(**given, group=group)


def rows_of(rank: int, experts: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator(device="cpu").manual_seed(rank)
    x = torch.randn(8, 64, generator=generator, device="cpu", dtype=torch.float32).bfloat16()
    idx = torch.rand(8, experts, generator=generator, device="cpu").topk(2).indices
    return x, idx, torch.rand(8, 2, generator=generator, device="cpu", dtype=torch.float32)


@pytest.mark.parametrize(("hosts", "ranks"), PLACES)
def test_low_latency_gives_what_one_host_gives(
    network: str, hosts: int, ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FANFOLD_HOSTS", str(hosts))
    for number, dtype in enumerate(("bf16", "fp8")):
        case = test_low_latency.Case(
            ranks=ranks,
            experts_per_rank=5,
            top_k=4,
            hidden=144,
            tokens=tuple((11, 0, 7, 16)[rank % 4] for rank in range(ranks)),
            max_tokens=16,
            dispatch_dtype=dtype,
            scale_format="float32",
            routing=("spread", "duplicates")[number],
            weighted=True,
            logfmt=False,
            seed=number,
        )
        test_low_latency._check(case, threads)


@pytest.mark.parametrize(("hosts", "ranks"), PLACES)
def test_high_throughput_in_both_orders_of_rows(
    network: str, hosts: int, ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FANFOLD_HOSTS", str(hosts))
    numbers = random.Random(ranks)
    cases = [random_case(numbers, ranks) for _ in range(6)]
    assert threads(ranks).run(test_high_throughput.run_cases, cases) == [6] * ranks


def round_of_deep_ep(
    group: dist.ProcessGroup,
) -> tuple[tuple[int, int], torch.Tensor, torch.Tensor]:
    """The domain, and what dispatch, a cached dispatch and combine give."""
    rank, ranks = as_group(group).rank, as_group(group).size
    x, topk_idx, topk_weights = rows_of(rank, 4 * ranks)
    with environment(FANFOLD_TIMEOUT_S="20"):
        buffer = Buffer(group, 1 << 20, explicitly_destroy=True)
    try:
        per_rank, per_host, per_expert, in_rank, _ = buffer.get_dispatch_layout(topk_idx, 4 * ranks)
        rows, _, _, _, handle, _ = buffer.dispatch(
            x,
            topk_idx=topk_idx,
            topk_weights=topk_weights,
            num_tokens_per_rank=per_rank,
            num_tokens_per_rdma_rank=per_host,
            is_token_in_rank=in_rank,
            num_tokens_per_expert=per_expert,
        )
        again = buffer.dispatch(x, handle=handle)[0]
        assert torch.equal(rows, again)
        out, _, _ = buffer.combine(rows, handle)
        copies = in_rank.sum(1, keepdim=True)
        return get_physical_domain_size(group), out.float(), x.float() * copies
    finally:
        buffer.destroy()


@pytest.mark.parametrize("hosts", [1, 2, 4])
def test_deep_ep(network: str, hosts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FANFOLD_HOSTS", str(hosts))
    for domain, out, wanted in threads(4).run(round_of_deep_ep):
        assert domain == (hosts, 4 // hosts)
        torch.testing.assert_close(out, wanted, rtol=2**-7, atol=0.0)


def refused(group: dist.ProcessGroup) -> list[str]:
    """The errors of a call that rank 0 refuses; the next one must be right."""
    with open_mode(group) as ep:
        x, idx, weights = rows_of(ep.rank, 4 * ep.ranks)
        errors = []
        try:
            ep.dispatch(x, idx + (99 if ep.rank == 0 else 0), weights)
        except (ArgumentError, PeerRefused) as error:
            errors.append(f"{type(error).__name__}: {error}")
        received = ep.dispatch(x, idx, weights)
        assert int(received.tokens_per_expert.sum()) > 0
        ep.combine(received.tokens, received)
        return errors


def test_a_refusal_reaches_other_hosts(network: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FANFOLD_HOSTS", "2")
    first, *others = threads(4).run(refused)
    assert first[0].startswith("ArgumentError: topk_idx")
    for errors in others:
        assert errors[0].startswith("PeerRefused")
        assert "rank 0" in errors[0]
        assert "topk_idx" in errors[0]


def one_leaves(group: dist.ProcessGroup) -> str:
    """The error of a rank whose peer on another host has ended in the middle."""
    ep = open_mode(group, late_peers="raise", timeout_s=6.0)
    x, idx, weights = rows_of(ep.rank, 4 * ep.ranks)
    ep.combine((received := ep.dispatch(x, idx, weights)).tokens, received)
    try:
        if ep.rank == 1:
            return "left"
        for _ in range(3):
            ep.dispatch(x, idx, weights)
        return "went on"
    except (PeerTimeout, TransportError) as error:
        return str(error)
    finally:
        ep.close()


@pytest.mark.parametrize("provider", ["libfabric:tcp", "loopback"])
def test_a_rank_that_has_left_is_named(provider: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FANFOLD_HOSTS", "2")
    monkeypatch.setenv("FANFOLD_NETWORK", provider)
    need(provider)
    said, left = threads(2).run(one_leaves)
    assert left == "left"
    assert "rank 1" in said


def round_of_processes(group: dist.ProcessGroup) -> tuple[str, torch.Tensor]:
    with environment(FANFOLD_HOSTS="2", FANFOLD_NETWORK="libfabric:tcp"), open_mode(group) as ep:
        x, idx, weights = rows_of(ep.rank, 4 * ep.ranks)
        received = ep.dispatch(x, idx, weights)
        out = ep.combine(received.tokens, received)
        return ep.memory.network, (out.float() - x.float() * weights.sum(1, keepdim=True)).abs()


def test_processes(process_pools: Callable[[int], RankPool]) -> None:
    need("libfabric:tcp")
    for network, off in process_pools(4).run(round_of_processes):
        assert network.startswith("libfabric:")
        assert float(off.max()) < 0.1


def construction(group: dist.ProcessGroup, network: str, hosts: list[int]) -> str:
    settings = {"FANFOLD_HOSTS": str(hosts[as_group(group).rank]), "FANFOLD_NETWORK": network}
    with environment(**settings):
        try:
            open_mode(group).close()
        except FanfoldError as error:
            return f"{type(error).__name__}: {error}"
    return ""


@pytest.mark.parametrize(
    ("network", "hosts", "said"),
    [
        ("loopback", [2, 2], "the setting network is 'loopback' (from environment), which"),
        ("libfabric:efa", [2, 2], "A network is needed because the setting hosts is 2"),
        ("libfabric", [2, 1], "ArgumentError: hosts is"),
    ],
)
def test_what_cannot_be_is_said_by_all(
    process_pools: Callable[[int], RankPool], network: str, hosts: list[int], said: str
) -> None:
    need(network)
    for error in process_pools(2).run(construction, network, hosts):
        assert said in error


def layer(group: dist.ProcessGroup, timeout_s: float) -> fanfold.HighThroughput:
    return fanfold.HighThroughput(
        num_experts=4 * as_group(group).size,
        top_k=2,
        hidden=64,
        max_tokens=8,
        config=fanfold.Config.resolve(timeout_s=timeout_s),
        group=group,
    )


def there_and_back(mode: fanfold.HighThroughput) -> None:
    x, idx, weights = rows_of(mode.rank, 4 * mode.ranks)
    received = mode.dispatch(x, idx, weights)
    mode.combine(received.tokens, received)


def dropped(group: dist.ProcessGroup) -> None:
    """A layer that nobody closes, so that peers may still wait when this rank drops it."""
    there_and_back(layer(group, 20.0))


@pytest.mark.parametrize("provider", ["libfabric:tcp", "loopback:{}"])
def test_a_layer_that_is_dropped_delivers_what_it_has_sent(
    provider: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FANFOLD_HOSTS", "2")
    need(provider)
    for seed in range(15):
        monkeypatch.setenv("FANFOLD_NETWORK", provider.format(seed))
        threads(4).run(dropped)


def without_a_gateway(group: dist.ProcessGroup) -> tuple[tuple[int, ...], list[int]]:
    """The ranks that are not masked, where rank 3 does not come, and those that get no tokens."""
    config = fanfold.Config.resolve(timeout_s=0.5, late_peers="mask")
    with fanfold.HighThroughput(
        group, num_experts=16, top_k=2, hidden=64, max_tokens=8, config=config
    ) as mode:
        for _ in range(2 if mode.rank != 3 else 0):
            there_and_back(mode)
        as_group(group).all_gather(None)
        # Two tokens for the experts of each rank.
        missing = mode.missing(torch.arange(16, dtype=torch.int64, device="cpu").reshape(8, 2))
        without = [rank for rank in range(4) if missing[2 * rank].any()]
        return mode.live_ranks(), without


# Rank 3 would bring the rows of rank 1 to rank 2, and their sums back.
@pytest.mark.filterwarnings("ignore::fanfold.LatePeerWarning")
def test_those_whose_rows_a_late_gateway_brings_are_not_late(
    network: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FANFOLD_HOSTS", "2")
    live = (0, 1, 2)
    assert threads(4).run(without_a_gateway) == [
        (live, [3]),
        (live, [2, 3]),
        (live, [3]),
        ((*live, 3), []),
    ]


def dropped_by_one(group: dist.ProcessGroup) -> None:
    first = layer(group, 20.0)
    there_and_back(first)
    with layer(group, 3.0) as second:
        if second.rank == 0:
            del first  # its peers still have it, so that closing it waits for them
        there_and_back(second)


@pytest.mark.parametrize("network", ["libfabric:tcp", "loopback"])
def test_dropping_a_layer_holds_up_no_call_of_another(
    network: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    need(network)
    monkeypatch.setenv("FANFOLD_HOSTS", "2")
    monkeypatch.setenv("FANFOLD_NETWORK", network)
    threads(4).run(dropped_by_one)
