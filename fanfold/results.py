"""What a dispatch returns: rows sorted by local expert, and where they came from.

:class:`LowLatencyResult` and :class:`HighThroughputResult` lay rows out differently, each as its
grouped GEMMs read them; what :class:`DispatchResult` has reads the same in both.
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

import torch

from fanfold.backends import high_throughput, low_latency
from fanfold.backends.high_throughput.plan import CudaDispatched
from fanfold.copying import not_copied
from fanfold.errors import ArgumentError
from fanfold.geometry import check_integer
from fanfold.representation import show_fields, worded

__all__ = [
    "DispatchResult",
    "HighThroughputResult",
    "HighThroughputSource",
    "LowLatencyResult",
    "LowLatencySource",
    "Source",
]


class Source(ABC):
    """Where the rows of a dispatch lie, and what its combine needs."""

    __slots__ = ()

    @abstractmethod
    def expert_range(self, index: int) -> tuple[int, int]:
        """Where the rows of a local expert begin, and how many there are."""

    @abstractmethod
    def expert_ranges(self) -> list[tuple[int, int]]:
        """The same for all local experts, read at once."""

    @abstractmethod
    def ranks(self, result: DispatchResult) -> torch.Tensor:
        """Each row's source rank."""

    @abstractmethod
    def tokens(self, result: DispatchResult) -> torch.Tensor:
        """Each row's source token."""


@dataclass
class DispatchResult:
    """The rows that one dispatch returned to this rank, sorted by local expert.

        >>> with fanfold.LowLatency(num_experts=4, top_k=1, hidden=64, max_tokens=8) as ep:
        ...     x = torch.ones((3, 64), dtype=torch.bfloat16, device=ep.device)
        ...     topk_idx = torch.tensor([[1], [3], [1]], device=ep.device)
        ...     received = ep.dispatch(x, topk_idx)
        ...     received.tokens_per_expert.tolist(), received.expert(1).shape
        ([0, 2, 0, 1], torch.Size([2, 64]))

    E_l local experts. The rows of one expert are sorted by source rank, then by source token.

    Attributes:
        tokens: the rows; bfloat16 or float8_e4m3fn, hidden innermost; or of nvfp4 rows uint8, two
            columns in each, the first in the low half.
        scales: scales of fp8 rows, same leading dimensions as ``tokens``; of nvfp4 rows in tiles,
            see :func:`fanfold.formats.nvfp4_scale_shape`; else None.
        weights: float32, leading dimensions of ``tokens``: the routing weight of each row; None if
            dispatch had none.
        tokens_per_expert: ``[E_l]`` int32: valid rows of each local expert.
        offsets: ``[E_l + 1]`` int64: where each expert begins in ``tokens.flatten(0, -2)``.
        num_tokens: tokens of this rank's own call.
        owner: what dispatched.
        source: what combine needs.
    """

    tokens: torch.Tensor
    scales: torch.Tensor | None
    weights: torch.Tensor | None
    tokens_per_expert: torch.Tensor
    offsets: torch.Tensor
    num_tokens: int
    owner: object = field(repr=False)
    source: Source = field(repr=False)

    __repr__ = show_fields

    def expert(self, index: int, of: torch.Tensor | None = None) -> torch.Tensor:
        """The valid rows of local expert ``index``: a view ``[n, hidden]`` of ``tokens``.

        This reads where the rows are. On a GPU it therefore waits for the stream, and a CUDA graph
        cannot hold it: at every call in low latency and after a dispatch with a capacity, otherwise
        at the first call, for all experts. :meth:`expert_ranges` is one such wait for a whole loop.
        To wait for nothing, pass ``tokens`` and ``tokens_per_expert`` (or ``offsets``) to a masked
        or grouped GEMM.

        Args:
            index: from 0 to E_l - 1.
            of: a tensor with the leading dimensions of ``tokens`` (all but the last) to view
                instead, such as the experts' output, ``scales`` or ``weights``.

        Raises:
            ArgumentError: ``index`` is out of range, or ``of`` has other leading dimensions.
        """
        check_integer("index", index, 0, self.tokens_per_expert.shape[0] - 1)
        rows = self.tokens if of is None else of
        leading = self.tokens.shape[:-1]
        _check_leading("of", rows, leading)
        begin, count = self.source.expert_range(index)
        # Not through flatten(), which copies what it cannot view.
        return rows[index, :count] if len(leading) == 2 else rows[begin : begin + count]

    def expert_ranges(self) -> list[tuple[int, int]]:
        """For each local expert, where its valid rows begin in ``tokens.flatten(0, -2)`` and how
        many there are. On a GPU this is one copy, which waits for the stream."""
        return self.source.expert_ranges()

    # Neither is kept: a CUDA graph that holds the dispatch changes them at every replay.

    @property
    def source_rank(self) -> torch.Tensor:
        """int32, leading dimensions of ``tokens``: the rank each row came from, -1 for none."""
        return self.source.ranks(self)

    @property
    def source_token(self) -> torch.Tensor:
        """int32, leading dimensions of ``tokens``: each row's token index there, -1 for none."""
        return self.source.tokens(self)


