"""``fanfold bench``: one mode, checked against the oracle, then timed."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import itertools
from pathlib import Path
from typing import Any

import torch.distributed as dist
from rich.console import Console

from fanfold.bench import report
from fanfold.bench.notes import notes
from fanfold.bench.run import check_network, check_ranks, sweep
from fanfold.bench.settings import BACKENDS, DTYPES, FACES, LAYOUTS, REUSES, BenchSettings
from fanfold.bench.workload import ROUTINGS
from fanfold.cli import bench_flow_control, bench_fused_moe, bench_network, bench_ring
from fanfold.cli.options import add_numbers, one_or_more
from fanfold.config import Config
from fanfold.errors import FanfoldError
from fanfold.launch import join

__all__ = ["add_arguments", "run"]

# Sizes of a short run: decoding has few tokens and many steps.
_DEFAULTS = {
    "low-latency": BenchSettings("low_latency", tokens=128, iterations=200, warmup=20),
    "high-throughput": BenchSettings("high_throughput", tokens=4096, iterations=20, warmup=3),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the modes, each with its options."""
    modes = parser.add_subparsers(title="modes", metavar="MODE", required=True)
    for name, defaults in _DEFAULTS.items():
        mode = modes.add_parser(name, help=f"time the {name} mode", description=__doc__)
        mode.set_defaults(defaults=defaults, run_mode=_run_joined, run_ranks=_run)
        _add_options(mode, defaults)
    bench_fused_moe.add_mode(modes).set_defaults(run_mode=_run_joined)
    bench_ring.add_mode(modes)
    bench_network.add_mode(modes)
    bench_flow_control.add_mode(modes)


def _add_options(parser: argparse.ArgumentParser, defaults: BenchSettings) -> None:
    parser.add_argument(
        "--ranks", type=int, metavar="N",
        help=f"processes to start on this host (default {defaults.ranks}); started by torchrun, "
        "mpirun or srun, the ranks they started",
    )  # fmt: skip
    add_numbers(
        parser, defaults,
        (
            ("tokens", "tokens of each rank"),
            ("hidden", "columns of a row"),
            ("top-k", "experts per token"),
            ("experts", "experts of all ranks"),
            ("seed", "of tokens and routing"),
            ("iterations", "timed rounds; on GPUs replays, or calls where there is no graph"),
            ("warmup", "rounds before them"),
            ("calls", "on GPUs: calls back to back in a CUDA graph"),
        ),
    )  # fmt: skip
    for option, choices, what in (
        ("dtype", DTYPES, "how rows travel to the experts"),
        ("distribution", ROUTINGS, "which experts tokens choose"),
    ):
        parser.add_argument(
            f"--{option}", choices=choices, default=getattr(defaults, option),
            help=f"{what} (default %(default)s)",
        )  # fmt: skip
    parser.add_argument(
        "--backend", choices=BACKENDS,
        help="auto takes the best one there is (default: the setting FANFOLD_BACKEND, or auto)",
    )  # fmt: skip
    _add_hosts_options(parser)
    parser.add_argument(
        "--face", choices=FACES, default="native",
        help="whose calls: fanfold.LowLatency's and HighThroughput's, or those of fanfold.deep_ep: "
        "Buffer's (weights come with combine, rows token-major), or in high throughput alone "
        "ElasticBuffer's and HybridEPBuffer's (default %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--check", action=argparse.BooleanOptionalAction, default=True,
        help="compare all results with the oracle before timing",
    )  # fmt: skip
    parser.add_argument(
        "--baseline", action="store_true",
        help="time torch.distributed's all-to-all in turns on the same data, and print the ratio",
    )  # fmt: skip
    parser.add_argument(
        "--overlap", action="store_true",
        help="on GPUs: time a matrix product beside a waiting hook (low latency) or beside "
        "dispatches (high throughput)",
    )  # fmt: skip
    _add_own_options(parser)
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="append the result to FILE as one line"
    )


def _add_hosts_options(parser: argparse.ArgumentParser) -> None:
    """Options of ranks on several hosts."""
    parser.add_argument(
        "--hosts", type=int, metavar="H",
        help="have this machine act as H hosts, with as many ranks on each, or group joined ranks "
        "so (default: the setting FANFOLD_HOSTS, or the hosts that ranks are on)",
    )  # fmt: skip
    parser.add_argument(
        "--transport", metavar="NAME",
        help="what carries between hosts: libfabric, which takes the best network, "
        "libfabric:PROVIDER[:NIC,NIC], nccl:gin, of GPUs, or loopback[:SEED], whose ranks are "
        "threads (default: the setting FANFOLD_NETWORK, or libfabric); or nccl:lsa, NCCL's memory "
        "between the GPUs of one host (default: the setting FANFOLD_GPU_MEMORY, or PyTorch's)",
    )  # fmt: skip


