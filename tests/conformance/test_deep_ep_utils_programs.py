"""``deep_ep.utils.envs`` and ``deep_ep.utils.testing``, as DeepEP's programs use them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from fanfold.deep_ep.utils import envs, testing
from fanfold.errors import ArgumentError, UsageError
from tests.environment import environment

pytestmark = pytest.mark.one_host  # the program of two ranks has a host for each

NO_GPU = {"CUDA_VISIBLE_DEVICES": ""}


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


# ---- process groups and seeds -------------------------------------------------------------------

# One process of two hosts with one rank each, started as DeepEP's tests are.
PROGRAM = """
import json, random, sys
import torch, torch.distributed as dist
from fanfold.deep_ep import Buffer
from fanfold.deep_ep.utils import envs
from fanfold.errors import UsageError
refused = []
try:
    envs.dist_print("too early")
except UsageError as error:
    refused.append(str(error))
rank, ranks, group = envs.init_dist(0, 1, seed=40)
try:
    envs.init_dist(0, 1)
except UsageError as error:
    refused.append(str(error))
envs.dist_print(f"line of {rank}")
dtype = torch.get_default_dtype()
seeds = [envs.get_local_seed(), envs.get_global_seed(), torch.initial_seed(), random.random()]
domains = [envs.get_physical_domain_size(group), envs.get_logical_domain_size(group, False)]
buffer = Buffer(group, 1 << 20)
print(json.dumps([rank, ranks, group.size(), str(dtype), seeds, domains, refused]), flush=True)
# As DeepEP's programs end: PyTorch may abort a process that still holds a group of gloo.
del buffer, group
dist.destroy_process_group()
"""


def test_init_dist(tmp_path: Path) -> None:
    cleared = {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "FANFOLD_HOSTS"}
    kept = {name: value for name, value in os.environ.items() if name not in cleared}
    port = str(21000 + os.getpid() % 20000)
    programs = [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM],
            env={**kept, "WORLD_SIZE": "2", "RANK": str(host), "MASTER_PORT": port, **NO_GPU},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for host in range(2)
    ]
    for rank, program in enumerate(programs):
        output, errors = program.communicate(timeout=100)
        assert program.returncode == 0, errors
        line, answer = output.splitlines()
        assert line == f"line of {rank}"
        got_rank, ranks, size, dtype, seeds, domains, refused = json.loads(answer)
        assert (got_rank, ranks, size, dtype) == (rank, 2, 2, "torch.bfloat16")
        assert seeds[:3] == [40 + rank, 40, 40 + rank]
        assert domains == [[1, 2], [1, 2]]
        assert "init_dist first" in refused[0]
        assert "started it already" in refused[1]


def test_variables_are_set_for_a_while() -> None:
    wanted = [("FANFOLD_A", "1", True), ("FANFOLD_B", "2", True), ("FANFOLD_C", "3", False)]
    with environment(FANFOLD_A="before"):
        with envs.EnvOverride(wanted):
            assert [os.environ.get(name) for name, _, _ in wanted] == ["1", "2", None]
        assert [os.environ.get(name) for name, _, _ in wanted] == ["before", None, None]


def test_filled_memory_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    envs.check_torch_deterministic()
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", False)
    envs.check_torch_deterministic()
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
    with pytest.raises(UsageError, match="fill_uninitialized_memory"):
        envs.check_torch_deterministic()


# ---- speeds of links ----------------------------------------------------------------------------

LISTED = """GPU 0: NVIDIA H200 (UUID: GPU-0)
\t Link 0: 26.562 GB/s
\t Link 1: 26.562 GB/s
GPU 1: NVIDIA H200 (UUID: GPU-1)
\t Link 0: 50 GB/s
"""


@pytest.mark.parametrize(("listed", "wanted"), [(LISTED, 0.5 * 53.124), ("", 0.0)])
def test_speed_of_nvlink(
    listed: str, wanted: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    command = tmp_path / "nvidia-smi"
    command.write_text(f"#!/bin/sh\n[ \"$*\" = 'nvlink -s' ] && cat <<'END'\n{listed}END\n")
    command.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert envs.get_nvlink_gbs(0.5) == pytest.approx(wanted)
    assert ("lists no link" in caplog.text) == (not listed)
    monkeypatch.setenv("PATH", "")
    assert envs.get_nvlink_gbs() == 0
    assert "nvidia-smi nvlink -s fails" in caplog.text


def test_speed_of_rdma(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    monkeypatch.setattr(envs, "_INFINIBAND", tmp_path)
    for name, rate in (("one", "400 Gb/sec (4X NDR)\n"), ("bonded", "200 Gb/sec (4X HDR)\n")):
        (tmp_path / name / "ports" / "1").mkdir(parents=True)
        (tmp_path / name / "ports" / "1" / "rate").write_text(rate)
    bonding = tmp_path / "bonded" / "device" / "net" / "eth0" / "upper_bond0" / "bonding"
    bonding.mkdir(parents=True)
    (bonding / "slaves").write_text("eth0 eth1\n")
    assert [envs.get_rdma_gbs(name) for name in ("one", "bonded")] == [50.0, 50.0]
    assert caplog.text == ""
    assert envs.get_rdma_gbs() == 0
    assert "mlx5_0" in caplog.text


# ---- times --------------------------------------------------------------------------------------


def test_bench(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0.0, 9.0, 10.0, 12.0, 20.0, 23.0, 30.0, 37.0])
    monkeypatch.setattr(time, "perf_counter", lambda: next(clock))
    called: list[str] = []
    times = testing.bench(lambda: called.append("fn"), 2, 4, post_fn=lambda: called.append("post"))
    assert called == ["fn", "fn"] + ["fn", "post"] * 4
    assert times == (4.0, 2.0, 7.0)  # without the first time
    with pytest.raises(ArgumentError, match="num_tests"):
        testing.bench(lambda: None, num_tests=1)


def test_bench_of_operators(tmp_path: Path) -> None:
    x = torch.ones(1000, dtype=torch.float32, device="cpu")
    met: list[int] = []

    def call() -> None:
        torch.cumsum(x, 0)
        for length in (10, 1000):
            torch.sort(x[:length])

    trace = tmp_path / "trace.json"
    cumsum, sort, none = testing.bench_kineto(
        call, ("aten::cumsum", "aten::sort", "no operator"), num_tests=4,
        suppress_kineto_output=True, trace_path=str(trace),
        barrier_comm_profiling=True, barrier=lambda: met.append(1),
    )  # fmt: skip
    assert len(met) == 8
    events = [e for e in json.loads(trace.read_text())["traceEvents"] if "dur" in e]
    for name, time_s in (("aten::cumsum", cumsum), ("aten::sort", sort)):
        lasted = [e["dur"] for e in events if e["name"] == name]
        assert time_s == pytest.approx(sum(lasted) / len(lasted) * 1e-6, rel=0.05)
    assert none == 0
    many = torch.ones(1_000_000, dtype=torch.float32, device="cpu")
    apart = testing.bench_kineto(
        lambda: [torch.cumsum(each, 0) for each in (x[:10], many)],
        "aten::cumsum", 4, num_kernels_per_period=2, trace_path=str(trace),
    )  # fmt: skip
    events = [e for e in json.loads(trace.read_text())["traceEvents"] if "dur" in e]
    events.sort(key=lambda event: event["ts"])
    lasted = [e["dur"] for e in events if e["name"] == "aten::cumsum"]
    assert len(lasted) == 8
    wanted = [sum(lasted[first::2]) / 4 * 1e-6 for first in (0, 1)]
    assert apart == pytest.approx(wanted, rel=0.05)
    with pytest.raises(UsageError, match="num_kernels_per_period"):
        testing.bench_kineto(call, "aten::cumsum", 4, num_kernels_per_period=3)


def test_no_profiler_beside_another() -> None:
    with environment(EP_USE_NVIDIA_TOOLS="1"):
        never = lambda: pytest.fail("called")  # noqa: E731
        assert testing.bench_kineto(never, "x") == 1
        assert testing.bench_kineto(never, ("x", "y")) == [1, 1]


def test_silence(capfd: pytest.CaptureFixture[str]) -> None:
    with testing.suppress_stdout_stderr():
        print("a print")
        os.write(1, b"a library's line")
        os.write(2, b"a library's warning")
        print("an error", file=sys.stderr)
    with testing.empty_suppress():
        print("heard")
    assert capfd.readouterr() == ("heard\n", "")


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [("1048576", 1 << 20), ("512k", 512 << 10), (" 64 MiB ", 64 << 20), ("1.5G", 3 << 29),
     ("2tb", 2 << 40), (".5K", 512)],
)  # fmt: skip
def test_numbers_of_bytes(text: str, nbytes: int) -> None:
    assert testing.parse_num_bytes(text) == nbytes


@pytest.mark.parametrize("text", ["", "G", "1.2.3", "-1", "0", "5 apples", "1P"])
def test_no_numbers_of_bytes(text: str) -> None:
    with pytest.raises(ValueError, match="byte"):
        testing.parse_num_bytes(text)


def test_flush_without_a_gpu_does_nothing() -> None:
    testing.flush_l2_cache()
    testing.flush_l2_cache(False)
