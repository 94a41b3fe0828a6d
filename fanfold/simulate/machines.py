"""Networks and systems: the numbers of the model and their meanings.

The presets are in ``presets.json``. ``python benchmarks/fit_simulate.py`` fits again what is fitted
there; ``docs/simulate.md`` says where the rest comes from.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fanfold.errors import ArgumentError

__all__ = [
    "MOST_PROXIES",
    "NETWORKS",
    "PATTERNS",
    "PRESETS",
    "SYSTEMS",
    "Fixed",
    "Network",
    "System",
    "presets",
]

PRESETS = Path(__file__).with_name("presets.json")

# What a message of low latency carries: a row of one (token, expert); all rows for one peer, a row
# for each (token, expert); all rows for one peer, a row for each (token, rank).
PATTERNS = ("entry", "peer_entries", "peer_rows")
MOST_PROXIES = 64


@dataclass(frozen=True)
class Network:
    """The NICs of one GPU, and the fabric.

    Attributes:
        name: of the preset.
        rails: NICs per GPU; messages and the segments of large ones go round-robin over them.
        rail_gb_per_s: line rate of one NIC, 10^9 bytes per second, each way.
        efficiency: share of the line rate that rows get.
        message_us: what the sending side of a GPU's NICs needs for each message on top of its
            bytes.
        latency_us: from one NIC to the other.
        switch_us: what the receiving side needs for each packet of a small message that comes from
            another host than the message before it: the price of incast.
        packet_bytes: largest packet.
        bulk_bytes: messages from this size on cost no ``switch_us``.
        cached_peers: peers whose connections the NIC holds at hand.
        miss_us: what a message costs on top if its peer's connection is not at hand.
    """

    name: str
    rails: int
    rail_gb_per_s: float
    efficiency: float
    message_us: float
    latency_us: float
    switch_us: float
    packet_bytes: int
    bulk_bytes: int = 32768
    cached_peers: int = 32
    miss_us: float = 0.0

    def __post_init__(self) -> None:
        """Checks the numbers.

        Raises:
            ArgumentError: one is outside its bound.
        """
        for name in ("rails", "packet_bytes", "bulk_bytes", "cached_peers"):
            if getattr(self, name) < 1:
                raise ArgumentError(name, getattr(self, name), "at least 1")
        if not 0 < self.rail_gb_per_s < float("inf"):
            raise ArgumentError("rail_gb_per_s", self.rail_gb_per_s, "a number above 0")
        if not 0 < self.efficiency <= 1:
            raise ArgumentError("efficiency", self.efficiency, "above 0 and at most 1")
        for name in ("message_us", "latency_us", "switch_us", "miss_us"):
            if not 0 <= getattr(self, name) < float("inf"):
                raise ArgumentError(name, getattr(self, name), "a number of at least 0")

    @property
    def rail_bytes_per_us(self) -> float:
        """Bytes of rows that one NIC moves each way in a µs."""
        return self.rail_gb_per_s * self.efficiency * 1e3


@dataclass(frozen=True)
class Fixed:
    """What a phase takes beside its messages, µs: launches, quantisation, barriers, counts."""

    dispatch: float
    combine: float


@dataclass(frozen=True)
class System:
    """How a library turns tokens into messages.

    Attributes:
        name: of the preset.
        pattern: of low latency, one of ``PATTERNS``.
        low_latency: what its phases take beside messages.
        high_throughput: the same of the other mode.
        proxies: CPU threads per GPU that post messages; 0 if the GPU posts them.
        command_us: what a proxy needs for a command, one for each message, or with ``peer_rows``
            one for each row.
        handover_us: from the GPU's command to the proxy that reads it.
        nvlink_gb_per_s: what one GPU sends, and receives, inside its host in low latency.
        forward_gb_per_s: the same in high throughput.
        sum_gb_per_s: what one GPU takes in while it sums rows for another host.
        nvlink: whether peers of the same host are reached by NVLink; else through the NICs.
        exchanges: how often dispatch and combine of low latency wait for the network's latency, one
            wait after the other.
        chunk_rows: rows of one message of high throughput.
        stream_gb_per_s: the most that high throughput sends from one GPU to one host, because of
            the window of chunks in flight; infinite where none is known.
    """

    name: str
    pattern: str
    low_latency: Fixed
    high_throughput: Fixed
    proxies: int = 0
    command_us: float = 0.5
    handover_us: float = 3.0
    nvlink_gb_per_s: float = 300.0
    forward_gb_per_s: float = 300.0
    sum_gb_per_s: float = 300.0
    nvlink: bool = True
    exchanges: tuple[int, int] = (1, 1)
    chunk_rows: int = 32
    stream_gb_per_s: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Checks the numbers.

        Raises:
            ArgumentError: one is outside its bound.
        """
        if self.pattern not in PATTERNS:
            raise ArgumentError("pattern", self.pattern, f"one of {', '.join(PATTERNS)}")
        if not 0 <= self.proxies <= MOST_PROXIES:
            raise ArgumentError("proxies", self.proxies, f"from 0 to {MOST_PROXIES}")
        if self.chunk_rows < 1:
            raise ArgumentError("chunk_rows", self.chunk_rows, "at least 1")
        for name in ("nvlink_gb_per_s", "forward_gb_per_s", "sum_gb_per_s"):
            if not 0 < getattr(self, name) < float("inf"):
                raise ArgumentError(name, getattr(self, name), "a number above 0")
        for name in ("command_us", "handover_us"):
            if not 0 <= getattr(self, name) < float("inf"):
                raise ArgumentError(name, getattr(self, name), "a number of at least 0")


def presets(content: dict[str, Any]) -> tuple[dict[str, Network], dict[str, System]]:
    """Networks and systems by name, from what ``presets.json`` holds."""
    networks = {name: Network(name=name, **values) for name, values in content["networks"].items()}
    systems = {}
    for name, values in content["systems"].items():
        fixed = {mode: Fixed(**values[mode]) for mode in ("low_latency", "high_throughput")}
        systems[name] = System(name=name, **{**values, **fixed})
    return networks, systems


NETWORKS, SYSTEMS = presets(json.loads(PRESETS.read_text(encoding="utf-8")))
