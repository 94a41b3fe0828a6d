"""The timeline of a fused MoE kernel: when each CTA did what."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from fanfold.errors import ArgumentError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["BENCH", "checked", "figure"]

BENCH = "fused_moe_timeline"
"""The field ``bench`` of the lines that are drawn here."""

_NUMBERS = ("tokens", "ranks", "rank", "cta", "begin_ns", "routed_ns", "second_end_ns", "end_ns")
_PANEL = ("tokens", "hidden", "intermediate", "top_k", "experts", "ranks", "rank", "device")

# What a CTA does until each of its times.
_PHASES = {
    "routed_ns": ("counts the routing", "tab:gray"),
    "first_end_ns": ("first GEMM", "tab:blue"),
    "second_end_ns": ("second GEMM", "tab:orange"),
    "end_ns": ("sums tokens", "tab:green"),
}
_NS_PER_US = 1000.0


def checked(fields: dict[str, Any], where: str) -> dict[str, Any]:
    """The fields of one CTA.

    Raises:
        ArgumentError: naming the line and what is wrong with it.
    """
    for name in (*_NUMBERS, "first_end_ns"):
        value = fields.get(name)
        none = name == "first_end_ns" and value is None and name in fields
        if not none and (not isinstance(value, (int, float)) or isinstance(value, bool)):
            raise ArgumentError(f"{where}: {name}", json.dumps(value), "a number")
    return fields


def figure(lines: Sequence[dict[str, Any]]) -> Figure:
    """A panel for each call and rank, in the order of the lines, with a row for each CTA."""
    from matplotlib.figure import Figure

    panels: dict[tuple[Any, ...], list[dict[str, Any]]] = defaultdict(list)
    for line in lines:
        panels[tuple(line.get(name) for name in _PANEL)].append(line)
    drawn = Figure(figsize=(10.0, 0.5 + 4.5 * len(panels)), layout="constrained")
    grid = drawn.subplots(len(panels), 1, squeeze=False)
    for axes, ctas in zip(grid[:, 0], panels.values(), strict=True):
        _draw(axes, ctas)
    handles, labels = grid[0][0].get_legend_handles_labels()
    drawn.legend(handles, labels, loc="outside upper center", ncols=len(_PHASES))
    return drawn


def _draw(axes: Axes, ctas: Sequence[dict[str, Any]]) -> None:
    rows = [line["cta"] for line in ctas]
    begins = [line["begin_ns"] / _NS_PER_US for line in ctas]
    for name, (label, color) in _PHASES.items():
        # A CTA without a tile of the first GEMM goes from the routing to the second.
        ends = [
            begin if line[name] is None else line[name] / _NS_PER_US
            for begin, line in zip(begins, ctas, strict=True)
        ]
        widths = [end - begin for begin, end in zip(begins, ends, strict=True)]
        axes.barh(rows, widths, left=begins, height=1.0, color=color, label=label, linewidth=0)
        begins = ends
    first = ctas[0]
    title = f"{first['tokens']} tokens, {first.get('hidden')} x {first.get('intermediate')}, "
    title += f"top-{first.get('top_k')} of {first.get('experts')} experts"
    if first["ranks"] > 1:
        title += f", rank {first['rank']} of {first['ranks']}"
    if first.get("device"):
        title += f", {first['device']}"
    axes.set_title(title, fontsize="medium")
    axes.set_xlabel("µs from the beginning of the first CTA")
    axes.set_ylabel("CTA")
    axes.set_xlim(left=0)
    axes.set_ylim(max(rows) + 0.5, min(rows) - 0.5)
