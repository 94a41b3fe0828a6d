"""What a caller of high-throughput dispatch says about its tokens, and the checks of it."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fanfold.backends.high_throughput import Rows, dispatch_layout
from fanfold.deep_ep.sizes import Config
from fanfold.errors import ArgumentError
from fanfold.geometry import check_tensor
from fanfold.representation import show_fields, worded

__all__ = [
    "Bias",
    "Given",
    "Route",
    "Rows",
    "channels_of",
    "new_route",
    "tokens_of",
]

Bias = torch.Tensor | tuple[torch.Tensor, torch.Tensor] | None
Given = dict[str, torch.Tensor | None]
"""The arguments of dispatch that describe a new routing, by name."""


@dataclass(frozen=True)
class Route:
    """A new routing.

    Attributes:
        topk_idx: ``[T, K]`` int64: the routing that the mode gets. Without top-k, each rank stands
            for one expert of its own, and a token names the ranks that it goes to.
        topk_weights: ``[T, K]`` float32, or None without top-k.
        num_experts: that ``topk_idx`` chooses from.
        tokens_per_rank: ``[R]`` int32.
        tokens_per_expert: ``[E]`` int32, which counts an expert as often as a token names it.
    """

    topk_idx: torch.Tensor
    topk_weights: torch.Tensor | None
    num_experts: int
    tokens_per_rank: torch.Tensor
    tokens_per_expert: torch.Tensor

    __repr__ = show_fields


def new_route(given: Given, ranks: int, tokens: int, device: torch.device, look: bool) -> Route:
    """The routing that ``given`` describes.

    Args:
        given: the caller's tensors.
        ranks: size of the group.
        tokens: of this rank.
        device: where the tensors must be.
        look: compare what is in them; where it is a GPU the CPU would have to wait for that.

    Raises:
        ArgumentError: something is missing or bad, or two of them do not say the same.
    """
    per_rank, in_rank, per_expert = (
        _required(given, name)
        for name in ("num_tokens_per_rank", "is_token_in_rank", "num_tokens_per_expert")
    )
    check_tensor("num_tokens_per_rank", per_rank, (ranks,), (torch.int32,), device=device)
    check_tensor("is_token_in_rank", in_rank, (tokens, ranks), (torch.bool,), device=device)
    check_tensor("num_tokens_per_expert", per_expert, ("experts",), (torch.int32,), device=device)
    experts = per_expert.shape[0]
    if experts == 0 or experts % ranks:
        bound = f"above 0 and divisible by the {ranks} ranks"
        raise ArgumentError("num_tokens_per_expert.shape[0]", experts, bound)
    per_host = given["num_tokens_per_rdma_rank"]
    if per_host is not None:
        check_tensor("num_tokens_per_rdma_rank", per_host, (1,), (torch.int32,), device=device)
    if look:
        sums = in_rank.sum(0, dtype=torch.int32)
        _same("num_tokens_per_rank", per_rank, sums, "the column sums of is_token_in_rank")
        moving = in_rank.any(1).sum(dtype=torch.int32).reshape(1)
        if per_host is not None:
            _same("num_tokens_per_rdma_rank", per_host, moving, "tokens for this one host")
    topk_idx, weights = given["topk_idx"], given["topk_weights"]
    if topk_idx is None or weights is None:
        if topk_idx is not None or weights is not None:
            missing = "topk_idx" if topk_idx is None else "topk_weights"
            raise ArgumentError(missing, None, "given together with the other of the two")
        entries = torch.where(in_rank, torch.arange(ranks, device=device, dtype=torch.int64), -1)
        return Route(entries, None, ranks, per_rank, per_expert)
    check_tensor("topk_idx", topk_idx, (tokens, "top_k"), (torch.int64,), device=device)
    if look:
        layout = dispatch_layout(topk_idx, experts, ranks)
        source = "by what topk_idx says"
        _same("is_token_in_rank", in_rank, layout.is_token_in_rank, source)
        _same("num_tokens_per_expert", per_expert, layout.tokens_per_expert, source)
    return Route(topk_idx, weights, experts, per_rank, per_expert)


def _required(given: Given, name: str) -> torch.Tensor:
    tensor = given[name]
    if tensor is None:
        raise ArgumentError(
            name, None, "what get_dispatch_layout returned, unless a handle is given"
        )
    return tensor


def _same(name: str, given: torch.Tensor, expected: torch.Tensor, why: str) -> None:
    if torch.equal(given, expected):
        return
    place = tuple((given != expected).nonzero()[0].tolist())
    where = ", ".join(map(str, place))
    raise ArgumentError(f"{name}[{where}]", given[place].item(), f"{expected[place].item()}, {why}")


def tokens_of(x: object) -> int:
    """The number of tokens in what dispatch sends; the mode checks everything else about it.

    Raises:
        ArgumentError: ``x`` is neither a tensor nor a pair of tensors.
    """
    values = x[0] if isinstance(x, tuple) and len(x) == 2 else x
    if not isinstance(values, torch.Tensor):
        bound = "a torch.Tensor of shape (tokens, hidden), or a pair of them (values, scales)"
        raise ArgumentError("x", worded(values), bound)
    if values.dim() != 2:
        name = "x" if values is x else "x[0]"
        raise ArgumentError(f"{name}.shape", tuple(values.shape), "(tokens, hidden)")
    return values.shape[0]


def channels_of(config: object, default: Config) -> int:
    """The number of channels of a call."""
    chosen = default if config is None else config
    if not isinstance(chosen, Config):
        raise ArgumentError("config", worded(chosen), "a deep_ep.Config or None")
    if chosen.num_sms < 2 or chosen.num_sms % 2:
        raise ArgumentError("config.num_sms", chosen.num_sms, "even and above 0: a channel has two")
    return chosen.num_channels
