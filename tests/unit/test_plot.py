"""Plots of what benches wrote."""

from __future__ import annotations

import argparse
import json
import runpy
import sys
from pathlib import Path

import pytest

from fanfold.bench import report
from fanfold.cli import plot
from fanfold.errors import ArgumentError, UnavailableError
from tests.unit.test_report import gpu_result, high_throughput_result, result


def line(**changes):
    return {**report.record(result()), **changes}


def write(path, lines):
    path.write_text("".join(json.dumps(fields) + "\n" for fields in lines))
    return path


def test_series_differ_along_one_axis_only(tmp_path):
    lines = [line(tokens=t, ranks=r, total_us=t * r) for t in (16, 64, 32) for r in (1, 2)]
    points = plot.load(write(tmp_path / "r.jsonl", [*lines, line(tokens=16, ranks=1, total_us=20)]))
    along = plot.series_along(points, "tokens")
    assert {label: [p["tokens"] for p in s] for label, s in along.items()} == {
        "ranks 1": [16, 32, 64],
        "ranks 2": [16, 32, 64],
    }
    assert along["ranks 1"][0]["total_us"] == 16  # the lower of two medians
    assert plot.series_along(points, "top_k") == {}
    assert points[0].rate("bytes_total") == pytest.approx(4040 / 16 / 1e3)


@pytest.mark.parametrize("name", ["p.png", "p.svg"])
def test_plot_draws(tmp_path, name):
    pytest.importorskip("matplotlib")
    lines = [line(tokens=t, top_k=k) for t in (16, 64) for k in (2, 4)]
    args = argparse.Namespace(files=[write(tmp_path / "r.jsonl", lines)], out=tmp_path / name)
    assert plot.run(args) == 0
    assert (tmp_path / name).stat().st_size > 5000


@pytest.mark.parametrize("name", ["name", "name.", ".hidden", "p.PNG", "p.SVG", "a b"])
def test_plot_writes_the_file_that_it_names(tmp_path, capsys, name):
    pytest.importorskip("matplotlib")
    results, out = write(tmp_path / "r.jsonl", [line()]), tmp_path / "pictures" / name
    out.parent.mkdir()
    assert plot.run(argparse.Namespace(files=[results], out=out)) == 0
    assert capsys.readouterr().out == f"{out}: 1 result\n"
    assert list(out.parent.iterdir()) == [out]
    assert out.read_bytes().startswith(b"<?xml" if name == "p.SVG" else b"\x89PNG")


@pytest.mark.parametrize(
    ("name", "bound"),
    [
        ("p.xyz", "a file that ends in .*png"),
        ("nowhere/p.png", "a file in a folder that exists"),
        (".", "a file, not a folder"),
    ],
)
def test_plot_refuses_what_cannot_be_a_picture(tmp_path, monkeypatch, name, bound):
    pytest.importorskip("matplotlib")
    results = write(tmp_path / "r.jsonl", [line()])
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ArgumentError, match=f"--out is {name}, but must be {bound}"):
        plot.run(argparse.Namespace(files=[results], out=Path(name)))


@pytest.mark.parametrize("error", [OSError(28, "No space left"), RuntimeError("no xelatex")])
def test_a_picture_that_cannot_be_written(tmp_path, monkeypatch, error):
    figure = pytest.importorskip("matplotlib.figure").Figure()

    def fail(*args, **kwargs):
        raise error

    monkeypatch.setattr(figure, "savefig", fail)
    with pytest.raises(ArgumentError, match=r"--out is .*p\.png \(.*(No space|xelatex)"):
        plot.save(figure, tmp_path / "p.png")


def test_plot_of_gpu_results(tmp_path):
    pytest.importorskip("matplotlib")
    fields = report.record(gpu_result())
    lines = [{**fields, "tokens": t, "hidden": h} for t in (1, 64) for h in (1024, 7168)]
    path = write(tmp_path / "r.jsonl", lines)
    assert plot.run(argparse.Namespace(files=[path], out=tmp_path / "p.svg")) == 0
    drawn = (tmp_path / "p.svg").read_text()
    assert all(word in drawn for word in (">combine, µs<", "2 × A GPU", "hidden 7168"))


