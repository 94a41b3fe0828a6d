"""``fanfold bench flow-control``: its line, its words, and what it refuses."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest

from fanfold.bench import flow_control
from fanfold.cli import bench, main
from fanfold.errors import ArgumentError

TINY = ("--senders", "4", "--megabytes", "1", "--chunks", "4096,65536", "--buffer", "1048576",
        "--credit", "262144")  # fmt: skip


def run(*arguments: str) -> int:
    parser = argparse.ArgumentParser()
    bench.add_arguments(parser)
    return bench.run(parser.parse_args(["flow-control", *arguments]))


def test_writes_a_line_with_the_documented_fields(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "r.jsonl"
    assert run(*TINY, "--json", str(path)) == 0
    said = capsys.readouterr().out
    for word in ("with credits", "without", "65,536", "a model", "256 KiB of credit"):
        assert word in said
    assert "lower --credit" not in said
    fields = json.loads(path.read_text())
    assert (fields["bench"], fields["senders"], fields["credit"]) == ("flow_control", 4, 262144)
    small, large = fields["points"]
    assert (small["chunk"], large["chunk"]) == (4096, 65536)
    for point in (small, large):
        assert point["credits"]["bytes"] == point["without"]["bytes"] == 4 << 20
        assert point["credits"]["dropped"] == 0
        assert point["credits"]["in_flight"] <= 262144
        assert point["credits"]["gb_per_s"] > 30.0
    assert large["without"]["dropped"] > 0
    assert large["without"]["in_flight"] > 262144
    assert large["without"]["gb_per_s"] < large["credits"]["gb_per_s"] / 2

    page = (Path(__file__).parents[2] / "docs" / "bench.md").read_text()
    text = page.partition("\n## Flow control\n")[2].partition("\n## ")[0]
    own = set(fields) - {"schema", "machine", "versions", "commit", "time", "config"}
    for name in own | set(small) | set(small["credits"]):
        assert f"`{name}`" in text, name


def test_says_that_credits_are_too_large(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(*TINY[:-2], "--credit", "1048576") == 0
    assert "lower --credit" in capsys.readouterr().out


def test_draws(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    out = tmp_path / "flow.svg"
    assert run(*TINY, "--plot", str(out)) == 0
    assert "<svg" in out.read_text()


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        (("--senders", "0"), "senders"),
        (("--megabytes", "0"), "megabytes"),
        (("--megabytes", "1024"), "megabytes"),
        (("--chunks", "1000"), "chunks"),
        (("--credit", "8"), "credit"),
        (("--link", "0"), "link"),
        (("--buffer", "0"), "buffer"),
        (("--buffer", "1"), "buffer"),
    ],
)
def test_refuses(arguments: tuple[str, ...], name: str) -> None:
    with pytest.raises(ArgumentError) as caught:
        run(*TINY, *arguments)
    assert caught.value.argument == name


def test_one_line_for_a_picture_that_cannot_be_made(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    assert main.main(["bench", "flow-control", *TINY, "--plot", str(tmp_path / "a.txt")]) == 2
    said = capsys.readouterr()
    assert len(said.err.splitlines()) == 1
    assert said.out == ""  # it is refused before anything is measured


def test_same_settings_give_the_same_result() -> None:
    settings = flow_control.FlowControlSettings(senders=3, megabytes=1, chunks=(65536,))
    assert flow_control.measure(settings) == flow_control.measure(settings)
