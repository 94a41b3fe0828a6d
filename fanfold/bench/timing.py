"""Timing contenders in turns, so that whatever disturbs the machine disturbs all of them alike."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

__all__ = ["PHASES", "Contender", "Percentiles", "Timings", "interleave"]

PHASES = ("dispatch", "combine", "total")

_NS_PER_US = 1000.0


@dataclass(frozen=True)
class Contender:
    """One way to do the work. ``combine`` gets what ``dispatch`` returned."""

    name: str
    dispatch: Callable[[], Any]
    combine: Callable[[Any], Any]


def interleave(
    contenders: Sequence[Contender], barrier: Callable[[], object], *, warmup: int, iterations: int
) -> dict[str, torch.Tensor]:
    """Runs one round of each contender in turn, ``warmup + iterations`` times.

    A round begins behind the barrier; in it dispatch and combine follow each other as in a layer.

    Returns:
        For each name ``[iterations, 3]`` float64: microseconds of this rank's :data:`PHASES`.
    """
    rounds: dict[str, list[tuple[int, int]]] = {contender.name: [] for contender in contenders}
    for _ in range(warmup + iterations):
        for contender in contenders:
            barrier()
            begin = time.perf_counter_ns()
            sent = contender.dispatch()
            middle = time.perf_counter_ns()
            contender.combine(sent)
            end = time.perf_counter_ns()
            rounds[contender.name].append((middle - begin, end - middle))
    return {name: _microseconds(pairs[warmup:]) for name, pairs in rounds.items()}


def _microseconds(pairs: list[tuple[int, int]]) -> torch.Tensor:
    both = torch.tensor(pairs, dtype=torch.float64, device="cpu").view(-1, 2) / _NS_PER_US
    return torch.cat([both, both.sum(dim=1, keepdim=True)], dim=1)


@dataclass(frozen=True)
class Percentiles:
    """Of one phase, in microseconds."""

    p50: float
    p90: float
    p99: float

    @classmethod
    def of(cls, samples: torch.Tensor) -> Percentiles:
        """The percentiles of all ``samples``, interpolated between neighbours."""
        levels = torch.tensor([0.5, 0.9, 0.99], dtype=samples.dtype, device="cpu")
        p50, p90, p99 = samples.flatten().quantile(levels).tolist()
        return cls(p50, p90, p99)


@dataclass(frozen=True)
class Timings:
    """All ranks' times of one contender.

    Attributes:
        microseconds: ``[ranks, iterations, 3]`` float64, the last dimension by :data:`PHASES`.
    """

    microseconds: torch.Tensor

    def slowest(self, phase: str) -> Percentiles:
        """Over iterations, of the rank that was slowest in each: what a layer waits for."""
        return Percentiles.of(self.microseconds[:, :, PHASES.index(phase)].amax(dim=0))

    def overall(self, phase: str) -> Percentiles:
        """Over all ranks and iterations."""
        return Percentiles.of(self.microseconds[:, :, PHASES.index(phase)])
