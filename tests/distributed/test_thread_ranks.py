"""Ranks as threads of this process: runs, exchanges, failures, and both modes on them."""

from __future__ import annotations

import os
import re
import threading
from typing import Any

import pytest
import torch

import fanfold
from fanfold.errors import ArgumentError, FanfoldError, PeerTimeout, UsageError
from fanfold.group import Group, agree, as_group, in_one_process, together
from fanfold.launch import LaunchError, RankFailure
from fanfold.thread_ranks import ThreadRanks
from tests.distributed.layers import Shape, caught, good_call, works

MODES = ("low_latency", "high_throughput")
CULPRIT = 1


def _place(group: Group, *args: Any) -> tuple[object, ...]:
    group.all_gather(None)  # no thread ends before all have begun
    return group.rank, group.size, args, os.getpid(), threading.get_ident()


def test_results_come_in_rank_order() -> None:
    with ThreadRanks(3) as ranks:
        places = ranks.run(_place, "a", 7)
        each = ranks.run_each(_place, [(0,), (1,), (2,)])
    assert [place[:4] for place in places] == [(r, 3, ("a", 7), os.getpid()) for r in range(3)]
    assert len({place[4] for place in places} | {threading.get_ident()}) == 4
    assert [place[2] for place in each] == [(0,), (1,), (2,)]


def _exchange(group: Group) -> tuple[list[Any], bool, bool]:
    own = object()
    gathered = group.all_gather((group.rank, own))
    for _ in range(300):
        assert group.all_gather(group.rank) == list(range(group.size))
    agree(group, {"size": group.size})
    with together(group) as ranks:
        assert in_one_process(ranks)
    return gathered, gathered[group.rank][1] is own, as_group(group) is group


def test_exchanges_bring_the_values_themselves() -> None:
    with ThreadRanks(5) as ranks:
        found = ranks.run(_exchange)
    for gathered, own, same in found:
        assert gathered == found[0][0]
        assert [rank for rank, _ in gathered] == list(range(5))
        assert own
        assert same


def _fail(group: Group, kind: type[Exception]) -> list[Any]:
    group.all_gather(None)
    if group.rank == CULPRIT:
        raise kind("no luck")
    return group.all_gather(None)


def test_the_first_error_is_raised_with_its_rank_and_the_others_end() -> None:
    with ThreadRanks(4, timeout_s=60.0) as ranks:
        with pytest.raises(KeyError, match="no luck") as raised:
            ranks.run(_fail, KeyError)
        cause = raised.value.__cause__
        assert isinstance(cause, LaunchError)
        assert cause.rank == CULPRIT
        assert [failure.rank for failure in cause.failures] == [1, 0, 2, 3]
        outcomes = ranks.outcomes(_fail, OSError)
        for rank, outcome in enumerate(outcomes):
            assert isinstance(outcome, RankFailure)
            assert outcome.rank == rank
            if rank != CULPRIT:
                assert re.search(
                    f"rank {rank} waited for rank 1 in exchange 2 of the group, but rank 1 has "
                    "ended with OSError: no luck",
                    str(outcome.error),
                )
        assert ranks.run(_place)[3][0] == 3  # they can be used again


def _return_early(group: Group) -> None:
    if group.rank != CULPRIT:
        group.all_gather(None)


@pytest.mark.timeout(60)
def test_a_rank_that_has_returned_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FANFOLD_TIMEOUT_S", "1000")
    with ThreadRanks(2) as ranks, pytest.raises(FanfoldError, match="rank 1 has returned"):
        ranks.run(_return_early)


def _come_late(group: Group, come: threading.Event) -> str:
    if group.rank == CULPRIT:
        assert come.wait(60.0)
        return ""
    try:
        group.all_gather(None)
    except PeerTimeout as error:
        return f"{error.rank} {error.peer} {error.expected} {error.actual} {error}"
    finally:
        come.set()
    return "nothing"


