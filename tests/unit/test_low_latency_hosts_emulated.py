"""The low-latency kernels of ranks on several hosts, run on the CPU: what travels between hosts
does so as commands through rings and proxies, over a network that delays, reorders and repeats it.
The oracle is that of one host. What only a GPU shows, its memory order and its speed, is not seen.
"""

from __future__ import annotations

import ctypes
import dataclasses
import logging
import threading
import time
import types
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from fanfold import _core
from fanfold.backends import opening
from fanfold.backends.choose import BackendChoice
from fanfold.backends.low_latency.cuda import CudaLowLatency
from fanfold.backends.low_latency.kernels import kernel_sources
from fanfold.backends.low_latency.sizes import core_geometry, cuda_bytes_between_hosts
from fanfold.config import Config
from fanfold.errors import (
    ArgumentError,
    FanfoldError,
    PeerTimeout,
    TransportError,
    UnavailableError,
    UsageError,
)
from fanfold.formats import ScaleFormat
from fanfold.geometry import Geometry
from fanfold.memory.cuda_hosts import CudaMemoryAcrossHosts, counting_cores
from fanfold.metrics import collect
from tests.emulation.hosts import HostsWorld, Network, Open, opening_on_hosts, whole_pages
from tests.emulation.world import Builder, ThreadGroup, gpu_memory
from tests.unit import test_kernels_emulated as few
from tests.unit.conftest import Compiled
from tests.unit.test_kernels_compile import check
from tests.unit.test_kernels_emulated import (
    SHAPES,
    Batch,
    Caller,
    Shape,
    batches_of,
    check_received,
)

CTAS = 7
GRID = (6, 2)


@pytest.fixture
def opens(builder: Builder) -> Iterator[Open]:
    """``opens(shape, network, **settings)`` makes a world, which ends with the test."""
    with opening_on_hosts(builder, CTAS) as open_:
        yield open_


BF16 = Shape(Geometry(4, 8, 3, 528, 9), grid=GRID)
FP8 = Shape(Geometry(3, 9, 3, 272, 7), ScaleFormat.FLOAT32, grid=GRID)
LATE = Shape(Geometry(4, 12, 5, 144, 11), ScaleFormat.UE8M0, late=True, grid=GRID)
# Runs of more tokens than a warp has lanes; tables of 12 and of 8 bytes, which share no unit.
LONG = Shape(Geometry(2, 6, 1, 16, 75), grid=(3, 1))
TWO_AND_TWO = (0, 0, 1, 1)
NETWORKS = {
    "in order": (BF16, Network(TWO_AND_TWO)),
    "bf16": (BF16, Network(TWO_AND_TWO, seed=11)),
    "fp8": (FP8, Network((0, 1, 0), seed=12, threads=1)),
    "late": (LATE, Network((0, 1, 2, 1), seed=13)),
    "long": (LONG, Network((0, 1), seed=14, threads=1, ring_slots=32, rows_apart=True)),
    "fp8 apart": (FP8, Network((0, 1, 1), seed=15, rows_apart=True)),
    "late apart": (LATE, Network(TWO_AND_TWO, seed=16, threads=1, rows_apart=True)),
}
HOSTILE = pytest.mark.parametrize(("shape", "network"), NETWORKS.values(), ids=NETWORKS)


def run_rounds(world: HostsWorld, shape: Shape, turns: list[list[Batch]], hooks: bool) -> None:
    """A dispatch and a combine of each turn's batches, of which every bit is checked."""
    for batches in turns:
        few.run_round(world, shape, batches, hooks)
    for memory in world.memories:
        memory.between.check()
        assert memory.between.has_rows_apart == world.rows_apart


@HOSTILE
@pytest.mark.parametrize("hooks", [False, True])
def test_rounds(opens: Open, shape: Shape, network: Network, hooks: bool) -> None:
    world = opens(shape, network)
    run_rounds(world, shape, [batches_of(shape, turn) for turn in range(6)], hooks)
    ranks = range(shape.geometry.ranks)
    assert all(world.count("commands", rank) > 0 for rank in ranks)
    if network.seed:
        assert sum(world.count("reordered", rank) for rank in ranks) > 0
        assert sum(world.count("duplicates", rank) for rank in ranks) > 0


