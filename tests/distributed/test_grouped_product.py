"""Expert-major rows handed to PyTorch's grouped matrix product as they arrive."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812  # its usual name

from fanfold import functional
from fanfold.high_throughput import HighThroughput
from fanfold.launch import RankPool

needs_grouped_products = pytest.mark.skipif(
    not hasattr(F, "grouped_mm"), reason=f"PyTorch {torch.__version__} has no F.grouped_mm"
)
pytestmark = needs_grouped_products

EXPERTS, TOP_K, HIDDEN, TOKENS = 12, 3, 32, 40


@dataclass
class Tokens:
    """Of one rank: small integers, so that every product and sum is exact in bfloat16."""

    x: torch.Tensor
    topk_idx: torch.Tensor
    topk_weights: torch.Tensor

    @classmethod
    def drawn(cls, seed: int) -> Tokens:
        chance = torch.Generator().manual_seed(seed)
        scores = torch.rand((TOKENS, EXPERTS), generator=chance)
        return cls(
            torch.randint(-1, 2, (TOKENS, HIDDEN), generator=chance).bfloat16(),
            scores.topk(TOP_K).indices,
            torch.randint(1, 3, (TOKENS, TOP_K), generator=chance).float(),
        )


def all_matrices() -> torch.Tensor:
    """``[E, hidden, hidden]``: what the experts multiply by."""
    chance = torch.Generator().manual_seed(7)
    return torch.randint(-1, 2, (EXPERTS, HIDDEN, HIDDEN), generator=chance).bfloat16()


def expected(tokens: Tokens) -> torch.Tensor:
    """The weighted sum over each token's experts, without any dispatch."""
    y = torch.einsum("th,tkho->tko", tokens.x.float(), all_matrices().float()[tokens.topk_idx])
    return (tokens.topk_weights.unsqueeze(-1) * y).sum(1).bfloat16()


def open_layer(group: dist.ProcessGroup) -> HighThroughput:
    """A layer whose experts' rows begin at multiples of 8."""
    return HighThroughput(
        group, num_experts=EXPERTS, top_k=TOP_K, hidden=HIDDEN, max_tokens=TOKENS,
        expert_alignment=8,
    )  # fmt: skip


def round_trip(
    ep: HighThroughput, tokens: Tokens, matrices: torch.Tensor, capacity: int | None
) -> torch.Tensor:
    """Dispatch, one product for all local experts, combine; the CPU reads nothing in between."""
    received = ep.dispatch(tokens.x, tokens.topk_idx, tokens.topk_weights, capacity=capacity)
    y = F.grouped_mm(received.tokens, matrices, offs=received.offsets[1:].int())
    return ep.combine(y, received)


def gradients(
    ep: HighThroughput, tokens: Tokens, matrices: torch.Tensor, capacity: int | None
) -> list[torch.Tensor]:
    """Of the tokens, their weights and the matrices, where rows behind hold what is no number."""
    given = [t.clone().requires_grad_() for t in (tokens.x, tokens.topk_weights, matrices)]
    x, weights, factors = given
    rows, row_weights, received = functional.dispatch(
        ep, x, tokens.topk_idx, weights, capacity=capacity
    )
    places = torch.arange(len(rows), device=rows.device).unsqueeze(1)
    behind, nothing = places >= received.offsets[-1], float("nan")
    offs = received.offsets[1:].int()
    y = F.grouped_mm(rows.masked_fill(behind, nothing), factors, offs=offs)
    y.register_hook(lambda grad: grad.masked_fill(behind, nothing))
    out = functional.combine(ep, y, received, row_weights)
    return list(torch.autograd.grad(out, given, torch.ones_like(out)))


def most_rows(ranks: int) -> int:
    """That may come to one rank, with their padding."""
    return ranks * TOKENS * TOP_K + EXPERTS * 8


def _rounds(group: dist.ProcessGroup) -> None:
    rank, ranks = group.rank(), group.size()
    local = EXPERTS // ranks
    matrices = all_matrices()[rank * local : (rank + 1) * local]
    with open_layer(group) as ep:
        for seed, capacity in enumerate((None, most_rows(ranks), None)):
            tokens = Tokens.drawn(10 * seed + rank)
            assert torch.equal(round_trip(ep, tokens, matrices, capacity), expected(tokens))
        wanted, got = (gradients(ep, tokens, matrices, n) for n in (None, most_rows(ranks)))
        assert all(map(torch.equal, wanted, got))
        assert all(bool(grad.any()) for grad in wanted)


@pytest.mark.parametrize("ranks", [1, 3])
def test_a_grouped_product_of_what_arrives(pools: Callable[[int], RankPool], ranks: int) -> None:
    pools(ranks).run(_rounds)
