"""What ranks that are threads of one process do otherwise on their GPU, which stand-ins play."""

from __future__ import annotations

import contextlib
import gc
import threading
import types
from typing import Any

import pytest
import torch

from fanfold import _core, gpus, quantizing, thread_ranks
from fanfold.backends import choose as choosing
from fanfold.backends.choose import choose
from fanfold.backends.high_throughput import cuda as high_throughput
from fanfold.backends.high_throughput import launches as launching
from fanfold.backends.high_throughput.launches import ctas_bounds
from fanfold.backends.low_latency.cuda import CudaLowLatency
from fanfold.config import Config
from fanfold.deferred_free import drain_deferred_frees, free_when_idle
from fanfold.errors import ArgumentError, UnavailableError
from fanfold.group import Group, together
from fanfold.launch import LaunchError
from fanfold.memory.cuda import CudaSymmetricMemory, own_sms, unavailable, wait_for_kernels
from fanfold.thread_ranks import ThreadRanks
from tests.emulation import launches
from tests.unit.test_choose import Ranks, seat

NBYTES = 4096
SMS = 132


class Stream:
    """A stream that counts who has waited for it."""

    def __init__(self) -> None:
        self.waits = 0

    def synchronize(self) -> None:
        self.waits += 1


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> types.SimpleNamespace:
    """A GPU, as far as is asked: its default stream, the current one, and what was waited for."""
    said = types.SimpleNamespace(default=Stream(), current=Stream(), waited=[])
    empty = torch.empty
    for name, value in {
        "current_device": lambda: 0,
        "current_stream": lambda device=None: said.current,
        "default_stream": lambda device=None: said.default,
        "get_device_properties": lambda index: types.SimpleNamespace(multi_processor_count=SMS),
        "is_current_stream_capturing": lambda: False,
        "synchronize": said.waited.append,
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(torch, "empty", lambda *size, device=None, **rest: empty(*size, **rest))
    return said


def _open(group: Group) -> tuple[list[int], int, int, tuple[int, int]]:
    with together(group) as ranks, CudaSymmetricMemory(ranks, NBYTES) as memory:
        bases = [memory.base(peer) for peer in range(group.size)]
        wait_for_kernels(memory)
        ranks.all_gather(None)  # no memory is given back before all have seen theirs
        return bases, memory.tensor.data_ptr(), own_sms(memory), ctas_bounds(memory)


@pytest.mark.usefixtures("gpu")
def test_threads_have_each_others_addresses_and_a_share_of_the_sms() -> None:
    with ThreadRanks(3) as ranks:
        found = ranks.run(_open)
    addresses = [own for _, own, _, _ in found]
    assert len(set(addresses)) == 3
    for bases, _, sms, bounds in found:
        assert bases == addresses
        assert (sms, bounds) == (SMS // 3, (2, SMS // 3))


@pytest.mark.usefixtures("gpu")
def test_where_a_rank_is_late_nothing_waits_for_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its kernels may still run, and wait for a launch that never comes."""
    end, drained = threading.Event(), []
    monkeypatch.setattr(thread_ranks, "drain_deferred_frees", lambda: drained.append("waited"))
    with ThreadRanks(2, timeout_s=0.2) as ranks:
        with pytest.raises(LaunchError, match="did not finish"):
            ranks.run(lambda group: group.rank == 0 or end.wait(60.0))
        end.set()
    assert drained == []
    with ThreadRanks(2) as ranks:
        ranks.run(lambda group: group.rank)
    assert drained == ["waited"]


def test_threads_wait_for_their_stream_only(gpu: types.SimpleNamespace) -> None:
    drain_deferred_frees()
    gpu.waited.clear()
    with ThreadRanks(2) as ranks:
        ranks.run(_open)
    assert gpu.current.waits == 2
    assert torch.device("cuda", 0) not in gpu.waited[:-2], "waited for the GPU in a thread"
    with ThreadRanks(1) as alone:
        gpu.waited.clear()
        assert alone.run(_open)[0][2] == SMS
    assert gpu.current.waits == 2
    assert gpu.waited[0] == torch.device("cuda", 0)


def test_what_threads_drop_stays_until_none_runs(gpu: types.SimpleNamespace) -> None:
    gc.collect()
    drain_deferred_frees()
    gpu.waited.clear()
    device = torch.device("cuda", 0)
    with gpus.shared_by_threads():
        with gpus.shared_by_threads():
            free_when_idle(device, object())
        drain_deferred_frees()
        assert gpu.waited == []
    drain_deferred_frees()
    assert gpu.waited == [device]


def test_the_default_stream_is_refused(gpu: types.SimpleNamespace) -> None:
    with ThreadRanks(2) as ranks:
        assert ranks.run(unavailable) == [None, None]
        gpu.current = gpu.default
        for rank, text in enumerate(ranks.run(unavailable)):
            assert f"2 ranks are threads of one process, and the current stream of rank {rank}" in (
                text
            )
            assert "ThreadRanks" in text
    with ThreadRanks(1) as alone:
        assert alone.run(unavailable) == [None]


def _placed(monkeypatch: pytest.MonkeyPatch, seats: list[Any]) -> list[Any]:
    monkeypatch.setattr(choosing, "_look", lambda group: seats[group.rank])
    return Ranks(len(seats)).run(lambda group: choose(group, Config.resolve(backend="cuda")))


def test_threads_have_a_gpu_together(monkeypatch: pytest.MonkeyPatch) -> None:
    threads = [seat(0, "a", process=7), seat(0, "a", process=7)]
    assert [p.device.type for p in _placed(monkeypatch, threads)] == ["cuda", "cuda"]
    for others in ([seat(0, "a"), seat(0, "a")], [threads[0], seat(0, "a", process=8)]):
        for error in _placed(monkeypatch, others):
            assert isinstance(error, UnavailableError)
            assert "both have cuda:0 as current device" in str(error)


def _seat(group: Group) -> int:
    return choosing._look(group).process


def test_a_thread_says_which_process_it_is_of(
    gpu: types.SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(choosing, "lacking", lambda: None)
    monkeypatch.setattr(choosing, "identity", lambda device: "a")
    monkeypatch.setattr(choosing, "unreachable_from", lambda device: ())
    monkeypatch.setattr(choosing, "_no_kernels_for", lambda device, capability: None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    with ThreadRanks(2) as ranks, ThreadRanks(1) as alone:
        first, second = ranks.run(_seat)
        assert first == second != 0
        assert alone.run(_seat) == [0]


def test_each_rank_has_a_stream_where_there_is_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(thread_ranks, "lacking", lambda: None)
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setenv("FANFOLD_BACKEND", "auto")
    with ThreadRanks(3) as ranks:
        assert len({id(stream) for stream in ranks._streams}) == 3
    with pytest.raises(ArgumentError, match="from 1 to 8 on one GPU"):
        ThreadRanks(9)
    monkeypatch.setenv("FANFOLD_BACKEND", "host")
    with ThreadRanks(9) as ranks:
        assert not ranks._streams


def test_rows_are_quantised_without_an_early_launch_among_threads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    told: list[bool] = []

    class Args:
        def launch(self, *args: object, early: bool) -> None:
            told.append(early)

    monkeypatch.setattr(quantizing._core, "CudaQuantizeArgs", Args)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 0, raising=False)
    rows = torch.zeros((1, 16), dtype=torch.bfloat16)
    quantizer = quantizing.Quantizer(None, 1, 16)  # type: ignore[arg-type]
    with gpus.shared_by_threads():
        quantizer.run(rows, rows, rows)
    quantizer.run(rows, rows, rows)
    assert told == [False, True]


@pytest.mark.parametrize("of_threads", [True, False])
def test_low_latency_among_threads_launches_nothing_early_and_waits_for_its_stream(
    monkeypatch: pytest.MonkeyPatch, of_threads: bool
) -> None:
    launches.stand_in(monkeypatch)
    stream, waited, launched = Stream(), [], []
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: stream)
    monkeypatch.setattr(torch.cuda, "synchronize", waited.append)
    sms = types.SimpleNamespace(multi_processor_count=32)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: sms)
    for kind in (_core.CudaDispatchArgs, _core.CudaCombineArgs):
        monkeypatch.setattr(kind, "launch", lambda args, *rest: launched.append(rest))
    mode = launches.open_mode()
    mode._memory.group.one_process = of_threads
    mode = CudaLowLatency(mode._memory, mode._config, False)
    mode.dispatch(launches.GEOMETRY, *launches.tokens())
    mode.quiesce()
    ((_, ctas, _, _, early),) = launched
    assert (ctas, early) == ((8, False) if of_threads else (32, True))
    assert (stream.waits > 0, waited == []) == (of_threads, of_threads)


@pytest.mark.parametrize("of_threads", [True, False])
def test_high_throughput_among_threads_launches_nothing_early_and_waits_for_its_stream(
    monkeypatch: pytest.MonkeyPatch, of_threads: bool
) -> None:
    stream, waited, early, followed = Stream(), [], [], []
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: stream)
    monkeypatch.setattr(torch.cuda, "synchronize", waited.append)
    monkeypatch.setattr(launching, "Launches", lambda *args, **rest: early.append(rest["early"]))
    mode: Any = object.__new__(high_throughput.CudaHighThroughput)
    group = types.SimpleNamespace(size=2, one_process=of_threads)
    device = torch.device("cuda", 0)
    mode._memory = types.SimpleNamespace(group=group, device=device, between=None)
    mode.device, mode.check = None, lambda: None
    mode._follow = lambda: followed.append(len(waited) + stream.waits)
    launching.AllLaunches(None, mode._memory, None, object()).with_sms(None)  # type: ignore[arg-type]
    mode.quiesce()
    assert early == [not of_threads]
    assert (stream.waits, len(waited)) == ((1, 0) if of_threads else (0, 1))
    assert followed == [0], "calls on other streams are waited for, too"