_NO_COPIES = {
    "why": "it belongs to one call of an object whose memory the ranks share",
    "instead": "Clone the tensors that you need, and pass the object itself to combine.",
}


@not_copied(**_NO_COPIES)
@dataclass(repr=False)
class LowLatencyResult(DispatchResult):
    """What :meth:`fanfold.LowLatency.dispatch` returns; see :class:`DispatchResult`.

        >>> with fanfold.LowLatency(num_experts=4, top_k=1, hidden=64, max_tokens=8) as ep:
        ...     x = torch.ones((3, 64), dtype=torch.bfloat16, device=ep.device)
        ...     received = ep.dispatch(x, torch.tensor([[1], [3], [1]], device=ep.device))
        ...     type(received).__name__, received.tokens.shape
        ('LowLatencyResult', torch.Size([4, 8, 64]))

    ``tokens`` is ``[E_l, C, hidden]`` with C = ranks * max_tokens, of which the first
    ``tokens_per_expert[e]`` rows of expert e are written. After a dispatch with ``return_hook``
    nothing is valid before the hook has run.

    Attributes:
        complete: whether everything has arrived.
    """

    complete: bool = field(default=True)
    _begins: torch.Tensor = field(init=False, repr=False, compare=False)

    @classmethod
    def of(
        cls,
        dispatched: low_latency.Dispatched,
        topk_idx: torch.Tensor | None,
        offsets: torch.Tensor,
        owner: object,
        complete: bool,
    ) -> LowLatencyResult:
        """The result of a dispatch, made in as little of the CPU's time as possible.

        Args:
            dispatched: by the backend.
            topk_idx: as dispatched; None where the routing has it.
            offsets: the attribute; shared by all calls, so a caller who asks gets a copy.
            owner, complete: attributes.
        """
        made = cls.__new__(cls)
        made.tokens, made.scales = dispatched.tokens, dispatched.scales
        made.tokens_per_expert, made._begins = dispatched.counts, offsets
        made.owner, made.complete = owner, complete
        if topk_idx is None:
            made.num_tokens = dispatched.routing.tokens  # type: ignore[union-attr]
        else:
            made.num_tokens = topk_idx.shape[0]
        made.source = LowLatencySource(dispatched, topk_idx)
        return made

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> torch.Tensor | None:
            """Makes ``weights`` and ``offsets`` when a caller first reads them."""
            if name == "weights":
                self.weights = self.source.dispatched.row_weights
                return self.weights
            if name == "offsets":
                self.offsets = self._begins.clone()
                return self.offsets
            raise AttributeError(f"{type(self).__name__} has no {name!r}", name=name, obj=self)


@not_copied(**_NO_COPIES)
@dataclass(repr=False)
class HighThroughputResult(DispatchResult):
    """What :meth:`fanfold.HighThroughput.dispatch` returns; see :class:`DispatchResult`.

        >>> with fanfold.HighThroughput(num_experts=4, top_k=1, hidden=64, max_tokens=8) as ep:
        ...     x = torch.ones((3, 64), dtype=torch.bfloat16, device=ep.device)
        ...     received = ep.dispatch(x, torch.tensor([[1], [3], [1]], device=ep.device))
        ...     again = ep.dispatch(x * 2, previous=received.without_rows())
        ...     received.tokens.shape, received.offsets.tolist()
        (torch.Size([3, 64]), [0, 0, 2, 2, 3])

    ``tokens`` is ``[rows, hidden]``. Each expert's rows are padded to ``expert_alignment`` with
    zero rows, or on GPUs after :meth:`fanfold.HighThroughput.use_zero_padding` with rows that may
    hold anything. Their weights are 0, ``source_rank`` and ``source_token`` -1 either way.
    """

    def without_rows(self) -> HighThroughputResult:
        """What later calls with this routing accept in place of the result itself: whoever keeps it
        does not keep the rows in memory. Its ``tokens`` have shape, dtype and device alone, it has
        no ``scales`` and no ``weights``."""
        source = self.source
        assert isinstance(source, HighThroughputSource)
        tokens = _shape_of(self.tokens)
        return dataclasses.replace(
            self, tokens=tokens, scales=None, weights=None, source=source.without_rows()
        )

    @property
    def capacity(self) -> int | None:
        """The capacity that the dispatch was given, in rows; None if it made room for the rows that
        arrived."""
        source = self.source
        assert isinstance(source, HighThroughputSource)
        return source.capacity


