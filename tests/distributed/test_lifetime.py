"""Objects come and go without leaving memory, descriptors, mappings or segments behind."""

from __future__ import annotations

import gc
import os
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import fanfold
from fanfold.group import as_group
from fanfold.launch import RankPool
from tests.distributed.every_call import round_trips
from tests.distributed.layers import Shape, good_call, round_trip, works
from tests.shared_memory import named_memory

MODES = ("low_latency", "high_throughput")


def _footprint() -> tuple[int, int, int]:
    """Descriptors, mappings, and resident bytes of this process."""
    gc.collect()
    mappings = Path("/proc/self/maps").read_text().count("\n")
    resident = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")
    return len(list(Path("/proc/self/fd").iterdir())), mappings, resident


def _reopen(group: dist.ProcessGroup, mode: str, times: int) -> list[tuple[int, int, int]]:
    shape = Shape(mode=mode)
    footprints = []
    for step in range(times):
        if step % 2:
            ep = shape.open(group)  # left to the garbage collector
            assert works(ep, shape)
            del ep
        else:
            with shape.open(group) as ep:
                assert works(ep, shape)
        if step in (times // 2, times - 1):  # in the first half the process grows to its size
            footprints.append(_footprint())
    return footprints


@pytest.mark.one_host  # libfabric 1.17 keeps some memory of each of its connections
@pytest.mark.timeout(300)
@pytest.mark.parametrize("times", [300, pytest.param(1000, marks=pytest.mark.long)])
@pytest.mark.parametrize("mode", MODES)
def test_many_times(pools: Callable[[int], RankPool], mode: str, times: int) -> None:
    pool = pools(2)
    segments = named_memory(pool.pids)
    for early, late in pool.run(_reopen, mode, times):
        assert late[0] <= early[0]
        assert late[1] <= early[1] + 2
        # One leaked page of each object in between would show.
        assert late[2] <= early[2] + times // 2 * 4096 // 2
    assert named_memory(pool.pids) == segments


def _held() -> tuple[int, int]:
    """Descriptors and mappings of this process that refer to Fanfold's memory."""
    links = list(Path("/proc/self/fd").iterdir())
    # The descriptor that lists the others is gone by now.
    targets = [str(link.readlink()) for link in links if link.is_symlink()]
    mappings = Path("/proc/self/maps").read_text()
    return sum("memfd:fanfold" in target for target in targets), mappings.count("memfd:fanfold")


def _open_and_close(group: dist.ProcessGroup, mode: str) -> list[tuple[int, int]]:
    shape = Shape(mode=mode)
    gc.collect()
    before = _held()
    ep = shape.open(group)
    opened = _held()
    ep.close()
    return [before, opened, _held()]


@pytest.mark.one_host
@pytest.mark.parametrize("mode", MODES)
def test_close_releases_the_memory(pools: Callable[[int], RankPool], mode: str) -> None:
    for before, opened, closed in pools(2).run(_open_and_close, mode):
        # Each rank maps its own region and its peer's, and keeps no way to open either again.
        assert opened == (before[0], before[1] + 2)
        assert closed == before


def _close_twice(group: dist.ProcessGroup, mode: str) -> bool:
    shape = Shape(mode=mode)
    ep = shape.open(group)
    call = good_call(shape, ep.rank)
    received = ep.dispatch(call.x, call.topk_idx, call.topk_weights)
    before = received.tokens.clone()
    ep.combine(received.tokens, received)
    ep.close()
    ep.close()
    with pytest.raises(fanfold.UsageError, match="closed"):
        ep.combine(received.tokens, received)
    # What was received belongs to the caller, not to the closed memory.
    return torch.equal(received.tokens.view(torch.int16), before.view(torch.int16))


@pytest.mark.parametrize("mode", MODES)
def test_close(pools: Callable[[int], RankPool], mode: str) -> None:
    assert all(pools(2).run(_close_twice, mode))


class _Watched:
    """A group that tells when nothing holds it any more."""

    def __init__(self, group: Any) -> None:
        self._inner = as_group(group)
        self.rank, self.size = self._inner.rank, self._inner.size

    def all_gather(self, value: Any) -> list[Any]:
        return self._inner.all_gather(value)


def _hold_nothing(group: dist.ProcessGroup, mode: str) -> list[bool]:
    """Whether all is gone after every call, without the garbage collector: what a group of gloo is
    held by when Python ends makes PyTorch abort, and tensors of a call are memory of GPUs."""
    gone = []
    gc.collect()
    gc.disable()
    try:
        for dtype in ("bf16", "fp8"):
            watched = _Watched(group)
            seen = weakref.ref(watched)
            round_trips(watched, mode, dtype)
            del watched
            gone.append(seen() is None)
    finally:
        gc.enable()
    return gone


@pytest.mark.parametrize("mode", MODES)
def test_nothing_is_left_to_the_collector(pools: Callable[[int], RankPool], mode: str) -> None:
    assert pools(2).run(_hold_nothing, mode) == [[True, True]] * 2


def _alone(group: dist.ProcessGroup, mode: str) -> torch.Tensor:
    del group
    shape = Shape(mode=mode)
    with shape.open(None) as ep:
        return round_trip(ep, good_call(shape, 0))


def _soak(group: dist.ProcessGroup, mode: str, rounds: int, seed: int) -> int:
    """Rounds that go well, with other numbers of tokens in each and nothing between them."""
    experts = 8 * as_group(group).size
    shape = Shape(num_experts=experts, top_k=5, hidden=64, max_tokens=40, mode=mode)
    right = 0
    with shape.open(group) as ep:
        for step in range(rounds):
            random = torch.Generator().manual_seed(seed * rounds + step)
            tokens = torch.randint(0, shape.max_tokens + 1, (ep.ranks,), generator=random)
            call = good_call(shape, ep.rank, int(tokens[ep.rank]))
            call.topk_idx[torch.rand(call.topk_idx.shape, generator=random) < 0.2] = -1
            kept = (call.topk_idx >= 0).sum(1, keepdim=True)
            out = round_trip(ep, call)
            right += torch.equal(out.float(), call.x.float() * kept)
    return right


@pytest.mark.placements("threads")
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("ranks", [1, 4])
def test_soak(pools: Callable[[int], RankPool], mode: str, ranks: int) -> None:
    assert pools(ranks).run(_soak, mode, 400, 1) == [400] * ranks


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_soak_for_long(pools: Callable[[int], RankPool], mode: str, ranks: int) -> None:
    assert pools(ranks).run(_soak, mode, 20000, 2) == [20000] * ranks


def _reshape(group: dist.ProcessGroup, rounds: int) -> bool:
    """One low-latency memory that serves a new geometry in every call."""
    from fanfold.backends.low_latency import HostLowLatency
    from fanfold.config import Config
    from fanfold.geometry import Geometry
    from fanfold.memory.host import SymmetricMemory

    members = as_group(group)
    random = torch.Generator().manual_seed(9)
    largest = Geometry(members.size, 16 * members.size, 8, 512, 32)
    nbytes = HostLowLatency.required_bytes(largest)
    with SymmetricMemory(members, nbytes, Config.resolve(timeout_s=60.0)) as memory:
        mode = HostLowLatency(memory, 0, nbytes)
        for _ in range(rounds):
            draw = torch.randint(1, 9, (4,), generator=random).tolist()
            shape = Shape(draw[0] * members.size, min(draw[1], draw[0]), draw[2] * 32, draw[3] * 4)
            geometry = Geometry(
                members.size, shape.num_experts, shape.top_k, shape.hidden, shape.max_tokens
            )
            call = good_call(shape, members.rank)
            dispatched, _ = mode.dispatch(geometry, call.x, call.topk_idx)
            out, _ = mode.combine(geometry, dispatched.tokens, dispatched.routing, call.topk_idx)
            if not torch.equal(out.float(), call.x.float() * shape.top_k):
                return False
    return True


@pytest.mark.placements("threads")
def test_changing_geometry(pools: Callable[[int], RankPool]) -> None:
    assert all(pools(4).run(_reshape, 200))
