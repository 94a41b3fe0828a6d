"""Routings that a count of them might get wrong."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch

from fanfold.backends.high_throughput.kernels import Sizes


def routings(sizes: Sizes, tokens: Iterable[int]) -> Iterator[torch.Tensor]:
    """``[tokens, K]`` int64 for each number: experts, repeated and not, none, and what is no expert
    though its low bits are; then all of them the last expert, and nothing at all."""
    last = sizes.experts - 1
    absent = torch.tensor([-1, -5, sizes.experts, 1 << 32, (1 << 32) + last, -(1 << 63), 1 << 62])
    for count in tokens:
        numbers = torch.Generator().manual_seed(count)
        shape = (count, sizes.top_k)
        experts = torch.randint(sizes.experts, shape, generator=numbers)
        repeats = torch.rand(shape, generator=numbers) < 0.2
        experts = torch.where(repeats, experts[:, :1], experts)
        others = absent[torch.randint(len(absent), shape, generator=numbers)]
        yield torch.where(torch.rand(shape, generator=numbers) < 0.3, others, experts)
    yield torch.full((33, sizes.top_k), last)
    yield torch.full((33, sizes.top_k), -1)
