"""The high-throughput mode of emulated GPUs on several hosts, as :mod:`tests.emulation.hosts`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from fanfold import _core
from fanfold.config import Config
from fanfold.memory.between_hosts import BytesBetweenHosts
from tests.emulation.high_throughput import World, emulated
from tests.emulation.hosts import Network, Proxies, beside_pinned, open_memories, without_pinning
from tests.emulation.world import Builder, ThreadGroup


@contextmanager
def emulated_hosts(builder: Builder, ctas: int) -> Iterator[None]:
    """:func:`emulated`, on several hosts."""
    with emulated(builder, ctas), without_pinning():
        yield


class HostsWorld(Proxies, World):
    """All ranks of a group on several hosts; only within :func:`emulated_hosts`. It must be closed.

    Args:
        network: what joins them; its ``hosts`` say how many ranks there are.
        ring_bytes, settings: as of :class:`World`.
    """

    memories: list[Any]

    def __init__(self, network: Network, ring_bytes: int, **settings: Any) -> None:
        self._network, self._stopped = network, []
        settings = {"network": network.setting, **settings}
        super().__init__(len(network.hosts), ring_bytes, **settings)
        pinned = [] if network.gin else self.memories
        self._beside = [beside_pinned(memory) for memory in pinned]
        self._behind += [part for parts in self._beside for part in parts]

    def end(self, rank: int) -> None:
        """A rank closes what is between the hosts, and makes no call any more."""
        gone = {id(part) for part in self._beside[rank]}
        self._behind = [part for part in self._behind if id(part) not in gone]
        self.fail(rank)  # so it waits for no others
        self.memories[rank].between.memory.core.close()

    def _memories(
        self,
        ranks: int,
        ring_bytes: int,
        config: Config,
        groups: list[ThreadGroup],
        regions: list[torch.Tensor],
    ) -> list[Any]:
        received = _core.cuda_high_throughput_bytes(ranks, ring_bytes)[1]
        nbytes = BytesBetweenHosts.of_high_throughput(ranks, received)
        return list(open_memories(self._network, nbytes, config, groups, regions))