def test_runs_of_every_length(opens: Open) -> None:
    """Tokens of which the first ``length`` of every ``period`` go to the other host."""
    shape = LONG
    turns = []
    for turn, (length, period) in enumerate([(75, 75), (31, 32), (33, 34), (1, 2), (32, 64)]):
        batches = [Batch.of(shape.geometry, 75, 10 * turn + rank) for rank in range(2)]
        for rank, batch in enumerate(batches):
            away = torch.arange(75, dtype=torch.int64, device="cpu") % period < length
            batch.topk_idx[:, 0] = torch.where(away, 3 * (1 - rank) + turn % 3, -1)
        turns.append(batches)
    run_rounds(opens(shape, Network((0, 1), seed=31)), shape, turns, False)


def test_rows_stay_until_they_are_read(opens: Open) -> None:
    """The ranks of one host are two calls ahead of those of the other, which read late: until then
    nothing that the network may still have to send is written over."""
    world = opens(BF16, Network(TWO_AND_TWO, seed=32))
    turns = [batches_of(BF16, turn) for turn in range(3)]
    looked = threading.Barrier(4, timeout=60.0)

    def sent_away(rank: int) -> bytes:
        memory = world.memories[rank].between.memory
        copies = [memory.base(peer) for peer in range(4) if TWO_AND_TWO[peer] == 1]
        return b"".join(ctypes.string_at(copy, memory.usable_bytes) for copy in copies)

    def program(rank: int, mode: CudaLowLatency) -> None:
        call = Caller(BF16, mode, rank)

        def send(turn: int) -> tuple[Any, Any]:
            return call.dispatch(turns[turn][rank], return_hook=True)

        def take(sent: tuple[Any, Any], turn: int) -> None:
            sent[1]()
            mode.check()
            check_received(BF16.geometry, turns[turn], rank, sent[0], None)

        first = send(0)
        if TWO_AND_TWO[rank] == 1:
            looked.wait()
            take(first, 0)
            for turn in (1, 2):
                take(send(turn), turn)
            return
        second = send(1)
        take(first, 0)
        before = sent_away(rank)
        with ThreadPoolExecutor(1) as pool:
            third = pool.submit(send, 2)  # waits until the others have read the first one
            time.sleep(0.3)
            after = sent_away(rank)
            looked.wait()
        assert after == before
        take(second, 1)
        take(third.result(), 2)

    world.run(program)


# ---- the tests of one host, on several -----------------------------------------------------------

ON_HOSTS: dict[str, tuple[tuple[int, ...], Callable[..., None], tuple[Any, ...]]] = {
    "two in flight": ((0, 1, 0), few.test_two_calls_in_flight, ()),
    "logfmt": ((0, 1, 1), few.test_logfmt, ()),
    "refused dispatch": ((0, 0, 1, 1), few.test_a_refused_dispatch_leaves_nothing_behind,
                         (SHAPES[1], False)),
    "refused dispatch in flight": ((0, 1), few.test_a_refused_dispatch_leaves_nothing_behind,
                                   (SHAPES[2], True)),
    "refused combine": ((0, 1, 0), few.test_a_refused_combine_leaves_nothing_behind,
                        (SHAPES[0], True)),
    "refused late combine": ((0, 1), few.test_a_refused_combine_leaves_nothing_behind,
                             (SHAPES[2], False)),
    "aborted": ((0, 1, 0), few.test_a_refused_combine_of_an_aborted_dispatch_is_aborted_too,
                (SHAPES[0],)),
    "late rank": ((0, 0, 1), few.test_a_late_rank_is_named, (SHAPES[0],)),
    "late acknowledgement": ((0, 0, 1), few.test_a_late_acknowledgement_is_named, ()),
    "masked when late": ((0, 1, 2), few.test_a_late_rank_is_masked, (few.FEW_CTAS,)),
    "masked": ((0, 1, 2), few.test_a_masked_rank_is_left_out, (SHAPES[0], False)),
    "masked, with hooks": ((0, 0, 1, 1, 2), few.test_a_masked_rank_is_left_out,
                           (SHAPES[3], True)),
    "bad index": ((0, 1, 0), few.test_an_index_out_of_range_is_none, ()),
    "disagreement": ((0, 1, 0), few.test_ranks_that_disagree_are_told_and_wait_for_nothing, ()),
    "disagreement about logfmt": (
        (0, 1, 0), few.test_ranks_that_disagree_about_logfmt_are_told_and_wait_for_nothing,
        (False,)),
    "disagreement about logfmt, late": (
        (0, 1, 2), few.test_ranks_that_disagree_about_logfmt_are_told_and_wait_for_nothing,
        (True,)),
}  # fmt: skip


