"""``fanfold bench ring --from gpu`` with its kernels on the CPU: who pushes what, what is found
wrong, and times on two clocks. NVRTC needs no GPU.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import threading
from pathlib import Path

import pytest
import torch

from fanfold import _core
from fanfold.bench import ring, ring_gpu
from fanfold.bench.ring_gpu import CLOCK, PUSH, GpuRings
from fanfold.cli import bench
from fanfold.errors import ArgumentError, UnavailableError, UsageError
from fanfold.jit import KernelSource
from fanfold.jit.cache import Cache
from fanfold.jit.kernel import KERNELS, compile_in
from tests.emulation.world import Builder
from tests.unit.test_kernels_compile import check, short


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a", "sm_100a", "sm_120a"])
@pytest.mark.parametrize("source", [PUSH, CLOCK], ids=short)
def test_compiles(tmp_path: Path, source: KernelSource, arch: str) -> None:
    check(source, compile_in(KERNELS, Cache(tmp_path), source, arch))


class EmulatedRings(GpuRings):
    """Rings whose producers are threads of the CPU that run the kernels' code."""

    builder: Builder

    def _take_device(self) -> tuple[torch.device, str]:
        return torch.device("cpu"), "a CPU"

    def _load(self) -> list[_core.CudaKernel]:
        self._libraries = [self.builder.load(source) for source in (PUSH, CLOCK)]
        return []

    def _pinned(self, nbytes: int) -> torch.Tensor:
        # On the boundary of pinned memory.
        raw = torch.zeros(nbytes + 128, dtype=torch.uint8, device="cpu")
        return raw[-raw.data_ptr() % 128 :][:nbytes]

    def _launch(
        self, kernel: int, args: _core.CudaRingPushArgs | _core.CudaRingClockArgs, warps: int
    ) -> None:
        run = self._libraries[kernel].emulate
        self._running = threading.Thread(target=lambda: run(args.address, warps), daemon=True)
        self._running.start()

    def _wait(self) -> None:
        self._running.join()


@pytest.fixture
def rings(builder: Builder, monkeypatch: pytest.MonkeyPatch) -> type[EmulatedRings]:
    monkeypatch.setattr(EmulatedRings, "builder", builder, raising=False)
    monkeypatch.setattr(ring, "GpuRings", EmulatedRings)
    return EmulatedRings


