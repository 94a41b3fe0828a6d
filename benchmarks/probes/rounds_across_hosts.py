"""Low latency of two ranks on two hosts, which share one GPU by time slices: how long calls and
their halves take, together and one rank at a time.

    python benchmarks/probes/rounds_across_hosts.py libfabric:tcp 7168 8 256 RESULTS.jsonl
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
from fanfold.launch import RankPool

TOKENS = 128
SAMPLES = 12
LATE_S = 0.02


class Rounds:
    """One rank's calls.

    Args:
        group: two ranks.
        network: between them.
        sizes: hidden, top-k and experts.
    """

    def __init__(self, group: dist.ProcessGroup, network: str, sizes: tuple[int, int, int]) -> None:
        hidden, top_k, experts = sizes
        self.group, self.rank = group, dist.get_rank(group)
        device = torch.device("cuda", torch.cuda.current_device())
        random = torch.Generator(device).manual_seed(self.rank)
        options: dict[str, Any] = {"device": device, "generator": random, "dtype": torch.float32}
        config = fanfold.Config.resolve(
            backend="cuda", share_gpus=True, hosts=2, network=network, timeout_s=20.0
        )
        self.ep = fanfold.LowLatency(
            group, num_experts=experts, top_k=top_k, hidden=hidden, max_tokens=TOKENS,
            dispatch_dtype="fp8", config=config,
        )  # fmt: skip
        self.x = torch.randn((TOKENS, hidden), **options).bfloat16()
        self.topk_idx = torch.rand((TOKENS, experts), **options).topk(top_k, dim=1).indices
        self.topk_weights = torch.rand((TOKENS, top_k), **options)
        self.received = self.dispatch()
        shape = (*self.received.tokens.shape[:-1], hidden)
        self.y = torch.zeros(shape, dtype=torch.bfloat16, device=device)
        self.combine()
        torch.cuda.synchronize()

    def dispatch(self) -> Any:
        return self.ep.dispatch(self.x, self.topk_idx, self.topk_weights)

    def combine(self) -> Any:
        return self.ep.combine(self.y, self.received)

    def both(self) -> Any:
        self.received = self.dispatch()
        return self.combine()

    def timed(self, call: Callable[[], Any], late_s: float = 0.0) -> list[float]:
        """Milliseconds of ``call`` on the GPU, with rank 1 so much later: median, least, most."""
        samples = []
        for _ in range(SAMPLES):
            dist.barrier(self.group)
            time.sleep(late_s * self.rank)
            samples.append(_milliseconds(call))
        return _spread(samples)

    def receiving(self) -> list[float]:
        """Likewise of the receive half of a combine: rows are there, and the GPU is free."""
        samples = []
        for _ in range(SAMPLES):
            _, hook = self.ep.combine(self.y, self.received, return_hook=True)
            torch.cuda.synchronize()
            time.sleep(2 * LATE_S)
            dist.barrier(self.group)
            time.sleep(LATE_S * self.rank)
            samples.append(_milliseconds(hook))
        return _spread(samples)


def _milliseconds(call: Callable[[], Any]) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    call()
    end.record()
    torch.cuda.synchronize()
    return float(begin.elapsed_time(end))


def _spread(samples: list[float]) -> list[float]:
    return [round(of(samples), 2) for of in (statistics.median, min, max)]


def measure(
    group: dist.ProcessGroup, network: str, sizes: tuple[int, int, int]
) -> dict[str, list[float]]:
    """What one rank finds."""
    rounds = Rounds(group, network, sizes)
    found = {
        "dispatch": rounds.timed(rounds.dispatch),
        "combine": rounds.timed(rounds.combine),
        "both": rounds.timed(rounds.both),
        "combine_rank_1_late": rounds.timed(rounds.combine, LATE_S),
        "combine_receive_one_by_one": rounds.receiving(),
    }
    dist.barrier(group)
    rounds.ep.close()
    return found


def main() -> None:
    """Measures, and appends a line for each rank."""
    network, *sizes, path = sys.argv[1:]
    with RankPool(2, timeout_s=60.0) as pool:
        found = pool.run(measure, network, tuple(map(int, sizes)))
    with Path(path).open("a") as results:
        for rank, each in enumerate(found):
            line = {"network": network, "sizes": [*map(int, sizes)], "rank": rank, **each}
            results.write(json.dumps(line) + "\n")
            print(json.dumps(line))


if __name__ == "__main__":
    main()
