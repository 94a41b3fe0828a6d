"""Groups of NCCL, as serving and training frameworks have them: setting up goes through the group,
whatever its backend, and tokens never do."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch.distributed as dist

from tests.gpu import test_deep_ep_cuda as deep_ep
from tests.gpu import test_high_throughput_cuda as high_throughput
from tests.gpu import test_low_latency_cuda as low_latency
from tests.gpu import test_training_cuda as training
from tests.gpu.conftest import GpuPools
from tests.gpu.support import case_of

pytestmark = [pytest.mark.gpu, pytest.mark.gpu_each, pytest.mark.timeout(300)]


@contextmanager
def group_of(backend: str) -> Iterator[dist.ProcessGroup]:
    """All ranks, a second time. Collective."""
    group = dist.new_group(backend=backend)
    assert isinstance(group, dist.ProcessGroup)
    try:
        yield group
    finally:
        dist.destroy_process_group(group)


def _over(group: dist.ProcessGroup, backend: str, work: str, *args: Any) -> None:
    del group
    works: dict[str, Callable[..., Any]] = {
        "low_latency": low_latency._round,
        "high_throughput": high_throughput._rounds,
        "deep_ep": deep_ep._round_trip,
        "training": training._gradients,
    }
    with group_of(backend) as other:
        works[work](other, *args)
        works[work](other, *args)  # with memory that is shared anew


@pytest.mark.parametrize("backend", ["nccl", "cpu:gloo,cuda:nccl"])
def test_low_latency(gpus: GpuPools, ranks: int, backend: str) -> None:
    gpus.run(ranks, _over, backend, "low_latency", case_of(ranks, dtype="fp8"))


@pytest.mark.parametrize("backend", ["nccl", "cpu:gloo,cuda:nccl"])
def test_high_throughput(gpus: GpuPools, ranks: int, backend: str) -> None:
    case = high_throughput.case_of(ranks)
    gpus.run(ranks, _over, backend, "high_throughput", [case, case], 1 << 20, True)


def test_deep_ep(gpus: GpuPools, ranks: int) -> None:
    gpus.run(ranks, _over, "nccl", "deep_ep", deep_ep.case_of(ranks), "fp8", "hook")


def test_gradients(gpus: GpuPools, ranks: int) -> None:
    case = training._case(training.calls.CASES[1], ranks)
    gpus.run(ranks, _over, "nccl", "training", case)
