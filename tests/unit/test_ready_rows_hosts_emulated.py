"""The low-latency combine that waits for outputs, of ranks on several hosts, its kernels run on the
CPU: a row for another host leaves once all rows have been written, and no word says that a row is
there whose signal has not come."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from fanfold.backends.low_latency import kernels
from fanfold.errors import PeerTimeout, SignalTimeout
from fanfold.geometry import Geometry
from tests.emulation.hosts import Network, Open, opening_on_hosts
from tests.emulation.world import Builder
from tests.unit.conftest import Compiled
from tests.unit.test_kernels_emulated import Shape
from tests.unit.test_ready_rows_emulated import round_of, without_a_signal

CTAS = 7
SHAPE = Shape(Geometry(4, 8, 3, 144, 9), late=True, grid=(7, 2))
# More tokens than a warp has lanes, and many of which a rank has no output.
LONG = Shape(Geometry(3, 12, 2, 32, 40), late=True, grid=(7, 2))


@pytest.fixture
def opens(builder: Builder) -> Iterator[Open]:
    """``opens(shape, network, **settings)`` makes a world, which ends with the test."""
    with opening_on_hosts(builder, CTAS) as open_:
        yield open_


@pytest.mark.parametrize(
    ("shape", "network", "block_rows", "sms", "hooks"),
    [
        (SHAPE, Network((0, 0, 1, 1), seed=21), 4, 2, True),
        (SHAPE, Network((0, 1, 2, 1), seed=22), 36, 7, False),
        (LONG, Network((0, 1, 0), seed=23, threads=1), 3, 1, False),
    ],
    ids=["two and two", "three hosts", "one SM"],
)
def test_rows_are_read_once_they_are_written(
    opens: Open, shape: Shape, network: Network, block_rows: int, sms: int, hooks: bool
) -> None:
    world = opens(shape, network)
    for turn in range(6):
        world.run(round_of(shape, turn, block_rows, sms, hooks))
    for memory in world.memories:
        memory.between.check()


def test_a_signal_that_does_not_come_is_named(opens: Open) -> None:
    """On its rank. Those of the other host wait in this very call for that rank's rows in vain: it
    tells nobody that they are there."""
    world = opens(SHAPE, Network((0, 0, 1, 1)), timeout_s=0.5)
    errors = world.run(without_a_signal(SHAPE))
    late = errors[1]
    assert isinstance(late, SignalTimeout)
    assert (late.rank, late.expert, late.block) == (1, 1, 0)
    assert isinstance(errors[0], PeerTimeout)
    for error in errors[2:]:
        assert isinstance(error, PeerTimeout)
        assert "combine" in error.phase
        assert error.peer == 1


@pytest.mark.parametrize(
    ("sizes", "logfmt"), [((8, 256, 8, 7168), False), ((64, 2048, 32, 16384), True)]
)
def test_compiles_for_hopper(
    compiled: Compiled, sizes: tuple[int, int, int, int], logfmt: bool
) -> None:
    source = kernels.combine_kernel(
        Geometry(*sizes, 128), late=True, logfmt=logfmt, awaits_signals=True, across_hosts=True
    )
    binary = compiled(source, "sm_90a")
    assert 0 < binary.registers <= source.register_limit
    assert binary.spill_bytes == 0
