"""High throughput of DeepEP's interfaces on GPUs of several hosts, its kernels run on the CPU: the
programs and the oracle of the conformance tests, over a network that delays, reorders and
repeats."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from fanfold.backends.choose import BackendChoice
from fanfold.backends.high_throughput.cuda import CudaHighThroughput
from fanfold.memory.cuda_hosts import CudaMemoryAcrossHosts
from tests.conformance import test_deep_ep_elastic as elastic
from tests.conformance import test_deep_ep_high_throughput as buffers
from tests.conformance import test_deep_ep_hybrid as hybrid
from tests.conformance.test_deep_ep_elastic import DUPLICATES
from tests.conformance.test_deep_ep_high_throughput import CASE, good_dispatch
from tests.conformance.test_deep_ep_hybrid import LAYER, WIDE, Layer
from tests.distributed import routings
from tests.emulation.deep_ep import emulated_buffers, open_buffer, run
from tests.emulation.hosts import without_pinning
from tests.emulation.world import Builder
from tests.unit.test_deep_ep_elastic_emulated import open_buffer as open_elastic
from tests.unit.test_deep_ep_hybrid_emulated import open_buffer as open_hybrid

CTAS = 3
RANKS = 4
PLACED = BackendChoice(
    "cuda",
    torch.device("cpu"),
    "each rank has a GPU of its own",
    (9, 0),
    across_hosts=True,
)


@pytest.fixture(autouse=True)
def gpus_on_hosts(builder: Builder, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("FANFOLD_HOSTS", "2")
    monkeypatch.setenv("FANFOLD_NETWORK", "loopback:5")
    # Sums are those of one host: the kernels of a token's source add them.
    monkeypatch.setattr(routings, "PLACED", [0] * RANKS)
    monkeypatch.setattr(buffers, "open_buffer", open_buffer)
    monkeypatch.setattr(elastic, "open_buffer", open_elastic)
    monkeypatch.setattr(hybrid, "open_buffer", open_hybrid)
    with emulated_buffers(builder, CTAS, PLACED), without_pinning():
        yield


def _sent(group: Any) -> set[int]:
    """The peers to which counts or rows have gone through the network."""
    buffer = open_buffer(group)
    assert buffer.runtime is not None
    assert isinstance(buffer.runtime.high_throughput, CudaHighThroughput)
    assert isinstance(buffer.runtime._gpu_streams, CudaMemoryAcrossHosts)
    before = buffer.metrics()["channel_sent_bytes_total"]
    buffer.dispatch(**good_dispatch(buffer, CASE, group.rank))
    group.all_gather(None)
    sent = buffer.metrics()["channel_sent_bytes_total"]
    buffer.destroy()
    return {peer for peer in sent if sent[peer] > before[peer]}


def test_rows_for_other_hosts_go_through_the_network() -> None:
    assert run(RANKS, _sent) == [{2, 3}, {2, 3}, {0, 1}, {0, 1}]


def test_a_buffer() -> None:
    run(RANKS, buffers._round_trip, CASE, 1 << 20, 3, 8)


def test_fp8_of_a_buffer() -> None:
    run(RANKS, buffers._fp8, torch.float32, torch.float8_e4m3fn)


@pytest.mark.parametrize("program", ["_bias", "_asynchronous", "_without_top_k"])
def test_programs_of_a_buffer(program: str) -> None:
    run(RANKS, getattr(buffers, program))


@pytest.mark.parametrize("sync", [True, False])
def test_an_elastic_buffer(sync: bool) -> None:
    run(RANKS, elastic._plain, DUPLICATES, sync, 8)
    run(RANKS, elastic._expanded, DUPLICATES, sync, 16)


@pytest.mark.parametrize("expands", [False, True])
def test_fp8_of_an_elastic_buffer(expands: bool) -> None:
    run(RANKS, elastic._fp8, expands, False)


@pytest.mark.parametrize(
    "layer", [replace(LAYER, by="indices", pad=16), WIDE], ids=["indices, padded", "wide"]
)
def test_a_hybrid_buffer(layer: Layer) -> None:
    run(layer.ranks, hybrid._round, layer)
