"""The low-latency mode between processes of one host, through shared memory."""

from __future__ import annotations

import torch

from fanfold import _core
from fanfold.backends.low_latency.protocol import (
    NO_STATISTICS,
    AnyRouting,
    Dispatched,
    Hook,
    LateRouting,
    ReadyRows,
    Routing,
    Statistics,
    check_global_scale,
    check_outputs,
    check_own,
    check_result,
    check_tokens,
    once,
)
from fanfold.backends.low_latency.sizes import core_geometry
from fanfold.errors import ArgumentError
from fanfold.formats import (
    BF16_ROWS,
    Formats,
    RowFormat,
    ScaleFormat,
    nvfp4_scale_shape,
    scale_columns,
)
from fanfold.geometry import Geometry
from fanfold.lending import lend, lend_if_given
from fanfold.memory.host import SymmetricMemory
from fanfold.pool import OutputPool
from fanfold.refusal import Refusing, tell
from fanfold.representation import worded

__all__ = ["HostLowLatency"]

_CPU = torch.device("cpu")


def _encoding(row_format: RowFormat, scale_format: ScaleFormat) -> _core.RowEncoding:
    if row_format is RowFormat.BF16:
        return _core.RowEncoding.BF16
    if row_format is RowFormat.NVFP4:
        return _core.RowEncoding.NVFP4
    if scale_format is ScaleFormat.FLOAT32:
        return _core.RowEncoding.FP8
    return _core.RowEncoding.FP8_POWER_OF_TWO


