"""Compute-sanitizer finds nothing in small rounds of one and two ranks (tools/sanitize_gpu.sh)."""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(1800)]

ROOT = Path(__file__).resolve().parents[2]
TOOLS = ("memcheck", "racecheck", "synccheck")
# Nothing of formats and grouped products goes to peers.
RANKS = {
    "low-latency": (1, 2),
    "few-tokens": (1, 2),
    "high-throughput": (1, 2),
    "formats": (1,),
    "grouped-gemm": (1,),
    "fused-moe": (1, 2),
}
CASES = [(part, ranks, tool) for part in RANKS for ranks in RANKS[part] for tool in TOOLS]


def _run(*command: str | Path, seconds: float) -> tuple[int, str]:
    """Exit code and output of a program, which ends with all that it has started."""
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env={**os.environ, "PYTHON": sys.executable},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        said, _ = process.communicate(timeout=seconds)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    return process.returncode, said


@functools.cache
def _right_without(part: str, ranks: int) -> list[str]:
    """What the same rounds say is right without a tool."""
    program = ROOT / "tests" / "gpu" / "sanitize.py"
    code, said = _run(sys.executable, program, "--ranks", str(ranks), part, seconds=600)
    assert code == 0, said[-4000:]
    lines = [line for line in said.splitlines() if line.startswith("right: ")]
    assert lines[-1] == f"right: all of {part} with {ranks} ranks"
    assert len(lines) > 1
    return lines


@pytest.mark.parametrize(("part", "ranks", "tool"), CASES)
def test_nothing_is_found(part: str, ranks: int, tool: str) -> None:
    toolkit = Path("/usr/local/cuda/bin/compute-sanitizer")
    if shutil.which("compute-sanitizer") is None and not toolkit.exists():
        pytest.skip("compute-sanitizer is not on the PATH: it comes with the CUDA toolkit")
    expected = _right_without(part, ranks)
    script = ROOT / "tools" / "sanitize_gpu.sh"
    code, said = _run(script, "--ranks", str(ranks), "--only", part, tool, seconds=1100)
    found = "\n".join(line for line in said.splitlines() if not line.startswith("right: "))
    assert [line for line in expected if line not in said] == [], found[:6000]
    assert code == 0, found[:6000]
