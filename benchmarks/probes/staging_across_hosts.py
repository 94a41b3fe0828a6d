"""High throughput of two GPUs that act as two hosts: by kernels over rings, and by the CPUs, to
which tensors of GPUs are copied.

    python benchmarks/probes/staging_across_hosts.py RESULTS.jsonl
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import fanfold
from fanfold.config import Backend
from fanfold.launch import RankPool

TOKENS, HIDDEN, TOP_K, EXPERTS = 1024, 7168, 8, 256
SAMPLES = 8


def milliseconds(group: dist.ProcessGroup, call: Callable[[], object]) -> float:
    """The median of a call from a barrier until the GPU has its results."""
    times = []
    for _ in range(SAMPLES):
        torch.cuda.synchronize()
        dist.barrier(group)
        begin = time.perf_counter()
        call()
        torch.cuda.synchronize()
        times.append(1e3 * (time.perf_counter() - begin))
    return round(statistics.median(times), 2)


def measure(group: dist.ProcessGroup, network: str, backend: Backend) -> dict[str, Any]:
    """What one rank's calls take, with a cached and with a new routing."""
    device = torch.device("cuda", torch.cuda.current_device())
    numbers = torch.Generator(device).manual_seed(dist.get_rank(group))
    x = torch.randn(TOKENS, HIDDEN, dtype=torch.bfloat16, device=device, generator=numbers)
    chosen = [torch.randperm(EXPERTS, device=device, generator=numbers)[:TOP_K]
              for _ in range(TOKENS)]  # fmt: skip
    idx = torch.stack(chosen)
    weights = torch.rand(TOKENS, TOP_K, dtype=torch.float32, device=device, generator=numbers)
    sizes = {"num_experts": EXPERTS, "top_k": TOP_K, "hidden": HIDDEN, "max_tokens": TOKENS}
    config = fanfold.Config.resolve(backend=backend, hosts=2, network=network, timeout_s=60.0)
    with fanfold.HighThroughput(group, **sizes, config=config) as ep:
        received = ep.dispatch(x, idx, weights)
        calls = {
            "dispatch_ms": lambda: ep.dispatch(x, previous=received),
            "combine_ms": lambda: ep.combine(received.tokens, received),
            "new_dispatch_ms": lambda: ep.dispatch(x, idx, weights),
        }
        return {name: milliseconds(group, call) for name, call in calls.items()}


def main(results: Path) -> None:
    backends: tuple[Backend, ...] = ("cuda", "host")
    with results.open("a", encoding="utf-8") as lines:
        for network in ("libfabric:tcp", "libfabric:shm"):
            for backend in backends:
                with RankPool(2, timeout_s=100.0) as pool:
                    of_ranks = pool.run(measure, network, backend)
                for rank, times in enumerate(of_ranks):
                    line = {"network": network, "backend": backend, "rank": rank, **times}
                    lines.write(json.dumps({"probe": "staging_across_hosts", **line}) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
