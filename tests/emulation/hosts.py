"""The low-latency mode of emulated GPUs on several hosts: the kernels push into the rings of real
proxies, which a loopback network joins."""

from __future__ import annotations

import ctypes
import dataclasses
import os
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch

from fanfold.backends.low_latency import cuda_bytes_between_hosts
from fanfold.backends.opening import open_between_hosts
from fanfold.config import NCCL_GIN, Config
from fanfold.geometry import Geometry
from fanfold.memory import host, pinning, rows
from fanfold.memory.between_hosts import BytesBetweenHosts
from fanfold.memory.cuda_hosts import CudaMemoryAcrossHosts
from fanfold.memory.hosts import Hosts
from tests.emulation.world import Builder, ThreadGroup, World, emulated, gpu_memory


@dataclasses.dataclass(frozen=True)
class Network:
    """What joins the hosts.

    Attributes:
        hosts: which host each rank is on.
        seed: of delays, repetitions and the order of writes; 0 for none of them.
        threads: of each rank's proxy, each with a ring.
        ring_slots: of each ring.
        provider: of libfabric, which joins them instead of a loopback network; "" for none.
        rows_apart: whether rows have memory of their own, as where NICs reach a GPU's.
        gin: joins them by NCCL's GIN, of the tests' own libnccl, instead.
    """

    hosts: tuple[int, ...]
    seed: int = 0
    threads: int = 2
    ring_slots: int = 64
    provider: str = ""
    rows_apart: bool = False
    gin: bool = False

    @property
    def setting(self) -> str:
        """As :class:`Config` has it."""
        if self.gin:
            return NCCL_GIN
        if self.provider:
            return f"libfabric:{self.provider}"
        return f"loopback:{self.seed}" if self.seed else "loopback"


