"""The low-latency mode on CUDA GPUs: kernels compiled for the geometry at hand, enqueued on the
current stream. The CPU waits for nothing but the first call of a geometry.

Everything that numbers a call lies in the GPU's memory, so a CUDA graph may hold any number of
calls. What kernels find wrong they write into pinned memory, where the next call looks.
"""

from __future__ import annotations

import ctypes
import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from fanfold import _core, jit
from fanfold.config import Config
from fanfold.errors import ArgumentError, FanfoldError, PeerRefused, PeerTimeout, UsageError
from fanfold.formats import RowFormat, ScaleFormat, scale_columns
from fanfold.geometry import Geometry, check_hidden
from fanfold.group import agree
from fanfold.low_latency import kernels
from fanfold.low_latency.calls import (
    AnyRouting,
    CudaRouting,
    Dispatched,
    Hook,
    Statistics,
    check_outputs,
    check_own,
    check_result,
    check_tokens,
    once,
)
from fanfold.refusal import Refusing
from fanfold.symmetric_cuda import CudaSymmetricMemory

__all__ = ["CudaLowLatency"]

_SEND, _RECEIVE, _WHOLE = 1, 2, 3
_PHASES = ("low_latency dispatch", "low_latency combine")
_MOST_IN_FLIGHT = 2
# LowLatencyFacts.weights
_NONE, _WITH_DISPATCH, _WITH_COMBINE = 0, 1, 2
_NOTHING = Statistics()


