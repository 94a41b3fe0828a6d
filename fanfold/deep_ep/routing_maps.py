"""Routings by a map of tokens and experts, as DeepEP's branch ``hybrid-ep`` has them."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fanfold.errors import ArgumentError
from fanfold.geometry import MAX_EXPERTS, MAX_TOP_K, check_tensor
from fanfold.representation import show_fields

__all__ = ["Entries", "dense", "entries_of_indices", "entries_of_map"]


@dataclass(frozen=True)
class Entries:
    """A routing by indices.

    Attributes:
        topk_idx: ``[T, K]`` int64, -1 for none.
        topk_weights: ``[T, K]`` float32; 0 or anything where there is no expert. None without.
        num_experts: E.
    """

    topk_idx: torch.Tensor
    topk_weights: torch.Tensor | None
    num_experts: int

    __repr__ = show_fields


def entries_of_map(routing_map: torch.Tensor, probs: torch.Tensor | None, tokens: int) -> Entries:
    """The routing of a map, each token's experts in ascending order; K is the number of experts, 32
    at most.

    Args:
        routing_map: ``[T, E]`` bool.
        probs: ``[T, E]`` float32; those of other experts mean nothing.
        tokens: T.

    Raises:
        ArgumentError: a shape or dtype; on the CPU, a token of more than 32 experts. On a GPU,
            whose counts nobody waits for, such a token gets an index out of range, which a call of
            the mode reports.
    """
    check_tensor("routing_map", routing_map, (tokens, "experts"), (torch.bool,), contiguous=False)
    experts, device = routing_map.shape[1], routing_map.device
    _check_experts("routing_map.shape[1]", experts)
    _check_dense(probs, tokens, experts)
    top_k = min(experts, MAX_TOP_K)
    places = torch.cumsum(routing_map, 1, dtype=torch.int64)
    if experts > top_k and _looks_at(device) and tokens > 0:
        most, token = places[:, -1].max(0)
        if int(most) > top_k:
            raise ArgumentError(
                f"routing_map[{int(token)}].sum()", int(most), f"at most {top_k} experts of a token"
            )
    numbers = torch.arange(experts, dtype=torch.int64, device=device).expand(tokens, experts)
    # One column more takes what is not on the map. A token's 33rd expert makes the last one bad.
    columns = torch.where(routing_map, (places - 1).clamp(max=top_k), top_k)
    idx = torch.full((tokens, top_k + 1), -1, dtype=torch.int64, device=device)
    idx.scatter_(1, columns, numbers)
    idx = idx[:, :top_k].contiguous()
    if experts > top_k:
        idx[:, -1] = torch.where(places[:, -1] > top_k, experts, idx[:, -1])
    return Entries(idx, _gathered(probs, idx), experts)


def entries_of_indices(
    topk_idx: torch.Tensor,
    topk_weights: torch.Tensor | None,
    probs: torch.Tensor | None,
    tokens: int,
    num_experts: int,
) -> Entries:
    """The routing of indices.

    Args:
        topk_idx: ``[T, K]`` of integers, -1 for none; copied.
        topk_weights: ``[T, K]`` float32.
        probs: ``[T, E]`` float32, in the place of topk_weights.
        tokens, num_experts: T and E.

    Raises:
        ArgumentError: a shape or dtype, or both topk_weights and probs.
    """
    _check_experts("num_of_experts", num_experts)
    dtypes = (torch.int64, torch.int32, torch.int16)
    check_tensor("topk_idx", topk_idx, (tokens, "top_k"), dtypes, contiguous=False)
    # A handle keeps it, and the caller may write over its own.
    idx = topk_idx.to(torch.int64, copy=True).contiguous()
    if topk_weights is not None:
        if probs is not None:
            raise ArgumentError("probs", "given", "None where topk_weights are given")
        shape = (tokens, idx.shape[1])
        check_tensor("topk_weights", topk_weights, shape, (torch.float32,), contiguous=False)
        return Entries(idx, topk_weights.detach().contiguous(), num_experts)
    _check_dense(probs, tokens, num_experts)
    return Entries(idx, _gathered(probs, idx), num_experts)


def dense(values: torch.Tensor, entries: Entries) -> torch.Tensor:
    """``[T, E]``: the numbers ``[T, K]`` of entries in their experts' columns, 0 elsewhere."""
    tokens, experts = entries.topk_idx.shape[0], entries.num_experts
    made = values.new_zeros((tokens, experts + 1))
    made.scatter_(1, _columns(entries.topk_idx, experts, experts), values)
    return made[:, :experts].contiguous()


def _looks_at(device: torch.device) -> bool:
    """Whether the numbers of tensors there can be looked at without waiting."""
    return device.type == "cpu"


def _columns(idx: torch.Tensor, experts: int, absent: int) -> torch.Tensor:
    """The column of each entry in ``[T, E]``; ``absent`` for none and for an index out of range,
    which is another's to report."""
    return torch.where((idx < 0) | (idx >= experts), absent, idx)


def _gathered(probs: torch.Tensor | None, idx: torch.Tensor) -> torch.Tensor | None:
    if probs is None:
        return None
    return probs.detach().gather(1, _columns(idx, probs.shape[1], 0))


def _check_experts(name: str, experts: object) -> None:
    if not isinstance(experts, int) or not 1 <= experts <= MAX_EXPERTS:
        raise ArgumentError(name, experts, f"from 1 to {MAX_EXPERTS}")


def _check_dense(probs: object, tokens: int, experts: int) -> None:
    if probs is not None:
        check_tensor("probs", probs, (tokens, experts), (torch.float32,), contiguous=False)
