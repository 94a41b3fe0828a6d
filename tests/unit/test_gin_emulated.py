"""Both modes of ranks on several hosts by NCCL's GIN, run on the CPU: a network that promises what
GIN does and no more, and delays and reorders puts. The oracle is that of one host."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from fanfold.formats import ScaleFormat
from fanfold.geometry import Geometry
from tests.emulation import high_throughput, high_throughput_hosts
from tests.emulation.hosts import Network, Open, opening_on_hosts
from tests.emulation.libnccl import emulated_nccl
from tests.emulation.world import Builder
from tests.unit import test_high_throughput_emulated as one_host
from tests.unit import test_high_throughput_emulated_faults as faults
from tests.unit import test_kernels_emulated as few
from tests.unit.test_high_throughput_hosts_emulated import Worlds
from tests.unit.test_kernels_emulated import Shape, batches_of

CTAS, GRID = 7, (6, 2)
BF16 = Shape(Geometry(4, 8, 3, 528, 9), grid=GRID)
FP8 = Shape(Geometry(3, 9, 3, 272, 7), ScaleFormat.FLOAT32, grid=GRID)
LATE = Shape(Geometry(4, 12, 5, 144, 11), ScaleFormat.UE8M0, late=True, grid=GRID)
LONG = Shape(Geometry(2, 6, 1, 16, 75), grid=(3, 1))
SHAPES = {
    "bf16": (BF16, (0, 0, 1, 1)),
    "fp8": (FP8, (0, 1, 0)),
    "late": (LATE, (0, 1, 2, 1)),
    "long": (LONG, (0, 1)),
}
VERSIONS = [22809, 23007]


@pytest.fixture
def libnccl(builder: Builder) -> Iterator[ctypes.CDLL]:
    with emulated_nccl(builder) as library:
        yield library
        assert library.gin_faults() == 0


@pytest.fixture
def opens(libnccl: ctypes.CDLL, builder: Builder) -> Iterator[Open]:
    with opening_on_hosts(builder, CTAS) as open_:
        yield open_


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("name", SHAPES)
def test_low_latency(libnccl: ctypes.CDLL, opens: Open, name: str, seed: int) -> None:
    libnccl.behave(b"gin_seed", seed)
    libnccl.behave(b"version", VERSIONS[seed % 2])
    shape, hosts = SHAPES[name]
    world = opens(shape, Network(hosts, gin=True))
    for turn in range(6):
        few.run_round(world, shape, batches_of(shape, turn), turn % 2 == 1)
    assert (libnccl.gin_reordered() > 0) == (seed > 0)


@pytest.fixture(params=[0, 3, 4])
def worlds(
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
    libnccl: ctypes.CDLL,
    builder: Builder,
) -> Iterator[Worlds]:
    """In place of the worlds of the tests of one host: with a hostile network, and without."""
    libnccl.behave(b"gin_seed", request.param)
    with high_throughput_hosts.emulated_hosts(builder, high_throughput.CTAS):
        made = Worlds(gin=True)
        for module in (one_host, faults):
            monkeypatch.setattr(module, "World", made)
        yield made
        assert (libnccl.gin_reordered() > 0) == (request.param > 0)
        made.close()


@pytest.mark.parametrize("layout", one_host.LAYOUTS)
@pytest.mark.parametrize("case", [case for case in one_host.CASES if case.ranks > 1], ids=str)
def test_high_throughput(worlds: Worlds, case: high_throughput.Case, layout: str) -> None:
    """Through rings so short that every slot is used again and again."""
    one_host.test_rounds(case, layout)


def test_the_last_puts_arrive_before_a_rank_closes(libnccl: ctypes.CDLL, opens: Open) -> None:
    """Which a rank that is ahead does while the others are still in the last call."""
    libnccl.behave(b"gin_seed", 5)
    libnccl.behave(b"gin_most_us", 1000)
    shape, hosts = SHAPES["bf16"]
    for turn in range(2):
        world = opens(shape, Network(hosts, gin=True), timeout_s=5.0)
        batches = batches_of(shape, turn)

        def program(rank: int, mode: Any) -> None:
            call = few.Caller(shape, mode, rank)
            received, _ = call.dispatch(batches[rank])
            out = torch.full_like(batches[rank].x, torch.nan)
            call.combine(batches[rank], received, out=out)
            world.memories[rank].close()
            assert torch.equal(out, few.sums_of(shape.geometry, batches, rank))

        world.run(program)