@dataclass(slots=True)
class LowLatencySource(Source):
    """What low latency keeps of a dispatch."""

    dispatched: low_latency.Dispatched
    topk_idx: torch.Tensor | None  # None where the routing has it

    __repr__ = show_fields

    def expert_range(self, index: int) -> tuple[int, int]:
        """Where the rows of a local expert begin, and how many there are."""
        capacity = self.dispatched.tokens.shape[1]
        return index * capacity, int(self.dispatched.counts[index])

    def expert_ranges(self) -> list[tuple[int, int]]:
        """The same of all local experts, read at once."""
        capacity = self.dispatched.tokens.shape[1]
        counts = self.dispatched.counts.tolist()
        return [(index * capacity, count) for index, count in enumerate(counts)]

    def ranks(self, result: DispatchResult) -> torch.Tensor:
        """Each row's source rank, found in the ranges of the ranks."""
        first = self.dispatched.routing.ranges.to(result.tokens.device) >> 32
        places = _positions(result).expand(result.tokens.shape[:2])
        ranks = torch.searchsorted(first.contiguous(), places.contiguous(), right=True) - 1
        return self._valid(result, ranks.to(torch.int32))

    def tokens(self, result: DispatchResult) -> torch.Tensor:
        """Each row's source token."""
        return self._valid(result, self.dispatched.source_tokens.to(result.tokens.device))

    @staticmethod
    def _valid(result: DispatchResult, values: torch.Tensor) -> torch.Tensor:
        unused = _positions(result) >= result.tokens_per_expert.unsqueeze(1)
        return values.masked_fill(unused, -1)


def _positions(result: DispatchResult) -> torch.Tensor:
    return torch.arange(result.tokens.shape[1], device=result.tokens.device, dtype=torch.int64)


@dataclass(frozen=True)
class HighThroughputSource(Source):
    """What high throughput keeps of a dispatch."""

    # On the host, wherever the tokens are; or on the GPU.
    dispatched: high_throughput.Dispatched | CudaDispatched

    __repr__ = show_fields

    @property
    def capacity(self) -> int | None:
        """Rows to allocate, where the dispatch was given a number."""
        return self.dispatched.plan.capacity

    def expert_range(self, index: int) -> tuple[int, int]:
        """Where the rows of a local expert begin, and how many there are."""
        return self.expert_ranges()[index]

    def expert_ranges(self) -> list[tuple[int, int]]:
        """The same of all local experts, read at once."""
        # A CUDA graph writes its plans anew at every replay. They have a capacity; what a plan
        # without one says never changes.
        return self._lasting_ranges if self.capacity is None else self._read()

    @cached_property
    def _lasting_ranges(self) -> list[tuple[int, int]]:
        return self._read()

    def _read(self) -> list[tuple[int, int]]:
        plan = self.dispatched.plan
        both = torch.stack([plan.offsets[:-1], plan.tokens_per_expert.long()])
        begins, counts = both.tolist()
        return list(zip(begins, counts, strict=True))

    def without_rows(self) -> HighThroughputSource:
        """What :meth:`HighThroughputResult.without_rows` keeps."""
        dispatched = dataclasses.replace(
            self.dispatched,
            tokens=_shape_of(self.dispatched.tokens),
            scales=None,
            row_weights=None,
        )
        return HighThroughputSource(dispatched)

    def ranks(self, result: DispatchResult) -> torch.Tensor:
        """Each row's source rank."""
        return self.dispatched.row_source_rank.to(result.tokens.device)

    def tokens(self, result: DispatchResult) -> torch.Tensor:
        """Each row's source token."""
        return self.dispatched.row_source_token.to(result.tokens.device)


def _check_leading(name: str, rows: object, leading: torch.Size) -> None:
    """Raises ArgumentError unless ``rows`` is a tensor whose dimensions begin with ``leading``."""
    shape = f"({', '.join(map(str, leading))}, ...)"
    if not isinstance(rows, torch.Tensor):
        raise ArgumentError(name, worded(rows), f"a torch.Tensor of shape {shape}")
    if rows.shape[: len(leading)] != leading:
        raise ArgumentError(f"{name}.shape", tuple(rows.shape), f"{shape}, as received.tokens")


def _shape_of(rows: torch.Tensor) -> torch.Tensor:
    """A tensor like ``rows`` to look at, but of one element that nobody has written."""
    return rows.new_empty(()).expand(rows.shape)
