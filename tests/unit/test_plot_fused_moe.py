"""Time over tokens of the fused MoE layer."""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path
from typing import Any

import pytest

from fanfold.bench import fused_moe_report
from fanfold.cli import plot, plot_fused_moe
from fanfold.errors import ArgumentError
from tests.unit.test_bench_fused_moe import TINY, point_on_gpu
from tests.unit.test_bench_fused_moe import run as bench
from tests.unit.test_plot import line as mode_line
from tests.unit.test_plot import write

COMMITTED = Path(__file__).parents[2] / "benchmarks" / "results" / "fused_moe.jsonl"

Series = dict[str, list[tuple[int, float]]]


def on_gpu(tokens: int = 64, **changes: Any) -> dict[str, Any]:
    return {**fused_moe_report.record(point_on_gpu(tokens)), **changes}


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def drawn(lines: list[dict[str, Any]]) -> dict[str, Series]:
    """The points of each series in each panel."""
    pytest.importorskip("matplotlib")
    checked = [plot_fused_moe.checked(fields, "a line") for fields in lines]
    return {
        axes.get_title(): {
            str(line.get_label()): list(zip(line.get_xdata(), line.get_ydata(), strict=True))
            for line in axes.get_lines()
        }
        for axes in plot_fused_moe.figure(checked).axes
    }


def run(files: list[Path], out: Path) -> int:
    return plot.run(argparse.Namespace(files=files, out=out))


def test_committed_results_have_a_panel_for_each_geometry() -> None:
    lines = read(COMMITTED)
    panels = drawn(lines)
    assert list(panels) == [
        "7168 x 2048, top-8 of 64 experts, 1 rank",
        "4096 x 2048, top-6 of 64 experts, 1 rank",
        "7168 x 3072, top-6 of 96 experts, 1 rank",
        "6144 x 2048, top-8 of 96 experts, 1 rank",
        "1024 x 2688, top-22 of 512 experts, 1 rank",
        "7168 x 2048, top-8 of 128 experts, 2 ranks",
    ]
    first, *others, two_ranks = panels.values()
    fields = {
        "fused, kernel": "total_us",
        "fused, between events": "event_us",
        "unfused": "unfused_us",
        "GEMMs of unfused": "unfused_gemms_us",
        "torch GEMMs, fp8": "torch_gemms_us",
    }
    sums = {"fast_accumulation": True, "FP32 sums": False}
    for panel, ranks in ((first, 1), (two_ranks, 2)):
        assert set(panel) == {"roof", *(f"{each}, {kind}" for each in fields for kind in sums)}
        sizes = (7168, 2048, ranks)
        own = [e for e in lines if (e["hidden"], e["intermediate"], e["ranks"]) == sizes]
        for name, field in fields.items():
            for kind, fast in sums.items():
                expected = [(e["tokens"], e[field]) for e in own if e["fast_accumulation"] is fast]
                assert len(expected) == 11
                assert panel[f"{name}, {kind}"] == expected
        assert panel["roof"] == [(each["tokens"], each["roof_us"]) for each in own[:11]]
    for panel in others:
        assert set(panel) == {"roof", *(f"{each}, {kind}" for each in fields for kind in sums)}
        assert all([tokens for tokens, _ in s] == [2**n for n in range(3, 14)] for s in
                   panel.values())  # fmt: skip


def test_lines_of_the_bench_on_the_cpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    results, out = tmp_path / "r.jsonl", tmp_path / "p.svg"
    assert bench(*TINY, "--backend", "host", "--json", str(results)) == 0
    lines = read(results)
    ((title, panel),) = drawn(lines).items()
    assert title == "256 x 128, top-2 of 4 experts, 1 rank"
    fields = {"fused": "total_us", "unfused": "unfused_us", "GEMMs of unfused": "unfused_gemms_us"}
    if lines[0]["torch_gemms"] is not None:
        fields[f"torch GEMMs, {lines[0]['torch_gemms']}"] = "torch_gemms_us"
    assert panel == {
        name: [(each["tokens"], each[field]) for each in lines] for name, field in fields.items()
    }
    capsys.readouterr()
    assert run([results], out) == 0
    assert capsys.readouterr().out == f"{out}: 2 results\n"
    assert all(f">{name}<" in out.read_text() for name in (*fields, "tokens per rank", title))


def test_without_baseline_the_fused_layer_is_alone(tmp_path: Path) -> None:
    results = tmp_path / "r.jsonl"
    assert bench(*TINY, "--backend", "host", "--no-baseline", "--json", str(results)) == 0
    assert [set(panel) for panel in drawn(read(results)).values()] == [{"fused"}]


def test_axes_are_logarithmic_and_shades_go_from_least_to_most() -> None:
    pytest.importorskip("matplotlib")
    lines = [on_gpu(t, total_us_least=8.0, total_us_most=14.0) for t in (8, 64)]
    figure = plot_fused_moe.figure(lines)
    (axes,) = figure.axes
    assert (axes.get_xscale(), axes.get_yscale()) == ("log", "log")
    assert [text.get_text() for text in axes.get_xticklabels()] == ["8", "64"]
    ends = {y for _, y in axes.collections[0].get_paths()[0].vertices}
    assert ends == {8.0, 14.0}
    (legend,) = figure.legends
    series = [line.get_label() for line in axes.get_lines()]
    assert [text.get_text() for text in legend.get_texts()] == series
    (roof,) = (line for line in axes.get_lines() if line.get_label() == "roof")
    assert len(axes.collections) == len(series) - 1  # the roof has no least and most
    assert roof.get_color() == "tab:gray"


