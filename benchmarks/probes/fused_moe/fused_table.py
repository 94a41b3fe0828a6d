#!/usr/bin/env python3
"""Prints the lines of the probe `fused` as a table: a row per variant, a column per token count.

python3 fused_table.py RESULTS.jsonl...
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

BAR = {8: 500, 16: 600, 32: 685, 64: 695, 128: 705, 256: 715}
BAR |= {512: 760, 1024: 950, 2048: 1500, 4096: 2700, 8192: 5200}
LARGEST_DIFFERENCE = 1e-3


def verdict(line: dict[str, Any]) -> str:
    if line["variant"] == "gemms":
        return ""
    if line.get("wrong_rows", 1):
        return "ROWS"
    if line["unwritten"]:
        return "HOLES"
    if not line["difference"] < LARGEST_DIFFERENCE:
        return "WRONG"
    return "" if line["y_hash"] == line["y_hash_again"] else "RACE"


def table(lines: list[dict[str, Any]], between: str) -> None:
    tokens = sorted({line["tokens"] for line in lines})
    print(f"\nus, {between}: span of the kernel, or of both GEMMs")
    print(f"{'variant':24}" + "".join(f"{n:>7}" for n in tokens))
    print(f"{'first bar':24}" + "".join(f"{BAR.get(n, 0):7}" for n in tokens))
    rows: dict[str, dict[int, str]] = {}
    for line in lines:
        if line["between"] == between:
            text = verdict(line) or f"{line.get('span_us', line['us']):.0f}"
            rows.setdefault(line["row"], {})[line["tokens"]] = text
    for name, row in rows.items():
        print(f"{name:24}" + "".join(f"{row.get(n, '-'):>7}" for n in tokens))


def details(lines: list[dict[str, Any]], row: str) -> None:
    names = ["us", "routed_us", "first_end_least", "first_end_most", "second_end_least"]
    names += ["second_end_most", "span_us", "mhz", "tflops", "weights_tb_per_s", "experts_hit"]
    names += ["row_difference", "activation_difference", "difference", "worst", "unwritten"]
    print(f"\n{row}, flush and pause")
    print(f"{'tokens':>7}" + "".join(f"{name[:11]:>12}" for name in names))
    for line in lines:
        if line["row"] == row and line["between"] == "flush and pause":
            values = "".join(f"{line.get(name, float('nan')):12.4g}" for name in names)
            print(f"{line['tokens']:7}" + values)


def main() -> int:
    lines: list[dict[str, Any]] = []
    for path in map(Path, sys.argv[1:]):
        plain = False
        for text in path.read_text().splitlines():
            line = json.loads(text)
            if line.get("probe") == "fused":
                line["row"] = line["variant"] + (" (no yields)" if plain else "")
                lines.append(line)
            elif "command" in line:
                plain = "/fused " in line["command"]
    if not lines:
        sys.stderr.write("no results\n")
        return 1
    hashes: dict[int, set[str]] = {}
    for line in lines:
        if "y_hash" in line and line["variant"] != "tanh":
            hashes.setdefault(line["tokens"], set()).add(line["y_hash"])
    for row in dict.fromkeys(line["row"] for line in lines if line["variant"] != "gemms"):
        details(lines, row)
    for between in ("flush", "flush and pause"):
        table(lines, between)
    differing = [tokens for tokens, found in hashes.items() if len(found) > 1]
    print("\nall variants have the same bits" if not differing else f"\nbits differ: {differing}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
