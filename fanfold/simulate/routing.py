"""Which rows go where: the routings of ``fanfold.bench.workload``, counted."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np
import torch

from fanfold.bench.workload import Workload
from fanfold.simulate.engine import Floats

__all__ = ["Rows", "draw"]

# Random numbers that one call may draw: about a quarter of a second. Further ranks reuse them.
_MOST_NOISE = 1 << 23


@dataclass(frozen=True)
class Rows:
    """How many rows each rank has for each destination.

    Attributes:
        entries: ``[ranks, ranks]`` (token, expert) pairs from a rank to a rank.
        pairs: ``[ranks, ranks]`` (token, rank) pairs.
        host_rows: ``[ranks, hosts]`` (token, host) pairs.
        drawn: ranks whose routing was drawn; the others have that of a drawn rank, moved by whole
            hosts, if routing is uniform.
    """

    entries: Floats
    pairs: Floats
    host_rows: Floats
    drawn: int


@functools.lru_cache(maxsize=64)  # both phases, and every network, have the same routing
def draw(workload: Workload, ranks_per_host: int, top_hosts: int = 0) -> Rows:
    """Draws the routing of all ranks.

    Args:
        workload: ``hidden`` does not matter here.
        ranks_per_host: a divisor of the number of ranks.
        top_hosts: a token's experts lie on at most so many hosts, those of its best experts, as
            DeepSeek-V3 routes; 0 for no limit.
    """
    ranks, hosts = workload.ranks, workload.ranks // ranks_per_host
    per_rank = workload.tokens * workload.experts
    # Whole hosts, so that the reuse below keeps the local index of a rank.
    most = max(1, _MOST_NOISE // per_rank // ranks_per_host) * ranks_per_host
    drawn = min(ranks, most)
    entries, pairs = np.zeros((ranks, ranks)), np.zeros((ranks, ranks))
    host_rows = np.zeros((ranks, hosts))
    for rank in range(drawn):
        target = _targets(workload, rank, hosts, top_hosts)
        entries[rank] = np.bincount(target[target >= 0], minlength=ranks)
        pairs[rank] = _distinct(target, ranks)
        host_rows[rank] = _distinct(np.where(target < 0, -1, target // ranks_per_host), hosts)
    for rank in range(drawn, ranks):
        twin = rank % drawn
        moved = rank - twin if workload.routing == "uniform" else 0
        entries[rank] = np.roll(entries[twin], moved)
        pairs[rank] = np.roll(pairs[twin], moved)
        host_rows[rank] = np.roll(host_rows[twin], moved // ranks_per_host)
    return Rows(entries, pairs, host_rows, drawn)


def _targets(workload: Workload, rank: int, hosts: int, top_hosts: int) -> np.ndarray:
    """``[tokens, top_k]`` rank of each top-k entry, -1 for none."""
    per_rank = workload.experts // workload.ranks
    if not 0 < top_hosts < hosts:
        index: np.ndarray = workload.batch(rank).topk_idx.numpy()
        return np.where(index < 0, -1, index // per_rank)
    generator = torch.Generator().manual_seed(workload.seed * 1_000_003 + rank)
    scores = torch.rand(
        (workload.tokens, hosts, workload.experts // hosts),
        generator=generator, dtype=torch.float32, device="cpu",
    )  # fmt: skip
    best = scores.amax(dim=2).topk(top_hosts, dim=1).indices
    allowed = torch.zeros((workload.tokens, hosts), dtype=torch.bool, device="cpu")
    allowed.scatter_(1, best, True)
    masked = torch.where(allowed.unsqueeze(2), scores, -1.0).flatten(1)
    chosen: np.ndarray = masked.topk(workload.top_k, dim=1).indices.numpy()
    return chosen // per_rank


def _distinct(target: np.ndarray, targets: int) -> np.ndarray:
    """``[targets]`` tokens with at least one entry for each target."""
    tokens = np.arange(len(target))[:, None]
    seen = np.unique((tokens * targets + target)[target >= 0])
    return np.bincount(seen % targets, minlength=targets)
