"""Where the tokens of one rank go, before any call."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fanfold import _core
from fanfold.backends.high_throughput.layout_kernel import counter_of
from fanfold.backends.high_throughput.protocol import check_routing
from fanfold.geometry import MAX_TOKENS, check_integer
from fanfold.lending import lend
from fanfold.representation import show_fields

__all__ = ["Layout", "dispatch_layout", "layout_there"]


@dataclass(frozen=True)
class Layout:
    """Where the tokens of one rank go.

    Attributes:
        tokens_per_rank: ``[R]`` int32: tokens with an expert on each rank.
        tokens_per_expert: ``[E]`` int32: an expert counts as often as a token names it.
        is_token_in_rank: ``[T, R]`` bool.
    """

    tokens_per_rank: torch.Tensor
    tokens_per_expert: torch.Tensor
    is_token_in_rank: torch.Tensor

    __repr__ = show_fields


def dispatch_layout(topk_idx: torch.Tensor, num_experts: int, ranks: int) -> Layout:
    """Where this rank's tokens go. Local: nothing is communicated. The result is on the device of
    ``topk_idx``, for which the CPU does not wait: on GPUs one kernel counts where there is NVRTC
    and compute capability 9.0, up to 2048 experts and 1024 ranks; elsewhere PyTorch's own
    functions do, which takes several times as long.

    Args:
        topk_idx: ``[T, K]`` int64, -1 for none.
        num_experts: of all ranks, divisible by ``ranks``.
        ranks: size of the group.

    Raises:
        ArgumentError: bad input; an index out of range on the CPU only: elsewhere it is none.
        UsageError: the kernel is not loaded yet, and a CUDA graph is being captured: call this
            once before.
    """
    check_integer("ranks", ranks, 1, MAX_TOKENS)
    device: torch.device = getattr(topk_idx, "device", torch.device("cpu"))
    check_routing(topk_idx, None, None, num_experts, ranks, device)
    counter = counter_of(topk_idx, num_experts, ranks)
    if counter is None and device.type != "cpu":
        return layout_there(topk_idx, num_experts, ranks)
    tokens, top_k = topk_idx.shape
    layout = Layout(
        torch.empty(ranks, dtype=torch.int32, device=device),
        torch.empty(num_experts, dtype=torch.int32, device=device),
        torch.empty((tokens, ranks), dtype=torch.bool, device=device),
    )
    if counter is not None:
        counter.run(
            topk_idx, layout.tokens_per_rank, layout.tokens_per_expert, layout.is_token_in_rank
        )
        return layout
    _core.count_routes(
        lend(topk_idx),
        (tokens, top_k, num_experts, ranks),
        lend(layout.tokens_per_rank),
        lend(layout.tokens_per_expert),
        lend(layout.is_token_in_rank),
    )
    return layout


def layout_there(topk_idx: torch.Tensor, num_experts: int, ranks: int) -> Layout:
    """The same by operations of PyTorch, on any device; looks at nothing."""
    tokens, device = topk_idx.shape[0], topk_idx.device
    is_expert = (topk_idx >= 0) & (topk_idx < num_experts)
    # What is none is counted in a place behind all others.
    expert = torch.where(is_expert, topk_idx, num_experts)
    per_expert = torch.zeros(num_experts + 1, dtype=torch.int32, device=device)
    one = torch.ones(1, dtype=torch.int32, device=device)
    per_expert.scatter_add_(0, expert.flatten(), one.expand(expert.numel()))
    rank = torch.div(expert, num_experts // ranks, rounding_mode="floor")
    in_rank = torch.zeros((tokens, ranks + 1), dtype=torch.bool, device=device)
    in_rank = in_rank.scatter_(1, rank, True)[:, :ranks].contiguous()
    return Layout(in_rank.sum(0, dtype=torch.int32), per_expert[:num_experts], in_rank)
