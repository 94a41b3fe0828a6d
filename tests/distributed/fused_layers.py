"""What the tests of FusedMoE run on their ranks: layers, tokens and routings of all kinds."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

import torch

import fanfold
from fanfold.fused_moe import ExpertWeights, FusedMoeTuning, reference
from fanfold.group import Group

__all__ = ["FusedShape", "FusedTokens", "expected", "results", "split", "tokens_of", "weights_of"]


@dataclasses.dataclass(frozen=True)
class FusedShape:
    """Sizes of a layer under test."""

    num_experts: int = 8
    top_k: int = 3
    hidden: int = 256
    intermediate: int = 128
    max_tokens: int = 24
    activation_clamp: float | None = None
    fast_accumulation: bool = False

    def open(
        self, group: Group | None = None, tuning: FusedMoeTuning | None = None, **changes: Any
    ) -> fanfold.FusedMoE:
        """A FusedMoE of this shape, with ``changes``. Collective."""
        sizes = dataclasses.asdict(self)
        fast = sizes.pop("fast_accumulation")
        config = fanfold.Config.resolve(timeout_s=60.0, fast_accumulation=fast)
        if tuning is not None:
            config = dataclasses.replace(config, **dataclasses.asdict(tuning))
        return fanfold.FusedMoE(group, **{**sizes, "config": config, **changes})


@dataclasses.dataclass(frozen=True)
class FusedTokens:
    """What one rank passes to one call."""

    x: torch.Tensor
    topk_idx: torch.Tensor
    topk_weights: torch.Tensor

    def part(self, rows: slice) -> FusedTokens:
        """Some of the tokens."""
        return FusedTokens(self.x[rows], self.topk_idx[rows], self.topk_weights[rows])


def weights_of(shape: FusedShape, seed: int = 0, spread: int = 0) -> ExpertWeights:
    """Weights of all experts; the results have about the size of the tokens.

    Args:
        shape: of the layer.
        seed: of the values.
        spread: scales differ by up to 2 to the power of this, up and down.
    """
    generator = torch.Generator("cpu").manual_seed(seed)
    h, i, e = shape.hidden, shape.intermediate, shape.num_experts
    gate_up = torch.randn((e, 2 * i, h), generator=generator) / h**0.5
    down = torch.randn((e, h, i), generator=generator) / i**0.5
    weights = ExpertWeights.quantize(gate_up, down)
    if spread:
        for scales in (weights.l1_scales, weights.l2_scales):
            powers = torch.randint(-spread, spread + 1, scales.shape, generator=generator)
            scales.mul_(torch.exp2(powers.float()))
    return weights


def tokens_of(
    shape: FusedShape, tokens: int, seed: int, *, masked: float = 0.2, skewed: bool = False
) -> FusedTokens:
    """Random tokens and routing; ``masked`` is the share of -1, ``skewed`` sends all to one."""
    generator = torch.Generator("cpu").manual_seed(seed)
    x = torch.randn((tokens, shape.hidden), generator=generator).bfloat16()
    entries = (tokens, shape.top_k)
    topk_idx = torch.randint(shape.num_experts, entries, generator=generator)
    if skewed:
        topk_idx.fill_(shape.num_experts - 1)
    topk_idx.masked_fill_(torch.rand(entries, generator=generator) < masked, -1)
    return FusedTokens(x, topk_idx, torch.rand(entries, generator=generator))


def split(call: FusedTokens, counts: Sequence[int]) -> list[FusedTokens]:
    """Consecutive parts of the given sizes, one for each rank."""
    begins = [sum(counts[:rank]) for rank in range(len(counts) + 1)]
    return [call.part(slice(*pair)) for pair in itertools.pairwise(begins)]


def expected(
    shape: FusedShape, call: FusedTokens, weights: ExpertWeights, **options: Any
) -> torch.Tensor:
    """The reference's result."""
    return reference(
        call.x, call.topk_idx, call.topk_weights, weights,
        activation_clamp=shape.activation_clamp, **options,
    )  # fmt: skip


def results(
    group: Group,
    shape: FusedShape,
    calls: list[FusedTokens],
    weights: ExpertWeights,
    **options: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """This rank's result of its one of ``calls``, and its statistics; a rank runs it."""
    with shape.open(group) as moe:
        mine, call = weights.shard(moe.rank, moe.ranks), calls[moe.rank]
        counts = torch.zeros(moe.experts_per_rank, dtype=torch.int32, device="cpu")
        y = moe.forward(
            call.x, call.topk_idx, call.topk_weights, mine, statistics=counts, **options
        )
        return y, counts
