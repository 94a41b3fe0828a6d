"""The benches of GPUs on calls of the host, with a clock that does not look."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any
from unittest import mock

import torch

__all__ = ["standing_in"]

Call = Callable[[], object]


class BlindClock:
    """Runs what it is to time, and calls everything a microsecond."""

    late_share = 0.0

    def __init__(self, barrier: Call, device: torch.device, *, warmup: int, iterations: int):
        self._iterations = iterations

    def overhead(self, calls: int) -> dict[str, torch.Tensor]:
        return {name: self._ones() for name in ("empty", "empty_flushed", "launch", "python")}

    def graph(self, *spans: Call, between: Call | None = None) -> torch.Tensor:
        for span in spans:
            span()
            if between is not None:
                between()
        return self._ones(len(spans))

    def chain(self, call: Call, calls: int) -> torch.Tensor:
        for _ in range(calls):
            call()
        return self._ones()

    def single(self, call: Call) -> torch.Tensor:
        return self.chain(call, 1)

    host = wall = end_to_end = single

    def alone(self, call: Call, *, flushed: bool) -> torch.Tensor:
        return self.chain(call, 1)

    def _ones(self, *spans: int) -> torch.Tensor:
        return torch.ones((self._iterations, *spans), dtype=torch.float64)


@contextmanager
def standing_in(module: ModuleType, **rest: Any) -> Iterator[None]:
    """Within it the bench in ``module`` asks no GPU for anything.

    Args:
        module: with a ``time_on_gpu``.
        rest: more of its names, and what stands in for them.
    """
    with mock.patch.multiple(
        module,
        Clock=BlindClock,
        barrier_of=lambda calls, group, config: contextlib.nullcontext(lambda: None),
        device_properties=lambda device: {"name": "none", "sms": 132},
        **rest,
    ):
        yield
