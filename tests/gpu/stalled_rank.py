"""A program of one rank, for test_cuda_faults.py: rank 1 stops calling, the others end in order.

Use: python stalled_rank.py FOLDER low_latency|high_throughput
     with RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT in the environment
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import fanfold
from fanfold.bench.dispatchers import open_dispatcher
from fanfold.launch import join

STALLED = 1
LIMIT_S = 60.0


def _wait_for_the_others(folder: Path, ranks: int) -> None:
    """Until every other rank has left its mark."""
    end = time.monotonic() + LIMIT_S
    while len(list(folder.iterdir())) < ranks - 1:
        if time.monotonic() > end:
            raise TimeoutError(f"not all of {ranks - 1} ranks have left their mark in {folder}")
        time.sleep(0.05)


def _experts() -> int:
    return 4 * int(os.environ["WORLD_SIZE"])


def _open(group: Any, mode: Any, timeout_s: float) -> Any:
    return open_dispatcher(
        mode, group, num_experts=_experts(), top_k=2, hidden=256, max_tokens=8,
        config=fanfold.Config.resolve(backend="cuda", timeout_s=timeout_s),
    )  # fmt: skip


def _round(ep: Any) -> None:
    x = torch.ones((8, 256), dtype=torch.bfloat16, device="cuda")
    topk_idx = torch.arange(16, device="cuda").view(8, 2) % _experts()
    received = ep.dispatch(x, topk_idx)
    ep.combine(received.tokens, received)
    ep.synchronize()


def _run(folder: Path, mode: str) -> int:
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.cuda.set_device(rank % torch.cuda.device_count())
    group = join()
    with _open(group, mode, 30.0) as ep:  # compiles, which may take longer than the bound below
        _round(ep)
    ep = _open(group, mode, 2.0)
    _round(ep)
    if rank == STALLED:
        print("stalled", flush=True)
        _wait_for_the_others(folder, ranks)
        return 0
    start = time.monotonic()
    try:
        _round(ep)
    except fanfold.PeerTimeout as error:
        seconds = time.monotonic() - start
        print(f"PeerTimeout of rank {error.peer} after {seconds:.2f} s: {error}", flush=True)
        (folder / f"rank{rank}").touch()
        return 0 if seconds < 15.0 else 4
    print("nothing was raised")
    return 3


if __name__ == "__main__":
    exit_code = _run(Path(sys.argv[1]), sys.argv[2])
    # PyTorch may abort a process that still holds a gloo group when the interpreter ends.
    dist.destroy_process_group()
    sys.exit(exit_code)
