"""What a dispatch of the native face brings: rows sorted by local expert, and where they came from.

Low latency and high throughput lay rows out differently, each as its consumers want them;
:meth:`Received.expert` and ``offsets`` read the same in both.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

import torch

from fanfold import high_throughput, low_latency
from fanfold.copying import not_copied
from fanfold.errors import ArgumentError, UsageError
from fanfold.geometry import check_integer
from fanfold.high_throughput.plan import CudaDispatched
from fanfold.representation import show_fields, worded

__all__ = ["HighThroughputSource", "LowLatencySource", "Received"]


@not_copied(
    why="it belongs to the call of one ExpertParallel, whose memory the ranks share",
    instead="Clone the tensors that you need, and pass the object itself to combine.",
)
@dataclass
class Received:
    """The rows that one dispatch brought to this rank, sorted by local expert.

    E_l local experts; inside an expert, rows are sorted by source rank, then source token. In low
    latency C = ranks * max_tokens, and only the first ``tokens_per_expert[e]`` rows of expert e are
    written; after a dispatch with ``return_hook`` nothing is valid before the hook has run.

    Attributes:
        tokens: low latency ``[E_l, C, hidden]``, high throughput ``[rows, hidden]``; bfloat16 or
            float8_e4m3fn. High throughput pads each expert to ``expert_alignment`` with zero rows.
        scales: scales of fp8 rows, same leading dimensions as ``tokens``; else None.
        weights: float32, leading dimensions of ``tokens``: the routing weight of each row; None if
            dispatch had none.
        tokens_per_expert: ``[E_l]`` int32: valid rows of each local expert.
        offsets: ``[E_l + 1]`` int64: where each expert begins in ``tokens.flatten(0, -2)``.
        num_tokens: tokens of this rank's own call.
        owner: the ExpertParallel it belongs to.
        source: what the mode keeps to combine.
        complete: whether everything has arrived.
    """

    tokens: torch.Tensor
    scales: torch.Tensor | None
    weights: torch.Tensor | None
    tokens_per_expert: torch.Tensor
    offsets: torch.Tensor
    num_tokens: int
    owner: object = field(repr=False)
    source: LowLatencySource | HighThroughputSource = field(repr=False)
    complete: bool = field(default=True)
    _begins: torch.Tensor = field(init=False, repr=False, compare=False)

    __repr__ = show_fields

    @classmethod
    def in_low_latency(
        cls,
        dispatched: low_latency.Dispatched,
        topk_idx: torch.Tensor | None,
        offsets: torch.Tensor,
        owner: object,
        complete: bool,
    ) -> Received:
        """What a low-latency dispatch brought, with as little of the CPU's time as that takes.

        Args:
            dispatched: by the mode.
            topk_idx: as dispatched; None where the routing has it.
            offsets: the attribute; of every call, so it is copied for who asks for it.
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
            """The weights and offsets of a low-latency dispatch, from when somebody first asks for
            them."""
            if name == "weights":
                self.weights = self.source.dispatched.row_weights
                return self.weights
            if name == "offsets":
                self.offsets = self._begins.clone()
                return self.offsets
            raise AttributeError(f"{type(self).__name__} has no {name!r}", name=name, obj=self)

    def expert(self, index: int, of: torch.Tensor | None = None) -> torch.Tensor:
        """The valid rows of local expert ``index``: a view ``[n, hidden]`` of ``tokens``.

        This reads where the rows are, so on a GPU it waits for the stream and cannot be captured in
        a graph: at every call in low latency, and after a dispatch with a capacity; else at the
        first call only, for all experts. :meth:`places` is one such wait for a whole loop; without
        any, hand ``tokens`` and ``tokens_per_expert`` (and ``offsets``) to a masked or grouped
        matrix product instead.

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
        begin, count = self.source.place(index)
        # Not through flatten(), which copies what it cannot view.
        return rows[index, :count] if len(leading) == 2 else rows[begin : begin + count]

    def places(self) -> list[tuple[int, int]]:
        """Of each local expert, where its valid rows begin in ``tokens.flatten(0, -2)`` and how
        many there are. On a GPU one copy, which waits for the stream."""
        return self.source.places()

    def without_rows(self) -> Received:
        """What later calls by this routing take in place of it, in high throughput: whoever keeps
        it does not keep the rows in memory. Its ``tokens`` have shape, dtype and device alone, it
        has no ``scales`` and no ``weights``.

        Raises:
            UsageError: it came by low latency, whose routing cannot be sent over again.
        """
        if not isinstance(self.source, HighThroughputSource):
            raise UsageError("without_rows() is for high_throughput, and this came by low_latency")
        tokens, source = _shape_of(self.tokens), self.source.without_rows()
        return dataclasses.replace(self, tokens=tokens, scales=None, weights=None, source=source)

    @property
    def capacity(self) -> int | None:
        """Rows that high throughput was told to allocate; None where it made room for those that
        came, and in low latency."""
        source = self.source
        return source.capacity if isinstance(source, HighThroughputSource) else None

    # Neither is kept: a CUDA graph that holds the dispatch changes them at every replay.

    @property
    def source_rank(self) -> torch.Tensor:
        """int32, leading dimensions of ``tokens``: the rank each row came from, -1 for none."""
        return self.source.ranks(self)

    @property
    def source_token(self) -> torch.Tensor:
        """int32, leading dimensions of ``tokens``: each row's token index there, -1 for none."""
        return self.source.tokens(self)


