"""The arithmetic and the options of `fanfold bench network`."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest

from fanfold.bench import network
from fanfold.bench.network import NetworkPoint, NetworkSettings
from fanfold.cli import bench_network
from fanfold.errors import ArgumentError


def point(size: int, ratio: float = 1.0, extra_us: float = 0.0) -> NetworkPoint:
    plain_rates, plain_us = [2e9, 1e9, 3e9], [5.0, 7.0, 6.0]
    return NetworkPoint(
        "libfabric:net",
        size,
        {"plain": plain_rates, "fanfold": [ratio * rate for rate in plain_rates]},
        {"plain": plain_us, "fanfold": [extra_us + us for us in plain_us]},
        {"plain": plain_us, "fanfold": plain_us},
    )


def test_the_best_repeats_are_compared():
    mixed = point(65536)
    mixed.bandwidth["fanfold"][:] = [1e9, 2.4e9, 1e9]
    assert mixed.bandwidth_ratio == pytest.approx(0.8)
    mixed.latency_us["fanfold"][:] = [9.0, 17.0, 6.5]
    assert mixed.extra_latency_us == pytest.approx(1.5)


@pytest.mark.parametrize(
    ("measured", "reached"),
    [
        (point(65536, ratio=0.91), True),
        (point(65536, ratio=0.89), False),
        (point(4194304, ratio=0.89), False),
        (point(32768, ratio=0.5), True),  # below 64 KiB there is no bar
        (point(8, extra_us=2.9), True),
        (point(8, extra_us=3.1), False),
        (point(64, extra_us=9.0), True),
    ],
)
def test_bars(measured: NetworkPoint, reached: bool):
    assert (measured.misses == []) == reached
    assert ("is within its bars" in network.verdict([measured])) == reached


def test_json_line_has_what_docs_promise():
    settings = NetworkSettings("libfabric:tcp")
    fields = json.loads(json.dumps(network.record(point(8, 1.0, 3.5), settings)))
    assert fields["bench"] == "network"
    assert fields["bytes"] == 8
    assert (fields["plain_gbps"], fields["plain_median_gbps"]) == (3.0, 2.0)
    assert (fields["plain_latency_us"], fields["plain_median_latency_us"]) == (5.0, 6.0)
    assert fields["fanfold_latency_us"] == 8.5
    assert fields["extra_latency_us"] == 3.5
    assert len(fields["misses"]) == 1


@pytest.mark.parametrize(
    "wrong", [{"window": 3}, {"window": 0}, {"rounds": 0}, {"repeats": 0}, {"sizes": (0,)},
              {"sizes": (network.MOST_BYTES + 1,)}],
)  # fmt: skip
def test_wrong_settings_are_refused(wrong: dict[str, int]):
    with pytest.raises(ArgumentError):
        NetworkSettings("libfabric:tcp", **wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("size", network.SIZES)
def test_counts_fit_the_window(size: int):
    settings = NetworkSettings("libfabric:tcp", window=48)
    assert settings.writes(size) % 24 == 0
    assert settings.writes(size) >= 128
    assert 50 <= settings.round_trips(size) <= settings.rounds


@pytest.mark.parametrize(("options", "code"), [([], 0), (["--strict"], 1)])
def test_only_strict_fails_if_a_bar_is_missed(
    options: list[str], code: int, monkeypatch: pytest.MonkeyPatch, capsys
):
    monkeypatch.setattr(network, "run", lambda settings: [point(65536, ratio=0.5)])
    parser = argparse.ArgumentParser()
    bench_network.add_mode(parser.add_subparsers())
    args = parser.parse_args(["network", "--transport", "libfabric:tcp", *options])
    assert args.run_mode(args) == code
    assert "50% of plain libfabric's bandwidth at 65536 bytes" in capsys.readouterr().out


def test_a_small_bench_over_shared_memory_and_sockets(tmp_path: Path, capsys):
    parser = argparse.ArgumentParser()
    bench_network.add_mode(parser.add_subparsers())
    out = tmp_path / "network.jsonl"
    args = parser.parse_args(
        ["network", "--sizes", "8,70000", "--rounds", "5", "--repeats", "1", "--window", "4",
         "--json", str(out)]
    )  # fmt: skip
    assert args.run_mode(args) == 0  # without --strict, also where a busy machine misses a bar
    printed = capsys.readouterr().out
    assert "half of the median round trip" in printed
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert [line["bytes"] for line in lines] == [8, 70000, 8, 70000]
    assert lines[2]["transport"] == "libfabric:shm"
    assert all(line["plain_gbps"] > 0 and line["fanfold_latency_us"] > 0 for line in lines)
