"""``fanfold plot``: draws what ``fanfold bench`` wrote."""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING, Any

from fanfold.bench.settings import THROUGH
from fanfold.cli import plot_fused_moe, plot_timeline
from fanfold.cli.plot_series import Point, grouped, machine
from fanfold.errors import ArgumentError, UnavailableError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = [
    "AXES",
    "Point",
    "add_arguments",
    "check_picture",
    "draw",
    "load",
    "run",
    "save",
    "series_along",
]

AXES = {
    "tokens": "tokens per rank",
    "ranks": "ranks",
    "top_k": "experts per token",
    "sms": "SMs of each kernel",
}

_FIXED = (
    "mode", "backend", "dtype", "hidden", "experts", "distribution", "layout", "in_place",
    "routing", "alignment", "zero_padding", "dispatch_transfer", "few_tokens", "face",
    "hosts", "transport", "emulated_hosts",
)  # fmt: skip
_NUMBERS = (
    "tokens", "ranks", "top_k", "hidden", "experts", "total_us", "total_us_p90", "bytes_total",
    "bytes_remote",
)  # fmt: skip
_TEXTS = ("mode", "backend", "dtype")
_LINE = "one JSON object, as `fanfold bench --json` appends them: draw without that line"
_LEGEND_CHARS = 64  # of a line, or the legend is wider than its column


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of ``fanfold plot``."""
    parser.description = (
        "Draws latency and bandwidth against tokens, ranks, top-k and SMs, as far as the results "
        "vary in them; of a fused MoE layer the time of each contender against tokens, a panel for "
        "each geometry; of timelines of its kernel when each CTA did what. All lines must be of "
        "one of these kinds."
    )
    parser.add_argument(
        "files", nargs="+", type=Path, metavar="FILE",
        help="JSON lines that `fanfold bench --json` appended, or that `fanfold bench fused-moe "
        "--timeline` wrote",
    )  # fmt: skip
    parser.add_argument(
        "--out", type=Path, default=Path("bench.png"), metavar="FILE",
        help="the picture; its ending says the format, as png, svg or pdf; png without "
        "one (default %(default)s)",
    )  # fmt: skip


def run(args: argparse.Namespace) -> int:
    """Draws the picture and prints its name: exit code 0.

    Raises:
        ArgumentError: a file cannot be read or written, a line is malformed, or the lines are of
            several kinds.
        UnavailableError: matplotlib is not installed.
    """
    kind, found, others = _read(args.files)
    for bench, lines in sorted(others.items()):
        print(f"results of bench {bench} are not drawn: {lines}")
    kind.draw(found, args.out)
    print(f"{args.out}: {len(found)} {kind.unit}{'s' if len(found) > 1 else ''}")
    return 0


@dataclass(frozen=True)
class _Kind:
    """A kind of line that has a picture of its own.

    Attributes:
        name: in messages.
        unit: that a line describes.
        checked: raises ArgumentError for a malformed line; gets its fields and its place.
        draw: writes the picture of such lines.
    """

    name: str
    unit: str
    checked: Callable[[dict[str, Any], str], Any]
    draw: Callable[[Sequence[Any], Path], None]


def _read(files: Sequence[Path]) -> tuple[_Kind, list[Any], Counter[str]]:
    """The lines that can be drawn, all of one kind, and how many lines other benches have."""
    first: tuple[_Kind, str] | None = None
    found: list[Any] = []
    others: Counter[str] = Counter()
    for path in files:
        for fields, where in _lines(path):
            bench = str(fields["bench"]) if "bench" in fields else _MODES
            if bench not in _KINDS:
                others[bench] += 1
                continue
            kind = _KINDS[bench]
            found.append(kind.checked(fields, where))
            first = first or (kind, where)
            if kind is not first[0]:
                raise ArgumentError(
                    where, kind.name, f"{first[0].name} as {first[1]} is: a picture shows lines of "
                    "one kind; draw each kind from a file of its own",
                )  # fmt: skip
    if first is None:
        counts = [f"lines of bench {bench}: {lines}" for bench, lines in sorted(others.items())]
        holds = ", ".join(counts) or "no lines"
        raise ArgumentError(
            "FILE", f"{', '.join(map(str, files))} ({holds})", "a file with results that `fanfold "
            "bench low-latency`, `high-throughput` or `fused-moe` appended with --json, or a "
            "timeline of `fused-moe --timeline`",
        )  # fmt: skip
    return first[0], found, others


def load(path: Path) -> list[Point]:
    """The results of the modes in one file. Lines of other benches are left out.

    Raises:
        ArgumentError: naming the file, and the line and what is wrong with it.
    """
    return [_point(fields, where) for fields, where in _lines(path) if "bench" not in fields]


def _lines(path: Path) -> Iterator[tuple[dict[str, Any], str]]:
    """The object of each line of a file, and where it stands."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ArgumentError("FILE", f"{path} ({error})", "a readable text file") from None
    for number, line in enumerate(lines, start=1):
        if line.strip():
            where = f"{path}, line {number}"
            yield _object(line, where), where


