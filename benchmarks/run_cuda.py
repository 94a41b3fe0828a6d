#!/usr/bin/env python3
r"""Measures both modes on the GPUs of one host: what is committed under benchmarks/results/.

    NCCL_NVLS_ENABLE=0 TORCH_SYMM_MEM_DISABLE_MULTICAST=1 \
        python benchmarks/run_cuda.py GPUS [--results FOLDER] [STEP...]     all but hosts by default

Without NVLink multicast, which Fanfold does not use, and the committed results are without.

    cuda_low_latency.jsonl, .png
        baseline       three geometries at 128 tokens, with NCCL and a product beside a waiting hook
        tokens         the same at 1 to 1024 tokens
        deep_ep        the same at 128 tokens through the DeepEP face, where weights come with
                       combine
    cuda_high_throughput.jsonl, .png
        fp8, bf16      hidden 7168 at 4096 tokens: both layouts and in place, cached and new
                       routings, with NCCL and beside a product; the same on 12 SMs
        more_tokens    at 8192 tokens, and at 512 to 2048
        sms            on 8 to 48 SMs
        geometries     five others at 4096 tokens
        deep_ep_rows   hidden 7168 at 4096 tokens through the DeepEP face
    cuda_few_tokens.jsonl, .png
        few_tokens     8 to 512 tokens of hidden 7168 in both modes, without the oracle
    cuda_faces.jsonl, .png
        faces          FP8, hidden 7168 at 4096 tokens, through every face: what the host takes
    cuda_expert_major.jsonl, .png
        expert_major   hidden 7168 at 4096 tokens on 24 and 12 SMs, with experts' rows padded to a
                       multiple of 128, and not padded
    cuda_padding.jsonl, .png
        padding        expert-major, aligned to 128, on 24 and 12 SMs: five geometries with padding
                       of zeros and with padding that is not written; the oracle looks at one
    cuda_hosts.jsonl, .png
        hosts          two geometries at 128 tokens, with this machine as two hosts, over sockets
                       and libfabric's shared memory

Each step starts its ranks once and writes its lines at its end, on a machine that does nothing
else. A step compiles its kernels first, if they are not in the cache.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from fanfold.bench import report
from fanfold.bench.run import sweep
from fanfold.bench.settings import BenchSettings
from fanfold.bench.timing import PHASES
from fanfold.cli.main import main as fanfold

MAIN = (7168, 8, 256)  # hidden, top-k, experts
LOW_LATENCY = (MAIN, (2048, 8, 512), (1024, 22, 512))
OTHERS = ((1024, 22, 512), (2048, 8, 512), (4096, 8, 128), (2880, 4, 128), (5120, 6, 160))
LAYOUTS = ("token_major", "expert_major")
DTYPES = ("fp8", "bf16")
Points = Iterator[BenchSettings]


def low_latency(ranks: int, tokens: int, geometry: tuple[int, int, int]) -> BenchSettings:
    """fp8 to the experts, weighted sums back."""
    hidden, top_k, experts = geometry
    return BenchSettings(
        "low_latency", ranks, tokens, hidden, top_k, experts, dtype="fp8", backend="cuda",
        iterations=200, warmup=20,
    )  # fmt: skip


def baseline(ranks: int) -> Points:
    """Of low latency, at 128 tokens."""
    for geometry in LOW_LATENCY:
        point = low_latency(ranks, 128, geometry)
        yield dataclasses.replace(point, baseline=True, overlap=True)


def tokens_of_low_latency(ranks: int) -> Points:
    """All other numbers of tokens."""
    for geometry, tokens in itertools.product(LOW_LATENCY, (1, 8, 32, 64, 256, 512, 1024)):
        yield low_latency(ranks, tokens, geometry)


def deep_ep(ranks: int) -> Points:
    """The geometries of ``baseline``, without what that compares with."""
    for geometry in LOW_LATENCY:
        yield dataclasses.replace(low_latency(ranks, 128, geometry), face="deep_ep")


def high_throughput(
    ranks: int, dtype: str, tokens: int = 4096, geometry: tuple[int, int, int] = MAIN
) -> BenchSettings:
    """Cached and token-major on 24 SMs, if nothing else is said."""
    hidden, top_k, experts = geometry
    return BenchSettings(
        "high_throughput", ranks, tokens, hidden, top_k, experts, dtype=dtype, backend="cuda",
        iterations=20, warmup=3, layout="token_major", routing="cached", sms=24,
    )  # fmt: skip


def kinds(point: BenchSettings, *, new: bool = True, in_place: bool = False) -> Points:
    """Both layouts and, if asked for, new routings and in place."""
    orders = itertools.product((False, True)[: 1 + in_place], LAYOUTS)
    for routing, (stays, layout) in itertools.product(("cached", "new")[: 1 + new], orders):
        yield dataclasses.replace(point, layout=layout, routing=routing, in_place=stays)


def main_geometry(dtype: str) -> Callable[[int], Points]:
    """The step of one dtype at 4096 tokens."""

    def step(ranks: int) -> Points:
        point = high_throughput(ranks, dtype)
        for kind in kinds(point, in_place=True):
            yield dataclasses.replace(kind, baseline=not kind.in_place, overlap=True)
        yield from kinds(dataclasses.replace(point, sms=12, check=False), new=False, in_place=True)

    return step


def more_tokens(ranks: int) -> Points:
    """Without the oracle at 8192 tokens, where it takes longest: the kinds are checked at 4096."""
    for dtype in DTYPES:
        point = dataclasses.replace(high_throughput(ranks, dtype, 8192), check=False)
        yield from kinds(point, in_place=True)
        for tokens in (512, 1024, 2048):
            yield from kinds(high_throughput(ranks, dtype, tokens), new=False)


def sms(ranks: int) -> Points:
    """More and fewer SMs."""
    for dtype, count in itertools.product(DTYPES, (8, 16, 20, 32, 48)):
        point = dataclasses.replace(high_throughput(ranks, dtype), sms=count, check=False)
        yield from kinds(point, new=False)


def geometries(ranks: int) -> Points:
    """Other hidden sizes, top-k and experts."""
    for geometry, dtype in itertools.product(OTHERS, DTYPES):
        for kind in kinds(high_throughput(ranks, dtype, geometry=geometry)):
            yield dataclasses.replace(kind, check=kind.routing == "cached")


def deep_ep_rows(ranks: int) -> Points:
    """Cached and new routings, in DeepEP's order of rows."""
    for dtype, routing in itertools.product(DTYPES, ("cached", "new")):
        yield dataclasses.replace(high_throughput(ranks, dtype), routing=routing, face="deep_ep")


