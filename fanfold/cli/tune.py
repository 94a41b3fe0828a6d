"""``fanfold tune``: finds the best forms of a kernel for a layer on this GPU, and keeps them."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from fanfold.bench import report
from fanfold.bench.fused_moe import FusedMoeSettings
from fanfold.bench.fused_moe_tune import tune
from fanfold.cli.options import add_numbers, one_or_more
from fanfold.config import Config
from fanfold.errors import UnavailableError
from fanfold.fused_moe.tuning import FORMS, TunedPoint, best_tuning, tuned_file, tuning_for

__all__ = ["add_arguments", "run"]

_DEFAULTS = FusedMoeSettings(
    tokens=(16, 64, 256, 512, 768, 1024, 2048, 4096), hidden=7168, intermediate=2048
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the kernels, each with its options."""
    kernels = parser.add_subparsers(title="kernels", metavar="KERNEL", required=True)
    mode = kernels.add_parser(
        "fused-moe",
        help="when the kernel of FusedMoE swaps weights and tokens, and when it computes columns "
        "in groups",
        description="Checks and times FusedMoE in each form of its kernel, and keeps the times. "
        "Layers that are made later choose by them, this layer's first, else those of this GPU.",
    )
    shown = ",".join(map(str, _DEFAULTS.tokens))
    mode.add_argument(
        "--tokens", type=one_or_more(int), default=list(_DEFAULTS.tokens), metavar="N[,N...]",
        help=f"tokens of each rank (default {shown})",
    )  # fmt: skip
    add_numbers(
        mode, _DEFAULTS,
        (
            ("ranks", "processes to start on this host, a GPU each"),
            ("hidden", "columns of a token"),
            ("intermediate", "columns between the GEMMs"),
            ("top-k", "experts per token"),
            ("experts", "experts of all ranks"),
            ("iterations", "timed calls of each form"),
        ),
    )  # fmt: skip
    mode.add_argument(
        "--fast-accumulation", action=argparse.BooleanOptionalAction, default=None,
        help="whether the tensor cores keep sums (default: the setting FANFOLD_FAST_ACCUMULATION)",
    )  # fmt: skip
    mode.add_argument(
        "--file", type=Path, metavar="FILE",
        help="append the times to FILE, instead of to the one that layers read, in the folder of "
        "`fanfold jit where`",
    )  # fmt: skip


def run(args: argparse.Namespace) -> int:
    """Measures, prints and keeps: exit code 0.

    Raises:
        FanfoldError: bad arguments, a failed check, no GPU, or no file to write to.
    """
    config = Config.resolve()
    file = args.file or tuned_file(config)
    if file is None:
        raise UnavailableError("this user has no home to keep times in: name a file with --file")
    settings = FusedMoeSettings(
        tokens=args.tokens,
        ranks=args.ranks,
        hidden=args.hidden,
        intermediate=args.intermediate,
        top_k=args.top_k,
        experts=args.experts,
        iterations=args.iterations,
        fast_accumulation=args.fast_accumulation,
        baseline=False,
    )
    file.parent.mkdir(parents=True, exist_ok=True)
    report.check_writable(file, "--file")
    points = tune(settings)
    _print(points)
    for point in points:
        report.append_json_line(file, point.record(), "--file")
    print(f"Kept in {file}.")
    if args.file is None:
        print(f"Layers of this kind are made with {tuning_for(points[0].layer, config)}.")
    return 0


def _print(points: Sequence[TunedPoint]) -> None:
    layer = points[0].layer
    table = Table(
        title=f"fused-moe on {layer.gpu}: {layer.ranks} ranks, {layer.hidden} x "
        f"{layer.intermediate}, top-{layer.top_k} of {layer.experts} experts"
    )
    for column in ("tokens", "rows", "rows per expert", *(f"{form} µs" for form in FORMS)):
        table.add_column(column, justify="right")
    for point in points:
        least = min(point.microseconds.values())
        times = (
            f"[bold]{us:,.1f}[/]" if us == least else f"{us:,.1f}"
            for us in (point.microseconds[form] for form in FORMS)
        )
        table.add_row(f"{point.tokens}", f"{point.rows}", f"{point.expert_rows}", *times)
    Console(width=None if Console().is_terminal else 120).print(table)
    print(f"Best for these: {best_tuning(points)}")
