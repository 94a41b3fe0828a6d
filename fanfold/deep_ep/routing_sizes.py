"""What a dispatch of an ``ElasticBuffer`` was asked for, and how many rows may come of it."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["RoutingSizes", "worst_expanded_rows", "worst_rows"]


@dataclass(frozen=True)
class RoutingSizes:
    """What a dispatch was asked for.

    Attributes:
        num_experts, expert_alignment, num_max_tokens_per_rank, do_expand: as in
            :meth:`fanfold.deep_ep.ElasticBuffer.dispatch`.
        sms: SMs asked for; None for those that the mode chooses.
        num_sms: the same, with the number that is chosen at most.
        knows_counts: whether the CPU knows how many rows have come.
    """

    num_experts: int
    expert_alignment: int
    num_max_tokens_per_rank: int
    do_expand: bool
    sms: int | None
    num_sms: int
    knows_counts: bool


def worst_rows(ranks: int, sizes: RoutingSizes) -> int:
    """Rows, one for each (token, rank), if all tokens of all ranks come here."""
    return ranks * sizes.num_max_tokens_per_rank


def worst_expanded_rows(ranks: int, top_k: int, sizes: RoutingSizes) -> int:
    """Rows of an expanded result, with padding, if all that can come here do."""
    local, alignment = sizes.num_experts // ranks, sizes.expert_alignment
    rows = worst_rows(ranks, sizes) * min(top_k, local) + (alignment - 1) * local
    return -(-rows // alignment) * alignment
