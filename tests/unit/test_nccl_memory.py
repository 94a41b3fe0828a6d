"""Symmetric memory over NCCL's windows: with a libnccl of the tests' own, over the memory of this
process, and the emulated kernels on it. What NCCL itself does is for ``tests/gpu``."""

from __future__ import annotations

import ctypes
import gc
import threading
import types
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from unittest import mock

import pytest
import torch

from fanfold.backends import opening
from fanfold.backends.high_throughput.cuda import CudaHighThroughput
from fanfold.config import Config
from fanfold.errors import (
    ArgumentError,
    FanfoldError,
    SystemFailure,
    UnavailableError,
    UsageError,
)
from fanfold.group import Group
from fanfold.memory import PeerMemory, nccl
from fanfold.memory.nccl import NcclSymmetricMemory
from fanfold.nccl.library import NcclLibrary
from tests.distributed.cuda_rounds import run_case
from tests.emulation import high_throughput, world
from tests.emulation.libnccl import emulated_nccl, over_cpu
from tests.emulation.world import Builder, ThreadGroup
from tests.unit import test_kernels_emulated

RANKS = 3
NBYTES = 1 << 16
TIMEOUT_S = 30.0


@pytest.fixture
def libnccl(builder: Builder) -> Iterator[ctypes.CDLL]:
    with emulated_nccl(builder) as library:
        yield library


def on_all(ranks: int, program: Callable[[Group], Any]) -> list[Any]:
    """``program`` on each rank at once: what it returns, or the FanfoldError that it raises."""
    values: list[Any] = [None] * ranks
    barrier = threading.Barrier(ranks, timeout=60.0)

    def run(rank: int) -> Any:
        try:
            return program(ThreadGroup(rank, values, barrier))
        except FanfoldError as error:
            return error

    with ThreadPoolExecutor(ranks) as pool:
        return list(pool.map(run, range(ranks)))


def test_every_rank_reaches_all_regions(libnccl: ctypes.CDLL) -> None:
    """By the addresses that it is given, its own among them."""

    def program(group: Group) -> None:
        with NcclSymmetricMemory(group, NBYTES, TIMEOUT_S) as memory:
            assert isinstance(memory, PeerMemory)
            assert (memory.rank, memory.ranks) == (group.rank, RANKS)
            assert memory.usable_bytes == memory.bytes_per_rank == NBYTES
            assert memory.tensor.shape == (NBYTES,)
            assert memory.base(group.rank) == memory.tensor.data_ptr()
            group.all_gather(None)
            for peer in range(RANKS):
                theirs = over_cpu(memory.base(peer), NBYTES, torch.device("cpu"), None)
                theirs[group.rank] = 10 * peer + group.rank
            group.all_gather(None)
            expected = [10 * group.rank + peer for peer in range(RANKS)]
            assert memory.tensor[:RANKS].tolist() == expected
            group.all_gather(None)
        with pytest.raises(UsageError, match="this NcclSymmetricMemory is closed"):
            memory.base(0)
        memory.close()

    assert on_all(RANKS, program) == [None] * RANKS


def test_addresses_of_the_version_without_a_function(libnccl: ctypes.CDLL) -> None:
    """A rank alone, whose memory is at the first address."""
    libnccl.behave(b"version", 22809)
    memory = NcclSymmetricMemory(ThreadGroup(0, [None], threading.Barrier(1)), NBYTES, TIMEOUT_S)
    memory.tensor.fill_(7)
    assert ctypes.c_uint8.from_address(memory.base(0)).value == 7
    memory.close()


