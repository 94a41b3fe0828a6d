"""Measures the ring that hands commands to proxy threads: commands per second, and one-way latency.

All threads are CPU threads of one process. docs/bench.md says what each figure means.
"""

from __future__ import annotations

import datetime
import os
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich.table import Table

from fanfold import _core
from fanfold.bench.report import SCHEMA, commit, machine, versions
from fanfold.errors import ArgumentError

__all__ = ["Latency", "RingResult", "RingSettings", "Throughput", "measure", "notes", "record",
           "tables"]  # fmt: skip

_MOST_PRODUCERS = 64
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
        slots: commands that the ring holds, a power of two.
        producers: numbers of producer threads, each measured by itself.
        rates: commands per second, each measured by itself.
        commands: that all producers push together, for commands per second.
        iterations: how often commands per second are measured.
        seconds: for how long each rate is measured.

    Raises:
        ArgumentError: a value is outside its bound.
    """

    slots: int = 1024
    producers: Sequence[int] = (1, 2, 4)
    rates: Sequence[int] = (100_000, 1_000_000, 5_000_000)
    commands: int = 5_000_000
    iterations: int = 5
    seconds: float = 1.0

    def __post_init__(self) -> None:
        """Checks all but `slots`, which the ring checks."""
        for name, values, most in (
            ("producers", self.producers, _MOST_PRODUCERS),
            ("rates", self.rates, _MOST_RATE),
            ("commands", [self.commands], _MOST_COMMANDS),
            ("iterations", [self.iterations], _MOST_ITERATIONS),
        ):
            for value in values:
                if not 1 <= value <= most:
                    raise ArgumentError(name, value, f"from 1 to {most}")
        for rate in self.rates:
            if not 1 <= rate * self.seconds <= _MOST_SAMPLES:
                bound = f"such that a rate of {rate} gives 1 to {_MOST_SAMPLES} commands"
                raise ArgumentError("seconds", self.seconds, bound)


@dataclass(frozen=True)
class Throughput:
    """Commands per second with one number of producers.

    Attributes:
        producers: threads that push.
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
        clock_ns: what one look at the clock takes; each latency has one in it.
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
    """What the bench has found."""

    settings: RingSettings
    throughput: Sequence[Throughput]
    latency: Sequence[Latency]


def measure(settings: RingSettings) -> RingResult:
    """Runs all measurements, one after another.

    Raises:
        ArgumentError: ``slots`` is outside its bound.
        RingFull: the threads got no time to run.
        UsageError: the same, seen by the consumer; or commands were lost or out of order.
    """
    throughput = []
    for producers in settings.producers:
        found = [
            _core.measure_ring_throughput(settings.slots, producers, settings.commands)
            for _ in range(settings.iterations)
        ]
        rates = [each["commands"] / each["seconds"] for each in found]
        throughput.append(Throughput(producers, found[0]["commands"], rates))
    latency = [
        Latency(
            rate_asked=rate,
            **_core.measure_ring_latency(settings.slots, rate, round(rate * settings.seconds)),
        )
        for rate in settings.rates
    ]
    return RingResult(settings, throughput, latency)


def record(result: RingResult) -> dict[str, Any]:
    """The result as one JSON object; docs/bench.md says what each field means."""
    return {
        "schema": SCHEMA,
        "bench": "ring",
        "from": "cpu",
        "to": "cpu",
        "slots": result.settings.slots,
        "iterations": result.settings.iterations,
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
                "clock_ns": round(each.clock_ns, 1),
            }
            for each in result.latency
        ],
        "checked": True,
        "machine": machine(),
        "versions": versions(),
        "commit": commit(),
        "time": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
    }


def tables(result: RingResult) -> list[Table]:
    """Commands per second, and latencies, as tables for people."""
    rates = Table(title="millions of commands per second")
    for heading in ("producers", "median", "least", "most"):
        rates.add_column(heading, justify="right")
    for each in result.throughput:
        found = (statistics.median(each.per_s), min(each.per_s), max(each.per_s))
        rates.add_row(str(each.producers), *(f"{value / 1e6:.2f}" for value in found))
    times = Table(title="one-way latency of one producer's commands, in nanoseconds")
    for heading in ("commands/s", "reached", "average", "p50", "p99", "longest"):
        times.add_column(heading, justify="right")
    for one in result.latency:
        found_ns = (one.average_ns, one.p50_ns, one.p99_ns, one.most_ns)
        cells = (one.rate_asked, one.rate, *found_ns)
        times.add_row(*(f"{value:,.0f}" for value in cells))
    return [rates, times]


def notes(result: RingResult) -> list[str]:
    """Lines to print below the tables."""
    lines = [
        f"A ring of {result.settings.slots} commands: CPU threads push, one CPU thread pops.",
        "All threads are in this process; no network, no GPU.",
        "The consumer has checked that every command came once and in its producer's order.",
    ]
    if result.latency:
        clock = statistics.median(each.clock_ns for each in result.latency)
        lines.append(
            "Latency: from a look at the monotonic clock before the push to one after the pop, not "
            f"half a round trip. One look takes {clock:.0f} ns and is included."
        )
    late = [each.rate_asked for each in result.latency if each.rate < _REACHED * each.rate_asked]
    if late:
        named = ", ".join(f"{rate:,}" for rate in late)
        lines.append(
            f"The producer did not reach {named} commands/s: it was kept from running, or the ring "
            "was full. Those latencies contain the wait behind earlier commands."
        )
    cores = len(os.sched_getaffinity(0))
    threads = 1 + max(each.producers for each in result.throughput)
    if threads > cores:
        lines.append(f"{threads} threads share {cores} cores: figures contain the others' turns.")
    return lines
