"""``fanfold bench ring``: its line, its words, and what it refuses."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest

from fanfold import _core
from fanfold.bench import ring
from fanfold.cli import bench, main
from fanfold.errors import ArgumentError

# Small enough for a machine whose cores are taken.
TINY = ("--slots", "64", "--producers", "1,2", "--commands", "2001", "--iterations", "2",
        "--rates", "1000,20000", "--seconds", "0.02")  # fmt: skip


def run(*arguments: str) -> int:
    parser = argparse.ArgumentParser()
    bench.add_arguments(parser)
    return bench.run(parser.parse_args(["ring", *arguments]))


def test_writes_a_line_with_the_documented_keys(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "r.jsonl"
    path.write_text('{"an": "earlier line"}\n')
    assert run(*TINY, "--json", str(path)) == 0
    said = capsys.readouterr().out
    for word in ("producers", "one-way latency", "p50", "p99", "not half a round trip", "no GPU"):
        assert word in said
    earlier, line = path.read_text().splitlines()
    assert json.loads(earlier) == {"an": "earlier line"}
    fields = json.loads(line)
    assert (fields["bench"], fields["from"], fields["to"]) == ("ring", "cpu", "cpu")
    assert (fields["slots"], fields["iterations"], fields["checked"]) == (64, 2, True)
    assert [(each["producers"], each["commands"]) for each in fields["throughput"]] == [
        (1, 2001),
        (2, 2002),  # as many from each
    ]
    for each in fields["throughput"]:
        assert 0 < each["commands_per_s_least"] <= each["commands_per_s"]
        assert each["commands_per_s"] <= each["commands_per_s_most"]
    assert [(each["rate_asked"], each["commands"]) for each in fields["latency"]] == [
        (1000, 20),
        (20000, 400),
    ]
    for each in fields["latency"]:
        assert 0 < each["p50_ns"] <= each["p99_ns"] <= each["most_ns"]
        assert 0 < each["average_ns"] <= each["most_ns"]
        assert each["rate"] > 0
        assert each["clock_ns"] > 0
    assert {"machine", "versions", "commit", "time", "config", "schema"} < set(fields)


def test_documents_every_field(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    assert run(*TINY, "--json", str(path)) == 0
    fields = json.loads(path.read_text())
    page = (Path(__file__).parents[2] / "docs" / "bench.md").read_text()
    text = page.partition("\n## Ring\n")[2].partition("\n## ")[0]
    own = set(fields) - {"schema", "machine", "versions", "commit", "time", "config", "checked"}
    for name in own | set(fields["throughput"][0]) | set(fields["latency"][0]):
        assert f"`{name}`" in text, name


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        (("--slots", "100"), "slots"),
        (("--slots", "1"), "slots"),
        (("--producers", "0"), "producers"),
        (("--producers", "1,65"), "producers"),
        (("--rates", "0"), "rates"),
        (("--commands", "0"), "commands"),
        (("--iterations", "0"), "iterations"),
        (("--rates", "1000000", "--seconds", "21"), "seconds"),
        (("--rates", "1", "--seconds", "0.5"), "seconds"),
    ],
)
def test_refuses(arguments: tuple[str, ...], name: str) -> None:
    with pytest.raises(ArgumentError) as caught:
        run(*TINY, *arguments)
    assert caught.value.argument == name


def test_core_checks_what_it_is_given() -> None:
    for wrong, arguments in {
        "slots": (3, 1, 10), "producers": (4, 65, 10), "commands": (4, 1, 0)
    }.items():  # fmt: skip
        with pytest.raises(ArgumentError) as caught:
            _core.measure_ring_throughput(*arguments)
        assert caught.value.argument == wrong
    with pytest.raises(ArgumentError, match="rate"):
        _core.measure_ring_latency(4, 0.5, 10)


def test_says_which_rates_were_not_reached() -> None:
    late = ring.Latency(1000, 500.0, 10, 25.0, 100.0, 90, 200, 300)
    result = ring.RingResult(ring.RingSettings(), [ring.Throughput(1, 10, [1.0])], [late])
    assert any("did not reach 1,000 commands/s" in line for line in ring.notes(result))


def test_one_line_for_a_wrong_argument(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["bench", "ring", "--slots", "100"]) == 2
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 1
    assert "slots is 100, but must be a power of two" in said[0]