def test_a_window_that_is_none(libnccl: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where 2.28.9 has no windows it gives a handle in memory of the CPU, which PyTorch refuses."""
    libnccl.behave(b"version", 22809)

    def refused(*_: Any) -> torch.Tensor:
        raise RuntimeError("pointer resides on host memory and is not registered")

    monkeypatch.setattr(nccl, "tensor_over", refused)
    errors = on_all(2, lambda group: NcclSymmetricMemory(group, NBYTES, TIMEOUT_S))
    for error in errors:
        assert isinstance(error, UnavailableError)
        assert "no window that kernels reach: the GPUs lack peer access" in str(error)
    libnccl.behave_well()


def test_a_rank_that_does_not_come(libnccl: ctypes.CDLL) -> None:
    """To NCCL's own meeting ends the others' wait in time, with what to look at."""
    libnccl.behave(b"no_communicator_of", 1)
    errors = on_all(2, lambda group: NcclSymmetricMemory(group, NBYTES, 0.2))
    assert "ncclCommInitRank" in str(errors[1])
    assert "unhandled system error" in str(errors[1])
    assert "ncclCommInitRank of NCCL 2.30.7" in str(errors[0])
    assert "has not returned after 0.2 s: a rank has ended or hangs" in str(errors[0])
    libnccl.behave_well()
    libnccl.release_all()


def test_one_rank_without_a_communicator(libnccl: ctypes.CDLL) -> None:
    """Though NCCL gives the others theirs: they go no further."""
    libnccl.behave(b"communicator_lost_by", 1)
    errors = on_all(2, lambda group: NcclSymmetricMemory(group, NBYTES, TIMEOUT_S))
    assert "ncclCommInitRank" in str(errors[1])
    assert "rank 1 failed: ncclCommInitRank" in str(errors[0])
    libnccl.behave_well()
    libnccl.release_all()  # rank 0's communicator would wait for rank 1's end


def test_ranks_close_at_different_times(libnccl: ctypes.CDLL) -> None:
    """None waits for another, though NCCL ends a communicator for all ranks together."""
    closed = threading.Event()

    def program(group: Group) -> None:
        memory = NcclSymmetricMemory(group, NBYTES, TIMEOUT_S)
        if group.rank == 1:
            assert closed.wait(30.0)
        memory.close()
        closed.set()

    assert on_all(2, program) == [None, None]


def test_a_stride_of_addresses(libnccl: ctypes.CDLL) -> None:
    """Ranks are whole multiples of 4 GiB apart."""
    window = (ctypes.c_uint8 * 40)()
    ctypes.c_uint64.from_buffer(window, 8).value = 0x7F00_0000_1000
    ctypes.c_uint32.from_buffer(window, 24).value = 3
    library = NcclLibrary("libnccl.so.2", (2, 28, 9))
    group = types.SimpleNamespace(rank=1, size=3)
    opened = nccl.Window(group)  # type: ignore[arg-type]
    opened.communicator = mock.Mock(library=library)
    opened.handle = ctypes.addressof(window)
    expected = [0x7F00_0000_1000 + peer * (3 << 32) for peer in range(3)]
    assert opened.addresses(torch.device("cpu")) == expected


def test_results_outlast_the_memory(libnccl: ctypes.CDLL) -> None:
    """A tensor over a window keeps it, also when the memory is closed."""

    def program(group: Group) -> None:
        memory = NcclSymmetricMemory(group, NBYTES, TIMEOUT_S)
        result = memory.tensor[8:16]
        result.fill_(group.rank)
        memory.close()
        del memory
        gc.collect()
        assert libnccl.left() > 0
        assert result.tolist() == [group.rank] * 8

    assert on_all(2, program) == [None, None]


@pytest.mark.parametrize(
    ("fault", "value", "message"),
    [
        ("version", 22703, r"2\.27\.3 .* has no windows.* NCCL 2\.28\.9 is the first"),
        ("within_reach", 1, r"reach the memory of 1 of 3 ranks.*FANFOLD_GPU_MEMORY=torch"),
        (
            "most_bytes",
            100,
            r"ncclMemAlloc of NCCL 2\.30\.7 .* fails: unhandled system error \(2\)",
        ),
        (
            "no_window",
            1,
            r"gives no window of 65536 bytes and no reason: the GPUs lack peer access",
        ),
    ],
)
def test_what_no_rank_can_do(libnccl: ctypes.CDLL, fault: str, value: int, message: str) -> None:
    """Is an error that names version, cause and remedy, on all ranks."""
    libnccl.behave(fault.encode(), value)
    errors = on_all(RANKS, lambda group: NcclSymmetricMemory(group, NBYTES, TIMEOUT_S))
    for error in errors:
        assert isinstance(error, UnavailableError | SystemFailure)
        with pytest.raises(type(error), match=message):
            raise error
    libnccl.behave_well()


def test_one_rank_without_memory(libnccl: ctypes.CDLL) -> None:
    """Keeps the others from waiting for it in NCCL."""
    libnccl.behave(b"allocations", RANKS - 1)
    errors = on_all(RANKS, lambda group: NcclSymmetricMemory(group, NBYTES, TIMEOUT_S))
    own = [error for error in errors if isinstance(error, SystemFailure)]
    assert len(own) == 1
    assert "no 65536 bytes of NCCL's memory (ncclMemAlloc" in str(own[0])
    others = [error for error in errors if error is not own[0]]
    assert all("failed: rank" in str(error) for error in others)
    libnccl.behave_well()


def test_what_one_rank_cannot_do(libnccl: ctypes.CDLL) -> None:
    """Is an error on all of them, none of which waits."""
    libnccl.behave(b"refuses_window_of", 1)
    errors = on_all(RANKS, lambda group: NcclSymmetricMemory(group, NBYTES, TIMEOUT_S))
    assert "peer access is not supported'. See what NCCL_DEBUG=INFO" in str(errors[1])
    assert all("rank 1 failed: ncclCommWindowRegister" in str(errors[rank]) for rank in (0, 2))
    libnccl.behave_well()


def test_ranks_that_disagree(libnccl: ctypes.CDLL) -> None:
    """Find out before they wait for each other in NCCL."""
    errors = on_all(
        2, lambda group: NcclSymmetricMemory(group, NBYTES * (1 + group.rank), TIMEOUT_S)
    )
    assert all(isinstance(error, ArgumentError) for error in errors)
    assert "bytes_per_rank" in str(errors[0])


def test_ranks_that_are_threads_are_refused(libnccl: ctypes.CDLL) -> None:
    """NCCL wants a GPU for each."""

    def program(group: Group) -> None:
        group.one_process = True  # type: ignore[attr-defined]
        NcclSymmetricMemory(group, NBYTES, TIMEOUT_S)

    errors = on_all(2, program)
    assert all("threads that share one" in str(error) for error in errors)


def test_the_setting_chooses(libnccl: ctypes.CDLL) -> None:
    """Of all that the GPUs of a host share."""
    group = ThreadGroup(0, [None], threading.Barrier(1))
    memory = opening.memory_of_gpus(group, NBYTES, Config(gpu_memory="nccl"))
    assert isinstance(memory, NcclSymmetricMemory)
    memory.close()
    with mock.patch.object(opening, "CudaSymmetricMemory", lambda group, nbytes: (group, nbytes)):
        assert opening.memory_of_gpus(group, NBYTES, Config()) == (group, NBYTES)


class _OverNccl:
    """A world whose ranks' memory is NCCL's."""

    def _memories(self, *given: Any) -> list[Any]:
        *_, groups, regions = given
        # Regions have something behind them that nobody may write; their memory is of that size.
        nbytes = len(regions[0])
        with ThreadPoolExecutor(len(groups)) as pool:
            self.opened = list(
                pool.map(lambda group: NcclSymmetricMemory(group, nbytes, TIMEOUT_S), groups)
            )
        return self.opened


class _LowLatencyWorld(_OverNccl, world.World):
    """Of low latency."""

    def __init__(self, *args: Any, **named: Any) -> None:
        super().__init__(*args, **named)
        # The last bytes of a region begin as sentinels.
        self._sentinels = [
            memory.tensor[-len(old) :]
            for memory, old in zip(self.opened, self._sentinels, strict=True)
        ]


class _HighThroughputWorld(_OverNccl, high_throughput.World):
    """Of high throughput."""


def test_rounds_of_low_latency(libnccl: ctypes.CDLL, builder: Builder) -> None:
    """Every bit is as on any memory."""
    shape = test_kernels_emulated.SHAPES[0]
    with world.emulated(builder, test_kernels_emulated.CTAS):
        ctas, senders = shape.grid
        over = _LowLatencyWorld(shape.geometry, late=shape.late, ctas=ctas, senders=senders)
        for turn in range(2):
            batches = test_kernels_emulated.batches_of(shape, turn)
            test_kernels_emulated.run_round(over, shape, batches, hooks=True)


def test_rounds_of_high_throughput(libnccl: ctypes.CDLL, builder: Builder) -> None:
    """Every bit is as on any memory."""
    with high_throughput.emulated(builder, high_throughput.CTAS):
        case = high_throughput.SMALL
        over = _HighThroughputWorld(case.ranks, high_throughput.ROOMY_RING)

        def program(rank: int, mode: CudaHighThroughput) -> None:
            for layout in ("token_major", "expert_major"):
                run_case(mode, case, rank, layout)

        over.run(program)
