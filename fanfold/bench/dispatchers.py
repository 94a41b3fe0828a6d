"""The class of each mode, for benches and tests that run in either."""

from __future__ import annotations

from typing import Any

from fanfold.geometry import Mode
from fanfold.high_throughput import HighThroughput
from fanfold.low_latency import LowLatency

__all__ = ["AnyDispatcher", "open_dispatcher"]

AnyDispatcher = LowLatency | HighThroughput

_CLASSES: dict[Mode, type[LowLatency] | type[HighThroughput]] = {
    "low_latency": LowLatency,
    "high_throughput": HighThroughput,
}


def open_dispatcher(mode: Mode, group: Any = None, **options: Any) -> Any:
    """A :class:`fanfold.LowLatency` or a :class:`fanfold.HighThroughput`. Collective.

    Args:
        mode: which of the two.
        group, options: their arguments.
    """
    return _CLASSES[mode](group, **options)
