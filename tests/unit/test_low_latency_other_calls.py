"""Ranks on GPUs that make different calls: the kernels find that they wait for each other, long
before the bound on waits. With emulated kernels."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from fanfold.backends.low_latency.cuda import CudaLowLatency
from fanfold.errors import ArgumentError, PeerTimeout
from fanfold.geometry import Geometry
from tests.emulation.world import Builder, World, emulated

CTAS = 4
GEOMETRY = Geometry(3, 6, 2, 64, 6)
ODD = 2
AFTERWARDS = "Close this object on all of them and make a new one"


@pytest.fixture(autouse=True)
def gpu(builder: Builder) -> Iterator[None]:
    with emulated(builder, CTAS):
        yield


class Rank:
    """The calls of one rank, in which every rank sends its tokens to all ranks."""

    def __init__(self, mode: CudaLowLatency, late: bool) -> None:
        self.mode, self.late = mode, late
        self.x, self.topk_idx = torch.ones((3, 64)).bfloat16(), torch.tensor([[0, 5]] * 3)

    def dispatch(self, **rest: Any) -> Any:
        weights = None if self.late else torch.ones(3, 2)
        return self.mode.dispatch(GEOMETRY, self.x, self.topk_idx, weights, **rest)

    def combine(self, received: Any, **rest: Any) -> Any:
        weights = torch.ones(3, 2) if self.late else None
        return self.mode.combine(
            GEOMETRY, received.tokens, received.routing, self.topk_idx, late_weights=weights, **rest
        )

    def round(self) -> None:
        self.combine(self.dispatch()[0])


def check_error(mode: CudaLowLatency, ours: str, theirs: str) -> None:
    """The next call raises what the kernels have found, and so does every later one."""
    for _ in range(2):
        with pytest.raises(ArgumentError) as caught:
            mode.check()
        assert caught.value.argument == "call"
        assert f"{ours} and {theirs}" in caught.value.value, caught.value
        assert AFTERWARDS in caught.value.bound


def run(
    program: Callable[[int, Rank], tuple[str, str]], late: bool = False, **settings: Any
) -> None:
    """``program`` makes a rank's calls and returns what its error must say."""
    world = World(GEOMETRY, late=late, ctas=CTAS, senders=1, **{"timeout_s": 60.0, **settings})

    def on_rank(rank: int, mode: CudaLowLatency) -> None:
        check_error(mode, *program(rank, Rank(mode, late)))

    world.run(on_rank)


@pytest.mark.parametrize(
    ("late", "late_peers"),
    [
        (False, "raise"),
        (True, "mask"),
        pytest.param(False, "mask", marks=pytest.mark.long),
        pytest.param(True, "raise", marks=pytest.mark.long),
    ],
)
def test_a_rank_that_skips_a_combine(late: bool, late_peers: str) -> None:
    def program(rank: int, calls: Rank) -> tuple[str, str]:
        for _ in range(2):
            calls.round()
        received, _ = calls.dispatch()
        if rank == ODD:
            calls.dispatch()
            return "low_latency dispatch 4 on rank 2", "low_latency combine 3 on rank"
        calls.combine(received)
        return f"low_latency combine 3 on rank {rank}", "low_latency dispatch 4 on rank 2"

    run(program, late, late_peers=late_peers)


def test_a_rank_that_repeats_a_combine() -> None:
    def program(rank: int, calls: Rank) -> tuple[str, str]:
        received, _ = calls.dispatch()
        calls.combine(received)
        if rank != ODD:
            calls.dispatch()
            return f"low_latency dispatch 2 on rank {rank}", "low_latency combine 2 on rank 2"
        calls.combine(received)
        return "low_latency combine 2 on rank 2", "low_latency dispatch 2 on rank"

    run(program)


def test_other_calls_in_hooks() -> None:
    """Only what a kernel waits for counts: a send half goes out before its call is awaited."""

    def program(rank: int, calls: Rank) -> tuple[str, str]:
        received, _ = calls.dispatch()
        if rank == ODD:
            _, hook = calls.dispatch(return_hook=True)
            hook()
            return "low_latency dispatch 2 on rank 2", "low_latency combine 1 on rank"
        _, hook = calls.combine(received, return_hook=True)
        hook()
        return f"low_latency combine 1 on rank {rank}", "low_latency dispatch 2 on rank 2"

    run(program)


def test_a_rank_behind_two_others_that_wait_for_each_other() -> None:
    """Rank 0 has sent its combine and waits in a dispatch for both, which are in different calls
    and will never come there."""

    def program(rank: int, calls: Rank) -> tuple[str, str]:
        received, _ = calls.dispatch()
        if rank == 0:
            calls.combine(received, return_hook=True)
            calls.dispatch()
            return "low_latency dispatch 2 on rank 0", "low_latency combine 1 on rank 1"
        if rank == 1:
            calls.combine(received)
            return "low_latency combine 1 on rank 1", "low_latency dispatch 2 on rank 2"
        calls.dispatch()
        return "low_latency dispatch 2 on rank 2", "low_latency combine 1 on rank 1"

    run(program)


def test_late_ranks_are_in_no_other_call() -> None:
    """Halves in orders that differ, and ranks that nap for as long as kernels look around."""
    world = World(GEOMETRY, ctas=CTAS, senders=1, timeout_s=60.0)

    def program(rank: int, mode: CudaLowLatency) -> None:
        calls = Rank(mode, False)
        for turn in range(6):
            nap = turn % 3 == rank
            received, _ = calls.dispatch()
            before = (turn + rank) % 2 == 0
            other = calls.dispatch(return_hook=True) if before else None
            if nap:
                time.sleep(0.3)
            _, combined = calls.combine(received, return_hook=True)
            other = other or calls.dispatch(return_hook=True)
            if nap:
                time.sleep(0.3)
            combined()
            other[1]()
            mode.check()

    world.run(program)
    world.check_absent()


def test_a_rank_that_comes_after_the_bound_is_late() -> None:
    """Of two ranks that have waited in vain for a third, which then comes to the same call, all
    time out: they were never in different calls."""
    world = World(GEOMETRY, ctas=CTAS, senders=1, timeout_s=0.5)
    given_up = threading.Barrier(3)

    def program(rank: int, mode: CudaLowLatency) -> None:
        calls = Rank(mode, False)
        received, _ = calls.dispatch()
        if rank == ODD:
            given_up.wait(60.0)
        calls.combine(received)
        if rank != ODD:
            with pytest.raises(PeerTimeout, match="rank 2 in low_latency combine: expected 1"):
                mode.check()
            given_up.wait(60.0)
            return
        mode.check()  # their rows were there
        calls.dispatch()
        with pytest.raises(PeerTimeout, match="in low_latency dispatch: expected 2, have 1"):
            mode.check()

    world.run(program)