@pytest.mark.parametrize(
    ("warps", "count", "threads", "lanes", "slots"),
    [(1, 1, 1, 1, 64), (5, 3, 2, 1, 4), (2, 3, 8, 1, 64), (7, 2, 2, 5, 2), (4, 4, 3, 32, 256)],
)
def test_every_command_comes_once_and_in_order(
    rings: type[EmulatedRings], warps: int, count: int, threads: int, lanes: int, slots: int
) -> None:
    made = rings(count, slots, threads, lanes)
    for commands in (1, 100, 257):  # rings go on from call to call
        each = -(-commands // (warps * lanes))
        found = made.throughput(warps, commands)
        assert found["commands"] == each * warps * lanes
        assert found["seconds"] >= 0


def test_a_latency_is_of_both_clocks(rings: type[EmulatedRings]) -> None:
    made = rings(2, 64, 2, 1)
    found = made.latency(rate=2000.0, commands=100)
    assert found["commands"] == 100
    assert 0 < found["clock_ns"] < 1e9
    assert found["p50_ns"] <= found["p99_ns"] <= found["most_ns"]
    # The emulated clock is the host's, so nothing arrives before it was pushed, but for what the
    # clocks' comparisons are off.
    assert found["average_ns"] > -found["clock_ns"]
    assert found["rate"] < 2000.0 * 1.2


def test_clocks_are_compared_within_half_a_round_trip(rings: type[EmulatedRings]) -> None:
    """The emulated GPU's clock is the host's."""
    made = rings(1, 64, 1, 1)
    for _ in range(3):
        pair = made._compare_clocks()
        assert abs(pair.host_ns - pair.gpu_ns) <= pair.round_trip_ns / 2 + 1


def test_a_kernel_that_finds_no_room_ends(
    rings: type[EmulatedRings], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody pops; the producers give up, and their tickets are counted."""
    monkeypatch.setattr(ring_gpu, "_TIMEOUT_NS", 50_000_000)
    made = rings(1, 4, 1, 2)
    args = _core.CudaRingPushArgs()
    args.rings, args.ring_count, args.lanes = made._rings.views, 1, 2
    args.commands, args.interval_ns, args.timeout_ns = 10, 0, 50_000_000
    made._launch(0, args, 1)
    made._running.join(20.0)
    assert not made._running.is_alive()
    view = (ctypes.c_uint64 * 5).from_address(made._rings.views)
    assert ctypes.c_uint64.from_address(view[2]).value == 2  # both lanes of the third push


def test_latency_is_measured_on_the_hosts_clock() -> None:
    """Numbers of a GPU clock that runs twice as fast and began elsewhere."""
    memory = torch.zeros(_core.PinnedRings.bytes(1, 64) + 128, dtype=torch.uint8, device="cpu")
    heads = torch.zeros(_core.RING_HEAD_BYTES, dtype=torch.uint8, device="cpu")
    at = -(-memory.data_ptr() // 128) * 128
    made = _core.PinnedRings(at, _core.PinnedRings.bytes(1, 64), 1, 64, heads.data_ptr())
    view = (ctypes.c_uint64 * 5).from_address(made.views)
    assert (view[0], view[4]) == (heads.data_ptr(), 64)
    numbers = [1000, 1500, 4000]
    for ticket, number in enumerate(numbers):
        slot = (ctypes.c_uint64 * 2).from_address(view[3] + 16 * ticket)
        slot[0], slot[1] = 1, number << 1 | 1
    made.prepare(producers=1, lanes=1, commands=3, threads=1, timed=True)
    found = made.pop()
    assert found["commands"] == 3
    arrived = made.latency(clock(0, 0, 2), clock(10, 10, 4))  # one clock
    assert arrived["clock_ns"] == 2
    assert arrived["rate"] == pytest.approx(2 / 3000 * 1e9)
    with pytest.raises(UsageError, match="not behind the first one"):
        made.latency(clock(10, 10, 2), clock(20, 10, 2))
    shifted = made.latency(clock(5_000, 1000, 2), clock(5_500, 2000, 2))
    assert shifted["rate"] == pytest.approx(2 / 1500 * 1e9)  # 3000 of its ticks are 1500 ns
    # Pushed at 5000, 5250 and 6500 by the host's clock, at 1000, 1500 and 4000 without a change.
    moved = (5000 + 5250 + 6500 - sum(numbers)) / 3
    assert arrived["average_ns"] - shifted["average_ns"] == pytest.approx(moved, abs=0.5)


def clock(host_ns: int, gpu_ns: int, round_trip_ns: int) -> _core.ClockPair:
    """One moment on both clocks."""
    return _core.ClockPair(host_ns=host_ns, gpu_ns=gpu_ns, round_trip_ns=round_trip_ns)


def test_a_command_out_of_order_is_found() -> None:
    nbytes = _core.PinnedRings.bytes(1, 4)
    memory = torch.zeros(nbytes + 128, dtype=torch.uint8, device="cpu")
    at = -(-memory.data_ptr() // 128) * 128
    made = _core.PinnedRings(at, nbytes, 1, 4, at)
    view = (ctypes.c_uint64 * 5).from_address(made.views)
    for ticket, (producer, number) in enumerate([(0, 0), (1, 0), (0, 2)]):
        slot = (ctypes.c_uint64 * 2).from_address(view[3] + 16 * ticket)
        slot[0], slot[1] = producer << 4 | 1, number << 1 | 1
    made.prepare(producers=1, lanes=1, commands=3, threads=1, timed=False)
    with pytest.raises(UsageError, match="2 commands were lost or out of order"):
        made.pop()


def run(*arguments: str) -> int:
    parser = argparse.ArgumentParser()
    bench.add_arguments(parser)
    return bench.run(parser.parse_args(["ring", "--from", "gpu", *arguments]))


TINY = ("--slots", "64", "--producers", "1,3", "--commands", "200", "--iterations", "2",
        "--rates", "2000", "--seconds", "0.02", "--rings", "2", "--threads", "2")  # fmt: skip


def test_the_bench_writes_what_it_documents(
    rings: type[EmulatedRings], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "r.jsonl"
    assert run(*TINY, "--lanes", "4", "--json", str(path)) == 0
    said = " ".join(capsys.readouterr().out.split())
    for words in ("2 rings of 64 commands", "4 lanes of a warp together", "2 CPU threads pop",
                  "not half a round trip", "all rings' commands"):  # fmt: skip
        assert words in said
    fields = json.loads(path.read_text())
    assert (fields["from"], fields["to"], fields["gpu"]) == ("gpu", "cpu", "a CPU")
    assert (fields["rings"], fields["threads"], fields["lanes"]) == (2, 2, 4)
    assert [each["commands"] for each in fields["throughput"]] == [200, 204]
    assert [each["commands"] for each in fields["latency"]] == [40]
    page = (Path(__file__).parents[2] / "docs" / "bench.md").read_text()
    text = page.partition("\n## Ring\n")[2].partition("\n## ")[0]
    assert "clock_error_ns" in fields["latency"][0]
    for name in ("rings", "threads", "lanes", "gpu", "clock_error_ns"):
        assert f"`{name}`" in text, name


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        (("--rates", "1"), "seconds"),
        (("--rates", "50"), "rates"),
        (("--rings", "0"), "rings"),
        (("--threads", "65"), "threads"),
        (("--lanes", "33"), "lanes"),
        (("--slots", "3"), "slots"),
        (("--slots", str(-(1 << 40))), "slots"),
        (("--producers", "5000"), "producers"),
    ],
)
def test_refuses(rings: type[EmulatedRings], arguments: tuple[str, ...], name: str) -> None:
    with pytest.raises(ArgumentError) as caught:
        run(*TINY, *arguments)
    assert caught.value.argument == name


def test_only_a_gpu_has_several_rings() -> None:
    with pytest.raises(ArgumentError, match="rings is 2, but must be 1 unless commands come from"):
        ring.RingSettings(rings=2)


def test_says_that_there_is_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ring_gpu, "lacking", lambda: "it sees no CUDA device")
    with pytest.raises(UnavailableError, match="--from gpu needs a GPU, but it sees no CUDA"):
        run(*TINY)
