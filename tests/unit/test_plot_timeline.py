"""Timelines of the fused MoE kernel."""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path
from typing import Any

import pytest

from fanfold.bench import fused_moe_report
from fanfold.cli import plot, plot_timeline
from fanfold.errors import ArgumentError
from tests.unit.test_bench_fused_moe import point_on_gpu
from tests.unit.test_plot import write


def ctas(tokens: int = 64) -> list[dict[str, Any]]:
    return fused_moe_report.timeline_lines(point_on_gpu(tokens))


def draw(tmp_path: Path, lines: list[dict[str, Any]]) -> str:
    out = tmp_path / "t.svg"
    files = [write(tmp_path / "t.jsonl", lines)]
    assert plot.run(argparse.Namespace(files=files, out=out)) == 0
    return out.read_text()


def test_lines_are_of_the_last_call() -> None:
    first, second = ctas()
    assert first["bench"] == plot_timeline.BENCH
    names = ("begin_ns", "routed_ns", "first_end_ns", "second_end_ns", "end_ns")
    assert [first[name] for name in names] == [0, 1000, 4000, 7000, 8000]
    assert [second[name] for name in names] == [500, 2000, None, 6000, 11000]
    assert (second["cta"], second["rank"], second["device"]) == (1, 0, "NVIDIA H200")


def test_draws_a_row_for_each_cta(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    drawn = draw(tmp_path, [*ctas(64), *ctas(512)])
    assert capsys.readouterr().out == f"{tmp_path / 't.svg'}: 4 CTAs\n"
    for text in ("first GEMM", "second GEMM", "sums tokens", "CTA", "µs from the beginning"):
        assert text in drawn
    for tokens in (64, 512):
        assert f"{tokens} tokens, 7168 x 2048, top-8 of 64 experts, NVIDIA H200" in drawn
    blue = re.findall(r"fill: #1f77b4", drawn)  # of the first GEMM: in each CTA and the legend
    assert len(blue) == 4 + 1


def test_bars_end_where_the_phases_do() -> None:
    pytest.importorskip("matplotlib")
    (axes,) = plot_timeline.figure(ctas()).axes
    bars = [[(bar.get_x(), bar.get_width()) for bar in phase] for phase in axes.containers]
    assert bars[1] == [(1.0, 3.0), (2.0, 0.0)]  # the second CTA has no tile of the first GEMM
    assert bars[2] == [(4.0, 3.0), (2.0, 4.0)]
    assert [x + width for x, width in bars[3]] == [8.0, 11.0]


@pytest.mark.parametrize(
    ("name", "value"), [("end_ns", None), ("cta", "1"), ("tokens", True), ("first_end_ns", "x")]
)
def test_refuses_a_malformed_line(tmp_path: Path, name: str, value: object) -> None:
    pytest.importorskip("matplotlib")
    first, second = ctas()
    with pytest.raises(ArgumentError, match=re.escape(f"t.jsonl, line 2: {name} is ")) as caught:
        draw(tmp_path, [first, {**second, name: value}])
    assert caught.value.value == json.dumps(value)
