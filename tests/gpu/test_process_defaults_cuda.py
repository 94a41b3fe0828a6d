"""Both faces on GPUs under defaults that programs set before anything else, bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.conformance.test_deep_ep_low_latency import FORMATS
from tests.distributed.every_call import assert_same_results, every_call
from tests.gpu import test_deep_ep_cuda as low_latency
from tests.gpu import test_deep_ep_high_throughput_cuda as high_throughput
from tests.gpu.conftest import GpuPools
from tests.process_defaults import ProcessDefaults, under

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

ALL_DEFAULTS = [ProcessDefaults(torch.bfloat16, "cuda"), ProcessDefaults(torch.float64, "meta")]


def run(
    gpus: GpuPools, ranks: int, defaults: ProcessDefaults, program: Callable[..., Any], *args: Any
) -> list[Any]:
    return gpus.run(ranks, under, defaults, program, *args)


@pytest.mark.parametrize("defaults", ALL_DEFAULTS, ids=str)
@pytest.mark.parametrize("mode", ["", "async", "hook"])
@pytest.mark.parametrize("form", FORMATS)
def test_deep_ep_low_latency(
    gpus: GpuPools, ranks: int, form: str, mode: str, defaults: ProcessDefaults
) -> None:
    case = low_latency.case_of(ranks)
    run(gpus, ranks, defaults, low_latency._round_trip, case, form, mode)


@pytest.mark.parametrize("defaults", ALL_DEFAULTS, ids=str)
@pytest.mark.parametrize("program", ["_without_top_k", "_bias", "_asynchronous"])
def test_deep_ep_high_throughput(
    gpus: GpuPools, ranks: int, program: str, defaults: ProcessDefaults
) -> None:
    run(gpus, ranks, defaults, high_throughput._conformance, program)


@pytest.mark.parametrize("defaults", ALL_DEFAULTS, ids=str)
def test_deep_ep_fp8(gpus: GpuPools, ranks: int, defaults: ProcessDefaults) -> None:
    formats = (torch.float32, torch.float8_e4m3fn)
    run(gpus, ranks, defaults, high_throughput._conformance, "_fp8", *formats)


@pytest.mark.parametrize("defaults", ALL_DEFAULTS, ids=str)
def test_native(gpus: GpuPools, ranks: int, defaults: ProcessDefaults) -> None:
    plain = gpus.run(ranks, every_call, "cuda")
    assert_same_results(run(gpus, ranks, defaults, every_call, "cuda"), plain)
