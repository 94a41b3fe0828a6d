"""``fanfold bench --backend cuda``: everything it times, checked."""

from __future__ import annotations

import dataclasses

import pytest
import torch
import torch.distributed as dist

from fanfold.bench.cuda_run import OPERATIONS, CudaReport, summary
from fanfold.bench.run import RankReport, bench_ranks
from fanfold.bench.settings import LAYOUTS, REUSES, BenchSettings
from fanfold.config import Config
from tests.gpu.conftest import GpuPools
from tests.gpu.hosts import Run

pytestmark = [pytest.mark.gpu, pytest.mark.gpu_each, pytest.mark.timeout(300)]

SETTINGS = BenchSettings(
    "high_throughput", ranks=1, tokens=256, hidden=1024, top_k=4, experts=48, iterations=3,
    warmup=1, calls=3, backend="cuda", baseline=True,
)  # fmt: skip


def _reports(group: dist.ProcessGroup, settings: BenchSettings) -> list[RankReport]:
    points = [
        dataclasses.replace(settings, layout=layout, routing=routing, in_place=in_place).on("cuda")
        for in_place in (False, True)
        for layout in LAYOUTS
        for routing in REUSES
    ]
    return bench_ranks(group, points)


def _through_deep_ep(group: dist.ProcessGroup, settings: BenchSettings) -> list[RankReport]:
    points = [
        dataclasses.replace(settings, face="deep_ep", routing=routing, sms=sms).on("cuda")
        for routing in REUSES
        for sms in (None, 8)
    ]
    return bench_ranks(group, points)


@pytest.mark.parametrize("dtype", ["bf16", "fp8"])
def test_through_deep_ep(gpus: GpuPools, ranks: int, dtype: str) -> None:
    settings = dataclasses.replace(SETTINGS, ranks=ranks, dtype=dtype, baseline=False)
    for reports in gpus.run(ranks, _through_deep_ep, settings):
        assert [report.on_gpu.sms for report in reports if report.on_gpu] == [20, 8] * len(REUSES)


@pytest.mark.parametrize("dtype", ["bf16", "fp8"])
def test_layouts_and_routings(gpus: GpuPools, ranks: int, dtype: str) -> None:
    settings = dataclasses.replace(SETTINGS, ranks=ranks, dtype=dtype)
    for reports in gpus.run(ranks, _reports, settings):
        assert len(reports) == 2 * len(LAYOUTS) * len(REUSES)
        # In place there is memory for the rows, too.
        assert reports[-1].memory_bytes > reports[0].memory_bytes
        for report in reports:
            assert report.on_gpu is not None
            times = dict(report.on_gpu.samples)
            assert 0 <= float(times.pop("overhead.late")) <= 1
            assert [name for name, t in times.items() if not bool((t > 0).all())] == []
            assert "round.end_to_end" in times


def _one(group: dist.ProcessGroup, settings: BenchSettings) -> RankReport:
    return bench_ranks(group, [settings.on("cuda")])[0]


def test_beside_a_matrix_product(gpus: GpuPools, ranks: int) -> None:
    settings = dataclasses.replace(
        SETTINGS, ranks=ranks, tokens=2048, overlap=True, sms=8, routing="cached", baseline=False
    )
    for report in gpus.run(ranks, _one, settings):
        assert report.on_gpu is not None
        assert report.on_gpu.sms == 8
        assert float(report.on_gpu.samples["overlap.covered"].mean()) == 1.0


# ---- low latency --------------------------------------------------------------------------------

LOW_LATENCY = BenchSettings(
    "low_latency", ranks=1, tokens=32, hidden=1024, top_k=4, experts=48, iterations=3, warmup=1,
    calls=3, backend="cuda", baseline=True, overlap=True,
)  # fmt: skip
OVERLAPS = ("overlap.gemm_alone", "overlap.gemm_beside_hook")
HALVES = ("send", "receive", "hook_host")
SAMPLES = {
    *(f"overhead.{name}" for name in ("empty", "empty_flushed", "launch", "python")),
    *(
        f"{operation}.{way}"
        for operation in OPERATIONS
        for way in ("graph", "alone", "l2_flushed", "single", "host")
    ),
    *(f"{operation}.{half}" for operation in ("dispatch", "combine") for half in HALVES),
    *(f"baseline.{operation}" for operation in OPERATIONS),
    *OVERLAPS,
}


@pytest.mark.parametrize(
    ("dtype", "face"), [("bf16", "native"), ("fp8", "native"), ("fp8", "deep_ep")]
)
def test_low_latency(gpus: GpuPools, ranks: int, dtype: str, face: str) -> None:
    settings = dataclasses.replace(LOW_LATENCY, ranks=ranks, dtype=dtype, face=face)
    reports: list[CudaReport] = []
    for report in gpus.run(ranks, _one, settings):
        assert report.on_gpu is not None
        samples = report.on_gpu.samples
        assert set(samples) == SAMPLES
        shapes = {name: tuple(times.shape) for name, times in samples.items()}
        assert shapes == dict.fromkeys(SAMPLES, (settings.iterations,))
        wrong = [n for n, t in samples.items() if not bool((torch.isfinite(t) & (t > 0)).all())]
        assert wrong == []
        reports.append(report.on_gpu)
    found = summary(reports)
    assert set(found) == {*OPERATIONS, "overhead", "overlap"}
    assert found["overlap"]["gemm_beside_hook_us"] > 0


# ---- across hosts -------------------------------------------------------------------------------


def _across_hosts(group: dist.ProcessGroup, settings: BenchSettings) -> RankReport:
    config = Config.resolve()
    asked = dataclasses.replace(settings, hosts=config.hosts, transport=config.network)
    return bench_ranks(group, [asked.on("cuda")])[0]


@pytest.mark.parametrize("face", ["native", "deep_ep"])
def test_low_latency_across_hosts(run_on_hosts: Run, most_ranks: int, face: str) -> None:
    settings = dataclasses.replace(
        LOW_LATENCY, ranks=most_ranks, face=face, baseline=False, overlap=False
    )
    for report in run_on_hosts(most_ranks, _across_hosts, settings):
        assert report.on_gpu is not None
        samples = report.on_gpu.samples
        assert set(samples) == {
            n for n in SAMPLES if n.split(".")[0] not in ("baseline", "overlap")
        }
        assert [name for name, times in samples.items() if not bool((times > 0).all())] == []
        assert report.metrics["channel_transit_seconds_total"]


@pytest.mark.parametrize("routing", REUSES)
def test_high_throughput_across_hosts(run_on_hosts: Run, most_ranks: int, routing: str) -> None:
    settings = dataclasses.replace(
        SETTINGS, ranks=most_ranks, layout="expert_major", routing=routing, baseline=False
    )
    for report in run_on_hosts(most_ranks, _across_hosts, settings):
        assert report.on_gpu is not None
        assert report.metrics["channel_transit_seconds_total"]
