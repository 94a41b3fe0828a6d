"""How fast fanfold.deep_gemm's grouped products are, on one GPU: the two of an MoE layer of hidden
7168 and intermediate 2048 with 64 experts and top-8 of a random routing.

    python benchmarks/grouped_gemm.py RESULTS.jsonl

With sums in FP32, and with those that the tensor cores keep (fast_accumulation).

Median of 15 calls as CUDA graphs, each behind 10 ms of pause and a write of 512 MiB, which empties
the L2 and lasts longer than a launch.
"""

from __future__ import annotations

import itertools
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

from fanfold import deep_gemm
from fanfold.bench.report import origin

EXPERTS, TOP_K, HIDDEN, INTERMEDIATE = 64, 8, 7168, 2048
GEMMS = {"first": (2 * INTERMEDIATE, HIDDEN), "second": (HIDDEN, INTERMEDIATE)}
MOST_MASKED = 1024
Pair = tuple[torch.Tensor, torch.Tensor]


def rows_of(tokens: int) -> torch.Tensor:
    """Rows of each expert."""
    generator = torch.Generator().manual_seed(tokens)
    choices = torch.rand(tokens, EXPERTS, generator=generator).topk(TOP_K).indices
    return choices.flatten().bincount(minlength=EXPERTS)


def e4m3(*shape: int) -> torch.Tensor:
    made = torch.empty(shape, dtype=torch.float8_e4m3fn, device="cuda")
    for part in made:  # in parts, as values of float32 are four times as large
        part.copy_((64 * torch.randn(part.shape, device="cuda")).clamp(-448, 448))
    return made


def scales(*shape: int) -> torch.Tensor:
    return torch.rand(shape, device="cuda") / 64


def median_us(call: Callable[[], None]) -> float:
    flush = torch.empty(1 << 27, dtype=torch.int32, device="cuda")
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    taken = []
    for _ in range(3 + 15):
        torch.cuda.synchronize()
        time.sleep(0.01)
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        flush.zero_()
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        taken.append(1e3 * begin.elapsed_time(end))
    return statistics.median(taken[3:])


def contiguous(weights: Pair, tokens: int, fast: bool) -> float:
    _, columns, depth = weights[0].shape
    indices = []
    for group, rows in enumerate(rows_of(tokens).tolist()):
        part = torch.full((-(-rows // 128) * 128,), -1, dtype=torch.int32)
        part[:rows] = group
        indices.append(part)
    m_indices = torch.cat(indices).cuda()
    rows = len(m_indices)
    a = (
        e4m3(1, rows, depth)[0],
        deep_gemm.get_mn_major_tma_aligned_tensor(scales(rows, depth // 128)),
    )
    d = torch.empty(rows, columns, dtype=torch.bfloat16, device="cuda")
    call = deep_gemm.m_grouped_fp8_gemm_nt_contiguous
    return median_us(lambda: call(a, weights, d, m_indices, fast_accumulation=fast))


def masked(weights: Pair, tokens: int, fast: bool) -> float:
    groups, columns, depth = weights[0].shape
    rows = rows_of(tokens).int().cuda()
    shape = (groups, MOST_MASKED, depth // 128)
    a = e4m3(groups, MOST_MASKED, depth), deep_gemm.get_mn_major_tma_aligned_tensor(scales(*shape))
    d = torch.empty(groups, MOST_MASKED, columns, dtype=torch.bfloat16, device="cuda")
    expected = tokens * TOP_K // EXPERTS
    call = deep_gemm.m_grouped_fp8_gemm_nt_masked
    return median_us(lambda: call(a, weights, d, rows, expected, fast_accumulation=fast))


def main() -> int:
    results = Path(sys.argv[1])
    properties = torch.cuda.get_device_properties(0)
    with results.open("a") as file:

        def line(**fields: object) -> None:
            file.write(json.dumps(fields) + "\n")
            file.flush()
            print(fields, flush=True)

        command = "python benchmarks/grouped_gemm.py RESULTS"
        line(gpu=properties.name, command=command, **origin())
        for name, (columns, depth) in GEMMS.items():
            weights = e4m3(EXPERTS, columns, depth), scales(EXPERTS, columns // 128, depth // 128)
            cases = [
                *((contiguous, tokens) for tokens in (1024, 2048, 4096, 8192)),
                *((masked, tokens) for tokens in (32, 64, 128, 256, 512, 1024)),
            ]
            for (form, tokens), fast in itertools.product(cases, (False, True)):
                us = form(weights, tokens, fast)
                flops = 2 * tokens * TOP_K * columns * depth
                line(
                    bench="grouped_gemm", form=form.__name__, gemm=name, tokens=tokens,
                    fast_accumulation=fast, us=round(us, 1), tflops=round(flops / us * 1e-6, 1),
                )  # fmt: skip
    return 0


if __name__ == "__main__":
    sys.exit(main())
