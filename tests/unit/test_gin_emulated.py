"""Both modes of ranks on several hosts by NCCL's GIN, run on the CPU: a network that promises what
GIN does and no more, and delays and reorders puts. The oracle is that of one host."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch

from fanfold.errors import FanfoldError, PeerTimeout, TransportError, UnavailableError
from fanfold.formats import ScaleFormat
from fanfold.geometry import Geometry
from fanfold.nccl.communicator import Communicator
from fanfold.nccl.library import NcclLibrary
from tests.emulation import high_throughput, high_throughput_hosts
from tests.emulation.hosts import HostsWorld, Network, Open, opening_on_hosts
from tests.emulation.libnccl import emulated_nccl
from tests.emulation.world import Builder, ThreadGroup
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
WIDE = Shape(Geometry(2, 4, 2, 2064, 5), grid=(3, 1))  # of which combines have more warps
SHAPES = {
    "bf16": (BF16, (0, 0, 1, 1)),
    "fp8": (FP8, (0, 1, 0)),
    "late": (LATE, (0, 1, 2, 1)),
    "long": (LONG, (0, 1)),
    "wide": (WIDE, (0, 1)),
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


def check_round(
    shape: Shape, rank: int, mode: Any, batches: list[Any], end: Callable[[], object]
) -> None:
    """One rank's part of a round, with ``end`` right behind it."""
    call = few.Caller(shape, mode, rank)
    received, _ = call.dispatch(batches[rank])
    out = torch.full_like(batches[rank].x, torch.nan)
    call.combine(batches[rank], received, out=out)
    end()
    assert torch.equal(out, few.sums_of(shape.geometry, batches, rank))


@pytest.mark.parametrize("dropped", [False, True])
def test_the_last_puts_arrive_before_a_window_ends(
    libnccl: ctypes.CDLL, opens: Open, dropped: bool
) -> None:
    """On a rank that is ahead, while the others are still in the last call. One that drops its
    object waits for none of them."""
    libnccl.behave(b"gin_seed", 5)
    libnccl.behave(b"gin_most_us", 1000)
    shape, hosts = SHAPES["bf16"]
    world = opens(shape, Network(hosts, gin=True), timeout_s=5.0)
    batches = batches_of(shape, 0)

    def program(rank: int, mode: Any) -> None:
        memory = world.memories[rank]
        # What is behind the garbage collector's end of the memory, once the GPU is idle.
        end = memory.between._end if dropped and rank % 2 else memory.close  # type: ignore[attr-defined]
        check_round(shape, rank, mode, batches, end)

    world.run(program)


def failures(world: HostsWorld, shape: Shape, absent: int) -> list[Any]:
    """What a dispatch that one rank does not make raises on the others."""
    batches = batches_of(shape, 0)

    def program(rank: int, mode: Any) -> Any:
        if rank == absent:
            return None
        few.Caller(shape, mode, rank).dispatch(batches[rank])
        try:
            mode.check()
        except FanfoldError as error:
            return error
        return None

    return world.run(program)


def test_a_late_rank_is_named(opens: Open) -> None:
    shape, hosts = SHAPES["long"]
    world = opens(shape, Network(hosts, gin=True), timeout_s=0.5)
    few.run_round(world, shape, batches_of(shape, 1), False)
    late, none = failures(world, shape, 1)
    assert isinstance(late, PeerTimeout)
    assert (late.peer, none) == (1, None)


def test_what_ends_nccl_is_named(libnccl: ctypes.CDLL, opens: Open) -> None:
    """Before a call, and as the cause of a wait in vain."""
    shape, hosts = SHAPES["long"]
    world = opens(shape, Network(hosts, gin=True), timeout_s=0.5)
    few.run_round(world, shape, batches_of(shape, 1), False)
    libnccl.behave(b"lost_by", 0)
    with pytest.raises(TransportError, match="nccl:gin of rank 0: the network of NCCL"):
        world.modes[0].check()
    world.modes[1].check()
    between = world.memories[0].between
    late = PeerTimeout(0, 1, "a dispatch", 2, 1, 0.5, False)
    with pytest.raises(TransportError, match="between rank 0 and rank 1"):
        between.explain(late)
    libnccl.behave_well()
    between.explain(late)  # the caller raises it


def test_another_geometry_and_a_reset(libnccl: ctypes.CDLL, opens: Open) -> None:
    """Words of calls before the fence do not count for those after it."""
    libnccl.behave(b"gin_seed", 6)
    shape, hosts = SHAPES["bf16"]
    world = opens(shape, Network(hosts, gin=True))
    smaller = dataclasses.replace(shape, geometry=Geometry(4, 8, 3, 272, 5))
    for each in (shape, smaller, shape):
        for turn in range(2):
            few.run_round(world, each, batches_of(each, turn), False)
        world.run(lambda rank, mode: mode.reset())
        assert words_of(world, "taken") == [
            list(sent) for sent in zip(*words_of(world, "sent"), strict=True)
        ]


def test_a_fence_comes_while_a_rank_is_still_in_a_call(libnccl: ctypes.CDLL, opens: Open) -> None:
    """Together with the words that the call waits for."""
    libnccl.behave(b"gin_seed", 7)
    shape, hosts = SHAPES["long"]
    world = opens(shape, Network(hosts, gin=True), timeout_s=5.0)
    batches = batches_of(shape, 0)

    def program(rank: int, mode: Any) -> None:
        for _ in range(20):
            check_round(shape, rank, mode, batches, mode.reset)

    world.run(program)


