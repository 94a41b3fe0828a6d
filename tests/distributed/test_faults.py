"""Ranks that are killed or stopped: the others are told who and where, within the bound."""

from __future__ import annotations

import os
import signal
import time
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import fanfold
from fanfold.launch import RankFailure, RankPool
from tests.distributed.layers import Shape, good_call, round_trip, works
from tests.distributed.stopped_ranks import collect_with_one_stopped, reporting
from tests.shared_memory import named_memory

RANKS = 3
VICTIM = 1
MODES = ("low_latency", "high_throughput")
PHASES = ("dispatch", "combine")


@pytest.fixture
def own_pool() -> Iterator[RankPool]:
    """Ranks that this test may kill."""
    with RankPool(RANKS, timeout_s=60.0) as pool:
        yield pool


def _fail_in(
    group: dist.ProcessGroup, mode: str, phase: str, number: int, timeout_s: float
) -> tuple[fanfold.PeerTimeout, float, str]:
    """Runs rounds in which the victim signals itself before ``phase``; what the others see."""
    shape = Shape(mode=mode, timeout_s=timeout_s)
    ep = shape.open(group)
    assert works(ep, shape)
    dist.barrier(group)  # between hosts, what a killed rank has sent may not have left it
    call = good_call(shape, ep.rank)
    start = time.monotonic()
    try:
        for _ in range(5):
            if ep.rank == VICTIM and phase == "dispatch":
                os.kill(os.getpid(), number)
            received = ep.dispatch(call.x, call.topk_idx, call.topk_weights)
            if ep.rank == VICTIM and phase == "combine":
                os.kill(os.getpid(), number)
            ep.combine(received.tokens, received)
    except fanfold.PeerTimeout as error:
        seconds = time.monotonic() - start
        after = ""
        try:
            ep.dispatch(call.x, call.topk_idx, call.topk_weights)
        except fanfold.UsageError as usage:
            after = str(usage)
        ep.close()
        return error, seconds, after
    raise AssertionError("nobody noticed")


def _check(error: fanfold.PeerTimeout, rank: int, mode: str, phase: str) -> None:
    assert error.rank == rank
    assert error.peer == VICTIM
    assert error.phase.startswith(mode)
    # A rank may be a call ahead of the one in which the victim fell.
    assert phase in error.phase or "dispatch" in error.phase or "counts" in error.phase
    assert error.expected != error.actual
    assert f"rank {VICTIM}" in str(error)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("phase", PHASES)
def test_killed_rank(own_pool: RankPool, mode: str, phase: str) -> None:
    outcomes = own_pool.outcomes(_fail_in, mode, phase, signal.SIGKILL, 50.0)
    assert isinstance(outcomes[VICTIM], RankFailure)
    assert outcomes[VICTIM].exitcode == -signal.SIGKILL
    for rank in (0, 2):
        error, seconds, after = outcomes[rank]
        _check(error, rank, mode, phase)
        assert error.peer_gone
        assert "has ended" in str(error)
        # Well before the bound of 50 s: a dead peer is noticed, not waited for.
        assert seconds < 25.0
        assert "failed earlier" in after


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("phase", PHASES)
def test_stopped_rank(own_pool: RankPool, tmp_path: Path, mode: str, phase: str) -> None:
    own_pool.submit(reporting, [(tmp_path, _fail_in, mode, phase, signal.SIGSTOP, 0.5)] * RANKS)
    outcomes = collect_with_one_stopped(own_pool, tmp_path, VICTIM)
    for rank in (0, 2):
        error, seconds, after = outcomes[rank]
        _check(error, rank, mode, phase)
        assert not error.peer_gone
        assert error.seconds > 0.4
        assert seconds < 25.0
        assert "FANFOLD_TIMEOUT_S" in str(error)
        assert "failed earlier" in after


def _mask(group: dist.ProcessGroup, mode: str) -> tuple[list[bool], bool, list[str], set[int]]:
    shape = Shape(max_tokens=6, mode=mode)
    # Long enough that the victim is masked because its process has ended, not because it is late.
    config = fanfold.Config.resolve(timeout_s=5.0, late_peers="mask")
    ep = shape.open(group, config=config)
    assert ep.live_ranks() == tuple(range(RANKS))
    assert works(ep, shape)
    dist.barrier(group)  # see _fail_in
    if ep.rank == VICTIM:
        os.kill(os.getpid(), signal.SIGKILL)
    call = good_call(shape, ep.rank)
    locals_ = ep.experts_per_rank
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for _ in range(3):
            out = round_trip(ep, call)
    # Without the victim's experts, each value is the sum over the remaining ones.
    missing = call.topk_idx // locals_ == VICTIM
    assert torch.equal(ep.missing(call.topk_idx), missing)
    assert ep.live_ranks() == tuple(rank for rank in range(RANKS) if rank != VICTIM)
    right = bool((out.float() == call.x.float() * (~missing).sum(1, keepdim=True)).all())
    masked = [ep.memory.core.masked(peer) for peer in range(RANKS)]
    ep.close()
    assert all(each.category is fanfold.LatePeerWarning for each in seen)
    assert all(Path(each.filename).parent == Path(__file__).parent for each in seen)
    barriers = set(ep.metrics().get("proxy_barriers_total", {}).values())
    return masked, right, [str(each.message) for each in seen], barriers


