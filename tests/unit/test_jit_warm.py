"""``fanfold jit warm``: the kernels of a geometry, compiled before they are needed."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.unit.test_jit import fanfold

WARM = (
    "jit", "warm", "--hidden", "256", "--top-k", "2", "--experts", "8", "--ranks", "2",
    "--dtype", "fp8",
)  # fmt: skip


def test_warm_keeps_what_calls_need(tmp_path: Path) -> None:
    code, out, err = fanfold(*WARM, "--jobs", "2", FANFOLD_CACHE_DIR=str(tmp_path))
    assert (code, err) == (0, "")
    name = r"low_latency/(\w+)\.cu fanfold::low_latency::\1"
    pattern = name + r": \d+ registers, compiled in \d+\.\d\d s"
    assert [re.fullmatch(pattern, line)[1] for line in out.splitlines()] == ["dispatch", "combine"]
    code, out, err = fanfold(*WARM, "--jobs", "1", FANFOLD_CACHE_DIR=str(tmp_path))
    assert out.count("kept already\n") == 2


@pytest.mark.timeout(120)
def test_warm_of_high_throughput(tmp_path: Path) -> None:
    arguments = (*WARM, "--mode", "high-throughput", "--layout", "token-major", "--scales", "ue8m0")
    code, out, err = fanfold(*arguments, "--jobs", "3", FANFOLD_CACHE_DIR=str(tmp_path))
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert len(lines) == 21
    assert all("registers, compiled in " in line for line in lines)
    assert lines[1].startswith("high_throughput/plan.cu plan: ")
    assert lines[-1].startswith("formats/quantize.cu quantise: ")
    code, out, err = fanfold(*arguments, FANFOLD_CACHE_DIR=str(tmp_path))
    assert out.count("kept already\n") == 21
    code, out, err = fanfold("jit", "list", "--json", FANFOLD_CACHE_DIR=str(tmp_path))
    assert len(json.loads(out)["kernels"]) == 21


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--mode", "fast"), "--mode: invalid choice: 'fast'"),
        (("--jobs", "0"), "jobs is 0, but must be 1 or more"),
        (("--mode", "high-throughput", "--ranks", "64"), "from 1 to 32"),
        (("--arch", "sm_1", "--jobs", "2"), "does not compile for sm_1"),
    ],
)
def test_warm_refuses_in_one_line(tmp_path: Path, arguments: tuple[str, ...], message: str) -> None:
    code, out, err = fanfold(*WARM, *arguments, FANFOLD_CACHE_DIR=str(tmp_path))
    assert (code, out) == (2, "")
    assert len(err.splitlines()) == 1
    assert message in err