def _object(line: str, where: str) -> dict[str, Any]:
    try:
        fields = json.loads(line)
    except json.JSONDecodeError as error:
        raise ArgumentError(where, f"malformed ({error})", _LINE) from None
    if not isinstance(fields, dict):
        raise ArgumentError(where, f"a JSON {type(fields).__name__}", _LINE)
    return fields


def _point(fields: dict[str, Any], where: str) -> Point:
    for names, kinds, what in ((_NUMBERS, (int, float), "a number"), (_TEXTS, (str,), "a text")):
        for name in names:
            value = fields.get(name)
            if not isinstance(value, kinds) or isinstance(value, bool):
                raise ArgumentError(f"{where}: {name}", json.dumps(value), what)
    if not isinstance(fields.get("sms"), (int, type(None))):
        raise ArgumentError(f"{where}: sms", json.dumps(fields["sms"]), "a number, or null")
    if not isinstance(fields.get("config"), (dict, type(None))):
        raise ArgumentError(f"{where}: config", json.dumps(fields["config"]), "an object")
    return Point(_modern(fields))


def _modern(fields: dict[str, Any]) -> dict[str, Any]:
    """The fields as they are named today: ``routing`` was the distribution of tokens once, when
    high throughput had one kind of routing and one layout; and there was no dispatch in place. The
    native face has no name here; in lines without any, late weights are DeepEP's. Padding has one
    where it is not what the face usually gives. How rows move has one where the setting asks for
    it: what it means by itself may differ along a series."""
    face = fields.get("face") or ("deep_ep" if fields.get("late_weights") else "native")
    fields = {**fields, "face": face if face in THROUGH else None, **_hosts(fields)}
    if fields["backend"] == "cuda" and fields.get("layout") is not None:
        fields = {**fields, "in_place": bool(fields.get("in_place"))}
    if fields.get("zero_padding") is (face != "elastic"):
        fields = {**fields, "zero_padding": None}
    asked = (fields.get("config") or {}).get("dispatch_transfer")
    moves = fields["mode"] == "high_throughput" and fields["backend"] == "cuda"
    named = asked if moves and asked in ("push", "pull") and not fields.get("in_place") else None
    fields = {**fields, "dispatch_transfer": named}
    if "distribution" in fields:
        return fields
    own: dict[str, Any] = {"distribution": fields.get("routing"), "routing": None}
    if fields["mode"] == "high_throughput":
        own |= {"routing": "new", "layout": "expert_major", "alignment": 1}
    return {**fields, **own}


def _hosts(fields: dict[str, Any]) -> dict[str, Any]:
    """Where the ranks were. On one host the backend names the transport, so none is added."""
    hosts = fields.get("hosts") or 1
    if hosts == 1:
        return {"hosts": 1, "transport": None, "emulated_hosts": None}
    emulated = bool(fields.get("emulated_hosts")) or None
    return {"hosts": hosts, "transport": fields.get("transport"), "emulated_hosts": emulated}


