#!/usr/bin/env python3
"""Times high-throughput kernels on all GPUs of a host under other constants than the library's.

    python benchmarks/tune.py RESULTS.jsonl [CHANGES...] [--calls PART,...]
        [--tokens 4096] [--geometry 7168/8/256]...

Each of CHANGES is a JSON object, ``{}`` for none: ``ctas``, ``senders``, and names of
``fanfold/backends/high_throughput/kernels.py``, such as ``{"_SHORT_TOKENS": 0}``. One start of the
ranks times them all, so that they can be compared: machines differ by some percent. A line for each
of changes, tokens and geometry has the times of one call between two events, behind a flush of the
L2 cache and a barrier of the ranks: medians of the slowest rank, in microseconds, nothing
subtracted.

``--calls`` times only calls in whose names one of its parts is, such as ``in_place cached``. With
``layout`` that is where tokens go, counted by one kernel and by PyTorch's own functions, among four
ranks however many there are, and the host's time for either.
Nothing is compared with the oracle but token-major sums of ones: results are for tests/gpu to
check, with the constants that are kept.
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from fanfold.backends.high_throughput import kernels, layout_kernel
from fanfold.backends.high_throughput.cuda import CudaHighThroughput
from fanfold.backends.high_throughput.in_place import bytes_for_results
from fanfold.backends.high_throughput.layout import Layout, dispatch_layout, layout_there
from fanfold.backends.high_throughput.protocol import RowOrder
from fanfold.backends.opening import memory_of_gpus
from fanfold.bench.cuda_run import device_properties
from fanfold.bench.cuda_timing import Clock, GpuBarrier
from fanfold.bench.report import append_json_line, command_line, origin
from fanfold.bench.workload import Workload
from fanfold.config import Config
from fanfold.formats import quantize
from fanfold.group import as_group
from fanfold.launch import launch

ALIGNMENT = 128
CTAS = 24
LAYOUT_RANKS = 4
LAYOUTS: tuple[RowOrder, ...] = ("token_major", "expert_major")
Point = tuple[int, tuple[int, int, int]]  # tokens; hidden, top-k, experts


def room(ranks: int, point: Point, layout: str) -> int:
    """Rows for any rank: far more than what uniform routing brings."""
    tokens, (_, top_k, experts) = point
    if layout == "token_major":
        return tokens * ranks
    return tokens * (top_k + 1) + ALIGNMENT * experts // ranks


def timed_calls(
    mode: CudaHighThroughput, ranks: int, point: Point, wanted: Callable[[str], bool]
) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Names and calls of one rank; all ranks must make them in this order."""
    tokens, (hidden, top_k, experts) = point
    batch = Workload(ranks, tokens, hidden, top_k, experts).batch(dist.get_rank())
    x, idx = batch.x.to(mode.device), batch.topk_idx.to(mode.device)
    weights = batch.topk_weights.to(mode.device)
    for layout, fp8 in itertools.product(LAYOUTS, (True, False)):
        rows: Any = quantize(x) if fp8 else x
        expert_major = layout == "expert_major"
        options: dict[str, Any] = {
            "num_experts": experts,
            "layout": layout,
            "capacity": room(ranks, point, layout),
            "expert_alignment": ALIGNMENT if expert_major else 1,
        }
        new = partial(mode.dispatch, rows, idx, weights, **options)
        received = new()
        cached = partial(mode.dispatch_cached, rows, received.plan, layout=layout)
        kind = f"{'fp8' if fp8 else 'bf16'} {layout}"
        calls = {
            f"dispatch {kind} cached": cached,
            f"dispatch {kind} new": new,
            f"dispatch {kind} in_place cached": partial(cached, in_place=True),
            f"dispatch {kind} in_place new": partial(new, in_place=True),
        }
        yield from ((name, call) for name, call in calls.items() if wanted(name))
        if not fp8 and wanted(name := f"combine {kind}"):
            yield name, combine_of(mode, received, x, idx, layout, experts // ranks)


def layout_calls(
    device: torch.device, ranks: int, point: Point, wanted: Callable[[str], bool]
) -> Iterator[tuple[str, Callable[[], Layout]]]:
    """Names and calls; both give the same."""
    tokens, (hidden, top_k, experts) = point
    if not wanted("layout"):
        return
    batch = Workload(ranks, tokens, hidden, top_k, experts).batch(dist.get_rank())
    idx = batch.topk_idx.to(device)
    assert layout_kernel.counter_of(idx, experts, LAYOUT_RANKS) is not None, "there is no kernel"
    ours = partial(dispatch_layout, idx, experts, LAYOUT_RANKS)
    theirs = partial(layout_there, idx, experts, LAYOUT_RANKS)
    assert all(map(torch.equal, vars(ours()).values(), vars(theirs()).values())), "the same layout"
    yield "layout", ours
    yield "layout by PyTorch", theirs


def combine_of(
    mode: CudaHighThroughput, received: Any, x: torch.Tensor, idx: torch.Tensor, layout: RowOrder,
    local_experts: int,
) -> Callable[[], Any]:  # fmt: skip
    """A combine of random outputs; one of ones has been right, token-major."""
    out = torch.full_like(x, torch.nan)
    weights = received.row_weights if layout == "expert_major" else None
    given: dict[str, Any] = {"layout": layout, "row_weights": weights, "out": out}
    y = torch.ones_like(received.tokens)
    mode.combine(y, received.plan, **given)
    torch.cuda.synchronize()
    if layout == "token_major":
        to = (idx // local_experts).sort(1).values
        ranks_of = 1 + (to.diff(dim=1) != 0).sum(1, keepdim=True)
        assert torch.equal(out.float(), ranks_of.expand_as(out).float()), "sums of ones"
    return partial(mode.combine, y.normal_(), received.plan, **given)


def times_of_rank(
    group: dist.ProcessGroup, ranks: int, every: list[dict[str, Any]], points: list[Point],
    parts: list[str],
) -> list[tuple[dict[str, Any], Point, dict[str, torch.Tensor], dict[str, Any]]]:  # fmt: skip
    """What this rank measured, in the order of changes, then points."""

    def wanted(name: str) -> bool:
        return any(part in name for part in parts)

    config = Config.resolve()
    results = max(
        bytes_for_results(room(ranks, point, layout), point[1][0], 2)
        for point in points
        for layout in LAYOUTS
    )
    nbytes = CudaHighThroughput.required_bytes(ranks, config, results)
    found = []
    for changes in every:
        grid = {"ctas": changes.get("ctas", CTAS), "senders": changes.get("senders")}
        constants = {name: value for name, value in changes.items() if name not in grid}
        memory = memory_of_gpus(as_group(group), nbytes, config)
        changed = mock.patch.multiple(kernels, **constants) if constants else nullcontext()
        with changed, mock.patch.dict(layout_kernel._loaded, clear=True):
            most = max(tokens for tokens, _ in points)
            mode = CudaHighThroughput(memory, config, max_tokens=most, result_bytes=results, **grid)
            clock = Clock(GpuBarrier(group, mode.device), mode.device, warmup=3, iterations=15)
            for point in points:
                samples = {
                    name: clock.alone(call, flushed=True)
                    for name, call in timed_calls(mode, ranks, point, wanted)
                }
                for name, layout in layout_calls(mode.device, ranks, point, wanted):
                    samples[name] = clock.alone(layout, flushed=True)
                    samples[f"{name}, host"] = clock.host(layout)
                mode.quiesce()
                found.append((changes, point, samples, device_properties(mode.device)))
        memory.close()
        torch.cuda.empty_cache()
    return found


def main() -> None:
    """Measures, prints a line for each point and appends it to the file."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("results", type=Path)
    parser.add_argument("changes", nargs="*", type=json.loads, default=[{}])
    parser.add_argument("--calls", default="dispatch,combine")
    parser.add_argument("--tokens", type=int, nargs="+", default=[4096])
    parser.add_argument("--geometry", nargs="+", default=["7168/8/256"])
    args = parser.parse_args()
    geometries = [tuple(int(part) for part in text.split("/")) for text in args.geometry]
    points = list(itertools.product(args.tokens, geometries))
    ranks = torch.cuda.device_count()
    given = (ranks, args.changes, points, args.calls.split(","))
    for of_ranks in zip(*launch(times_of_rank, ranks, given), strict=True):
        changes, (tokens, (hidden, top_k, experts)), first, device = of_ranks[0]
        slowest = {}
        for name in first:
            of_name = torch.stack([samples[name] for _, _, samples, _ in of_ranks])
            slowest[name] = float(of_name.amax(0).median())
        fields = {
            "ranks": ranks, "changes": changes, "tokens": tokens, "hidden": hidden, "top_k": top_k,
            "experts": experts, "times_us": {name: round(us, 1) for name, us in slowest.items()},
            "device": device, **origin(),
            "command": command_line(args.results),
        }  # fmt: skip
        append_json_line(args.results, fields)
        print(changes, tokens, hidden, fields["times_us"], flush=True)


if __name__ == "__main__":
    main()
