"""``fanfold bench flow-control``: what credits are for, on a modelled network."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from fanfold.bench import flow_control, report
from fanfold.bench.flow_control import FlowControlSettings, Point
from fanfold.cli.options import add_numbers, one_or_more
from fanfold.cli.plot import check_picture, save

__all__ = ["add_mode", "run"]


def add_mode(modes: Any) -> None:
    """Adds the mode ``flow-control`` to the modes of ``fanfold bench``."""
    defaults = FlowControlSettings()
    mode = modes.add_parser(
        "flow-control",
        help="many senders of one receiver, with and without credits, on a modelled network",
        description=__doc__,
    )
    mode.set_defaults(run_mode=run)
    mode.add_argument(
        "--chunks", type=one_or_more(int), default=list(defaults.chunks), metavar="N[,N...]",
        help="bytes of a message (default 1 KiB to 1 MiB)",
    )  # fmt: skip
    add_numbers(
        mode, defaults,
        (
            ("senders", "ranks that all send to one"),
            ("megabytes", "MiB of each sender"),
            ("credit", "bytes that a sender may have in flight"),
            ("buffer", "bytes that the queue before the receiver's link holds"),
        ),
    )  # fmt: skip
    mode.add_argument(
        "--link", type=float, default=defaults.link, metavar="X",
        help="GB/s of each rank's link (default %(default)s)",
    )  # fmt: skip
    mode.add_argument(
        "--json", type=Path, metavar="FILE", help="append the result to FILE as one line"
    )
    mode.add_argument(
        "--plot", type=Path, metavar="FILE",
        help="draw throughput against the size of messages; needs matplotlib (pip install "
        "'fanfold[plot]')",
    )  # fmt: skip


def run(args: argparse.Namespace) -> int:
    """Runs the model, and prints the table: exit code 0.

    Raises:
        ArgumentError: an option is outside its bound, or a file cannot be written.
        UnavailableError: ``--plot`` without matplotlib.
    """
    settings = FlowControlSettings(
        senders=args.senders,
        megabytes=args.megabytes,
        chunks=args.chunks,
        credit=args.credit,
        link=args.link,
        buffer=args.buffer,
    )
    if args.json is not None:
        report.check_writable(args.json)
    if args.plot is not None:
        check_picture(args.plot, "--plot")
    points = flow_control.measure(settings)
    console = Console() if Console().is_terminal else Console(width=132)
    console.print(flow_control.table(points))
    print(*flow_control.notes(settings, points), sep="\n")
    if args.json is not None:
        report.append_json_line(args.json, flow_control.record(settings, points))
    if args.plot is not None:
        _draw(settings, points, args.plot)
    return 0


def _draw(settings: FlowControlSettings, points: Sequence[Point], out: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.0, 4.0), layout="constrained")
    axes = figure.subplots()
    chunks = [point.chunk for point in points]
    axes.plot(chunks, [p.credits.gb_per_s for p in points], marker="o", label="with credits")
    axes.plot(chunks, [p.without.gb_per_s for p in points], marker="s", ls="--", label="without")
    axes.axhline(settings.link, color="gray", lw=0.8, label="the receiver's link")
    axes.set_xscale("log", base=2)
    axes.set_xlabel("bytes of a message")
    axes.set_ylabel("GB/s, modelled")
    axes.set_ylim(bottom=0)
    axes.grid(visible=True, alpha=0.3)
    axes.legend()
    axes.set_title(
        f"{settings.senders} senders of one receiver, {settings.buffer / 2**20:g} MiB of queue, "
        f"{settings.credit / 1024:g} KiB of credit each",
        fontsize="medium",
    )
    save(figure, out, "--plot")
