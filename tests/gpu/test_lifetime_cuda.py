"""What GPU calls leave behind."""

from __future__ import annotations

import gc
import os
import sys
from unittest import mock

import pytest
import torch.distributed as dist

from tests.conformance.test_deep_ep_low_latency import FORMATS
from tests.distributed.every_call import round_trips
from tests.gpu import test_deep_ep_cuda as low_latency
from tests.gpu.conftest import GpuPools

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]


def _holders(group: dist.ProcessGroup) -> list[int]:
    """How often the group is held, before all calls and behind each part of them, without the
    garbage collector: a group of gloo that is held when Python ends makes PyTorch abort."""
    case = low_latency.case_of(dist.get_world_size(group))
    gc.collect()
    gc.disable()
    held = [sys.getrefcount(group)]
    try:
        with mock.patch.dict(os.environ, {"FANFOLD_BACKEND": "cuda"}):
            for mode in ("low_latency", "high_throughput"):
                for dtype in ("bf16", "fp8"):
                    round_trips(group, mode, dtype)
                    held.append(sys.getrefcount(group))
        for form in FORMATS:
            low_latency._round_trip(group, case, form, "hook")
            held.append(sys.getrefcount(group))
    finally:
        gc.enable()
    return held


def test_nothing_is_left_to_the_collector(gpus: GpuPools, ranks: int) -> None:
    for held in gpus.run(ranks, _holders):
        assert held == held[:1] * len(held)
