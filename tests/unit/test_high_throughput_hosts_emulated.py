"""High throughput of GPUs on several hosts. The kernels run on the CPU; rings, proxies and
a loopback network are the real ones. The tests are those of one host, so every bit is
what it is there."""

from __future__ import annotations

import ctypes
import dataclasses
from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Any

import pytest
import torch

import fanfold.high_throughput
from fanfold import Config, HighThroughput, _core
from fanfold.backends import opening
from fanfold.backends.choose import BackendChoice
from fanfold.backends.high_throughput.cuda import CudaHighThroughput
from fanfold.backends.high_throughput.kernels import (
    CombineKind,
    DispatchKind,
    Sizes,
    combine_kernel,
    dispatch_kernel,
    plan_kernel,
)
from fanfold.backends.high_throughput.plan import CudaDispatched
from fanfold.errors import PeerTimeout, TransportError
from fanfold.memory.cuda_hosts import CudaMemoryAcrossHosts
from tests.distributed.cuda_rounds import check_combine, dispatch, dispatch_kinds, run_case, sent
from tests.distributed.routings import Case, Round
from tests.distributed.test_across_hosts import need
from tests.distributed.test_high_throughput import lanes_of, outputs_of
from tests.emulation.deep_ep import Memory, run
from tests.emulation.high_throughput import CTAS, ROOMY_RING, SMALL
from tests.emulation.high_throughput_hosts import HostsWorld, emulated_hosts
from tests.emulation.hosts import Network, whole_pages
from tests.emulation.world import Builder
from tests.unit import test_high_throughput_emulated as one_host
from tests.unit import test_high_throughput_emulated_faults as faults
from tests.unit.conftest import Compiled
from tests.unit.test_high_throughput_emulated import CASES, LAYOUTS, tiny_ring

HOSTS = {2: (0, 1), 3: (0, 0, 1), 4: (0, 1, 0, 1), 5: (0, 0, 1, 1, 2), 8: (0, 0, 0, 0, 1, 1, 1, 1)}
"""Which host each rank is on, by the number of ranks."""


class Worlds:
    """Makes worlds on several hosts where a test of one host makes one, and closes them.

    Args:
        network: settings of :class:`Network`.
    """

    def __init__(self, **network: Any) -> None:
        self._network = network
        self.made: list[HostsWorld] = []

    def __call__(self, ranks: int, ring_bytes: int, **settings: Any) -> HostsWorld:
        settings.pop("result_bytes", None)
        threads, provider = settings.pop("threads", 2), settings.pop("provider", "")
        network = Network(HOSTS[ranks], threads=threads, provider=provider, **self._network)
        world = HostsWorld(network, ring_bytes, **settings)
        self.made.append(world)
        return world

    def close(self) -> None:
        for world in self.made:
            world.close()


@pytest.fixture(autouse=True)
def gpu(builder: Builder) -> Iterator[None]:
    with emulated_hosts(builder, CTAS):
        yield


@pytest.fixture(params=[pytest.param(0, marks=pytest.mark.long), 7])
def worlds(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, gpu: None
) -> Iterator[Worlds]:
    """Over a network that is as it should be, and over one that delays, repeats and reorders."""
    made = Worlds(seed=request.param)
    for module in (one_host, faults):
        monkeypatch.setattr(module, "World", made)
    yield made
    made.close()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("case", [case for case in CASES if case.ranks > 1], ids=str)
def test_rounds(worlds: Worlds, case: Case, layout: str) -> None:
    """Through rings so short that every slot is used again and again."""
    one_host.test_rounds(case, layout)
    (world,) = worlds.made
    assert all(world.count("commands", rank) > 0 for rank in range(case.ranks))


@contextmanager
def only_pulling(ranks: int) -> Iterator[None]:
    """Within it each rank dispatches, and only by kernels that pull."""
    with dispatch_kinds() as kinds:
        yield
    assert len(kinds) >= ranks
    assert all(kind.pulls for kind in kinds)


APART = {
    "routing weights": (CASES[0], "expert_major"),
    "scales": (CASES[1], "token_major"),
    "duplicates": (CASES[2], "token_major"),
}


@pytest.mark.parametrize(("case", "layout"), APART.values(), ids=APART)
def test_rows_apart(monkeypatch: pytest.MonkeyPatch, case: Case, layout: str) -> None:
    """Rows have memory of their own, as where NICs reach that of a GPU."""
    with closing(Worlds(seed=8, rows_apart=True)) as made:
        monkeypatch.setattr(one_host, "World", made)
        one_host.test_rounds(case, layout)
        assert all(memory.between.has_rows_apart for memory in made.made[0].memories)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("ranks", [3, 5, pytest.param(8, marks=pytest.mark.long)])