def test_plot_of_the_same_results_is_the_same_and_has_a_legend_for_each_column(tmp_path):
    pytest.importorskip("matplotlib")
    lines = [line(tokens=t, top_k=k) for t in (16, 64) for k in (2, 4)]
    points = plot.load(write(tmp_path / "r.jsonl", lines))
    for name in ("a.svg", "b.svg"):
        plot.draw(points, tmp_path / name)
    drawn = (tmp_path / "a.svg").read_text()
    assert drawn == (tmp_path / "b.svg").read_text()
    assert drawn.count('<g id="legend') == 2
    assert drawn.count(">top-k 4<") == drawn.count(">tokens 64<") == 1


def test_plot_of_two_gpus_that_stand_for_more(tmp_path):
    pytest.importorskip("matplotlib")
    benchmarks = Path(__file__).parents[2] / "benchmarks"
    draw = runpy.run_path(str(benchmarks / "mirror.py"))["_plot"]
    for name in ("a.svg", "b.svg"):
        draw(benchmarks / "results" / "cuda_mirror_high_throughput.jsonl", tmp_path / name)
    drawn = (tmp_path / "a.svg").read_text()
    assert drawn == (tmp_path / "b.svg").read_text()
    words = ("219", "424", "expert-major, in place", "combine, bf16")
    assert all(f">{word}<" in drawn for word in words)


def test_plot_over_sms(tmp_path):
    pytest.importorskip("matplotlib")
    fields = report.record(high_throughput_result())
    lines = [{**fields, "sms": n, "routing": r} for n in (12, 24) for r in ("new", "cached")]
    path = write(tmp_path / "r.jsonl", lines)
    assert set(plot.series_along(plot.load(path), "sms")) == {"new routing", "cached routing"}
    assert plot.run(argparse.Namespace(files=[path], out=tmp_path / "p.svg")) == 0
    drawn = (tmp_path / "p.svg").read_text()
    assert all(f">{text}<" in drawn for text in ("SMs of each kernel", "cached routing"))


@pytest.mark.parametrize("layout", ["expert_major", "token_major"])
def test_rows_in_place_are_a_series_of_their_own(tmp_path, layout):
    """Lines from before there was the choice are with those that were not in place."""
    fields = report.record(high_throughput_result())
    of = {"backend": "cuda", "layout": layout}
    plain = [{**fields, **of, "in_place": False, "sms": n} for n in (12, 24)]
    there = [{**each, "in_place": True} for each in plain]
    older = {name: value for name, value in plain[0].items() if name != "in_place"}
    old = [{**older, "sms": 48}, {**older, "sms": 64, "in_place": None}]
    points = plot.load(write(tmp_path / "r.jsonl", [*plain, *there, *old]))
    along = plot.series_along(points, "sms")
    assert {label: [p["sms"] for p in s] for label, s in along.items()} == {
        "not in place": [12, 24, 48, 64],
        "in place": [12, 24],
    }


def test_padding_that_is_not_written_is_a_series_of_its_own(tmp_path):
    """Lines from before there was the choice are with those of what a face gives by itself."""
    fields = report.record(high_throughput_result())
    plain = [{**fields, "zero_padding": True, "sms": n} for n in (12, 24)]
    unwritten = [{**each, "zero_padding": False} for each in plain]
    older = {name: value for name, value in plain[0].items() if name != "zero_padding"}
    points = plot.load(write(tmp_path / "r.jsonl", [*plain, *unwritten, {**older, "sms": 48}]))
    along = plot.series_along(points, "sms")
    assert {label: [p["sms"] for p in s] for label, s in along.items()} == {
        "high throughput": [12, 24, 48],
        "padding unwritten": [12, 24],
    }
    elastic = {**plain[0], "face": "elastic"}
    assert [
        plot.load(write(tmp_path / "e.jsonl", [{**elastic, "zero_padding": zeros}]))[0][
            "zero_padding"
        ]
        for zeros in (True, False)
    ] == [True, None]


