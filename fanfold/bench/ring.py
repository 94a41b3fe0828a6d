"""Measures the ring that hands commands to proxy threads: commands per second, and one-way latency.

Producers are CPU threads of this process, or warps of a GPU. docs/bench.md says what each figure
means.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from rich.table import Table

from fanfold import _core
from fanfold.bench.report import SCHEMA, origin
from fanfold.bench.ring_gpu import GpuRings
from fanfold.errors import ArgumentError

__all__ = ["Latency", "RingResult", "RingSettings", "Throughput", "measure", "notes", "record",
           "tables"]  # fmt: skip

_MOST_PRODUCERS = 64
_MOST_WARPS = 4096
_MOST_THREADS = 64
_MOST_RINGS = 1024
_MOST_INTERVAL_S = 5.0  # between two commands of a GPU's producer
_MOST_COMMANDS = 1_000_000_000
_MOST_SAMPLES = 20_000_000
_MOST_RATE = 100_000_000
_MOST_ITERATIONS = 1000
# A producer that reaches less of the rate was kept from running.
_REACHED = 0.98


@dataclass(frozen=True)
class RingSettings:
    """What ``fanfold bench ring`` is asked to do.

    Attributes:
        source: who pushes: threads of the CPU into one ring, or warps of a GPU into ``rings``.
        slots: commands that a ring holds, a power of two.
        producers: numbers of producer threads or warps, each measured by itself.
        rates: commands per second over all rings, each measured by itself.
        commands: that all producers push together, for commands per second.
        iterations: how often commands per second are measured.
        seconds: for how long each rate is measured.
        rings: of a GPU.
        threads: of the CPU, that pop a GPU's rings.
        lanes: of a GPU's warp, each with a command in every push of the warp.

    Raises:
        ArgumentError: a value is outside its bound.
    """

    source: Literal["cpu", "gpu"] = "cpu"
    slots: int = 1024
    producers: Sequence[int] = (1, 2, 4)
    rates: Sequence[int] = (100_000, 1_000_000, 5_000_000)
    commands: int = 5_000_000
    iterations: int = 5
    seconds: float = 1.0
    rings: int = 1
    threads: int = 1
    lanes: int = 1

    def __post_init__(self) -> None:
        """Checks all but `slots`, which the ring checks."""
        on_gpu = self.source == "gpu"
        for name, values, most in (
            ("producers", self.producers, _MOST_WARPS if on_gpu else _MOST_PRODUCERS),
            ("rings", [self.rings], _MOST_RINGS if on_gpu else 1),
            ("threads", [self.threads], _MOST_THREADS if on_gpu else 1),
            ("lanes", [self.lanes], 32 if on_gpu else 1),
            ("rates", self.rates, _MOST_RATE),
            ("commands", [self.commands], _MOST_COMMANDS),
            ("iterations", [self.iterations], _MOST_ITERATIONS),
        ):
            for value in values:
                if not 1 <= value <= most:
                    bound = f"from 1 to {most}" if most > 1 else "1 unless commands come from gpu"
                    raise ArgumentError(name, value, bound)
        for rate in self.rates:
            if not 1 <= rate * self.seconds <= _MOST_SAMPLES:
                bound = f"such that a rate of {rate} gives 1 to {_MOST_SAMPLES} commands"
                raise ArgumentError("seconds", self.seconds, bound)
            if on_gpu and rate * min(self.seconds, _MOST_INTERVAL_S) < self.rings * self.lanes:
                bound = (
                    f"such that each of {self.rings} rings x {self.lanes} lanes has a command in "
                    f"{min(self.seconds, _MOST_INTERVAL_S):g} s"
                )
                raise ArgumentError("rates", rate, bound)


@dataclass(frozen=True)
class Throughput:
    """Commands per second with one number of producers.

    Attributes:
        producers: threads or warps that push.
        commands: of one iteration.
        per_s: commands per second of each iteration.
    """

    producers: int
    commands: int
    per_s: Sequence[float]


@dataclass(frozen=True)
class Latency:
    """One-way latency at one rate.

    Attributes:
        rate_asked: commands per second.
        rate: commands per second that the producer has reached.
        commands: how many were measured.
        clock_ns: what one read of the clock takes; each latency has one in it. From a GPU: by how
            much its clock may be off on either side.
        average_ns: nanoseconds from before the push until the consumer has the command.
        p50_ns: their median.
        p99_ns: their 99th percentile.
        most_ns: the longest.
    """

    rate_asked: int
    rate: float
    commands: int
    clock_ns: float
    average_ns: float
    p50_ns: int
    p99_ns: int
    most_ns: int


@dataclass(frozen=True)
class RingResult:
    """What the bench has found; ``gpu`` is the name of the one that pushed."""

    settings: RingSettings
    throughput: Sequence[Throughput]
    latency: Sequence[Latency]
    gpu: str | None = None


class _CpuRing:
    """A ring between threads of this process."""

    def __init__(self, slots: int) -> None:
        self._slots = slots

    def throughput(self, producers: int, commands: int) -> dict[str, Any]:
        return _core.measure_ring_throughput(self._slots, producers, commands)

    def latency(self, rate: float, commands: int) -> dict[str, Any]:
        return _core.measure_ring_latency(self._slots, rate, commands)


def measure(settings: RingSettings) -> RingResult:
    """Runs all measurements, one after another.

    Raises:
        ArgumentError: ``slots`` is outside its bound.
        RingFull: the threads got no time to run.
        UnavailableError: there is no GPU to push.
        UsageError: the same, seen by the consumer; or commands were lost or out of order.
    """
    rings: _CpuRing | GpuRings = _CpuRing(settings.slots)
    if settings.source == "gpu":
        rings = GpuRings(settings.rings, settings.slots, settings.threads, settings.lanes)
    throughput = []
    for producers in settings.producers:
        found = [rings.throughput(producers, settings.commands) for _ in range(settings.iterations)]
        rates = [each["commands"] / each["seconds"] for each in found]
        throughput.append(Throughput(producers, found[0]["commands"], rates))
    latency = [
        Latency(rate_asked=rate, **rings.latency(rate, round(rate * settings.seconds)))
        for rate in settings.rates
    ]
    gpu = rings.name if isinstance(rings, GpuRings) else None
    return RingResult(settings, throughput, latency, gpu)


def record(result: RingResult) -> dict[str, Any]:
    """The result as one JSON object; docs/bench.md says what each field means."""
    settings = result.settings
    clock = "clock_error_ns" if settings.source == "gpu" else "clock_ns"
    of_gpu = {name: getattr(settings, name) for name in ("rings", "threads", "lanes")} | {
        "gpu": result.gpu
    }
    return {
        "schema": SCHEMA,
        "bench": "ring",
        "from": settings.source,
        "to": "cpu",
        **(of_gpu if settings.source == "gpu" else {}),
        "slots": settings.slots,
        "iterations": settings.iterations,
        "throughput": [
            {
                "producers": each.producers,
                "commands": each.commands,
                "commands_per_s": round(statistics.median(each.per_s)),
                "commands_per_s_least": round(min(each.per_s)),
                "commands_per_s_most": round(max(each.per_s)),
            }
            for each in result.throughput
        ],
        "latency": [
            {
                "rate_asked": each.rate_asked,
                "rate": round(each.rate),
                "commands": each.commands,
                "average_ns": round(each.average_ns, 1),
                "p50_ns": each.p50_ns,
                "p99_ns": each.p99_ns,
                "most_ns": each.most_ns,
                clock: round(each.clock_ns, 1),
            }
            for each in result.latency
        ],
        "checked": True,
        **origin(),
    }


def tables(result: RingResult) -> list[Table]:
    """Commands per second, and latencies, as tables for people."""
    rates = Table(title="millions of commands per second")
    for heading in ("producers", "median", "least", "most"):
        rates.add_column(heading, justify="right")
    for each in result.throughput:
        found = (statistics.median(each.per_s), min(each.per_s), max(each.per_s))
        rates.add_row(str(each.producers), *(f"{value / 1e6:.2f}" for value in found))
    whose = "all rings'" if result.settings.source == "gpu" else "one producer's"
    times = Table(title=f"one-way latency of {whose} commands, in nanoseconds")
    for heading in ("commands/s", "reached", "average", "p50", "p99", "longest"):
        times.add_column(heading, justify="right")
    for one in result.latency:
        found_ns = (one.average_ns, one.p50_ns, one.p99_ns, one.most_ns)
        cells = (one.rate_asked, one.rate, *found_ns)
        times.add_row(*(f"{value:,.0f}" for value in cells))
    return [rates, times]


def notes(result: RingResult) -> list[str]:
    """Lines to print below the tables."""
    checked = "every command was checked to have come once and in its producer's order"
    lines = [*_scene(result), f"Commands per second: {checked}."]
    if result.latency:
        lines.append(_clock_note(result))
    late = [each.rate_asked for each in result.latency if each.rate < _REACHED * each.rate_asked]
    if late:
        named = ", ".join(f"{rate:,}" for rate in late)
        lines.append(
            f"Producers did not reach {named} commands/s: they cannot push as fast, were kept from "
            "running, or a ring was full. Those latencies contain the wait behind earlier commands."
        )
    cores = len(os.sched_getaffinity(0))
    threads = result.settings.threads
    if result.settings.source == "cpu":
        threads += max(each.producers for each in result.throughput)
    if threads > cores:
        lines.append(f"{threads} threads share {cores} cores: figures contain the others' turns.")
    return lines


def _scene(result: RingResult) -> list[str]:
    """Who pushes and who pops."""
    settings = result.settings
    if settings.source == "cpu":
        return [
            f"A ring of {settings.slots} commands: CPU threads push, one CPU thread pops.",
            "All threads are in this process; no network, no GPU.",
        ]
    together = "" if settings.lanes == 1 else f", {settings.lanes} lanes of a warp together"
    rings = f"{settings.rings} rings of {settings.slots} commands in pinned memory"
    return [
        f"{rings}: warps of {result.gpu} push{together}, {settings.threads} CPU threads pop.",
        "For latency a warp pushes into each ring. No network takes part.",
    ]


def _clock_note(result: RingResult) -> str:
    if result.settings.source == "gpu":
        clock = max(each.clock_ns for each in result.latency)
        return (
            "Latency: from a read of the GPU's clock before the push to one of the host's after "
            "the pop, not half a round trip. The clocks were compared before and after; what that "
            f"finds is off by at most {clock:.0f} ns on either side, and so is each latency."
        )
    clock = statistics.median(each.clock_ns for each in result.latency)
    return (
        "Latency: from a look at the monotonic clock before the push to one after the pop, not "
        f"half a round trip. One look takes {clock:.0f} ns and is included."
    )