class HostLowLatency:
    """Low-latency calls over one part of a symmetric memory, on CPU tensors; see
    :class:`LowLatencyBackend` for the calls.

    Args:
        memory: the ranks' symmetric memory; must stay open as long as this object is used.
        offset: where this mode's part begins, in bytes.
        nbytes: size of this mode's part; serves every geometry whose :meth:`required_bytes` fits.
    """

    device = _CPU

    def __init__(self, memory: SymmetricMemory, offset: int, nbytes: int) -> None:
        self._memory = memory
        self._core = _core.LowLatency(memory.core, offset, nbytes)
        self._nbytes = nbytes
        self._pool = OutputPool()

    @staticmethod
    def required_bytes(geometry: Geometry) -> int:
        """Bytes of symmetric memory per rank: with slot = 2 * hidden rounded up to 16, about
        ``4 * R * M * slot + 16 * R * M * K + 2 * R * M`` (docs/low_latency.md)."""
        return core_geometry(geometry).bytes

    def dispatch(
        self,
        geometry: Geometry,
        x: torch.Tensor,
        topk_idx: torch.Tensor,
        topk_weights: torch.Tensor | None = None,
        *,
        formats: Formats = BF16_ROWS,
        global_scale: torch.Tensor | None = None,
        statistics: Statistics = NO_STATISTICS,
        return_hook: bool = False,
    ) -> tuple[Dispatched, Hook | None]:
        """See :meth:`LowLatencyBackend.dispatch`."""
        self._memory.check()
        row_format, scale_format = formats
        with Refusing(self.refuse_dispatch):
            self._check_fit(geometry)
            check_tokens(geometry, x, topk_idx, topk_weights, _CPU)
            row_format.check_hidden(geometry.hidden)
            check_global_scale(row_format, global_scale, _CPU)
            statistics.check(geometry, _CPU)
            dispatched = self._allocate(
                geometry, topk_weights is not None, row_format, scale_format
            )
        sent = _core.LowLatencyTokens()
        sent.x, sent.topk_idx = lend(x), lend(topk_idx)
        sent.topk_weights, sent.weighted = lend_if_given(topk_weights), topk_weights is not None
        sent.global_scale = lend_if_given(global_scale)
        sent.tokens = x.shape[0]
        sent.encoding = _encoding(row_format, scale_format)
        epoch = self._core.dispatch_send(core_geometry(geometry), sent)
        return dispatched, _finish(
            lambda: self._receive(epoch, dispatched, sent.encoding, scale_format, statistics),
            return_hook,
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
        into.rows = lend(dispatched.tokens)
        into.scales = lend_if_given(dispatched.scales)
        into.counts = lend(dispatched.counts)
        into.row_weights = lend_if_given(dispatched.row_weights)
        routing = dispatched.routing
        assert isinstance(routing, Routing)
        into.source_tokens = lend(routing.source_tokens)
        into.ranges = lend(routing.ranges)
        into.source_counts = lend(routing.source_counts)
        into.experts = lend(routing.experts)
        into.weights = lend_if_given(routing.weights)
        into.expert_totals = lend_if_given(statistics.expert_totals)
        into.wait_ns = lend_if_given(statistics.wait_ns)
        try:
            self._core.dispatch_receive(epoch, into)
        finally:
            self._memory.warn_of_late()

    def combine(
        self,
        geometry: Geometry,
        y: torch.Tensor | ReadyRows,
        routing: AnyRouting,
        topk_idx: torch.Tensor | None,
        *,
        late_weights: torch.Tensor | None = None,
        logfmt: bool = False,
        out: torch.Tensor | None = None,
        wait_ns: torch.Tensor | None = None,
        return_hook: bool = False,
    ) -> tuple[torch.Tensor, Hook | None]:
        """See :meth:`LowLatencyBackend.combine`."""
        self._memory.check()
        ready, y = (y, y.y) if isinstance(y, ReadyRows) else (None, y)
        with Refusing(self.refuse_combine):
            self._check_fit(geometry)
            own = _check_own_routing(routing, topk_idx, late_weights is not None)
            check_outputs(geometry, y, routing.ranges, _CPU)
            tokens = check_own(geometry, own, late_weights, _CPU)
            result = check_result(out, (tokens, geometry.hidden), _CPU)
            Statistics(wait_ns=wait_ns).check(geometry, _CPU)
            logfmt = bool(logfmt)
        sent = _core.LowLatencyOutputs()
        sent.y, sent.expert_stride, sent.row_stride = lend(y), y.stride(0), y.stride(1)
        sent.ranges = lend(routing.ranges)
        sent.logfmt = logfmt
        if ready is not None:
            signals, blocks = lend(ready.signals), ready.blocks(geometry.expert_capacity)
            sent.wait_for(signals, ready.block_rows, blocks, ready.ready_at)
        late = None
        if late_weights is None:
            assert isinstance(routing, Routing)
            sent.source_counts = lend(routing.source_counts)
            sent.experts = lend(routing.experts)
            sent.weights = lend_if_given(routing.weights)
        else:
            late = _core.LowLatencyTokens()
            late.tokens, late.topk_idx = tokens, lend(own)
            late.topk_weights, late.weighted = lend(late_weights), True
        epoch = self._core.combine_send(core_geometry(geometry), sent, late)
        return result, _finish(
            lambda: self._receive_combined(epoch, result, own, wait_ns), return_hook
        )

    def _receive_combined(
        self, epoch: int, out: torch.Tensor, topk_idx: torch.Tensor, wait_ns: torch.Tensor | None
    ) -> None:
        into = _core.LowLatencyResult()
        into.out, into.topk_idx = lend(out), lend(topk_idx)
        into.tokens = out.shape[0]
        into.wait_ns = lend_if_given(wait_ns)
        try:
            self._core.combine_receive(epoch, into)
        finally:
            self._memory.warn_of_late()

    def check(self) -> None:
        """See :meth:`SymmetricMemory.check`."""
        self._memory.check()

    def quiesce(self) -> None:
        """Returns when every peer has read everything sent so far. No call may be in flight."""
        self._core.quiesce()

    def reset(self) -> None:
        """See :meth:`LowLatencyBackend.reset`. Flags are epochs that only grow, so no memory needs
        to be written."""
        self._core.reset()

    def set_masked(self, rank: int, masked: bool) -> None:
        """Masks a rank (nothing is sent to it or awaited from it), or unmasks it. Local."""
        self._memory.core.set_masked(rank, masked)

    def masked(self) -> torch.Tensor:
        """``[R]`` int32: 1 for each masked rank."""
        return torch.tensor(self._memory.masked(), dtype=torch.int32, device="cpu")

    def refuse_dispatch(self, error: BaseException, geometry: Geometry | None = None) -> None:
        """Aborts this dispatch on all ranks because of ``error``, found by a layer above."""
        del geometry  # nothing depends on it here
        tell(self._core.refuse_dispatch, error)

    def refuse_combine(
        self,
        error: BaseException,
        routing: AnyRouting | None = None,
        geometry: Geometry | None = None,
    ) -> None:
        """Aborts this combine on all ranks because of ``error``, found by a layer above."""
        del routing, geometry  # peers read nothing of an aborted combine here
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
        elif row_format is RowFormat.NVFP4:
            shape = nvfp4_scale_shape(locals_, capacity, geometry.hidden)
            scales = empty(shape, dtype=torch.float8_e4m3fn)
        table = (geometry.ranks, geometry.max_tokens, geometry.top_k)
        return Dispatched(
            tokens=empty(
                (locals_, capacity, row_format.columns(geometry.hidden)), dtype=row_format.dtype
            ),
            scales=scales,
            counts=empty((locals_,), dtype=torch.int32),
            own_weights=empty((locals_, capacity), dtype=torch.float32) if weighted else None,
            routing=Routing(
                ranges=empty((locals_, geometry.ranks), dtype=torch.int64),
                source_tokens=empty((locals_, capacity), dtype=torch.int32),
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


def _check_own_routing(
    routing: AnyRouting, topk_idx: torch.Tensor | None, late: bool
) -> torch.Tensor:
    """``topk_idx``, if the host backend's combine was given it and a routing to work from."""
    if not isinstance(routing, Routing | LateRouting if late else Routing):
        raise ArgumentError("routing", worded(routing), "what dispatch brought")
    if topk_idx is None:
        raise ArgumentError("topk_idx", None, "what was dispatched")
    return topk_idx


def _finish(receive: Hook, return_hook: bool) -> Hook | None:
    """The receive half now, or as a hook that may be called once."""
    if return_hook:
        return once(receive)
    receive()
    return None