@pytest.mark.parametrize("mode", MODES)
def test_mask_late_peers(own_pool: RankPool, mode: str) -> None:
    outcomes = own_pool.outcomes(_mask, mode)
    for rank in (0, 2):
        masked, right, warned, barriers = outcomes[rank]
        assert masked == [peer == VICTIM for peer in range(RANKS)]
        assert right
        # Between hosts: closing has waited for the rank that is left, and not for the dead one.
        assert barriers <= {1}
        (text,) = warned
        assert f"for rank {VICTIM} in {mode} " in text
        assert "its process has ended" in text


def _mask_with_errors(group: dist.ProcessGroup) -> bool:
    """The warning is an error; what raises it has sent nothing, and is called again."""
    shape = Shape(max_tokens=6)
    ep = shape.open(group, config=fanfold.Config.resolve(timeout_s=0.5, late_peers="mask"))
    assert works(ep, shape)
    dist.barrier(group)  # see _fail_in
    if ep.rank == VICTIM:
        os.kill(os.getpid(), signal.SIGKILL)
    call = good_call(shape, ep.rank)
    raised = 0
    with warnings.catch_warnings():
        warnings.simplefilter("error", fanfold.LatePeerWarning)
        for _ in range(3):
            try:
                received = ep.dispatch(call.x, call.topk_idx, call.topk_weights)
            except fanfold.LatePeerWarning:
                raised += 1
                received = ep.dispatch(call.x, call.topk_idx, call.topk_weights)
            try:
                out = ep.combine(received.tokens, received)
            except fanfold.LatePeerWarning:
                raised += 1
                out = ep.combine(received.tokens, received)
        ep.check()
    kept = (~ep.missing(call.topk_idx)).sum(1, keepdim=True)
    ep.close()
    return raised == 1 and bool((out.float() == call.x.float() * kept).all())


def test_mask_late_peers_where_warnings_are_errors(own_pool: RankPool) -> None:
    outcomes = own_pool.outcomes(_mask_with_errors)
    assert outcomes[0] is outcomes[2] is True


def _hold(group: dist.ProcessGroup, mode: str) -> None:
    """Dies with a layer open."""
    shape = Shape(mode=mode)
    ep = shape.open(group)
    assert works(ep, shape)
    dist.barrier(group)  # see _fail_in
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("mode", MODES)
def test_nothing_is_left_behind(mode: str) -> None:
    before = named_memory(())
    with RankPool(RANKS, timeout_s=60.0) as pool:
        pids = pool.pids
        outcomes = pool.outcomes(_hold, mode)
        assert all(outcome.exitcode == -signal.SIGKILL for outcome in outcomes)
    assert named_memory(pids) == before
    assert not any(_alive(pid) for pid in pids)


def _alive(pid: int) -> bool:
    try:
        return "State:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except FileNotFoundError:
        return False


def _interrupted(group: dist.ProcessGroup) -> float:
    shape = Shape(timeout_s=50.0)
    with shape.open(group) as ep:
        call = good_call(shape, ep.rank)
        if ep.rank == VICTIM:
            time.sleep(1.0)
            return 0.0
        signal.signal(signal.SIGALRM, _raise_interrupt)
        signal.setitimer(signal.ITIMER_REAL, 0.3)
        start = time.monotonic()
        with pytest.raises(KeyboardInterrupt):
            ep.dispatch(call.x, call.topk_idx, call.topk_weights)
        return time.monotonic() - start


def _raise_interrupt(number: int, frame: object) -> None:
    raise KeyboardInterrupt


def test_interrupt_reaches_a_waiting_rank(own_pool: RankPool) -> None:
    seconds = own_pool.run(_interrupted)
    assert all(value < 25.0 for value in seconds)


def _survivors(group: dist.ProcessGroup, mode: str, rounds: int) -> int:
    """Rounds that go well although the ranks are stopped and continued at random."""
    shape = Shape(mode=mode)
    done = 0
    with shape.open(group) as ep:
        for _ in range(rounds):
            done += works(ep, shape)
    return done


@pytest.mark.parametrize("mode", MODES)
def test_short_stalls_do_no_harm(own_pool: RankPool, mode: str) -> None:
    own_pool.submit(_survivors, [(mode, 300)] * RANKS)
    for step in range(12):
        own_pool.kill(step % RANKS, signal.SIGSTOP)
        time.sleep(0.02)
        own_pool.kill(step % RANKS, signal.SIGCONT)
    assert own_pool.collect() == [300] * RANKS


def _waiting(group: dist.ProcessGroup, mode: str, begun: Path) -> bool:
    """Whether a round goes well in which the others wait for the victim."""
    shape = Shape(mode=mode, timeout_s=4.0)
    with shape.open(group) as ep:
        if ep.rank == VICTIM:
            begun.touch()
            time.sleep(1.5)
        return works(ep, shape)


@pytest.mark.parametrize("mode", MODES)
def test_a_suspended_job_goes_on(own_pool: RankPool, mode: str, tmp_path: Path) -> None:
    begun = tmp_path / "begun"
    own_pool.submit(_waiting, [(mode, begun)] * RANKS)
    while not begun.exists():
        time.sleep(0.01)
    time.sleep(0.5)
    for rank in range(RANKS):
        own_pool.kill(rank, signal.SIGSTOP)
    time.sleep(5.0)  # longer than the ranks may wait
    for rank in range(RANKS):
        own_pool.kill(rank, signal.SIGCONT)
    assert own_pool.collect() == [True] * RANKS
