"""``fanfold bench network``: the transport over libfabric, beside plain libfabric."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from fanfold.bench import network, report
from fanfold.bench.network import NetworkPoint, NetworkSettings
from fanfold.cli.options import add_numbers

__all__ = ["add_mode", "run", "table"]

_TRANSPORTS = "libfabric:tcp,libfabric:shm"


def add_mode(modes: Any) -> None:
    """Adds the mode ``network`` with its options."""
    mode = modes.add_parser(
        "network",
        help="time the transport between hosts, beside plain libfabric",
        description="Times writes between two processes of this host through Fanfold's transport "
        "and through plain libfabric, in turns: bandwidth with a window of writes in flight, and "
        "latency, which is half of a round trip.",
    )
    defaults = NetworkSettings(_TRANSPORTS)
    mode.set_defaults(run_mode=run)
    mode.add_argument(
        "--transport", type=_words, default=_words(_TRANSPORTS), metavar="NAME[,NAME]",
        help=f"libfabric, or libfabric:PROVIDER (default {_TRANSPORTS})",
    )  # fmt: skip
    mode.add_argument(
        "--sizes", type=_numbers, default=defaults.sizes, metavar="N[,N...]",
        help="bytes of a write (default 8 to 4 MiB)",
    )  # fmt: skip
    add_numbers(
        mode, defaults,
        (
            ("window", "writes in flight, even"),
            ("rounds", "round trips of one measurement"),
            ("repeats", "measurements of each, in turns"),
        ),
    )  # fmt: skip
    mode.add_argument("--strict", action="store_true", help="exit with 1 if a bar is missed")
    mode.add_argument(
        "--json", type=Path, metavar="FILE", help="append one line for each size to FILE"
    )


def _words(text: str) -> tuple[str, ...]:
    return tuple(word.strip() for word in text.split(","))


def _numbers(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(word) for word in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{text!r} is no list of numbers with commas between them"
        ) from None


def run(args: argparse.Namespace) -> int:
    """Measures each transport and prints its table: exit code 0, or 1 with ``--strict`` if a bar is
    missed.

    Raises:
        FanfoldError: bad arguments, no libfabric, a rank that failed.
    """
    if args.json is not None:
        report.check_writable(args.json)
    console = Console() if Console().is_terminal else Console(width=132)
    code = 0
    for transport in args.transport:
        settings = NetworkSettings(
            transport, tuple(args.sizes), args.window, args.rounds, args.repeats
        )
        points = network.run(settings)
        console.print(table(points))
        print("Latency is half of the median round trip. Each figure is the best of the repeats.")
        print(network.verdict(points))
        code = 1 if args.strict and any(point.misses for point in points) else code
        if args.json is not None:
            for point in points:
                report.append_json_line(args.json, network.record(point, settings))
    return code


def table(points: list[NetworkPoint]) -> Table:
    """Bandwidth and latency by size, of both wires and compared."""
    shown = Table(title=f"{points[0].transport} between two processes of this host")
    shown.add_column("bytes", justify="right")
    for column in ("plain GB/s", "fanfold GB/s", "ratio", "plain us", "fanfold us", "more us"):
        shown.add_column(column, justify="right")
    for point in points:
        bandwidth = [point.best_bandwidth(wire) for wire in ("plain", "fanfold")]
        latency = [point.best_latency_us(wire) for wire in ("plain", "fanfold")]
        shown.add_row(
            str(point.size),
            *(f"{value / 1e9:.3f}" for value in bandwidth),
            f"{point.bandwidth_ratio:.2f}",
            *(f"{value:.2f}" for value in latency),
            f"{point.extra_latency_us:+.2f}",
        )
    return shown
