"""The low-latency mode: dispatch and combine for decoding, one row per token and rank.

Each call has a send half and a receive half. Without a hook both run at once; with one, the caller
overlaps its own work with the rows in flight and calls the hook before it touches the result.
Protocol, layout and arithmetic: ``docs/low_latency.md``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from fanfold import _core
from fanfold.errors import ArgumentError, UsageError
from fanfold.formats import RowFormat, ScaleFormat, scale_columns
from fanfold.geometry import Geometry, check_hidden, check_tensor, check_topk
from fanfold.pool import OutputPool
from fanfold.refusal import Refusing, tell
from fanfold.symmetric import SymmetricMemory

__all__ = ["Dispatched", "Hook", "LowLatency", "Routing", "Statistics"]

Hook = Callable[[], None]

_CPU = torch.device("cpu")


@dataclass(frozen=True)
class Routing:
    """Where the tokens of all ranks go, as this rank needs it to combine. R ranks, E_l local
    experts, M max_tokens, K top_k.

    Attributes:
        ranges: ``[E_l, R]`` int64: rows of each local expert from each source rank, count in the
            low and first row in the high 32 bits.
        source_counts: ``[R]`` int32: tokens of each source rank.
        experts: ``[R, M, K]`` int16: the sources' ``topk_idx``.
        weights: ``[R, M, K]`` float32: their ``topk_weights``, or None if they had none.
    """

    ranges: torch.Tensor
    source_counts: torch.Tensor
    experts: torch.Tensor
    weights: torch.Tensor | None


@dataclass(frozen=True)
class Dispatched:
    """What one dispatch brings to this rank. C = R * M rows of room for each local expert.

    Attributes:
        tokens: ``[E_l, C, hidden]`` bfloat16 or float8_e4m3fn. Of expert e the first ``counts[e]``
            rows are valid, by source rank, then source token; the rest is not written.
        scales: None, or ``[E_l, C, blocks]`` float32, or ``[E_l, C, ceil(blocks / 4)]`` int32
            (UE8M0), stored with C innermost as grouped matrix products read them.
        counts: ``[E_l]`` int32.
        source_tokens: ``[E_l, C]`` int32: each row's token index at its source.
        row_weights: ``[E_l, C]`` float32, or None if no weights came along.
        routing: what combine needs.
    """

    tokens: torch.Tensor
    scales: torch.Tensor | None
    counts: torch.Tensor
    source_tokens: torch.Tensor
    row_weights: torch.Tensor | None
    routing: Routing


@dataclass(frozen=True)
class Statistics:
    """Tensors that a call adds to; None where not wanted.

    Attributes:
        expert_totals: ``[E_l]`` int32: rows received by each local expert.
        wait_ns: ``[R]`` int64: nanoseconds waited for each source rank.
    """

    expert_totals: torch.Tensor | None = None
    wait_ns: torch.Tensor | None = None

    def check(self, geometry: Geometry) -> None:
        """Raises ArgumentError for a tensor of another shape, dtype or device."""
        if self.expert_totals is not None:
            shape = (geometry.experts_per_rank,)
            check_tensor("expert_totals", self.expert_totals, shape, (torch.int32,), device=_CPU)
        if self.wait_ns is not None:
            shape = (geometry.ranks,)
            check_tensor("wait_ns", self.wait_ns, shape, (torch.int64,), device=_CPU)


def _address(tensor: torch.Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def _core_geometry(geometry: Geometry) -> _core.LowLatencyGeometry:
    return _core.LowLatencyGeometry(
        ranks=geometry.ranks,
        experts=geometry.num_experts,
        top_k=geometry.top_k,
        hidden=geometry.hidden,
        max_tokens=geometry.max_tokens,
    )


def _encoding(row_format: RowFormat, scale_format: ScaleFormat) -> _core.RowEncoding:
    if row_format is RowFormat.BF16:
        return _core.RowEncoding.BF16
    if scale_format is ScaleFormat.FLOAT32:
        return _core.RowEncoding.FP8
    return _core.RowEncoding.FP8_POWER_OF_TWO


class LowLatency:
    """Low-latency calls over one part of a symmetric memory.

    Args:
        memory: the ranks' symmetric memory; must stay open as long as this object is used.
        offset: where this mode's part begins, in bytes.
        nbytes: size of this mode's part; serves every geometry whose :meth:`required_bytes` fits.
    """

    def __init__(self, memory: SymmetricMemory, offset: int, nbytes: int) -> None:
        self._memory = memory
        self._core = _core.LowLatency(memory.core, offset, nbytes)
        self._nbytes = nbytes
        self._pool = OutputPool()

    @staticmethod
    def required_bytes(geometry: Geometry) -> int:
        """Bytes of symmetric memory per rank: with slot = 2 * hidden rounded up to 16, about
        ``4 * R * M * slot + 16 * R * M * K + 2 * R * M`` (docs/low_latency.md)."""
        return _core_geometry(geometry).bytes

    def dispatch(
        self,
        geometry: Geometry,
        x: torch.Tensor,
        topk_idx: torch.Tensor,
        topk_weights: torch.Tensor | None = None,
        *,
        row_format: RowFormat = RowFormat.BF16,
        scale_format: ScaleFormat = ScaleFormat.FLOAT32,
        statistics: Statistics = Statistics(),
    ) -> tuple[Dispatched, Hook]:
        """Sends this rank's tokens and returns what is to arrive, with the hook that receives it.

        Args:
            x: ``[T, hidden]`` bfloat16, contiguous, T up to ``geometry.max_tokens``; free for reuse
                when this returns.
            topk_idx: ``[T, K]`` int64, -1 for none.
            topk_weights: ``[T, K]`` float32, or None if they come only with combine.
            row_format: fp8 quantises each token once, here.
            scale_format: how fp8 scales are rounded and stored.
            statistics: tensors to add to when the hook runs.

        Raises:
            ArgumentError: bad input; nothing was sent, and peers raise PeerRefused. From here or
                from the hook, and on all ranks: they disagree about geometry, row_format or
                whether weights come along.
            PeerRefused: another rank refused its input; from here or from the hook.
            PeerTimeout: a peer has not read an earlier call in time.
            UsageError: two dispatches are in flight already, or the geometry changes while a call
                is in flight or a rank is masked; peers raise PeerRefused for the latter.
        """
        self._memory.core.check_usable()
        with Refusing(self.refuse_dispatch):
            self._check_fit(geometry)
            check_tokens(geometry, x, topk_idx, topk_weights)
            check_hidden(geometry.hidden, row_format.dtype.itemsize)
            statistics.check(geometry)
            dispatched = self._allocate(
                geometry, topk_weights is not None, row_format, scale_format
            )
        sent = _core.LowLatencyTokens()
        sent.x, sent.topk_idx = x.data_ptr(), topk_idx.data_ptr()
        sent.topk_weights, sent.weighted = _address(topk_weights), topk_weights is not None
        sent.tokens = x.shape[0]
        sent.encoding = _encoding(row_format, scale_format)
        epoch = self._core.dispatch_send(_core_geometry(geometry), sent)
        return dispatched, _once(
            lambda: self._receive(epoch, dispatched, sent.encoding, scale_format, statistics)
        )

    def _receive(
        self,
        epoch: int,
        dispatched: Dispatched,
        encoding: _core.RowEncoding,
        scale_format: ScaleFormat,
        statistics: Statistics,
    ) -> None:
        into = _core.LowLatencyReceived()
        into.encoding = encoding
        packed = scale_format is ScaleFormat.UE8M0
        into.scale_format = _core.ScaleFormat.UE8M0 if packed else _core.ScaleFormat.FLOAT32
        into.rows = dispatched.tokens.data_ptr()
        into.scales = _address(dispatched.scales)
        into.counts = dispatched.counts.data_ptr()
        into.source_tokens = dispatched.source_tokens.data_ptr()
        into.row_weights = _address(dispatched.row_weights)
        into.ranges = dispatched.routing.ranges.data_ptr()
        into.source_counts = dispatched.routing.source_counts.data_ptr()
        into.experts = dispatched.routing.experts.data_ptr()
        into.weights = _address(dispatched.routing.weights)
        into.expert_totals = _address(statistics.expert_totals)
        into.wait_ns = _address(statistics.wait_ns)
        self._core.dispatch_receive(epoch, into)

    def combine(
        self,
        geometry: Geometry,
        y: torch.Tensor,
        routing: Routing,
        topk_idx: torch.Tensor,
        *,
        late_weights: torch.Tensor | None = None,
        logfmt: bool = False,
        out: torch.Tensor | None = None,
        wait_ns: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, Hook]:
        """Sends the experts' outputs back and returns the result with the hook that completes it.

        Args:
            y: ``[E_l, C, hidden]`` bfloat16, last dimension contiguous: outputs of the rows that
                dispatch brought, in their places.
            routing: what dispatch brought; without its weights the sum is unweighted; with
                ``late_weights`` only its ``ranges`` are used.
            topk_idx: ``[T, K]`` int64 of this rank's own tokens, as dispatched.
            late_weights: ``[T, K]`` float32 weights of this rank's own tokens where dispatch
                carried none; all ranks must bring them or none.
            logfmt: send rows as LogFMT-10 (5/8 of the bytes; about 1% error per value).
            out: ``[T, hidden]`` bfloat16, contiguous; made if not given.
            wait_ns: ``[R]`` int64 nanoseconds, added to.

        Returns:
            The ``[T, hidden]`` bfloat16 result, complete once the hook has run: for each token the
            weighted sum over its experts, summed per rank in fp32 and rounded to bfloat16, then
            over ranks likewise. A token without experts gives zeros.

        Raises:
            ArgumentError, PeerTimeout, UsageError: as :meth:`dispatch`.
        """
        self._memory.core.check_usable()
        with Refusing(self.refuse_combine):
            self._check_fit(geometry)
            result = _check_combine(geometry, y, routing, topk_idx, late_weights, out)
            Statistics(wait_ns=wait_ns).check(geometry)
        sent = _core.LowLatencyOutputs()
        sent.y, sent.expert_stride, sent.row_stride = y.data_ptr(), y.stride(0), y.stride(1)
        sent.ranges = routing.ranges.data_ptr()
        sent.logfmt = logfmt
        late = None
        if late_weights is None:
            sent.source_counts = routing.source_counts.data_ptr()
            sent.experts = routing.experts.data_ptr()
            sent.weights = _address(routing.weights)
        else:
            late = _core.LowLatencyTokens()
            late.tokens, late.topk_idx = topk_idx.shape[0], topk_idx.data_ptr()
            late.topk_weights, late.weighted = late_weights.data_ptr(), True
        epoch = self._core.combine_send(_core_geometry(geometry), sent, late)
        return result, _once(lambda: self._receive_combined(epoch, result, topk_idx, wait_ns))

    def _receive_combined(
        self, epoch: int, out: torch.Tensor, topk_idx: torch.Tensor, wait_ns: torch.Tensor | None
    ) -> None:
        into = _core.LowLatencyResult()
        into.out, into.topk_idx = out.data_ptr(), topk_idx.data_ptr()
        into.tokens = out.shape[0]
        into.wait_ns = _address(wait_ns)
        self._core.combine_receive(epoch, into)

    def quiesce(self) -> None:
        """Returns when every peer has read everything sent so far. No call may be in flight."""
        self._core.quiesce()

    def refuse_dispatch(self, error: BaseException) -> None:
        """Makes this dispatch void on all ranks because of ``error``, found by a layer above."""
        tell(self._core.refuse_dispatch, error)

    def refuse_combine(self, error: BaseException) -> None:
        """Makes this combine void on all ranks because of ``error``, found by a layer above."""
        tell(self._core.refuse_combine, error)

    def _allocate(
        self, geometry: Geometry, weighted: bool, row_format: RowFormat, scale_format: ScaleFormat
    ) -> Dispatched:
        empty = self._pool.empty
        locals_, capacity = geometry.experts_per_rank, geometry.expert_capacity
        scales = None
        if row_format is RowFormat.FP8:
            columns = scale_columns(geometry.hidden, scale_format)
            scales = empty((locals_, columns, capacity), dtype=scale_format.dtype).mT
        table = (geometry.ranks, geometry.max_tokens, geometry.top_k)
        return Dispatched(
            tokens=empty((locals_, capacity, geometry.hidden), dtype=row_format.dtype),
            scales=scales,
            counts=empty((locals_,), dtype=torch.int32),
            source_tokens=empty((locals_, capacity), dtype=torch.int32),
            row_weights=empty((locals_, capacity), dtype=torch.float32) if weighted else None,
            routing=Routing(
                ranges=empty((locals_, geometry.ranks), dtype=torch.int64),
                source_counts=empty((geometry.ranks,), dtype=torch.int32),
                experts=empty(table, dtype=torch.int16),
                weights=empty(table, dtype=torch.float32) if weighted else None,
            ),
        )

    def _check_fit(self, geometry: Geometry) -> None:
        needed = self.required_bytes(geometry)
        if needed > self._nbytes:
            raise ArgumentError(
                "symmetric memory", f"{self._nbytes} bytes", f"at least {needed} for {geometry}"
            )


def check_tokens(
    geometry: Geometry,
    x: torch.Tensor,
    topk_idx: torch.Tensor,
    topk_weights: torch.Tensor | None,
) -> None:
    """Raises ArgumentError unless these are tokens that ``LowLatency.dispatch`` takes."""
    check_tensor("x", x, (None, geometry.hidden), (torch.bfloat16,), device=_CPU)
    tokens = x.shape[0]
    if tokens > geometry.max_tokens:
        raise ArgumentError("x.shape[0]", tokens, f"at most max_tokens = {geometry.max_tokens}")
    check_topk(topk_idx, tokens, geometry.top_k, geometry.num_experts, _CPU)
    if topk_weights is not None:
        check_tensor("topk_weights", topk_weights, tuple(topk_idx.shape), (torch.float32,),
                     device=_CPU)  # fmt: skip


def _check_combine(
    geometry: Geometry,
    y: torch.Tensor,
    routing: Routing,
    topk_idx: torch.Tensor,
    late_weights: torch.Tensor | None,
    out: torch.Tensor | None,
) -> torch.Tensor:
    """The tensor to write the result to, after all checks of ``LowLatency.combine``."""
    shape = (geometry.experts_per_rank, geometry.expert_capacity, geometry.hidden)
    check_tensor("y", y, shape, (torch.bfloat16,), device=_CPU, contiguous=False)
    if y.stride(2) != 1:
        raise ArgumentError("y.stride()", y.stride(), "contiguous in the last dimension")
    check_tensor("ranges", routing.ranges, (shape[0], geometry.ranks), (torch.int64,), device=_CPU)
    check_tensor("topk_idx", topk_idx, (None, geometry.top_k), (torch.int64,), device=_CPU)
    tokens = topk_idx.shape[0]
    if tokens > geometry.max_tokens:
        raise ArgumentError(
            "topk_idx.shape[0]", tokens, f"at most max_tokens = {geometry.max_tokens}"
        )
    if late_weights is not None:
        check_topk(topk_idx, tokens, geometry.top_k, geometry.num_experts, _CPU)
        check_tensor("topk_weights", late_weights, tuple(topk_idx.shape), (torch.float32,),
                     device=_CPU)  # fmt: skip
    if out is None:
        return torch.empty((tokens, geometry.hidden), dtype=torch.bfloat16)
    return check_tensor("out", out, (tokens, geometry.hidden), (torch.bfloat16,), device=_CPU)


def _once(receive: Hook) -> Hook:
    """``receive``, which may run once; a second call is a mistake that would wait forever."""
    called = False

    def hook() -> None:
        nonlocal called
        if called:
            raise UsageError("this receive hook has been called already; each may be called once")
        called = True
        receive()

    return hook