def few_tokens(ranks: int) -> Points:
    """Low latency, then high throughput with new and cached routings in both orders."""
    counts = (8, 32, 64, 128, 256, 512)
    for tokens in counts:
        point = low_latency(ranks, tokens, MAIN)
        yield dataclasses.replace(point, iterations=50, warmup=5, check=False)
    for tokens, routing, layout in itertools.product(counts, ("new", "cached"), LAYOUTS):
        point = dataclasses.replace(high_throughput(ranks, "fp8", tokens), check=False)
        yield dataclasses.replace(point, routing=routing, layout=layout)


def elastic_few(ranks: int) -> Points:
    """ElasticBuffer's plain dispatches, by the protocol that ``FANFOLD_FEW_TOKENS`` says."""
    tokens = {"fp8": (8, 32, 64, 128, 256, 512, 1024, 2048, 4096), "bf16": (128, 1024, 2048)}
    for dtype, counts in tokens.items():
        for count in counts:
            point = dataclasses.replace(high_throughput(ranks, dtype, count), check=False)
            yield dataclasses.replace(point, routing="new", face="elastic")


def faces(ranks: int) -> Points:
    """Cached and new routings, each order of rows in which a face has them."""
    point = high_throughput(ranks, "fp8")
    both = ("native", "elastic")
    orders = {"token_major": (*both, "deep_ep"), "expert_major": (*both, "hybridep")}
    for layout, of_layout in orders.items():
        for face, routing in itertools.product(of_layout, ("cached", "new")):
            yield dataclasses.replace(point, layout=layout, face=face, routing=routing)


