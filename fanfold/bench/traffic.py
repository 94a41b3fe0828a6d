"""Which rows a call moves where, worked out from its routing, and what messages took.

A dispatch and the combine that follows it move the same number of rows, in opposite directions.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

__all__ = ["MessageTimes", "RowsMoved", "rows_moved"]


@dataclass(frozen=True)
class MessageTimes:
    """What messages between hosts took, of all calls of a bench.

    Attributes:
        sent: how many there were.
        ring_us: a mean of commands, how long each lay in its ring at most.
        queue_us: a mean, from the proxy's taking of a command until the transport had its message.
        transit_us: a mean, from then until the transport no longer needed the bytes.
    """

    sent: int
    ring_us: float
    queue_us: float
    transit_us: float

    @classmethod
    def of(cls, ranks: Iterable[Mapping[str, Any]]) -> MessageTimes | None:
        """Of the ranks with these ``metrics()``; None if none of them has sent a message."""
        measured = list(ranks)

        def total(name: str) -> float:
            return sum(sum(each.get(name, {}).values()) for each in measured)

        sent = int(total("channel_sent_messages_total"))
        if sent == 0:
            return None
        return cls(
            sent,
            1e6 * total("proxy_ring_seconds_total") / total("proxy_commands_total"),
            1e6 * total("channel_queue_seconds_total") / sent,
            1e6 * total("channel_transit_seconds_total") / sent,
        )


@dataclass(frozen=True)
class RowsMoved:
    """Rows of one rank's tokens in one dispatch; as many come back in its combine.

    Attributes:
        total: one for each (token, rank that holds one of its experts).
        remote: those for other ranks.
        between_hosts: rows that cross to other hosts: one for each (token, rank there) or, through
            gateways, one for each (token, host), and combine returns one sum.
        inside_hosts: rows that go from one rank to another of the same host: those for the source's
            own host, and those that its gateways hand on.
    """

    total: int
    remote: int
    between_hosts: int
    inside_hosts: int


def rows_moved(
    topk_idx: torch.Tensor, rank: int, experts: int, host: Sequence[int], *, through_gateways: bool
) -> RowsMoved:
    """What a call moves of the tokens of ``rank``.

    Args:
        topk_idx: ``[T, K]`` int64 of ``rank``, -1 for none.
        rank: the source.
        experts: of all ranks.
        host: of each rank.
        through_gateways: whether a row crosses once to each other host, not to each rank there.
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
        if not through_gateways:
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
