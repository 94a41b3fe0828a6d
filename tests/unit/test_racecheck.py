"""What the GPU tests take for known in racecheck's reports, of which none may hide another."""

from __future__ import annotations

import pytest

from fanfold.jit.kernel import KERNELS
from tests.gpu.racecheck import KERNEL, Line, lines_of, unexplained

FILE = "dispatch_receive.cuh"


def line_of(text: str) -> Line:
    """The one line that begins with ``text``."""
    lines = (KERNELS / "low_latency" / FILE).read_text("utf-8").splitlines()
    (number,) = [n for n, line in enumerate(lines, 1) if line.strip().startswith(text)]
    return Line(FILE, number)


# Offsets, as in a run on an H200 (NVRTC 13.0), and what stands there.
STORED, PLACED, DUE, LOOKED, COUNTED = 0x96E0, 0x9710, 0xA340, 0xB590, 0x8A60
LINES = {
    STORED: line_of("if (call_.lane == 0) shared_.fan[i] ="),
    PLACED: line_of("shared_.places[i][index] ="),
    DUE: line_of("return task.row < kPassRows &&"),
    LOOKED: line_of("const int fan = shared_.fan[task.row];"),
    COUNTED: line_of("shared_.tokens[source] ="),
}


def access(kind: str, at: int, kernel: str = KERNEL) -> str:
    return f"{kind} access at {kernel}+{at:#x}"


def race(first: str, *others: str) -> str:
    lines = [f"========= Error: Race reported between {first}"]
    lines += [f"=========     and {other} [16 hazards]" for other in others]
    return "\n".join([*lines, "========= "])


def output(*reports: str, displayed: int | None = None) -> str:
    shown = len(reports) if displayed is None else displayed
    end = f"========= RACECHECK SUMMARY: {shown} hazards displayed ({shown} errors, 0 warnings)"
    return "\n".join(["== racecheck", "========= COMPUTE-SANITIZER", "right: it", *reports, end])


KNOWN = race(access("Write", STORED), access("Read", DUE), access("Read", LOOKED))


@pytest.mark.parametrize(
    "reports",
    [[], [KNOWN], [KNOWN] * 3, [race(access("Read", LOOKED), access("Write", PLACED))]],
    ids=len,
)
def test_what_is_known(reports: list[str]) -> None:
    assert unexplained(output(*reports), 1, LINES) == []


@pytest.mark.parametrize(
    "report",
    [
        race(access("Write", COUNTED), access("Read", DUE)),
        race(access("Write", STORED), access("Read", COUNTED)),
        race(access("Write", STORED), access("Write", STORED)),
        race(access("Write", STORED), access("Read", DUE), access("Write", STORED)),
        race(access("Write", STORED), access("Read", DUE + 0x10)),
        race(access("Write", STORED)),
        race(access("Write", STORED), access("Read", DUE, "low_latency_combine")),
        race(access("Read", STORED), access("Write", DUE)),
    ],
)
def test_another_race(report: str) -> None:
    found = unexplained(output(KNOWN, report), 1, LINES)
    assert len(found) == 1
    assert found[0].startswith("Error: Race reported between ")


@pytest.mark.parametrize(
    "said",
    [
        "",
        output(KNOWN).rpartition("\n")[0],
        output(KNOWN, displayed=2),
        output(displayed=1),
        output(KNOWN).replace("1 errors", "20 errors"),
        output(KNOWN) + "\n========= Error: process didn't terminate successfully",
        output(KNOWN) + "\n========= Internal Sanitizer Error: out of memory",
    ],
)
def test_what_is_not_whole(said: str) -> None:
    assert unexplained(said, 1, LINES)
    assert unexplained(output(KNOWN), 2, LINES) == ["1 summaries of 2 processes"]


def test_processes_that_write_at_the_same_time() -> None:
    both = output(KNOWN) + "\nright: " + output().splitlines()[-1]
    assert unexplained(both, 2, LINES) == []


def test_lines_of_a_disassembly() -> None:
    text = """
\t//## File "/somewhere/low_latency/headers.cuh", line 279
        /*9620*/                   NOP ;
.L_x_370:
\t//## File "/somewhere/low_latency/dispatch_receive.cuh", line 151
        /*96d0*/              @!P3 IMAD R54, R64, 0x4, R55 ;
        /*96e0*/              @!P3 STS [R54+0x23a8], R53 ;
"""
    stored = Line(FILE, 151)
    assert lines_of(text) == {0x9620: Line("headers.cuh", 279), 0x96D0: stored, 0x96E0: stored}