def test_rows_that_are_pulled_within_a_host(worlds: Worlds, ranks: int, layout: str) -> None:
    """While rows of other hosts come to the same memory."""
    case = dataclasses.replace(SMALL, tokens=tuple(40 + 9 * rank for rank in range(ranks)))
    world = worlds(ranks, tiny_ring(case), dispatch_transfer="pull")

    def program(rank: int, mode: CudaHighThroughput) -> None:
        for turn in range(3):
            run_case(mode, dataclasses.replace(case, seed=turn), rank, layout)

    with only_pulling(ranks):
        world.run(program)


def test_rows_apart_that_are_pulled_within_a_host() -> None:
    case = dataclasses.replace(SMALL, tokens=(40, 70, 21))
    with closing(Worlds(seed=8, rows_apart=True)) as made, only_pulling(3):
        world = made(3, tiny_ring(case), dispatch_transfer="pull")
        world.run(lambda rank, mode: run_case(mode, case, rank, "expert_major"))
        assert all(memory.between.has_rows_apart for memory in world.memories)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_rings_with_more_room_than_slots(worlds: Worlds, layout: str) -> None:
    """Slots are as many as there are words for, and where a ring begins does not depend on them."""
    world = worlds(SMALL.ranks, 1 << 22)
    world.run(lambda rank, mode: run_case(mode, SMALL, rank, layout))


