"""What compute-sanitizer's racecheck says of long rows in low latency, and which of it is known.

Known is one thing (docs/decisions/0102-low-latency-kernels.md): in a dispatch the warps of a CTA
read behind a barrier how many copies a row has and where they go, which one of them has stored
before it; racecheck reports some of that as a race, if rows have more segments than half of the
warps. It names offsets in the kernel; what stands there, the disassembler says, as the kernels are
compiled with line numbers. Racecheck does not name the row, so it is not seen here that there is
none.

Use: python tests/gpu/racecheck.py RANKS FILE
     FILE has what a run with so many ranks has written. Prints what is not known, and exits with 1
     if there is any.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path, PurePath
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

from fanfold import jit
from fanfold.formats import RowFormat, ScaleFormat
from fanfold.low_latency.kernels import dispatch_kernel
from tests.gpu.low_latency_rounds import geometry_of
from tests.gpu.sanitize import long_case

__all__ = ["Line", "lines_of", "unexplained"]

KERNEL = "low_latency_dispatch"
_FILE = "dispatch_receive.cuh"
_NAMED = re.compile(r"shared_\.(fan|places)\[")
_STORED = re.compile(r"shared_\.(fan|places)\[[^=]*\] = ")

_SAID = re.compile(r"^={8,} (?P<text>.*\S)", re.MULTILINE)
_RACE = re.compile(r"(Error|Warning): Race reported between ", re.IGNORECASE)
_SUMMARY = re.compile(r"RACECHECK SUMMARY: (\d+) hazards? displayed \((\d+) errors?, (\d+) warn")
_ACCESS = re.compile(
    r"(?P<kind>Read|Write) access at (?P<kernel>\w+)(?:\(.*\))?\+0x(?P<at>[0-9a-f]+)"
)
_LINE = re.compile(r'//## File "(?P<file>[^"]+)", line (?P<line>\d+)')
_INSTRUCTION = re.compile(r"^\s*/\*(?P<at>[0-9a-f]{4,})\*/")


class Line(NamedTuple):
    """A line of the sources."""

    file: str
    number: int


def lines_of(disassembly: str) -> dict[int, Line]:
    """For each offset of a kernel the line that its instruction comes from, as ``nvdisasm -g -c``
    says."""
    lines: dict[int, Line] = {}
    current = None
    for text in disassembly.splitlines():
        if named := _LINE.search(text):
            current = Line(PurePath(named["file"]).name, int(named["line"]))
        elif (found := _INSTRUCTION.match(text)) and current is not None:
            lines[int(found["at"], 16)] = current
    return lines


def unexplained(said: str, processes: int, lines: Mapping[int, Line]) -> list[str]:
    """What is not known in the output of a run, for people; empty if all is.

    Args:
        said: all that racecheck and the programs wrote, with any number of reports.
        processes: that have used the GPU, so at least so many summaries must be there.
        lines: of the dispatch's kernel.
    """
    wrong: list[str] = []
    races: list[list[str]] = []
    # Anywhere in a line: processes write at the same time.
    summaries = [tuple(map(int, found.groups())) for found in _SUMMARY.finditer(said)]
    for match in _SAID.finditer(said):
        text = match["text"]
        if _RACE.match(text):
            races.append([text])
        elif text.lstrip().startswith("and ") and races:
            races[-1].append(text.strip())
        elif not _SUMMARY.match(text) and not text.startswith((" ", "COMPUTE-SANITIZER")):
            wrong.append(text)
    for shown, errors, warnings in summaries:
        if errors + warnings != shown:
            wrong.append(f"{shown} hazards of {errors} errors and {warnings} warnings displayed")
    if len(summaries) < processes:
        wrong.append(f"{len(summaries)} summaries of {processes} processes")
    displayed = sum(shown for shown, _, _ in summaries)
    if displayed != len(races):
        wrong.append(f"{displayed} hazards are displayed, {len(races)} were understood")
    return wrong + [" ".join(race) for race in races if not _is_known(race, lines)]


def _is_known(race: list[str], lines: Mapping[int, Line]) -> bool:
    """Whether a race is one of stores of what a row becomes with reads of it."""
    kinds = [_known_kind(text, lines) for text in race]
    return len(race) > 1 and None not in kinds and all(kind != kinds[0] for kind in kinds[1:])


def _known_kind(text: str, lines: Mapping[int, Line]) -> str | None:
    found = _ACCESS.search(text)
    if found is None or found["kernel"] != KERNEL:
        return None
    line = lines.get(int(found["at"], 16))
    if line is None or line.file != _FILE or line.number not in _known_lines()[found["kind"]]:
        return None
    return found["kind"]


def _known_lines() -> dict[str, set[int]]:
    """The lines that store what a row becomes, and those that look at it. A statement's first line
    counts as that of what it reads, too."""
    lines = (jit.kernel.KERNELS / "low_latency" / _FILE).read_text("utf-8").splitlines()
    stored = {n for n, line in enumerate(lines, 1) if _STORED.search(line)}
    read = {n for n, line in enumerate(lines, 1) if _NAMED.search(line)} - stored
    begun = {n - 1 for n in read if not lines[n - 2].rstrip().endswith((";", "{", "}"))}
    return {"Write": stored, "Read": read | begun}


def _disassembly(ranks: int) -> str:
    """Of the kernel that a run of long rows takes on this GPU."""
    tool = shutil.which("nvdisasm") or "/usr/local/cuda/bin/nvdisasm"
    source = dispatch_kernel(geometry_of(long_case(ranks)), RowFormat.FP8, ScaleFormat.FLOAT32)
    binary = jit.compile(source, jit.architecture_of(torch.cuda.get_device_capability()))
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary.image)
        file.flush()
        command = [tool, "-g", "-c", file.name]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def main() -> int:
    """Prints what is not known: 1 if there is any."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("ranks", type=int)
    parser.add_argument("file", type=Path)
    args = parser.parse_args()
    found = unexplained(
        args.file.read_text("utf-8"), args.ranks, lines_of(_disassembly(args.ranks))
    )
    print("\n".join(found))  # a line break alone if all is known
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