def test_resets_that_fail_on_one_rank(libnccl: ctypes.CDLL, opens: Open) -> None:
    """Fences of the others are not taken for the next ones, of which each rank waits for all."""
    libnccl.behave(b"gin_seed", 8)
    shape, hosts = SHAPES["late"]
    world = opens(shape, Network(hosts, gin=True), timeout_s=5.0)
    few.run_round(world, shape, batches_of(shape, 0), False)

    def program(failing: int, rank: int, mode: Any) -> None:
        fails: Any = contextlib.nullcontext()
        if rank == failing:
            error = UnavailableError("by the test")
            fails = mock.patch.object(mode, "_wait", side_effect=error)
        with pytest.raises(FanfoldError, match="by the test"), fails:
            mode.reset()
        mode.reset()

    for turn in range(3):
        world.run(functools.partial(program, turn))
        found = words_of(world, "fences")
        few.run_round(world, shape, batches_of(shape, turn), False)
    # Of the first layout and of six resets, of which three ranks each failed in one.
    _, hosts = SHAPES["late"]
    sent = [6, 6, 6, 7]
    for rank, numbers in enumerate(found):
        elsewhere = [host != hosts[rank] for host in hosts]
        assert numbers == [there * n for there, n in zip(elsewhere, sent, strict=True)]


def test_a_rank_refuses_the_first_call(libnccl: ctypes.CDLL, opens: Open) -> None:
    """The others have sent a fence then, and it none."""
    shape, hosts = SHAPES["bf16"]
    smaller = dataclasses.replace(shape, geometry=Geometry(4, 8, 3, 272, 5))
    world = opens(shape, Network(hosts, gin=True), timeout_s=5.0)
    for turn, each in enumerate((shape, smaller)):
        batches = batches_of(each, turn)

        def program(each: Shape, batches: Any, rank: int, mode: Any) -> None:
            if rank == 0:
                mode.refuse_dispatch(ValueError("by the test"), each.geometry)
                return
            with pytest.raises(FanfoldError, match="by the test"):
                few.Caller(each, mode, rank).dispatch(batches[rank])

        world.run(functools.partial(program, each, batches))
        few.run_round(world, each, batches, False)


def test_a_rank_that_has_failed_fills_no_queue(opens: Open) -> None:
    """With words of calls that were enqueued behind the one that failed, as by a graph."""
    shape, hosts = SHAPES["long"]
    world = opens(shape, Network(hosts, gin=True), timeout_s=0.5)
    few.run_round(world, shape, batches_of(shape, 0), False)
    batches = batches_of(shape, 1)

    def program(rank: int, mode: Any) -> None:
        if rank == 1:
            return
        few.Caller(shape, mode, rank).dispatch(batches[rank])
        call = mode._plan.dispatch
        for _ in range(70):
            call.launch(call.args, mode._follow())

    world.run(program)
    world.run(lambda rank, mode: mode.reset())
    few.run_round(world, shape, batches, False)


def words_of(world: HostsWorld, which: str) -> list[list[int]]:
    """How many each rank has ``"sent"`` to, or ``"taken"`` from, each rank, or the number of the
    last of its ``"fences"`` (``GinPeer``)."""
    peer_words, most_ranks, place = 6, 1024, {"sent": 2, "taken": 4, "fences": 5}[which]
    tails = [memory.between._block[-8 * peer_words * most_ranks :] for memory in world.memories]  # type: ignore[attr-defined]
    found = [tail.view(torch.int64).view(most_ranks, peer_words)[:, place] for tail in tails]
    return [each[: len(found)].tolist() for each in found]


@pytest.mark.parametrize(
    ("behaviour", "text"),
    [
        (b"no_gin", "GIN not supported"),
        (b"no_communicator_of", "ncclCommInitRank"),
        (b"refuses_window_of", "peer access is not supported"),
    ],
)
def test_what_one_rank_lacks_ends_all(
    libnccl: ctypes.CDLL, opens: Open, behaviour: bytes, text: str
) -> None:
    libnccl.behave(behaviour, 1)
    shape, hosts = SHAPES["long"]
    with pytest.raises(FanfoldError, match=text):
        opens(shape, Network(hosts, gin=True), timeout_s=3.0)
    libnccl.behave_well()
    libnccl.release_all()


def test_another_libnccl_has_no_gin(libnccl: ctypes.CDLL, opens: Open) -> None:
    libnccl.behave(b"version", 22907)
    shape, hosts = SHAPES["long"]
    with pytest.raises(UnavailableError, match=r"GIN of NCCL 2\.29\.7 .* is not used"):
        opens(shape, Network(hosts, gin=True))


def test_a_process_keeps_a_communicator_of_2_28(libnccl: ctypes.CDLL) -> None:
    """As that version loses its plugin with the last one."""
    kept: list[ctypes.c_void_p] = []
    with mock.patch.object(Communicator, "_kept", kept):
        for version, left in ((23007, 0), (22809, 1), (22809, 1)):
            libnccl.behave(b"version", version)
            library = NcclLibrary.open(libnccl._name)
            made = Communicator(library, ThreadGroup(0, [None], threading.Barrier(1)), 5.0)
            address = made.allocate(64)
            window = made.register(address, 64)
            made.device_communicator(2, 2)
            made.deregister(window)
            made.free(address)
            made.close()
            assert len(kept) == left
    libnccl.ncclCommDestroy(kept[0])  # or the test leaves it behind
