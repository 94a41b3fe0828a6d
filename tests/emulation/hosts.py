"""The low-latency mode of emulated GPUs on several hosts: the kernels push into the rings of real
proxies, which a loopback network joins."""

from __future__ import annotations

import ctypes
import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from fanfold.backends.low_latency import cuda
from fanfold.geometry import Geometry
from fanfold.jit import KernelSource
from tests.emulation.world import CORE, HERE, Builder, World, emulated

_SOURCES = [
    HERE / "hosts.cpp",
    *(
        CORE / "proxy" / f"{name}.cpp"
        for name in ("failure", "options", "proxy", "proxy_thread", "proxy_thread_failures",
                     "span", "window")
    ),
    *(CORE / "ring" / f"{name}.cpp" for name in ("command", "ring")),
    *sorted((CORE / "transport").glob("loopback*.cpp")),
    *(CORE / "base" / f"{name}.cpp" for name in ("cores", "error", "fork", "wait")),
    CORE / "memory" / "region.cpp",
]  # fmt: skip


class _Options(ctypes.Structure):
    """``Options`` of hosts.cpp, with the fields of ``LowLatencyGeometry`` in front."""

    _fields_ = [
        *((name, ctypes.c_int32) for name in ("ranks", "experts", "top_k", "hidden", "max_tokens")),
        *((name, ctypes.c_int32) for name in ("threads", "ring_slots", "give_up_peers")),
        ("timeout_s", ctypes.c_double),
        ("seed", ctypes.c_uint64),
    ]


@dataclasses.dataclass(frozen=True)
class Network:
    """What joins the hosts.

    Attributes:
        hosts: which host each rank is on.
        seed: of delays, repetitions and the order of writes; 0 for none of them.
        threads: of each rank's proxy, each with a ring.
        ring_slots: of each ring.
    """

    hosts: tuple[int, ...]
    seed: int = 0
    threads: int = 2
    ring_slots: int = 64


def across_hosts(source: KernelSource) -> KernelSource:
    """The same kernel for ranks on several hosts."""
    return dataclasses.replace(source, constants={**dict(source.pairs), "kAcrossHosts": 1})


@contextmanager
def emulated_hosts(builder: Builder, ctas: int) -> Iterator[None]:
    """:func:`emulated`, with kernels for several hosts."""

    def load(source: KernelSource, *_: Any) -> ctypes.CDLL:
        return builder.load(across_hosts(source))

    with (
        emulated(builder, ctas),
        mock.patch.object(cuda.jit, "load", load),
        mock.patch.object(cuda.jit, "load_all", lambda every, *_: [*map(load, every)]),
    ):
        yield


class HostsWorld(World):
    """All ranks of one geometry on several hosts; only within :func:`emulated_hosts`. It must be
    closed. The memory between hosts begins as zeros, which no reset changes, so the geometry stays
    and no rank is reset.

    Args:
        builder: of the kernels.
        geometry: its ``ranks`` are made.
        network: what joins them.
        late: whether the weights come with combine.
        settings: of :class:`Config`.
    """

    def __init__(
        self,
        builder: Builder,
        geometry: Geometry,
        network: Network,
        *,
        late: bool = False,
        **settings: Any,
    ) -> None:
        self._network = network
        self._core = _core_of(builder)
        options = _Options(
            geometry.ranks, geometry.num_experts, geometry.top_k, geometry.hidden,
            geometry.max_tokens, network.threads, network.ring_slots,
            settings.get("late_peers") == "mask", settings.get("timeout_s", 20.0), network.seed,
        )  # fmt: skip
        hosts = (ctypes.c_int32 * geometry.ranks)(*network.hosts)
        self._hosts = ctypes.c_void_p(self._core.hosts_open(ctypes.byref(options), hosts))
        super().__init__(geometry, late=late, **settings)
        for rank, mode in enumerate(self.modes):
            self._core.hosts_attach(self._hosts, rank, mode._state.data_ptr())

    def _base(self, regions: list[int], rank: int, peer: int) -> int:
        hosts = self._network.hosts
        if hosts[rank] == hosts[peer]:
            return super()._base(regions, rank, peer)
        return int(self._core.hosts_send_area(self._hosts, rank, peer))

    def count(self, name: str, rank: int) -> int:
        """Of the proxy of ``rank``: ``commands``, ``duplicates``, ``reordered``; ``room`` in its
        first ring, and tickets ``abandoned`` there."""
        return int(getattr(self._core, f"hosts_{name}")(self._hosts, rank))

    def cut(self, rank: int, peer: int) -> None:
        """From now on nothing passes between the two."""
        self._core.hosts_cut(self._hosts, rank, peer)

    def failure(self, rank: int) -> str | None:
        """Why the proxy of ``rank`` has failed; None if it runs."""
        text = self._core.hosts_failure(self._hosts, rank)
        return None if text is None else str(text.decode())

    def stop(self, rank: int) -> None:
        """The proxy of ``rank`` takes no more commands, and receives nothing."""
        self._core.hosts_stop(self._hosts, rank)

    def close(self) -> None:
        """Ends the proxies. No kernel runs."""
        self._core.hosts_close(self._hosts)


def _core_of(builder: Builder) -> ctypes.CDLL:
    core = builder.load_host("hosts", *_SOURCES)
    core.hosts_open.restype = ctypes.c_void_p
    core.hosts_close.argtypes = (ctypes.c_void_p,)
    core.hosts_close.restype = None
    core.hosts_send_area.argtypes = (ctypes.c_void_p, ctypes.c_int32, ctypes.c_int32)
    core.hosts_send_area.restype = ctypes.c_uint64
    core.hosts_attach.argtypes = (ctypes.c_void_p, ctypes.c_int32, ctypes.c_void_p)
    core.hosts_attach.restype = None
    core.hosts_cut.argtypes = (ctypes.c_void_p, ctypes.c_int32, ctypes.c_int32)
    core.hosts_cut.restype = None
    core.hosts_failure.argtypes = (ctypes.c_void_p, ctypes.c_int32)
    core.hosts_failure.restype = ctypes.c_char_p
    core.hosts_stop.argtypes = (ctypes.c_void_p, ctypes.c_int32)
    core.hosts_stop.restype = None
    for name in ("commands", "duplicates", "reordered", "room", "abandoned"):
        count = getattr(core, f"hosts_{name}")
        count.argtypes, count.restype = (ctypes.c_void_p, ctypes.c_int32), ctypes.c_uint64
    return core
