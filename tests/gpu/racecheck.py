"""What compute-sanitizer's racecheck says, and which of it is known.

Known is one thing (decisions 0102 and 0105): in low latency the warps of a CTA read ``fan``, the
copies of a row, behind a barrier, which one of them has stored before it; racecheck reports some of
that as a race. The kernels are compiled with line numbers, so what is known is a write at a line
that stores ``shared_.fan[...]`` and reads at lines of the same file that look at it. Racecheck does
not name the row, so it is not seen here that there is none.
"""

from __future__ import annotations

import functools
import re
from pathlib import Path, PurePath
from typing import NamedTuple

import fanfold

__all__ = ["unexplained"]

_KERNELS = Path(fanfold.__file__).parent / "kernels" / "low_latency"
_FILES = {
    "low_latency_dispatch": "dispatch_receive.cuh",
    "low_latency_combine": "combine_send.cuh",
}
_NAMED, _STORED = re.compile(r"shared_\.fan\["), re.compile(r"shared_\.fan\[\w+\] = ")

_SAID = re.compile(r"^={8,} (?P<text>.*\S)", re.MULTILINE)
_RACE = re.compile(r"(Error|Warning): Race reported between ", re.IGNORECASE)
_SUMMARY = re.compile(r"RACECHECK SUMMARY: (\d+) hazards? displayed \((\d+) errors?, (\d+) warn")
_ACCESS = re.compile(
    r"(?P<kind>Read|Write) access at (?P<kernel>\w+)(?:\(.*\))?\+0x[0-9a-f]+"
    r" in (?P<file>[^\s:]+):(?P<line>\d+)"
)


class _Access(NamedTuple):
    kind: str
    kernel: str
    file: str
    line: int


def unexplained(said: str, processes: int) -> list[str]:
    """What is not known in the output of a run, for people; empty if all is.

    Args:
        said: all that racecheck and the programs wrote, with any number of reports.
        processes: that have used the GPU, so at least so many summaries must be there.
    """
    wrong: list[str] = []
    races: list[list[str]] = []
    displayed, summaries = 0, 0
    for match in _SAID.finditer(said):
        text = match["text"]
        if _RACE.match(text):
            races.append([text])
        elif text.lstrip().startswith("and ") and races:
            races[-1].append(text.strip())
        elif summary := _SUMMARY.match(text):
            summaries += 1
            shown, errors, warnings = map(int, summary.groups())
            displayed += shown
            if errors + warnings != shown:
                wrong.append(f"not all hazards are displayed: {text}")
        elif not text.startswith((" ", "COMPUTE-SANITIZER")):
            wrong.append(text)
    if summaries < processes:
        wrong.append(f"{summaries} summaries of {processes} processes")
    if displayed != len(races):
        wrong.append(f"{displayed} hazards are displayed, {len(races)} were understood")
    return wrong + [" ".join(race) for race in races if not _is_known(race)]


def _is_known(race: list[str]) -> bool:
    """Whether a race is one of stores of ``fan`` with reads of it, both of one kernel."""
    accesses = [_access(text) for text in race]
    known = [access for access in accesses if access is not None and _is_of_fan(access)]
    if len(known) < max(len(race), 2):
        return False
    first, *others = known
    return all(each.kernel == first.kernel and each.kind != first.kind for each in others)


def _access(text: str) -> _Access | None:
    found = _ACCESS.search(text)
    if found is None:
        return None
    name = PurePath(found["file"]).name
    return _Access(found["kind"], found["kernel"], name, int(found["line"]))


def _is_of_fan(access: _Access) -> bool:
    if access.file != _FILES.get(access.kernel):
        return False
    return access.line in _lines_of_fan(access.file)[access.kind]


@functools.cache
def _lines_of_fan(file: str) -> dict[str, set[int]]:
    """The lines that store the copies of a row, and those that look at them. A statement's first
    line counts as that of what it reads, too."""
    lines = (_KERNELS / file).read_text("utf-8").splitlines()
    stored = {n for n, line in enumerate(lines, 1) if _STORED.search(line)}
    read = {n for n, line in enumerate(lines, 1) if _NAMED.search(line)} - stored
    begun = {n - 1 for n in read if not lines[n - 2].rstrip().endswith((";", "{", "}"))}
    return {"Write": stored, "Read": read | begun}
