"""What a routing leaves on a GPU, and what a dispatch brings there."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fanfold import _core
from fanfold.backends.high_throughput.protocol import RowOrder
from fanfold.representation import show_fields

__all__ = ["CudaDispatched", "CudaPlan", "sums_of_rows"]


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
        rows: ``[T, R]`` int32: how many of this rank's rows went to that rank before; -1 where the
            token does not go there.
        places: ``[T, K]`` int32: rank << 26 | expert-major row there, of each choice; -1 for none.
        source_prefix: ``[R]`` int32: rows received from ranks 0 to r.
        first_rows: ``[R]`` int32: at each rank the first token-major row of this one.
        source_token: ``[N]`` int32: each row's token index at its source.
        tokens_per_expert: ``[E_l]`` int32: rows of each local expert; a token counts once.
        offsets: ``[E_l + 1]`` int64: where each expert's rows begin in expert-major order, rounded
            up to the alignment; the last is the number of rows with all padding. Of an expert-major
            dispatch with a capacity both speak of the rows that fit, in an aborted one of none.
        batches: ``[R, most_batches(max_tokens)]`` int64: which tokens of each source's batches
            brought a row, as the kernels write it.
        rows_of: ``[N, K]`` int32: the expert-major row of each top-k entry, -1 for experts
            elsewhere and for none; None until a dispatch by this plan was expert-major.
        topk_idx: ``[N, K]`` int64: local expert ids, -1 likewise; None unless the dispatch that
            made the plan was token-major.
        topk_weights: ``[N, K]`` float32, 0 where topk_idx is -1; None likewise, or if no weights
            came along.
        row_weights: of the dispatch that made the plan, if it was expert-major and weighted; a
            cached one brings the same tensor.
        stream: on which it was made.
    """

    ranks: int
    num_experts: int
    top_k: int
    tokens: int
    capacity: int | None
    received: int | None
    expert_rows: int | None
    rows: torch.Tensor
    places: torch.Tensor
    source_prefix: torch.Tensor
    first_rows: torch.Tensor
    source_token: torch.Tensor
    tokens_per_expert: torch.Tensor
    offsets: torch.Tensor
    batches: torch.Tensor
    rows_of: torch.Tensor | None = None
    topk_idx: torch.Tensor | None = None
    topk_weights: torch.Tensor | None = None
    row_weights: torch.Tensor | None = None
    stream: int = 0

    __repr__ = show_fields

    def tensors(self) -> list[torch.Tensor]:
        """All that is on the GPU."""
        return [value for value in vars(self).values() if isinstance(value, torch.Tensor)]

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
        row_source_rank: ``[rows]`` int32, -1 where there is no row.
        row_source_token: ``[rows]`` int32: each row's token index at its source; -1 likewise.
        offsets, tokens_per_expert: expert-major only: those of the plan, copied for the caller, as
            later calls read the plan's.
    """

    tokens: torch.Tensor
    scales: torch.Tensor | None
    plan: CudaPlan
    row_weights: torch.Tensor | None
    row_source_rank: torch.Tensor
    row_source_token: torch.Tensor
    offsets: torch.Tensor | None = None
    tokens_per_expert: torch.Tensor | None = None

    __repr__ = show_fields

    def place(self, args: _core.CudaHighThroughputDispatchArgs) -> None:
        """Tells ``args`` where the results go, but those that a plan keeps."""
        args.capacity = self.tokens.shape[0]
        args.out = self.tokens.data_ptr()
        args.out_scales = 0 if self.scales is None else self.scales.data_ptr()
        args.row_source_rank = self.row_source_rank.data_ptr()
        args.row_source_token = self.row_source_token.data_ptr()
        args.offsets_copy = args.tokens_per_expert_copy = 0
        if self.offsets is not None and self.tokens_per_expert is not None:
            args.offsets_copy = self.offsets.data_ptr()
            args.tokens_per_expert_copy = self.tokens_per_expert.data_ptr()
