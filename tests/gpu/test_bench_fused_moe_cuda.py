"""``fanfold bench fused-moe`` on GPUs: everything it times, checked."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from fanfold.bench.fused_moe import FusedMoeSettings, RankPoint, bench_ranks
from fanfold.bench.fused_moe_report import FusedMoePoint, record, timeline_lines
from fanfold.bench.fused_moe_timing import PHASES
from tests.gpu.conftest import GpuPools

pytestmark = [pytest.mark.gpu, pytest.mark.gpu_each]


def _points(group: dist.ProcessGroup, settings: FusedMoeSettings) -> list[RankPoint]:
    return bench_ranks(group, settings)


def test_times_the_kernel_and_its_rivals(gpus: GpuPools, ranks: int) -> None:
    settings = FusedMoeSettings(
        tokens=(300, 1), ranks=ranks, hidden=512, intermediate=256, top_k=4, experts=8 * ranks,
        backend="cuda", iterations=3, warmup=1, pause_ms=1.0,
    )  # fmt: skip
    of_ranks = gpus.run(ranks, _points, settings)
    for found in zip(*of_ranks, strict=True):
        for rank in found:
            assert rank.differences["fused"] < 1e-3
            assert set(rank.microseconds) >= {"fused", "unfused", "unfused_gemms"}
            assert all(bool((t > 0).all()) for t in rank.microseconds.values())
            assert rank.spans is not None
            ns = rank.spans.ns
            assert ns.shape[::2] == (settings.iterations, 1 + len(PHASES))
            assert bool((ns[:, :, [0, 1, 3, 4]] > 0).all())
            known = torch.where(ns > 0, ns, ns.cummax(2).values)
            assert bool((known.diff(dim=2) >= 0).all())
            assert len(rank.watts) == 5
        point = FusedMoePoint(settings, list(found))
        fields = record(point)
        assert fields["total_us_least"] > 0
        # What a Hopper GPU can run at, and its power cap may leave.
        assert 200 < fields["kernel_clock_mhz_least"] <= fields["kernel_clock_mhz_most"] < 2200
        assert fields["event_us"] > 0
        ends = [line["end_ns"] for line in timeline_lines(point)]
        assert len(ends) == sum(rank.spans.ns.shape[1] for rank in found if rank.spans is not None)
        assert min(ends) > 0
    few = [points[1] for points in of_ranks]
    assert sum(rank.slots for rank in few) == 4 * ranks
