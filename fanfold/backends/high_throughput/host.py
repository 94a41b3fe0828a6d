"""The high-throughput mode on the CPU, over shared memory of the host."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fanfold import _core
from fanfold.backends.high_throughput.protocol import (
    MOST_ALIGNMENT,
    MOST_ROWS,
    MOST_SMS,
    RowOrder,
    Rows,
    check_biases,
    check_capacity,
    check_layout,
    check_outputs,
    check_returned_weights,
    check_routing,
    check_rows,
    quantized,
)
from fanfold.config import Config
from fanfold.errors import ArgumentError
from fanfold.formats import ScaleFormat
from fanfold.geometry import check_integer, check_tensor
from fanfold.lending import lend, lend_if_given
from fanfold.memory.host import SymmetricMemory
from fanfold.pool import OutputPool
from fanfold.refusal import Refusing, tell
from fanfold.representation import show_fields, worded

__all__ = ["Dispatched", "HostHighThroughput", "Plan"]

_CPU = torch.device("cpu")


@dataclass(frozen=True)
class Plan:
    """What one routing means on this rank. Reusable: the handle of a cached dispatch. On the CPU.

    Attributes:
        ranks: R.
        num_experts: E.
        top_k: K.
        tokens: T.
        is_token_in_rank: ``[T, R]`` bool: where the own tokens go.
        received: N.
        source_prefix: ``[R]`` int32: rows received from ranks 0 to r.
        source_token: ``[N]`` int32: each row's token index at its source.
        topk_idx: ``[N, K]`` int64: local expert ids, -1 for experts elsewhere and for none.
        topk_weights: ``[N, K]`` float32, 0 where topk_idx is -1; None if no weights came along.
        tokens_per_expert: ``[E_l]`` int32: rows of each local expert; a token counts once.
        offsets: ``[E_l + 1]`` int64: where each expert's rows begin in expert-major order, rounded
            up to the alignment; the last is the number of rows with all padding.
        rows_of: ``[N, K]`` int32: the expert-major row of each top-k entry, -1 where topk_idx is
            -1. Entries of one row that name one expert share its row.
        capacity: rows to allocate, where the dispatch was given a number; else None.
    """

    ranks: int
    num_experts: int
    top_k: int
    tokens: int
    is_token_in_rank: torch.Tensor
    received: int
    source_prefix: torch.Tensor
    source_token: torch.Tensor
    topk_idx: torch.Tensor
    topk_weights: torch.Tensor | None
    tokens_per_expert: torch.Tensor
    offsets: torch.Tensor
    rows_of: torch.Tensor
    capacity: int | None = None

    __repr__ = show_fields

    def __post_init__(self) -> None:
        """Checks that every tensor has its shape and dtype.

        Raises:
            ArgumentError: for the first that has not.
        """
        entries, experts = (self.received, self.top_k), self.num_experts // self.ranks
        for name, shape, dtype in (
            ("is_token_in_rank", (self.tokens, self.ranks), torch.bool),
            ("source_prefix", (self.ranks,), torch.int32),
            ("source_token", (self.received,), torch.int32),
            ("topk_idx", entries, torch.int64),
            ("tokens_per_expert", (experts,), torch.int32),
            ("offsets", (experts + 1,), torch.int64),
            ("rows_of", entries, torch.int32),
        ):
            check_tensor(f"plan.{name}", getattr(self, name), shape, (dtype,), device=_CPU)
        if self.topk_weights is not None:
            check_tensor("plan.topk_weights", self.topk_weights, entries, (torch.float32,),
                         device=_CPU)  # fmt: skip

    def needed(self, layout: RowOrder) -> int:
        """Rows that arrive in ``layout``, the padding between experts included."""
        return self.received if layout == "token_major" else int(self.offsets[-1])

    def rows(self, layout: RowOrder) -> int:
        """Rows of the received tensor in ``layout``."""
        return self.needed(layout) if self.capacity is None else self.capacity

    def allowed(self, layout: RowOrder) -> list[int]:
        """How many rows a tensor of outputs in ``layout`` may have."""
        return sorted({self.needed(layout), self.rows(layout)})


@dataclass(frozen=True)
class Dispatched:
    """What one dispatch brings to this rank.

    ``rows`` is, expert-major, ``plan.offsets[-1]``; token-major, N; or the capacity asked for.

    Attributes:
        tokens: ``[rows, hidden]``, dtype as sent. Rows that no token fills are zero.
        scales: ``[rows, S]`` as sent, row-major; None if rows came without.
        plan: the routing.
        row_weights: ``[rows]`` float32, expert-major only: the sum, in top-k order, of the weights
            that the row's token gives the row's expert; 0 where there is no row. None without
            weights.
        row_source_rank: ``[rows]`` int32, -1 where there is no row.
        row_source_token: ``[rows]`` int32: each row's token index at its source; -1 likewise.
        offsets, tokens_per_expert: those of the plan, copied for the caller, as later calls read
            the plan's.
    """

    tokens: torch.Tensor
    scales: torch.Tensor | None
    plan: Plan
    row_weights: torch.Tensor | None
    row_source_rank: torch.Tensor
    row_source_token: torch.Tensor
    offsets: torch.Tensor
    tokens_per_expert: torch.Tensor

    __repr__ = show_fields


class HostHighThroughput:
    """High-throughput calls over one part of a symmetric memory, on CPU tensors; see
    :class:`HighThroughputBackend`.

    Args:
        memory: the ranks' symmetric memory; must stay open as long as this object is used.
        offset: where this mode's part begins, in bytes.
        nbytes: size of this mode's part; what :meth:`staging_bytes` says, or any that is larger
            than its fixed part.
        quantize_to: rows that come without scales travel as fp8 with such ones.
    """

    device = _CPU

    def __init__(
        self,
        memory: SymmetricMemory,
        offset: int,
        nbytes: int,
        quantize_to: ScaleFormat | None = None,
    ) -> None:
        self._memory, self._quantize_to = memory, quantize_to
        self._core = _core.HighThroughput(memory.core, offset, nbytes)
        self._ranks = self._core.ranks
        self._pool = OutputPool()

    @staticmethod
    def staging_bytes(ranks: int, config: Config) -> int:
        """Bytes of symmetric memory per rank: ``config.staging_bytes`` and a fixed part of
        ``131072 + 280 * ranks`` and rounding (docs/high_throughput.md)."""
        return _core.HighThroughput.required_bytes(ranks, config.staging_bytes)

    def dispatch(
        self,
        x: Rows,
        topk_idx: torch.Tensor,
        topk_weights: torch.Tensor | None = None,
        *,
        num_experts: int,
        layout: RowOrder = "expert_major",
        expert_alignment: int = 1,
        capacity: int | None = None,
        in_place: bool = False,
    ) -> Dispatched:
        """See :meth:`HighThroughputBackend.dispatch`."""
        del in_place  # rows arrive in tensors of their own
        self._memory.check()
        with Refusing(self.refuse_dispatch):
            check_layout(layout)
            check_integer("expert_alignment", expert_alignment, 1, MOST_ALIGNMENT)
            if capacity is not None:
                check_integer("capacity", capacity, 0, MOST_ROWS)
            x = quantized(x, self._quantize_to)
            values, scales = check_rows(x, _CPU)
            check_routing(topk_idx, topk_weights, values.shape[0], num_experts, self._ranks, _CPU)
            draft = _Draft.of(topk_idx, num_experts, self._ranks)
        sent = _sent(values, scales)
        sent.topk_idx, sent.topk_weights = lend(topk_idx), lend_if_given(topk_weights)
        sent.weighted = topk_weights is not None
        sent.experts, sent.top_k = num_experts, topk_idx.shape[1]
        arriving = draft.core()
        self._core.exchange_counts(sent, arriving, expert_alignment)
        with Refusing(self.refuse_dispatch):
            plan = draft.complete(arriving.received, topk_weights is not None, capacity)
            check_capacity(plan.capacity, plan.needed(layout))
            dispatched = _allocate(self._pool, plan, x, layout)
        self._core.dispatch_rows(sent, _core_plan(plan), _into(dispatched, layout))
        self._memory.warn_of_late()
        return dispatched

    def dispatch_cached(
        self,
        x: Rows,
        plan: Plan,
        *,
        layout: RowOrder,
        in_place: bool = False,
    ) -> Dispatched:
        """See :meth:`HighThroughputBackend.dispatch_cached`."""
        del in_place  # rows arrive in tensors of their own
        self._memory.check()
        with Refusing(self.refuse_dispatch):
            check_layout(layout)
            self._check_plan(plan)
            x = quantized(x, self._quantize_to)
            values, scales = check_rows(x, _CPU)
            if values.shape[0] != plan.tokens:
                bound = f"{plan.tokens}, the tokens of the plan"
                raise ArgumentError("x.shape[0]", values.shape[0], bound)
            dispatched = _allocate(self._pool, plan, x, layout)
        sent = _sent(values, scales)
        sent.experts, sent.top_k = plan.num_experts, plan.top_k
        self._core.dispatch_cached(sent, _core_plan(plan), _into(dispatched, layout))
        self._memory.warn_of_late()
        return dispatched

    def combine(
        self,
        y: torch.Tensor,
        plan: Plan,
        *,
        layout: RowOrder,
        row_weights: torch.Tensor | None = None,
        topk_weights: torch.Tensor | None = None,
        bias: torch.Tensor | tuple[torch.Tensor, ...] | None = None,
        out: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """See :meth:`HighThroughputBackend.combine`."""
        self._memory.check()
        with Refusing(self.refuse_combine):
            check_layout(layout)
            self._check_plan(plan)
            check_outputs(y, plan.allowed(layout), layout, row_weights, _CPU)
            sums = self._returned_weights(topk_weights, plan, layout, y.shape[0])
            shape = (plan.tokens, y.shape[1])
            biases = check_biases(bias, shape, _CPU)
            if out is None:
                out = self._pool.empty(shape, torch.bfloat16)
            check_tensor("out", out, shape, (torch.bfloat16,), device=_CPU)
        given = _outputs(layout, row_weights, topk_weights)
        given.y, given.hidden = lend(y), y.shape[1]
        result = _core.HighThroughputResult()
        result.out, result.weights = lend(out), lend_if_given(sums)
        for place, rows in enumerate(biases):
            result.set_bias(place, lend(rows))
        self._core.combine(given, _core_plan(plan), result)
        self._memory.warn_of_late()
        return out, sums

    def combine_weights(
        self, topk_weights: torch.Tensor, plan: Plan, *, layout: RowOrder
    ) -> torch.Tensor:
        """See :meth:`HighThroughputBackend.combine_weights`."""
        self._memory.check()
        with Refusing(self.refuse_combine):
            check_layout(layout)
            self._check_plan(plan)
            sums = self._returned_weights(topk_weights, plan, layout, None)
            if sums is None:
                raise ArgumentError("topk_weights", None, "a torch.Tensor")
        result = _core.HighThroughputResult()
        result.weights = lend(sums)
        self._core.combine(_outputs(layout, None, topk_weights), _core_plan(plan), result)
        self._memory.warn_of_late()
        return sums

    def use_sms(self, sms: int | None) -> None:
        """See :meth:`HighThroughputBackend.use_sms`."""
        if sms is not None:
            check_integer("sms", sms, 1, MOST_SMS)

    def use_zero_padding(self, zeros: bool) -> None:
        """See :meth:`HighThroughputBackend.use_zero_padding`."""

    def check_devices(self, **tensors: object) -> None:
        """See :meth:`HighThroughputBackend.check_devices`; each call checks its own."""

    def check(self) -> None:
        """See :meth:`SymmetricMemory.check`."""
        self._memory.check()

    def refuse_dispatch(self, error: BaseException, plan: object = None) -> None:
        """See :meth:`HighThroughputBackend.refuse_dispatch`."""
        del plan  # no plan is of an aborted call here
        tell(self._core.refuse_dispatch, error)

    def refuse_combine(self, error: BaseException, plan: object = None) -> None:
        """See :meth:`HighThroughputBackend.refuse_combine`."""
        del plan
        tell(self._core.refuse_combine, error)

    @staticmethod
    def _returned_weights(
        topk_weights: torch.Tensor | None, plan: Plan, layout: RowOrder, rows: int | None
    ) -> torch.Tensor | None:
        """Room for the sums of the weights that return, if any do."""
        if topk_weights is None:
            return None
        check_returned_weights(topk_weights, plan.allowed(layout), layout, rows, plan.top_k, _CPU)
        return torch.empty((plan.tokens, plan.top_k), dtype=torch.float32, device=_CPU)

    def _check_plan(self, plan: Plan) -> None:
        if not isinstance(plan, Plan):
            raise ArgumentError("plan", worded(plan), "the plan of a dispatch")
        if plan.ranks != self._ranks:
            raise ArgumentError("plan.ranks", plan.ranks, f"{self._ranks}, as in this group")


@dataclass
class _Draft:
    """A plan before anything has arrived."""

    num_experts: int
    top_k: int
    is_token_in_rank: torch.Tensor
    source_prefix: torch.Tensor
    tokens_per_expert: torch.Tensor
    offsets: torch.Tensor

    @classmethod
    def of(cls, topk_idx: torch.Tensor, num_experts: int, ranks: int) -> _Draft:
        tokens, top_k = topk_idx.shape
        return cls(
            num_experts,
            top_k,
            torch.empty((tokens, ranks), dtype=torch.bool, device=_CPU),
            torch.empty(ranks, dtype=torch.int32, device=_CPU),
            torch.empty(num_experts // ranks, dtype=torch.int32, device=_CPU),
            torch.empty(num_experts // ranks + 1, dtype=torch.int64, device=_CPU),
        )

    def core(self) -> _core.HighThroughputPlan:
        plan = _core.HighThroughputPlan()
        plan.experts, plan.top_k = self.num_experts, self.top_k
        plan.tokens = self.is_token_in_rank.shape[0]
        plan.is_token_in_rank = lend(self.is_token_in_rank)
        plan.source_prefix = lend(self.source_prefix)
        plan.tokens_per_expert = lend(self.tokens_per_expert)
        plan.offsets = lend(self.offsets)
        return plan

    def complete(self, received: int, weighted: bool, capacity: int | None) -> Plan:
        shape = (received, self.top_k)
        tokens, ranks = self.is_token_in_rank.shape
        return Plan(
            ranks=ranks,
            num_experts=self.num_experts,
            top_k=self.top_k,
            tokens=tokens,
            is_token_in_rank=self.is_token_in_rank,
            received=received,
            source_prefix=self.source_prefix,
            source_token=torch.empty(received, dtype=torch.int32, device=_CPU),
            topk_idx=torch.empty(shape, dtype=torch.int64, device=_CPU),
            topk_weights=torch.empty(shape, dtype=torch.float32, device=_CPU) if weighted else None,
            tokens_per_expert=self.tokens_per_expert,
            offsets=self.offsets,
            rows_of=torch.empty(shape, dtype=torch.int32, device=_CPU),
            capacity=capacity,
        )


def _core_plan(plan: Plan) -> _core.HighThroughputPlan:
    core = _core.HighThroughputPlan()
    core.experts, core.top_k = plan.num_experts, plan.top_k
    core.tokens, core.received = plan.tokens, plan.received
    core.is_token_in_rank = lend(plan.is_token_in_rank)
    core.source_prefix = lend(plan.source_prefix)
    core.tokens_per_expert = lend(plan.tokens_per_expert)
    core.offsets = lend(plan.offsets)
    core.source_token = lend(plan.source_token)
    core.topk_idx, core.topk_weights = lend(plan.topk_idx), lend_if_given(plan.topk_weights)
    core.rows_of = lend(plan.rows_of)
    return core


def _sent(values: torch.Tensor, scales: torch.Tensor | None) -> _core.HighThroughputTokens:
    sent = _core.HighThroughputTokens()
    sent.rows, sent.tokens = lend(values), values.shape[0]
    sent.row_bytes = values.shape[1] * values.itemsize
    if scales is not None:
        sent.scales, sent.scale_words = lend(scales), scales.shape[1]
        sent.scale_token_stride, sent.scale_word_stride = scales.stride()
    return sent


def _allocate(pool: OutputPool, plan: Plan, rows: Rows, layout: RowOrder) -> Dispatched:
    count = plan.rows(layout)
    values, scales = rows if isinstance(rows, tuple) else (rows, None)
    weighted = layout == "expert_major" and plan.topk_weights is not None
    return Dispatched(
        tokens=pool.empty((count, values.shape[1]), values.dtype),
        scales=None if scales is None else pool.empty((count, scales.shape[1]), scales.dtype),
        plan=plan,
        row_weights=pool.empty((count,), torch.float32) if weighted else None,
        row_source_rank=pool.empty((count,), torch.int32),
        row_source_token=pool.empty((count,), torch.int32),
        offsets=plan.offsets.clone(),
        tokens_per_expert=plan.tokens_per_expert.clone(),
    )


def _into(dispatched: Dispatched, layout: RowOrder) -> _core.HighThroughputReceived:
    into = _core.HighThroughputReceived()
    into.rows, into.capacity = lend(dispatched.tokens), dispatched.tokens.shape[0]
    into.scales = lend_if_given(dispatched.scales)
    into.row_weights = lend_if_given(dispatched.row_weights)
    into.row_source_rank = lend(dispatched.row_source_rank)
    into.row_source_token = lend(dispatched.row_source_token)
    into.expert_major = layout == "expert_major"
    return into


def _outputs(
    layout: RowOrder, row_weights: torch.Tensor | None, topk_weights: torch.Tensor | None
) -> _core.HighThroughputOutputs:
    given = _core.HighThroughputOutputs()
    given.expert_major = layout == "expert_major"
    given.row_weights, given.topk_weights = lend_if_given(row_weights), lend_if_given(topk_weights)
    given.weighted = topk_weights is not None
    return given
