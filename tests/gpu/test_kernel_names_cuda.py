"""Kernels in a profile, as DeepEP's benchmarks look for them: in the table that PyTorch prints, and
in the trace."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.conformance.deep_ep_reference import Case, inputs
from tests.gpu import test_deep_ep_high_throughput_cuda as high_throughput
from tests.gpu.conftest import GpuPools
from tests.gpu.test_deep_ep_cuda import case_of, dispatch, on_gpu, open_buffer

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

CALLS = 3


def _profiled(calls: Any) -> tuple[list[str], list[str]]:
    """The lines of the table, and the names of the kernels in the trace, of ``CALLS`` times
    ``calls``."""
    calls()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(CALLS):
            calls()
        torch.cuda.synchronize()
    table = profile.key_averages().table(sort_by="cuda_time_total", max_name_column_width=100)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profile.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    return table.splitlines(), [each["name"] for each in events if each.get("cat") == "kernel"]


def _check(table: list[str], kernels: list[str], mode: str, launches: int) -> None:
    for call in ("dispatch", "combine"):
        lines = [line for line in table if call in line]
        assert len(lines) == 1, f"{call} in {len(lines)} lines of\n" + "\n".join(table)
        assert f"fanfold::{mode}::{call}(" in lines[0]
        found = [name for name in kernels if f"::{call}" in name]
        assert len(found) == CALLS * launches, f"{call} in {kernels}"


def _low_latency(group: dist.ProcessGroup, case: Case, hook: bool) -> None:
    mine = on_gpu(inputs(case, dist.get_rank(group)))
    buffer = open_buffer(group, case)

    def calls() -> None:
        rows, _, handle, _, receive = dispatch(
            buffer, case, mine, use_fp8=False, return_recv_hook=hook
        )
        if hook:
            receive()
        _, _, receive = buffer.low_latency_combine(
            rows, mine.topk_idx, mine.topk_weights, handle, return_recv_hook=hook
        )
        if hook:
            receive()

    table, kernels = _profiled(calls)
    buffer.destroy()
    _check(table, kernels, "low_latency", 2 if hook else 1)


@pytest.mark.parametrize("hook", [False, True])
def test_low_latency(gpus: GpuPools, ranks: int, hook: bool) -> None:
    gpus.run(ranks, _low_latency, case_of(ranks), hook)


def _high_throughput(group: dist.ProcessGroup, case: Case) -> None:
    mine = on_gpu(inputs(case, dist.get_rank(group)))
    buffer = high_throughput.open_buffer(group)

    def calls() -> None:
        rows, _, _, _, handle, _ = high_throughput.dispatch(buffer, case, mine)
        buffer.combine(rows, handle)

    table, kernels = _profiled(calls)
    buffer.destroy()
    _check(table, kernels, "high_throughput", 1)
    for name in ("plan", "layout"):
        assert any(f"fanfold::high_throughput::{name}(" in found for found in kernels)


@pytest.mark.gpu_each
def test_high_throughput(gpus: GpuPools, ranks: int) -> None:
    gpus.run(ranks, _high_throughput, high_throughput.case_of(ranks))
