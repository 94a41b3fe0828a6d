"""The parts of a layer that every rank has a copy of: options, router, shared expert."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F  # noqa: N812 (torch's own convention)

from fanfold.errors import ArgumentError
from fanfold.geometry import check_integer
from fanfold.nn.seeding import seeded_normal
from fanfold.nn.sharding import copy_whole
from fanfold.representation import show_fields, worded

__all__ = ["MOST_COLUMNS", "MoEOptions", "Router", "SeededLinear", "SharedExpert", "apply_linear"]

MOST_COLUMNS = (1 << 31) - 1


@dataclass(frozen=True)
class MoEOptions:
    """How a MoE layer is built, beyond its four sizes.

        >>> fanfold.nn.MoEOptions(score="sigmoid", shared_intermediate=32).renormalize
        True

    Attributes:
        score: how router logits become scores: ``"softmax"`` over all experts, or ``"sigmoid"`` of
            each.
        renormalize: divide a token's top-k scores by their sum, so that its weights add up to 1.
        balance: coefficient of the load-balancing loss.
        shared_intermediate: width of a shared expert that every token passes on its own rank; 0
            for none.
        latent: if given, tokens are projected to this many columns before they are dispatched,
            routed experts work on those, and what comes back is projected to ``hidden`` again
            (LatentMoE): rows on the wire shrink by ``hidden / latent``.
        seed: of the initial weights. Each expert's depend on (seed, expert) alone, so a layer
            starts equal on any number of ranks. Give each layer of a model its own.
        dtype: of the parameters and of the experts' matrix products. The router computes in
            float32 always.
    """

    score: Literal["softmax", "sigmoid"] = "softmax"
    renormalize: bool = True
    balance: float = 0.01
    shared_intermediate: int = 0
    latent: int | None = None
    seed: int = 0
    dtype: torch.dtype = torch.float32

    __repr__ = show_fields

    def __post_init__(self) -> None:
        """Checks every bound.

        Raises:
            ArgumentError: for the first one that does not hold.
        """
        if self.score not in ("softmax", "sigmoid"):
            raise ArgumentError("score", repr(self.score), "'softmax' or 'sigmoid'")
        if not getattr(self.dtype, "is_floating_point", False):
            raise ArgumentError("dtype", worded(self.dtype), "a floating-point torch.dtype")
        check_integer("shared_intermediate", self.shared_intermediate, 0, MOST_COLUMNS)


class Router(torch.nn.Module):
    """Chooses each token's experts and their weights.

        >>> router = fanfold.nn.Router(64, 8, 2, fanfold.nn.MoEOptions())
        >>> topk_idx, topk_weights, balance_loss = router(torch.randn((5, 64), device="cpu"))
        >>> topk_idx.shape, topk_weights.shape
        (torch.Size([5, 2]), torch.Size([5, 2]))

    Args:
        hidden: columns of a token.
        num_experts: experts to choose from.
        top_k: experts per token.
        options: score, renormalisation, balance and seed.
        device: of the weight; on ``"meta"`` it has no values.
    """

    def __init__(
        self,
        hidden: int,
        num_experts: int,
        top_k: int,
        options: MoEOptions,
        device: torch.device | str = "cpu",
    ) -> None:
        super().__init__()
        self.num_experts, self.top_k, self.options = num_experts, top_k, options
        empty = torch.empty((num_experts, hidden), dtype=torch.float32, device=device)
        self.weight = torch.nn.Parameter(empty)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Sets the weight to the values of the seed."""
        shape = (self.weight.shape[0], self.weight.shape[1])
        copy_whole(self.weight, seeded_normal(shape, shape[1] ** -0.5, self.options.seed, "router"))

    def forward(self, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The choice for ``tokens [T, hidden]``.

        Returns:
            topk_idx ``[T, top_k]`` int64, topk_weights ``[T, top_k]`` float32, and the balance loss
            over this rank's tokens: ``balance * E * sum over e of f_e P_e`` with f_e the share of
            the T * top_k choices that fell on e and P_e the mean score (of sigmoid scores, each
            token's divided by their sum), as in Switch Transformers, arXiv:2101.03961, equations 4
            to 6. It is ``balance`` where the load is even.
        """
        # Near ties decide where tokens go, so autocast must not round what is compared.
        with torch.autocast(tokens.device.type, enabled=False):
            logits = F.linear(tokens.float(), self.weight.float())
        if self.options.score == "softmax":
            scores = shares = logits.softmax(-1)
        else:
            scores = logits.sigmoid()
            shares = scores / scores.sum(-1, keepdim=True)
        weights, indices = scores.topk(self.top_k, dim=-1)
        if self.options.renormalize:
            weights = weights / weights.sum(-1, keepdim=True)
        chosen = indices.flatten()
        # Not by bincount, which waits for the GPU to find out how long its result is.
        choices = chosen.new_zeros(self.num_experts)
        choices.scatter_add_(0, chosen, torch.ones_like(chosen))
        count = max(tokens.shape[0], 1)
        # Integers divided would have the dtype that is the process's default.
        per_expert = (choices.float() / (count * self.top_k)) * (shares.sum(0) / count)
        return indices, weights, self.options.balance * self.num_experts * per_expert.sum()


class SeededLinear(torch.nn.Linear):
    """A bias-free linear layer whose weights come from a seed.

    Args:
        columns, rows: of its input and output.
        options: seed and dtype.
        name: of the weights, which the seed's values depend on.
        device: of the weights; on ``"meta"`` they have no values.
    """

    def __init__(
        self,
        columns: int,
        rows: int,
        options: MoEOptions,
        name: str,
        device: torch.device | str,
    ) -> None:
        self._seed, self._name = options.seed, name
        super().__init__(columns, rows, bias=False, device=device, dtype=options.dtype)

    def reset_parameters(self) -> None:
        """Sets the weights to the values of the seed."""
        shape = (self.out_features, self.in_features)
        copy_whole(self.weight, seeded_normal(shape, shape[1] ** -0.5, self._seed, self._name))


class SharedExpert(torch.nn.Module):
    """The expert that every token passes, where it lives.

    Args:
        hidden: columns of a token.
        options: its width, seed and dtype.
        device: of the weights.
    """

    def __init__(self, hidden: int, options: MoEOptions, device: torch.device | str) -> None:
        super().__init__()
        width = options.shared_intermediate
        self.w_in = SeededLinear(hidden, 2 * width, options, "shared_in", device)
        self.w_out = SeededLinear(width, hidden, options, "shared_out", device)

    def reset_parameters(self) -> None:
        """Sets the weights to the values of the seed."""
        self.w_in.reset_parameters()
        self.w_out.reset_parameters()

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """``[T, hidden]`` to ``[T, hidden]``."""
        gate, up = apply_linear(self.w_in, tokens).chunk(2, dim=-1)
        return apply_linear(self.w_out, F.silu(gate) * up)


def apply_linear(layer: torch.nn.Linear, x: torch.Tensor) -> torch.Tensor:
    """``layer`` in the dtype of its weights."""
    out: torch.Tensor = layer(x.to(layer.weight.dtype))
    return out
