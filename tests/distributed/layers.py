"""What the tests of both modes run on their ranks: a small layer with known input and output."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

import fanfold
from fanfold.bench.dispatchers import open_dispatcher
from fanfold.geometry import Mode


@dataclasses.dataclass(frozen=True)
class Shape:
    """Sizes of a layer under test."""

    num_experts: int = 12
    top_k: int = 3
    hidden: int = 32
    max_tokens: int = 8
    mode: Mode = "low_latency"
    dispatch_dtype: str = "bf16"
    timeout_s: float = 60.0

    def open(self, group: dist.ProcessGroup, **changes: object) -> Any:
        """A LowLatency or HighThroughput of this shape, with ``changes``. Collective."""
        sizes = {
            "num_experts": self.num_experts,
            "top_k": self.top_k,
            "hidden": self.hidden,
            "max_tokens": self.max_tokens,
            "dispatch_dtype": self.dispatch_dtype,
            "config": fanfold.Config.resolve(timeout_s=self.timeout_s),
        }
        return open_dispatcher(self.mode, group, **{**sizes, **changes})


@dataclasses.dataclass
class Call:
    """The arguments of one dispatch, before a test spoils them."""

    x: torch.Tensor
    topk_idx: torch.Tensor
    topk_weights: torch.Tensor


def good_call(shape: Shape, rank: int, tokens: int | None = None) -> Call:
    """Tokens whose hidden values are small integers, so that sums over experts are exact."""
    generator = torch.Generator().manual_seed(rank)
    count = shape.max_tokens if tokens is None else tokens
    x = torch.randint(-4, 5, (count, shape.hidden), generator=generator).bfloat16()
    scores = torch.rand((count, shape.num_experts), generator=generator)
    topk_idx = scores.topk(shape.top_k, dim=1).indices
    return Call(x, topk_idx, torch.ones((count, shape.top_k)))


def round_trip(ep: Any, call: Call) -> torch.Tensor:
    """Dispatch and combine with experts that return what they get."""
    received = ep.dispatch(call.x, call.topk_idx, call.topk_weights)
    return ep.combine(received.tokens, received)


def works(ep: Any, shape: Shape) -> bool:
    """Whether a good round trip gives exactly ``top_k`` times its input."""
    call = good_call(shape, ep.rank)
    return torch.equal(round_trip(ep, call).float(), call.x.float() * shape.top_k)


def caught(function: Callable[[], object]) -> Exception | None:
    """The Fanfold exception that ``function`` raises, or None."""
    try:
        function()
    except fanfold.FanfoldError as error:
        return error
    return None