def test_rows_that_were_to_be_pulled_are_a_series_of_their_own(tmp_path):
    """What the setting means by itself is one series, in which some are pulled and some are not."""
    fields = report.record(high_throughput_result())
    lines = [
        {**fields, "config": config, "dispatch_transfer": moved, "sms": sms}
        for config, moves in (
            ({}, ("push", "pull")),
            ({"dispatch_transfer": "auto"}, ("pull", "push")),
            ({"dispatch_transfer": "pull"}, ("pull", "pull")),
            ({"dispatch_transfer": "push"}, ("push", "push")),
        )
        for sms, moved in zip((12, 24), moves, strict=True)
    ]
    in_place = [{**line, "in_place": True} for line in lines[-2:]]
    points = plot.load(write(tmp_path / "r.jsonl", [*lines, *in_place]))
    along = plot.series_along(points, "sms")
    assert {label: [p["sms"] for p in s] for label, s in along.items()} == {
        "not in place": [12, 24],
        "not in place, rows pulled": [12, 24],
        "not in place, rows pushed": [12, 24],
        "in place": [12, 24],
    }
    host = {**line(tokens=16), "config": {"dispatch_transfer": "pull"}}
    (point,) = plot.load(write(tmp_path / "h.jsonl", [host]))
    assert point["dispatch_transfer"] is None


def test_few_tokens_are_a_series_of_their_own(tmp_path):
    lines = [
        {**line(tokens=tokens), "face": "elastic", **protocol}
        for tokens in (8, 16)
        for protocol in ({"few_tokens": True}, {})
    ]
    along = plot.series_along(plot.load(write(tmp_path / "r.jsonl", lines)), "tokens")
    assert sorted(along) == ["by low latency", "low latency"]


def test_calls_of_deep_ep_are_a_series_of_their_own(tmp_path):
    """With lines from before there was the choice, which say whether weights came with combine."""
    native = [line(tokens=t, face="native") for t in (16, 64)]
    deep_ep = [line(tokens=t, face="deep_ep") for t in (16, 32)]
    before = {name: value for name, value in native[0].items() if name != "face"}
    old = [{**before, "tokens": 128}, {**before, "tokens": 256, "late_weights": False}]
    late = {**before, "tokens": 48, "late_weights": True}
    points = plot.load(write(tmp_path / "r.jsonl", [*native, *deep_ep, *old, late]))
    along = plot.series_along(points, "tokens")
    assert {label: [p["tokens"] for p in s] for label, s in along.items()} == {
        "low latency": [16, 64, 128, 256],
        "through deep_ep": [16, 32, 48],
    }


def test_hosts_and_what_is_between_them_are_series_of_their_own(tmp_path):
    """With lines that name one host or, as the oldest, none."""
    one = [line(tokens=t) for t in (16, 64)]
    unnamed = {name: value for name, value in one[0].items() if name not in ("hosts", "transport")}
    two = [
        line(tokens=t, hosts=2, transport="libfabric:net", emulated_hosts=True) for t in (16, 32)
    ]
    shm = [{**each, "transport": "libfabric:shm"} for each in two]
    four = [{**each, "hosts": 4} for each in two]
    apart = [{**each, "emulated_hosts": False} for each in two]
    lines = [*one, {**unnamed, "tokens": 128}, *two, *shm, *four, *apart]
    along = plot.series_along(plot.load(write(tmp_path / "r.jsonl", lines)), "tokens")
    assert {label: [p["tokens"] for p in s] for label, s in along.items()} == {
        "1 host": [16, 64, 128],
        "2 hosts, over libfabric:net, on one machine": [16, 32],
        "2 hosts, over libfabric:shm, on one machine": [16, 32],
        "4 hosts, over libfabric:net, on one machine": [16, 32],
        "2 hosts, over libfabric:net": [16, 32],
    }


def test_a_backend_says_what_carries_on_one_host(tmp_path):
    lines = [line(tokens=t, backend=b, transport=w) for t in (16, 64)
             for b, w in (("host", "shm"), ("cuda", "nvlink"))]  # fmt: skip
    along = plot.series_along(plot.load(write(tmp_path / "r.jsonl", lines)), "tokens")
    assert set(along) == {"host", "cuda"}


