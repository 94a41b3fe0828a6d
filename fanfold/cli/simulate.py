"""``fanfold simulate``: predicts dispatch and combine across hosts, for machines not at hand."""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fanfold.bench.workload import ROUTINGS
from fanfold.cli import simulate_report as report
from fanfold.cli.options import one_or_more
from fanfold.cli.plot import check_picture
from fanfold.errors import ArgumentError
from fanfold.simulate import NETWORKS, SYSTEMS, Network, Scenario, System, compare, load, simulate
from fanfold.simulate.model import DTYPES, PHASES

__all__ = ["add_arguments", "run"]

_TOKENS = {"low_latency": 128, "high_throughput": 4096}
_LEAST_EXPERTS = 256
# Options that replace a number of the preset.
_NETWORK_NUMBERS = {
    "rails": (int, "NICs per GPU"),
    "rail-gb-per-s": (float, "line rate of one NIC, GB/s"),
    "efficiency": (float, "share of the line rate that rows get"),
    "message-us": (float, "cost of a message at the sending NIC, µs"),
    "latency-us": (float, "from NIC to NIC, µs"),
    "switch-us": (float, "cost of a packet from another host than the one before it, µs (incast)"),
}
_SYSTEM_NUMBERS = {
    "proxies": (int, "CPU threads per GPU that post messages; 0: the GPU posts them"),
    "command-us": (float, "what a proxy needs for a command, µs"),
    "nvlink-gb-per-s": (float, "of one GPU, each way, low latency"),
    "forward-gb-per-s": (float, "of one GPU, each way, high throughput"),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of ``fanfold simulate``."""
    parser.description = (
        "Predicts how long dispatch and combine take across hosts, and what bounds them. "
        "A model fitted to published measurements of other systems, not a measurement."
    )
    parser.add_argument(
        "--network", choices=NETWORKS, default="cx7",
        help="NICs and fabric (default %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--system", choices=SYSTEMS, default="fanfold",
        help="whose messages: Fanfold's, or those of a system that was measured (default "
        "%(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--mode", choices=("low-latency", "high-throughput"), default="low-latency",
        help="(default %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--ranks", type=one_or_more(int), default=[16], metavar="N[,N...]",
        help="of all hosts; several with commas give a prediction each (default 16)",
    )  # fmt: skip
    _add_sizes(parser)
    own = parser.add_argument_group("own numbers", "each replaces that of the network or system")
    for option, (kind, what) in {**_NETWORK_NUMBERS, **_SYSTEM_NUMBERS}.items():
        own.add_argument(f"--{option}", type=kind, metavar="X", help=what)
    parser.add_argument(
        "--validate", action="store_true",
        help="instead compare the model with all published rows; of the other options only --json "
        "has an effect",
    )  # fmt: skip
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="append each result to FILE as one line"
    )
    parser.add_argument(
        "--plot", type=Path, metavar="FILE",
        help="draw the times against the ranks; needs matplotlib (pip install 'fanfold[plot]')",
    )  # fmt: skip


def _add_sizes(parser: argparse.ArgumentParser) -> None:
    for option, default, what in (
        ("ranks-per-host", 8, "GPUs of a host; they reach each other by NVLink"),
        ("hidden", 7168, "columns of a row"),
        ("top-k", 8, "experts per token"),
        ("top-hosts", 0, "most hosts of a token; 0 for no limit"),
        ("seed", 0, "of the routing"),
    ):
        parser.add_argument(
            f"--{option}", type=int, default=default, metavar="N",
            help=f"{what} (default %(default)s)",
        )  # fmt: skip
    parser.add_argument(
        "--tokens", type=int, metavar="N",
        help="of each rank (default 128 in low latency, 4096 in high throughput)",
    )  # fmt: skip
    parser.add_argument(
        "--experts", type=int, metavar="N",
        help=f"of all ranks (default: the least multiple of the ranks from {_LEAST_EXPERTS} on)",
    )  # fmt: skip
    parser.add_argument(
        "--dtype", choices=DTYPES, default="fp8",
        help="how rows travel to the experts; they come back as bfloat16 (default %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--distribution", choices=ROUTINGS, default="uniform",
        help="which experts tokens choose (default %(default)s)",
    )  # fmt: skip


def run(args: argparse.Namespace) -> int:
    """Prints predictions, or the validation: exit code 0, or 1 if a held-out row is farther off
    than :data:`fanfold.simulate.HELD_OUT_BOUND` and ``published.json`` does not say why.

    Raises:
        ArgumentError: an option is outside its bound, or a file cannot be written.
        UnavailableError: ``--plot`` without matplotlib.
    """
    if args.validate:
        return _validate(args)
    if args.plot is not None:
        check_picture(args.plot, "--plot")
    scenarios = [scenario(args, ranks) for ranks in args.ranks]
    results = []
    for one in scenarios:
        phases = {phase: simulate(one, phase) for phase in PHASES}
        results.append((one, phases))
    report.show(results)
    _append(args.json, (report.fields(*result) for result in results))
    if args.plot is not None:
        from fanfold.cli.simulate_plot import draw

        draw(results, args.plot)
        print(f"{args.plot}: {len(results)} predictions")
    return 0


def scenario(args: argparse.Namespace, ranks: int) -> Scenario:
    """What the options ask for, with so many ranks.

    Raises:
        ArgumentError: an option is outside its bound.
    """
    if ranks < 1:
        raise ArgumentError("ranks", ranks, "at least 1")
    mode = args.mode.replace("-", "_")
    network: Network = _replaced(NETWORKS[args.network], args, _NETWORK_NUMBERS)
    system: System = _replaced(SYSTEMS[args.system], args, _SYSTEM_NUMBERS)
    return Scenario(
        network, system, mode, ranks,
        ranks_per_host=args.ranks_per_host,
        tokens=_TOKENS[mode] if args.tokens is None else args.tokens,
        hidden=args.hidden,
        top_k=args.top_k,
        experts=-(-_LEAST_EXPERTS // ranks) * ranks if args.experts is None else args.experts,
        dtype=args.dtype,
        routing=args.distribution,
        top_hosts=args.top_hosts,
        seed=args.seed,
    )  # fmt: skip


def _replaced(preset: Any, args: argparse.Namespace, numbers: dict[str, Any]) -> Any:
    given = {option.replace("-", "_") for option in numbers}
    return dataclasses.replace(
        preset, **{name: value for name in given if (value := getattr(args, name)) is not None}
    )


def _validate(args: argparse.Namespace) -> int:
    comparisons = compare(load())
    report.show_validation(comparisons)
    _append(args.json, (report.validation_fields(comparison) for comparison in comparisons))
    return 1 if report.unexpected(comparisons) else 0


def _append(path: Path | None, lines: Iterator[dict[str, Any]]) -> None:
    if path is None:
        return
    try:
        with path.open("a", encoding="utf-8") as file:
            for line in lines:
                file.write(json.dumps(line) + "\n")
    except OSError as error:
        raise ArgumentError("--json", f"{path} ({error})", "a file that can be written") from error
