"""What the compiler's log says: how much of the GPU a kernel needs, or where its mistake is."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

__all__ = ["Resources", "excerpt", "first_error", "resources"]

_SECTION = re.compile(r"Compiling entry function '(\S+)' for '\S+'\n")
_PROPERTIES = re.compile(
    r"Function properties for (\S+)\n"
    r"[^\n]*?(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads"
)
_ERROR = re.compile(
    r"^(?P<file>[^\s(][^(\n]*)\((?P<line>\d+)\): (?:[a-z]+ )?error\b.*$", re.MULTILINE
)
_ANY_ERROR = re.compile(r"^.*\b(?:error|fatal)\b.*$", re.MULTILINE)
_CARET = re.compile(r"^ *\^ *$", re.MULTILINE)
_AROUND = 2  # lines of source shown before and after the one with the mistake


@dataclass(frozen=True)
class Resources:
    """What one kernel needs; -1 where the compiler did not say.

    Attributes:
        registers: per thread.
        spill_bytes: stored plus loaded by spilling, per thread, with the functions it may call.
        stack_bytes: per thread, with the functions it calls.
        shared_bytes: static shared memory of a CTA.
    """

    registers: int
    spill_bytes: int
    stack_bytes: int
    shared_bytes: int


def resources(log: str, symbol: str) -> Resources:
    """What the kernel ``symbol`` needs, from a log of ``ptxas -v``."""
    parts = _SECTION.split(log)  # text, name, text, name, text
    section = dict(zip(parts[1::2], parts[2::2], strict=True)).get(symbol)
    used = re.search(r"Used (\d+) registers(.*)", section) if section is not None else None
    if section is None or used is None:
        return Resources(-1, -1, -1, -1)
    kernels = set(parts[1::2])
    stack = spills = 0
    for name, frame, stores, loads in _PROPERTIES.findall(log):
        # Functions that are not inlined are listed apart, and any kernel may call them.
        if name == symbol or name not in kernels:
            spills += int(stores) + int(loads)
        if name == symbol:
            stack = int(frame)
    deepest = re.search(r"(\d+) bytes cumulative stack size", used[2])
    shared = re.search(r"(\d+) bytes smem", used[2])
    return Resources(
        registers=int(used[1]),
        spill_bytes=spills,
        stack_bytes=int(deepest[1]) if deepest else stack,
        shared_bytes=int(shared[1]) if shared else 0,
    )


def first_error(log: str) -> str:
    """The line of the log that says what is wrong first."""
    found = _ERROR.search(log) or _ANY_ERROR.search(log)
    if found:
        return found[0].strip()
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    return lines[0] if lines else "the compiler gives no reason"


def excerpt(log: str, sources: Mapping[str, str]) -> str:
    """The lines of source around the first mistake, a caret under it; empty if it has no place."""
    found = _ERROR.search(log)
    if found is None or found["file"] not in sources:
        return ""
    lines = sources[found["file"]].splitlines()
    wrong = int(found["line"])
    caret = _CARET.search(log, found.end())
    shown = [f"{found['file']}:"]
    for number in range(max(1, wrong - _AROUND), min(len(lines), wrong + _AROUND) + 1):
        shown.append(f"{number:6d} | {lines[number - 1]}")
        if number == wrong and caret is not None:
            # NVRTC indents the line that it quotes by two columns.
            shown.append(f"{'':6} | {caret[0].rstrip()[2:]}")
    return "\n".join(shown)
