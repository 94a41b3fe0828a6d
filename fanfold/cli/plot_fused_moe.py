"""Time over tokens of the fused MoE layer and what it is compared with."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from fanfold.cli.plot_series import Point, grouped, machine
from fanfold.errors import ArgumentError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["BENCH", "checked", "figure"]

BENCH = "fused_moe"
"""The field ``bench`` of the lines that are drawn here."""

_PANEL = ("hidden", "intermediate", "top_k", "experts", "ranks")
_SETTINGS = ("fast_accumulation", "backend", "distribution", "pause_ms", "machine")
_ROOF = "roof"
_COLORS = {
    "total_us": "tab:blue",
    "event_us": "tab:cyan",
    "unfused_us": "tab:orange",
    "unfused_gemms_us": "tab:red",
    "torch_gemms_us": "tab:green",
    "roof_us": "tab:gray",
}
_OPTIONAL = tuple(name for name in _COLORS if name != "total_us")
# A combination for each combination of settings: 15 until they repeat.
_STYLES = ("-", "--", ":")
_MARKERS = ("o", "s", "^", "D", "v")
# The kernel and its call between events differ by a few µs: the wider curve shows around the other.
_BELOW: dict[str, Any] = {"linewidth": 4.0, "alpha": 0.5, "zorder": 1.5}
_MOST_COLUMNS = 3


def checked(fields: dict[str, Any], where: str) -> dict[str, Any]:
    """The fields of one number of tokens.

    Raises:
        ArgumentError: naming the line and what is wrong with it.
    """
    timed = ["total_us", *(name for name in _OPTIONAL if fields.get(name) is not None)]
    spreads = [f"{name}_{end}" for name in timed if name != "roof_us" for end in ("least", "most")]
    checks: tuple[tuple[Sequence[str], Callable[[Any], bool], str], ...] = (
        (("tokens", *_PANEL, *timed, *spreads), _is_positive, "a number above 0"),
        (("backend", "distribution"), lambda value: isinstance(value, str), "a text"),
        (("fast_accumulation",), lambda value: isinstance(value, bool), "true or false"),
        (("pause_ms",), lambda value: value == 0 or _is_positive(value), "a number from 0"),
        (("device", "machine"), lambda v: v is None or isinstance(v, dict), "an object, or null"),
    )
    for names, fits, what in checks:
        for name in names:
            if not fits(fields.get(name)):
                raise ArgumentError(f"{where}: {name}", json.dumps(fields.get(name)), what)
    return fields


def _is_positive(value: object) -> bool:
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return number and 0 < value < math.inf  # type: ignore[operator]


def figure(lines: Sequence[dict[str, Any]]) -> Figure:
    """A panel for each geometry, in the order of the lines, with a series for each contender and
    each combination of settings; the roof where the lines hold it."""
    from matplotlib.figure import Figure

    points = [point for line in lines for point in _contenders(line)]
    points += [point for line in lines for point in _roof(line)]
    labels = _labels(points)
    settings = list(dict.fromkeys(_settings(point) for point in points))
    panels = list(dict.fromkeys(_panel(point) for point in points))
    columns = min(_MOST_COLUMNS, len(panels))
    rows = math.ceil(len(panels) / columns)
    legend_inches = 0.25 * math.ceil(len(labels) / columns)
    size = (1.0 + 5.0 * columns, 0.5 + 4.0 * rows + legend_inches)
    drawn = Figure(figsize=size, layout="constrained")
    handles: dict[str, Any] = {}
    for place, panel in enumerate(panels, start=1):
        axes = drawn.add_subplot(rows, columns, place)
        own = grouped(
            [p for p in points if _panel(p) == panel], "tokens", ("contender", *_SETTINGS)
        )
        for key, series in own.items():
            style = settings.index(key[1:])
            handles[labels[key]] = _draw(axes, series, labels[key], style)
        _finish(axes, panel, [point["tokens"] for series in own.values() for point in series])
    order = [label for label in labels.values() if label in handles]
    drawn.legend(
        [handles[label] for label in order], order, loc="outside lower center", ncols=columns,
        fontsize="small",
    )  # fmt: skip
    machines = sorted({point["machine"] for point in points})
    drawn.suptitle("A fused MoE layer on " + ", ".join(machines))
    return drawn


def _contenders(line: dict[str, Any]) -> Iterator[Point]:
    """A point for each contender that was timed."""
    settings = {name: line[name] for name in _SETTINGS if name != "machine"}
    settings["machine"] = machine(Point(line))
    names = {
        "total_us": "fused" if line.get("event_us") is None else "fused, kernel",
        "event_us": "fused, between events",
        "unfused_us": "unfused",
        "unfused_gemms_us": "GEMMs of unfused",
        "torch_gemms_us": f"torch GEMMs, {line.get('torch_gemms')}",
    }
    for field, contender in names.items():
        if line.get(field) is not None:
            spread = {end: line[f"{field}_{end}"] for end in ("least", "most")}
            yield _point(line, field, settings | spread | {"contender": contender})


def _roof(line: dict[str, Any]) -> Iterator[Point]:
    """The roof, which depends on neither the sums nor the pause."""
    if line.get("roof_us") is not None:
        settings = {"distribution": line["distribution"], "machine": machine(Point(line))}
        yield _point(line, "roof_us", settings | {"contender": _ROOF})


def _point(line: dict[str, Any], field: str, more: dict[str, Any]) -> Point:
    geometry = {name: line[name] for name in ("tokens", *_PANEL)}
    return Point(geometry | {"field": field, "total_us": line[field]} | more)


def _settings(point: Point) -> tuple[Any, ...]:
    return tuple(point[name] for name in _SETTINGS)


def _panel(point: Point) -> tuple[Any, ...]:
    return tuple(point[name] for name in _PANEL)


def _labels(points: Sequence[Point]) -> dict[tuple[Any, ...], str]:
    """The label of each series: the contender, and the settings that differ in the picture."""
    varying = [
        name for name in _SETTINGS if len({p[name] for p in points if p[name] is not None}) > 1
    ]
    labels = {}
    for point in points:
        named = [_label(name, point[name]) for name in varying if point[name] is not None]
        key = (point["contender"], *_settings(point))
        labels[key] = ", ".join([point["contender"], *named])
    return labels


def _label(name: str, value: Any) -> str:
    if name == "fast_accumulation":
        return "fast_accumulation" if value else "FP32 sums"
    return f"pause of {value:g} ms" if name == "pause_ms" else str(value)


def _draw(axes: Axes, series: Sequence[Point], label: str, style: int) -> Any:
    tokens = [point["tokens"] for point in series]
    field = series[0]["field"]
    (line,) = axes.plot(
        tokens, [point["total_us"] for point in series], label=label, color=_COLORS[field],
        ls=_STYLES[style % len(_STYLES)], marker=_MARKERS[style % len(_MARKERS)], markersize=4,
        **_BELOW if field == "event_us" else {},
    )  # fmt: skip
    if field != "roof_us":
        least, most = ([point[end] for point in series] for end in ("least", "most"))
        axes.fill_between(tokens, least, most, color=_COLORS[field], alpha=0.15, linewidth=0)
    return line


def _finish(axes: Axes, panel: tuple[Any, ...], tokens: Sequence[int]) -> None:
    hidden, intermediate, top_k, experts, ranks = panel
    title = f"{hidden} x {intermediate}, top-{top_k} of {experts} experts"
    title += f", {ranks} rank{'s' * (ranks != 1)}"
    axes.set_title(title, fontsize="medium")
    places = sorted(set(tokens))
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(places, [str(place) for place in places], fontsize="small")
    axes.set_xlabel("tokens per rank")
    axes.set_ylabel("µs (slowest rank; shaded: least to most)")
    axes.grid(visible=True, alpha=0.3)
