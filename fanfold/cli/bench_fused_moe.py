"""``fanfold bench fused-moe``: a whole MoE layer, fused and call by call."""

from __future__ import annotations

import argparse
import contextlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console

from fanfold.bench import fused_moe, fused_moe_report, report
from fanfold.bench.fused_moe import FusedMoeSettings
from fanfold.bench.fused_moe_report import FusedMoePoint
from fanfold.bench.settings import BACKENDS
from fanfold.bench.workload import ROUTINGS
from fanfold.cli.options import add_numbers, one_or_more
from fanfold.config import Config
from fanfold.errors import ArgumentError, FanfoldError, UnavailableError

__all__ = ["add_mode", "run"]

_DEFAULTS = FusedMoeSettings()
_NO_TIMELINE = (
    "--timeline is of the kernel on GPUs, but the layer runs on the CPU here: `fanfold bench "
    "fused-moe --backend cuda` says why"
)


def add_mode(modes: Any) -> argparse.ArgumentParser:
    """Adds the mode ``fused-moe`` to the modes of ``fanfold bench``; :func:`run` is its
    ``run_ranks``."""
    mode: argparse.ArgumentParser = modes.add_parser(
        "fused-moe",
        help="time a whole FP8 MoE layer in one call, beside the same layer in separate calls",
        description="Checks FusedMoE against the reference, then times it, the same layer in "
        "separate calls, and PyTorch's grouped GEMMs.",
    )
    mode.set_defaults(run_ranks=run)
    shown = ",".join(map(str, _DEFAULTS.tokens))
    mode.add_argument(
        "--tokens", type=one_or_more(int), default=list(_DEFAULTS.tokens), metavar="N[,N...]",
        help=f"tokens of each rank; each number is measured by itself (default {shown})",
    )  # fmt: skip
    mode.add_argument(
        "--ranks", type=int, metavar="N",
        help="processes to start on this host (default 1); started by torchrun, mpirun or srun, "
        "the ranks they started",
    )  # fmt: skip
    add_numbers(
        mode, _DEFAULTS,
        (
            ("hidden", "columns of a token"),
            ("intermediate", "columns between the GEMMs"),
            ("top-k", "experts per token"),
            ("experts", "experts of all ranks"),
            ("seed", "of tokens, routing and weights"),
            ("iterations", "timed calls of each contender"),
            ("warmup", "calls before them"),
        ),
    )  # fmt: skip
    _add_more(mode)
    return mode


def _add_more(mode: argparse.ArgumentParser) -> None:
    """Options that are no whole numbers."""
    mode.add_argument(
        "--pause-ms", type=float, default=_DEFAULTS.pause_ms, metavar="X",
        help="milliseconds before each call (default %(default)g)",
    )  # fmt: skip
    mode.add_argument(
        "--distribution", choices=ROUTINGS, default=_DEFAULTS.distribution,
        help="which experts tokens choose (default %(default)s)",
    )  # fmt: skip
    mode.add_argument(
        "--backend", choices=BACKENDS,
        help="auto takes the GPU where the kernel serves the layer (default: the setting "
        "FANFOLD_BACKEND, or auto)",
    )  # fmt: skip
    mode.add_argument(
        "--fast-accumulation", action=argparse.BooleanOptionalAction, default=None,
        help="whether the tensor cores keep sums, in all contenders (default: the setting "
        "FANFOLD_FAST_ACCUMULATION)",
    )  # fmt: skip
    mode.add_argument(
        "--baseline", action=argparse.BooleanOptionalAction, default=True,
        help="time the layer in separate calls and PyTorch's grouped GEMMs, too",
    )  # fmt: skip
    mode.add_argument(
        "--json", type=Path, metavar="FILE", help="append one line for each number of tokens"
    )
    mode.add_argument(
        "--timeline", type=Path, metavar="FILE",
        help="on GPUs: write when each CTA of one call had ended each phase to FILE, which "
        "`fanfold plot` draws",
    )  # fmt: skip


def run(args: argparse.Namespace, group: Any) -> int:
    """Checks, measures and prints the tables: exit code 0.

    Raises:
        FanfoldError: bad arguments, a failed check, a rank that failed.
    """
    speaks = group is None or dist.get_rank(group) == 0
    try:
        settings = _settings(args, group)
        fused_moe.check_ranks(settings, group)
        on_cpu = settings.backend == "host" or not torch.cuda.is_available()
        if args.timeline is not None and on_cpu:
            raise UnavailableError(_NO_TIMELINE)
        for option in ("json", "timeline"):
            path = getattr(args, option)
            if path is not None and speaks:
                report.check_writable(path, f"--{option}")
    except FanfoldError:
        if speaks:
            raise
        return 2  # every rank got the same arguments; one of them says what is wrong
    status = Console(stderr=True)
    shown = speaks and status.is_terminal
    with status.status("checking and timing") if shown else contextlib.nullcontext():
        results = fused_moe.sweep(settings, group)
    if results is None:
        return 0
    points = [FusedMoePoint(settings, ranks) for ranks in results]
    _print(points)
    if args.json is not None:
        for point in points:
            report.append_json_line(args.json, fused_moe_report.record(point))
    if args.timeline is not None:
        _write_timeline(args.timeline, points)
    return 0


def _print(points: Sequence[FusedMoePoint]) -> None:
    console = Console() if Console().is_terminal else Console(width=160)
    console.print(fused_moe_report.table(points))
    if points[0].on_gpu:
        console.print(fused_moe_report.phases_table(points))
    print(*fused_moe_report.notes(points), sep="\n")


def _write_timeline(path: Path, points: Sequence[FusedMoePoint]) -> None:
    lines = [line for point in points for line in fused_moe_report.timeline_lines(point)]
    if not lines:
        raise UnavailableError(_NO_TIMELINE)
    try:
        path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    except OSError as error:
        raise ArgumentError("--timeline", f"{path} ({error.strerror})", "writable") from error


def _settings(args: argparse.Namespace, group: Any) -> FusedMoeSettings:
    ranks = args.ranks
    if ranks is None:
        ranks = _DEFAULTS.ranks if group is None else dist.get_world_size(group)
    return FusedMoeSettings(
        tokens=args.tokens,
        ranks=ranks,
        hidden=args.hidden,
        intermediate=args.intermediate,
        top_k=args.top_k,
        experts=args.experts,
        backend=args.backend or Config.resolve().backend,
        distribution=args.distribution,
        seed=args.seed,
        iterations=args.iterations,
        warmup=args.warmup,
        pause_ms=args.pause_ms,
        fast_accumulation=args.fast_accumulation,
        baseline=args.baseline,
    )