def _add_own_options(parser: argparse.ArgumentParser) -> None:
    """Options of high throughput; low latency knows them to say so."""
    own = parser.add_argument_group(
        "high throughput only", "layout, routing, sms: several with commas give a result each"
    )
    for option, choices, what in (
        ("layout", LAYOUTS, "the order in which rows arrive"),
        ("routing", REUSES, "whether each dispatch brings a routing of its own"),
    ):
        shown = ",".join(_spelt(choice) for choice in choices)
        own.add_argument(
            f"--{option}", type=one_or_more(_word), default=[None], metavar=f"{{{shown}}}",
            help=f"{what} (default {_spelt(choices[0])})",
        )  # fmt: skip
    own.add_argument(
        "--sms", type=one_or_more(int), default=[None], metavar="N[,N...]",
        help="on GPUs: SMs that each kernel takes (default: the library's choice)",
    )  # fmt: skip
    own.add_argument(
        "--alignment", type=int, metavar="N",
        help="expert-major: rows of an expert are padded to a multiple of N (default 128 on GPUs, "
        "1 on the host)",
    )  # fmt: skip
    own.add_argument(
        "--zero-padding", action=argparse.BooleanOptionalAction,
        help="on GPUs, expert-major: whether these rows are zeros (default, but of "
        "--face elastic), or are not written",
    )  # fmt: skip
    own.add_argument(
        "--in-place", action="store_const", const=True,
        help="on GPUs: rows stay in the symmetric memory into which peers write them",
    )  # fmt: skip


def _spelt(choice: str) -> str:
    return choice.replace("_", "-")


def _word(text: str) -> str:
    return text.strip().replace("-", "_")


def run(args: argparse.Namespace) -> int:
    """Runs one bench and prints its table: exit code 0.

    Raises:
        FanfoldError: bad arguments, a failed check, a rank that failed.
    """
    return int(args.run_mode(args))


def _run_joined(args: argparse.Namespace) -> int:
    """A mode of ranks, on those of a launcher if there is one."""
    group = join()
    try:
        return int(args.run_ranks(args, group))
    finally:
        # PyTorch may abort a process that still holds a gloo group when the interpreter ends.
        del group
        if dist.is_initialized():
            dist.destroy_process_group()


def _run(args: argparse.Namespace, group: Any) -> int:
    speaks = group is None or dist.get_rank(group) == 0
    try:
        points = _points(args, group)
        check_ranks(points[0], group)
        if group is None:
            check_network(points[0])
        if args.json is not None and speaks:
            report.check_writable(args.json)
    except FanfoldError:
        if speaks:
            raise
        return 2  # every rank got the same arguments; one of them says what is wrong
    status = Console(stderr=True)
    shown = speaks and status.is_terminal
    with status.status("checking and timing") if shown else contextlib.nullcontext():
        results = sweep(points, group)
    if results is None:
        return 0
    # A table that is cut off says nothing; without a terminal it may be as wide as it needs.
    console = Console() if Console().is_terminal else Console(width=132)
    for result in results:
        console.print(report.table(result))
        if result.placement.hosts > 1:
            console.print(report.hosts_table(result))
        if result.device is not None:
            console.print(report.gpu_table(result))
        print(*notes(result), sep="\n")
        if args.json is not None:
            report.append_json_line(args.json, report.record(result))
    if len(results) > 1:
        console.print(report.sweep_table(results))
    return 0


def _points(args: argparse.Namespace, group: Any) -> list[BenchSettings]:
    """What is asked for, with each layout, routing and number of SMs."""
    settings = _settings(args, group)
    choices = itertools.product(args.layout, args.routing, args.sms)
    return [
        dataclasses.replace(
            settings,
            layout=layout,
            routing=routing,
            sms=sms,
            alignment=args.alignment,
            zero_padding=args.zero_padding,
            in_place=args.in_place,
        )
        for layout, routing, sms in choices
    ]


def _settings(args: argparse.Namespace, group: Any) -> BenchSettings:
    ranks = args.ranks
    if ranks is None:
        ranks = args.defaults.ranks if group is None else dist.get_world_size(group)
    config = Config.resolve()
    return BenchSettings(
        mode=args.defaults.mode,
        ranks=ranks,
        tokens=args.tokens,
        hidden=args.hidden,
        top_k=args.top_k,
        experts=args.experts,
        dtype=args.dtype,
        backend=args.backend or config.backend,
        distribution=args.distribution,
        seed=args.seed,
        iterations=args.iterations,
        warmup=args.warmup,
        check=args.check,
        baseline=args.baseline,
        calls=args.calls,
        overlap=args.overlap,
        face=args.face,
        hosts=config.hosts if args.hosts is None else args.hosts,
        transport=args.transport,
    )
