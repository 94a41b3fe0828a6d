"""Parts of a group: the ranks of one host among those of several."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch.distributed as dist

from fanfold.group import as_group, in_one_process, part_of, process_group, together
from fanfold.launch import RankPool
from fanfold.thread_ranks import ThreadRanks

pytestmark = pytest.mark.one_host

MEMBERS = {0: [0, 2], 1: [1], 2: [0, 2]}


def _exchange(group: dist.ProcessGroup) -> dict[str, Any]:
    """Parts of processes exchange as often as they like."""
    with together(as_group(group)) as ranks:
        part = part_of(ranks, MEMBERS[ranks.rank])
        times = 1 if part.size == 1 else 3
        gathered = [part.all_gather((ranks.rank, time)) for time in range(times)]
        own = process_group(part)
        assert own is not None
        assert dist.get_process_group_ranks(own) == MEMBERS[ranks.rank]
        assert process_group(part) is own
        ranks.all_gather(None)
        return {
            "place": (part.rank, part.size),
            "gathered": gathered,
            "one process": in_one_process(part),
        }


def test_parts_of_processes(pools: Callable[[int], RankPool]) -> None:
    for rank, found in enumerate(pools(3).run(_exchange)):
        members = MEMBERS[rank]
        assert found["place"] == (members.index(rank), len(members))
        times = 1 if len(members) == 1 else 3
        assert found["gathered"] == [[(peer, time) for peer in members] for time in range(times)]
        assert found["one process"] is (len(members) == 1)


def _exchange_of_threads(group: Any) -> tuple[list[Any], bool]:
    part = part_of(group, MEMBERS[group.rank])
    assert process_group(part) is None
    return part.all_gather(group.rank), in_one_process(part)


def test_parts_of_threads() -> None:
    with ThreadRanks(3) as ranks:
        found = ranks.run(_exchange_of_threads)
    assert found == [(MEMBERS[rank], True) for rank in range(3)]