class CpuRows:
    """In the place of :class:`fanfold.memory.rows.GpuRows`, of which a loopback network reaches
    none. Attributes are those."""

    device = dmabuf = -1

    def __init__(self, nbytes: int, device: torch.device) -> None:
        del device
        self.nbytes = nbytes
        self._memory = torch.full((nbytes + 4096,), 0xA5, dtype=torch.uint8, device="cpu")
        self.address = -(-self._memory.data_ptr() // 4096) * 4096
        self.closed = False

    def close(self) -> None:
        self.closed = True


@contextmanager
def _rows_of(network: Network) -> Iterator[None]:
    """Within it memories have what ``network`` says of rows."""
    if not network.rows_apart:
        yield
        return
    with (
        mock.patch.object(rows, "GpuRows", CpuRows),
        mock.patch.object(rows, "why_no_rows_on", return_value=""),
    ):
        yield


class StoppedRing:
    """A ring with a producers' line of its own, which nobody empties.

    Args:
        slots: of it.
    """

    def __init__(self, slots: int) -> None:
        # Lines of producers, the consumer, faults and losses, questions (layout/ring.h), commands.
        commands = 4 * 128 + 4096
        self._memory = torch.zeros(commands + 16 * slots, dtype=torch.uint8, device="cpu")
        at = self._memory.data_ptr()
        self.view = [at, at + 128, at + 256, at + commands, slots]  # RingView

    def _word(self, place: int) -> int:
        return int(self._memory[place : place + 8].view(torch.int64).item())

    @property
    def pushed(self) -> int:
        """Commands in it."""
        return self._word(0)

    @property
    def abandoned(self) -> int:
        """Places that were taken and never filled."""
        return self._word(256)


_VIEW_WORDS = 5


@contextmanager
def without_pinning() -> Iterator[None]:
    """Within it memory is there for kernels without being pinned."""
    with mock.patch.object(pinning, "_pin"), mock.patch.object(pinning, "_unpin"):
        yield


@contextmanager
def emulated_hosts(builder: Builder, ctas: int) -> Iterator[None]:
    """:func:`emulated`, on several hosts."""
    with emulated(builder, ctas), without_pinning():
        yield


def whole_pages(ranges: list[tuple[int, int]]) -> Callable[[int], bool]:
    """Whether an address is in one of the ranges, each an address and bytes, which are pages, none
    of them twice."""
    assert all(begin % 4096 == nbytes % 4096 == 0 for begin, nbytes in ranges)
    ends = [begin + nbytes for begin, nbytes in ranges]
    assert all(end <= begin for end, (begin, _) in zip(ends, ranges[1:], strict=False))
    return lambda address: any(begin <= address < begin + nbytes for begin, nbytes in ranges)


def beside_pinned(memory: CudaMemoryAcrossHosts) -> list[torch.Tensor]:
    """What a rank receives into and its send areas have beside pinned pages, where a kernel of a
    GPU fails: filled with 0xA5."""
    host = memory.between.memory
    hosts = host.hosts.host
    pinned = sorted(memory.between._pinned._ranges.items())
    parts = []
    for peer in range(memory.ranks):
        if peer != memory.rank and hosts[peer] == hosts[memory.rank]:
            continue
        begin = host.base(peer)
        end = begin + host.usable_bytes
        for address, nbytes in [*pinned, (end, 0)]:
            size = min(address, end) - begin
            if size > 0:
                array = (ctypes.c_ubyte * size).from_address(begin)
                parts.append(torch.frombuffer(array, dtype=torch.uint8).fill_(0xA5))
            begin = max(begin, address + nbytes)
    return parts


def open_memories(
    network: Network,
    nbytes: BytesBetweenHosts,
    config: Config,
    groups: list[ThreadGroup],
    regions: list[torch.Tensor],
) -> list[CudaMemoryAcrossHosts]:
    """Each rank's memory: on its GPU a region, and ``nbytes`` between the hosts."""
    ranks = len(groups)
    hosts = Hosts(
        host=network.hosts,
        machine_ranks=ranks,
        one_machine=True,
        proxy_threads=network.threads,
        world=f"{os.getpid()} {uuid.uuid4()}",
        reason="a test says so",
        interface="",
    )

    def open_(group: ThreadGroup) -> CudaMemoryAcrossHosts:
        members = hosts.members(group.rank)
        local = [regions[peer] for peer in members]
        gpu = gpu_memory(group, local, members.index(group.rank))
        between = open_between_hosts(group, hosts, gpu.device, nbytes, config)
        return CudaMemoryAcrossHosts(gpu, between)

    with (
        mock.patch.object(host, "KERNEL_RING_SLOTS", network.ring_slots),
        _rows_of(network),
        ThreadPoolExecutor(ranks) as pool,
    ):
        return list(pool.map(open_, groups))


def close_memories(memories: list[CudaMemoryAcrossHosts]) -> None:
    """Ends the proxies of all ranks. No kernel runs."""
    with ThreadPoolExecutor(len(memories)) as pool:
        list(pool.map(CudaMemoryAcrossHosts.close, memories))


class Proxies:
    """What a world on several hosts has of its ranks' proxies.

    Attributes:
        memories: of all ranks.
    """

    memories: list[CudaMemoryAcrossHosts]
    _network: Network
    _stopped: list[StoppedRing]  # kernels push into their memory

    @property
    def rows_apart(self) -> bool:
        """Whether rows have memory of their own."""
        return self._network.rows_apart

    def count(self, name: str, rank: int) -> int:
        """Of the proxy of ``rank``: ``commands``, ``duplicates``, ``reordered``."""
        counts = self.memories[rank].between.memory.core.carrier_counts()
        return sum(value for each, _, _, value in counts if each == name)

    def stop(self, rank: int) -> StoppedRing:
        """From now on nobody takes what ``rank`` pushes for the peers of its first proxy thread:
        the ring that it pushes into instead."""
        ring = StoppedRing(self._network.ring_slots)
        self._stopped.append(ring)
        self._view(rank).copy_(torch.tensor(ring.view, dtype=torch.int64, device="cpu"))
        return ring

    def fail(self, rank: int) -> None:
        """The first proxy thread of ``rank`` fails, which this waits for: a producer has left its
        ring with a hole."""
        faults = int(self._view(rank)[2])
        ctypes.c_uint64.from_address(faults).value = 1
        core = self.memories[rank].between.memory.core
        end = time.monotonic() + 60.0
        while not core.why_lost(-1):
            assert time.monotonic() < end
            time.sleep(0.01)

    def _view(self, rank: int) -> torch.Tensor:
        """What the kernels of ``rank`` know of its first ring (``RingView``)."""
        block = self.memories[rank].between._block
        views: torch.Tensor = block[len(block) - self._network.threads * _VIEW_WORDS * 8 :]
        return views.view(torch.int64)[:_VIEW_WORDS]

    def close(self) -> None:
        """Ends the proxies. No kernel runs."""
        close_memories(self.memories)


class HostsWorld(Proxies, World):
    """All ranks of one geometry on several hosts; only within :func:`emulated_hosts`. It must be
    closed.

    Args:
        geometry: its ``ranks`` are made.
        network: what joins them.
        late: whether the weights come with combine.
        settings: of :class:`Config`.
    """

    def __init__(
        self, geometry: Geometry, network: Network, *, late: bool = False, **settings: Any
    ) -> None:
        self._network = network
        self._stopped = []
        super().__init__(geometry, late=late, **{**settings, "network": network.setting})

    def _memories(
        self,
        geometry: Geometry,
        config: Config,
        groups: list[ThreadGroup],
        regions: list[torch.Tensor],
    ) -> list[Any]:
        nbytes = BytesBetweenHosts(cuda_bytes_between_hosts(geometry))
        self.memories = open_memories(self._network, nbytes, config, groups, regions)
        return self.memories


Open = Callable[..., HostsWorld]


@contextmanager
def opening_on_hosts(builder: Builder, ctas: int) -> Iterator[Open]:
    """``open_(shape, network, **settings)`` makes a world, which ends with this. A shape has a
    geometry, a grid of CTAs and senders, and says whether weights come late."""
    worlds: list[HostsWorld] = []

    def open_(shape: Any, network: Network, **settings: Any) -> HostsWorld:
        grid = {"ctas": shape.grid[0], "senders": shape.grid[1]}
        world = HostsWorld(shape.geometry, network, late=shape.late, **{**grid, **settings})
        worlds.append(world)
        return world

    with emulated_hosts(builder, ctas):
        yield open_
        for world in worlds:
            world.close()
