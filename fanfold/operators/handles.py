"""What a compiled dispatch leaves in place of the mode's objects."""

from __future__ import annotations

from typing import Any

import torch

from fanfold.operators import calls
from fanfold.operators.dispatchers import opened
from fanfold.results import DispatchResult, HighThroughputSource, LowLatencySource, Source

__all__ = ["HandleSource", "source_of"]


class HandleSource(Source):
    """The ``source`` of a result that compiled code made: a handle in place of the objects.

    Works outside of compiled code too, as the mode's own source would."""

    __setattr__ = object.__setattr__  # as the modes' own are frozen

    def __init__(self, handle: torch.Tensor, begins: torch.Tensor, counts: torch.Tensor,
                 capacity: int | None) -> None:  # fmt: skip
        self.handle = handle
        self._begins, self._counts, self._capacity = begins, counts, capacity

    @property
    def dispatched(self) -> Any:
        """Of the source that the operator kept."""
        source: Any = opened(self.handle).received.source
        return source.dispatched

    @property
    def dispatcher(self) -> Any:
        """What dispatched."""
        return opened(self.handle).dispatcher

    @property
    def capacity(self) -> int | None:
        """Rows to allocate, where the dispatch was given a number."""
        return self._capacity

    def expert_range(self, index: int) -> tuple[int, int]:
        """Where the rows of a local expert begin, and how many there are."""
        return int(self._begins[index]), int(self._counts[index])

    def expert_ranges(self) -> list[tuple[int, int]]:
        """The same of all local experts, read at once."""
        both = torch.stack([self._begins[:-1], self._counts.long()])
        begins, counts = both.tolist()
        return list(zip(begins, counts, strict=True))

    def without_rows(self) -> HandleSource:
        """This one: the operator kept no rows."""
        return self

    def ranks(self, result: DispatchResult) -> torch.Tensor:
        """Each row's source rank."""
        rank: torch.Tensor = calls.row_sources(self.handle, result.tokens)[0]
        return rank

    def tokens(self, result: DispatchResult) -> torch.Tensor:
        """Each row's source token."""
        token: torch.Tensor = calls.row_sources(self.handle, result.tokens)[1]
        return token


class _HighThroughputHandle(HandleSource, HighThroughputSource):  # type: ignore[misc]
    """In high throughput."""


class _LowLatencyHandle(HandleSource, LowLatencySource):  # type: ignore[override]
    """In low latency."""

    @property
    def topk_idx(self) -> torch.Tensor | None:  # type: ignore[override]
        """As dispatched; None where the routing has it."""
        source = opened(self.handle).received.source
        assert isinstance(source, LowLatencySource)
        return source.topk_idx


def source_of(
    mode: str,
    handle: torch.Tensor,
    begins: torch.Tensor,
    counts: torch.Tensor,
    capacity: int | None,
) -> _LowLatencyHandle | _HighThroughputHandle:
    """The source of what a dispatch in ``mode`` left behind ``handle``."""
    if mode == "low_latency":
        return _LowLatencyHandle(handle, begins, counts, capacity)
    return _HighThroughputHandle(handle, begins, counts, capacity)
