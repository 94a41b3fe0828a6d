#!/usr/bin/env python3
"""Times two installations of Fanfold in turns, so that a machine's drift disturbs both alike.

    python benchmarks/turns.py BEFORE/bin/fanfold NOW/bin/fanfold --json RESULTS.jsonl [--rounds 12]

Each round runs every case below with both, in the opposite order each time. A line of results has
the microseconds of the runs of one case and installation, in the order of the rounds, and ends with
the median over rounds of the ratio now / before, which is also printed.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

_CASES = (
    "low-latency --ranks 4 --tokens 128 --hidden 1024 --iterations 300",
    "low-latency --ranks 2 --tokens 8 --hidden 1024 --iterations 2000",
    "high-throughput --ranks 2 --tokens 4096 --hidden 1024 --iterations 20",
    "high-throughput --ranks 2 --tokens 64 --hidden 256 --iterations 1000",
)
_COMMON = "--experts 64 --top-k 8 --no-check"
_PHASES = ("dispatch_us", "combine_us", "total_us")


def _run(program: str, case: str) -> dict[str, Any]:
    """One run of a bench: its line of results."""
    with tempfile.TemporaryDirectory() as folder:
        results = Path(folder) / "line.jsonl"
        arguments = [*case.split(), *_COMMON.split(), "--json", str(results)]
        subprocess.run([program, "bench", *arguments], check=True, stdout=subprocess.DEVNULL)
        return dict(json.loads(results.read_text()))


def _measure(programs: list[str], case: str, rounds: int) -> list[dict[str, Any]]:
    """The lines of results of one case, one for each of the programs."""
    runs: dict[str, list[dict[str, Any]]] = {program: [] for program in programs}
    for turn in range(rounds):
        for program in programs if turn % 2 == 0 else programs[::-1]:
            runs[program].append(_run(program, case))
    before = runs[programs[0]]
    lines = []
    for program in programs:
        last = runs[program][-1]
        line = {"case": f"{case} {_COMMON}", "commit": last["commit"], "machine": last["machine"]}
        for phase in _PHASES:
            line[phase] = [run[phase] for run in runs[program]]
            ratios = [
                run[phase] / other[phase] for run, other in zip(runs[program], before, strict=True)
            ]
            line[phase.replace("_us", "_ratio")] = round(statistics.median(ratios), 3)
        lines.append(line)
    return lines


def main() -> None:
    """Runs all cases and appends their lines."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("before", help="the program fanfold of one installation")
    parser.add_argument("now", help="that of the other")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--json", type=Path, required=True, metavar="FILE")
    given = parser.parse_args()
    if given.rounds < 1:
        sys.exit(f"--rounds is {given.rounds}, but must be at least 1")
    for case in _CASES:
        for line in _measure([given.before, given.now], case, given.rounds):
            with given.json.open("a") as file:
                file.write(json.dumps(line) + "\n")
            print(line["commit"][:8], case, {p: line[p] for p in line if p.endswith("_ratio")})


if __name__ == "__main__":
    main()
