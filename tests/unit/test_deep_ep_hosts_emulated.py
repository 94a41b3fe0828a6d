"""Low latency of the DeepEP face on GPUs of several hosts, its kernels run on the CPU: the programs
and the oracle of the conformance tests, over a network that delays, reorders and repeats. High
throughput stays on the host, as the GPUs are too old for its kernels."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from fanfold.backends import opening
from fanfold.backends.choose import BackendChoice
from fanfold.backends.high_throughput import HostHighThroughput
from fanfold.backends.low_latency import cuda_bytes_between_hosts, cuda_required_bytes
from fanfold.deep_ep import runtime
from fanfold.deep_ep.sizes import (
    cuda_memory_between_hosts_bytes,
    cuda_memory_bytes,
    hint_bytes,
)
from fanfold.deep_ep.streams import HostStreams
from fanfold.errors import FanfoldError
from fanfold.geometry import Geometry
from fanfold.memory.cuda_hosts import CudaMemoryAcrossHosts
from tests.conformance import test_deep_ep_high_throughput as high_throughput
from tests.conformance import test_deep_ep_low_latency as conformance
from tests.conformance.deep_ep_reference import Case, inputs
from tests.emulation.deep_ep import Memory, run
from tests.emulation.hosts import emulated_hosts
from tests.emulation.world import Builder

CTAS = 7
PLACED = BackendChoice(
    "cuda", torch.device("cpu"), "each rank has a GPU of its own", (8, 0), across_hosts=True
)
CASE = Case(experts=8, top_k=3, hidden=256, tokens=(6, 4, 0, 5), seed=3)


@pytest.fixture(autouse=True)
def gpus_on_hosts(builder: Builder, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("FANFOLD_HOSTS", "2")
    monkeypatch.setenv("FANFOLD_NETWORK", "loopback:5")
    with (
        emulated_hosts(builder, CTAS),
        mock.patch.multiple(
            runtime, choose=lambda *_, **__: PLACED, Streams=lambda device: HostStreams()
        ),
        mock.patch.object(opening, "CudaSymmetricMemory", Memory),
        mock.patch.object(dist, "get_rank", lambda group: group.rank),
    ):
        yield


@pytest.mark.parametrize("mode", ["", "async", "hook"])
@pytest.mark.parametrize("form", conformance.FORMATS)
def test_rounds(form: str, mode: str) -> None:
    run(4, conformance._round_trip, CASE, form, mode)


@pytest.mark.parametrize(
    "program",
    ["_statistics", "_zero_copy", "_logfmt", "_two_open_calls", "_rebuilt_handle"],
)
def test_programs(program: str) -> None:
    run(4, getattr(conformance, program))


def _sent(group: Any) -> tuple[set[int], dict[int, int]]:
    """The peers to which rows have gone through the network, and the rows of the experts."""
    buffer = conformance.open_buffer(group, CASE, num_nvl_bytes=1 << 20)
    assert buffer.runtime is not None
    assert isinstance(buffer.runtime._gpu_memory, CudaMemoryAcrossHosts)
    assert isinstance(buffer.runtime.high_throughput, HostHighThroughput)
    mine = inputs(CASE, group.rank)
    before = buffer.metrics()["channel_sent_bytes_total"]
    buffer.low_latency_dispatch(mine.x, mine.topk_idx, CASE.max_tokens, CASE.experts, use_fp8=False)
    group.all_gather(None)
    metrics = buffer.metrics()
    sent = metrics["channel_sent_bytes_total"]
    buffer.destroy()
    assert buffer.metrics()["channel_sent_bytes_total"].keys() == sent.keys()
    row = CASE.hidden * 2
    return {peer for peer in sent if sent[peer] >= before[peer] + row}, metrics["calls_total"]


def test_rows_for_other_hosts_are_counted() -> None:
    for rank, (peers, calls) in enumerate(run(4, _sent)):
        there = {2, 3} if rank < 2 else {0, 1}
        assert peers == (there if CASE.tokens[rank] else set())
        assert calls["low_latency_dispatch"] == 1


def test_high_throughput_stays_on_the_host() -> None:
    high = high_throughput.CASE
    run(high.ranks, high_throughput._round_trip, high, 1 << 20, 3, 8)


def _too_many_tokens(group: Any) -> str:
    buffer = conformance.open_buffer(group, CASE)
    mine = inputs(CASE, group.rank)
    with pytest.raises(FanfoldError) as caught:
        buffer.low_latency_dispatch(mine.x, mine.topk_idx, 100 * CASE.max_tokens, CASE.experts)
    buffer.low_latency_dispatch(mine.x, mine.topk_idx, CASE.max_tokens, CASE.experts)
    buffer.destroy()
    return str(caught.value)


def test_more_than_the_memory_holds_is_refused() -> None:
    for text in run(4, _too_many_tokens):
        assert "num_rdma_bytes is" in text


def test_what_fits_on_a_gpu_fits_between_hosts() -> None:
    numbers = random.Random(1)
    for _ in range(2_000):
        ranks = numbers.choice([2, 3, 4, 8, 31, 64, 256, 1024])
        experts = ranks * numbers.randint(1, 4)
        geometry = Geometry(
            ranks,
            experts,
            numbers.randint(1, min(32, experts)),
            16 * numbers.choice([1, 2, 3, 8, 64, 448, 1024]),
            numbers.choice([1, 2, 3, 7, 128, 1024]),
        )
        nbytes = hint_bytes(geometry)
        on_gpu = cuda_required_bytes(geometry, late_weights=True)
        between = cuda_bytes_between_hosts(geometry)
        assert on_gpu <= cuda_memory_bytes(nbytes)
        assert between <= cuda_memory_between_hosts_bytes(nbytes, ranks)
        # Any other memory that is enough on the GPU is enough there, too.
        beside = cuda_memory_between_hosts_bytes(0, ranks) - cuda_memory_bytes(0)
        assert between <= on_gpu + beside
