#!/usr/bin/env python3
"""While a kernel waits, does another one of the same process begin whose first launch this is?

    [CUDA_MODULE_LOADING=EAGER] python benchmarks/probes/first_launches.py FILE

Every operation is launched three times, each beside a kernel that keeps one SM busy for half a
second on another stream. A launch that has ended as late as that kernel has waited for it.
"""

from __future__ import annotations

import ctypes
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

BUSY_CYCLES = 1_000_000_000  # half a second
LAUNCHES = 3


def operations(device: torch.device) -> dict[str, Callable[[], object]]:
    """Each a kernel of its own, with memory that is there already."""
    x = torch.ones(64, dtype=torch.float32, device=device)
    double = torch.empty(64, dtype=torch.float64, device=device)
    order = torch.empty(64, dtype=torch.int64, device=device)
    return {
        "fill": lambda: double.fill_(1.0),
        "double": lambda: double.copy_(x),
        "add": lambda: torch.add(x, x, out=x),
        "sort": lambda: torch.sort(x, out=(x, order)),
        "copy to the GPU": lambda: x.copy_(torch.ones(64, dtype=torch.float32, device="cpu")),
    }


def milliseconds(begin: float) -> float:
    """Since then."""
    return round(1e3 * (time.perf_counter() - begin), 2)


def measure(operation: Callable[[], object], beside: torch.cuda.Stream) -> dict[str, float]:
    """How long one launch takes, until it has ended, and until the busy kernel has."""
    stream = torch.cuda.current_stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(beside):
        torch.cuda._sleep(BUSY_CYCLES)
    begin = time.perf_counter()
    operation()
    launched = milliseconds(begin)
    stream.synchronize()
    ended = milliseconds(begin)
    beside.synchronize()
    return {"launched_ms": launched, "ended_ms": ended, "busy_ms": milliseconds(begin)}


def main(results: Path) -> None:
    device = torch.device("cuda", 0)
    machine = {"gpu": torch.cuda.get_device_name(device), "torch": torch.__version__}
    mode = ctypes.c_int()
    ctypes.CDLL("libcuda.so.1").cuModuleGetLoadingMode(ctypes.byref(mode))
    loading = {1: "EAGER", 2: "LAZY"}[mode.value]
    own, beside = torch.cuda.Stream(), torch.cuda.Stream()
    with torch.cuda.stream(beside):
        torch.cuda._sleep(1000)
    with torch.cuda.stream(own), results.open("a", encoding="utf-8") as lines:
        for name, operation in operations(device).items():
            for number in range(1, LAUNCHES + 1):
                times = measure(operation, beside)
                line = {"operation": name, "launch": number, "loading": loading}
                lines.write(json.dumps({"probe": "first_launches", **line, **times, **machine}))
                lines.write("\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
