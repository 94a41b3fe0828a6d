"""What a routing leaves on a GPU, and what a dispatch brings there."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, field
from functools import cached_property, lru_cache

import torch

from fanfold import _core
from fanfold.backends.high_throughput.protocol import RowOrder
from fanfold.backends.high_throughput.repeats import RepeatedCombine, RepeatedDispatch
from fanfold.errors import ArgumentError, UsageError
from fanfold.lending import address_of
from fanfold.representation import show_fields
from fanfold.stream_order import stream_at

__all__ = [
    "CudaDispatched",
    "CudaPlan",
    "PlanParts",
    "check_plan",
    "copied_words",
    "repeated_combine",
    "repeated_dispatch",
    "sums_of_rows",
]

_LINE_WORDS = 16  # a line of memory


def _words(count: int, dtype: torch.dtype) -> int:
    """Words of 8 bytes for so many numbers."""
    return -(-count * dtype.itemsize // 8)


@dataclass(frozen=True)
class PlanParts:
    """Where the parts of a plan begin in its block, in words of 8 bytes.

    Attributes:
        batches: ``[R, batch_stride]`` int64: which tokens of each source's batches brought a row,
            as the kernels write it.
        offsets, rows, places, source_prefix, first_rows, tokens_per_expert: as in
            :class:`CudaPlan`.
        end: the words of the block.
        batch_stride: words of one source's batches.
    """

    batches: int
    offsets: int
    rows: int
    places: int
    source_prefix: int
    first_rows: int
    tokens_per_expert: int
    end: int
    batch_stride: int

    @staticmethod
    @lru_cache(maxsize=256)
    def of(ranks: int, local: int, top_k: int, tokens: int, batch_stride: int) -> PlanParts:
        """Those of T tokens; a source has at most ``batch_stride`` batches."""
        numbers = (tokens * ranks, tokens * top_k, ranks, ranks, local)
        # The kernel writes one number behind the offsets.
        words = [ranks * batch_stride, local + 2, *(_words(each, torch.int32) for each in numbers)]
        lines = [-(-each // _LINE_WORDS) * _LINE_WORDS for each in words]
        batches, offsets, rows, places, prefix, first_rows, per_expert, end = itertools.accumulate(
            lines, initial=0
        )
        return PlanParts(
            batches, offsets, rows, places, prefix, first_rows, per_expert, end, batch_stride
        )


@dataclass
class CudaPlan:
    """What one routing means on this rank. Reusable: the handle of a cached dispatch. On the GPU.

    N is ``received`` where the CPU knows it, else ``capacity``, of which the first
    ``source_prefix[-1]`` rows are there. If a rank refuses the call, the plan is aborted too:
    ``source_prefix[0]`` is -1, the rest is not written, and later calls with it do nothing.

    Attributes:
        ranks: R.
        num_experts: E.
        top_k: K.
        tokens: T.
        capacity: rows to allocate, where the dispatch was given a number; else None.
        received: rows that come, token-major; None with a capacity.
        expert_rows: rows that come, expert-major, with all padding; None with a capacity.
        block: what the kernel of the plan writes, allocated at once.
        parts: where what is in it.
        source_token: ``[N]`` int32: each row's token index at its source.
        rows_of: ``[N, K]`` int32: the expert-major row of each top-k entry, -1 for experts
            elsewhere and for none; None until a dispatch by this plan was expert-major.
        topk_idx: ``[N, K]`` int64: local expert ids, -1 likewise; None unless the dispatch that
            made the plan was token-major.
        topk_weights: ``[N, K]`` float32, 0 where topk_idx is -1; None likewise, or if no weights
            came along.
        row_weights: of the dispatch that made the plan, if it was expert-major and weighted; a
            cached one brings the same tensor.
        stream: on which it was made.
        used_on: other streams for which the allocator keeps what it has.
        repeated_dispatches, repeated_combines: the last calls by it, by the order of rows.
    """

    ranks: int
    num_experts: int
    top_k: int
    tokens: int
    capacity: int | None
    received: int | None
    expert_rows: int | None
    block: torch.Tensor
    parts: PlanParts
    source_token: torch.Tensor
    rows_of: torch.Tensor | None = None
    topk_idx: torch.Tensor | None = None
    topk_weights: torch.Tensor | None = None
    row_weights: torch.Tensor | None = None
    stream: int = 0
    used_on: set[int] = field(default_factory=set, repr=False, compare=False)
    repeated_dispatches: dict[str, RepeatedDispatch] = field(
        default_factory=dict, repr=False, compare=False
    )
    repeated_combines: dict[str, RepeatedCombine] = field(
        default_factory=dict, repr=False, compare=False
    )

    __repr__ = show_fields

    def tensors(self) -> list[torch.Tensor]:
        """All that is on the GPU."""
        late = (self.rows_of, self.topk_idx, self.topk_weights, self.row_weights)
        return [self.block, self.source_token, *(each for each in late if each is not None)]

    def keep_for(self, stream: int) -> None:
        """Tells the allocator that the current stream, at this address, uses the plan, unless it
        was made on it. The caller, who sees little of the plan, cannot."""
        if stream == self.stream or stream in self.used_on:
            return
        self.used_on.add(stream)  # a record holds until the tensor is freed
        device = self.block.device
        current = torch.cuda.current_stream(device)
        for tensor in self.tensors():
            tensor.record_stream(current)
        if self.rows_of is not None:  # by whose first call it was made, wherever that was
            self.rows_of.record_stream(stream_at(self.stream, device))

    @cached_property
    def rows(self) -> torch.Tensor:
        """``[T, R]`` int32: how many of this rank's rows went to that rank before; -1 where the
        token does not go there."""
        return self._part(self.parts.rows, torch.int32, self.tokens, self.ranks)

    @cached_property
    def places(self) -> torch.Tensor:
        """``[T, K]`` int32: rank << 26 | expert-major row there, of each choice; -1 for none."""
        return self._part(self.parts.places, torch.int32, self.tokens, self.top_k)

    @cached_property
    def source_prefix(self) -> torch.Tensor:
        """``[R]`` int32: rows received from ranks 0 to r."""
        return self._part(self.parts.source_prefix, torch.int32, self.ranks)

    @cached_property
    def first_rows(self) -> torch.Tensor:
        """``[R]`` int32: at each rank the first token-major row of this one."""
        return self._part(self.parts.first_rows, torch.int32, self.ranks)

    @cached_property
    def tokens_per_expert(self) -> torch.Tensor:
        """``[E_l]`` int32: rows of each local expert; a token counts once."""
        return self._part(self.parts.tokens_per_expert, torch.int32, self.local_experts)

    @cached_property
    def offsets(self) -> torch.Tensor:
        """``[E_l + 1]`` int64: where each expert's rows begin in expert-major order, rounded up to
        the alignment; the last is the number of rows with all padding. Of an expert-major dispatch
        with a capacity both speak of the rows that fit, in an aborted one of none."""
        return self._part(self.parts.offsets, torch.int64, self.local_experts + 1)

    def _part(self, begin: int, dtype: torch.dtype, *shape: int) -> torch.Tensor:
        words = self.block[begin : begin + _words(math.prod(shape), dtype)]
        return words.view(dtype)[: math.prod(shape)].view(shape)

    def fill_plan(self, args: _core.CudaPlanArgs) -> None:
        """Fills in, for the kernel that makes the plan, where it goes."""
        args.places = self._fill(args) + 8 * self.parts.places

    def fill_dispatch(self, args: _core.CudaHighThroughputDispatchArgs) -> None:
        """Fills in, for a dispatch, where the plan is."""
        at, parts = self._fill(args), self.parts
        args.topk_words = at + 8 * parts.places
        args.batches, args.batch_stride = at + 8 * parts.batches, parts.batch_stride
        args.marks_absent = self.capacity is not None

    def _fill(self, args: _core.CudaPlanArgs | _core.CudaHighThroughputDispatchArgs) -> int:
        """Fills in what both have; returns where the block is."""
        args.tokens, at, parts = self.tokens, self.block.data_ptr(), self.parts
        args.rows, args.first_rows = at + 8 * parts.rows, at + 8 * parts.first_rows
        args.source_prefix = at + 8 * parts.source_prefix
        args.offsets = at + 8 * parts.offsets
        args.tokens_per_expert = at + 8 * parts.tokens_per_expert
        return at

    def fill_combine(self, args: _core.CudaHighThroughputCombineArgs) -> None:
        """Fills in, for a combine, where the plan is."""
        args.tokens, at, parts = self.tokens, self.block.data_ptr(), self.parts
        args.batches, args.batch_stride = at + 8 * parts.batches, parts.batch_stride
        args.source_prefix, args.rows = at + 8 * parts.source_prefix, at + 8 * parts.rows
        args.kept = len(self.source_token)
        args.rows_of = address_of(self.rows_of)

    @property
    def source_prefix_address(self) -> int:
        """Of :attr:`source_prefix`."""
        return self.block.data_ptr() + 8 * self.parts.source_prefix

    @property
    def local_experts(self) -> int:
        """E_l."""
        return self.num_experts // self.ranks

    @property
    def is_token_in_rank(self) -> torch.Tensor:
        """``[T, R]`` bool: where the own tokens go."""
        return self.rows >= 0

    def row_count(self, layout: RowOrder) -> int:
        """Rows of the received tensor in ``layout``."""
        if self.capacity is not None:
            return self.capacity
        count = self.received if layout == "token_major" else self.expert_rows
        assert count is not None
        return count

    def weights_of_rows(self, rows: int) -> torch.Tensor:
        """The ``row_weights`` of :class:`CudaDispatched` where a new dispatch was token-major, and
        another one has found ``rows_of``."""
        assert self.rows_of is not None
        assert self.topk_weights is not None
        return sums_of_rows(self.rows_of, self.topk_weights, rows)


def repeated_dispatch(plan: object, layout: object) -> RepeatedDispatch | None:
    """The last cached dispatch by what a caller passes for a plan, in what it says is an order."""
    if isinstance(plan, CudaPlan) and isinstance(layout, str):
        return plan.repeated_dispatches.get(layout)
    return None


def repeated_combine(plan: object, layout: object) -> RepeatedCombine | None:
    """The last combine by it."""
    if isinstance(plan, CudaPlan) and isinstance(layout, str):
        return plan.repeated_combines.get(layout)
    return None


def check_plan(plan: CudaPlan, ranks: int, layout: RowOrder | None = None) -> None:
    """Raises unless a group of so many ranks can make calls by ``plan``; combines in ``layout``."""
    if not isinstance(plan, CudaPlan):
        raise ArgumentError("plan", f"a {type(plan).__name__}", "the plan of a dispatch here")
    if plan.ranks != ranks:
        raise ArgumentError("plan.ranks", plan.ranks, f"{ranks}, as in this group")
    if layout == "expert_major" and plan.rows_of is None:
        raise UsageError(
            "a combine in expert-major order needs a plan by which a dispatch, new or cached, "
            "was expert-major"
        )


def copied_words(local: int) -> int:
    """Words of 8 bytes for copies of a plan's offsets and tokens_per_expert."""
    return local + 1 + (local + 1) // 2


