#!/usr/bin/env python3
"""Times the kernels of one rank of many on two GPUs.

    python benchmarks/mirror.py RESULTS.jsonl [--ranks 4] [--tokens 128,8] [--late-weights]
    python benchmarks/mirror.py RESULTS.jsonl --high-throughput [--tokens 4096,8192] [--sms 12,24]
        [--transfers push,pull] [--senders 0,2,4] [--calls cached]
    python benchmarks/mirror.py RESULTS.jsonl --plot PICTURE.svg      # draws these

Each of the two GPUs is rank 0 of ``ranks``, and the other stands for all its peers: what a GPU
sends to rank p comes to the other as if from rank -p. So each sends and receives over NVLink what
one of ``ranks`` GPUs does, and runs the kernels compiled for that number; what differs from a real
host of as many GPUs is that its ranks do not drift apart in more than two ways. Results say
``"mirror": true`` and are no substitute for a run on all GPUs.

What arrives is compared with what the routing says before anything is timed: in low latency the
rows of each expert, and the sums that combine makes of ones. In high throughput the places that a
plan gives rows on other ranks are as if all ranks had the routing of this one, so that only sums of
ones are compared; the kernels' results are for tests/gpu to check.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch
import torch.distributed as dist

from fanfold.backends.high_throughput import kernels as packed_kernels
from fanfold.backends.high_throughput.cuda import CudaHighThroughput
from fanfold.backends.high_throughput.in_place import bytes_for_results
from fanfold.backends.low_latency import cuda_required_bytes, kernels
from fanfold.backends.low_latency.cuda import CudaLowLatency
from fanfold.bench.cuda_run import device_properties
from fanfold.bench.cuda_timing import Clock, GpuBarrier, empty_kernel
from fanfold.bench.report import append_json_line, command_line, origin
from fanfold.cli.plot import save
from fanfold.config import Config
from fanfold.formats import RowFormat, ScaleFormat, quantize
from fanfold.geometry import Geometry
from fanfold.group import Group, as_group
from fanfold.launch import launch
from fanfold.memory.cuda import CudaSymmetricMemory

if TYPE_CHECKING:
    from matplotlib.axes import Axes

GPUS = 2
GEOMETRIES = ((7168, 8, 256), (2048, 8, 512), (1024, 22, 512))  # hidden, top-k, experts
LEAST_MAX_TOKENS = 128
CALLS = 20
_sizes = kernels._sizes


def _mirrored(geometry: Geometry) -> dict[str, int]:
    return {**_sizes(geometry), "kMirror": 1}


class _MirrorMemory:
    """The memory of two GPUs as that of ``ranks``."""

    def __init__(self, group: Group, ranks: int, nbytes: int) -> None:
        self._memory = CudaSymmetricMemory(group, nbytes)
        self._own = group.rank
        self.rank, self.ranks, self.group = 0, ranks, group
        self.device, self.bytes_per_rank = self._memory.device, nbytes
        self.usable_bytes, self.between = self._memory.usable_bytes, None
        self.tensor, self.close = self._memory.tensor, self._memory.close

    def base(self, peer: int) -> int:
        """Address of the memory that stands for ``peer``'s."""
        return self._memory.base(self._own if peer == 0 else 1 - self._own)


def _batch(geometry: Geometry, tokens: int, seed: int) -> tuple[torch.Tensor, ...]:
    numbers = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, geometry.hidden, generator=numbers).bfloat16()
    scores = torch.rand(tokens, geometry.num_experts, generator=numbers)
    weights = torch.rand(tokens, geometry.top_k, generator=numbers)
    return x, scores.topk(geometry.top_k, dim=1).indices, weights


