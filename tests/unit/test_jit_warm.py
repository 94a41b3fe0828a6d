"""``fanfold jit warm``: the kernels of a geometry, compiled before they are needed."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.unit.conftest import Command
from tests.unit.test_jit import fanfold

WARM = (
    "jit", "warm", "--hidden", "256", "--top-k", "2", "--experts", "8", "--ranks", "2",
    "--dtype", "fp8",
)  # fmt: skip


def test_warm_keeps_what_calls_need(tmp_path: Path, inside: Command) -> None:
    code, out, err = fanfold(*WARM, "--jobs", "2", FANFOLD_CACHE_DIR=str(tmp_path / "cache"))
    assert (code, err) == (0, "")
    name = r"low_latency/(\w+)\.cu fanfold::low_latency::\1"
    pattern = name + r": \d+ registers, compiled in \d+\.\d\d s"
    assert [re.fullmatch(pattern, line)[1] for line in out.splitlines()] == ["dispatch", "combine"]
    code, out, err = inside(*WARM, "--jobs", "1")
    assert out.count("kept already\n") == 2


@pytest.mark.timeout(120)
def test_warm_of_high_throughput(tmp_path: Path, inside: Command) -> None:
    arguments = (*WARM, "--mode", "high-throughput", "--layout", "token-major", "--scales", "ue8m0")
    code, out, err = fanfold(*arguments, "--jobs", "3", FANFOLD_CACHE_DIR=str(tmp_path / "cache"))
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert len(lines) == 21
    assert all("registers, compiled in " in line for line in lines)
    assert lines[1].startswith("high_throughput/plan.cu plan: ")
    assert lines[-1].startswith("formats/quantize.cu quantise: ")
    code, out, err = inside(*arguments, "--jobs", "1")
    assert out.count("kept already\n") == 21
    code, out, err = inside("jit", "list", "--json")
    assert len(json.loads(out)["kernels"]) == 21


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--mode", "fast"), "--mode: invalid choice: 'fast'"),
        (("--jobs", "0"), "jobs is 0, but must be 1 or more"),
        (
            ("--mode", "high-throughput", "--ranks", "1025", "--experts", "1025"),
            "ranks is 1025, but must be from 1 to 1024",
        ),
        (("--ranks", "1025", "--experts", "1025"), "ranks is 1025, but must be at most 1024"),
        (("--ranks", "0"), "ranks is 0, but must be from 1 to 32767"),
        (("--ranks", "-2"), "ranks is -2, but must be from 1 to 32767"),
        (("--experts", "4096"), "experts is 4096, but must be at most 2048"),
        (("--experts", "40000"), "experts is 40000, but must be from 1 to 32767"),
        (("--experts", "7"), "experts is 7, but must be divisible by the 2 ranks"),
        (("--experts", "10", "--ranks", "3"), "divisible by the 3 ranks"),
        (("--mode", "high-throughput", "--experts", "4096"), "experts is 4096, but must be from 1"),
        (("--hidden", "70000"), "hidden is 70000, but must be from 16 to 65536"),
        (("--hidden", "24"), "hidden is 24, but must be a multiple of 16"),
        (
            ("--mode", "high-throughput", "--hidden", "65536"),
            "hidden is 65536, so bytes of a row is 131072, but must be at most",
        ),
        (("--dtype", "nvfp4", "--hidden", "48"), "hidden is 48, but must be a multiple of 32"),
        (
            ("--mode", "high-throughput", "--dtype", "nvfp4"),
            "dtype is 'nvfp4', but must be 'bf16' or 'fp8' for high throughput",
        ),
        (("--top-k", "33"), "top_k is 33, but must be from 1 to 32"),
        (("--tokens", "16777216"), "tokens is 16777216, but must be at most"),
        (("--arch", "sm_999", "--jobs", "2"), "does not compile for sm_999"),
        (("--arch", "sm_75"), "arch is 'sm_75', but must be sm_80 or later for low latency"),
        (
            ("--arch", "sm_80", "--mode", "high-throughput"),
            "arch is 'sm_80', but must be sm_90 or later for high throughput",
        ),
        (("--arch", "sm_90f", "--jobs", "1"), "arch is 'sm_90f', but must be one that NVRTC"),
        (("--arch", "compute_90"), "arch is 'compute_90', but must be a real architecture"),
    ],
)
def test_warm_refuses_in_one_line(
    inside: Command, arguments: tuple[str, ...], message: str
) -> None:
    code, out, err = inside(*WARM, *arguments)
    assert (code, out) == (2, "")
    assert len(err.splitlines()) == 1
    assert message in err
