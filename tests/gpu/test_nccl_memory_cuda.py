"""Symmetric memory over NCCL's windows on GPUs: both modes and a face, with the tests that they
have over PyTorch's."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

from fanfold.backends import opening
from fanfold.backends.opening import memory_of_gpus
from fanfold.config import Config
from fanfold.group import as_group
from fanfold.memory.nccl import NcclSymmetricMemory
from tests.distributed.cuda_rounds import settle
from tests.gpu import test_deep_ep_cuda as deep_ep
from tests.gpu import test_high_throughput_cuda as high_throughput
from tests.gpu import test_low_latency_cuda as low_latency
from tests.gpu.conftest import GpuPools
from tests.gpu.support import case_of

pytestmark = [pytest.mark.gpu, pytest.mark.gpu_each, pytest.mark.timeout(300)]


def _over(group: dist.ProcessGroup, work: str, *args: Any) -> None:
    works: dict[str, Callable[..., Any]] = {
        "low_latency": low_latency._round,
        "high_throughput": high_throughput._rounds,
        "deep_ep": deep_ep._round_trip,
    }
    made = mock.Mock(side_effect=NcclSymmetricMemory)
    # Instead of PyTorch's, wherever a mode opens memory.
    with (
        mock.patch.dict("os.environ", FANFOLD_GPU_MEMORY="nccl"),
        mock.patch.object(opening, "NcclSymmetricMemory", made),
    ):
        works[work](group, *args)
        works[work](group, *args)  # with another window
    assert made.call_count >= 2


@pytest.mark.parametrize("dtype", ["fp8", "bf16"])
def test_low_latency(gpus: GpuPools, ranks: int, dtype: str) -> None:
    gpus.run(ranks, _over, "low_latency", case_of(ranks, dtype=dtype))


@pytest.mark.parametrize("in_place", [False, True])
def test_high_throughput(gpus: GpuPools, ranks: int, in_place: bool) -> None:
    case = high_throughput.case_of(ranks)
    gpus.run(ranks, _over, "high_throughput", [case, case], high_throughput.FEW_SLOTS, in_place)


def test_deep_ep(gpus: GpuPools, ranks: int) -> None:
    gpus.run(ranks, _over, "deep_ep", deep_ep.case_of(ranks), "fp8", "hook")


def _stores(group: dist.ProcessGroup, nbytes: int) -> None:
    own = as_group(group)
    memory = memory_of_gpus(own, nbytes, Config(gpu_memory="nccl"))
    assert isinstance(memory, NcclSymmetricMemory)
    assert memory.base(own.rank) % 128 == 0
    memory.tensor.fill_(own.rank)
    settle(memory.device)
    own.all_gather(None)
    for peer in range(own.size):
        assert _bytes_at(memory.base(peer)) == bytes([peer] * 4)
    own.all_gather(None)
    result = memory.tensor[:8]
    memory.close()
    assert result.tolist() == [own.rank] * 8  # a tensor keeps the window


def _bytes_at(address: int) -> bytes:
    """Four of them, perhaps of another GPU."""
    found = ctypes.create_string_buffer(4)
    driver = ctypes.CDLL("libcuda.so.1")
    assert driver.cuMemcpyDtoH_v2(found, ctypes.c_uint64(address), ctypes.c_size_t(4)) == 0
    return found.raw


def test_every_rank_reaches_all_regions(gpus: GpuPools, ranks: int) -> None:
    """Also many times, as windows end."""
    for nbytes in (1 << 20, 3 << 20, 100):
        gpus.run(ranks, _stores, nbytes)