@dataclass(slots=True)
class LowLatencySource:
    """What low latency keeps of a dispatch."""

    dispatched: low_latency.Dispatched
    topk_idx: torch.Tensor | None  # None where the routing has it

    __repr__ = show_fields

    def place(self, index: int) -> tuple[int, int]:
        """Where the rows of a local expert begin, and how many there are."""
        capacity = self.dispatched.tokens.shape[1]
        return index * capacity, int(self.dispatched.counts[index])

    def places(self) -> list[tuple[int, int]]:
        """The same of all local experts, read at once."""
        capacity = self.dispatched.tokens.shape[1]
        counts = self.dispatched.counts.tolist()
        return [(index * capacity, count) for index, count in enumerate(counts)]

    def ranks(self, received: Received) -> torch.Tensor:
        """Each row's source rank, found in the ranges of the ranks."""
        first = self.dispatched.routing.ranges.to(received.tokens.device) >> 32
        places = _places(received).expand(received.tokens.shape[:2])
        ranks = torch.searchsorted(first.contiguous(), places.contiguous(), right=True) - 1
        return self._valid(received, ranks.to(torch.int32))

    def tokens(self, received: Received) -> torch.Tensor:
        """Each row's source token."""
        return self._valid(received, self.dispatched.source_tokens.to(received.tokens.device))

    @staticmethod
    def _valid(received: Received, values: torch.Tensor) -> torch.Tensor:
        unused = _places(received) >= received.tokens_per_expert.unsqueeze(1)
        return values.masked_fill(unused, -1)


def _places(received: Received) -> torch.Tensor:
    return torch.arange(received.tokens.shape[1], device=received.tokens.device, dtype=torch.int64)


@dataclass(frozen=True)
class HighThroughputSource:
    """What high throughput keeps of a dispatch."""

    # On the host, wherever the tokens are; or on the GPU.
    dispatched: high_throughput.Dispatched | CudaDispatched

    __repr__ = show_fields

    @property
    def capacity(self) -> int | None:
        """Rows to allocate, where the dispatch was given a number."""
        return self.dispatched.plan.capacity

    def place(self, index: int) -> tuple[int, int]:
        """Where the rows of a local expert begin, and how many there are."""
        return self.places()[index]

    def places(self) -> list[tuple[int, int]]:
        """The same of all local experts, read at once."""
        # A CUDA graph writes its plans anew at every replay. They have a capacity; what a plan
        # without one says never changes.
        return self._lasting_places if self.capacity is None else self._read()

    @cached_property
    def _lasting_places(self) -> list[tuple[int, int]]:
        return self._read()

    def _read(self) -> list[tuple[int, int]]:
        plan = self.dispatched.plan
        both = torch.stack([plan.offsets[:-1], plan.tokens_per_expert.long()])
        begins, counts = both.tolist()
        return list(zip(begins, counts, strict=True))

    def without_rows(self) -> HighThroughputSource:
        """What :meth:`Received.without_rows` keeps of it."""
        dispatched = dataclasses.replace(
            self.dispatched,
            tokens=_shape_of(self.dispatched.tokens),
            scales=None,
            row_weights=None,
        )
        return HighThroughputSource(dispatched)

    def ranks(self, received: Received) -> torch.Tensor:
        """Each row's source rank."""
        return self.dispatched.row_source_rank.to(received.tokens.device)

    def tokens(self, received: Received) -> torch.Tensor:
        """Each row's source token."""
        return self.dispatched.row_source_token.to(received.tokens.device)


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
