"""The low-latency half of ``Buffer``: DeepEP's calls on :class:`LowLatencyBackend`."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import partial

import torch

from fanfold.backends.low_latency import (
    NO_STATISTICS,
    Dispatched,
    Hook,
    LowLatencyBackend,
    ReadyRows,
    RoutingLayout,
    Statistics,
    check_cuda_geometry,
)
from fanfold.backends.low_latency.validation import fast_path_of
from fanfold.deep_ep.base import BufferBase
from fanfold.deep_ep.events import EventOverlap
from fanfold.deep_ep.low_latency_handle import (
    LowLatencyHandle,
    ReadHandle,
    handle_of,
    late_routing,
    routing_of,
)
from fanfold.deep_ep.names import GEOMETRY, HANDLE, LOW_LATENCY_COMBINE, LOW_LATENCY_DISPATCH
from fanfold.deep_ep.overlap import Overlap
from fanfold.deep_ep.row_formats import as_deep_ep, formats_of, one_scale, quick_formats
from fanfold.deep_ep.runtime import Runtime
from fanfold.deep_ep.sizes import (
    check_count,
    cuda_low_latency_bytes,
    low_latency_bytes,
    promised_top_k,
)
from fanfold.deep_ep.zero_copy import ZeroCopy
from fanfold.errors import ArgumentError, FanfoldError, UsageError
from fanfold.geometry import Geometry, check_tensor, is_plain
from fanfold.refusal import Refusing
from fanfold.renaming import Renaming

__all__ = ["LowLatencyCalls"]

_NOTHING = torch.empty(0, dtype=torch.int32, device="cpu")

DispatchReturn = tuple[
    torch.Tensor | tuple[torch.Tensor, torch.Tensor],
    torch.Tensor,
    LowLatencyHandle,
    EventOverlap,
    Callable[[], None] | None,
]


_Sizes = tuple[int, int, torch.Tensor, int]  # as of ReadHandle.sizes


def _given_sizes(
    max_tokens: int, num_experts: int, topk_idx: torch.Tensor, x: torch.Tensor
) -> _Sizes | None:
    """What a dispatch that is refused tells of its geometry: nothing if its tensors do not fit
    together, as then one of them is most likely what is wrong."""
    if not (x.dim() == topk_idx.dim() == 2 and x.shape[0] == topk_idx.shape[0]):
        return None
    return max_tokens, num_experts, topk_idx, x.shape[1]


class _ValidatedGeometry:
    """The geometry of the last call, which has been checked to fit, and the shapes that follow from
    it: the next call most often has the same, and must not repeat the checks.

    Args:
        geometry: this one.
        device: where tensors must be.

    Attributes:
        outputs: ``(E_l, C, hidden)``.
    """

    def __init__(self, geometry: Geometry, device: torch.device) -> None:
        layout = RoutingLayout.of(geometry, 0)
        self.geometry = geometry
        self.outputs = (*layout.rows, geometry.hidden)
        self._ranges = layout.ranges
        self._device = device
        self._fast_path = fast_path_of(geometry, layout, device)

    def is_of(self, max_tokens: object, num_experts: object, x: object, topk_idx: object) -> bool:
        """Whether a dispatch of these, as far as they tell the geometry, has this one."""
        geometry = self.geometry
        return (
            type(max_tokens) is int
            and max_tokens == geometry.max_tokens
            and type(num_experts) is int
            and num_experts == geometry.num_experts
            and self._fast_path.suits(x, topk_idx)
        )

    def sums(self, totals: torch.Tensor | None, waits: torch.Tensor | None) -> bool:
        """Whether these are tensors that a call may add rows and nanoseconds to, or None."""
        shape, device = self._ranges, self._device
        return (totals is None or is_plain(totals, shape[:1], torch.int32, device)) and (
            waits is None or is_plain(waits, shape[1:], torch.int64, device)
        )

    def takes(self, y: object, handle: object, topk_idx: object) -> bool:
        """Whether ``handle`` is one that a dispatch of this geometry has returned, the tensors in
        it are as they were, and ``y`` are outputs of its rows."""
        if type(handle) is not tuple or len(handle) != 5:
            return False
        source_info, layout_range, max_tokens, hidden, num_experts = handle
        geometry = self.geometry
        return (
            max_tokens is geometry.max_tokens
            and hidden is geometry.hidden
            and num_experts is geometry.num_experts
            and self._fast_path.suits_handle(y, source_info, layout_range, topk_idx)
        )


def _sizes_of_combine(
    validated: _ValidatedGeometry | None, handle: object, topk_idx: torch.Tensor
) -> _Sizes | None:
    """The same of a combine: nothing if its handle is of the last call's geometry, as top-k is that
    of the dispatch."""
    sizes = ReadHandle.of(handle).sizes(topk_idx)
    last = None if validated is None else validated.geometry
    if last is not None and (sizes[0], sizes[1], sizes[3]) == (
        last.max_tokens, last.num_experts, last.hidden
    ):  # fmt: skip
        return None
    return sizes if topk_idx.dim() == 2 else None


class LowLatencyCalls(BufferBase):
    """Low-latency dispatch and combine with DeepEP's arguments."""

    def __init__(self) -> None:
        self._zero_copy = ZeroCopy(self.device)
        self._validated: _ValidatedGeometry | None = None
        self._on_gpu = self.device.type != "cpu"

    def clean_low_latency_buffer(
        self, num_max_dispatch_tokens_per_rank: int, hidden: int, num_experts: int
    ) -> None:
        """Returns when every rank has finished its earlier low-latency calls and has arrived here.
        Collective.

        Calls in flight are given up: their hooks raise UsageError from then on. On a GPU the
        memory of the mode is initialised, for which the CPU waits.

        Args:
            num_max_dispatch_tokens_per_rank, hidden, num_experts: of the calls to come; checked to
                fit.

        Raises:
            ArgumentError: the calls to come do not fit into ``num_rdma_bytes``.
            UsageError: no low-latency mode.
            PeerTimeout: a rank did not arrive in time.
        """
        mode = self._low_latency()
        with GEOMETRY:
            geometry = Geometry(
                self.group_size, num_experts, 1, hidden, num_max_dispatch_tokens_per_rank
            )
        self._check_fit(geometry)
        mode.reset()
        if self.device.type != "cpu":
            return
        signature = {
            "num_max_dispatch_tokens_per_rank": geometry.max_tokens,
            "hidden": geometry.hidden,
            "num_experts": geometry.num_experts,
        }
        self._open().exchange.gather("clean_low_latency_buffer", signature, _NOTHING)

    def low_latency_dispatch(
        self,
        x: torch.Tensor,
        topk_idx: torch.Tensor,
        num_max_dispatch_tokens_per_rank: int,
        num_experts: int,
        cumulative_local_expert_recv_stats: torch.Tensor | None = None,
        dispatch_wait_recv_cost_stats: torch.Tensor | None = None,
        use_fp8: bool = True,
        round_scale: bool = False,
        use_ue8m0: bool = False,
        async_finish: bool = False,
        return_recv_hook: bool = False,
        use_nvfp4: bool = False,
        x_global_scale: torch.Tensor | None = None,
    ) -> DispatchReturn:
        """Sends each token to its experts; rows arrive packed by local expert. Collective.

        E_l local experts, R ranks, M ``num_max_dispatch_tokens_per_rank``, C = R * M.

        Args:
            x: ``[T, hidden]`` bfloat16, contiguous, T up to M; any hidden that is a multiple of 8
                (of 16 with fp8, of 32 with nvfp4). All tensors are on :attr:`Buffer.device`.
            topk_idx: ``[T, K]`` int64, -1 for none, K from 1 to 32.
            num_max_dispatch_tokens_per_rank: M, the same on all ranks.
            num_experts: of all ranks, the same on all.
            cumulative_local_expert_recv_stats: ``[E_l]`` int32, rows received, added to.
            dispatch_wait_recv_cost_stats: ``[R]`` int64, nanoseconds waited for each rank, added
                to.
            use_fp8: quantise rows to e4m3 with a scale per 128 columns.
            round_scale: round scales up to powers of two.
            use_ue8m0: return scales as exponent bytes, four to an int32; needs round_scale.
            async_finish: return an event. On a GPU the work runs on the communication stream,
                after what the current stream was given; on the host it is done.
            return_recv_hook: send now, receive when the returned hook is called, on the stream
                that is current then; excludes async_finish. At most two such calls may be open,
                and their hooks are called in the order of the calls.
            use_nvfp4: quantise rows to e2m1 with an e4m3 scale per 16 columns:
                scale = e4m3(x_global_scale * amax(|x|) / 6); needs use_fp8=False. As in DeepEP's
                hybrid-ep branch, but by keyword, as DeepEP's main branch has no such argument.
            x_global_scale: with nvfp4 float32, on all ranks the same value; of several elements the
                first counts. Other formats ignore it.

        Returns:
            - rows ``[E_l, C, hidden]`` bfloat16; with fp8 a pair of ``[E_l, C, hidden]``
              float8_e4m3fn and scales ``[E_l, C, ceil(hidden / 128)]`` float32, or
              ``[E_l, C, ceil(hidden / 512)]`` int32, both stored with C innermost. Of expert e the
              first ``counts[e]`` rows are valid, by source rank, then source token. With nvfp4 a
              pair of ``[C, hidden / 2, E_l]`` uint8, two columns in each, the first in the low
              half, stored as ``[E_l, C, hidden / 2]``; and scales ``[32, 4, ceil(C / 128), 4,
              ceil(hidden / 64), E_l]`` float8_e4m3fn, stored as ``[E_l, ceil(C / 128),
              ceil(hidden / 64), 32, 4, 4]``: that of row r and block b of 16 columns is at
              ``[r % 32, r // 32 % 4, r // 128, b % 4, b // 4, e]``;
            - counts ``[E_l]`` int32;
            - the handle ``(src_info [E_l, C] int32, layout_range [E_l, R] int64 of
              count | begin << 32, M, hidden, num_experts)``;
            - the event, which holds None without async_finish;
            - the hook, or None.

        Raises:
            ArgumentError: bad input, or ranks that disagree; nothing was sent, and the call is
                aborted on all ranks.
            PeerRefused: another rank refused its input.
            PeerTimeout: a rank did not arrive in time (with enable_shrink it is masked instead).
            UsageError: no low-latency mode, destroyed, or two calls in flight.

        On a GPU the CPU waits for nothing, and what kernels find is raised by a later call: an
        entry of topk_idx that is out of range, a rank that refused or is late.
        """
        mode, runtime = self._low_latency("low_latency_dispatch"), self._open()
        totals, waits = cumulative_local_expert_recv_stats, dispatch_wait_recv_cost_stats
        flags = (use_fp8, round_scale, use_ue8m0, use_nvfp4)
        validated, formats = self._validated, quick_formats(*flags)
        if not (
            validated is not None
            and self._on_gpu  # where the mode says why tensors must be there
            and validated.is_of(num_max_dispatch_tokens_per_rank, num_experts, x, topk_idx)
            and formats is not None
            and validated.sums(totals, waits)
            and not (async_finish and return_recv_hook)
        ):
            sizes = (num_max_dispatch_tokens_per_rank, num_experts, topk_idx)
            with self._refusing(mode.refuse_dispatch, partial(_given_sizes, *sizes, x)):
                _check_exclusive(async_finish, return_recv_hook)
                formats = formats_of(*flags)
                runtime.choice.check_devices(x=x, topk_idx=topk_idx)
                check_tensor("x", x, ("tokens", "hidden"), (torch.bfloat16,), device=self.device)
                validated = self._validate_geometry(*sizes, x.shape[1], LOW_LATENCY_DISPATCH)
                self._check_sums(
                    validated.geometry,
                    dispatch_wait_recv_cost_stats=waits,
                    cumulative_local_expert_recv_stats=totals,
                )
        geometry = validated.geometry
        global_scale = one_scale(x_global_scale) if use_nvfp4 else None
        no_sums = totals is None and waits is None
        statistics = NO_STATISTICS if no_sums else Statistics(totals, waits)

        def call() -> tuple[Dispatched, Hook | None]:
            try:
                return mode.dispatch(
                    geometry, x, topk_idx, formats=formats, global_scale=global_scale,
                    statistics=statistics, return_hook=return_recv_hook,
                )  # fmt: skip
            except FanfoldError as error:
                LOW_LATENCY_DISPATCH.rename(error)
                raise

        dispatched, hook, event = runtime.streams.run(
            call, async_finish=async_finish, inputs=(x, topk_idx, totals, waits, global_scale)
        )
        rows, handle = as_deep_ep(dispatched), handle_of(dispatched, geometry)
        return rows, dispatched.counts, handle, event, hook

    def low_latency_combine(
        self,
        x: torch.Tensor,
        topk_idx: torch.Tensor,
        topk_weights: torch.Tensor,
        handle: LowLatencyHandle,
        use_logfmt: bool = False,
        zero_copy: bool = False,
        async_finish: bool = False,
        return_recv_hook: bool = False,
        out: torch.Tensor | None = None,
        combine_wait_recv_cost_stats: torch.Tensor | None = None,
        *,
        overlap: bool = False,
        packed_recv_count: torch.Tensor | None = None,
        comp_signal: torch.Tensor | None = None,
        block_m: int = 64,
        threshold: int = 0,
        num_sms: int = 3,
        src_signals: torch.Tensor | None = None,
        src_signal_expect_value: int = 0,
    ) -> tuple[torch.Tensor, EventOverlap, Callable[[], None] | None]:
        """Brings the experts' outputs back and sums them with their weights. Collective.

        Works from the handle alone; the hidden size is the handle's.

        With ``overlap`` the outputs may still be being written when the call begins, by a kernel
        (on the host a thread) that then adds to signals, with release. Each row is read only once
        its signal has come. The signals begin as 0 and are ``comp_signal`` or ``src_signals``; one
        of both is given. On a GPU the sending part takes ``num_sms`` SMs, and the receiving part
        begins when it has ended.

        Args:
            x: ``[E_l, C, hidden]`` bfloat16: the outputs of the dispatched rows, in their places.
            topk_idx: ``[T, K]`` int64 of this rank's own tokens, as dispatched.
            topk_weights: ``[T, K]`` float32 of this rank's own tokens.
            handle: what low_latency_dispatch returned.
            use_logfmt: send rows as LogFMT-10, on GPUs on all ranks or none; excludes zero_copy.
            zero_copy: take the outputs from the tensor of get_next_low_latency_combine_buffer
                instead of ``x``, which must still have their shape.
            async_finish, return_recv_hook: as in low_latency_dispatch.
            out: ``[T, hidden]`` bfloat16, contiguous, to write to; made if not given.
            combine_wait_recv_cost_stats: ``[R]`` int64, nanoseconds waited for each rank, added to.
            overlap: wait for signals; without it all arguments below are ignored.
            packed_recv_count: ``[E_l]`` int32, rows of each local expert, or None. Not used: only
                signals of blocks that have rows are waited for.
            comp_signal: int32, ``E_l * ceil(C / block_m)`` at least: of each expert one for each
                ``block_m`` rows, which are written when it is ``threshold`` or more.
            block_m, threshold: from 1 on.
            num_sms: SMs that the sending part takes at most.
            src_signals: ``[E_l]`` uint32 or int32: the rows of an expert are written when its
                signal is ``src_signal_expect_value`` or more, from 1 to 2^31 - 1.

        Returns:
            ``[T, hidden]`` bfloat16, the event (None inside without async_finish), and the hook or
            None. Each token's sum is taken in fp32 over a rank's experts in top-k order, rounded to
            bfloat16, then over ranks in order, rounded again. Tokens without experts give zeros.

        Raises:
            ArgumentError, PeerRefused, PeerTimeout, UsageError: as low_latency_dispatch.
            SignalTimeout: a signal did not come in time; names expert and block. It ends the mode.
        """
        mode = self._low_latency("low_latency_combine")
        runtime = self._open()
        validated, waits = self._validated, combine_wait_recv_cost_stats
        y: torch.Tensor | ReadyRows = x
        if not (
            validated is not None
            and self._on_gpu  # on the host handles are looked into
            and validated.takes(x, handle, topk_idx)
            and validated.sums(None, waits)
            and not (overlap or zero_copy or (async_finish and return_recv_hook))
        ):
            given = Overlap(
                packed_recv_count, comp_signal, block_m, threshold, num_sms, src_signals,
                src_signal_expect_value,
            )  # fmt: skip
            validated, y = self._validate_combine(
                x, topk_idx, topk_weights, handle, out, waits,
                (use_logfmt, zero_copy, async_finish, return_recv_hook),
                given if overlap else None,
            )  # fmt: skip
        geometry = validated.geometry
        routing = late_routing(handle)

        def call() -> tuple[torch.Tensor, Hook | None]:
            try:
                return mode.combine(
                    geometry, y, routing, topk_idx, late_weights=topk_weights, logfmt=use_logfmt,
                    out=out, wait_ns=waits, return_hook=return_recv_hook,
                )  # fmt: skip
            except FanfoldError as error:
                LOW_LATENCY_COMBINE.rename(error)
                raise

        inputs = (y, topk_idx, topk_weights, routing, waits)
        combined, hook, event = runtime.streams.run(call, async_finish=async_finish, inputs=inputs)
        if zero_copy:
            self._zero_copy.was_given(event)
        return combined, event, hook

    def _validate_combine(
        self,
        x: torch.Tensor,
        topk_idx: torch.Tensor,
        topk_weights: torch.Tensor,
        handle: LowLatencyHandle,
        out: torch.Tensor | None,
        waits: torch.Tensor | None,
        flags: tuple[bool, bool, bool, bool],
        overlap: Overlap | None,
    ) -> tuple[_ValidatedGeometry, torch.Tensor | ReadyRows]:
        """The geometry and the outputs of a combine, after a look at all of its arguments.
        ``flags`` are use_logfmt, zero_copy, async_finish and return_recv_hook."""
        use_logfmt, zero_copy, async_finish, return_recv_hook = flags
        mode, runtime, device = self._low_latency(), self._open(), self.device
        sizes = partial(_sizes_of_combine, self._validated, handle, topk_idx)
        with self._refusing(partial(mode.refuse_combine, routing=routing_of(handle)), sizes):
            parts = ReadHandle.of(handle)
            validated = self._validate_geometry(*parts.sizes(topk_idx), HANDLE)
            runtime.choice.check_devices(x=x, topk_weights=topk_weights, out=out)
            parts.check(validated.geometry, device)
            _check_exclusive(async_finish, return_recv_hook)
            y = self._zero_copy.outputs(x, validated.outputs, use_logfmt, zero_copy)
            shape = tuple(topk_idx.shape)
            check_tensor("topk_weights", topk_weights, shape, (torch.float32,), device=device)
            self._check_sums(validated.geometry, combine_wait_recv_cost_stats=waits)
            if overlap is None:
                return validated, y
            return validated, overlap.ready_rows(y, validated.geometry)

    def get_next_low_latency_combine_buffer(self, handle: LowLatencyHandle) -> torch.Tensor:
        """Where to put the experts' outputs for a combine with ``zero_copy=True``. Ask before the
        outputs of each such combine are written: on a GPU this makes the current stream wait until
        the last one has read its own.

        Args:
            handle: what low_latency_dispatch returned.

        Returns:
            ``[E_l, R * M, hidden]`` bfloat16. The same memory until a handle of another geometry
            comes.
        """
        self._low_latency()
        parts = ReadHandle.of(handle)
        sizes = (parts.num_experts, 1, parts.hidden, parts.max_tokens)
        with HANDLE:
            geometry = Geometry(self.group_size, *sizes)
        shape = (geometry.experts_per_rank, geometry.expert_capacity, geometry.hidden)
        return self._zero_copy.take(shape, self._open().streams)

    def low_latency_update_mask_buffer(self, rank_to_mask: int, mask: bool = False) -> None:
        """Masks a rank (nothing is sent to it or awaited from it), or unmasks it. Local.

        Args:
            rank_to_mask: which.
            mask: whether to mask it.
        """
        runtime = self._shrinkable()
        check_count("rank_to_mask", rank_to_mask, 0)
        if rank_to_mask >= self.group_size:
            raise ArgumentError("rank_to_mask", rank_to_mask, f"below {self.group_size}")
        runtime.set_masked(rank_to_mask, bool(mask))

    def low_latency_query_mask_buffer(self, mask_status: torch.Tensor) -> None:
        """Writes 1 for each masked rank and 0 for the others.

        Args:
            mask_status: ``[R]`` int32, written to.
        """
        mode = self._shrinkable().low_latency
        shape = (self.group_size,)
        check_tensor("mask_status", mask_status, shape, (torch.int32,), device=self.device)
        mask_status.copy_(mode.masked())

    def low_latency_clean_mask_buffer(self) -> None:
        """Unmasks every rank. Local."""
        runtime = self._shrinkable()
        for peer in range(self.group_size):
            runtime.set_masked(peer, False)

    def _low_latency(self, call: str = "") -> LowLatencyBackend:
        """The mode, if this Buffer was made for it. Counts the call that begins."""
        runtime = self._open()
        if not self.low_latency_mode:
            raise UsageError(
                "this Buffer was made without low_latency_mode=True, which low-latency calls need"
            )
        mode = runtime.low_latency
        if call:
            self._calls[call] += 1
        return mode

    def _shrinkable(self) -> Runtime:
        """What keeps the mask, if masks are enabled."""
        runtime = self._open()
        if not (self.enable_shrink and self.low_latency_mode):
            raise UsageError(
                "masks need enable_shrink=True and low_latency_mode=True; this Buffer has "
                f"enable_shrink={self.enable_shrink} and low_latency_mode={self.low_latency_mode}"
            )
        return runtime

    def _refusing(
        self, refuse: Callable[..., None], sizes: Callable[[], _Sizes | None]
    ) -> Refusing:
        """Refuses a call with whatever its block raises.

        Args:
            refuse: the mode's.
            sizes: what the call's arguments tell of its geometry, if anything, for which a call of
                this rank alone would wait in the group. Where none fits, no rank can make a call.
        """

        def tell(error: BaseException) -> None:
            geometry = None
            with contextlib.suppress(ArgumentError, AttributeError, IndexError, TypeError):
                given = sizes()
                geometry = None if given is None else self._fitting(*given)
            refuse(error, geometry=geometry)

        return Refusing(tell)

    def _fitting(
        self,
        max_tokens: int,
        num_experts: int,
        topk_idx: torch.Tensor,
        hidden: int,
        names: Renaming = GEOMETRY,
    ) -> Geometry:
        """The geometry of one call, checked to fit; errors say where its sizes come from."""
        with names:
            geometry = Geometry(self.group_size, num_experts, topk_idx.shape[1], hidden, max_tokens)
            self._check_fit(geometry)
        return geometry

    def _validate_geometry(
        self,
        max_tokens: int,
        num_experts: int,
        topk_idx: torch.Tensor,
        hidden: int,
        names: Renaming,
    ) -> _ValidatedGeometry:
        """The same with what follows from it."""
        shape = ("tokens", "top_k")
        check_tensor("topk_idx", topk_idx, shape, (torch.int64,), device=self.device)
        geometry = self._fitting(max_tokens, num_experts, topk_idx, hidden, names)
        if self._validated is None or self._validated.geometry != geometry:
            self._validated = _ValidatedGeometry(geometry, self.device)
        return self._validated

    def _check_fit(self, geometry: Geometry) -> None:
        on_host = self.device.type == "cpu"
        if not on_host:
            check_cuda_geometry(geometry)
        needed = low_latency_bytes(geometry) if on_host else cuda_low_latency_bytes(geometry)
        if needed <= self.num_rdma_bytes:
            return
        sizes = (geometry.max_tokens, geometry.hidden, geometry.ranks, geometry.num_experts)
        promised = promised_top_k(*sizes)
        advice = f"Buffer.get_low_latency_rdma_size_hint{sizes} says what to pass"
        if geometry.top_k > promised:
            advice = f"pass that number: the size hint is for a top-k of up to {promised} here"
        raise ArgumentError(
            "num_rdma_bytes",
            self.num_rdma_bytes,
            f"at least {needed} for num_max_dispatch_tokens_per_rank={geometry.max_tokens}, "
            f"hidden={geometry.hidden}, num_ranks={geometry.ranks}, "
            f"num_experts={geometry.num_experts}, top-k {geometry.top_k}; {advice}",
        )

    def _check_sums(self, geometry: Geometry, **tensors: torch.Tensor | None) -> None:
        """Raises ArgumentError for a tensor to add to that is not as DeepEP has it."""
        for name, tensor in tensors.items():
            if tensor is None:
                continue
            waits = name.endswith("cost_stats")
            shape = (geometry.ranks if waits else geometry.experts_per_rank,)
            dtype = torch.int64 if waits else torch.int32
            check_tensor(name, tensor, shape, (dtype,), device=self.device)


def _check_exclusive(async_finish: bool, return_recv_hook: bool) -> None:
    if async_finish and return_recv_hook:
        raise ArgumentError(
            "async_finish", "True with return_recv_hook=True", "used without return_recv_hook"
        )
