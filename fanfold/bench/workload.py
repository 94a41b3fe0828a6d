"""Seeded tokens, routings and weights, the same in whichever process they are made.

Any rank can make any other rank's batch, so that it can work out by itself what must arrive.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fanfold.errors import ArgumentError

__all__ = ["ROUTINGS", "Batch", "Workload", "expert_output"]

ROUTINGS = ("uniform", "skewed", "one_expert")

_ZIPF_EXPONENT = 1.0


@dataclass(frozen=True)
class Batch:
    """One rank's input to one call.

    Attributes:
        x: ``[T, hidden]`` bfloat16, standard normal.
        topk_idx: ``[T, top_k]`` int64, -1 for none.
        topk_weights: ``[T, top_k]`` float32, from 0 to 1, also where topk_idx is -1.
    """

    x: torch.Tensor
    topk_idx: torch.Tensor
    topk_weights: torch.Tensor


@dataclass(frozen=True)
class Workload:
    """Which tokens go where.

    Attributes:
        ranks: size of the group.
        tokens: most tokens of a rank.
        hidden: columns of a row.
        top_k: experts per token.
        experts: of all ranks together.
        routing: ``"uniform"`` over the experts; ``"skewed"``: expert i, in a seeded order, drawn in
            proportion to 1 / (i + 1); ``"one_expert"``: every token to one and the same, once. No
            expert twice for a token (in the last case the other lanes are -1).
        seed: of everything.
        none_share: share of the lanes that become -1.
        duplicate_share: share of the lanes that repeat the token's first expert.
        uneven: each rank has a seeded number of tokens from 0 to ``tokens``, instead of ``tokens``.
    """

    ranks: int
    tokens: int
    hidden: int
    top_k: int
    experts: int
    routing: str = "uniform"
    seed: int = 0
    none_share: float = 0.0
    duplicate_share: float = 0.0
    uneven: bool = False

    def __post_init__(self) -> None:
        """Checks what the generators need; the sizes are the library's to check.

        Raises:
            ArgumentError: an unknown routing, or more experts per token than there are.
        """
        if self.routing not in ROUTINGS:
            raise ArgumentError("routing", repr(self.routing), f"one of {', '.join(ROUTINGS)}")
        if self.routing != "one_expert" and self.top_k > self.experts:
            raise ArgumentError("top_k", self.top_k, f"at most the {self.experts} experts")

    def batch(self, rank: int) -> Batch:
        """The input of ``rank``."""
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + rank)
        tokens = self.tokens
        if self.uneven:
            tokens = int(
                torch.randint(
                    0, tokens + 1, (), generator=generator, dtype=torch.int64, device="cpu"
                )
            )
        topk_idx = self._route(tokens, generator)
        lanes = topk_idx.shape
        repeated = (
            torch.rand(lanes, generator=generator, dtype=torch.float32, device="cpu")
            < self.duplicate_share
        )
        topk_idx = torch.where(repeated, topk_idx[:, :1].expand(lanes), topk_idx)
        nowhere = (
            torch.rand(lanes, generator=generator, dtype=torch.float32, device="cpu")
            < self.none_share
        )
        return Batch(
            x=torch.randn(
                (tokens, self.hidden), generator=generator, dtype=torch.float32, device="cpu"
            ).bfloat16(),
            topk_idx=topk_idx.masked_fill(nowhere, -1).contiguous(),
            topk_weights=torch.rand(lanes, generator=generator, dtype=torch.float32, device="cpu"),
        )

    def _route(self, tokens: int, generator: torch.Generator) -> torch.Tensor:
        if self.routing == "one_expert":
            topk_idx = torch.full((tokens, self.top_k), -1, dtype=torch.int64, device="cpu")
            topk_idx[:, 0] = self.seed % self.experts
            return topk_idx
        # Gumbel's trick: the largest of log p + noise are draws without replacement from p.
        noise = (
            -torch.empty((tokens, self.experts), dtype=torch.float32, device="cpu")
            .exponential_(generator=generator)
            .log()
        )
        if self.routing == "skewed":
            order = torch.Generator().manual_seed(self.seed)
            place = torch.randperm(self.experts, generator=order, dtype=torch.int64, device="cpu")
            noise -= _ZIPF_EXPONENT * (place + 1.0).log()
        return noise.topk(self.top_k, dim=1).indices


def expert_output(rows: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
    """A stand-in for the experts' computation that tells which expert did it.

    Args:
        rows: ``[n, hidden]``, any floating dtype.
        experts: ``[n]`` expert of each row.

    Returns:
        ``[n, hidden]`` bfloat16: ``row * (1 + (expert mod 61) / 64)``, rounded once.
    """
    factor = 1.0 + (experts % 61).float() / 64.0
    return (rows.float() * factor.unsqueeze(1)).bfloat16()
