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


# What depends on who pushes.
_DEFAULTS: dict[str, dict[str, Any]] = {
    "cpu": {"producers": (1, 2, 4), "rates": (100_000, 1_000_000, 5_000_000), "rings": 1,
            "threads": 1, "lanes": 1},
    "gpu": {"producers": (1, 32, 128), "rates": (100_000, 1_000_000, 4_000_000), "rings": 32,
            "threads": 4, "lanes": 1},
}  # fmt: skip


def add_mode(modes: Any) -> None:
    """Adds the mode ``ring`` to the modes of ``fanfold bench``."""
    defaults = ring.RingSettings()
    mode = modes.add_parser(
        "ring", help="measure the ring that hands commands to proxies", description=__doc__
    )
    mode.set_defaults(run_mode=run)
    mode.add_argument(
        "--from", dest="source", choices=("cpu", "gpu"), default=defaults.source,
        help="who pushes: threads of the CPU, or warps of a GPU (default %(default)s)",
    )  # fmt: skip
    for option, what in (
        ("producers", "threads or, from gpu, warps that push"),
        ("rates", "commands per second at which latency is measured"),
    ):
        values = [",".join(map(str, each[option])) for each in _DEFAULTS.values()]
        mode.add_argument(
            f"--{option}", type=one_or_more(int), metavar="N[,N...]",
            help=f"{what} (default {values[0]}; from gpu {values[1]})",
        )  # fmt: skip
    for option, what in (
        ("rings", "rings, to which warps are dealt in turn"),
        ("threads", "CPU threads that pop them"),
        ("lanes", "commands in each push of a warp, 1 to 32"),
    ):
        mode.add_argument(
            f"--{option}", type=int, metavar="N",
            help=f"from gpu: {what} (default {_DEFAULTS['gpu'][option]})",
        )  # fmt: skip
    for option, value, what in (
        ("slots", defaults.slots, "commands that a ring holds, a power of two"),
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
        FanfoldError: bad arguments, no GPU, or threads that got no time to run.
    """
    own = {
        name: default if getattr(args, name) is None else getattr(args, name)
        for name, default in _DEFAULTS[args.source].items()
    }
    settings = ring.RingSettings(
        source=args.source,
        slots=args.slots,
        **own,
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
