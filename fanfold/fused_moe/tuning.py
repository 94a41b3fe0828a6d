"""In which of its forms the kernel of :class:`fanfold.FusedMoE` computes a call.

Where experts get few rows, weights are the rows and tokens the columns of the products
(:attr:`FusedMoeTuning.swap_ab_rows`). Where a rank's experts get many rows, the second GEMM's
columns are computed in two groups, and tokens are summed over the first meanwhile
(:attr:`FusedMoeTuning.group_rows`). The first is chosen by the number of tokens of a call, which
the CPU knows, the second by the kernel.
``fanfold tune fused-moe`` measures each form and keeps what it finds; :func:`tuning_for` chooses
from that, and from the results that come with Fanfold.
"""

from __future__ import annotations

import dataclasses
import json
import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from fanfold.config import Config
from fanfold.errors import ArgumentError
from fanfold.geometry import Geometry, check_integer

__all__ = [
    "FORMS",
    "FusedMoeTuning",
    "TunedLayer",
    "TunedPoint",
    "best_tuning",
    "read_points",
    "tuned_file",
    "tuning_for",
]

_log = logging.getLogger(__name__)

_NEVER = 2**31 - 1
_LONGEST_US = 1e9


@dataclass(frozen=True)
class FusedMoeTuning:
    """When the kernel changes its form.

        >>> from fanfold.fused_moe import FusedMoeTuning
        >>> FusedMoeTuning(swap_ab_rows=96)
        FusedMoeTuning(swap_ab_rows=96, group_rows=12288)

    The settings ``swap_ab_rows`` and ``group_rows`` of :class:`fanfold.Config` set it.

    Attributes:
        swap_ab_rows: weights and tokens are swapped where an expert gets up to so many rows, a mean
            if all ranks have as many tokens as this one, 0 to 2**31 - 1. The swapped form adds
            FP32 sums, also with ``fast_accumulation``.
        group_rows: with at least so many rows for a rank's experts its columns are computed in two
            groups, 0 to 2**31 - 1.

    Raises:
        ArgumentError: a number out of its bounds.
    """

    swap_ab_rows: int = 32
    group_rows: int = 12288

    def __post_init__(self) -> None:
        """Raises ArgumentError for a number out of its bounds."""
        for field in dataclasses.fields(self):
            check_integer(field.name, getattr(self, field.name), 0, _NEVER)

    def swapped_tokens(self, geometry: Geometry) -> int:
        """Up to how many tokens of a rank weights and tokens are swapped; 0 for never."""
        return self.swap_ab_rows * geometry.num_experts // (geometry.ranks * geometry.top_k)


FORMS = {
    "rows": FusedMoeTuning(0, _NEVER),
    "swap_ab": FusedMoeTuning(_NEVER, _NEVER),
    "groups": FusedMoeTuning(0, 0),
}
"""Tunings that make all calls take one form."""


@dataclass(frozen=True)
class TunedLayer:
    """What the best form depends on, besides the tokens.

    Attributes:
        gpu: its name, as PyTorch and ``nvidia-smi`` say it.
        ranks: of the group.
        experts: of all ranks.
        top_k, hidden, intermediate: of the layer.
        fast_accumulation: whether the tensor cores keep sums.
    """

    gpu: str
    ranks: int
    experts: int
    top_k: int
    hidden: int
    intermediate: int
    fast_accumulation: bool


