"""Results of benches in series, for ``fanfold plot``."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

__all__ = ["Point", "grouped", "machine"]


@dataclass(frozen=True)
class Point:
    """One result: its fields, checked to be there where a picture needs them."""

    fields: dict[str, Any]

    def __getitem__(self, name: str) -> Any:
        return self.fields.get(name)

    def rate(self, name: str) -> float:
        """GB/s of ``name``, a field in bytes."""
        time: float = self["total_us"]
        return float(self[name] / time / 1e3) if time > 0 else 0.0


def grouped(
    points: Sequence[Point], axis: str, fixed: Sequence[str]
) -> dict[tuple[Any, ...], list[Point]]:
    """The points by their values of the fields ``fixed``, each group sorted along ``axis``.

    Where a group has several points at one place, the one of median ``total_us`` is kept. Points
    that do not have ``axis`` are left out.
    """
    groups: dict[tuple[Any, ...], dict[float, list[Point]]] = defaultdict(lambda: defaultdict(list))
    for point in points:
        if point[axis] is not None:
            groups[tuple(point[name] for name in fixed)][point[axis]].append(point)
    return {key: [_median(places[x]) for x in sorted(places)] for key, places in groups.items()}


def _median(points: Sequence[Point]) -> Point:
    middle = statistics.median_low([point["total_us"] for point in points])
    return next(point for point in points if point["total_us"] == middle)


def machine(point: Point) -> str:
    """The GPU of a result, else its CPU."""
    if point["device"]:
        return str(point["device"].get("name", "unknown GPU"))
    return str((point["machine"] or {}).get("cpu", "unknown machine"))
