"""Compute-sanitizer finds nothing in small rounds of one and two ranks, which are processes or
threads (tools/sanitize_gpu.sh)."""

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
# Nothing of formats goes to peers.
RANKS = {"low-latency": (1, 2), "high-throughput": (1, 2), "formats": (1,)}
WITH_PEERS = [part for part in RANKS if len(RANKS[part]) > 1]
CASES = [(part, f"{ranks}", tool) for part in RANKS for ranks in RANKS[part] for tool in TOOLS]
# Kernels of ranks that are threads run at the same time.
CASES += [(part, "2 --threads", tool) for part in WITH_PEERS for tool in TOOLS]


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
def _right_without(part: str, ranks: str) -> list[str]:
    """What the same rounds say is right without a tool."""
    program = ROOT / "tests" / "gpu" / "sanitize.py"
    code, said = _run(sys.executable, program, "--ranks", *ranks.split(), part, seconds=600)
    assert code == 0, said[-4000:]
    lines = [line for line in said.splitlines() if line.startswith("right: ")]
    what = "2 threads" if "--threads" in ranks else f"{ranks} ranks"
    assert lines[-1] == f"right: all of {part} with {what}"
    assert len(lines) > 1
    return lines


@pytest.mark.parametrize(("part", "ranks", "tool"), CASES)
def test_nothing_is_found(part: str, ranks: str, tool: str) -> None:
    toolkit = Path("/usr/local/cuda/bin/compute-sanitizer")
    if shutil.which("compute-sanitizer") is None and not toolkit.exists():
        pytest.skip("compute-sanitizer is not on the PATH: it comes with the CUDA toolkit")
    expected = _right_without(part, ranks)
    script = ROOT / "tools" / "sanitize_gpu.sh"
    given = ("--ranks", *ranks.split(), "--only", part, tool)
    code, said = _run(script, *given, seconds=1100)
    found = "\n".join(line for line in said.splitlines() if not line.startswith("right: "))
    assert [line for line in expected if line not in said] == [], found[:6000]
    assert code == 0, found[:6000]
