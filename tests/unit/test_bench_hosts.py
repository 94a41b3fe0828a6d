"""Benches across hosts: options, what is refused before ranks start, and what reports say."""

from __future__ import annotations

import argparse
import dataclasses
import io
import json
import types
from typing import Any
from unittest import mock

import pytest
import torch
from rich.console import Console

from fanfold import _core
from fanfold.bench import report, run
from fanfold.bench.notes import notes as notes_of
from fanfold.bench.report import Placement, Result, Traffic
from fanfold.bench.settings import MODES, BenchSettings
from fanfold.bench.timing import Timings
from fanfold.bench.traffic import MessageTimes
from fanfold.cli import bench
from fanfold.cli.main import main
from fanfold.config import Config
from fanfold.errors import ArgumentError, FanfoldError, UnavailableError
from fanfold.memory.hosts import Hosts

SETTINGS = ("FANFOLD_BACKEND", "FANFOLD_HOSTS", "FANFOLD_NETWORK", "FANFOLD_PROXY_THREADS")


@pytest.fixture(autouse=True)
def nothing_set(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in SETTINGS:
        monkeypatch.delenv(name, raising=False)


def settings_of(text: str) -> BenchSettings:
    parser = argparse.ArgumentParser()
    bench.add_arguments(parser)
    return bench._points(parser.parse_args(text.split()), None)[0]


def network(provider: str) -> _core.Network:
    found = _core.Network()
    found.provider, found.nic, found.state = provider, "eth0", "up"
    return found


@pytest.mark.parametrize("mode", ["low-latency", "high-throughput"])
def test_an_option_wins_over_the_environment(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FANFOLD_HOSTS", "4")
    monkeypatch.setenv("FANFOLD_NETWORK", "libfabric:shm")
    config = settings_of(mode).config()
    assert (config.hosts, config.network) == (4, "libfabric:shm")
    asked = settings_of(f"{mode} --hosts 2 --transport libfabric:tcp")
    assert (asked.hosts, asked.transport) == (2, "libfabric:tcp")
    assert (asked.config().hosts, asked.config().network) == (2, "libfabric:tcp")
    assert settings_of(f"{mode} --hosts 1").config().hosts == 1
    assert asked.overrides() == {"backend": "auto", "hosts": 2, "network": "libfabric:tcp"}


def test_without_either_the_ranks_are_where_they_are() -> None:
    asked = settings_of("low-latency")
    assert (asked.hosts, asked.transport, asked.config().hosts) == (None, None, None)
    assert run.check_network(asked) == ""


@pytest.mark.parametrize(
    ("arguments", "environment", "message"),
    [
        ("--hosts 3", {}, "hosts is 3 with 4 ranks, but must be 1 or 2 or 4, .*FANFOLD_HOSTS"),
        ("--hosts 0", {}, "hosts is 0 with 4 ranks"),
        ("--hosts -2", {}, "hosts is -2 with 4 ranks"),
        ("--hosts 8", {}, "hosts is 8 with 4 ranks"),
        ("", {"FANFOLD_HOSTS": "3"}, "hosts is 3 with 4 ranks"),
        ("", {"FANFOLD_HOSTS": "few"}, "FANFOLD_HOSTS is 'few'"),
        ("--hosts 2 --transport tcp", {}, "transport is 'tcp', but must be libfabric, "),
        ("--hosts 2 --transport libfabric:none", {}, "one of the providers .*tcp"),
        ("--hosts 2 --transport loopback:x", {}, "transport is 'loopback:x', .*loopback:SEED"),
        ("--hosts 2 --transport loopback:", {}, "transport is 'loopback:', .*loopback:SEED"),
        (f"--hosts 2 --transport loopback:{2**64}", {}, "below 2\\*\\*64"),
        (
            "--hosts 2",
            {"FANFOLD_NETWORK": "libfabric:none"},
            "transport is 'libfabric:none' \\(from FANFOLD_NETWORK\\), but must be",
        ),
        ("--hosts 2", {"FANFOLD_NETWORK": "carrier pigeon"}, "FANFOLD_NETWORK"),
        ("--transport libfabric:tcp", {}, "transport is .* left out on one host, .*--hosts 2"),
        ("--transport libfabric:tcp --hosts 1", {"FANFOLD_HOSTS": "2"}, "left out on one host"),
        ("--hosts 2 --transport loopback --baseline", {}, "baseline is True, .*'loopback', whose"),
        (
            "--hosts 2 --baseline",
            {"FANFOLD_NETWORK": "loopback:1"},
            "'loopback:1' \\(from FANFOLD_NETWORK\\), whose .*libfabric:tcp",
        ),
        (
            "high-throughput --hosts 2 --backend cuda --layout token-major",
            {},
            "backend is cuda, but hosts is 2, .*expert-major only.*--backend host",
        ),
        (
            "high-throughput --hosts 2 --in-place",
            {"FANFOLD_BACKEND": "cuda"},
            "backend is cuda, but hosts is 2, .*not in place",
        ),
        ("--hosts 2 --overlap", {}, "overlap is asked for with 4 ranks, each on a GPU of its own"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line_before_ranks_start(
    arguments: str,
    environment: dict[str, str],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(run, "launch", mock.Mock(side_effect=AssertionError("ranks started")))
    monkeypatch.setattr(run, "ThreadRanks", mock.Mock(side_effect=AssertionError("ranks started")))
    monkeypatch.setattr(_core, "find_networks", lambda: [network("net")])
    words = arguments.split()
    mode = [] if words[:1] == ["high-throughput"] else ["low-latency"]
    assert main(["bench", *mode, *words]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    with pytest.raises(FanfoldError, match=message):
        raise FanfoldError(said)


@pytest.mark.parametrize(
    ("found", "message"),
    [
        ([], "transport is 'libfabric:tcp', but libfabric finds no usable network for tcp.*doctor"),
        (UnavailableError("no libfabric: install it"), "but no libfabric: install it.*loopback"),
    ],
)
def test_a_network_that_this_machine_lacks(
    found: object, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    finds = mock.Mock(side_effect=[found])
    monkeypatch.setattr(_core, "find_networks", finds)
    with pytest.raises(UnavailableError, match=message):
        run.check_network(settings_of("low-latency --hosts 2 --transport libfabric:tcp"))


def test_a_network_that_this_machine_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_core, "find_networks", lambda: [network("net"), network("shm")])
    for name in ("libfabric", "libfabric:tcp", "libfabric:shm", "loopback", "loopback:7"):
        assert run.check_network(settings_of(f"low-latency --hosts 2 --transport {name}")) == name
    monkeypatch.setenv("FANFOLD_NETWORK", "libfabric:shm")
    assert run.check_network(settings_of("low-latency --hosts 2")) == "libfabric:shm"


def test_gpus_are_taken_on_several_hosts_where_kernels_reach_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    for face in ("native", "deep_ep"):
        settings = BenchSettings("low_latency", face=face)
        assert settings.backend_here() == settings.backend_here(several_hosts=True) == "cuda"
    for face, layout in (
        ("native", None),
        ("native", "expert_major"),
        ("deep_ep", None),
        ("elastic", "token_major"),
        ("hybridep", None),
    ):
        settings = BenchSettings("high_throughput", face=face, layout=layout)
        assert settings.backend_here(several_hosts=True) == "cuda"
        asked = dataclasses.replace(settings, backend="cuda", hosts=2)
        assert asked.backend_here(several_hosts=True) == "cuda"
    settings = BenchSettings("high_throughput", layout="token_major")
    assert settings.backend_here(several_hosts=True) == "host"
    asked = dataclasses.replace(settings, backend="cuda")
    with pytest.raises(UnavailableError, match="backend is cuda, but the ranks are on several"):
        asked.backend_here(several_hosts=True)
    with pytest.raises(UnavailableError, match="hosts is 2, and on GPUs of several hosts"):
        dataclasses.replace(asked, hosts=2)


def test_threads_stay_on_the_host_unless_gpus_are_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    settings = BenchSettings("low_latency", hosts=2, transport="loopback:7")
    assert settings.backend_here(several_hosts=True) == "host"
    assert dataclasses.replace(settings, backend="cuda").backend_here(several_hosts=True) == "cuda"


def test_gpus_are_counted_for_the_ranks_of_a_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    for backend in ("auto", "cuda"):
        settings = BenchSettings("low_latency", ranks=8, backend=backend)
        assert settings.backend_here(several_hosts=True, ranks_here=4) == "cuda"
    with pytest.raises(UnavailableError, match="cuda with 5 ranks, each on a GPU of its own"):
        settings.backend_here(several_hosts=True, ranks_here=5)


def test_gpus_of_several_hosts_where_they_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    settings = BenchSettings("low_latency", ranks=2, hosts=2, backend="cuda")
    with pytest.raises(UnavailableError, match="2 ranks, each on a GPU of its own, but PyTorch"):
        settings.backend_here(several_hosts=True)
    monkeypatch.setenv("FANFOLD_SHARE_GPUS", "1")
    assert settings.backend_here(several_hosts=True) == "cuda"
    one_host = dataclasses.replace(settings, hosts=None)
    with pytest.raises(UnavailableError, match="each on a GPU of its own"):
        one_host.backend_here()
    monkeypatch.delenv("FANFOLD_SHARE_GPUS")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert settings.backend_here(several_hosts=True) == "cuda"


@pytest.mark.parametrize("transport", ["loopback", "loopback:3"])
def test_joined_ranks_are_not_threads(transport: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run.dist, "get_world_size", lambda group: 4)
    settings = BenchSettings("low_latency", hosts=2, transport=transport)
    with pytest.raises(ArgumentError, match=f"transport is '{transport}', .*are processes"):
        run.check_ranks(settings, object())
    checked = mock.Mock()
    monkeypatch.setattr(run, "as_group", lambda group: group)
    monkeypatch.setattr(run, "_checked_hosts", checked)
    group, joined = object(), dataclasses.replace(settings, transport="libfabric")
    run.check_ranks(joined, group)
    checked.assert_called_once_with(group, joined)


def test_threads_find_what_is_asked_for_in_their_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A Buffer of DeepEP's face reads it there, and threads must not change it under each other."""
    monkeypatch.setenv("FANFOLD_HOSTS", "4")
    found = []

    def look(*given: object) -> list[list[run.RankReport]]:
        config = Config.resolve()
        found.append((config.backend, config.hosts, config.network))
        return []

    threads = mock.MagicMock()
    threads.return_value.__enter__.return_value.run = look
    monkeypatch.setattr(run, "ThreadRanks", threads)
    settings = BenchSettings("low_latency", hosts=2, transport="loopback:3", backend="host")
    assert run._start([settings], "loopback:3") == []
    assert found == [("host", 2, "loopback:3")]
    assert Config.resolve().hosts == 4


# ---- reports -------------------------------------------------------------------------------------


def placed_hosts(host: tuple[int, ...], machine_ranks: int) -> Hosts:
    return Hosts(host, machine_ranks, machine_ranks == len(host), 3, "world", "a reason", "")


def placed(host: tuple[int, ...], machine_ranks: int) -> Placement:
    hosts = placed_hosts(host, machine_ranks)
    return Placement.of(hosts, "libfabric:net" if max(host) else "")


def test_a_placement_says_whether_one_machine_acts_as_several_hosts() -> None:
    assert placed((0, 0, 0, 0), 4) == Placement(1, 4)
    assert placed((0, 0, 1, 1), 4) == Placement(2, 2, "libfabric:net", 3, emulated=True)
    assert placed((0, 0, 1, 1), 2) == Placement(2, 2, "libfabric:net", 3, emulated=False)
    assert placed((0, 1, 2, 3), 2).emulated


def result_of(mode: str, placement: Placement, between: float = 250_000.0) -> Result:
    times = torch.tensor([[[100.0, 50.0, 150.0]]] * 4, dtype=torch.float64, device="cpu")
    return Result(
        settings=BenchSettings(mode, hosts=placement.hosts).on("host"),  # type: ignore[arg-type]
        ranks=4,
        placement=placement,
        fanfold=Timings(times),
        baseline=None,
        dispatch=Traffic(400_000.0, 500_000.0, between, 150_000.0),
        combine=Traffic(300_000.0, 400_000.0, 2 * between, 50_000.0),
        checked=True,
        memory_bytes=1,
    )


def test_the_record_has_hosts_and_bytes_between_them() -> None:
    fields = report.record(result_of("low_latency", placed((0, 0, 1, 1), 4)))
    wanted = {
        "hosts": 2,
        "emulated_hosts": True,
        "ranks_per_host": 2,
        "proxy_threads": 3,
        "transport": "libfabric:net",
        "bytes_between_hosts": 750_000,
        "bytes_inside_hosts": 200_000,
        "dispatch_bytes_between_hosts": 250_000,
        "dispatch_bytes_inside_hosts": 150_000,
        "combine_bytes_between_hosts": 500_000,
        "combine_bytes_inside_hosts": 50_000,
    }
    assert {name: fields[name] for name in wanted} == wanted
    json.dumps(fields)
    alone = report.record(result_of("low_latency", Placement(1, 4), 0.0))
    assert {name: alone[name] for name in list(wanted)[:5]} == {
        "hosts": 1,
        "emulated_hosts": False,
        "ranks_per_host": 4,
        "proxy_threads": None,
        "transport": "shm",
    }


@pytest.mark.parametrize(
    ("mode", "backend", "gateways"),
    [
        ("low_latency", "host", False),
        ("low_latency", "cuda", False),
        ("high_throughput", "host", True),
        ("high_throughput", "cuda", False),
    ],
)
def test_hosts_return_one_sum_where_rows_go_through_gateways(
    mode: Any, backend: Any, gateways: bool
) -> None:
    """So the oracle rounds it there, and only there."""
    settings = BenchSettings(mode, tokens=4, hidden=64, hosts=2).on(backend)
    hosts = placed_hosts((0, 0, 1, 1), 4)
    ranks: Any = types.SimpleNamespace(rank=1)
    expectation = run._expectation(ranks, settings, hosts)
    assert settings.through_gateways == gateways
    assert [list(each) for each in expectation.far_hosts] == ([[2, 3]] if gateways else [])


def test_what_is_said_of_high_throughput_on_gpus_of_several_hosts() -> None:
    found = result_of("high_throughput", placed((0, 0, 1, 1), 4))
    assert "sends a row once to each other host" in " ".join(notes_of(found))
    found = dataclasses.replace(found, device={"name": "NVIDIA H200"}, timing={})
    said = " ".join(notes_of(found))
    assert "High throughput sends a row to each rank that needs it" in said
    assert "One machine acts as several hosts" in said


def metrics_of(sent: int, queue_s: float, transit_s: float) -> dict[str, dict[int, float]]:
    return {
        "proxy_commands_total": {0: sent, 1: sent},
        "proxy_ring_seconds_total": {0: 1e-6 * sent, 1: 3e-6 * sent},
        "channel_sent_messages_total": {1: sent, 2: 10},
        "channel_queue_seconds_total": {1: queue_s, 2: 0.0},
        "channel_transit_seconds_total": {1: transit_s, 2: 1e-4},
    }


def test_messages_are_those_of_all_ranks() -> None:
    messages = MessageTimes.of([metrics_of(20, 3e-4, 5e-4), metrics_of(40, 1e-4, 10e-4), {}])
    assert messages is not None
    assert (messages.sent, messages.queue_us) == (80, pytest.approx(5.0))
    assert messages.transit_us == pytest.approx(17 / 0.8)
    assert messages.ring_us == pytest.approx(2.0)
    assert MessageTimes.of([{}, {"calls_total": {"dispatch": 3}}]) is None


def test_the_record_and_the_notes_have_messages() -> None:
    found = result_of("low_latency", placed((0, 0, 1, 1), 4))
    assert "messages" not in report.record(found)
    found = dataclasses.replace(
        found,
        messages=MessageTimes(1234, 8.0, 5.0, 25.0),
        device={"name": "NVIDIA H200"},
        timing={
            "dispatch": {"alone_us": 400.0, "send_us": 60.0, "receive_us": 110.0},
            "combine": {"alone_us": 100.0},
        },
    )
    recorded = {"sent": 1234, "ring_us": 8.0, "queue_us": 5.0, "transit_us": 25.0}
    assert report.record(found)["messages"] == recorded
    notes = notes_of(found)
    assert "One machine acts as several hosts" in " ".join(notes)
    way = "its message waited 5.0 µs in the proxy, and the transport had it for 25.0 µs"
    assert f"A command lay in its ring for 8.0 µs at most, {way}, on average." in notes
    shares = "kernels 42%, ring 2%, proxy 1%, provider 6%, what was not timed 48%."
    assert f"Of a dispatch alone, 400 µs: {shares}" in notes
    assert not any(line.startswith("Of a combine") for line in notes)


def test_the_table_of_hosts_has_bytes_and_rates() -> None:
    found = result_of("high_throughput", placed((0, 0, 1, 1), 4))
    console = Console(width=160, record=True, file=io.StringIO())
    console.print(report.table(found))
    console.print(report.hosts_table(found))
    text = console.export_text()
    lines = [line.split("│")[1:-1] for line in text.splitlines() if "│" in line]
    rows = [[cell.strip() for cell in line] for line in lines]
    assert rows[-3:] == [
        ["dispatch", "0.25", "2.500", "0.15"],
        ["combine", "0.50", "10.000", "0.05"],
        ["total", "0.75", "5.000", "0.20"],
    ]
    assert "expert-major, new routing, 2 hosts" in " ".join(text.split())
    assert "2 hosts of 2 ranks over libfabric:net" in text


@pytest.mark.parametrize("mode", MODES)
def test_notes_say_how_rows_cross_and_that_no_network_was_measured(mode: str) -> None:
    emulated = " ".join(notes_of(result_of(mode, placed((0, 0, 1, 1), 4))))
    assert ("once to each other host" in emulated) == (mode == "high_throughput")
    assert ("to each rank that needs it" in emulated) == (mode == "low_latency")
    assert "worked out from the routing, not measured" in emulated
    assert "4 ranks with 3 proxy threads each share its cores" in emulated
    apart = " ".join(notes_of(result_of(mode, placed((0, 0, 1, 1), 2))))
    assert "worked out from the routing" in apart
    assert "acts as several" not in apart
    alone = " ".join(notes_of(result_of(mode, Placement(1, 4))))
    assert "host" not in alone.replace("the host's", "")
