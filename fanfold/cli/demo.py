"""``fanfold demo``: a real model, trained with expert parallelism and checked against itself."""

from __future__ import annotations

import argparse
import contextlib
from pathlib import Path

import torch
import torch.distributed as dist

from fanfold.backends.choose import choose
from fanfold.bench.report import check_writable
from fanfold.cli.demo_model import (
    DemoSettings,
    RankRun,
    Training,
    corpus,
    train_plain,
    train_rank,
)
from fanfold.cli.demo_report import DemoReport, ProgressLine
from fanfold.cli.plot import check_picture
from fanfold.config import Config
from fanfold.errors import ArgumentError, UnavailableError
from fanfold.geometry import check_integer
from fanfold.group import as_group
from fanfold.launch import launch

__all__ = ["add_arguments", "run"]

MAX_SECONDS = 1800.0
"""After which ranks that still train are given up."""

MOST_STEPS = 10_000_000
MOST_SEED = 2**40


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of ``fanfold demo``."""
    defaults = DemoSettings()
    parser.description = (
        "Trains a small byte-level MoE language model on Python's own documentation, its experts "
        "spread over local ranks; trains it again on one process without expert parallelism; and "
        "checks that both losses took the same course. Exits with 1 if they did not. Where each "
        "rank has a GPU of its own the model is there, and after its training the ranks generate "
        "text through the low-latency kernels."
    )
    parser.add_argument(
        "--ranks", type=int, metavar="N",
        help=f"processes to spread the {defaults.num_experts} experts over (default "
        f"{defaults.ranks}, where there are GPUs at most as many, so that each rank has one)",
    )  # fmt: skip
    parser.add_argument(
        "--steps", type=int, default=defaults.steps, metavar="N",
        help="training steps (default %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--seed", type=int, default=defaults.seed, metavar="N",
        help="of the initial weights and of the batches (default %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--out", type=Path, default=Path("demo.png"), metavar="FILE",
        help="where to draw the losses and the experts' load (default %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="append the figures to FILE as one line"
    )


def run(args: argparse.Namespace) -> int:
    """Runs the demo: 0 if its check passed, 1 if not.

    Raises:
        ArgumentError: an option is out of its bound.
        LaunchError: a rank failed.
    """
    report = _train_twice(_settings(args))
    report.print()
    _draw(report, args.out)
    if args.json is not None:
        report.write_json(args.json)
    return 0 if report.passed else 1


def _settings(args: argparse.Namespace) -> DemoSettings:
    ranks = _default_ranks() if args.ranks is None else args.ranks
    settings = DemoSettings(ranks=ranks, steps=args.steps, seed=args.seed)
    for name, total in (("experts", settings.num_experts), ("sequences", settings.sequences)):
        if settings.ranks < 1 or total % settings.ranks:
            raise ArgumentError("--ranks", settings.ranks, f"a divisor of the {total} {name}")
    check_integer("--steps", settings.steps, 1, MOST_STEPS)
    check_integer("--seed", settings.seed, 0, MOST_SEED)
    with contextlib.suppress(UnavailableError):  # without matplotlib there is no picture
        check_picture(args.out)
    if args.json is not None:
        check_writable(args.json)
    return settings


def _default_ranks() -> int:
    """As many as can have a GPU each; the usual number without GPUs, where ranks share them, and
    where calls cannot run on those there are."""
    config = Config.resolve()
    gpus = 0 if config.backend == "host" else torch.cuda.device_count()
    most = DemoSettings.ranks
    if gpus == 0 or config.share_gpus:
        return most
    ranks = max(ranks for ranks in range(1, most + 1) if ranks <= gpus and most % ranks == 0)
    return ranks if ranks == most or all(launch(_runs_on_gpu, ranks)) else most


def _runs_on_gpu(group: dist.ProcessGroup) -> bool:
    return choose(as_group(group), Config.resolve()).backend == "cuda"


def _train_twice(settings: DemoSettings) -> DemoReport:
    local = settings.num_experts // settings.ranks
    print(
        f"model     {settings.layers} blocks, hidden {settings.hidden}, {settings.num_experts} "
        f"experts of which each token takes {settings.top_k}; {local} on each of "
        f"{settings.ranks} ranks"
    )
    print(
        f"text      {corpus().numel():,} bytes of Python's documentation (pydoc_data.topics), "
        f"{settings.tokens_per_step:,} a step",
        flush=True,
    )
    runs = launch(_train_rank, settings.ranks, (settings,), timeout_s=MAX_SECONDS)
    # One thread, as each rank has: two that share a busy machine wait for each other all the time.
    on_gpu = runs[0].device != "cpu"
    (plain,) = launch(_train_plain, 1, (settings, on_gpu), timeout_s=MAX_SECONDS)
    return DemoReport(settings, runs, plain)


def _train_rank(group: dist.ProcessGroup, settings: DemoSettings) -> RankRun:
    """What each rank runs; rank 0 shows the progress of all."""
    if dist.get_rank(group) > 0:
        return train_rank(group, settings, lambda step, loss: None)
    title = f"training on {settings.ranks} ranks (loss of rank 0)"
    with ProgressLine(title, settings.steps) as progress:
        return train_rank(group, settings, progress)


def _train_plain(group: dist.ProcessGroup, settings: DemoSettings, on_gpu: bool) -> Training:
    """The same training in a single process, on a GPU if the ranks had theirs."""
    device = choose(as_group(group), Config.resolve()).device if on_gpu else torch.device("cpu")
    with ProgressLine("check on one process", settings.steps) as progress:
        return train_plain(settings, progress, device)


def _draw(report: DemoReport, path: Path) -> None:
    try:
        report.draw(path)
    except ImportError:
        print("picture   left out, as matplotlib is missing: pip install 'fanfold[plot]'")
    else:
        print(f"picture   {path}")
