#!/usr/bin/env python3
"""Fits the presets of ``fanfold simulate`` to the published rows that are marked "fit".

    python benchmarks/fit_simulate.py          # prints what it finds
    python benchmarks/fit_simulate.py --write  # and writes it to fanfold/simulate/presets.json

Each group of rows has its own few parameters. A coordinate descent makes the mean square error of
the group's rows as small as it can, group after group; the whole is repeated once, because an early
group's rows depend a little on later groups' parameters.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
from typing import Any

from fanfold.simulate.machines import PRESETS, presets
from fanfold.simulate.published import compare, load

# Group of rows: parameters, each with all places that hold it in presets.json.
Place = tuple[str, ...]
GROUPS: dict[str, list[list[Place]]] = {
    "cx7": [
        [("networks", name, "efficiency") for name in ("cx7", "cx7-roce")],
        [("networks", name, "miss_us") for name in ("cx7", "cx7-roce")],
        [("systems", "deepep-rdma", "low_latency", name) for name in ("dispatch", "combine")],
    ],
    "deepep-high-throughput": [
        [
            ("systems", system, "high_throughput", phase)
            for system in ("deepep", "deepep-rdma")
            for phase in ("dispatch", "combine")
        ],
        [("systems", system, "sum_gb_per_s") for system in ("deepep", "deepep-rdma")],
    ],
    "deepep-low-latency": [
        [("systems", "deepep", "low_latency", "dispatch")],
        [("systems", "deepep", "low_latency", "combine")],
    ],
    "pplx-garden": [
        [("systems", "pplx-garden", "low_latency", "dispatch")],
        [("systems", "pplx-garden", "low_latency", "combine")],
    ],
    "efa-p5en": [
        [("networks", "efa-p5en", "efficiency")],
        [("networks", "efa-p5en", "latency_us")],
    ],
    "uccl-ep-low-latency": [
        [("systems", "uccl-ep", "low_latency", phase) for phase in ("dispatch", "combine")],
    ],
    "cx7-roce": [[("networks", name, "switch_us") for name in ("cx7-roce", "thor2")]],
    "efa-p5en-messages": [
        [("networks", "efa-p5en", "message_us")],
        [("networks", "efa-p5en", "switch_us")],
    ],
    "uccl-ep-high-throughput": [
        [("systems", "uccl-ep", "high_throughput", phase) for phase in ("dispatch", "combine")],
        [("systems", "uccl-ep", "forward_gb_per_s")],
        [("systems", "uccl-ep", "sum_gb_per_s")],
    ],
    "uccl-ep-window": [[("systems", "uccl-ep", "stream_gb_per_s", "efa-p5en")]],
    "thor2": [
        [("networks", "thor2", "efficiency")],
        [("networks", "thor2", "message_us")],
    ],
}
PASSES = 2
LEAST_STEP = 0.006  # relative


def read(content: dict[str, Any], place: Place) -> float:
    """The number at a place of presets.json."""
    for name in place:
        content = content[name]
    return float(content)  # type: ignore[arg-type]


def write(content: dict[str, Any], places: list[Place], value: float) -> None:
    """Puts the number at all its places, with three digits."""
    for *folders, last in places:
        inner = content
        for name in folders:
            inner = inner[name]
        inner[last] = float(f"{value:.3g}")


def misfit(content: dict[str, Any], group: str) -> float:
    """Root mean square of the logarithms of the group's errors; infinite outside the bounds."""
    try:
        rows = [row for row in load(*presets(content)) if row.fields.get("fits") == group]
    except ValueError:
        return math.inf
    errors = [math.log1p(comparison.error) for comparison in compare(rows)]
    return math.sqrt(sum(error * error for error in errors) / len(errors))


def fit(content: dict[str, Any], group: str) -> float:
    """Changes the parameters of a group by ever smaller steps; returns its misfit."""
    best = misfit(content, group)
    step = 0.2
    while step > LEAST_STEP:
        better = False
        for places in GROUPS[group]:
            for factor in (1 + step, 1 / (1 + step)):
                trial = copy.deepcopy(content)
                write(trial, places, read(content, places[0]) * factor)
                if (value := misfit(trial, group)) < best - 2e-4:
                    content.update(trial)
                    best, better = value, True
        if not better:
            step /= 2
    return best


def main() -> None:
    """Fits all groups."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help="write presets.json")
    args = parser.parse_args()
    content = json.loads(PRESETS.read_text(encoding="utf-8"))
    for number in range(PASSES):
        for group, parameters in GROUPS.items():
            value = fit(content, group)
            found = ", ".join(
                f"{'.'.join(places[0][1:])} {read(content, places[0]):.4g}" for places in parameters
            )
            print(f"pass {number + 1}, {group}: misfit {value:.3f}: {found}", flush=True)
    if args.write:
        PRESETS.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