def sums_of_rows(places: torch.Tensor, entries: torch.Tensor, rows: int) -> torch.Tensor:
    """``[rows]`` float32: of each expert-major row the sum, in top-k order, of its entries.

    Args:
        places: ``[N, K]`` int32: the row of each top-k entry, -1 for none.
        entries: ``[N, K]`` float32.
        rows: how many there are.
    """
    sums = torch.zeros(rows + 1, dtype=torch.float32, device=places.device)
    # Tokens never share a row, except the extra last one, which collects entries without a row.
    for k in range(places.shape[1]):
        row = places[:, k]
        sums.index_add_(0, torch.where(row < 0, rows, row), entries[:, k])
    return sums[:rows]


@dataclass
class CudaDispatched:
    """What one dispatch brings to this rank.

    ``rows`` is, expert-major, ``plan.expert_rows``; token-major, ``plan.received``; or the capacity
    asked for, of which the rows behind ``plan.offsets[-1]``, or N, are not written in ``tokens``
    and ``scales``.

    Attributes:
        tokens: ``[rows, hidden]``, dtype as sent. Rows between experts are zero.
        scales: ``[rows, S]`` as sent, row-major; None if rows came without.
        plan: the routing.
        row_weights: ``[rows]`` float32, expert-major only: the sum, in top-k order, of the weights
            that the row's token gives the row's expert; 0 where there is no row. None without
            weights.
        sources: ``[2, rows]`` or more, int32: :attr:`row_source_rank` and
            :attr:`row_source_token`.
        counts: expert-major only, ``[copied_words(E_l)]`` int64: :attr:`offsets` and
            :attr:`tokens_per_expert`.
    """

    tokens: torch.Tensor
    scales: torch.Tensor | None
    plan: CudaPlan
    row_weights: torch.Tensor | None
    sources: torch.Tensor
    counts: torch.Tensor | None = None

    __repr__ = show_fields

    # Views of what one call allocates at once, as hardly any caller looks at them.

    @property
    def row_source_rank(self) -> torch.Tensor:
        """``[rows]`` int32, -1 where there is no row."""
        return self.sources[0]

    @property
    def row_source_token(self) -> torch.Tensor:
        """``[rows]`` int32: each row's token index at its source; -1 likewise."""
        return self.sources[1]

    @property
    def offsets(self) -> torch.Tensor | None:
        """Expert-major only: those of the plan, copied for the caller, as later calls read the
        plan's."""
        return None if self.counts is None else self.counts[: self.plan.local_experts + 1]

    @property
    def tokens_per_expert(self) -> torch.Tensor | None:
        """Likewise."""
        if self.counts is None:
            return None
        begin, local = 2 * (self.plan.local_experts + 1), self.plan.local_experts
        return self.counts.view(torch.int32)[begin : begin + local]

    def place(self, args: _core.CudaHighThroughputDispatchArgs) -> None:
        """Tells ``args`` where the results go, but those that a plan keeps."""
        rows = self.tokens.shape[0]
        args.capacity = rows
        args.out = self.tokens.data_ptr()
        args.out_scales = 0 if self.scales is None else self.scales.data_ptr()
        args.row_source_rank = at = self.sources.data_ptr()
        args.row_source_token = at + 4 * rows
        args.offsets_copy = args.tokens_per_expert_copy = 0
        if self.counts is not None:
            args.offsets_copy = at = self.counts.data_ptr()
            args.tokens_per_expert_copy = at + 8 * (self.plan.local_experts + 1)
