"""What credits are for: many senders of one receiver, with and without a bound on what they have in
flight, on a modelled network. docs/bench.md explains each figure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.table import Table

from fanfold import _core
from fanfold.bench.report import SCHEMA, origin
from fanfold.errors import ArgumentError

__all__ = ["FlowControlSettings", "Incast", "Point", "measure", "notes", "record", "table"]

# More than all senders have together: what "without credits" means.
_NO_LIMIT = 1 << 40
_MOST_LINK = 10_000
_MOST_BUFFER_MB = 1024
# The core's argument names, as the command line calls them.
_OPTIONS = {
    "bytes": "megabytes",
    "chunk_bytes": "chunks",
    "bytes / chunk_bytes": "chunks",
    "credit.bytes": "credit",
    "loopback link.buffer_bytes": "buffer",
}


@dataclass(frozen=True)
class FlowControlSettings:
    """What ``fanfold bench flow-control`` is asked to do.

    Attributes:
        senders: ranks that all send to one.
        megabytes: MiB of each sender.
        chunks: bytes of a message, each measured by itself.
        credit: bytes that each sender may have in flight.
        link: GB/s of each rank's link.
        buffer: bytes that the queue before the receiver's link holds.

    Raises:
        ArgumentError: a value is outside its bound.
    """

    senders: int = 8
    megabytes: int = 8
    chunks: Sequence[int] = tuple(1 << shift for shift in range(10, 21))
    credit: int = 512 << 10
    link: float = 50.0
    buffer: int = 4 << 20

    def __post_init__(self) -> None:
        """Checks what the core does not."""
        for name, value, most in (
            ("megabytes", self.megabytes, 1024),
            ("buffer", self.buffer, _MOST_BUFFER_MB << 20),
        ):
            if not 1 <= value <= most:
                raise ArgumentError(name, value, f"from 1 to {most}")
        if not 0.001 <= self.link <= _MOST_LINK:
            raise ArgumentError("link", self.link, f"from 0.001 to {_MOST_LINK}")


@dataclass(frozen=True)
class Incast:
    """What happened with one bound.

    Attributes:
        bytes: that the receiver has got, each checked.
        ns: until all were acknowledged, of the model's time.
        messages: writes of the network, acknowledgements included.
        packets: sent, again ones included.
        dropped: because the queue was full.
        queued: the most bytes in a queue.
        in_flight: the most bytes that one sender had in flight.
    """

    bytes: int
    ns: int
    messages: int
    packets: int
    dropped: int
    queued: int
    in_flight: int

    @property
    def gb_per_s(self) -> float:
        """Bytes of all senders by the time, in GB/s."""
        return self.bytes / self.ns


@dataclass(frozen=True)
class Point:
    """One size of messages, with credits and without."""

    chunk: int
    credits: Incast
    without: Incast


def measure(settings: FlowControlSettings) -> list[Point]:
    """Runs the model for each size of messages. The result depends on the settings alone.

    Raises:
        ArgumentError: a value is outside its bound.
    """
    return [
        Point(chunk, _run(settings, chunk, settings.credit), _run(settings, chunk, _NO_LIMIT))
        for chunk in settings.chunks
    ]


def _run(settings: FlowControlSettings, chunk: int, credit: int) -> Incast:
    try:
        found = _core.measure_incast(
            senders=settings.senders,
            bytes=settings.megabytes << 20,
            chunk_bytes=chunk,
            credit_bytes=credit,
            link_bytes_per_us=round(settings.link * 1000),
            buffer_bytes=settings.buffer,
        )
    except ArgumentError as error:
        name = _OPTIONS.get(error.argument, error.argument)
        raise ArgumentError(name, error.value, error.bound) from None
    return Incast(**found)


def record(settings: FlowControlSettings, points: Sequence[Point]) -> dict[str, Any]:
    """The result as one JSON object; docs/bench.md explains each field."""
    return {
        "schema": SCHEMA,
        "bench": "flow_control",
        "senders": settings.senders,
        "megabytes": settings.megabytes,
        "credit": settings.credit,
        "link_gb_per_s": settings.link,
        "buffer": settings.buffer,
        "points": [
            {
                "chunk": point.chunk,
                **{
                    name: {**asdict(one), "gb_per_s": round(one.gb_per_s, 3)}
                    for name, one in (("credits", point.credits), ("without", point.without))
                },
            }
            for point in points
        ],
        **origin(),
    }


def table(points: Sequence[Point]) -> Table:
    """The result as a table for people."""
    shown = Table(title="GB/s that reach one receiver, of a modelled network")
    for heading in ("bytes of a message", "with credits", "without", "packets dropped without"):
        shown.add_column(heading, justify="right")
    for point in points:
        shown.add_row(
            f"{point.chunk:,}",
            f"{point.credits.gb_per_s:.1f}",
            f"{point.without.gb_per_s:.1f}",
            f"{point.without.dropped:,}",
        )
    return shown


def notes(settings: FlowControlSettings, points: Sequence[Point]) -> list[str]:
    """Lines to print below the table."""
    model = (
        f"{settings.senders} senders of {settings.megabytes} MiB each, links of "
        f"{settings.link:g} GB/s, a queue of {settings.buffer / 2**20:g} MiB before the receiver's "
        f"link, {settings.credit / 1024:g} KiB of credit for each sender."
    )
    lines = [
        model,
        "The proxies are those that run between hosts; the network and its time are a model.",
    ]
    fits = (settings.senders - 1) * settings.credit <= settings.buffer
    if not fits or any(point.credits.dropped for point in points):
        lines.append(
            "The credits of all senders but one do not fit into the queue "
            f"({(settings.senders - 1) * settings.credit / 2**20:g} MiB): lower --credit."
        )
    return lines
