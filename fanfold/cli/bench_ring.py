"""``fanfold bench ring``: the ring between producers of commands and a proxy thread."""

from __future__ import annotations

import argparse
import contextlib
from pathlib import Path
from typing import Any

from rich.console import Console

from fanfold.bench import report, ring
from fanfold.cli.options import one_or_more

__all__ = ["add_mode", "run"]


def add_mode(modes: Any) -> None:
    """Adds the mode ``ring`` to the modes of ``fanfold bench``."""
    defaults = ring.RingSettings()
    mode = modes.add_parser(
        "ring", help="measure the ring that hands commands to proxies", description=__doc__
    )
    mode.set_defaults(run_mode=run)
    for option, values, what in (
        ("producers", defaults.producers, "threads that push"),
        ("rates", defaults.rates, "commands per second at which latency is measured"),
    ):
        mode.add_argument(
            f"--{option}", type=one_or_more(int), default=list(values), metavar="N[,N...]",
            help=f"{what} (default {','.join(map(str, values))})",
        )  # fmt: skip
    for option, value, what in (
        ("slots", defaults.slots, "commands that the ring holds, a power of two"),
        ("commands", defaults.commands, "commands of one iteration"),
        ("iterations", defaults.iterations, "how often commands per second are measured"),
    ):
        mode.add_argument(
            f"--{option}", type=int, default=value, metavar="N",
            help=f"{what} (default %(default)s)",
        )  # fmt: skip
    mode.add_argument(
        "--seconds", type=float, default=defaults.seconds, metavar="S",
        help="for how long each rate is measured (default %(default)s)",
    )  # fmt: skip
    mode.add_argument(
        "--json", type=Path, metavar="FILE", help="append the result to FILE as one line"
    )


def run(args: argparse.Namespace) -> int:
    """Measures, and prints the tables: exit code 0.

    Raises:
        FanfoldError: bad arguments, or threads that got no time to run.
    """
    settings = ring.RingSettings(
        slots=args.slots,
        producers=args.producers,
        rates=args.rates,
        commands=args.commands,
        iterations=args.iterations,
        seconds=args.seconds,
    )
    if args.json is not None:
        report.check_writable(args.json)
    status = Console(stderr=True)
    with status.status("measuring") if status.is_terminal else contextlib.nullcontext():
        result = ring.measure(settings)
    console = Console() if Console().is_terminal else Console(width=132)
    for table in ring.tables(result):
        console.print(table)
    print(*ring.notes(result), sep="\n")
    if args.json is not None:
        report.append_json_line(args.json, ring.record(result))
    return 0
