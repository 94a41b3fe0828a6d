"""Compute-sanitizer finds nothing in small rounds of one rank (tools/sanitize_gpu.sh)."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(700)]

ROOT = Path(__file__).resolve().parents[2]
TOOLS = ("memcheck", "racecheck", "synccheck")
CASES = [
    pytest.param(
        part,
        tool,
        marks=pytest.mark.xfail(
            (part, tool) == ("low-latency", "racecheck"),
            reason="reports of one shared word of rows that do not exist (decision 0102)",
            strict=True,
        ),
    )
    for part in ("low-latency", "high-throughput", "formats")
    for tool in TOOLS
]


@pytest.mark.parametrize(("part", "tool"), CASES)
def test_nothing_is_found(part: str, tool: str) -> None:
    toolkit = Path("/usr/local/cuda/bin/compute-sanitizer")
    if shutil.which("compute-sanitizer") is None and not toolkit.exists():
        pytest.skip("compute-sanitizer is not on the PATH: it comes with the CUDA toolkit")
    done = subprocess.run(
        [ROOT / "tools" / "sanitize_gpu.sh", "--only", part, tool],
        env={**os.environ, "PYTHON": sys.executable},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:]
    assert "right: " in done.stdout