def test_settings_that_differ_are_series_of_their_own_and_are_named() -> None:
    other = {"name": "NVIDIA H100"}
    lines = [
        on_gpu(8),
        on_gpu(8, pause_ms=0, total_us=20.0),
        on_gpu(8, distribution="skewed", roof_us=5.0, total_us=30.0),
        on_gpu(8, device=other, roof_us=None, total_us=40.0),
    ]
    (panel,) = drawn(lines).values()
    fused = {name: y for name, [(_, y)] in panel.items() if name.startswith("fused, kernel")}
    assert fused == {
        "fused, kernel, uniform, pause of 10 ms, NVIDIA H200": 10.5,
        "fused, kernel, uniform, pause of 0 ms, NVIDIA H200": 20.0,
        "fused, kernel, skewed, pause of 10 ms, NVIDIA H200": 30.0,
        "fused, kernel, uniform, pause of 10 ms, NVIDIA H100": 40.0,
    }
    roofs = {name: y for name, [(_, y)] in panel.items() if name.startswith("roof")}
    assert roofs == {
        "roof, uniform, NVIDIA H200": lines[0]["roof_us"], "roof, skewed, NVIDIA H200": 5.0,
    }  # fmt: skip


def test_series_look_different() -> None:
    pytest.importorskip("matplotlib")
    lines = [on_gpu(8, fast_accumulation=fast, pause_ms=ms) for fast in (True, False)
             for ms in (0, 5, 10)]  # fmt: skip
    (axes,) = plot_fused_moe.figure(lines).axes
    looks = {(c.get_color(), c.get_linestyle(), c.get_marker()) for c in axes.get_lines()}
    assert len(looks) == len(axes.get_lines()) == 5 * 6 + 1


def test_ranks_are_panels_and_of_repeated_results_the_median_is_drawn() -> None:
    times = (30.0, 10.0, 20.0)
    lines = [on_gpu(8, total_us=time) for time in times] + [on_gpu(8, ranks=4)]
    panels = drawn(lines)
    geometry = "7168 x 2048, top-8 of 64 experts"
    assert list(panels) == [f"{geometry}, 1 rank", f"{geometry}, 4 ranks"]
    assert panels[f"{geometry}, 1 rank"]["fused, kernel"] == [(8, 20.0)]


@pytest.mark.parametrize(
    ("name", "value", "bound"),
    [
        ("tokens", 0, "a number above 0"),
        ("total_us", None, "a number above 0"),
        ("total_us", float("nan"), "a number above 0"),
        ("unfused_us", "fast", "a number above 0"),
        ("unfused_us_least", None, "a number above 0"),
        ("roof_us", -1, "a number above 0"),
        ("hidden", True, "a number above 0"),
        ("fast_accumulation", 1, "true or false"),
        ("backend", None, "a text"),
        ("pause_ms", [10], "a number from 0"),
        ("device", "NVIDIA H200", "an object, or null"),
    ],
)
def test_refuses_a_malformed_line(tmp_path: Path, name: str, value: object, bound: str) -> None:
    results = write(tmp_path / "r.jsonl", [on_gpu(8), {**on_gpu(64), name: value}])
    text = re.escape(f"r.jsonl, line 2: {name} is {json.dumps(value)}, but must be {bound}")
    with pytest.raises(ArgumentError, match=text):
        run([results], tmp_path / "p.png")


def test_a_broken_line_is_named(tmp_path: Path) -> None:
    results = write(tmp_path / "r.jsonl", [on_gpu(8), on_gpu(64)])
    results.write_text(results.read_text()[:-100])
    with pytest.raises(ArgumentError, match=r"r\.jsonl, line 2 is malformed .*without that line"):
        run([results], tmp_path / "p.png")


@pytest.mark.parametrize("first", range(3))
@pytest.mark.parametrize("second", range(3))
def test_a_picture_has_lines_of_one_kind(tmp_path: Path, first: int, second: int) -> None:
    pytest.importorskip("matplotlib")
    kinds = [
        (mode_line(), "a result of a mode"),
        (on_gpu(), "a result of bench fused-moe"),
        (fused_moe_report.timeline_lines(point_on_gpu())[0], "a line of a timeline"),
    ]
    (line, kind), (other, other_kind) = kinds[first], kinds[second]
    files = [
        write(tmp_path / "a.jsonl", [{"bench": "ring"}, line]),
        write(tmp_path / "b.jsonl", [line, other]),
    ]
    out = tmp_path / "p.svg"
    if first == second:
        assert run(files, out) == 0
        return
    text = rf"b\.jsonl, line 2 is {other_kind}.*must be {kind}.* as .*a\.jsonl, line 2 is: .*"
    with pytest.raises(ArgumentError, match=text + "draw each kind from a file of its own"):
        run(files, out)
    assert not out.exists()


def test_lines_of_benches_without_a_picture_are_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    results, out = write(tmp_path / "r.jsonl", [{"bench": "ring"}, on_gpu()]), tmp_path / "p.png"
    assert run([results], out) == 0
    said = capsys.readouterr().out
    assert said == f"results of bench ring are not drawn: 1\n{out}: 1 result\n"
    assert out.read_bytes().startswith(b"\x89PNG")