# Whose compilation takes the time.
OF_OWN_KERNELS = (
    "logfmt", "refused dispatch in flight", "refused late combine", "late acknowledgement",
    "masked, with hooks", "disagreement about logfmt, late",
)  # fmt: skip


@pytest.mark.filterwarnings("ignore::fanfold.errors.LatePeerWarning")
@pytest.mark.parametrize(
    ("hosts", "test", "arguments"),
    [
        pytest.param(*case, id=name, marks=[pytest.mark.long] if name in OF_OWN_KERNELS else [])
        for name, case in ON_HOSTS.items()
    ],
)
def test_as_on_one_host(
    opens: Open,
    monkeypatch: pytest.MonkeyPatch,
    hosts: tuple[int, ...],
    test: Callable[..., None],
    arguments: tuple[Any, ...],
) -> None:
    def world_of(shape: Shape, **settings: Any) -> HostsWorld:
        return opens(shape, Network(hosts, seed=21, threads=1), **settings)

    monkeypatch.setattr(few, "world_of", world_of)
    test(*arguments)


# ---- what only several hosts have ----------------------------------------------------------------


def test_a_peer_that_gets_nothing_names_who_sent_it(opens: Open) -> None:
    """The rank beside it gets all it needs, through another ring."""
    world = opens(BF16, Network(TWO_AND_TWO), timeout_s=0.5)
    batches = batches_of(BF16, 0)

    def program(rank: int, mode: CudaLowLatency) -> None:
        call = Caller(BF16, mode, rank)
        call.dispatch(batches[rank])
        mode.check()

    world.run(program)
    ring = world.stop(0)

    def cut(rank: int, mode: CudaLowLatency) -> None:
        call = Caller(BF16, mode, rank)
        call.dispatch(batches[rank])
        if rank == 2:
            with pytest.raises(PeerTimeout, match=r"rank 0 in low_latency dispatch") as caught:
                mode.check()
            assert caught.value.peer == 0
        else:
            mode.check()

    world.run(cut)
    assert ring.pushed > 0


def test_a_full_ring_ends_the_call_and_stays_whole(opens: Open) -> None:
    """The kernel gives up within its time, names the peer, and abandons no ticket."""
    world = opens(LONG, Network((0, 1), threads=1, ring_slots=32), timeout_s=0.5)
    batches = [Batch.of(LONG.geometry, 75, rank) for rank in range(2)]
    for batch in batches:  # every second token has a row for each rank, so runs are short
        batch.topk_idx[:, 0] = torch.arange(75, dtype=torch.int64, device="cpu") % 2 * 3

    def first(rank: int, mode: CudaLowLatency) -> None:
        Caller(LONG, mode, rank).dispatch(Batch.of(LONG.geometry, 0, rank))
        mode.check()

    world.run(first)
    ring = world.stop(0)

    def program(rank: int, mode: CudaLowLatency) -> None:
        call = Caller(LONG, mode, rank)
        call.dispatch(batches[rank])
        with pytest.raises(PeerTimeout, match=f"rank {1 - rank} in low_latency dispatch"):
            mode.check()

    world.run(program)
    assert 0 < ring.pushed <= 32
    assert ring.abandoned == 0


def test_a_lost_peer_is_named_by_the_network(opens: Open) -> None:
    """The waits of the kernels end before their time, and the error says what the network knows."""
    world = opens(BF16, Network((0, 0, 0, 1)), timeout_s=600.0)
    batches = batches_of(BF16, 0)

    def program(rank: int, mode: CudaLowLatency) -> None:
        Caller(BF16, mode, rank).dispatch(batches[rank])
        mode.check()

    world.run(program)
    world.fail(3)  # so it waits for no others
    world.memories[3].between.memory.core.close()

    def lost(rank: int, mode: CudaLowLatency) -> None:
        if rank == 3:
            return
        Caller(BF16, mode, rank).dispatch(batches[rank])
        between = f"loopback between rank {rank} and rank 3"
        with pytest.raises(TransportError, match=f"{between}.* rank 3 has ended") as caught:
            mode.check()
        cause = caught.value.__cause__
        assert isinstance(cause, PeerTimeout)
        assert f"rank {rank} waited for rank 3 in low_latency dispatch" in str(cause)

    world.run(lost)


