"""What both modes assume of the memory that ranks share, where there is no GPU."""

from __future__ import annotations

import ctypes

import pytest
import torch

from fanfold.config import Config
from fanfold.errors import UsageError
from fanfold.group import Group
from fanfold.memory import PeerMemory
from fanfold.memory.host import SymmetricMemory
from fanfold.thread_ranks import ThreadRanks

NBYTES = 1000
LINE = 128


def _seen(group: Group) -> list[list[int]]:
    """The first and the last byte of every region, which its rank's peers have written."""
    memory = SymmetricMemory(group, NBYTES, Config.resolve())
    assert isinstance(memory, PeerMemory)
    assert (memory.rank, memory.ranks, memory.group) == (group.rank, group.size, group)
    assert (memory.device, memory.usable_bytes) == (torch.device("cpu"), NBYTES)
    assert memory.bytes_per_rank >= NBYTES
    bases = [memory.base(peer) for peer in range(group.size)]
    assert [base % LINE for base in bases] == [0] * group.size
    regions = [(ctypes.c_uint8 * NBYTES).from_address(base) for base in bases]
    following = (group.rank + 1) % group.size
    regions[following][0] = regions[following][NBYTES - 1] = 10 + group.rank
    group.all_gather(None)
    seen = [[region[0], region[NBYTES - 1]] for region in regions]
    group.all_gather(None)
    memory.close()
    with pytest.raises(UsageError, match="closed"):
        memory.base(group.rank)
    return seen


def test_every_rank_sees_what_a_peer_has_written() -> None:
    with ThreadRanks(3) as ranks:
        assert ranks.run(_seen) == [[[12, 12], [10, 10], [11, 11]]] * 3
