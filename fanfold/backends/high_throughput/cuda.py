"""The high-throughput mode on CUDA GPUs: kernels compiled for the sizes at hand, enqueued on the
current stream.

Without a capacity a dispatch waits once, for the plan's numbers of rows; nothing else waits.
Everything that numbers a call lies in the GPU's memory, so a CUDA graph may hold any number of
calls. What kernels find wrong they write into pinned memory, where later calls look: a timeout ends
the mode and is raised before anything else is enqueued; what concerns one call only is raised by a
combine after it has been enqueued, so that this rank stays in step with the others.

A rank that refuses takes part with one kernel, whichever call it is. A new routing has two, but
if the first was aborted, the second does nothing, nor do later calls with its plan.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable

import torch

from fanfold import _core
from fanfold.backends.choose import LEAST_CAPABILITY
from fanfold.backends.high_throughput.in_place import Results
from fanfold.backends.high_throughput.kernels import (
    WEIGHTS_ALONE_ROW_BYTES,
    CombineKind,
    DispatchKind,
    Sizes,
    most_batches,
)
from fanfold.backends.high_throughput.launches import AllLaunches, Call, ctas_bounds, grid_of
from fanfold.backends.high_throughput.patterns import DispatchPattern
from fanfold.backends.high_throughput.plan import (
    CudaDispatched,
    CudaPlan,
    check_plan,
    repeated_combine,
    repeated_dispatch,
)
from fanfold.backends.high_throughput.protocol import (
    MOST_ALIGNMENT,
    MOST_ROWS,
    DeviceCheck,
    RowOrder,
    Rows,
    anywhere,
    check_apart,
    check_biases,
    check_layout,
    check_outputs,
    check_returned_weights,
    check_routing,
    check_rows,
    quantized,
)
from fanfold.backends.high_throughput.repeats import (
    Asked,
    RepeatedCombine,
    RepeatedDispatch,
    RepeatedRouting,
)
from fanfold.backends.high_throughput.reports import Reports
from fanfold.backends.high_throughput.room import Room
from fanfold.config import Config
from fanfold.cpu_words import CpuWords
from fanfold.deferred_free import free_when_idle
from fanfold.errors import ArgumentError, UnavailableError, UsageError
from fanfold.formats import ScaleFormat
from fanfold.geometry import check_aligned, check_integer, check_tensor
from fanfold.group import agree
from fanfold.kernel_state import new_state
from fanfold.lending import address_of
from fanfold.memory import GpuPeerMemory
from fanfold.memory.cuda import wait_for_kernels
from fanfold.refusal import Refusing
from fanfold.stream_order import StreamOrder

__all__ = ["CudaHighThroughput"]

_LINE = 128
_UNBOUNDED = 1 << 62
_CombineCall = Call[_core.CudaHighThroughputCombineArgs]
_WEIGHTS_ALONE_HIDDEN = WEIGHTS_ALONE_ROW_BYTES // torch.bfloat16.itemsize


class CudaHighThroughput:
    """High-throughput calls over a symmetric memory of GPUs; see :class:`HighThroughputBackend`.
    Construction is collective.

    Ranks must also agree about the layout and ``expert_alignment``. What only the GPU can find (an
    entry of ``topk_idx`` out of range, more rows than the capacity, a peer that has refused, ranks
    that disagree) is raised by a later combine, or by :meth:`check`; that a peer is late by any
    later call. A dispatch without capacity raises the error that has aborted its plan.

    Args:
        memory: the ranks' symmetric memory; must stay open as long as this object is used.
        config: time bound, and the grid.
        max_tokens: most tokens of any rank in any call, the same on all; a plan takes
            ``ranks * (max_tokens + 800)`` bytes for it.
        ctas: of each kernel; None for the configuration's, or as many as the model says
            (:mod:`fanfold.backends.high_throughput.grid`), at most 24.
        senders: of them begin as senders in a dispatch; None for the configuration's, or 9 of 24
            (expert-major 8, token-major in place 12).
        result_bytes: of the memory, for the rows of dispatches in place; the same on all ranks.
        quantize_to: rows that come without scales travel as fp8 with such ones.
        check_devices: raises for tensors (by name) that are elsewhere, and says why.

    Raises:
        UnavailableError: this GPU lacks bulk copies, or the kernels cannot be compiled.
        ArgumentError: for sizes that the kernels cannot serve.
    """

    def __init__(
        self,
        memory: GpuPeerMemory,
        config: Config,
        *,
        max_tokens: int = 65536,
        ctas: int | None = None,
        senders: int | None = None,
        result_bytes: int = 0,
        quantize_to: ScaleFormat | None = None,
        check_devices: DeviceCheck = anywhere,
    ) -> None:
        self.device = memory.device
        self._memory, self._config, self.check_devices = memory, config, check_devices
        self._quantize_to, self._zero_padding = quantize_to, True
        self._ranks, self._max_tokens, self._between = memory.ranks, max_tokens, memory.between
        self.order = StreamOrder(self.device)
        self._follow = self.order.follow
        error: Exception | None = None
        try:
            check_integer("max_tokens", max_tokens, 0, MOST_ROWS)
            check_integer("result_bytes", result_bytes, 0, memory.bytes_per_rank)
            self._grid = grid_of(memory, config, ctas, senders)
            self._open(result_bytes)
        except Exception as failure:  # for want of memory, too
            error = failure
        # When all have come here, everybody's words are zero.
        sizes = {"bytes": memory.bytes_per_rank, "result_bytes": result_bytes}
        others = {"max_tokens": max_tokens, "dispatch_transfer": config.dispatch_transfer}
        agree(memory.group, {**sizes, **others}, error)

    @staticmethod
    def required_bytes(ranks: int, config: Config, result_bytes: int = 0) -> int:
        """Bytes of symmetric memory per rank: ``config.ring_bytes`` for each rank,
        ``result_bytes``, and a fixed part of about ``66100 * ranks``. With more or less there are
        longer or shorter rings."""
        return _core.cuda_high_throughput_bytes(ranks, config.ring_bytes)[1] + result_bytes

    def use_sms(self, sms: int | None) -> None:
        """Has the kernels of all calls from here on take another number of SMs, a CTA on each; None
        for that of the beginning. Ranks need not take the same.

        Args:
            sms: from 1; at least 2 are taken with other ranks, and at most 64 or those there are.
        """
        self._launches = self._all_launches.with_sms(sms)

    def use_zero_padding(self, zeros: bool) -> None:
        """See :meth:`HighThroughputBackend.use_zero_padding`."""
        self._zero_padding = zeros

    def _open(self, result_bytes: int) -> None:
        memory, device = self._memory, self.device
        if torch.cuda.get_device_capability(device.index) < LEAST_CAPABILITY["high_throughput"]:
            raise UnavailableError(
                "high throughput on GPUs needs compute capability 9.0 or later for its copies; "
                "stage through the host instead (backend='host', FANFOLD_BACKEND=host)"
            )
        zeroed, fixed = _core.cuda_high_throughput_bytes(memory.ranks, 0)
        ring_bytes = (memory.usable_bytes - fixed - result_bytes) // memory.ranks // _LINE * _LINE
        if ring_bytes <= 0:
            more = f"more than {fixed + result_bytes}; see required_bytes"
            raise ArgumentError("bytes_per_rank", memory.usable_bytes, more)
        peers = [memory.base(peer) for peer in range(memory.ranks)]
        state_bytes = _core.CUDA_HIGH_THROUGHPUT_STATE_BYTES
        peers_at = _core.CUDA_HIGH_THROUGHPUT_STATE_PEERS_AT
        self._state = new_state(state_bytes, peers_at, peers, device)
        counts = ctas_bounds(memory)[1] * (_core.CUDA_HIGH_THROUGHPUT_MOST_EXPERTS + memory.ranks)
        if self._between is not None:
            place = _core.CUDA_HIGH_THROUGHPUT_STATE_HOSTS_AT
            self._state[place:][:8].view(torch.int64).fill_(self._between.address)
            self._between.prepare_high_throughput(ring_bytes)
        self._counted = torch.empty(counts, dtype=torch.int32, device=device)
        self._reports, self._totals = Reports(self._between), CpuWords(2)
        self._core = _core.CudaHighThroughput(
            _core.CudaHighThroughputPlace(
                rank=memory.rank,
                peers=peers,
                state=self._state.data_ptr(),
                reports=self._reports.address,
                timeout_ns=int(self._config.timeout_s * 1e9),
                max_tokens=self._max_tokens,
                ring_bytes=ring_bytes,
            )
        )
        self._last_routing: RepeatedRouting | None = None
        self._all_launches = AllLaunches(self._core, memory, self._config, self._grid)
        self._launches = self._all_launches.with_sms(None)
        # Loaded now, so that a rank can always say that it refuses.
        refusal = self._launches.plan(self._sizes(memory.ranks, 1), 1)
        self._refusal = Call(refusal.args.copy(), refusal.launch)
        self._refusal.args.refused = True
        begin = _core.cuda_high_throughput_bytes(memory.ranks, ring_bytes)[1]
        self._results = Results(memory, begin, result_bytes)
        self._room = Room(device, most_batches(self._max_tokens), self._results)
        memory.tensor[:zeroed].zero_()
        wait_for_kernels(memory)
        # Kernels in flight may outlive this object, and write there.
        kept = (self._state, self._counted, self._reports, self._totals)
        weakref.finalize(self, free_when_idle, device, kept).atexit = False

    # ---- calls ----------------------------------------------------------------------------------

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
        planned: Callable[[CudaPlan], None] | None = None,
    ) -> CudaDispatched:
        """See :meth:`HighThroughputBackend.dispatch`. With a capacity the CPU waits for nothing;
        more rows than that are dropped, and reported. ``planned`` is called without one, as soon as
        the CPU knows the plan: what fails later fails after the peers went on."""
        self._check_usable()
        with Refusing(self.refuse_dispatch):
            if capacity is None and torch.cuda.is_current_stream_capturing():
                raise UsageError("a dispatch in a CUDA graph needs a capacity")
            x = quantized(x, self._quantize_to)
            asked = (num_experts, layout, expert_alignment, capacity)
            again = self._last_routing
            if (
                again is None
                or again.kind.in_place != in_place
                or not again.finds(self._launches, asked, x, topk_idx, topk_weights)
            ):
                again = self._check_new(asked, x, topk_idx, topk_weights, in_place)
                self._last_routing = again
            elif in_place:
                self._results.check(x)
            planning, sending, kind = again.planning, again.sending, again.kind
            values, scales = x if isinstance(x, tuple) else (x, None)
            plan = self._room.plan(kind.sizes, values.shape[0], capacity)
            choices = self._begin_plan(planning.args, plan, topk_idx, layout)
            dispatched = None
            if capacity is not None:
                dispatched = self._room.dispatched(plan, x, kind)
        stream = plan.stream = self._follow()
        planning.launch(planning.args, stream)
        if dispatched is None:
            # If the plan is aborted, no rank makes this call.
            with Refusing(lambda error: self.refuse_dispatch(error, plan)):
                self._await_totals(plan)
                if planned is not None:
                    planned(plan)
                dispatched = self._room.dispatched(plan, x, kind)
        args = sending.args
        self._begin_dispatch(args, dispatched, values, scales, choices)
        args.result_rows = self._results.most_rows(kind)
        args.zeroes_padding = self._zero_padding
        args.weights, args.row_weights = address_of(topk_weights), address_of(plan.row_weights)
        args.rows_of, args.topk_idx = address_of(plan.rows_of), address_of(plan.topk_idx)
        args.topk_weights = address_of(plan.topk_weights)
        args.source_token = plan.source_token.data_ptr()
        sending.launch(args, stream)
        return dispatched

    def _check_new(
        self,
        asked: Asked,
        x: Rows,
        topk_idx: torch.Tensor,
        topk_weights: torch.Tensor | None,
        in_place: bool,
    ) -> RepeatedRouting:
        """Checks a dispatch of a new routing, and finds its kernels."""
        num_experts, layout, expert_alignment, capacity = asked
        check_layout(layout)
        check_integer("expert_alignment", expert_alignment, 1, MOST_ALIGNMENT)
        if capacity is not None:
            check_integer("capacity", capacity, 0, MOST_ROWS)
        values, scales = self._check_rows(x)
        if in_place:
            self._results.check(x)
        self.check_devices(topk_idx=topk_idx, topk_weights=topk_weights)
        tokens = values.shape[0]
        check_routing(topk_idx, topk_weights, tokens, num_experts, self._ranks, self.device)
        sizes = self._sizes(num_experts, topk_idx.shape[1])
        weighted = topk_weights is not None
        kind = DispatchKind.of(sizes, values, scales, layout, weighted=weighted, in_place=in_place)
        planning, sending = self._launches.new_routing(sizes, expert_alignment, kind)
        sent = DispatchPattern.of(x, topk_idx, topk_weights)
        return RepeatedRouting(self._launches, asked, planning, sending, kind, sent)

    def dispatch_cached(
        self,
        x: Rows,
        plan: CudaPlan,
        *,
        layout: RowOrder,
        in_place: bool = False,
    ) -> CudaDispatched:
        """See :meth:`HighThroughputBackend.dispatch_cached`, and :meth:`dispatch`."""
        self._check_usable()
        again = repeated_dispatch(plan, layout)
        if again is not None:
            if self._quantize_to is not None:
                with Refusing(lambda error: self.refuse_dispatch(error, plan)):
                    x = quantized(x, self._quantize_to)
            if again.in_place == in_place and again.finds(self._launches, x):
                return self._dispatch_again(again, plan, x)
        with Refusing(lambda error: self.refuse_dispatch(error, plan)):
            check_layout(layout)
            check_plan(plan, self._ranks)
            x = quantized(x, self._quantize_to)
            values, scales = self._check_rows(x)
            if in_place:
                self._results.check(x)
            if values.shape[0] != plan.tokens:
                bound = f"{plan.tokens}, the tokens of the plan"
                raise ArgumentError("x.shape[0]", values.shape[0], bound)
            sizes = self._sizes(plan.num_experts, plan.top_k)
            kind = DispatchKind.of(
                sizes, values, scales, layout, new_routing=False, in_place=in_place
            )
            sending = self._launches.dispatch(kind)
            dispatched = self._room.dispatched(plan, x, kind)
            if layout == "expert_major" and plan.rows_of is None:
                shape = (len(plan.source_token), plan.top_k)
                # An aborted call leaves them as they are.
                plan.used_on.clear()
                plan.rows_of = torch.full(shape, -1, dtype=torch.int32, device=self.device)
        args = sending.args
        self._begin_dispatch(args, dispatched, values, scales, None)
        args.result_rows = self._results.most_rows(kind)
        args.zeroes_padding = self._zero_padding
        # Every such call writes the same, as nobody can tell which was the first that took place.
        late = layout == "expert_major" and plan.topk_idx is not None
        args.rows_of = address_of(plan.rows_of) if late else 0
        stream = self._follow()
        plan.keep_for(stream)
        sending.launch(args, stream)
        if layout == "expert_major" and plan.row_weights is None and plan.topk_weights is not None:
            dispatched.row_weights = plan.weights_of_rows(len(dispatched.tokens))
        else:
            results = dispatched.tokens, dispatched.scales
            plan.repeated_dispatches[layout] = RepeatedDispatch.of(
                self._launches, sending, x, results, in_place=in_place
            )
        return dispatched

    def _dispatch_again(self, again: RepeatedDispatch, plan: CudaPlan, x: Rows) -> CudaDispatched:
        args = again.call.args
        try:
            if again.in_place:
                self._results.check(x)
            dispatched = self._room.again(again, plan)
        except BaseException as error:  # such as for want of memory
            self.refuse_dispatch(error, plan)
            raise
        args.zeroes_padding = self._zero_padding
        dispatched.place(args)
        stream = self._follow()
        plan.keep_for(stream)
        again.call.launch(args, stream)
        return dispatched

    def combine(
        self,
        y: torch.Tensor,
        plan: CudaPlan,
        *,
        layout: RowOrder,
        row_weights: torch.Tensor | None = None,
        topk_weights: torch.Tensor | None = None,
        bias: torch.Tensor | tuple[torch.Tensor, ...] | None = None,
        out: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """See :meth:`HighThroughputBackend.combine`. With a capacity ``y`` has as many rows;
        ``out`` shares no memory with ``y``."""
        self._check_usable()
        if bias is None:
            again = repeated_combine(plan, layout)
            if again and again.finds(self._launches, y, row_weights, topk_weights, out):
                return self._combine_again(again, plan, out)
        with Refusing(lambda error: self.refuse_combine(error, plan)):
            check_layout(layout)
            check_plan(plan, self._ranks, layout)
            self.check_devices(y=y, row_weights=row_weights, topk_weights=topk_weights, out=out)
            check_outputs(y, [plan.row_count(layout)], layout, row_weights, self.device)
            check_aligned("y", y)
            sums = self._returned_weights(topk_weights, plan, layout, y.shape[0])
            shape = (plan.tokens, y.shape[1])
            biases = check_biases(bias, shape, self.device)
            if out is None:
                out = self._room.empty(shape, torch.bfloat16)
            check_tensor("out", out, shape, (torch.bfloat16,), device=self.device)
            for name, tensor in (("out", out), *((f"bias[{n}]", b) for n, b in enumerate(biases))):
                check_aligned(name, tensor)
            check_apart("out", out, "y", y)
            weighted = row_weights is not None
            call = self._combining(plan, layout, y, weighted, sums is not None, bool(biases))
        args = call.args
        args.biases = len(biases)
        args.row_weights = address_of(row_weights)
        args.topk_weights, args.out_weights = address_of(topk_weights), address_of(sums)
        for place, rows in enumerate(biases):
            args.set_bias(place, rows.data_ptr())
        self._finish_combine(call, plan, y, out)
        if bias is None:
            tensors = (y, row_weights, topk_weights, out)
            plan.repeated_combines[layout] = RepeatedCombine.of(self._launches, call, *tensors)
        return out, sums

    def _combine_again(
        self, again: RepeatedCombine, plan: CudaPlan, out: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        args, sums = again.call.args, None
        try:
            if out is None:
                out = self._room.empty(again.shape, torch.bfloat16)
                args.out = out.data_ptr()
            if again.topk_weights is not None:
                sums = self._room.empty((plan.tokens, plan.top_k), torch.float32)
                args.out_weights = sums.data_ptr()
        except BaseException as error:  # for want of memory
            self.refuse_combine(error, plan)
            raise
        self._launch_combine(again.call, plan)
        return out, sums

    def combine_weights(
        self, topk_weights: torch.Tensor, plan: CudaPlan, *, layout: RowOrder
    ) -> torch.Tensor:
        """See :meth:`HighThroughputBackend.combine_weights`. Rows of 16 bytes travel along."""
        self._check_usable()
        with Refusing(lambda error: self.refuse_combine(error, plan)):
            check_layout(layout)
            check_plan(plan, self._ranks, layout)
            self.check_devices(topk_weights=topk_weights)
            sums = self._returned_weights(topk_weights, plan, layout, None)
            if sums is None:
                raise ArgumentError("topk_weights", None, "a torch.Tensor")
            y = self._room.empty((plan.row_count(layout), _WEIGHTS_ALONE_HIDDEN), torch.bfloat16)
            out = self._room.empty((plan.tokens, _WEIGHTS_ALONE_HIDDEN), torch.bfloat16)
            call = self._combining(plan, layout, y, False, True)
        args = call.args
        args.row_weights = 0
        args.topk_weights, args.out_weights = topk_weights.data_ptr(), sums.data_ptr()
        self._finish_combine(call, plan, y, out)
        return sums

    # ---- refusals and reports -------------------------------------------------------------------

    def check(self) -> None:
        """Raises what earlier calls have found wrong since; does not wait for them."""
        self._check_usable()
        if self._reports.passing():
            raise self._reports.take(self._memory.rank, self._config.timeout_s)

    def quiesce(self) -> None:
        """Returns when all calls of this rank so far have ended; raises what they found wrong."""
        self._follow()
        wait_for_kernels(self._memory)
        self.check()

    def refuse_dispatch(self, error: BaseException, plan: object = None) -> None:
        """Aborts this dispatch on all ranks because of ``error``, found by a layer above.

        Args:
            error: what was found.
            plan: of a cached dispatch: if it is aborted, the call is so without this.
        """
        del error  # the peers learn who refused, and look there
        if self._reports.fatal() or torch.cuda.is_current_stream_capturing():
            return
        args, stream = self._refusal.args, self._follow()
        args.source_prefix = 0
        if isinstance(plan, CudaPlan) and plan.ranks == self._ranks:
            args.source_prefix = plan.source_prefix_address
            plan.keep_for(stream)
        self._refusal.launch(args, stream)

    def refuse_combine(self, error: BaseException, plan: object = None) -> None:
        """As :meth:`refuse_dispatch`, of a combine."""
        self.refuse_dispatch(error, plan)

    def _check_usable(self) -> None:
        if self._reports.fatal():
            raise self._reports.take(self._memory.rank, self._config.timeout_s)
        if self._between is not None:
            self._between.check()
        self._memory.base(self._memory.rank)  # raises if it is closed

    def _sizes(self, experts: int, top_k: int) -> Sizes:
        return Sizes(self._ranks, experts, top_k, self._between is not None)

    # ---- parts of calls -------------------------------------------------------------------------

    def _check_rows(self, x: Rows) -> tuple[torch.Tensor, torch.Tensor | None]:
        parts = x if isinstance(x, tuple) else (x,)
        self.check_devices(**{f"x[{n}]" if len(parts) > 1 else "x": t for n, t in enumerate(parts)})
        values, scales = check_rows(x, self.device)
        tokens = values.shape[0]
        if tokens > self._max_tokens:
            raise ArgumentError("x.shape[0]", tokens, f"at most max_tokens = {self._max_tokens}")
        check_aligned("x", values)
        return values, scales

    def _begin_plan(
        self, args: _core.CudaPlanArgs, plan: CudaPlan, topk_idx: torch.Tensor, layout: RowOrder
    ) -> torch.Tensor | None:
        """Fills in what a plan has; its choices where a dispatch in that order sends them."""
        choices, args.capacity = None, _UNBOUNDED
        if layout == "token_major":
            choices = self._room.empty(topk_idx.shape, torch.int32)
        elif plan.capacity is not None:
            args.capacity = plan.capacity
        plan.fill_plan(args)
        args.choices = address_of(choices)
        args.topk_idx, args.counted = topk_idx.data_ptr(), self._counted.data_ptr()
        args.totals = self._totals.address if plan.capacity is None else 0
        return choices

    def _await_totals(self, plan: CudaPlan) -> None:
        """Waits for the numbers of rows that a plan finds to come."""
        stream = torch.cuda.current_stream(self.device)
        received, expert_rows = self._totals.wait(stream, self._config.timeout_s)
        if received < 0 or self._reports.fatal():
            self.check()
            raise UsageError("a plan was aborted; an earlier call has raised the reason")
        plan.received, plan.expert_rows = received, expert_rows

    def _begin_dispatch(
        self,
        args: _core.CudaHighThroughputDispatchArgs,
        dispatched: CudaDispatched,
        values: torch.Tensor,
        scales: torch.Tensor | None,
        choices: torch.Tensor | None,
    ) -> None:
        """Fills in what all dispatches have; ``choices`` only of a new routing, token-major."""
        dispatched.plan.fill_dispatch(args)
        args.x, args.scales = values.data_ptr(), address_of(scales)
        if scales is not None:
            args.scale_token_stride, args.scale_word_stride = scales.stride()
        if choices is not None:
            args.topk_words = choices.data_ptr()
        dispatched.place(args)

    def _returned_weights(
        self, topk_weights: torch.Tensor | None, plan: CudaPlan, layout: RowOrder, rows: int | None
    ) -> torch.Tensor | None:
        """Room for the sums of the weights that return, if any do."""
        if topk_weights is None:
            return None
        allowed = [plan.row_count(layout)]
        check_returned_weights(topk_weights, allowed, layout, rows, plan.top_k, self.device)
        return self._room.empty((plan.tokens, plan.top_k), torch.float32)

    def _combining(
        self, plan: CudaPlan, layout: RowOrder, y: torch.Tensor, weighted: bool, returns: bool,
        biased: bool = False,
    ) -> _CombineCall:  # fmt: skip
        sizes = self._sizes(plan.num_experts, plan.top_k)
        row_bytes = y.shape[1] * y.itemsize
        expert_major = layout == "expert_major"
        kind = CombineKind(sizes, row_bytes, expert_major, weighted, returns, biased)
        return self._launches.combine(kind)

    def _finish_combine(
        self,
        call: _CombineCall,
        plan: CudaPlan,
        y: torch.Tensor,
        out: torch.Tensor,
    ) -> None:
        """Fills in what all combines have, launches, and raises what earlier calls have found."""
        args = call.args
        plan.fill_combine(args)
        args.y, args.out = y.data_ptr(), out.data_ptr()
        self._launch_combine(call, plan)

    def _launch_combine(self, call: _CombineCall, plan: CudaPlan) -> None:
        """Launches, and raises what earlier calls have found."""
        stream = self._follow()
        plan.keep_for(stream)
        call.launch(call.args, stream)
        if self._reports.passing():
            self.check()
