"""Rings that a GPU pushes into, for ``fanfold bench ring --from gpu``.

The commands lie in pinned host memory, the counters of the producers in the GPU's. Kernels of
``kernels/ring`` push; threads of this process pop, as proxies do.
"""

from __future__ import annotations

from typing import Any

import torch

from fanfold import _core, jit
from fanfold.config import Config
from fanfold.errors import UnavailableError
from fanfold.gpus import lacking
from fanfold.jit import KernelSource

__all__ = ["CLOCK", "PUSH", "GpuRings"]

_THREADS = 32
_CONSTANTS = {"kThreads": _THREADS}
PUSH = KernelSource("ring/push.cu", "fanfold::ring::push", _CONSTANTS, _THREADS)
CLOCK = KernelSource("ring/clock.cu", "fanfold::ring::clock", _CONSTANTS, _THREADS)

_CLOCK_ROUNDS = 1000
_WORD_BYTES = 8
_TIMEOUT_NS = 5_000_000_000  # of a producer's wait for room, less than the consumers'


class GpuRings:
    """Rings of one GPU, the current device, and the threads that pop them.

    Args:
        rings: how many there are.
        slots: commands that each holds, a power of two.
        threads: that pop; ring r belongs to thread ``r % threads``.
        lanes: of a warp, that push at the same time: 1 to 32.

    Attributes:
        device, name: of the GPU.

    Raises:
        ArgumentError: a size out of bounds.
        UnavailableError: there is no GPU, or no compiler for its kernels.
    """

    def __init__(self, rings: int, slots: int, threads: int, lanes: int) -> None:
        self.device, self.name = self._take_device()
        self._kernels = self._load()
        self._memory = self._pinned(_core.PinnedRings.bytes(rings, slots))
        self._heads = torch.zeros(
            rings * _core.RING_HEAD_BYTES, dtype=torch.uint8, device=self.device
        )
        self._count, self._threads, self._lanes = rings, threads, lanes
        self._rings = _core.PinnedRings(
            self._memory.data_ptr(), self._memory.numel(), rings, slots, self._heads.data_ptr()
        )
        # The word that the host asks with, and on a line of its own the two of the answer.
        self._words = self._pinned(256)

    def throughput(self, warps: int, commands: int) -> dict[str, Any]:
        """Commands and seconds from the first to the last pop; each warp pushes as many.

        Raises:
            UsageError: commands were lost, out of order or did not come.
        """
        each = -(-commands // (warps * self._lanes))
        return self._pushed(warps, each, interval_ns=0)

    def latency(self, rate: float, commands: int) -> dict[str, Any]:
        """One-way latencies of commands that a warp for each ring pushes, all together at ``rate``
        per second.

        Raises:
            UsageError: as :meth:`throughput`.
        """
        producers = self._count * self._lanes
        before = self._compare_clocks()
        each = -(-commands // producers)
        self._pushed(self._count, each, interval_ns=max(1, round(producers / rate * 1e9)))
        return self._rings.latency(before, self._compare_clocks())

    def _pushed(self, warps: int, each: int, interval_ns: int) -> dict[str, Any]:
        args = _core.CudaRingPushArgs()
        args.rings, args.ring_count, args.lanes = self._rings.views, self._count, self._lanes
        args.commands, args.interval_ns, args.timeout_ns = each, interval_ns, _TIMEOUT_NS
        self._rings.prepare(warps * self._lanes, self._lanes, each, self._threads, interval_ns > 0)
        self._launch(0, args, warps)
        try:
            return self._rings.pop()
        finally:
            self._wait()  # the memory is the kernel's until then

    def _compare_clocks(self) -> _core.ClockPair:
        self._words.zero_()
        asked = self._words.data_ptr()
        args = _core.CudaRingClockArgs()
        args.asked, args.answered = asked, asked + 16 * _WORD_BYTES
        args.rounds, args.timeout_ns = _CLOCK_ROUNDS, _TIMEOUT_NS
        self._launch(1, args, 1)
        try:
            return _core.compare_clocks(args.asked, args.answered, _CLOCK_ROUNDS)
        finally:
            self._wait()

    # ---- what needs CUDA ------------------------------------------------------------------------

    def _take_device(self) -> tuple[torch.device, str]:
        if (lack := lacking()) is not None:
            raise UnavailableError(f"--from gpu needs a GPU, but {lack}")
        device = torch.device("cuda", torch.cuda.current_device())
        return device, torch.cuda.get_device_name(device)

    def _load(self) -> list[_core.CudaKernel]:
        return jit.load_all([PUSH, CLOCK], self.device.index, Config.resolve())

    def _pinned(self, nbytes: int) -> torch.Tensor:
        return torch.zeros(nbytes, dtype=torch.uint8, device="cpu", pin_memory=True)

    def _launch(
        self, kernel: int, args: _core.CudaRingPushArgs | _core.CudaRingClockArgs, warps: int
    ) -> None:
        stream = torch.cuda.current_stream(self.device).cuda_stream
        args.launch(self._kernels[kernel], warps, _THREADS, stream)

    def _wait(self) -> None:
        torch.cuda.current_stream(self.device).synchronize()
