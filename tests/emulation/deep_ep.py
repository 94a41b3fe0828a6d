"""Buffers of the DeepEP face whose high throughput runs on emulated GPUs; ranks are threads."""

from __future__ import annotations

import math
import threading
import types
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from fanfold import _core
from fanfold.backends import opening
from fanfold.backends.choose import BackendChoice
from fanfold.backends.high_throughput.room import Room
from fanfold.deep_ep import Buffer, elastic, hybrid, runtime
from fanfold.deep_ep.streams import HostStreams
from fanfold.stream_order import StreamOrder
from tests.emulation.high_throughput import emulated
from tests.emulation.world import Builder, ThreadGroup

PLACED = BackendChoice("cuda", torch.device("cpu"), "each rank has a GPU of its own", (9, 0))


class Memory:
    """Symmetric memory between threads."""

    between = None

    def __init__(self, group: ThreadGroup, bytes_per_rank: int) -> None:
        self.group, self.rank, self.ranks = group, group.rank, group.size
        self.device = torch.device("cpu")
        self.bytes_per_rank = self.usable_bytes = bytes_per_rank
        region = torch.full((bytes_per_rank + 128,), 0xA5, dtype=torch.uint8)
        self.tensor = region[-region.data_ptr() % 128 :][:bytes_per_rank]
        self._regions = group.all_gather(self.tensor)
        self.closed = False

    def base(self, peer: int) -> int:
        return int(self._regions[peer].data_ptr())

    def close(self) -> None:
        self.closed = True


def _launch(args: Any, kernel: Any, ctas: int, threads: int, stream: int, early: bool) -> None:
    """Of the low-latency kernels, on grids of their own."""
    kernel.run(args.address, types.SimpleNamespace(ctas=ctas, shared_bytes=0))


@contextmanager
def emulated_buffers(builder: Builder, ctas: int, placed: BackendChoice = PLACED) -> Iterator[None]:
    """Within it all kinds of Buffers take the CPU for a GPU of compute capability 9.0."""
    with (
        emulated(builder, ctas),
        mock.patch.multiple(
            runtime,
            choose=lambda *_, **__: placed,
            Streams=lambda device: HostStreams(),
        ),
        mock.patch.multiple(
            elastic,
            choose=lambda *_, **__: placed,
            Streams=lambda device: HostStreams(),
        ),
        mock.patch.object(hybrid, "choose", return_value=placed),
        mock.patch.object(opening, "CudaSymmetricMemory", Memory),
        mock.patch.object(_core.CudaDispatchArgs, "launch", _launch),
        mock.patch.object(_core.CudaCombineArgs, "launch", _launch),
        mock.patch.object(StreamOrder, "mark"),
        mock.patch.object(dist, "get_rank", lambda group: group.rank),
    ):
        yield


def poisoned(room: Room, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """In the place of ``Room.empty``: what kernels do not write holds anything."""
    nbytes = math.prod(shape) * dtype.itemsize
    return (
        torch.full((nbytes,), 0x33, dtype=torch.uint8, device=room.device).view(dtype).view(shape)
    )


def open_buffer(group: Any, nvl_bytes: int = 1 << 20, **changes: Any) -> Buffer:
    """A Buffer for high throughput. Collective."""
    return Buffer(group, nvl_bytes, explicitly_destroy=True, **changes)


def run(ranks: int, program: Callable[..., Any], *args: Any) -> list[Any]:
    """``program(group, *args)`` on each of so many ranks at once; their results."""
    values: list[Any] = [None] * ranks
    barrier = threading.Barrier(ranks, timeout=60.0)

    def be(rank: int) -> Any:
        return program(ThreadGroup(rank, values, barrier), *args)

    with ThreadPoolExecutor(ranks) as pool:
        return list(pool.map(be, range(ranks)))
