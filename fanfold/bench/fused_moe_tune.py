"""Times every form of the kernel of :class:`fanfold.FusedMoE`."""

from __future__ import annotations

import dataclasses

from fanfold.bench.fused_moe import FusedMoeSettings, sweep
from fanfold.bench.fused_moe_report import FusedMoePoint
from fanfold.errors import UnavailableError
from fanfold.fused_moe.tuning import FORMS, TunedLayer, TunedPoint

__all__ = ["tune"]


def tune(settings: FusedMoeSettings) -> list[TunedPoint]:
    """Checks and times each number of tokens of ``settings`` in each form, without the baseline.

    Raises:
        CheckFailed: a result differs too much from the reference.
        LaunchError: a started rank failed.
        UnavailableError: the layer does not run on GPUs.
    """
    # A number of tokens in all forms before the next: clocks drift.
    found: dict[str, list[FusedMoePoint]] = {form: [] for form in FORMS}
    for tokens in settings.tokens:
        for form, tuning in FORMS.items():
            asked = dataclasses.replace(
                settings, tokens=(tokens,), baseline=False, backend="cuda", tuning=tuning
            )
            found[form] += [FusedMoePoint(asked, ranks) for ranks in sweep(asked) or []]
    first = found["rows"][0].ranks[0]
    if first.device is None:
        raise UnavailableError("only the kernel for GPUs has forms, and this layer ran on the CPU")
    layer = TunedLayer(
        gpu=first.device["name"],
        ranks=settings.ranks,
        experts=settings.experts,
        top_k=settings.top_k,
        hidden=settings.hidden,
        intermediate=settings.intermediate,
        fast_accumulation=first.fast_accumulation,
    )
    return [
        TunedPoint(
            layer,
            tokens=tokens,
            rows=max(rank.slots for rank in found["rows"][place].ranks),
            microseconds={form: round(found[form][place].total_us.median, 2) for form in FORMS},
        )
        for place, tokens in enumerate(settings.tokens)
    ]