def test_sums_are_those_of_one_host(worlds: Worlds, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the setting says that there are several, too: nothing is summed for a host first."""
    monkeypatch.setenv("FANFOLD_HOSTS", "2")
    one_host.test_more_ranks(4, "expert_major", False)


@pytest.mark.parametrize(("ranks", "layout"), [(5, "expert_major"), (8, "token_major")])
def test_more_ranks(worlds: Worlds, ranks: int, layout: str) -> None:
    one_host.test_more_ranks(ranks, layout, False)


@pytest.mark.parametrize("style", ["one_rank", "one_expert", "none"])
def test_skewed_routing(worlds: Worlds, style: str) -> None:
    one_host.test_skewed_routing(style)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_many_turns(worlds: Worlds, layout: str) -> None:
    """With new routings, and by the same one again, without a wait between them."""
    world = worlds(SMALL.ranks, tiny_ring(SMALL))

    def program(rank: int, mode: CudaHighThroughput) -> None:
        for turn in range(6):
            case = dataclasses.replace(SMALL, style=("spread", "holes")[turn % 2], seed=turn)
            run_case(mode, case, rank, layout)
            expect = Round(case, rank)
            got = dispatch(mode, expect, layout, 500)
            for _ in range(3):
                mode.dispatch_cached(sent(expect, mode.device), got.plan, layout=layout)  # type: ignore[arg-type]

    world.run(program)


@pytest.mark.parametrize(("layout", "topk_words"), [("expert_major", 0), ("token_major", 1)])
def test_a_command_names_the_rows_of_a_batch(worlds: Worlds, layout: str, topk_words: int) -> None:
    """Of a slice, in a combine, and one their numbers of the top-k entries. Behind each slice is a
    word, in front of all an arrival, and at the end the word of a fence."""
    world = worlds(2, ROOMY_RING, threads=1)
    case = dataclasses.replace(SMALL, tokens=(0, 64), style="one_rank", weighted=False)
    batches = 64 // 8

    def sent_commands(rank: int, mode: CudaHighThroughput) -> int:
        mode.quiesce()
        world.memories[rank].between.fence()
        return world.count("commands", rank)

    def program(rank: int, mode: CudaHighThroughput) -> int:
        expect = Round(case, rank)
        got = dispatch(mode, expect, layout, None)
        before = sent_commands(rank, mode)
        y = outputs_of(expect, layout, False)
        numbers = lanes_of(expect, layout) if topk_words else None
        mode.combine(y, got.plan, layout=layout, topk_weights=numbers)  # type: ignore[arg-type]
        return sent_commands(rank, mode) - before

    major = layout == "expert_major"
    kind = CombineKind(Sizes(2, 6, 4), 2 * case.hidden, major, False, topk_words == 1, False)
    counts = world.run(program)
    assert counts == [2 + (2 * kind.slices + topk_words) * batches, 2]


def test_one_sender_and_one_receiver(worlds: Worlds) -> None:
    """Of whose warps one has to see what the others wait for."""
    one_host.test_other_grids((2, 1), "expert_major", False)


def test_calls_whose_low_bits_begin_anew(worlds: Worlds) -> None:
    faults.test_calls_whose_low_bits_begin_anew()


def test_words_of_other_hosts_are_wiped_one_in_each_call(worlds: Worlds) -> None:
    """Those that no slot of these rings uses, so that nothing else writes them."""
    world = worlds(SMALL.ranks, tiny_ring(SMALL))
    words = 2048 * 8 * SMALL.ranks
    ready = _core.cuda_high_throughput_bytes(SMALL.ranks, 0)[0] - 2 * words

    def program(rank: int, mode: CudaHighThroughput) -> None:
        own = world.memories[rank].between.memory.base(rank) + ready
        received = (ctypes.c_uint64 * 2048).from_address(own)
        received[1000:1004] = [5] * 4
        mode._state[:4].view(torch.int32)[0] = 1000
        expect = Round(SMALL, rank)
        got = dispatch(mode, expect, "expert_major", None)
        check_combine(mode, expect, got, "expert_major")
        assert received[1000:1004] == [5, 0, 0, 0]  # by a plan, a dispatch and a combine

    world.run(program)


@pytest.mark.parametrize("how", ["dispatch", "cached", "combine", "weights"])
@pytest.mark.parametrize("capacity", [None, 500])
def test_a_refused_call_is_aborted_on_all_ranks(
    worlds: Worlds, how: str, capacity: int | None
) -> None:
    faults.test_a_refused_call_is_aborted_on_all_ranks(how, capacity)


def test_ranks_that_disagree_are_told_and_stay_in_step(worlds: Worlds) -> None:
    faults.test_ranks_that_disagree_are_told_and_stay_in_step()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_rows_that_never_came_are_no_indices(worlds: Worlds, layout: str) -> None:
    faults.test_rows_that_never_came_are_no_indices(layout, False)


@pytest.mark.parametrize("call", ["plan", "dispatch", "combine"])
def test_a_late_rank_is_named(worlds: Worlds, call: str) -> None:
    faults.test_a_late_rank_is_named(call)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_index_out_of_range_is_none(worlds: Worlds, layout: str) -> None:
    faults.test_an_index_out_of_range_is_none(layout, 9, "9")


def make(call: str, mode: CudaHighThroughput, expect: Round, got: CudaDispatched) -> None:
    """A dispatch of a new routing ("plan"), or one by the routing of ``got``, or its combine."""
    if call == "plan":
        dispatch(mode, expect, "expert_major", 2000)
    elif call == "dispatch":
        mode.dispatch_cached(sent(expect, mode.device), got.plan, layout="expert_major")
    else:
        mode.combine(got.tokens, got.plan, layout="expert_major")


@pytest.mark.parametrize("call", ["plan", "dispatch", "combine"])
def test_a_ring_that_nobody_empties_is_a_late_rank(worlds: Worlds, call: str) -> None:
    """Of a rank whose commands nobody takes; its peers wait for it, too, in their kernels or, if
    these were quick, in their proxies."""
    world = worlds(2, ROOMY_RING, timeout_s=0.5, threads=1)
    case = dataclasses.replace(SMALL, tokens=(200, 200))

    def program(rank: int, mode: CudaHighThroughput) -> None:
        expect = Round(case, rank)
        got = dispatch(mode, expect, "expert_major", 2000)
        mode.quiesce()
        if rank == 0:
            world.stop(rank)
        where = "high_throughput" if rank == 0 else "(high_throughput|proxy)"
        with pytest.raises(PeerTimeout, match=f"rank {1 - rank} in {where}"):
            (make(call, mode, expect, got), mode.check())

    world.run(program)


@pytest.mark.parametrize("provider", ["", "tcp"])
@pytest.mark.parametrize("call", ["plan", "dispatch", "combine"])
def test_a_rank_that_has_ended_is_not_awaited(
    worlds: Worlds, call: str, provider: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The waits of the kernels end before their time, also where the network tells only those who
    ask. The log has what the network knows, once."""
    if provider:
        need(f"libfabric:{provider}")
    world = worlds(2, ROOMY_RING, timeout_s=600.0, provider=provider)
    case = dataclasses.replace(SMALL, tokens=(200, 200))

    def first(rank: int, mode: CudaHighThroughput) -> Any:
        got = dispatch(mode, Round(case, rank), "expert_major", 2000)
        mode.quiesce()
        return got

    brought = world.run(first)
    world.end(1)

    def lost(rank: int, mode: CudaHighThroughput) -> None:
        if rank == 1:
            return
        expect, got = Round(case, rank), brought[rank]
        with pytest.raises((PeerTimeout, TransportError), match="rank 1 has ended") as caught:
            (make(call, mode, expect, got), mode.check())
        cause = caught.value.__cause__
        assert isinstance(cause, PeerTimeout)
        assert "rank 0 waited for rank 1 in high_throughput" in str(cause)  # and not for 600 s

    world.run(lost)
    (record,) = (each for each in caplog.records if each.levelname == "ERROR")
    assert "rank 1 has ended" in record.getMessage()


# ---- opened --------------------------------------------------------------------------------------

ACROSS = BackendChoice("cuda", torch.device("cpu"), "a test says so", (9, 0), across_hosts=True)


def test_the_face(gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows in place come through rings like all others; the network is among the metrics."""
    config = Config.resolve(
        timeout_s=20.0, hosts=2, network="loopback:61", proxy_threads=2, ring_bytes=ROOMY_RING
    )
    asked = []

    def choose(*args: Any, **kwargs: Any) -> BackendChoice:
        asked.append(kwargs)
        return ACROSS

    monkeypatch.setattr(fanfold.high_throughput, "choose", choose)
    monkeypatch.setattr(opening, "CudaSymmetricMemory", Memory)

    def be(group: Any) -> None:
        sizes = {"num_experts": 8, "top_k": 2, "hidden": 32, "max_tokens": 40}
        with HighThroughput(group, **sizes, in_place_rows=500, config=config) as ep:
            x = torch.full((40, 32), float(group.rank + 1), dtype=torch.bfloat16, device="cpu")
            idx = torch.arange(80, device="cpu").view(40, 2) % 8
            received = ep.dispatch(x, idx, in_place=True)
            rows = received.tokens[: int(received.offsets[-1])]
            assert rows.float().sum() == 32 * 20 * (1 + 2 + 3 + 4)
            again = ep.dispatch(x, previous=received, in_place=True)
            assert torch.equal(again.tokens, received.tokens)
            assert torch.equal(ep.combine(again.tokens, again), 2 * x)
            ep.check()
            sent = ep.metrics()["channel_sent_messages_total"]
            away = {2, 3} if group.rank < 2 else {0, 1}
            assert {peer for peer, count in sent.items() if count > 0} == away
            assert isinstance(ep.memory, CudaMemoryAcrossHosts)
            assert ep.memory.network == "loopback"

    run(4, be)
    assert asked == [{"may_cross_hosts": True}] * 4


@pytest.mark.parametrize("hosts", [(0, 0, 1, 1), (0, 1, 2, 1)])
def test_what_is_pinned(gpu: None, hosts: tuple[int, ...]) -> None:
    """Whole pages, none of them twice: words and rings that the network writes, of each send area
    the counts and the own ring, and the rings of commands; of memory not much more."""
    ring_bytes = 1 << 18
    at_ring, end = _core.cuda_high_throughput_bytes(4, ring_bytes)
    with closing(HostsWorld(Network(hosts, threads=3), ring_bytes)) as world:
        for rank, memory in enumerate(world.memories):
            core = memory.between.memory.core
            ranges = _core.cuda_high_throughput_hosts_pinned(core, ring_bytes, False)
            is_pinned = whole_pages(ranges)
            own = memory.between.memory.base(rank)
            away = [peer for peer in range(4) if hosts[peer] != hosts[rank]]
            assert is_pinned(own)
            assert is_pinned(own + at_ring - 8)
            for peer in away:
                for ring in (own + at_ring + peer * ring_bytes,
                             memory.base(peer) + at_ring + rank * ring_bytes):  # fmt: skip
                    assert is_pinned(ring)
                    assert is_pinned(ring + ring_bytes - 16)
                assert is_pinned(memory.base(peer) + 64)  # of the counts
            view = world._view(rank).tolist()
            assert all(is_pinned(address) for address in view[1:4])
            most = at_ring * (1 + len(away)) + 2 * len(away) * ring_bytes + (8 + len(away)) * 8192
            assert sum(nbytes for _, nbytes in ranges) <= most
        assert end == at_ring + 4 * ring_bytes


@pytest.mark.parametrize("ranks", [4, 40])
def test_compiles(compiled: Compiled, ranks: int) -> None:
    """Without spills; also for more ranks than a word has bits, which are not emulated here."""
    sizes = Sizes(ranks, 2 * ranks, 6, across_hosts=True)
    dispatches = [DispatchKind(sizes, 2048, 0, major, new, True, pulls=pulls) for major, new, pulls
                  in ((False, True, False), (True, False, False), (True, True, True))]  # fmt: skip
    combines = [CombineKind(sizes, 2048, major, False, True, major) for major in (False, True)]
    for kernel in (
        plan_kernel(sizes), *map(dispatch_kernel, dispatches),
        *(combine_kernel(kind, 16) for kind in combines),
    ):  # fmt: skip
        binary = compiled(kernel.source, "sm_90a")
        assert binary.spill_bytes == 0, kernel.source
