"""Timing whole MoE layers one call at a time: the L2 cache flushed, with a pause before each."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

__all__ = ["PHASES", "Call", "Clock", "GpuClock", "HostClock", "Spans", "Spread", "in_turns"]

Call = Callable[[], Any]

PHASES = ("routed", "first_end", "second_end", "end")
"""What a CTA of the kernel reports after its beginning, in the columns of the backend's spans."""

_US_PER_MS = 1000.0
_NS_PER_US = 1000.0
_LEAST_FLUSH_BYTES = 128 << 20
# Longer than the host needs to enqueue the kernels of an unfused layer.
_HEAD_START_CYCLES = 2_000_000
_BEGIN_WITHIN_S = 1.0


@dataclass(frozen=True)
class Spread:
    """Of samples: the median, the least and the most."""

    median: float
    least: float
    most: float

    @classmethod
    def of(cls, samples: torch.Tensor) -> Spread:
        """Of all ``samples``, at least one; the median of an even number lies between two."""
        flat = samples.flatten().double()
        return cls(float(flat.quantile(0.5)), float(flat.min()), float(flat.max()))


@dataclass(frozen=True)
class Spans:
    """What the CTAs of the fused kernel reported in some calls.

    Attributes:
        ns: ``[calls, CTAs, 5]`` int64, nanoseconds of the GPU's clock: the beginning of each CTA
            and its :data:`PHASES`; 0 where a CTA did not have a phase.
        cycles: ``[calls, CTAs]`` int64, of the CTA's SM from its beginning to its end.
    """

    ns: torch.Tensor
    cycles: torch.Tensor

    @classmethod
    def of(cls, written: torch.Tensor) -> Spans:
        """``[calls, CTAs, 6]`` int64, as the backend's spans are."""
        return cls(written[..., :-1], written[..., -1])

    def total_us(self) -> torch.Tensor:
        """``[calls]``: from the beginning of the first CTA to the end of the last."""
        return (self.ns[:, :, -1].amax(1) - self._begin()).double() / _NS_PER_US

    def clock_mhz(self) -> torch.Tensor:
        """``[calls]``: the SMs' clock, in the mean over a call."""
        ns = (self.ns[:, :, -1] - self.ns[:, :, 0]).sum(1)
        return self.cycles.sum(1).double() / ns.double() * _NS_PER_US

    def phase_us(self, phase: str) -> tuple[float, float] | None:
        """When the first and when the last CTA had ended ``phase``, from the beginning of the first
        CTA: medians over the calls. None if no CTA has the phase."""
        when = self.ns[:, :, 1 + PHASES.index(phase)]
        known = when > 0
        if not bool(known.any(1).all()):
            return None
        latest = torch.iinfo(torch.int64).max
        begin = self._begin()
        least = when.masked_fill(~known, latest).amin(1) - begin
        most = when.amax(1) - begin
        return (
            Spread.of(least.double() / _NS_PER_US).median,
            Spread.of(most.double() / _NS_PER_US).median,
        )

    def _begin(self) -> torch.Tensor:
        return self.ns[:, :, 0].amin(1)


class Clock(Protocol):
    """Times single calls of one rank."""

    def time(self, call: Call, during: Call | None = None) -> float:
        """Microseconds of one call; ``during`` runs on the CPU while the call does."""


class HostClock:
    """Wall time on the CPU, behind a pause.

    Args:
        meet: a barrier of the ranks.
        pause_s: seconds before each call.
    """

    late_share = 0.0

    def __init__(self, meet: Call, pause_s: float) -> None:
        self._meet, self._pause_s = meet, pause_s

    def time(self, call: Call, during: Call | None = None) -> float:
        """See :class:`Clock`; nothing runs beside a call."""
        del during
        time.sleep(self._pause_s)
        self._meet()
        begin = time.perf_counter_ns()
        call()
        return (time.perf_counter_ns() - begin) / _NS_PER_US


class GpuClock:
    """The time between the events around a call, without a graph, behind a pause and a flush.

    The flush writes more than the L2 cache holds and then reads as much of other memory, so neither
    an input of the call nor a line that must be written back is in the cache.

    Args:
        barrier: enqueues a barrier of all ranks' GPUs.
        meet: a barrier of the ranks' processes.
        device: this rank's GPU.
        pause_s: seconds before each call.
    """

    def __init__(self, barrier: Call, meet: Call, device: torch.device, pause_s: float) -> None:
        self._barrier, self._meet = barrier, meet
        self._device, self._pause_s = device, pause_s
        self._ahead: list[bool] = []
        l2_bytes = torch.cuda.get_device_properties(device).L2_cache_size
        words = max(2 * l2_bytes, _LEAST_FLUSH_BYTES) // 4
        self._written, self._read = (
            torch.zeros(words, dtype=torch.int32, device=device) for _ in range(2)
        )

    @property
    def late_share(self) -> float:
        """Share of the calls that the GPU could begin before the host had enqueued all of them:
        the time between their events is too long."""
        return self._ahead.count(False) / len(self._ahead) if self._ahead else 0.0

    def time(self, call: Call, during: Call | None = None) -> float:
        """See :class:`Clock`."""
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize(self._device)
        time.sleep(self._pause_s)
        self._meet()
        torch.cuda._sleep(_HEAD_START_CYCLES)
        self._written.zero_()
        self._read.amax()
        self._barrier()
        begin.record()
        kept = call()
        end.record()
        self._ahead.append(not begin.query())
        if during is not None:
            _await(begin)
            during()
        torch.cuda.synchronize(self._device)
        del kept
        return float(begin.elapsed_time(end) * _US_PER_MS)


def _await(event: torch.cuda.Event) -> None:
    """Waits until the GPU has passed ``event``, at most a second."""
    deadline = time.monotonic() + _BEGIN_WITHIN_S
    while not event.query() and time.monotonic() < deadline:
        pass


def in_turns(
    clock: Clock,
    contenders: Mapping[str, Call],
    *,
    warmup: int,
    iterations: int,
    after: Callable[[str, bool], object],
) -> dict[str, torch.Tensor]:
    """Times each contender in turn, ``warmup + iterations`` times, so that whatever disturbs the
    machine disturbs all of them alike.

    Args:
        clock: takes the times.
        contenders: by name.
        warmup, iterations: samples that are left out, and samples that are kept.
        after: gets the name after each call, and whether its sample is kept.

    Returns:
        For each name ``[iterations]`` float64 microseconds.
    """
    samples: dict[str, list[float]] = {name: [] for name in contenders}
    for number in range(warmup + iterations):
        for name, call in contenders.items():
            us = clock.time(call)
            if number >= warmup:
                samples[name].append(us)
            after(name, number >= warmup)
    return {name: _tensor(values) for name, values in samples.items()}


def _tensor(values: Sequence[float]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64, device="cpu")