def test_an_exchange_is_bounded_and_names_who_is_late(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FANFOLD_TIMEOUT_S", "0.2")
    with ThreadRanks(2) as ranks:
        late, _ = ranks.run(_come_late, threading.Event())
    assert late.startswith("0 1 1 0 rank 0 waited")
    assert "for rank 1 in exchange 1 of the group" in late


def test_a_run_is_bounded() -> None:
    end = threading.Event()
    with ThreadRanks(2, timeout_s=0.2) as ranks:
        with pytest.raises(LaunchError, match=r"rank 1 did not finish in 0.2 s") as raised:
            ranks.run(lambda group: group.rank == 0 or end.wait(60.0))
        end.set()
        assert [failure.rank for failure in raised.value.failures] == [1]
        # Where the thread is: in wait(), which the function of this file calls.
        place = r"at threading.py:\d+ in .*, called from .*test_thread_ranks.py:\d+ in <lambda>"
        assert re.search(place, str(raised.value))
        with pytest.raises(UsageError, match=r"has ranks that did not finish: \[1\]"):
            ranks.run(_place)


def test_wrong_uses() -> None:
    for wrong in (0, 1025, True, 2.0, "2"):
        with pytest.raises(ArgumentError, match=r"ranks is .* an integer from 1 to 1024"):
            ThreadRanks(wrong)  # type: ignore[arg-type]
    with ThreadRanks(2) as ranks:
        with pytest.raises(ArgumentError, match="args_of is 1 entries"):
            ranks.run_each(_place, [()])
        with pytest.raises(UsageError, match="runs a function already"):
            ranks.run(lambda group: ranks.run(_place))
    with pytest.raises(UsageError, match="closed"):
        ranks.run(_place)


def test_threads_of_pytorch_are_restored() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with ThreadRanks(2) as ranks:
            assert ranks.run(lambda group: torch.get_num_threads()) == [1, 1]
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


# ---- both modes on them -------------------------------------------------------------------------


def _some_rounds(group: Group, shape: Shape, rounds: int) -> bool:
    with shape.open(group) as ep:
        return all(works(ep, shape) for _ in range(rounds))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("count", [1, 2, 3, 4, 12])
def test_rounds(mode: str, count: int) -> None:
    with ThreadRanks(count) as ranks:
        assert all(ranks.run(_some_rounds, Shape(mode=mode), 10))


@pytest.mark.parametrize("mode", MODES)
def test_many_rounds(mode: str) -> None:
    with ThreadRanks(3) as ranks:
        assert all(ranks.run(_some_rounds, Shape(mode=mode), 400))


def _end_before(group: Group, shape: Shape) -> PeerTimeout | None:
    """What the others are told of a rank that ends while they wait for its rows."""
    ep = shape.open(group)
    assert works(ep, shape)
    if group.rank == CULPRIT:
        return None  # without close(): its memory stays mapped
    call = good_call(shape, group.rank)
    with ep:
        error = caught(lambda: ep.dispatch(call.x, call.topk_idx, call.topk_weights))
    assert isinstance(error, PeerTimeout)
    return error


@pytest.mark.timeout(60)
@pytest.mark.parametrize("mode", MODES)
def test_the_end_of_a_thread_ends_the_waits_for_it(mode: str) -> None:
    shape = Shape(mode=mode, timeout_s=1000.0)
    with ThreadRanks(3) as ranks:
        told = ranks.run(_end_before, shape)
    assert told[CULPRIT] is None
    for rank in (0, 2):
        error = told[rank]
        assert error is not None
        assert (error.rank, error.peer, error.peer_gone) == (rank, CULPRIT, True)
        assert "rank 1 has ended: look for its error" in str(error)


def _go_on_without(group: Group, shape: Shape) -> list[bool]:
    config = fanfold.Config.resolve(timeout_s=0.3, late_peers="mask")
    with shape.open(group, config=config) as ep:
        assert works(ep, shape)
        if group.rank == CULPRIT:
            return []
        call = good_call(shape, group.rank)
        received = ep.dispatch(call.x, call.topk_idx, call.topk_weights)
        ep.combine(received.tokens, received)
        return [rank in ep.live_ranks() for rank in range(group.size)]


def test_a_rank_that_has_ended_can_be_masked() -> None:
    shape = Shape(mode="low_latency")
    with ThreadRanks(3) as ranks, pytest.warns(fanfold.LatePeerWarning, match="for rank 1 in low"):
        assert ranks.run(_go_on_without, shape) == [[True, False, True], [], [True, False, True]]


def _two_layers(group: Group) -> bool:
    """Two layers open at once, of both modes."""
    first, second = Shape(mode="low_latency"), Shape(mode="high_throughput")
    with first.open(group) as low, second.open(group) as high:
        return all(works(low, first) and works(high, second) for _ in range(5))


def test_two_layers_at_once() -> None:
    with ThreadRanks(4) as ranks:
        assert all(ranks.run(_two_layers))
