"""The push of GPU threads into a ring: compiled for GPUs, and run on the CPU with a consumer that
reads the ring's memory by the numbers of docs/across_hosts.md. NVRTC needs no GPU.
"""

from __future__ import annotations

import ctypes
import threading
import time
from pathlib import Path

import pytest

from fanfold.jit import KernelSource
from fanfold.jit.cache import Cache
from fanfold.jit.kernel import compile_in
from tests.emulation.world import Builder
from tests.kernels.sources import PUSH, kernel_root
from tests.unit.test_kernels_compile import check, short

CTAS, THREADS = 2, 64
COMMANDS = 40  # of each thread
BOUND_S = 60.0
HEAD, COPY, TAIL, ABANDONED, SLOTS_AT = 16, 17, 32, 48, 64  # words of 8 bytes
PUSHED_ALL, STAYED_FULL = 1, 2
FIRSTS = [0, 2**32 - 100, 2**64 - 100]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return kernel_root(tmp_path_factory.mktemp("ring"))


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a", "sm_100a", "sm_120a"])
@pytest.mark.parametrize("source", PUSH, ids=short)
def test_compiles(root: Path, tmp_path: Path, source: KernelSource, arch: str) -> None:
    check(source, compile_in(root, Cache(tmp_path), source, arch))


class Args(ctypes.Structure):
    """``PushCommandsArgs``, with the fields of ``RingView`` in front."""

    _fields_ = [
        ("head", ctypes.c_uint64),
        ("tail", ctypes.c_uint64),
        ("faults", ctypes.c_uint64),
        ("slots_at", ctypes.c_uint64),
        ("slots", ctypes.c_uint64),
        ("timeout_ns", ctypes.c_int64),
        ("ends", ctypes.c_uint64),
        ("commands", ctypes.c_uint32),
    ]


class Ring:
    """A ring's memory, and its consumer."""

    def __init__(self, slots: int, first: int) -> None:
        self.slots, self.popped = slots, first
        self._kept = ctypes.create_string_buffer(8 * (SLOTS_AT + 2 * slots) + 128)
        self.address = -(-ctypes.addressof(self._kept) // 128) * 128
        words = SLOTS_AT + 2 * slots
        self.words = (ctypes.c_uint64 * words).from_address(self.address)
        self.words[HEAD] = self.words[COPY] = self.words[TAIL] = first
        for ticket in range(first, first + slots):
            for i in range(2):
                self.words[self._place(ticket) + i] = 1 - self._lap(ticket)

    def _place(self, ticket: int) -> int:
        return SLOTS_AT + 2 * (ticket % self.slots)

    def _lap(self, ticket: int) -> int:
        return 1 - ticket % 2**64 // self.slots % 2

    def pop(self) -> tuple[int, int] | None:
        """The words of the next command, or None."""
        place = self._place(self.popped)
        words = self.words[place], self.words[place + 1]
        if any(word % 2 != self._lap(self.popped) for word in words):
            return None
        self.popped += 1
        return words

    def publish(self) -> None:
        self.words[TAIL] = self.popped % 2**64

    def arguments(self, ends: ctypes.Array[ctypes.c_uint32], timeout_s: float) -> Args:
        at = self.address
        return Args(
            at + 8 * HEAD, at + 8 * TAIL, at + 8 * ABANDONED, at + 8 * SLOTS_AT, self.slots,
            int(timeout_s * 1e9), ctypes.addressof(ends), COMMANDS,
        )  # fmt: skip


def start(
    builder: Builder, source: KernelSource, ring: Ring, timeout_s: float
) -> tuple[threading.Thread, ctypes.Array[ctypes.c_uint32]]:
    ends = (ctypes.c_uint32 * (CTAS * THREADS))()
    args = ring.arguments(ends, timeout_s)
    library = builder.load(source)
    thread = threading.Thread(target=lambda: library.emulate(ctypes.addressof(args), CTAS))
    thread.start()
    return thread, ends


def way_of(source: KernelSource) -> int:
    return int(dict(source.pairs)["kWay"])


def pushes_at_all(source: KernelSource, thread: int) -> bool:
    """Whether a thread has commands."""
    return way_of(source) < 3 or (thread % THREADS < 32 and thread % 2 == 1)


@pytest.mark.parametrize("first", FIRSTS)
@pytest.mark.parametrize("slots", [2, 64])
@pytest.mark.parametrize("source", PUSH, ids=short)
def test_pushes_every_command_once_and_in_order(
    builder: Builder, source: KernelSource, slots: int, first: int
) -> None:
    ring = Ring(slots, first)
    thread, ends = start(builder, source, ring, BOUND_S)
    following = [0] * (CTAS * THREADS)
    pushes = [pushes_at_all(source, thread) for thread in range(CTAS * THREADS)]
    deadline = time.monotonic() + 2 * BOUND_S
    while ring.popped < first + sum(pushes) * COMMANDS:
        words = ring.pop()
        if words is None:
            ring.publish()
            time.sleep(0)
            assert time.monotonic() < deadline, f"{ring.popped - first} commands have come"
            continue
        pusher = words[0] >> 4 & 0xFFF
        number = following[pusher]
        following[pusher] += 1
        assert words[0] >> 1 & 7 == 1
        assert words[0] >> 16 & 0xFFFF == number % 16
        assert words[0] >> 32 == number
        assert words[1] >> 1 & 0x7FFFFFFF == number
        assert words[1] >> 32 == pusher
    ring.publish()
    thread.join()
    assert following == [COMMANDS if each else 0 for each in pushes]
    assert list(ends) == [PUSHED_ALL] * (CTAS * THREADS)
    assert ring.words[HEAD] == ring.popped % 2**64
    assert ring.words[ABANDONED] == 0


@pytest.mark.parametrize("source", PUSH, ids=short)
def test_a_ring_that_stays_full_ends_the_kernel(builder: Builder, source: KernelSource) -> None:
    ring = Ring(8, 0)
    thread, ends = start(builder, source, ring, 0.05)
    thread.join(BOUND_S)
    assert not thread.is_alive()
    # A warp without commands waits for nothing.
    waits = [way_of(source) < 3 or thread % THREADS < 32 for thread in range(CTAS * THREADS)]
    assert list(ends) == [STAYED_FULL if each else PUSHED_ALL for each in waits]
    # A thread that took its ticket first has lost it, or its next one; one that tried has changed
    # nothing; a warp ends with its first lane that has lost one.
    all_threads = CTAS * THREADS
    lost = {0: all_threads, 1: 0, 2: all_threads - 8, 3: CTAS * 16 - 8}
    assert ring.words[ABANDONED] == lost[way_of(source)]
    assert ring.words[HEAD] == 8 + ring.words[ABANDONED]
    came = 0
    while ring.pop() is not None:
        came += 1
    assert came == 8
