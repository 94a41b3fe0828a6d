"""Benches of both modes across hosts, of which this machine acts as several: they check what they
time, and say where the ranks were."""

from __future__ import annotations

import dataclasses
import json
import sys
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from fanfold.bench import run
from fanfold.bench.calls import Given
from fanfold.bench.check import CheckFailed, Expectation
from fanfold.bench.cuda_timing import BarrierAcrossHosts
from fanfold.bench.layouts import open_calls
from fanfold.bench.run import RankReport, bench_ranks
from fanfold.bench.settings import BenchSettings
from fanfold.cli.main import main
from fanfold.config import Config, in_environment
from fanfold.errors import ArgumentError, UnavailableError
from fanfold.group import as_group
from fanfold.launch import RankPool
from fanfold.memory.hosts import Hosts
from tests.distributed.test_across_hosts import NETWORKS, need, threads
from tests.distributed.test_cli import FANFOLD, TINY, fanfold

pytestmark = pytest.mark.one_host  # the tests say themselves on how many hosts they run

SMALL = BenchSettings(
    "low_latency", ranks=4, tokens=23, hidden=144, top_k=5, experts=12, iterations=2, warmup=1,
    backend="host", hosts=2,
)  # fmt: skip

# What has calls of its own: mode, face, and the layout and routing of high throughput.
CALLS: list[dict[str, Any]] = [
    {"mode": "low_latency", "face": "native"},
    {"mode": "low_latency", "face": "deep_ep"},
    {"mode": "high_throughput", "face": "native", "layout": "expert_major"},
    {"mode": "high_throughput", "face": "native", "layout": "expert_major", "routing": "cached"},
    {"mode": "high_throughput", "face": "native", "layout": "token_major"},
    {"mode": "high_throughput", "face": "deep_ep"},
]


def on_threads(points: list[BenchSettings]) -> list[list[RankReport]]:
    """The reports of all ranks."""
    with in_environment(points[0].overrides()):
        reports: list[list[RankReport]] = threads(points[0].ranks).run(bench_ranks, points)
    return reports


@pytest.mark.parametrize("calls", CALLS, ids=lambda calls: "-".join(calls.values()))
@pytest.mark.parametrize("network", NETWORKS)
def test_every_kind_of_call_is_checked_and_timed(network: str, calls: dict[str, Any]) -> None:
    need(network)
    points = [
        dataclasses.replace(SMALL, transport=network, dtype=dtype, **calls).on("host")
        for dtype in ("bf16", "fp8")
    ]
    for reports in on_threads(points):
        for report in reports:
            assert {n: tuple(t.shape) for n, t in report.microseconds.items()} == {
                "fanfold": (2, 3)
            }
            assert report.hosts.host == (0, 0, 1, 1)
            assert report.network.startswith(network.partition(":")[0])
            assert 0 < report.rows.between_hosts < report.rows.total


@pytest.mark.parametrize(("hosts", "ranks"), [(4, 4), (3, 6)])
@pytest.mark.parametrize("mode", ["low_latency", "high_throughput"])
def test_any_number_of_hosts(mode: Any, hosts: int, ranks: int) -> None:
    settings = dataclasses.replace(
        SMALL, mode=mode, ranks=ranks, hosts=hosts, transport="loopback:5"
    ).on("host")
    reports = [report for (report,) in on_threads([settings])]
    assert {report.hosts.count for report in reports} == {hosts}