def expert_major(ranks: int) -> Points:
    """Cached, with and without padding."""
    for dtype, count, alignment in itertools.product(DTYPES, (24, 12), (128, 1)):
        point = high_throughput(ranks, dtype)
        yield dataclasses.replace(point, layout="expert_major", sms=count, alignment=alignment)


def padding(ranks: int) -> Points:
    """Cached; compared with the oracle on 24 SMs with hidden 7168."""
    geometries = itertools.product((MAIN, *OTHERS[:4]), DTYPES)
    for (geometry, dtype), count, zeros in itertools.product(geometries, (24, 12), (True, False)):
        point = high_throughput(ranks, dtype, geometry=geometry)
        checked = (geometry, count) == (MAIN, 24)
        yield dataclasses.replace(
            point, layout="expert_major", sms=count, zero_padding=zeros, check=checked
        )


def hosts(ranks: int) -> Points:
    """Low latency of ranks on two hosts."""
    networks = ("libfabric:tcp", "libfabric:shm")
    for geometry, network in itertools.product((MAIN, (1024, 22, 512)), networks):
        point = dataclasses.replace(low_latency(ranks, 128, geometry), iterations=50, calls=10)
        yield dataclasses.replace(point, hosts=2, transport=network)


STEPS: dict[str, Callable[[int], Points]] = {
    "baseline": baseline,
    "tokens": tokens_of_low_latency,
    "deep_ep": deep_ep,
    "fp8": main_geometry("fp8"),
    "bf16": main_geometry("bf16"),
    "more_tokens": more_tokens,
    "sms": sms,
    "geometries": geometries,
    "deep_ep_rows": deep_ep_rows,
    "few_tokens": few_tokens,
    "elastic_few": elastic_few,
    "faces": faces,
    "expert_major": expert_major,
    "padding": padding,
    "hosts": hosts,
}
ON_REQUEST = ("hosts", "elastic_few")
"""Steps that not every machine can make."""
OWN_FILES = ("few_tokens", "elastic_few", "faces", "expert_major", "padding", "hosts")
"""Steps whose results stand apart, as they may be of another number of GPUs."""


def run(name: str, ranks: int, folder: Path) -> Path:
    """Appends the results of one step to its file, which it returns."""
    points = list(STEPS[name](ranks))
    file = folder / f"cuda_{name if name in OWN_FILES else points[0].mode}.jsonl"
    begin = time.monotonic()
    for result in sweep(points) or ():
        settings = result.settings
        command = " ".join(["benchmarks/run_cuda.py", str(ranks), name])
        report.append_json_line(file, {**report.record(result), "command": command})
        times = {phase: f"{result.fanfold.slowest(phase).p50:.1f}" for phase in PHASES}
        kind = (settings.layout, settings.routing, settings.sms, settings.in_place)
        kind = (*kind, settings.face) if settings.face != "native" else kind
        kind = (*kind, "unwritten") if settings.zero_padding is False else kind
        print(settings.tokens, settings.hidden, settings.dtype, *kind, times, flush=True)
    print(f"{name}: {time.monotonic() - begin:.0f} s", flush=True)
    return file


def main() -> None:
    """Runs the steps that are named, then draws what is there."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("gpus", type=int, metavar="GPUS")
    parser.add_argument("steps", nargs="*", metavar="STEP", help=f"of {', '.join(STEPS)}")
    parser.add_argument("--results", type=Path, default=Path(__file__).parent / "results")
    args = parser.parse_args()
    steps = args.steps or [name for name in STEPS if name not in ON_REQUEST]
    if unknown := set(steps) - set(STEPS):
        parser.error(f"{', '.join(sorted(unknown))}: not one of {', '.join(STEPS)}")
    args.results.mkdir(parents=True, exist_ok=True)
    files = {run(name, args.gpus, args.results) for name in steps}
    for file in sorted(files):
        if fanfold(["plot", str(file), "--out", str(file.with_suffix(".png"))]) != 0:
            raise SystemExit(1)


if __name__ == "__main__":
    main()