def test_a_failed_network_ends_the_next_call(opens: Open) -> None:
    """It is raised before anything is sent, without a wait."""
    world = opens(BF16, Network(TWO_AND_TWO, threads=1))
    run_rounds(world, BF16, [batches_of(BF16, 0)], False)
    world.fail(0)
    batches = batches_of(BF16, 1)

    def program(rank: int, mode: CudaLowLatency) -> None:
        if rank == 0:
            with pytest.raises(TransportError, match="gave up 1 commands of a ring"):
                Caller(BF16, mode, rank).dispatch(batches[rank])

    world.run(program)


def test_another_geometry_and_a_reset(opens: Open) -> None:
    """The memory between hosts is prepared anew, whatever earlier calls have left in it."""
    world = opens(BF16, Network(TWO_AND_TWO, seed=51))
    run_rounds(world, BF16, [batches_of(BF16, turn) for turn in range(3)], False)
    smaller = dataclasses.replace(BF16, geometry=Geometry(4, 12, 2, 272, 5))
    run_rounds(world, smaller, [batches_of(smaller, turn) for turn in range(3)], False)
    world.run(lambda rank, mode: mode.reset())
    run_rounds(world, smaller, [batches_of(smaller, turn) for turn in range(3)], False)
    between = world.memories[0].between
    between.check_bytes(between.memory.usable_bytes)
    with pytest.raises(ArgumentError, match="memory between hosts"):
        between.check_bytes(between.memory.usable_bytes + 1)


@pytest.mark.parametrize("seed", [52, 54])
def test_nothing_of_a_call_that_was_given_up_comes_later(opens: Open, seed: int) -> None:
    """What is under way when all ranks reset has the number of a call that comes after."""
    world = opens(BF16, Network(TWO_AND_TWO, seed=seed))
    run_rounds(world, BF16, [batches_of(BF16, 0)], False)
    world.run(lambda rank, mode: mode.reset())
    given_up = batches_of(BF16, 1)

    def give_up(rank: int, mode: CudaLowLatency) -> None:
        Caller(BF16, mode, rank).dispatch(given_up[rank], return_hook=True)
        mode.reset()

    world.run(give_up)
    run_rounds(world, BF16, [batches_of(BF16, turn) for turn in (2, 3)], False)


