"""``late_peers="mask"`` is not silent: a warning for each masked rank, once, and queries for who is
left and what is missing. On emulated GPUs; on the host see ``tests/distributed/test_faults.py``."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

import fanfold
from fanfold.backends.low_latency.cuda import CudaLowLatency
from fanfold.base_dispatcher import missing_entries
from fanfold.bench.dispatchers import open_dispatcher
from fanfold.errors import LatePeerWarning
from fanfold.geometry import Geometry, Mode
from fanfold.late_peers import LatePeer, LatePeers
from tests.emulation.world import Builder, World, emulated

CTAS, GONE = 4, 2
GEOMETRY = Geometry(3, 6, 2, 64, 6)
LATE = LatePeer(1, "low_latency dispatch 3", 0.5)


@contextmanager
def watched(action: Any) -> Iterator[list[str]]:
    """The warnings of late peers within, of all threads."""
    texts: list[str] = []
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter(action, LatePeerWarning)
        yield texts
    texts += [str(each.message) for each in seen if each.category is LatePeerWarning]


def test_a_warning_says_who_where_and_what_to_do() -> None:
    peers = LatePeers(0)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        peers.warn(LATE)
        peers.warn(LATE._replace(gone=True))
    late, gone = (str(each.message) for each in seen)
    for part in ("rank 0 waited 0.5 s for rank 1 in low_latency dispatch 3", "it was late",
                 "missing", "no contribution", "missing(topk_idx)", "live_ranks()",
                 "FANFOLD_TIMEOUT_S"):  # fmt: skip
        assert part in late
    assert "its process has ended" in gone
    assert all(each.category is fanfold.LatePeerWarning for each in seen)
    assert [each.filename for each in seen] == [__file__] * 2
    peers.raise_held()


def test_a_warning_that_is_an_error_is_held() -> None:
    peers = LatePeers(0)
    with watched("error"):
        peers.warn(LATE)
    for _ in range(2):
        with pytest.raises(LatePeerWarning, match="rank 1"):
            peers.raise_held()
        peers.raise_held()
        with watched("error"):
            peers.warn(LATE)


class Rank:
    """Calls in which every rank sends its tokens to all ranks."""

    def __init__(self, mode: CudaLowLatency) -> None:
        self.mode = mode
        self.x, self.topk_idx = torch.ones((3, 64)).bfloat16(), torch.tensor([[0, 5]] * 3)

    def dispatch(self) -> Any:
        received, _ = self.mode.dispatch(GEOMETRY, self.x, self.topk_idx, torch.ones(3, 2))
        return received

    def combine(self, received: Any) -> torch.Tensor:
        out, _ = self.mode.combine(GEOMETRY, received.tokens, received.routing, self.topk_idx)
        return out


def run(builder: Builder, program: Callable[[int, Rank], None]) -> None:
    with emulated(builder, CTAS):
        world = World(GEOMETRY, ctas=CTAS, senders=1, timeout_s=0.5, late_peers="mask")
        world.run(lambda rank, mode: program(rank, Rank(mode)))


def test_a_rank_that_kernels_mask(builder: Builder) -> None:
    def program(rank: int, calls: Rank) -> None:
        calls.combine(calls.dispatch())
        if rank == GONE:
            return
        received = calls.dispatch()
        for _ in range(3):
            calls.combine(received)
            calls.mode.check()
            received = calls.dispatch()
        missing = missing_entries(GEOMETRY, calls.mode.masked(), calls.topk_idx)
        assert missing.tolist() == [[False, True]] * 3

    with watched("always") as texts:
        run(builder, program)
    assert len(texts) == 2
    for rank, text in enumerate(sorted(texts)):
        assert text.startswith(f"rank {rank} waited 0.5 s for rank 2 in low_latency dispatch 2;")


def test_a_call_that_raises_the_warning_has_done_nothing(builder: Builder) -> None:
    """Each rank raises it in another call, and all stay in step."""

    def program(rank: int, calls: Rank) -> None:
        calls.combine(calls.dispatch())
        if rank == GONE:
            return
        received = calls.dispatch()
        if rank == 0:
            with pytest.raises(LatePeerWarning, match="rank 2 in low_latency dispatch 2"):
                calls.combine(received)
        else:
            with pytest.raises(LatePeerWarning, match="rank 2 in low_latency dispatch 2"):
                calls.mode.check()
        for _ in range(3):
            out = calls.combine(received)
            assert (out == 1).all()  # without the expert on the masked rank
            received = calls.dispatch()
            assert received.counts.sum() == (6 if rank == 0 else 0)
            calls.mode.check()

    with watched("error"):
        run(builder, program)


def test_ranks_that_the_caller_masks_are_no_news(builder: Builder) -> None:
    def program(rank: int, calls: Rank) -> None:
        calls.combine(calls.dispatch())
        if rank == GONE:
            return
        calls.mode.set_masked(GONE, True)
        calls.combine(calls.dispatch())
        calls.mode.check()

    with watched("error"):
        run(builder, program)


@pytest.mark.parametrize("masked", [[0, 0, 0], [0, 1, 0], [1, 0, 1]])
def test_missing_entries(masked: list[int]) -> None:
    topk_idx = torch.tensor([[0, 1], [2, 3], [4, 5], [-1, 2], [-1, -1], [6, -7]])
    missing = missing_entries(GEOMETRY, torch.tensor(masked, dtype=torch.int32), topk_idx)
    wanted = [[0 <= e < 6 and bool(masked[e // 2]) for e in row] for row in topk_idx.tolist()]
    assert missing.dtype is torch.bool
    assert missing.tolist() == wanted
    assert missing_entries(GEOMETRY, torch.tensor(masked), topk_idx[:0]).shape == (0, 2)


@pytest.mark.parametrize(
    ("topk_idx", "argument"),
    [
        (torch.zeros((3, 3), dtype=torch.int64), "topk_idx.shape"),
        (torch.zeros((3, 2), dtype=torch.int32), "topk_idx.dtype"),
        ([[0, 1]], "topk_idx"),
    ],
)
def test_missing_entries_of_a_wrong_routing(topk_idx: Any, argument: str) -> None:
    with pytest.raises(fanfold.ArgumentError, match="topk_idx") as caught:
        missing_entries(GEOMETRY, torch.zeros(3), topk_idx)
    assert caught.value.argument.startswith(argument)


@pytest.mark.parametrize("mode", ["low_latency", "high_throughput"])
def test_nobody_is_missing(mode: Mode) -> None:
    sizes = {"num_experts": 4, "top_k": 2, "hidden": 64, "max_tokens": 6}
    topk_idx = torch.tensor([[0, 3], [-1, 1]])
    with open_dispatcher(mode, **sizes) as ep:
        assert ep.live_ranks() == (0,)
        assert not ep.missing(topk_idx).any()
        with pytest.raises(fanfold.ArgumentError, match=r"topk_idx\.shape"):
            ep.missing(topk_idx[0])
    for query in (ep.live_ranks, lambda: ep.missing(topk_idx)):
        with pytest.raises(fanfold.UsageError, match="closed"):
            query()
