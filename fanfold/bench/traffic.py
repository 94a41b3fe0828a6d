"""Which rows a call moves where, worked out from its routing.

A dispatch and the combine that follows it move the same number of rows, in opposite directions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from fanfold.geometry import Mode

__all__ = ["RowsMoved", "rows_moved"]


@dataclass(frozen=True)
class RowsMoved:
    """Rows of one rank's tokens in one dispatch; as many come back in its combine.

    Attributes:
        total: one for each (token, rank that holds one of its experts).
        remote: those for other ranks.
        between_hosts: rows that cross to other hosts. Low latency sends one for each (token, rank
            there); high throughput one for each (token, host), and combine returns one sum.
        inside_hosts: rows that go from one rank to another of the same host: those for the source's
            own host and, in high throughput, those that its gateways hand on.
    """

    total: int
    remote: int
    between_hosts: int
    inside_hosts: int


def rows_moved(
    topk_idx: torch.Tensor, rank: int, experts: int, host: Sequence[int], mode: Mode
) -> RowsMoved:
    """What a call moves of the tokens of ``rank``.

    Args:
        topk_idx: ``[T, K]`` int64 of ``rank``, -1 for none.
        rank: the source.
        experts: of all ranks.
        host: of each rank.
        mode: decides what crosses to another host.
    """
    copies = _copies(topk_idx, experts, len(host))
    total = int(copies.sum())
    remote = total - int(copies[:, rank].sum())
    members: dict[int, list[int]] = {}
    for peer, number in enumerate(host):
        members.setdefault(number, []).append(peer)
    own = members.pop(host[rank])
    inside = int(copies[:, own].sum()) - int(copies[:, rank].sum())
    between = 0
    for others in members.values():
        there = copies[:, others]
        if mode == "low_latency":
            between += int(there.sum())
            continue
        between += int(there.any(dim=1).sum())
        gateway = own.index(rank) % len(others)  # reads the rows where they arrive
        inside += int(there.sum()) - int(there[:, gateway].sum())
    return RowsMoved(total, remote, between, inside)


def _copies(topk_idx: torch.Tensor, experts: int, ranks: int) -> torch.Tensor:
    """``[T, ranks]`` bool: whether a rank holds one of a token's experts."""
    rank_of = topk_idx.div(experts // ranks, rounding_mode="floor")
    of_rank = [(rank_of == rank).any(dim=1) for rank in range(ranks)]
    return torch.stack(of_rank, dim=1)