def test_opened_by_the_settings(
    opens: Open, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Ranks of one host get each other's regions, whatever their places in the group."""
    del opens  # within which kernels are emulated
    regions: dict[int, torch.Tensor] = {}

    def gpu_of(group: Any, nbytes: int) -> Any:
        region = torch.empty(nbytes + 128, dtype=torch.uint8, device="cpu")
        region = regions[group.whole.rank] = region[-region.data_ptr() % 128 :][:nbytes]
        group.all_gather(None)
        return gpu_memory(group, [regions[rank] for rank in group.ranks], group.rank)

    monkeypatch.setattr(opening, "CudaSymmetricMemory", gpu_of)
    caplog.set_level(logging.INFO, "fanfold")
    there = BackendChoice("cuda", torch.device("cpu"), "a test says so", (9, 0), True)
    config = Config.resolve(timeout_s=20.0, hosts=2, network="loopback:61", proxy_threads=2)
    geometry = BF16.geometry
    batches = batches_of(BF16, 0)

    def be(group: Any) -> dict[str, Any]:
        memory, mode = opening.open_low_latency(group, there, geometry, config)
        assert isinstance(mode, CudaLowLatency)
        call = Caller(BF16, mode, group.rank)
        received = call.dispatch(batches[group.rank])
        mode.check()
        check_received(geometry, batches, group.rank, received[0], None)
        assert isinstance(memory, CudaMemoryAcrossHosts)
        assert memory.network == "loopback"
        found = collect({}, *counting_cores(memory))
        memory.close()
        memory.close()
        assert "closed" in repr(memory)
        with pytest.raises(UsageError, match="closed"):
            mode.check()
        return found

    barrier, values = threading.Barrier(4, timeout=60.0), [None] * 4
    with ThreadPoolExecutor(4) as pool:
        counted = list(pool.map(be, [ThreadGroup(rank, values, barrier) for rank in range(4)]))
    for rank, found in enumerate(counted):
        away = {2, 3} if rank < 2 else {0, 1}
        sent = found["channel_sent_messages_total"]
        assert {peer for peer, count in sent.items() if count > 0} == away
        assert "waits_total" not in found
    assert "reaches the ranks of 2 hosts over loopback" in caplog.text
    lie = "lie in memory of the CPU: of loopback: it moves bytes by the CPU"
    assert lie in caplog.text


@pytest.mark.parametrize("network", [Network(TWO_AND_TWO), Network((0, 1, 2, 1), threads=3)])
def test_what_is_pinned(opens: Open, network: Network) -> None:
    """Whole pages, none of them twice: what a rank receives in, its blocks of each send area, and
    the rings; of the send areas not much more."""
    world = opens(BF16, network)
    geometry = core_geometry(BF16.geometry)
    area = cuda_bytes_between_hosts(BF16.geometry)
    for rank, memory in enumerate(world.memories):
        ranges = _core.cuda_low_latency_hosts_pinned(memory.between.memory.core, geometry, False)
        is_pinned = whole_pages(ranges)
        own = memory.between.memory.base(rank)
        away = [peer for peer in range(4) if network.hosts[peer] != network.hosts[rank]]
        for source in away:
            first = area * source // 4 + 128 * 4  # behind the words, which precede all blocks
            assert is_pinned(own + first)
            assert is_pinned(own + first + area // 8)
        for peer in away:
            assert is_pinned(memory.base(peer) + area * rank // 4 + area // 8)
        assert is_pinned(own)
        view = world._view(rank).tolist()
        assert all(is_pinned(address) for address in view[1:4])
        most = area + len(away) * area // 4 + (4 + 2 * len(away)) * 8192 + 3 * 8192
        assert sum(nbytes for _, nbytes in ranges) <= most


def test_rows_apart_are_not_pinned(opens: Open) -> None:
    """Where rows have memory of their own, that of the CPU has no page for them; it goes when no
    network has it any more."""
    world = opens(LONG, Network((0, 1), rows_apart=True))
    run_rounds(world, LONG, [batches_of(LONG, 0)], False)
    geometry = core_geometry(LONG.geometry)
    for memory in world.memories:
        core = memory.between.memory.core
        few_bytes, all_bytes = (
            sum(
                nbytes
                for _, nbytes in _core.cuda_low_latency_hosts_pinned(core, geometry, rows_apart)
            )
            for rows_apart in (True, False)
        )
        row_bytes = 2 * LONG.geometry.hidden
        assert all_bytes - few_bytes >= 4 * LONG.geometry.max_tokens * row_bytes
        assert sum(memory.between._pinned._ranges.values()) == few_bytes
    rows: list[Any] = [memory.between.memory.rows.memory for memory in world.memories]
    assert not any(each.closed for each in rows)
    world.close()
    assert all(each.closed for each in rows)


def test_what_fails_on_one_host_ends_all(opens: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the memory of a host's GPUs the ranks of other hosts see nothing."""
    del opens
    closed: list[int] = []

    def gpu_of(group: Any, nbytes: int) -> Any:
        rank = group.whole.rank
        if rank >= 2:
            raise UnavailableError("no peer access")
        return types.SimpleNamespace(close=lambda: closed.append(rank))

    monkeypatch.setattr(opening, "CudaSymmetricMemory", gpu_of)
    there = BackendChoice("cuda", torch.device("cpu"), "a test says so", (9, 0), True)
    config = Config.resolve(timeout_s=20.0, hosts=2, network="loopback", proxy_threads=1)

    def be(group: Any) -> Exception:
        with pytest.raises(FanfoldError) as caught:
            opening.open_low_latency(group, there, BF16.geometry, config)
        return caught.value

    barrier, values = threading.Barrier(4, timeout=60.0), [None] * 4
    with ThreadPoolExecutor(4) as pool:
        errors = list(pool.map(be, [ThreadGroup(rank, values, barrier) for rank in range(4)]))
    assert [type(error) for error in errors] == [FanfoldError] * 2 + [UnavailableError] * 2
    assert all("rank 2 failed: no peer access" in str(error) for error in errors[:2])
    assert sorted(closed) == [0, 1]


@pytest.mark.parametrize("arch", [pytest.param("sm_80", marks=pytest.mark.long), "sm_90a"])
@pytest.mark.parametrize("ranks", [4, 40])
def test_compiles(compiled: Compiled, ranks: int, arch: str) -> None:
    """Also for more ranks than a word has bits, which are more than are emulated here."""
    geometry = Geometry(ranks, 2 * ranks, 6, 1024, 64)
    for late in (False, True):
        for source in kernel_sources(geometry, late_weights=late, across_hosts=True):
            check(source, compiled(source, arch))