def _expected_counts(geometry: Geometry, own: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    locals_ = geometry.experts_per_rank
    counts = torch.bincount(own.flatten(), minlength=geometry.num_experts)[:locals_]
    elsewhere = torch.bincount(other.flatten(), minlength=geometry.num_experts)
    return counts + elsewhere[locals_:].view(-1, locals_).sum(0)


def _measure(
    group: dist.ProcessGroup, geometry: Geometry, tokens: int, late: bool
) -> dict[str, torch.Tensor]:
    """Samples of this GPU in microseconds, by what was timed."""
    rank = dist.get_rank(group)
    memory = _MirrorMemory(
        as_group(group), geometry.ranks, cuda_required_bytes(geometry, late_weights=late)
    )
    mode = CudaLowLatency(memory, Config.resolve(), late)  # type: ignore[arg-type]
    device = memory.device
    batches = [_batch(geometry, tokens, seed) for seed in range(GPUS)]
    x, topk_idx, weights = (tensor.to(device) for tensor in batches[rank])
    fp8 = (RowFormat.FP8, ScaleFormat.FLOAT32)
    with_dispatch = {} if late else {"topk_weights": weights}
    with_combine = {"late_weights": weights} if late else {}
    out = torch.full_like(x, torch.nan)

    def dispatch() -> Any:
        return mode.dispatch(geometry, x, topk_idx, formats=fp8, **with_dispatch)[0]

    received = dispatch()

    def combine(y: torch.Tensor, routing: Any) -> None:
        mode.combine(geometry, y, routing, topk_idx, out=out, **with_combine)

    shape = (geometry.experts_per_rank, geometry.expert_capacity, geometry.hidden)
    combine(torch.ones(shape, dtype=torch.bfloat16, device=device), received.routing)
    torch.cuda.synchronize()
    mode.check()
    expected = _expected_counts(geometry, batches[rank][1], batches[1 - rank][1])
    assert torch.equal(received.counts.cpu().long(), expected), "rows of each expert"
    sums = weights.sum(1, keepdim=True).expand_as(x)
    torch.testing.assert_close(out.float(), sums, rtol=0.02, atol=0.0)

    y = torch.randn(shape, device=device).bfloat16()
    clock = Clock(GpuBarrier(group, device), device, warmup=10, iterations=60)
    calls = {
        "dispatch": dispatch,
        "combine": partial(combine, y, received.routing),
        "round": lambda: combine(y, dispatch().routing),
    }
    samples: dict[str, torch.Tensor] = {}
    for name, call in (*calls.items(), ("empty", empty_kernel)):
        samples[f"{name}.graph"] = clock.chain(call, CALLS)
        samples[f"{name}.alone_raw"] = clock.alone(call, flushed=False)
        samples[f"{name}.l2_flushed_raw"] = clock.alone(call, flushed=True)
    mode.check()
    memory.close()
    return samples


# ---- high throughput ----------------------------------------------------------------------------

PACKED = ((7168, 8, 256), (1024, 22, 512), (2048, 8, 256), (4096, 8, 256), (2880, 4, 128),
          (5120, 8, 256))  # fmt: skip
ALIGNMENT = 128
LINK_GB_S = 375  # that one H200 sends to three (docs/performance.md)
_constants = packed_kernels.Sizes.constants


_Grid = tuple[int, Any, int]  # SMs; how rows move; senders, or 0


def _packed_mirrored(sizes: packed_kernels.Sizes) -> dict[str, int]:
    return {**_constants(sizes), "kMirror": 1}


def _capacity(geometry: Geometry, tokens: int, layout: str) -> int:
    # Places elsewhere are reckoned with the own routing, so a few may lie behind the last row.
    if layout == "token_major":
        return tokens * geometry.ranks * 11 // 10
    return tokens * geometry.top_k * 11 // 10 + ALIGNMENT * geometry.experts_per_rank


def _measure_packed(
    mode: CudaHighThroughput, geometry: Geometry, tokens: int, clock: Clock, fp8: bool,
    layout: Any, wanted: list[str],
) -> dict[str, torch.Tensor]:  # fmt: skip
    """Samples of this GPU in microseconds: dispatch with a known and a new routing (expert-major in
    place, too) and combine, as far as they are ``wanted``; all if that is empty."""
    device, rank = mode.device, dist.get_rank()
    x, topk_idx, weights = (tensor.to(device) for tensor in _batch(geometry, tokens, rank))
    rows: Any = quantize(x) if fp8 else x
    expert_major = layout == "expert_major"
    capacity = _capacity(geometry, tokens, layout)
    options = {"num_experts": geometry.num_experts, "layout": layout, "capacity": capacity}
    if expert_major:
        options["expert_alignment"] = ALIGNMENT

    def new(**more: Any) -> Any:
        return mode.dispatch(rows, topk_idx, weights, **options, **more)

    received = new()
    plan = received.plan
    cached = partial(mode.dispatch_cached, rows, plan, layout=layout)
    calls: dict[str, Any] = {"new": new, "cached": cached}
    if expert_major:
        calls["new_in_place"] = partial(new, in_place=True)
        calls["cached_in_place"] = partial(cached, in_place=True)
    if not fp8:
        y = torch.ones((capacity, geometry.hidden), dtype=torch.bfloat16, device=device)
        row_weights = received.row_weights if expert_major else None
        out = torch.full_like(x, torch.nan)

        def combine() -> None:
            mode.combine(y, plan, layout=layout, row_weights=row_weights, out=out)

        combine()
        torch.cuda.synchronize()
        if not expert_major:
            ranks = (topk_idx // geometry.experts_per_rank).sort(1).values
            sums = 1 + (ranks.diff(dim=1) != 0).sum(1, keepdim=True)
            assert torch.equal(out.float(), sums.expand_as(out).float()), "sums of ones"
        calls["combine"] = combine
    mode.quiesce()
    calls = {name: call for name, call in calls.items() if not wanted or name in wanted}
    samples: dict[str, torch.Tensor] = {}
    for name, call in (*calls.items(), ("empty", empty_kernel)):
        samples[f"{name}.l2_flushed_raw"] = clock.alone(call, flushed=True)
        samples[f"{name}.graph"] = clock.chain(call, 4)
    mode.quiesce()
    return samples


def _packed_rank(
    group: dist.ProcessGroup,
    ranks: int,
    tokens_list: list[int],
    grids: list[_Grid],
    wanted: list[str],
) -> list[tuple[dict[str, Any], dict[str, torch.Tensor], dict[str, Any]]]:
    found = []
    results = max(
        bytes_for_results(
            _capacity(Geometry(ranks, experts, top_k, hidden, 0), tokens, "expert_major"), hidden, 2
        )
        for (hidden, top_k, experts), tokens in itertools.product(PACKED, tokens_list)
    )
    nbytes = CudaHighThroughput.required_bytes(ranks, Config.resolve(), results)
    with mock.patch.object(packed_kernels.Sizes, "constants", _packed_mirrored):
        for sms, transfer, senders in grids:
            memory = _MirrorMemory(as_group(group), ranks, nbytes)
            mode = CudaHighThroughput(
                memory,  # type: ignore[arg-type]
                Config.resolve(dispatch_transfer=transfer),
                max_tokens=max(tokens_list),
                ctas=sms,
                senders=senders or None,
                result_bytes=results,
            )
            device = memory.device
            clock = Clock(GpuBarrier(group, device), device, warmup=3, iterations=15)
            for tokens, (hidden, top_k, experts), fp8, layout in itertools.product(
                tokens_list, PACKED, (True, False), ("token_major", "expert_major")
            ):
                of_all = sms in (12, 24) and tokens == tokens_list[0] and not senders
                if (hidden, top_k, experts) != PACKED[0] and not of_all:
                    continue
                geometry = Geometry(ranks, experts, top_k, hidden, tokens)
                what = {
                    "hidden": hidden, "top_k": top_k, "experts": experts, "tokens": tokens,
                    "sms": sms, "transfer": transfer, "senders": senders or None,
                    "layout": layout, "dtype": "fp8" if fp8 else "bf16",
                }  # fmt: skip
                samples = _measure_packed(mode, geometry, tokens, clock, fp8, layout, wanted)
                found.append((what, samples, device_properties(device)))
                torch.cuda.empty_cache()
            memory.close()
    return found


# ---- both ---------------------------------------------------------------------------------------


def _rank(
    group: dist.ProcessGroup, ranks: int, tokens_list: list[int], late: bool
) -> list[tuple[dict[str, Any], dict[str, torch.Tensor], dict[str, Any]]]:
    found = []
    with mock.patch.object(kernels, "_sizes", _mirrored):
        for tokens in tokens_list:
            for hidden, top_k, experts in GEOMETRIES:
                geometry = Geometry(ranks, experts, top_k, hidden, max(tokens, LEAST_MAX_TOKENS))
                what = {
                    "hidden": hidden, "top_k": top_k, "experts": experts, "tokens": tokens,
                    "late_weights": late, "dtype": "fp8",
                }  # fmt: skip
                samples = _measure(group, geometry, tokens, late)
                found.append((what, samples, device_properties(torch.device("cuda", 0))))
                torch.cuda.empty_cache()
    return found


# ---- pictures -----------------------------------------------------------------------------------

PANELS = (
    ("dispatch, fp8", "fp8", ("cached", "new")),
    ("dispatch, bf16", "bf16", ("cached", "new")),
    ("combine, bf16", "bf16", ("combine",)),
)
KINDS = (("token-major", "token_major", ""), ("expert-major", "expert_major", ""),
         ("expert-major, in place", "expert_major", "_in_place"))  # fmt: skip
SCALE_US = (200, 300, 400, 500, 600, 800, 1000)


def _geometry(point: dict[str, Any]) -> tuple[int, int, int]:
    return point["hidden"], point["top_k"], point["experts"]


def _plot(results: Path, picture: Path) -> None:
    """High throughput: the times over the number of SMs, and on 24 those of each geometry; and what
    the link alone would take."""
    from matplotlib.figure import Figure

    points = [json.loads(line) for line in results.read_text().splitlines()]
    points = [point for point in points if point["tokens"] == 4096]
    figure = Figure(figsize=(9.6, 7.0), layout="constrained")
    grid = figure.subplots(2, len(PANELS), sharey="row")
    for (over_sms, geometries), (title, dtype, calls) in zip(grid.T, PANELS, strict=True):
        over_sms.set_title(title, fontsize="medium")
        _draw_over_sms(over_sms, [p for p in points if _geometry(p) == PACKED[0]], dtype, calls)
        _draw_geometries(geometries, [p for p in points if p["sms"] == 24], dtype, calls)
    for axes in figure.axes:
        axes.grid(axis="y", alpha=0.3)
        axes.set_axisbelow(True)
    for axes, what in zip(grid[:, 0], ("{} / {} / {}".format(*PACKED[0]), "24 SMs"), strict=True):
        axes.set_ylabel(f"{what}\nµs, one call, L2 flushed")
    grid[0][0].set_yscale("log")
    grid[0][0].set_yticks(SCALE_US, list(map(str, SCALE_US)), minor=False)
    grid[0][0].set_yticks([], minor=True)
    grid[0][1].set_xlabel("SMs of each kernel")
    grid[1][1].set_xlabel("hidden, top-k, experts")
    gpu = f"{points[0]['ranks']} ranks mirrored on {GPUS} × {points[0]['device']['name']}"
    figure.suptitle(f"High throughput, 4096 tokens per rank, {gpu}", fontsize="medium")
    new = "with new routing (below: pale)"
    grid[0][0].plot([], [], color="gray", ls=":", marker=".", label=new)
    lines, labels = grid[0][0].get_legend_handles_labels()
    figure.legend(lines, labels, loc="outside lower center", ncols=len(lines), fontsize="small")
    save(figure, picture)


def _times(
    points: list[dict[str, Any]], layout: str, dtype: str, call: str, by: str
) -> dict[int, float]:
    """What ``call`` took where it was measured, by the field ``by``."""
    of = [point for point in points if (point["layout"], point["dtype"]) == (layout, dtype)]
    times = {point[by]: point["times_us"].get(f"{call}.l2_flushed_raw") for point in of}
    return {place: time for place, time in times.items() if time is not None}


def _draw_over_sms(
    axes: Axes, points: list[dict[str, Any]], dtype: str, calls: tuple[str, ...]
) -> None:
    for (color, (label, layout, where)), call in itertools.product(enumerate(KINDS), calls):
        times = _times(points, layout, dtype, call + where, "sms")
        if not times:
            continue
        style = {"ls": ":", "marker": "."} if call == "new" else {"marker": "o", "label": label}
        axes.plot(*zip(*sorted(times.items()), strict=True), color=f"C{color}", ms=4, **style)
    limit = _link_us(points[0]["ranks"], PACKED[0], dtype)
    axes.axhline(limit, color="black", ls="--", lw=1.2, label=f"link at {LINK_GB_S} GB/s")
    axes.annotate(f"{limit:.0f}", (0.01, limit), xycoords=("axes fraction", "data"), va="bottom",
                  xytext=(0, 1), textcoords="offset points", fontsize="small")  # fmt: skip
    axes.set_xticks(sorted({point["sms"] for point in points}))


def _draw_geometries(
    axes: Axes, points: list[dict[str, Any]], dtype: str, calls: tuple[str, ...]
) -> None:
    geometries = [geometry for geometry in PACKED if geometry in map(_geometry, points)]
    places = range(len(geometries))
    width = 0.8 / (len(KINDS) if "new" in calls else 2)
    for (color, (_, layout, where)), call in itertools.product(enumerate(KINDS), calls):
        times = _times(points, layout, dtype, call + where, "hidden")
        if not times:
            continue
        heights = [times[hidden] for hidden, _, _ in geometries]
        lefts = [place - 0.4 + color * width for place in places]
        is_new = call == "new"
        axes.bar(
            lefts, heights, 0.95 * width, align="edge", color=f"C{color}",
            alpha=0.4 if is_new else 1.0, zorder=1 if is_new else 2,
        )  # fmt: skip
    limits = [_link_us(points[0]["ranks"], each, dtype) for each in geometries]
    axes.hlines(limits, [p - 0.45 for p in places], [p + 0.45 for p in places], "black", "--",
                lw=1.2, zorder=3)  # fmt: skip
    axes.set_xticks(list(places), ["\n".join(map(str, each)) for each in geometries],
                    fontsize="small")  # fmt: skip


def _link_us(ranks: int, geometry: tuple[int, int, int], dtype: str) -> float:
    """Microseconds for the rows that a rank sends to others, if each expert is as likely."""
    hidden, top_k, experts = geometry
    local = experts // ranks
    missed = math.comb(experts - local, top_k) / math.comb(experts, top_k)
    row_bytes = 2 * hidden if dtype == "bf16" else hidden + 4 * -(-hidden // 128)
    return 4096 * (ranks - 1) * (1 - missed) * row_bytes / LINK_GB_S / 1000


def main() -> None:
    """Measures, prints a line for each point and appends it to the file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("results", type=Path)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--tokens", help="numbers with commas; 128, or 4096 in high throughput")
    parser.add_argument("--high-throughput", action="store_true")
    parser.add_argument("--sms", default="24", help="high throughput: numbers with commas")
    for option, default, what in (
        ("transfers", "auto", "how dispatches move rows: auto, push, pull"),
        ("senders", "0", "CTAs that send in a dispatch; 0 for the library's choice"),
        ("calls", "", "new, cached, new_in_place, cached_in_place, combine; else all"),
    ):
        help_text = f"high throughput: {what}, with commas"
        parser.add_argument(f"--{option}", default=default, help=help_text)
    parser.add_argument("--late-weights", action="store_true", help="as the DeepEP face has them")
    parser.add_argument("--plot", type=Path, metavar="PICTURE", help="draw, and measure nothing")
    args = parser.parse_args()
    if args.plot is not None:
        _plot(args.results, args.plot)
        return
    tokens = _numbers(args.tokens or ("4096" if args.high_throughput else "128"))
    if args.high_throughput:
        transfers, senders = args.transfers.split(","), _numbers(args.senders)
        grids = list(itertools.product(_numbers(args.sms), transfers, senders))
        wanted = args.calls.split(",") if args.calls else []
        of_rank = launch(_packed_rank, GPUS, (args.ranks, tokens, grids, wanted))
    else:
        of_rank = launch(_rank, GPUS, (args.ranks, tokens, args.late_weights))
    for point in zip(*of_rank, strict=True):
        what, first, facts = point[0]
        slowest = {
            name: float(torch.stack([samples[name] for _, samples, _ in point]).amax(0).median())
            for name in first
        }
        times = {name: round(value, 2) for name, value in slowest.items()}
        append_json_line(
            args.results,
            {
                "mirror": True, "gpus": GPUS, "ranks": args.ranks, **what, "times_us": times,
                "device": facts, **origin(),
                "command": command_line(args.results),
            },
        )  # fmt: skip
        shown = "l2_flushed_raw" if args.high_throughput else "graph"
        print(what, {n.split(".")[0]: t for n, t in times.items() if n.endswith(shown)})


def _numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]


if __name__ == "__main__":
    main()