def combined(group: Any, settings: BenchSettings, rounds_far: bool) -> str:
    """What the check says of a combine, with or without the rounding of other hosts' sums."""
    ranks = as_group(group)
    batches = [settings.workload().batch(rank) for rank in range(settings.ranks)]
    far = [[2, 3], [0, 1]][ranks.rank // 2]
    expectation = Expectation(
        batches, ranks.rank, settings.experts, False, [far] if rounds_far else ()
    )
    with closing(open_calls(group, settings)) as calls:
        brought = calls.dispatch(Given.of(expectation, calls.device, quantized=True))
        calls.check(brought, expectation)
        out = calls.combine(calls.outputs(brought, expectation), brought)
        try:
            calls.check_combined(out, expectation)
        except CheckFailed as failed:
            return str(failed)
    return ""


@pytest.mark.parametrize("layout", ["expert_major", "token_major"])
def test_high_throughput_rounds_sums_of_hosts_and_low_latency_does_not(layout: str) -> None:
    settings = dataclasses.replace(SMALL, mode="high_throughput", transport="loopback").on("host")
    settings = dataclasses.replace(settings, layout=layout, alignment=None)
    pool = threads(4)
    assert pool.run(combined, settings, True) == [""] * 4
    for said in pool.run(combined, settings, False):
        assert said.startswith("combined tokens: ")
    low_latency = dataclasses.replace(SMALL, transport="loopback")
    assert pool.run(combined, low_latency, False) == [""] * 4
    for said in pool.run(combined, low_latency, True):
        assert said.startswith("combined tokens: ")


@pytest.mark.parametrize("calls", [CALLS[1], CALLS[2], CALLS[5]], ids=["ll-deep_ep", "ht", "ht-ep"])
def test_the_baseline_runs_over_the_same_ranks(
    process_pools: Callable[[int], RankPool], calls: dict[str, Any]
) -> None:
    need("libfabric:tcp")
    settings = dataclasses.replace(SMALL, transport="libfabric:tcp", baseline=True, **calls)
    for (report,) in process_pools(4).run(bench_ranks, [settings.on("host")]):
        assert set(report.microseconds) == {"fanfold", "baseline"}
        assert report.network.startswith("libfabric:")


ARGUMENTS = (
    "--ranks 4 --tokens 16 --hidden 64 --top-k 2 --experts 8 --iterations 2 --warmup 1 "
    "--backend host"
)


@pytest.mark.parametrize("mode", ["low-latency", "high-throughput"])
def test_the_command_line_over_sockets(
    mode: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    need("libfabric:tcp")
    monkeypatch.setenv("FANFOLD_PROXY_THREADS", "2")
    path = tmp_path / "r.jsonl"
    asked = f"bench {mode} {ARGUMENTS} --hosts 2 --transport libfabric:tcp --baseline --json {path}"
    assert main(asked.split()) == 0
    (fields,) = map(json.loads, path.read_text().splitlines())
    assert (fields["hosts"], fields["ranks_per_host"], fields["proxy_threads"]) == (2, 2, 2)
    assert fields["transport"] in ("libfabric:tcp", "libfabric:net")
    assert fields["emulated_hosts"]
    assert fields["checked"]
    assert fields["ratio"] > 0
    assert 0 < fields["bytes_between_hosts"] < fields["bytes_total"]
    # At least a write and what tells of it, of each of two ranks to each of two.
    assert fields["messages"]["sent"] > 8
    assert fields["messages"]["transit_us"] > 0
    said = capsys.readouterr().out
    assert f"2 hosts of 2 ranks over {fields['transport']}" in said
    assert "MB between hosts" in said


def test_joined_ranks_may_be_on_several_hosts(tmp_path: Path) -> None:
    need("libfabric:tcp")
    path = tmp_path / "r.jsonl"
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone",
                "--nproc-per-node=2", "--no-python", *FANFOLD]  # fmt: skip
    options = [*TINY[2:], "--hosts", "2", "--transport", "libfabric:tcp", "--json", path]
    done = fanfold("bench", "high-throughput", *options, command=torchrun, FANFOLD_HOSTS="1")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("Checked against the oracle") == 1
    (fields,) = map(json.loads, path.read_text().splitlines())
    assert (fields["hosts"], fields["ranks_per_host"]) == (2, 1)


@pytest.mark.parametrize("face", ["native", "deep_ep"])
def test_the_command_line_over_loopback_has_ranks_that_are_threads(
    face: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run, "launch", mock.Mock(side_effect=AssertionError("processes started")))
    monkeypatch.setenv("FANFOLD_HOSTS", "4")
    monkeypatch.setenv("FANFOLD_NETWORK", "libfabric:shm")
    path = tmp_path / "r.jsonl"
    asked = f"bench high-throughput {ARGUMENTS} --face {face} --json {path}"
    assert main([*asked.split(), "--hosts", "2", "--transport", "loopback:3"]) == 0
    monkeypatch.setenv("FANFOLD_NETWORK", "loopback")
    assert main(asked.split()) == 0
    first, second = map(json.loads, path.read_text().splitlines())
    assert (first["hosts"], second["hosts"]) == (2, 4)
    assert {first["transport"], second["transport"]} == {"loopback"}


def test_a_transport_without_several_hosts_is_refused_by_all_ranks() -> None:
    settings = dataclasses.replace(SMALL, hosts=None, transport="loopback")
    with pytest.raises(ArgumentError, match=r"transport is 'loopback', .*left out on one host"):
        threads(2).run(bench_ranks, [dataclasses.replace(settings, ranks=2)])


def test_hosts_with_different_numbers_of_ranks_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    uneven = Hosts((0, 0, 1), 2, False, 1, "world", "rank 2 and rank 0 do not share memory", "")
    monkeypatch.setattr(run, "find_hosts", lambda group, config: uneven)
    settings = dataclasses.replace(SMALL, ranks=3, hosts=None)
    with pytest.raises(UnavailableError, match="3 ranks are on 2 hosts with 2, 1, because rank 2"):
        threads(3).run(bench_ranks, [settings])


def _meet(group: Any) -> list[tuple[float, float]]:
    """When this rank came to each barrier, and when it left; one rank after the other is late."""
    ranks = as_group(group)
    config = Config.resolve(backend="host", hosts=2, network="loopback:3")
    with closing(BarrierAcrossHosts(group, config)) as barrier:
        times = []
        for late in range(2 * ranks.size):
            if late % ranks.size == ranks.rank:
                time.sleep(0.02)
            came = time.monotonic()
            barrier()
            times.append((came, time.monotonic()))
    return times


def test_nobody_leaves_a_barrier_before_all_have_come() -> None:
    for of_ranks in zip(*threads(4).run(_meet), strict=True):
        came, left = zip(*of_ranks, strict=True)
        assert max(came) < min(left)
