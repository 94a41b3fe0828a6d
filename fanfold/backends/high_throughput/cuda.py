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
from fanfold.backends.high_throughput.grid import Grid
from fanfold.backends.high_throughput.in_place import Results
from fanfold.backends.high_throughput.kernels import (
    WEIGHTS_ALONE_ROW_BYTES,
    CombineKind,
    DispatchKind,
    Sizes,
    most_batches,
)
from fanfold.backends.high_throughput.launches import Call, Launches, ctas_bounds, grid_of
from fanfold.backends.high_throughput.plan import CudaDispatched, CudaPlan
from fanfold.backends.high_throughput.protocol import (
    MOST_ALIGNMENT,
    MOST_ROWS,
    MOST_SMS,
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
from fanfold.backends.high_throughput.reports import Reports, Totals
from fanfold.config import Config
from fanfold.deferred_free import free_when_idle
from fanfold.errors import ArgumentError, UnavailableError, UsageError
from fanfold.formats import ScaleFormat
from fanfold.geometry import check_aligned, check_integer, check_tensor
from fanfold.group import agree
from fanfold.kernel_state import new_state
from fanfold.lending import address_of
from fanfold.memory import GpuPeerMemory
from fanfold.memory.cuda import are_threads, wait_for_kernels
from fanfold.refusal import Refusing
from fanfold.stream_order import StreamOrder, stream_at

__all__ = ["CudaHighThroughput"]

_LINE = 128
_UNBOUNDED = 1 << 62
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
        self._quantize_to = quantize_to
        self._ranks, self._max_tokens = memory.ranks, max_tokens
        self._follow = StreamOrder(self.device).follow
        error: Exception | None = None
        try:
            check_integer("max_tokens", max_tokens, 0, MOST_ROWS)
            check_integer("result_bytes", result_bytes, 0, memory.bytes_per_rank)
            self._grid = grid_of(memory, config, ctas, senders)
            self._open(result_bytes)
        except Exception as failure:  # for want of memory, too
            error = failure
        # When all have come here, everybody's words are zero.
        values = {"bytes": memory.bytes_per_rank, "max_tokens": max_tokens}
        agree(memory.group, {**values, "result_bytes": result_bytes}, error)

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
        grid = self._grid
        if sms is not None:
            check_integer("sms", sms, 1, MOST_SMS)
            least, most = ctas_bounds(self._memory)
            grid = Grid(self._ranks, most, min(max(sms, least), most))
        self._launches = self._launches_with(grid)

    def _launches_with(self, grid: Grid) -> Launches:
        known = self._launches_of.get(grid)
        if known is None:
            early = not are_threads(self._memory.group)  # it would hold SMs that they may need
            known = Launches(self._core, self.device, self._config, grid, early=early)
            self._launches_of[grid] = known
        return known

    def _open(self, result_bytes: int) -> None:
        memory, device = self._memory, self.device
        if torch.cuda.get_device_capability(device.index) < LEAST_CAPABILITY["high_throughput"]:
            raise UnavailableError(
                "high throughput on GPUs needs compute capability 9.0 or later for its copies; "
                "stage through the host instead (backend='host', FANFOLD_BACKEND=host)"
            )
        zeroed, fixed = _core.cuda_high_throughput_bytes(memory.ranks, 0)
        ring_bytes = (memory.bytes_per_rank - fixed - result_bytes) // memory.ranks // _LINE * _LINE
        if ring_bytes <= 0:
            more = f"more than {fixed + result_bytes}; see required_bytes"
            raise ArgumentError("bytes_per_rank", memory.bytes_per_rank, more)
        peers = [memory.base(peer) for peer in range(memory.ranks)]
        state_bytes = _core.CUDA_HIGH_THROUGHPUT_STATE_BYTES
        peers_at = _core.CUDA_HIGH_THROUGHPUT_STATE_PEERS_AT
        self._state = new_state(state_bytes, peers_at, peers, device)
        counts = ctas_bounds(memory)[1] * (_core.CUDA_HIGH_THROUGHPUT_MOST_EXPERTS + memory.ranks)
        self._counted = torch.empty(counts, dtype=torch.int32, device=device)
        self._reports, self._totals = Reports(), Totals()
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
        self._launches_of: dict[Grid, Launches] = {}
        self._launches = self._launches_with(self._grid)
        # Loaded now, so that a rank can always say that it refuses.
        refusal = self._launches.plan(Sizes(memory.ranks, memory.ranks, 1), 1)
        self._refusal = Call(refusal.args.copy(), refusal.launch)
        self._refusal.args.refused = True
        begin = _core.cuda_high_throughput_bytes(memory.ranks, ring_bytes)[1]
        self._results = Results(memory, begin, result_bytes)
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
            check_layout(layout)
            check_integer("expert_alignment", expert_alignment, 1, MOST_ALIGNMENT)
            if capacity is not None:
                check_integer("capacity", capacity, 0, MOST_ROWS)
            elif torch.cuda.is_current_stream_capturing():
                raise UsageError("a dispatch in a CUDA graph needs a capacity")
            x = quantized(x, self._quantize_to)
            values, scales = self._check_rows(x)
            if in_place:
                self._results.check(x)
            self.check_devices(topk_idx=topk_idx, topk_weights=topk_weights)
            tokens = values.shape[0]
            check_routing(topk_idx, topk_weights, tokens, num_experts, self._ranks, self.device)
            sizes = Sizes(self._ranks, num_experts, topk_idx.shape[1])
            weighted = topk_weights is not None
            kind = DispatchKind.of(
                sizes, values, scales, layout, weighted=weighted, in_place=in_place
            )
            planning, sending = self._launches.new_routing(sizes, expert_alignment, kind)
            plan = self._draft(sizes, tokens, capacity)
            choices = self._begin_plan(planning.args, plan, topk_idx, layout)
            dispatched = None
            if capacity is not None:
                dispatched = self._allocate(plan, x, kind)
        stream = plan.stream = self._follow()
        planning.launch(planning.args, stream)
        if dispatched is None:
            # If the plan is aborted, no rank makes this call.
            with Refusing(lambda error: self.refuse_dispatch(error, plan)):
                self._await_totals(plan)
                if planned is not None:
                    planned(plan)
                dispatched = self._allocate(plan, x, kind)
        args = sending.args
        self._begin_dispatch(args, dispatched, values, scales, choices)
        args.result_rows = self._results.most_rows(kind)
        args.weights, args.row_weights = address_of(topk_weights), address_of(plan.row_weights)
        args.rows_of, args.topk_idx = address_of(plan.rows_of), address_of(plan.topk_idx)
        args.topk_weights = address_of(plan.topk_weights)
        args.source_token = plan.source_token.data_ptr()
        args.batches, args.batch_stride = plan.batches.data_ptr(), plan.batches.shape[1]
        sending.launch(args, stream)
        return dispatched

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
        with Refusing(lambda error: self.refuse_dispatch(error, plan)):
            check_layout(layout)
            self._check_plan(plan)
            x = quantized(x, self._quantize_to)
            values, scales = self._check_rows(x)
            if in_place:
                self._results.check(x)
            if values.shape[0] != plan.tokens:
                bound = f"{plan.tokens}, the tokens of the plan"
                raise ArgumentError("x.shape[0]", values.shape[0], bound)
            sizes = Sizes(plan.ranks, plan.num_experts, plan.top_k)
            kind = DispatchKind.of(
                sizes, values, scales, layout, new_routing=False, in_place=in_place
            )
            sending = self._launches.dispatch(kind)
            dispatched = self._allocate(plan, x, kind)
            if layout == "expert_major" and plan.rows_of is None:
                shape = (len(plan.source_token), plan.top_k)
                # An aborted call leaves them as they are.
                plan.rows_of = torch.full(shape, -1, dtype=torch.int32, device=self.device)
        args = sending.args
        self._begin_dispatch(args, dispatched, values, scales, None)
        args.result_rows = self._results.most_rows(kind)
        # Every such call writes the same, as nobody can tell which was the first that took place.
        late = layout == "expert_major" and plan.topk_idx is not None
        args.rows_of = address_of(plan.rows_of) if late else 0
        stream = self._follow()
        self._keep(plan, stream)
        sending.launch(args, stream)
        if layout == "expert_major" and plan.row_weights is None and plan.topk_weights is not None:
            dispatched.row_weights = plan.weights_of_rows(len(dispatched.tokens))
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
        with Refusing(lambda error: self.refuse_combine(error, plan)):
            check_layout(layout)
            self._check_plan(plan, layout)
            self.check_devices(y=y, row_weights=row_weights, topk_weights=topk_weights, out=out)
            check_outputs(y, [plan.row_count(layout)], layout, row_weights, self.device)
            check_aligned("y", y)
            sums = self._returned_weights(topk_weights, plan, layout, y.shape[0])
            shape = (plan.tokens, y.shape[1])
            biases = check_biases(bias, shape, self.device)
            if out is None:
                out = self._empty(shape, torch.bfloat16)
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
        return out, sums

    def combine_weights(
        self, topk_weights: torch.Tensor, plan: CudaPlan, *, layout: RowOrder
    ) -> torch.Tensor:
        """See :meth:`HighThroughputBackend.combine_weights`. Rows of 16 bytes travel along."""
        self._check_usable()
        with Refusing(lambda error: self.refuse_combine(error, plan)):
            check_layout(layout)
            self._check_plan(plan, layout)
            self.check_devices(topk_weights=topk_weights)
            sums = self._returned_weights(topk_weights, plan, layout, None)
            if sums is None:
                raise ArgumentError("topk_weights", None, "a torch.Tensor")
            y = self._empty((plan.row_count(layout), _WEIGHTS_ALONE_HIDDEN), torch.bfloat16)
            out = self._empty((plan.tokens, _WEIGHTS_ALONE_HIDDEN), torch.bfloat16)
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
            args.source_prefix = plan.source_prefix.data_ptr()
            self._keep(plan, stream)
        self._refusal.launch(args, stream)

    def refuse_combine(self, error: BaseException, plan: object = None) -> None:
        """Aborts this combine on all ranks because of ``error``, found by a layer above.

        Args:
            error, plan: as in :meth:`refuse_dispatch`.
        """
        self.refuse_dispatch(error, plan)

    def _check_usable(self) -> None:
        if self._reports.fatal():
            raise self._reports.take(self._memory.rank, self._config.timeout_s)
        self._memory.base(self._memory.rank)  # raises if it is closed

    # ---- parts of calls -------------------------------------------------------------------------

    def _keep(self, plan: CudaPlan, stream: int) -> None:
        """Tells the allocator that a plan is used on another stream than it was made on, which the
        caller, who sees little of it, cannot."""
        if stream == plan.stream:
            return
        current = torch.cuda.current_stream(self.device)
        for tensor in plan.tensors():
            tensor.record_stream(current)
        if plan.rows_of is not None:  # by whose first call it was made, wherever that was
            plan.rows_of.record_stream(stream_at(plan.stream, self.device))

    def _empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=self.device)

    def _check_rows(self, x: Rows) -> tuple[torch.Tensor, torch.Tensor | None]:
        parts = x if isinstance(x, tuple) else (x,)
        self.check_devices(**{f"x[{n}]" if len(parts) > 1 else "x": t for n, t in enumerate(parts)})
        values, scales = check_rows(x, self.device)
        tokens = values.shape[0]
        if tokens > self._max_tokens:
            raise ArgumentError("x.shape[0]", tokens, f"at most max_tokens = {self._max_tokens}")
        check_aligned("x", values)
        return values, scales

    def _check_plan(self, plan: CudaPlan, layout: RowOrder | None = None) -> None:
        if not isinstance(plan, CudaPlan):
            raise ArgumentError("plan", f"a {type(plan).__name__}", "the plan of a dispatch here")
        if plan.ranks != self._ranks:
            raise ArgumentError("plan.ranks", plan.ranks, f"{self._ranks}, as in this group")
        if layout == "expert_major" and plan.rows_of is None:
            raise UsageError(
                "a combine in expert-major order needs a plan by which a dispatch, new or cached, "
                "was expert-major"
            )

    def _draft(self, sizes: Sizes, tokens: int, capacity: int | None) -> CudaPlan:
        """A plan of which nothing is known yet."""
        local = sizes.experts // sizes.ranks
        return CudaPlan(
            ranks=sizes.ranks,
            num_experts=sizes.experts,
            top_k=sizes.top_k,
            tokens=tokens,
            capacity=capacity,
            received=None,
            expert_rows=None,
            rows=self._empty((tokens, sizes.ranks), torch.int32),
            places=self._empty((tokens, sizes.top_k), torch.int32),
            source_prefix=self._empty((sizes.ranks,), torch.int32),
            first_rows=self._empty((sizes.ranks,), torch.int32),
            source_token=self._empty((0,), torch.int32),
            tokens_per_expert=self._empty((local,), torch.int32),
            offsets=self._empty((local + 2,), torch.int64)[:-1],
            batches=self._empty((sizes.ranks, most_batches(self._max_tokens)), torch.int64),
        )

    def _begin_plan(
        self, args: _core.CudaPlanArgs, plan: CudaPlan, topk_idx: torch.Tensor, layout: RowOrder
    ) -> torch.Tensor | None:
        """Fills in what a plan has; its choices where a dispatch in that order sends them."""
        choices, args.capacity = None, _UNBOUNDED
        if layout == "token_major":
            choices = self._empty(topk_idx.shape, torch.int32)
        elif plan.capacity is not None:
            args.capacity = plan.capacity
        args.tokens, args.choices = plan.tokens, address_of(choices)
        args.topk_idx, args.counted = topk_idx.data_ptr(), self._counted.data_ptr()
        args.rows, args.places = plan.rows.data_ptr(), plan.places.data_ptr()
        args.tokens_per_expert = plan.tokens_per_expert.data_ptr()
        args.offsets = plan.offsets.data_ptr()
        args.source_prefix = plan.source_prefix.data_ptr()
        args.first_rows = plan.first_rows.data_ptr()
        args.totals = self._totals.address if plan.capacity is None else 0
        return choices

    def _await_totals(self, plan: CudaPlan) -> None:
        """Waits for the numbers of rows that a plan finds to come."""
        # The plan's own waits end after timeout_s; what was enqueued before it takes time, too.
        limit_s = 2 * self._config.timeout_s + 10
        totals = self._totals.wait(torch.cuda.current_stream(self.device), limit_s)
        if totals is None or self._reports.fatal():
            self.check()
            raise UsageError("a plan was aborted; an earlier call has raised the reason")
        plan.received, plan.expert_rows = totals

    def _allocate(self, plan: CudaPlan, x: Rows, kind: DispatchKind) -> CudaDispatched:
        """Room for what a dispatch brings, also in the plan if that is new."""
        expert_major, new, weighted = kind.expert_major, kind.new_routing, kind.weighted
        count = plan.row_count(kind.layout)
        tokens, row_scales = self._room_for_rows(count, x, kind)
        sources = self._empty((3, count), torch.int32)
        if new:
            arriving = plan.row_count("token_major")
            entries = (arriving, plan.top_k)
            plan.source_token = sources[2, :arriving]
            if expert_major:
                plan.rows_of = self._empty(entries, torch.int32)
            else:
                plan.topk_idx = self._empty(entries, torch.int64)
            if weighted and not expert_major:
                plan.topk_weights = self._empty(entries, torch.float32)
        if new and weighted and expert_major:
            plan.row_weights = self._empty((count,), torch.float32)
        return CudaDispatched(
            tokens=tokens,
            scales=row_scales,
            plan=plan,
            row_weights=plan.row_weights if expert_major else None,
            row_source_rank=sources[0],
            row_source_token=sources[1],
            offsets=torch.empty_like(plan.offsets) if expert_major else None,
            tokens_per_expert=torch.empty_like(plan.tokens_per_expert) if expert_major else None,
        )

    def _room_for_rows(
        self, count: int, x: Rows, kind: DispatchKind
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        if kind.in_place:
            return self._results.room(count, x, kind)
        parts = x if isinstance(x, tuple) else (x,)
        made = [self._empty((count, part.shape[1]), part.dtype) for part in parts]
        return made[0], made[1] if len(made) > 1 else None

    def _begin_dispatch(
        self,
        args: _core.CudaHighThroughputDispatchArgs,
        dispatched: CudaDispatched,
        values: torch.Tensor,
        scales: torch.Tensor | None,
        choices: torch.Tensor | None,
    ) -> None:
        """Fills in what all dispatches have; ``choices`` only of a new routing, token-major."""
        plan = dispatched.plan
        args.tokens, args.x = plan.tokens, values.data_ptr()
        args.scales = address_of(scales)
        if scales is not None:
            args.scale_token_stride, args.scale_word_stride = scales.stride()
        args.topk_words = (plan.places if choices is None else choices).data_ptr()
        args.rows, args.first_rows = plan.rows.data_ptr(), plan.first_rows.data_ptr()
        args.source_prefix = plan.source_prefix.data_ptr()
        args.offsets = plan.offsets.data_ptr()
        args.tokens_per_expert = plan.tokens_per_expert.data_ptr()
        args.marks_absent = plan.capacity is not None
        dispatched.place(args)

    def _returned_weights(
        self, topk_weights: torch.Tensor | None, plan: CudaPlan, layout: RowOrder, rows: int | None
    ) -> torch.Tensor | None:
        """Room for the sums of the weights that return, if any do."""
        if topk_weights is None:
            return None
        allowed = [plan.row_count(layout)]
        check_returned_weights(topk_weights, allowed, layout, rows, plan.top_k, self.device)
        return self._empty((plan.tokens, plan.top_k), torch.float32)

    def _combining(
        self, plan: CudaPlan, layout: RowOrder, y: torch.Tensor, weighted: bool, returns: bool,
        biased: bool = False,
    ) -> Call[_core.CudaHighThroughputCombineArgs]:  # fmt: skip
        sizes = Sizes(plan.ranks, plan.num_experts, plan.top_k)
        row_bytes = y.shape[1] * y.itemsize
        expert_major = layout == "expert_major"
        kind = CombineKind(sizes, row_bytes, expert_major, weighted, returns, biased)
        return self._launches.combine(kind)

    def _finish_combine(
        self,
        call: Call[_core.CudaHighThroughputCombineArgs],
        plan: CudaPlan,
        y: torch.Tensor,
        out: torch.Tensor,
    ) -> None:
        """Fills in what all combines have, launches, and raises what earlier calls have found."""
        args = call.args
        args.tokens, args.y, args.out = plan.tokens, y.data_ptr(), out.data_ptr()
        args.batches, args.batch_stride = plan.batches.data_ptr(), plan.batches.shape[1]
        args.kept = len(plan.source_token)
        args.source_prefix, args.rows = plan.source_prefix.data_ptr(), plan.rows.data_ptr()
        args.rows_of = address_of(plan.rows_of)
        stream = self._follow()
        self._keep(plan, stream)
        call.launch(args, stream)
        if self._reports.passing():
            self.check()
