#!/usr/bin/env python3
"""Times PyTorch's dense FP8 product with one scale per tensor: what the GPU reaches without blocks.

python3 dense.py RESULTS.jsonl
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import torch

SIZES = ((8192, 8192, 8192), (65536, 4096, 7168), (65536, 7168, 2048))
PAUSE, FLUSH = "flush and pause", "flush"


def microseconds(m: int, n: int, k: int, fast_accum: bool, between: str) -> float:
    """The median of 15 calls, each after the L2 was overwritten."""
    device = torch.device("cuda")
    flush = torch.empty(256 << 20, dtype=torch.uint8, device=device)
    a = (torch.randn(m, k, device=device) * 160).to(torch.float8_e4m3fn)
    b = (torch.randn(n, k, device=device) * 160).to(torch.float8_e4m3fn).t()
    scale = torch.ones((), device=device) / 160
    times = []
    for i in range(-3, 15):
        if between == PAUSE:
            torch.cuda.synchronize()
            time.sleep(0.01)
        flush.fill_(i & 0xFF)
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        torch._scaled_mm(a, b, scale, scale, out_dtype=torch.bfloat16, use_fast_accum=fast_accum)
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3)
    return sorted(times[3:])[7]


def main() -> None:
    with Path(sys.argv[1]).open("a") as results:
        machine = {
            "machine": torch.cuda.get_device_name(),
            "torch": torch.__version__,
            "command": "benchmarks/probes/fused_moe/dense.py RESULTS",
        }
        results.write(json.dumps(machine) + "\n")
        for m, n, k in SIZES:
            for between in (PAUSE, FLUSH):
                for fast in (True, False):
                    us = microseconds(m, n, k, fast, between)
                    line = {
                        "probe": "dense", "m": m, "n": n, "k": k, "fast_accum": fast,
                        "between": between, "us": round(us, 1),
                        "tflops": round(2e-6 * m * n * k / us),
                    }  # fmt: skip
                    results.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main()
