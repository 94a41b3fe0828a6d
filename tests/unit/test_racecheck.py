"""What the GPU tests take for known in racecheck's reports, of which none may hide another."""

from __future__ import annotations

from pathlib import Path

import pytest

import fanfold
from tests.gpu.racecheck import unexplained

LOW_LATENCY = Path(fanfold.__file__).parent / "kernels" / "low_latency"


def line_of(file: str, text: str) -> str:
    """File and number of the one line that begins with ``text``, as racecheck writes them."""
    lines = (LOW_LATENCY / file).read_text("utf-8").splitlines()
    (number,) = [n for n, line in enumerate(lines, 1) if line.strip().startswith(text)]
    return f"{file}:{number}"


STORED = line_of("combine_send.cuh", "if (call_.lane == 0) shared_.fan[i] =")
READ = line_of("combine_send.cuh", "if (shared_.fan[i] == 0) continue;")
SUMMED = line_of("combine_send.cuh", "const int fan = shared_.fan[i];")
COUNTED = line_of("combine_send.cuh", "shared_.tokens[call_.lane] =")
KERNEL = "low_latency_combine"


def race(first: str, *others: str, kernel: str = KERNEL) -> str:
    lines = [f"========= Error: Race reported between {first}"]
    lines += [f"=========     and {other} [16 hazards]" for other in others]
    return "\n".join([*lines, "========= "]).replace(" at ", f" at {kernel}+0x1a0 in ")


def output(*reports: str, displayed: int | None = None, summaries: int = 1) -> str:
    shown = len(reports) if displayed is None else displayed
    end = f"========= RACECHECK SUMMARY: {shown} hazards displayed ({shown} errors, 0 warnings)"
    none = "========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)"
    said = ["== racecheck", "========= COMPUTE-SANITIZER", "right: a case", *reports, end]
    return "\n".join([*said, *[none] * (summaries - 1)])


KNOWN = race(f"Write access at {STORED}", f"Read access at {READ}", f"Read access at {SUMMED}")


@pytest.mark.parametrize("reports", [0, 1, 3])
def test_what_is_known(reports: int) -> None:
    assert unexplained(output(*[KNOWN] * reports), 1) == []
    assert unexplained(output(*[KNOWN] * reports, summaries=2), 2) == []


def test_the_same_word_of_a_dispatch() -> None:
    stored = line_of("dispatch_receive.cuh", "if (call_.lane == 0) shared_.fan[i] =")
    read = line_of("dispatch_receive.cuh", "shared_.fan[task.row] > 0;")
    report = race(
        f"Read access at {read}", f"Write access at {stored}", kernel="low_latency_dispatch"
    )
    assert unexplained(output(report), 1) == []
    report = race(f"Read access at {read}", f"Write access at {stored}")
    assert len(unexplained(output(report), 1)) == 1, "of another kernel"


@pytest.mark.parametrize(
    "report",
    [
        race(f"Write access at {COUNTED}", f"Read access at {READ}"),
        race(f"Write access at {STORED}", f"Read access at {COUNTED}"),
        race(f"Write access at {STORED}", f"Write access at {STORED}"),
        race(f"Write access at {STORED}", f"Read access at {READ}", f"Write access at {STORED}"),
        race(f"Write access at {STORED}"),
        race(f"Write access at {STORED}", f"Read access at {READ}", kernel="another"),
        race(f"Write access at {STORED}", f"Read access at {READ}").replace(f" in {READ}", ""),
        race(f"Write access at {STORED}", f"Read access at dispatch_receive.cuh:{READ[17:]}"),
    ],
)
def test_another_race(report: str) -> None:
    found = unexplained(output(KNOWN, report), 1)
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
    assert unexplained(said, 1)
    assert unexplained(output(KNOWN), 2) == ["1 summaries of 2 processes"]
