"""Fanfold's transport over libfabric beside plain libfabric, between two processes of one host."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch.distributed as dist

from fanfold._core import NetworkBench
from fanfold.bench import report
from fanfold.errors import ArgumentError
from fanfold.launch import launch

__all__ = [
    "BANDWIDTH_BAR",
    "LATENCY_BAR_US",
    "SIZES",
    "NetworkPoint",
    "NetworkSettings",
    "measure",
    "record",
    "run",
    "verdict",
]

SIZES = (8, 64, 512, 4096, 16384, 65536, 262144, 1048576, 4194304)
MOST_BYTES = 1 << 24
BANDWIDTH_BAR = 0.90
"""At 64 KiB and above: the least share of plain libfabric's bandwidth."""
BANDWIDTH_BAR_BYTES = 65536
LATENCY_BAR_US = 3.0
"""At 8 bytes: the most microseconds above plain libfabric's latency."""
LATENCY_BAR_BYTES = 8

_WIRES = ("plain", "fanfold")
_STREAM_BYTES = 1 << 26  # of one measurement, within the bounds below
_LEAST_WRITES, _MOST_WRITES = 128, 16384
_LEAST_ROUNDS = 50


@dataclass(frozen=True)
class NetworkSettings:
    """What a network bench measures.

    Attributes:
        transport: the setting: ``"libfabric:tcp"``, ``"libfabric:shm"``, ...
        sizes: bytes of a write.
        window: writes in flight; even.
        rounds: round trips of one measurement of the latency, at most.
        repeats: measurements of each wire, in turns.
        timeout_s: seconds until a rank gives its peer up.
    """

    transport: str
    sizes: tuple[int, ...] = SIZES
    window: int = 32
    rounds: int = 1000
    repeats: int = 7
    timeout_s: float = 60.0

    def __post_init__(self) -> None:
        for name, low, high in (
            ("window", 2, 1024),
            ("rounds", 1, 1_000_000),
            ("repeats", 1, 1000),
        ):
            value = getattr(self, name)
            if not low <= value <= high:
                raise ArgumentError(f"--{name}", str(value), f"from {low} to {high}")
        if self.window % 2:
            raise ArgumentError("--window", str(self.window), "even")
        for size in self.sizes:
            if not 1 <= size <= MOST_BYTES:
                raise ArgumentError("--sizes", str(size), f"from 1 to {MOST_BYTES} bytes")

    def writes(self, size: int) -> int:
        """Writes of one measurement of the bandwidth, a multiple of half of the window."""
        chunk = self.window // 2
        writes = min(max(_STREAM_BYTES // size, _LEAST_WRITES), _MOST_WRITES)
        return -(-writes // chunk) * chunk

    def round_trips(self, size: int) -> int:
        """Round trips of one measurement of the latency: fewer of large writes."""
        return min(self.rounds, max(_STREAM_BYTES // size, _LEAST_ROUNDS))


@dataclass(frozen=True)
class NetworkPoint:
    """What one size gave. Each list has one value for each repeat, in order.

    Attributes:
        transport: what was opened: ``"libfabric:net"``, ...
        size: bytes of a write.
        bandwidth: for each wire (``"plain"``, ``"fanfold"``) bytes per second.
        latency_us: for each wire microseconds, half of the median round trip.
        p99_us: for each wire microseconds, half of the 99th percentile of the round trips.
    """

    transport: str
    size: int
    bandwidth: dict[str, list[float]]
    latency_us: dict[str, list[float]]
    p99_us: dict[str, list[float]]

    def best_bandwidth(self, wire: str) -> float:
        """The highest of the repeats, in bytes per second."""
        return max(self.bandwidth[wire])

    def best_latency_us(self, wire: str) -> float:
        """The lowest of the repeats, in microseconds."""
        return min(self.latency_us[wire])

    # Other programs only ever slow a repeat, so the best ones are compared.
    @property
    def bandwidth_ratio(self) -> float:
        """Fanfold's best bandwidth over plain libfabric's best."""
        return self.best_bandwidth("fanfold") / self.best_bandwidth("plain")

    @property
    def extra_latency_us(self) -> float:
        """Fanfold's best latency less plain libfabric's best, in microseconds."""
        return self.best_latency_us("fanfold") - self.best_latency_us("plain")

    @property
    def misses(self) -> list[str]:
        """The bars that this size has and does not reach, in words."""
        found = []
        if self.size >= BANDWIDTH_BAR_BYTES and self.bandwidth_ratio < BANDWIDTH_BAR:
            found.append(
                f"{self.bandwidth_ratio:.0%} of plain libfabric's bandwidth at {self.size} bytes, "
                f"at least {BANDWIDTH_BAR:.0%} is wanted"
            )
        if self.size == LATENCY_BAR_BYTES and self.extra_latency_us > LATENCY_BAR_US:
            found.append(
                f"{self.extra_latency_us:.1f} us above plain libfabric's latency at {self.size} "
                f"bytes, at most {LATENCY_BAR_US:g} us is wanted"
            )
        return found


def measure(group: dist.ProcessGroup, settings: NetworkSettings) -> list[NetworkPoint]:
    """What each of the two ranks runs. Collective.

    Returns:
        One point for each size; times are rank 0's.
    """
    rank = dist.get_rank(group)
    bench = NetworkBench(settings.transport, rank, max(settings.sizes), settings.timeout_s)
    addresses: list[Any] = [None, None]
    dist.all_gather_object(addresses, bench.address(), group=group)
    bench.connect(addresses[1 - rank])
    for wire in _WIRES:  # connects, and touches the memory
        bench.ping_pong(wire, settings.sizes[0], 100)
    points = [_measure_size(bench, settings, size) for size in settings.sizes]
    dist.barrier(group)  # an endpoint is closed only when its peer needs it no more
    return points


def _measure_size(bench: NetworkBench, settings: NetworkSettings, size: int) -> NetworkPoint:
    bandwidth: dict[str, list[float]] = {wire: [] for wire in _WIRES}
    latency_us: dict[str, list[float]] = {wire: [] for wire in _WIRES}
    p99_us: dict[str, list[float]] = {wire: [] for wire in _WIRES}
    writes = settings.writes(size)
    for wire in _WIRES:
        bench.stream(wire, size, settings.window // 2 * 4, settings.window)  # not counted
    for repeat in range(settings.repeats):
        # The order changes, so that neither wire profits from following the other.
        for wire in _WIRES if repeat % 2 == 0 else reversed(_WIRES):
            seconds = bench.stream(wire, size, writes, settings.window)
            bandwidth[wire].append(size * writes / seconds)
            p50, p99 = bench.ping_pong(wire, size, settings.round_trips(size))
            latency_us[wire].append(p50 / 2 * 1e6)
            p99_us[wire].append(p99 / 2 * 1e6)
    return NetworkPoint(bench.name, size, bandwidth, latency_us, p99_us)


def run(settings: NetworkSettings) -> list[NetworkPoint]:
    """Starts two processes on this host and measures in them.

    Raises:
        LaunchError: a rank failed, for example because libfabric is missing.
    """
    limit_s = 120.0 + len(settings.sizes) * settings.repeats * 4 * settings.timeout_s
    points: list[NetworkPoint] = launch(measure, 2, (settings,), timeout_s=limit_s)[0]
    return points


def record(point: NetworkPoint, settings: NetworkSettings) -> dict[str, Any]:
    """One size as a flat JSON object; docs/bench.md says what each field means."""
    fields: dict[str, Any] = {
        "schema": 1,
        "bench": "network",
        "transport": point.transport,
        "bytes": point.size,
        "window": settings.window,
        "rounds": settings.round_trips(point.size),
        "repeats": settings.repeats,
        "writes": settings.writes(point.size),
    }
    for wire in _WIRES:
        fields[f"{wire}_gbps"] = round(point.best_bandwidth(wire) / 1e9, 6)
        fields[f"{wire}_median_gbps"] = round(statistics.median(point.bandwidth[wire]) / 1e9, 6)
        fields[f"{wire}_latency_us"] = round(point.best_latency_us(wire), 3)
        fields[f"{wire}_median_latency_us"] = round(statistics.median(point.latency_us[wire]), 3)
        fields[f"{wire}_latency_p99_us"] = round(statistics.median(point.p99_us[wire]), 3)
    fields["bandwidth_ratio"] = round(point.bandwidth_ratio, 4)
    fields["extra_latency_us"] = round(point.extra_latency_us, 3)
    fields["misses"] = point.misses
    return fields | {
        **report.origin(),
        "settings": asdict(settings),
    }


def verdict(points: Sequence[NetworkPoint]) -> str:
    """Whether all bars that the measured sizes have are reached, in one sentence."""
    misses = [miss for point in points for miss in point.misses]
    if misses:
        return f"{points[0].transport} misses a bar: {'; '.join(misses)}."
    return (
        f"{points[0].transport} is within its bars: at least {BANDWIDTH_BAR:.0%} of plain "
        f"libfabric's bandwidth at 64 KiB and above, at most {LATENCY_BAR_US:g} us above its "
        "latency at 8 bytes."
    )