def _address(tensor: torch.Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


class _Reports:
    """What kernels report: four words for each kind, of which the first is 0 or tells a call."""

    _TIMEOUT, _INDEX, _REFUSED, _DISAGREEMENT = range(4)

    def __init__(self) -> None:
        self._tensor = torch.zeros(_core.CUDA_REPORT_BYTES, dtype=torch.uint8, pin_memory=True)
        self.address = self._tensor.data_ptr()
        self._words = (ctypes.c_int32 * (_core.CUDA_REPORT_BYTES // 4)).from_address(self.address)

    def any(self) -> bool:
        words = self._words
        return bool(words[0] or words[4] or words[8] or words[12])

    def take(self, rank: int, geometry: Geometry | None, timeout_s: float) -> FanfoldError:
        """The gravest report as an exception. All but those that end the mode are forgotten."""
        words = self._words
        kind = next(kind for kind in range(4) if words[4 * kind])
        call, epoch, first, second = words[4 * kind : 4 * kind + 4]
        peer, phase = call >> 8, _PHASES[(call & 0xFF) - 1]
        number = (epoch & 0xFFFFFFFF) - _core.CUDA_FIRST_EPOCH + 1
        if kind == self._TIMEOUT:
            return PeerTimeout(rank, peer, phase, epoch & 0xFFFF, first, timeout_s, False)
        if kind == self._DISAGREEMENT:
            return ArgumentError(
                f"call {number} of {phase}",
                f"another on rank {rank} than on rank {peer}: geometry, row format or whether "
                "weights come along differ",
                "the same on all ranks; close this object",
            )
        words[4 * kind] = 0
        if kind == self._REFUSED:
            reason = f"call {number}; its own exception says why"
            return PeerRefused(rank, peer, phase, reason)
        value = (second & 0xFFFFFF) - ((second & 0x800000) << 1)
        most = "num_experts - 1" if geometry is None else str(geometry.num_experts - 1)
        return ArgumentError(
            f"topk_idx[{first}, {second >> 24 & 0xFF}] of call {number} of {phase}",
            value,
            f"from -1 (none) to {most}; it was taken for none",
        )


_Arguments = _core.CudaDispatchArgs | _core.CudaCombineArgs
_Launch = Callable[[Any, int], None]  # of arguments, on a stream


@dataclass
class _Plan:
    """What the calls of one geometry are made of: by their kind, a kernel's launch and arguments
    with all but the call's own filled in."""

    geometry: Geometry
    core: _core.CudaLowLatency
    table_words: int  # int32 of CudaRouting.table
    dispatches: dict[object, tuple[_Launch, _core.CudaDispatchArgs]] = field(default_factory=dict)
    combines: dict[object, tuple[_Launch, _core.CudaCombineArgs]] = field(default_factory=dict)


@dataclass
class _Flight:
    """Calls of one kind that were sent and not yet received."""

    sent: int = 0
    received: int = 0

    def check(self, what: str) -> None:
        if self.sent - self.received >= _MOST_IN_FLIGHT:
            raise UsageError(
                f"two {what} calls are in flight already; call the hook of the older one first"
            )


class CudaLowLatency:
    """Low-latency calls over a symmetric memory of GPUs; see :class:`LowLatency`.

    Args:
        memory: the ranks' symmetric memory; must stay open as long as this object is used.
        config: time bound, what happens to late peers, and the grid.
        late_weights: whether the routing weights come with combine instead of with dispatch.
    """

    def __init__(self, memory: CudaSymmetricMemory, config: Config, late_weights: bool) -> None:
        self.device = memory.device
        self._memory = memory
        self._config = config
        self._late = late_weights
        index = memory.device.index
        sms = torch.cuda.get_device_properties(index).multi_processor_count
        self._grid = kernels.Grid.of(sms, ctas=config.ctas, senders=config.senders)
        self._early = torch.cuda.get_device_capability(index) >= (9, 0)
        self._reports = _Reports()
        self._state = torch.zeros(_core.CUDA_STATE_BYTES, dtype=torch.uint8, device=self.device)
        epochs = _core.CUDA_STATE_EPOCHS_BYTES
        self._epochs = self._state[:epochs].view(torch.int32)
        self._masked = self._state[epochs : epochs + 4 * memory.ranks].view(torch.int32)
        self._place = _core.CudaLowLatencyPlace(
            rank=memory.rank,
            peers=[memory.base(peer) for peer in range(memory.ranks)],
            state=self._state.data_ptr(),
            reports=self._reports.address,
            timeout_ns=int(config.timeout_s * 1e9),
            mask_late=config.late_peers == "mask",
        )
        self._plan: _Plan | None = None
        self._flights = (_Flight(), _Flight())
        self._last_routing: CudaRouting | None = None
        self._stream = 0

    # ---- calls ----------------------------------------------------------------------------------

    def dispatch(
        self,
        geometry: Geometry,
        x: torch.Tensor,
        topk_idx: torch.Tensor,
        topk_weights: torch.Tensor | None = None,
        *,
        row_format: RowFormat = RowFormat.BF16,
        scale_format: ScaleFormat = ScaleFormat.FLOAT32,
        statistics: Statistics = _NOTHING,
        return_hook: bool = False,
    ) -> tuple[Dispatched, Hook | None]:
        """See :meth:`LowLatency.dispatch`."""
        self.check()
        plan = self._plan_of(geometry)
        self._flights[0].check("dispatch")
        with Refusing(self.refuse_dispatch):
            check_tokens(geometry, x, topk_idx, topk_weights, self.device)
            if statistics is not _NOTHING:
                statistics.check(geometry, self.device)
            weighted = topk_weights is not None
            kernel, args = self._dispatch_call(plan, row_format, scale_format, weighted)
            dispatched = self._allocate(plan, x.shape[0], weighted, row_format, scale_format)
        args.tokens = x.shape[0]
        args.x, args.topk_idx = x.data_ptr(), topk_idx.data_ptr()
        args.topk_weights = _address(topk_weights)
        _fill(args, dispatched, statistics)
        self._last_routing = dispatched.routing  # type: ignore[assignment]
        return dispatched, self._run(0, args, kernel, return_hook, _outputs(dispatched))

    def combine(
        self,
        geometry: Geometry,
        y: torch.Tensor,
        routing: AnyRouting,
        topk_idx: torch.Tensor | None,
        *,
        late_weights: torch.Tensor | None = None,
        logfmt: bool = False,
        out: torch.Tensor | None = None,
        wait_ns: torch.Tensor | None = None,
        return_hook: bool = False,
    ) -> tuple[torch.Tensor, Hook | None]:
        """See :meth:`LowLatency.combine`."""
        self.check()
        plan = self._plan_of(geometry)
        self._flights[1].check("combine")
        with Refusing(self.refuse_combine):
            check_outputs(geometry, y, routing.ranges, self.device)
            if y.data_ptr() % 16 or y.stride(0) % 8 or y.stride(1) % 8:
                raise ArgumentError("y.stride()", y.stride(), "rows on 16-byte boundaries")
            tokens = self._own_tokens(geometry, routing, topk_idx, late_weights)
            result = check_result(out, (tokens, geometry.hidden), self.device)
            if wait_ns is not None:
                Statistics(wait_ns=wait_ns).check(geometry, self.device)
            weighted = self._late or routing.weighted  # type: ignore[union-attr]
            kernel, args = self._combine_call(plan, weighted, logfmt)
        args.tokens = tokens
        args.y, args.expert_stride, args.row_stride = y.data_ptr(), 2 * y.stride(0), 2 * y.stride(1)
        args.weighted = weighted
        args.out, args.wait_ns = result.data_ptr(), _address(wait_ns)
        if self._late:
            args.ranges = routing.ranges.data_ptr()
            args.topk_idx, args.topk_weights = _address(topk_idx), _address(late_weights)
        else:
            args.table = routing.table.data_ptr()  # type: ignore[union-attr]
        # The receive half reads the routing too.
        kept = (result, wait_ns, topk_idx if self._late else routing.table)  # type: ignore[union-attr]
        return result, self._run(1, args, kernel, return_hook, kept)

    def _own_tokens(
        self,
        geometry: Geometry,
        routing: AnyRouting,
        topk_idx: torch.Tensor | None,
        late_weights: torch.Tensor | None,
    ) -> int:
        if self._late:
            if topk_idx is None or late_weights is None:
                raise ArgumentError("topk_weights", "None", "given, with topk_idx")
            return check_own(geometry, topk_idx, late_weights, self.device)
        if not isinstance(routing, CudaRouting) or late_weights is not None:
            raise UsageError("this mode's weights come with dispatch; combine takes its routing")
        return routing.tokens

    def _run(
        self,
        kind: int,
        args: _Arguments,
        kernel: _Launch,
        return_hook: bool,
        kept: tuple[torch.Tensor | None, ...],
    ) -> Hook | None:
        """Launches the call, or its send half and the hook with the other."""
        stream = self._follow()
        flight = self._flights[kind]
        if not return_hook:
            if flight.sent != flight.received:
                raise UsageError(
                    "a call without a hook cannot overtake one in flight; call its hook first"
                )
            args.phases = _WHOLE
            kernel(args, stream)
            return None
        args.phases = _SEND
        kernel(args, stream)
        flight.sent += 1
        ticket, later = flight.sent, args.copy()
        later.phases = _RECEIVE

        def receive() -> None:
            self.check()
            if flight.received != ticket - 1:
                raise UsageError("receive hooks must be called in the order of their sends")
            here = self._follow()
            if here != stream:
                current = torch.cuda.current_stream(self.device)
                for tensor in kept:
                    if tensor is not None:
                        tensor.record_stream(current)
            kernel(later, here)
            flight.received += 1

        return once(receive)

    def _follow(self) -> int:
        """The current stream, which from here on comes after all earlier calls."""
        stream = torch._C._cuda_getCurrentRawStream(self.device.index)
        if stream != self._stream:
            self._order_after(self._stream, stream)
            self._stream = stream
        return stream

    def _order_after(self, before: int, stream: int) -> None:
        if torch.cuda.is_current_stream_capturing():
            return  # a capture stands apart; what comes before it is the caller's to order
        earlier = torch.cuda.ExternalStream(before, device=self.device)
        with torch.cuda.stream(earlier):
            if torch.cuda.is_current_stream_capturing():
                return
        torch.cuda.ExternalStream(stream, device=self.device).wait_stream(earlier)

    # ---- refusals and reports -------------------------------------------------------------------

    def check(self) -> None:
        """See :meth:`LowLatency.check`."""
        if self._reports.any():
            geometry = None if self._plan is None else self._plan.geometry
            raise self._reports.take(self._memory.rank, geometry, self._config.timeout_s)

    def refuse_dispatch(self, error: BaseException) -> None:
        """See :meth:`LowLatency.refuse_dispatch`."""
        plan = self._plan_to_refuse(error)
        if plan is None:
            return
        kernel, args = self._dispatch_call(plan, RowFormat.BF16, ScaleFormat.FLOAT32, False)
        args = args.copy()
        args.tokens, args.refused, args.rows = 0, True, 0
        kernel(args, self._follow())

    def refuse_combine(self, error: BaseException) -> None:
        """See :meth:`LowLatency.refuse_combine`."""
        plan = self._plan_to_refuse(error)
        if plan is None:
            return
        kernel, args = self._combine_call(plan, True, False)
        args = args.copy()
        args.refused, args.out, args.tokens = True, 0, 0
        if not self._late and self._last_routing is not None:
            # Peers send the rows of the last dispatch, and somebody must take them.
            args.tokens = self._last_routing.tokens
            args.table = self._last_routing.table.data_ptr()
        kernel(args, self._follow())

    def _plan_to_refuse(self, error: BaseException) -> _Plan | None:
        if self._plan is None:
            # The others agree about the memory in their first call.
            reason = error if isinstance(error, FanfoldError) else FanfoldError(str(error))
            try:
                agree(self._memory.group, {}, reason)
            except FanfoldError:
                return None
        return self._plan

    # ---- the memory -----------------------------------------------------------------------------

    def quiesce(self) -> None:
        """See :meth:`LowLatency.quiesce`."""
        self._check_idle()
        torch.cuda.synchronize(self.device)
        self.check()

    def reset(self) -> None:
        """See :meth:`LowLatency.reset`."""
        self._check_idle()
        if self._plan is not None:
            self._lay_out(self._plan.geometry)

    def set_masked(self, rank: int, masked: bool) -> None:
        """See :meth:`LowLatency.set_masked`."""
        self._masked[rank] = int(masked)

    def masked(self) -> torch.Tensor:
        """See :meth:`LowLatency.masked`."""
        return self._masked

    def _check_idle(self) -> None:
        if any(flight.sent != flight.received for flight in self._flights):
            raise UsageError("a call is in flight; call its hook first")

    def _plan_of(self, geometry: Geometry) -> _Plan:
        plan = self._plan
        if plan is not None and (plan.geometry is geometry or plan.geometry == geometry):
            return plan
        if torch.cuda.is_current_stream_capturing():
            raise UsageError(
                f"the first call of {geometry} readies the memory of all ranks, which a CUDA graph "
                "cannot hold; call dispatch and combine once before the capture"
            )
        self._check_idle()
        return self._lay_out(geometry)

    def _lay_out(self, geometry: Geometry) -> _Plan:
        """Readies the memory of all ranks for a geometry. Collective; waits for all calls."""
        core = _core_geometry(geometry)
        error: Exception | None = None
        try:
            _core.check_cuda_geometry(core)
            first_absent, nbytes = _core.cuda_low_latency_bytes(core, self._late)
            if nbytes > self._memory.bytes_per_rank:
                raise ArgumentError(
                    "symmetric memory",
                    f"{self._memory.bytes_per_rank} bytes",
                    f"at least {nbytes} for {geometry}",
                )
        except FanfoldError as refused:
            error = refused
        torch.cuda.synchronize(self.device)
        # When all have come here, no kernel of an earlier call runs anywhere.
        agree(self._memory.group, dataclasses.asdict(geometry), error)
        region = self._memory.tensor
        region[:first_absent].zero_()
        region[first_absent:nbytes].fill_(0xFF)
        self._epochs.fill_(_core.CUDA_FIRST_EPOCH)
        self._state[-4:].zero_()
        torch.cuda.synchronize(self.device)
        agree(self._memory.group, {})
        grid = self._grid
        self._last_routing = None
        self._plan = _Plan(
            geometry,
            _core.CudaLowLatency(self._place, core, self._late, grid.ctas, grid.senders),
            # Only kernels read it, and not where weights come late.
            0 if self._late else _core.cuda_table_bytes(core) // 4,
        )
        return self._plan

    # ---- kernels and tensors --------------------------------------------------------------------

    def _dispatch_call(
        self, plan: _Plan, row_format: RowFormat, scale_format: ScaleFormat, weighted: bool
    ) -> tuple[_Launch, _core.CudaDispatchArgs]:
        key = (row_format, scale_format, weighted)
        known = plan.dispatches.get(key)
        if known is None:
            check_hidden(plan.geometry.hidden, row_format.dtype.itemsize)
            launch = self._load(kernels.dispatch_kernel(plan.geometry, row_format, scale_format))
            args = plan.core.dispatch_arguments(
                kernels.encoding(row_format, scale_format), _WITH_DISPATCH if weighted else _NONE
            )
            known = plan.dispatches[key] = (launch, args)
        return known

    def _combine_call(
        self, plan: _Plan, weighted: bool, logfmt: bool
    ) -> tuple[_Launch, _core.CudaCombineArgs]:
        key = (weighted, logfmt)
        known = plan.combines.get(key)
        if known is None:
            source = kernels.combine_kernel(plan.geometry, late=self._late, logfmt=logfmt)
            weights = _WITH_COMBINE if self._late else _WITH_DISPATCH if weighted else _NONE
            known = plan.combines[key] = (
                self._load(source),
                plan.core.combine_arguments(weights),
            )
        return known

    def _load(self, source: jit.KernelSource) -> _Launch:
        if torch.cuda.is_current_stream_capturing():
            raise UsageError(
                f"{source} is not loaded yet, which a CUDA graph cannot hold; make the same call "
                "once before the capture"
            )
        kernel = jit.load(source, self.device.index, self._config)
        ctas, threads, early = self._grid.ctas, source.threads, self._early

        def launch(args: _Arguments, stream: int) -> None:
            args.launch(kernel, ctas, threads, stream, early)

        return launch

    def _allocate(
        self,
        plan: _Plan,
        tokens: int,
        weighted: bool,
        row_format: RowFormat,
        scale_format: ScaleFormat,
    ) -> Dispatched:
        device, geometry = self.device, plan.geometry
        locals_, capacity = geometry.experts_per_rank, geometry.expert_capacity
        scales = None
        if row_format is RowFormat.FP8:
            columns = scale_columns(geometry.hidden, scale_format)
            scales = torch.empty_strided(
                (locals_, capacity, columns),
                (columns * capacity, 1, capacity),
                dtype=scale_format.dtype,
                device=device,
            )
        return Dispatched(
            tokens=torch.empty(
                (locals_, capacity, geometry.hidden), dtype=row_format.dtype, device=device
            ),
            scales=scales,
            counts=torch.empty((locals_,), dtype=torch.int32, device=device),
            source_tokens=torch.empty((locals_, capacity), dtype=torch.int32, device=device),
            row_weights=torch.empty((locals_, capacity), device=device) if weighted else None,
            routing=CudaRouting(
                ranges=torch.empty((locals_, geometry.ranks), dtype=torch.int64, device=device),
                table=torch.empty((plan.table_words,), dtype=torch.int32, device=device),
                tokens=tokens,
                weighted=weighted,
            ),
        )


def _core_geometry(geometry: Geometry) -> _core.LowLatencyGeometry:
    return _core.LowLatencyGeometry(
        ranks=geometry.ranks,
        experts=geometry.num_experts,
        top_k=geometry.top_k,
        hidden=geometry.hidden,
        max_tokens=geometry.max_tokens,
    )


def _fill(args: _core.CudaDispatchArgs, dispatched: Dispatched, statistics: Statistics) -> None:
    routing = dispatched.routing
    args.rows, args.scales = dispatched.tokens.data_ptr(), _address(dispatched.scales)
    args.counts = dispatched.counts.data_ptr()
    args.source_tokens = dispatched.source_tokens.data_ptr()
    args.row_weights = _address(dispatched.row_weights)
    args.ranges = routing.ranges.data_ptr()
    args.table = routing.table.data_ptr()  # type: ignore[union-attr]
    args.expert_totals = _address(statistics.expert_totals)
    args.wait_ns = _address(statistics.wait_ns)


def _outputs(dispatched: Dispatched) -> tuple[torch.Tensor | None, ...]:
    routing = dispatched.routing
    return (
        dispatched.tokens,
        dispatched.scales,
        dispatched.counts,
        dispatched.source_tokens,
        dispatched.row_weights,
        routing.ranges,
        routing.table,  # type: ignore[union-attr]
    )
