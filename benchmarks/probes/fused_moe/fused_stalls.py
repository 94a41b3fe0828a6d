#!/usr/bin/env python3
"""Prints where the warps of the fused kernel are, from a profile by ncu, and why they stand there.

    ncu --section SourceCounters --clock-control none -k regex:fused_kernel --launch-skip 4 \\
        --launch-count 1 -o PROFILE build/fused_yield RESULTS.jsonl tickets 8192
    ncu -i PROFILE.ncu-rep --page source --csv > PROFILE.csv
    python3 fused_stalls.py PROFILE.csv

One JSON line for each part of the kernel. Instructions distinguish the parts: the loop
over K begins with a wait for a stage and ends with four products.
"""

from __future__ import annotations

import csv
import json
import sys
from dataclasses import dataclass
from pathlib import Path

INSTRUCTION_BYTES = 16
HEAD = 16  # instructions of a loop before its wait for a stage
ENQUEUE = 8  # instructions before the products' descriptors become uniform
REASONS = 5  # that a line names, the most frequent


@dataclass
class Instruction:
    offset: int
    text: str
    samples: int
    stalls: dict[str, int]


def instructions(path: Path) -> list[Instruction]:
    with path.open(newline="") as file:
        rows = list(csv.reader(file))
    names = next(row for row in rows if row and row[0] == "Address")
    samples = names.index("# Samples")
    stalls = {
        i: name[len("stall_") :]
        for i, name in enumerate(names)
        if name.startswith("stall_") and "Not Issued" not in name
    }
    code = [row for row in rows if row and row[0].startswith("0x")]
    begin = int(code[0][0], 16)
    return [
        Instruction(
            int(row[0], 16) - begin,
            row[1].strip(),
            int(row[samples] or 0),
            {name: int(row[i] or 0) for i, name in stalls.items()},
        )
        for row in code
    ]


def bounds(code: list[Instruction]) -> dict[str, int]:
    """Where each part begins."""

    def offsets(word: str) -> list[int]:
        return [each.offset for each in code if word in each.text]

    products = offsets("QGMMA")
    wait = [at for at in offsets("WARPGROUP.DEPBAR") if at < products[0]][-1]
    stage = [at for at in offsets("TRYWAIT") if at < wait]
    # The second of two waits for the same stage is the one that lasts.
    entered = stage[-2] if len(stage) > 2 else stage[-1]
    stores = offsets("UTMASTG")
    registers = offsets("USETMAXREG")
    loads = offsets("UTMALDG")
    return {
        "routing": 0,
        "first rows, tasks": registers[0],
        "loop: stage, scales": entered - HEAD * INSTRUCTION_BYTES,
        "loop: wait for products": wait,
        "loop: multiply": wait + INSTRUCTION_BYTES,
        "loop: enqueue": offsets("WARPGROUP.ARRIVE")[0] - ENQUEUE * INSTRUCTION_BYTES,
        "tile: last products, store": products[-1] + INSTRUCTION_BYTES,
        "end: sum of tokens": stores[-1] + INSTRUCTION_BYTES,
        "spare warps": registers[1],
        "copies to the stages": loads[0] - 64 * INSTRUCTION_BYTES,
    }


def main() -> int:
    code = instructions(Path(sys.argv[1]))
    begins = sorted(bounds(code).items(), key=lambda item: item[1])
    total = sum(each.samples for each in code)
    for (name, begin), end in zip(begins, [at for _, at in begins[1:]] + [1 << 62], strict=True):
        part = [each for each in code if begin <= each.offset < end]
        stalls: dict[str, int] = {}
        for each in part:
            for reason, count in each.stalls.items():
                stalls[reason] = stalls.get(reason, 0) + count
        most = sorted(stalls.items(), key=lambda item: -item[1])[:REASONS]
        samples = sum(each.samples for each in part)
        line = {"probe": "fused_stalls", "part": name, "samples": samples}
        line |= {"share": round(samples / total, 4), "stalls": dict(most)}
        sys.stdout.write(json.dumps(line) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
