"""``fanfold jit``: the cache of compiled kernels, and the compiler that fills it."""

from __future__ import annotations

import argparse
import concurrent.futures
import itertools
import json
import multiprocessing
import os
import signal
import time
from collections.abc import Iterator, Sequence
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

from fanfold.config import Config
from fanfold.errors import ArgumentError, FanfoldError, SystemFailure, UnavailableError
from fanfold.jit import kernel, nvrtc
from fanfold.jit.cache import Entry
from fanfold.renaming import Renaming

__all__ = ["add_arguments", "run"]

_KEY_SHOWN = 12

# The options of what the modes check, as `fanfold bench` calls them.
_OPTIONS = Renaming({"num_experts": "experts", "max_tokens": "tokens"})


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the actions, each with its options."""
    actions = parser.add_subparsers(title="actions", metavar="ACTION", required=True)
    listing = actions.add_parser("list", help="show every compiled kernel that is kept")
    listing.add_argument("--json", action="store_true", help="print one JSON object instead")
    listing.set_defaults(act=_list)
    actions.add_parser("clear", help="remove them all").set_defaults(act=_clear)
    where = actions.add_parser("where", help="say which compiler is used, and which folder")
    where.set_defaults(act=_where)
    warm = actions.add_parser(
        "warm", help="compile the kernels of a geometry, so that they are kept"
    )
    warm.set_defaults(act=_warm)
    _add_geometry(warm)


def _add_geometry(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--mode", choices=("low-latency", "high-throughput"), default="low-latency",
        help="whose kernels (default %(default)s)",
    )  # fmt: skip
    for option, default, what in (
        ("hidden", 7168, "columns of a row"),
        ("top-k", 8, "experts per token"),
        ("experts", 256, "experts of all ranks"),
        ("ranks", 8, "ranks of the group"),
        ("tokens", 128, "most tokens of a rank in a call, for low latency"),
    ):
        parser.add_argument(
            f"--{option}", type=int, default=default, metavar="N",
            help=f"{what} (default %(default)s)",
        )  # fmt: skip
    parser.add_argument(
        "--dtype", choices=("bf16", "fp8", "nvfp4"), default="fp8",
        help="how rows travel to the experts, nvfp4 in low latency (default %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--scales", choices=("float32", "power_of_two", "ue8m0"), default="float32",
        help="of fp8 rows (default %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--logfmt", action="store_true", help="low latency: results travel back as LogFMT"
    )
    parser.add_argument(
        "--late-weights", action="store_true",
        help="low latency: weights come with combine, as DeepEP's do",
    )  # fmt: skip
    parser.add_argument(
        "--layout", choices=("expert-major", "token-major", "both"), default="both",
        help="high throughput: the order in which rows arrive (default %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--arch", default="sm_90a", metavar="SM", help="GPU architecture (default %(default)s)"
    )
    parser.add_argument(
        "--jobs", type=int, default=len(os.sched_getaffinity(0)), metavar="N",
        help="kernels compiled at a time (default %(default)s, the CPUs of this process)",
    )  # fmt: skip


def run(args: argparse.Namespace) -> int:
    """Does what was asked for: 0, or 2 where no compiler is found."""
    code: int = args.act(args)
    return code


def _list(args: argparse.Namespace) -> int:
    cache = kernel.cache_of()
    found = [(key, path, entry) for key, path, entry in cache.entries()]
    if args.json:
        kernels = [_described(key, path, entry) for key, path, entry in found]
        print(json.dumps({"folder": _text(cache.folder), "kernels": kernels}))
        return 0
    for key, path, entry in found:
        print(_block(_described(key, path, entry)))
    total = sum(_size(path) for _, path, _ in found)
    print(f"{len(found)} compiled kernels, {_bytes(total)}, in {_text(cache.folder)}")
    return 0


def _described(key: str, path: Path, entry: Entry | None) -> dict[str, Any]:
    """Everything to be said of an entry; only key, bytes and age where it is damaged."""
    shown: dict[str, Any] = {"key": key, "bytes": _size(path), "age_s": _age(path)}
    shown["damaged"] = entry is None
    if entry is not None:
        needs = {name: value for name, value in entry.metadata["binary"].items() if name != "log"}
        shown |= {name: value for name, value in entry.metadata.items() if name != "binary"} | needs
    return shown


def _block(shown: dict[str, Any]) -> str:
    """One line of an entry, and a second one with its constants."""
    start = (
        f"{shown['key'][:_KEY_SHOWN]}  {_bytes(shown['bytes']):>9}  {_duration(shown['age_s']):>5}"
    )
    if shown["damaged"]:
        return f"{start}  damaged; compiled anew when it is needed"
    needs = f"{shown['registers']} registers"
    if shown["spill_bytes"] > 0:
        needs += f", {shown['spill_bytes']} bytes spilt"
    constants = " ".join(f"{name}={value}" for name, value in shown["constants"].items())
    where = f"{shown['file']} {shown['entry']}"
    return f"{start}  {shown['arch']:<8}  {needs}  {where}\n    {constants or 'no constants'}"


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0  # cleared meanwhile


def _age(path: Path) -> float:
    try:
        return max(0.0, time.time() - path.stat().st_mtime)
    except OSError:
        return 0.0


def _bytes(count: int) -> str:
    return f"{count / 1024:.1f} KiB" if count < 1 << 20 else f"{count / (1 << 20):.1f} MiB"


def _duration(seconds: float) -> str:
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:.0f} s"


def _text(folder: Path | None) -> str:
    return "no folder: this user has no home" if folder is None else str(folder)


def _clear(args: argparse.Namespace) -> int:
    cache = kernel.cache_of()
    try:
        removed = cache.clear()
    except OSError as error:
        raise SystemFailure(f"{_text(cache.folder)} cannot be cleared: {error}") from error
    print(f"removed {removed} compiled kernels from {_text(cache.folder)}")
    return 0


def _where(args: argparse.Namespace) -> int:
    cache = kernel.cache_of()
    print(f"compiled kernels  {_text(cache.folder)}")
    print(f"sources           {kernel.KERNELS}")
    try:
        compiler = nvrtc.library()
    except UnavailableError as error:
        print(f"compiler          {error}")
        return 2
    print(f"compiler          {compiler}")
    print(f"compiles for      {', '.join(f'sm_{number}' for number in compiler.architectures)}")
    return 0


def _warm(args: argparse.Namespace) -> int:
    if args.jobs < 1:
        raise ArgumentError("jobs", args.jobs, "1 or more")
    with _OPTIONS:
        named = _low_latency(args) if args.mode == "low-latency" else _high_throughput(args)
    compiled = _compiled(list(named.values()), args.arch, args.jobs)
    for (name, source), binary in zip(named.items(), compiled, strict=True):
        how = "kept already" if binary.from_cache else f"compiled in {binary.seconds:.2f} s"
        print(f"{source.file} {name}: {binary.registers} registers, {how}", flush=True)
    return 0


def _low_latency(args: argparse.Namespace) -> dict[str, kernel.KernelSource]:
    """The kernels that low latency needs for these sizes, each with a name."""
    from fanfold.backends.low_latency.kernels import kernel_sources
    from fanfold.formats import RowFormat, ScaleFormat
    from fanfold.geometry import Geometry

    _check_arch(args)
    geometry = Geometry(args.ranks, args.experts, args.top_k, args.hidden, args.tokens)
    sources = kernel_sources(
        geometry,
        row_format=RowFormat(args.dtype),
        scale_format=ScaleFormat(args.scales),
        logfmt=args.logfmt,
        late_weights=args.late_weights,
    )
    return {source.entry: source for source in sources}


def _high_throughput(args: argparse.Namespace) -> dict[str, kernel.KernelSource]:
    """The kernels that high throughput may need for these sizes, each with a name."""
    from fanfold.backends.high_throughput import RowOrder
    from fanfold.backends.high_throughput.kernels import Sizes
    from fanfold.backends.high_throughput.layer_kernels import Layer, shared_bytes_of
    from fanfold.formats import RowFormat, ScaleFormat

    if args.dtype == "nvfp4":
        raise ArgumentError("dtype", repr(args.dtype), "'bf16' or 'fp8' for high throughput")
    _check_arch(args)
    layer = Layer(
        Sizes(args.ranks, args.experts, args.top_k),
        args.hidden,
        RowFormat(args.dtype),
        ScaleFormat(args.scales),
        Config.resolve().dispatch_transfer,
    )
    layouts: dict[str, tuple[RowOrder, ...]] = {
        "expert-major": ("expert_major",),
        "token-major": ("token_major",),
        "both": ("expert_major", "token_major"),
    }
    return layer.kernels(layouts[args.layout], shared_bytes_of(args.arch))


def _check_arch(args: argparse.Namespace) -> None:
    from fanfold.backends.choose import LEAST_CAPABILITY

    least = LEAST_CAPABILITY[args.mode.replace("-", "_")]
    if kernel.capability_of(args.arch) < least:
        bound = f"sm_{least[0]}{least[1]} or later for {args.mode.replace('-', ' ')}"
        raise ArgumentError("arch", repr(args.arch), bound)


def _compiled(
    sources: Sequence[kernel.KernelSource], arch: str, jobs: int
) -> Iterator[kernel.Binary]:
    """The sources' binaries, in order; several are compiled at a time, in processes, as NVRTC
    works on one program at a time in each."""
    jobs = min(jobs, len(sources))
    if jobs == 1:
        yield from (kernel.compile(source, arch) for source in sources)
        return
    context = multiprocessing.get_context("spawn")
    try:
        with concurrent.futures.ProcessPoolExecutor(jobs, context, _leave_interrupts) as pool:
            yield from pool.map(kernel.compile, sources, itertools.repeat(arch))
    except BrokenProcessPool as error:
        raise SystemFailure(
            f"a process that compiled a kernel has died ({error}); is there memory for {jobs}? "
            "--jobs takes fewer"
        ) from None
    except FanfoldError as error:
        raise error from None  # without the other process's traceback


def _leave_interrupts() -> None:
    """Ctrl-C reaches all processes; the one that has started the others ends them."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