def series_along(
    points: Sequence[Point], axis: str, least_places: int = 2
) -> dict[str, list[Point]]:
    """The points in series that differ along ``axis`` alone, by label, sorted along it.

    Where a series has several results at one place, the one of median time is drawn. Only
    series with ``least_places`` are given.
    """
    fixed = [*_FIXED, *(other for other in AXES if other != axis)]
    groups = grouped(points, axis, fixed)
    varying = [place for place in range(len(fixed)) if len({str(key[place]) for key in groups}) > 1]
    series = {}
    for key, places in groups.items():
        if len(places) >= least_places:
            named = [place for place in varying if key[place] is not None]
            label = ", ".join(_label(fixed[place], key[place]) for place in named)
            series[label or _label("mode", key[0])] = places
    return series


def _label(name: str, value: object) -> str:
    if name in ("layout", "routing"):
        return {"new": "new routing", "cached": "cached routing"}.get(
            str(value), str(value).replace("_", "-")
        )
    if name == "face":
        return f"through {THROUGH[str(value)]}"
    if name == "transport":
        return f"over {value}"
    if name == "hosts":
        return f"{value} host{'s' if value != 1 else ''}"
    if name == "emulated_hosts":
        return "on one machine"
    if name == "few_tokens":
        return "by low latency"
    if name == "dispatch_transfer":
        return f"rows {value}ed"
    if isinstance(value, str):
        return value.replace("_", " ")
    if name == "in_place":
        return "in place" if value else "not in place"
    if name == "zero_padding":
        return "padding of zeros" if value else "padding unwritten"
    if name == "sms":
        return f"{value} SMs"
    return f"{name.replace('_', '-')} {value}"


def draw(points: Sequence[Point], out: Path) -> None:
    """Writes the picture: a column for each axis along which there are series, latency above
    bandwidth. Needs no display.

    Raises:
        UnavailableError: matplotlib is not installed.
        ArgumentError: ``out`` cannot be a picture, or not be written.
    """
    check_picture(out)
    from matplotlib.figure import Figure

    columns = {axis: series for axis in AXES if (series := series_along(points, axis))}
    if not columns:
        columns = {"tokens": series_along(points, "tokens", least_places=1)}
    # On GPUs each call has a time of its own; on a host they are parts of one round.
    parts = ("dispatch", "combine") if all(point["timing"] for point in points) else ()
    rows = 2 + len(parts)
    legends = {axis: [fill(label, _LEGEND_CHARS) for label in columns[axis]] for axis in columns}
    legend_lines = max("\n".join(labels).count("\n") + 1 for labels in legends.values())
    size = (1.0 + 5.0 * len(columns), 4.0 * rows + 0.2 * legend_lines)
    figure = Figure(figsize=size, layout="constrained")
    grid = figure.subplots(rows, len(columns), squeeze=False)
    for place, (axis, series) in enumerate(columns.items()):
        for row, phase in enumerate((*parts, "total")):
            _draw_latency(grid[row][place], axis, series, phase)
        _draw_bandwidth(grid[-1][place], axis, series)
        # All panels of a column have the same series: one legend, above them and not on curves.
        lines = grid[0][place].get_legend_handles_labels()[0]
        grid[0][place].legend(
            lines, legends[axis], loc="lower left", bbox_to_anchor=(0.0, 1.0), fontsize="small"
        )
    figure.suptitle(_title(points))
    save(figure, out)


