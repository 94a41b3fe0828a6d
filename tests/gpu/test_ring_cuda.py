"""Rings from a GPU to threads of the CPU."""

from __future__ import annotations

import pytest

from fanfold.bench.ring_gpu import GpuRings
from tests.gpu.conftest import gpu_count

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def _gpu() -> None:
    if gpu_count() == 0:
        pytest.skip("no GPU")


@pytest.mark.parametrize(
    ("warps", "count", "threads", "lanes", "slots"),
    [
        (1, 1, 1, 1, 2),
        (500, 1, 1, 1, 64),
        (33, 32, 4, 1, 1024),
        (7, 3, 2, 5, 2),
        (132, 8, 8, 32, 4),
    ],
)
def test_every_command_comes_once_and_in_order(
    warps: int, count: int, threads: int, lanes: int, slots: int
) -> None:
    """A command that is lost, doubled, torn or early is an error of the threads that pop."""
    rings = GpuRings(count, slots, threads, lanes)
    for commands in (1, 100_000):  # rings go on from call to call
        each = -(-commands // (warps * lanes))
        assert rings.throughput(warps, commands)["commands"] == each * warps * lanes


def test_latencies_are_of_two_clocks_that_agree() -> None:
    rings = GpuRings(4, 1024, 2, 1)
    found = rings.latency(rate=100_000.0, commands=20_000)
    assert found["commands"] == 20_000
    assert found["p50_ns"] > -found["clock_ns"]  # nothing comes before it was pushed
    assert found["p50_ns"] <= found["p99_ns"] <= found["most_ns"]