@dataclass(frozen=True)
class TunedPoint:
    """What was measured with one number of tokens.

    Attributes:
        layer: that was measured.
        tokens: of each rank.
        rows: of all experts of the rank that gets most.
        microseconds: of a call in each of :data:`FORMS`, a median.
    """

    layer: TunedLayer
    tokens: int
    rows: int
    microseconds: dict[str, float]

    @property
    def expert_rows(self) -> int:
        """Of an expert, a mean, rounded up: as many are swapped as these tokens give."""
        return -(-self.tokens * self.layer.ranks * self.layer.top_k // self.layer.experts)

    def record(self) -> dict[str, object]:
        """One JSON line."""
        own = dataclasses.asdict(self)
        return {**own.pop("layer"), **own}

    @classmethod
    def of(cls, record: Any) -> TunedPoint:
        """From such a line.

        Raises:
            ArgumentError: it is none.
        """
        try:
            own = dict(record)
            names = [field.name for field in dataclasses.fields(TunedLayer)]
            point = cls(TunedLayer(**{name: own.pop(name) for name in names}), **own)
            point.check()
        except (AttributeError, KeyError, OverflowError, TypeError, ValueError) as error:
            what = f"a point of `fanfold tune fused-moe` ({type(error).__name__}: {error})"
            raise ArgumentError("line", f"{record!r:.200}", what) from error
        return point

    def check(self) -> None:
        """Raises TypeError or ValueError unless every number is one, and in its bounds."""
        layer = self.layer
        if type(layer.gpu) is not str or type(layer.fast_accumulation) is not bool:
            raise TypeError("gpu is no text, or fast_accumulation neither true nor false")
        sizes = (layer.ranks, layer.experts, layer.top_k, layer.hidden, layer.intermediate)
        for number in (*sizes, self.tokens, self.rows):
            if type(number) is not int or not 0 < number < 2**31:
                raise ValueError(f"{number!r} is no positive whole number")
        for form in FORMS:
            time = self.microseconds[form]
            if type(time) not in (int, float) or not 0 < time < _LONGEST_US:
                raise ValueError(f"{time!r} is no time")


# ---- the model ----------------------------------------------------------------------------------


def best_tuning(points: Sequence[TunedPoint]) -> FusedMoeTuning:
    """The tuning with which the times of ``points``, each relative to its best, add up to least.

    Between two numbers that were measured the change is half way. Beyond all that were measured
    nothing is swapped, and columns are in groups from the default on. What is swapped was measured
    without groups, and stays without.
    """
    if not points:
        return FusedMoeTuning()
    swapped = _change(points, lambda point: point.expert_rows, ("swap_ab", "rows"))
    default = FusedMoeTuning().group_rows
    least = max((point.rows for point in points if point.expert_rows <= swapped), default=0)
    rest = [point for point in points if point.expert_rows > swapped]
    if not rest:
        return FusedMoeTuning(swapped, max(least + 1, default))
    whole = _change(rest, lambda point: point.rows, ("rows", "groups"))
    if whole >= max(point.rows for point in rest):  # groups were nowhere better
        whole = max(whole, default - 1)
    return FusedMoeTuning(swapped, max(least, whole) + 1)


def _change(
    points: Sequence[TunedPoint], measure: Callable[[TunedPoint], int], forms: tuple[str, str]
) -> int:
    """Up to which ``measure`` the first form is best on the whole."""
    below, above = forms

    def cost(most: int) -> float:
        return sum(
            point.microseconds[below if measure(point) <= most else above]
            / min(point.microseconds[form] for form in forms)
            for point in points
        )

    measured = sorted({measure(point) for point in points})
    chosen = min([0, *measured], key=cost)
    beyond = [each for each in measured if each > chosen]
    return chosen if chosen == 0 or not beyond else (chosen + beyond[0]) // 2


# ---- where points are kept ----------------------------------------------------------------------


def tuned_file(config: Config) -> Path | None:
    """Where ``fanfold tune fused-moe`` keeps this user's points; None if there is no home."""
    folder = config.cache_folder()
    return None if folder is None else folder / "tuned" / "fused_moe.jsonl"


def read_points(lines: Iterable[str], source: str) -> list[TunedPoint]:
    """The points of ``lines``; of several of one layer and number of tokens the last. Lines that
    are none are logged and left out, as a layer works without them."""
    found: dict[tuple[TunedLayer, int], TunedPoint] = {}
    for number, line in enumerate(lines, 1):
        try:
            point = TunedPoint.of(json.loads(line))
        except (ValueError, RecursionError, ArgumentError) as error:
            _log.warning("%s, line %d is left out: %s", source, number, error)
            continue
        found[point.layer, point.tokens] = point
    return list(found.values())


def _kept(config: Config) -> list[TunedPoint]:
    """This user's points before those that come with Fanfold."""
    path = tuned_file(config)
    own: list[TunedPoint] = []
    try:
        if path is not None and path.exists():
            own = read_points(path.read_text(encoding="utf-8").splitlines(), str(path))
    except (OSError, UnicodeDecodeError) as error:
        _log.warning("%s is left out: %s", path, error)
    shipped = resources.files("fanfold.fused_moe").joinpath("tuned.jsonl")
    text = shipped.read_text(encoding="utf-8")
    layers = {point.layer for point in own}
    rest = read_points(text.splitlines(), "tuned.jsonl of Fanfold")
    return own + [point for point in rest if point.layer not in layers]


def tuning_for(layer: TunedLayer, config: Config) -> FusedMoeTuning:
    """What ``config`` asks for, and for the rest the best from what was measured: of this layer,
    else of the layers of its GPU with the same accumulation, those of several ranks for one of
    several if there are any, else the defaults."""
    asked = {"swap_ab_rows": config.swap_ab_rows, "group_rows": config.group_rows}
    given = {name: value for name, value in asked.items() if value is not None}
    if len(given) == len(asked):
        return FusedMoeTuning(**given)
    return dataclasses.replace(_measured(layer, config), **given)


def _measured(layer: TunedLayer, config: Config) -> FusedMoeTuning:
    kind = (layer.gpu, layer.fast_accumulation)
    points = [
        point for point in _kept(config) if (point.layer.gpu, point.layer.fast_accumulation) == kind
    ]
    same = [point for point in points if point.layer == layer]
    alike = [point for point in points if (point.layer.ranks == 1) == (layer.ranks == 1)]
    return best_tuning(same or alike or points)