def test_lines_of_the_first_schema_are_read(tmp_path):
    new = ("distribution", "layout", "sms", "alignment")
    old = {name: value for name, value in line().items() if name not in new}
    old |= {"schema": 1, "routing": "skewed"}
    path = write(tmp_path / "r.jsonl", [old, {**old, "mode": "high_throughput"}])
    low, high = plot.load(path)
    assert (low["distribution"], low["routing"], low["layout"]) == ("skewed", None, None)
    assert (high["distribution"], high["routing"], high["layout"]) == (
        "skewed", "new", "expert_major",
    )  # fmt: skip


def test_results_at_one_place_are_told_apart(tmp_path):
    pytest.importorskip("matplotlib")
    fields = report.record(high_throughput_result())
    lines = [{**fields, "routing": r, "layout": k} for r in ("new", "cached")
             for k in ("token_major", "expert_major")]  # fmt: skip
    path = write(tmp_path / "r.jsonl", lines)
    assert plot.run(argparse.Namespace(files=[path], out=tmp_path / "p.svg")) == 0
    drawn = (tmp_path / "p.svg").read_text()
    for layout in ("token-major", "expert-major"):
        for routing in ("new", "cached"):
            assert f">{layout}, {routing} routing<" in drawn


def test_plot_of_one_result(tmp_path):
    pytest.importorskip("matplotlib")
    plot.draw(plot.load(write(tmp_path / "r.jsonl", [line()])), tmp_path / "p.png")
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"mode": ', r"r\.jsonl, line 1 is malformed"),
        ("[1]", "line 1 is a JSON list"),
        ("{}", "line 1: tokens is null, but must be a number"),
        (json.dumps(line(total_us="fast")), r'total_us is "fast"'),
        (json.dumps(line()) + "\n" + json.dumps(line(mode=3)), "line 2: mode is 3"),
        (json.dumps(line(sms="all")), 'line 1: sms is "all"'),
        (json.dumps(line(config="none")), 'line 1: config is "none", but must be an object'),
    ],
)
def test_plot_names_a_malformed_line(tmp_path, text, message):
    path = tmp_path / "r.jsonl"
    path.write_text(text)
    with pytest.raises(ArgumentError, match=message):
        plot.load(path)


def test_plot_leaves_out_other_benches_and_says_so(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    others = [{"bench": "ring"}, {"bench": "network"}, {"bench": "ring"}]
    path = write(tmp_path / "r.jsonl", [others[0], line(), *others[1:]])
    assert plot.run(argparse.Namespace(files=[path], out=tmp_path / "p.png")) == 0
    said = capsys.readouterr().out.splitlines()
    assert said == [
        "results of bench network are not drawn: 1",
        "results of bench ring are not drawn: 2",
        f"{tmp_path / 'p.png'}: 1 result",
    ]


def test_plot_without_results(tmp_path):
    args = argparse.Namespace(files=[write(tmp_path / "r.jsonl", [])], out=tmp_path / "p.png")
    with pytest.raises(ArgumentError, match=r"r\.jsonl \(no lines\), but must be a file with res"):
        plot.run(args)
    write(tmp_path / "r.jsonl", [{"bench": "ring"}, {"bench": "network"}, {"bench": "ring"}])
    named = r"r\.jsonl \(lines of bench network: 1, lines of bench ring: 2\), but must .*fused-moe"
    with pytest.raises(ArgumentError, match=named):
        plot.run(args)
    assert not args.out.exists()
    with pytest.raises(ArgumentError, match="readable"):
        plot.load(tmp_path / "missing")


def test_plot_to_a_place_that_is_none(tmp_path):
    pytest.importorskip("matplotlib")
    points = plot.load(write(tmp_path / "r.jsonl", [line()]))
    for out in (tmp_path / "no" / "p.png", tmp_path / "p.doc"):
        with pytest.raises(ArgumentError, match="--out"):
            plot.draw(points, out)


def test_plot_without_matplotlib(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    points = plot.load(write(tmp_path / "r.jsonl", [line()]))
    with pytest.raises(UnavailableError, match="pip install"):
        plot.draw(points, tmp_path / "p.png")