def check_picture(out: Path, option: str = "--out") -> None:
    """Checks the option that names the picture before anything is drawn, or worked out to be drawn.

    Raises:
        ArgumentError: no picture has such an ending, or no file can be there.
        UnavailableError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise UnavailableError(
            f"matplotlib cannot be imported ({error}): pip install 'fanfold[plot]'"
        ) from error

    known = Figure().canvas.get_supported_filetypes()
    if not out.absolute().parent.is_dir():
        raise ArgumentError(option, out, "a file in a folder that exists")
    if out.is_dir():
        raise ArgumentError(option, out, "a file, not a folder")
    if _format(out) not in known:
        endings = ", ".join(f".{name}" for name in sorted(known))
        raise ArgumentError(option, out, f"a file that ends in {endings} or nothing (png)")


def save(figure: Figure, out: Path, option: str = "--out") -> None:
    """Writes a picture to exactly this file; an SVG has the same bytes whenever the same is drawn,
    so that a committed one changes with its results only.

    Raises:
        ArgumentError: it cannot be written.
    """
    from matplotlib import rc_context

    written = _format(out)
    metadata = {"Date": None} if written == "svg" else None
    try:
        # Text stays text: drawn as outlines, it would double the size of an SVG.
        with rc_context({"svg.hashsalt": "fanfold", "svg.fonttype": "none"}):
            # Without a format, matplotlib appends an ending to a name that has none.
            figure.savefig(out, dpi=120, format=written, metadata=metadata)
    except (OSError, ValueError, RuntimeError) as error:  # the last if there is no LaTeX for .pgf
        raise ArgumentError(option, f"{out} ({error})", "a picture that can be written") from error


def _format(out: Path) -> str:
    return out.suffix.lstrip(".").lower() or "png"


def _title(points: Iterable[Point]) -> str:
    machines = {
        f"{point['ranks']} × {machine(point)}" if point["device"] else machine(point)
        for point in points
    }
    return "Dispatch and combine on " + ", ".join(sorted(machines))


def _draw_latency(axes: Axes, axis: str, series: dict[str, list[Point]], phase: str) -> None:
    for label, points in series.items():
        x = [point[axis] for point in points]
        median = [point[f"{phase}_us"] for point in points]
        (line,) = axes.plot(x, median, marker="o", label=label)
        axes.fill_between(
            x, median, [point[f"{phase}_us_p90"] for point in points],
            color=line.get_color(), alpha=0.15, linewidth=0,
        )  # fmt: skip
        rival = f"baseline_{phase}_us"
        rivals = [(p[axis], p[rival]) for p in points if p[rival]]
        if rivals:
            axes.plot(*zip(*rivals, strict=True), marker="x", ls="--", color=line.get_color())
    what = "dispatch + combine" if phase == "total" else phase
    axes.set_ylabel(f"{what}, µs\n(slowest rank; shaded to p90; dashed: all-to-all)")
    axes.set_yscale("log")
    _finish(axes, axis, series)


def _draw_bandwidth(axes: Axes, axis: str, series: dict[str, list[Point]]) -> None:
    for label, points in series.items():
        x = [point[axis] for point in points]
        total = [point.rate("bytes_total") for point in points]
        remote = [point.rate("bytes_remote") for point in points]
        (line,) = axes.plot(x, total, marker="o", label=label)
        axes.plot(x, remote, marker=".", ls=":", color=line.get_color())
    axes.set_ylabel("GB/s per rank\n(dotted: without local traffic)")
    axes.set_ylim(bottom=0)
    _finish(axes, axis, series)


def _finish(axes: Axes, axis: str, series: dict[str, list[Point]]) -> None:
    places = sorted({point[axis] for points in series.values() for point in points})
    if axis == "tokens" and places[0] > 0:
        axes.set_xscale("log", base=2)
    axes.set_xticks(places, [str(place) for place in places])
    axes.set_xlabel(AXES[axis])
    axes.grid(visible=True, alpha=0.3)


def _draw_figure(
    figure: Callable[[Sequence[dict[str, Any]]], Figure], lines: Sequence[dict[str, Any]], out: Path
) -> None:
    check_picture(out)
    save(figure(lines), out)


_MODES = "modes"
_KINDS = {
    _MODES: _Kind("a result of a mode (low latency, high throughput)", "result", _point, draw),
    plot_fused_moe.BENCH: _Kind(
        "a result of bench fused-moe",
        "result",
        plot_fused_moe.checked,
        partial(_draw_figure, plot_fused_moe.figure),
    ),
    plot_timeline.BENCH: _Kind(
        "a line of a timeline",
        "CTA",
        plot_timeline.checked,
        partial(_draw_figure, plot_timeline.figure),
    ),
}
