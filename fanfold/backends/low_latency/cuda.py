"""The low-latency mode on CUDA GPUs: kernels compiled for the geometry at hand, enqueued on the
current stream. The CPU waits for nothing but the first call of a geometry.

Everything that numbers a call lies in the GPU's memory, so a CUDA graph may hold any number of
calls. What kernels find wrong they write into pinned memory, where later calls look. A timeout or
a disagreement ends the mode and is raised before anything else is enqueued. What concerns one call
only, a refusal or a bad index, is raised by a combine after it has been enqueued, so that this rank
stays in step with the others.
"""

from __future__ import annotations

import contextlib
import dataclasses
import weakref
from collections.abc import Callable
from functools import partial

import torch

from fanfold import _core, jit
from fanfold.backends.allocator import Allocator
from fanfold.backends.low_latency import kernels
from fanfold.backends.low_latency.loader import Loader
from fanfold.backends.low_latency.outputs import (
    Outputs,
    aborted_of,
    read_of,
    table_of,
    written_of,
)
from fanfold.backends.low_latency.plan import (
    MOST_IN_FLIGHT,
    Arguments,
    CombineCall,
    DispatchCall,
    Flight,
    Launch,
    Plan,
)
from fanfold.backends.low_latency.protocol import (
    NO_STATISTICS,
    AnyRouting,
    CudaRouting,
    DeviceCheck,
    Dispatched,
    Hook,
    LateRouting,
    ReadyRows,
    Statistics,
    anywhere,
    check_global_scale,
    hook_if_asked,
    once,
)
from fanfold.backends.low_latency.reports import Reports
from fanfold.backends.low_latency.sizes import core_geometry, cuda_bytes_between_hosts
from fanfold.backends.low_latency.validation import Validation, fast_path_of
from fanfold.config import Config
from fanfold.deferred_free import free_when_idle
from fanfold.errors import ArgumentError, FanfoldError, UsageError
from fanfold.formats import BF16_ROWS, Formats, RowFormat
from fanfold.geometry import Geometry, is_plain
from fanfold.group import agree
from fanfold.kernel_state import new_state
from fanfold.late_peers import LatePeer, LatePeers
from fanfold.lending import address_of
from fanfold.memory import GpuPeerMemory
from fanfold.memory.cuda import are_threads, own_sms, wait_for_kernels
from fanfold.refusal import tell
from fanfold.stream_order import StreamOrder

__all__ = ["CudaLowLatency"]

_SEND, _RECEIVE = 1, 2  # arguments begin with both
# LowLatencyFacts.weights
_NONE, _WITH_DISPATCH, _WITH_COMBINE = 0, 1, 2

_Sources = Callable[[], list[jit.KernelSource]]


class CudaLowLatency:
    """Low-latency calls over a symmetric memory of GPUs; see :class:`LowLatencyBackend`.

    Args:
        memory: the ranks' symmetric memory; must stay open as long as this object is used.
        config: time bound, what happens to late peers, and the grid.
        late_weights: whether the routing weights come with combine instead of with dispatch.
        check_devices: raises for tensors (by name) that are elsewhere, and says why; called only
            where something is wrong with a call's tensors or may be.
        order: of streams, if other calls are to follow each other with these.
    """

    _token_major = False  # whether dispatch brings each token to a rank once

    def __init__(
        self,
        memory: GpuPeerMemory,
        config: Config,
        late_weights: bool,
        check_devices: DeviceCheck = anywhere,
        order: StreamOrder | None = None,
    ) -> None:
        self.device = memory.device
        self._validation = Validation(self.device, check_devices)
        self._memory, self._config, self._late = memory, config, late_weights
        index = self._index = memory.device.index
        sms = own_sms(memory)
        grid = kernels.Grid.of(sms, memory.ranks, ctas=config.ctas, senders=config.senders)
        # A kernel launched early waits on SMs of its own, which other threads' kernels may need.
        early = not are_threads(memory.group)
        self._early = early and torch.cuda.get_device_capability(index) >= (9, 0)
        self._allocator = Allocator(self.device)
        self._reports = Reports(memory.between)
        peers = [memory.base(peer) for peer in range(memory.ranks)]
        self._state = new_state(
            _core.CUDA_STATE_BYTES, _core.CUDA_STATE_PEERS_AT, peers, self.device
        )
        epochs = _core.CUDA_STATE_EPOCHS_BYTES
        self._epochs = self._state[:epochs].view(torch.int32)
        self._masked = self._state[epochs : epochs + 4 * memory.ranks].view(torch.int32)
        self._between = memory.between
        if self._between is not None:
            place = _core.CUDA_STATE_HOSTS_AT
            self._state[place:][:8].view(torch.int64).fill_(self._between.address)
        masks, self._late_peers = config.late_peers == "mask", LatePeers(memory.rank)
        self._looks = masks or self._between is not None  # at more than reports, before each call
        self._place = _core.CudaLowLatencyPlace(
            rank=memory.rank,
            peers=peers,
            state=self._state.data_ptr(),
            reports=self._reports.address,
            timeout_ns=int(config.timeout_s * 1e9),
            mask_late=masks,
        )
        self._plan: Plan | None = None
        self._stale: str | None = None  # why the memory must be readied anew
        self._flights = (Flight(), Flight())
        self._last_routing: AnyRouting | None = None
        self._order = order or StreamOrder(self.device)
        self._follow = self._order.follow
        how = {"late_weights": late_weights, "early": self._early, "token_major": self._token_major}
        self._loader = Loader(self.device, config, grid, self._order, self._between, **how)
        # Kernels in flight may outlive this object, and write there.
        end = weakref.finalize(self, free_when_idle, self.device, (self._state, self._reports))
        end.atexit = False

    # ---- calls ----------------------------------------------------------------------------------

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
        if self._looks or self._reports.fatal():
            self._check_before()
        plan = self._plan
        if plan is None or plan.geometry is not geometry or self._stale is not None:
            plan = self._plan_of(geometry, partial(self._loader.sources, geometry, formats))
        flight, weighted = self._flights[0], topk_weights is not None
        if flight.sent != flight.received:
            flight.check("dispatch", return_hook)
        try:
            call = plan.dispatch
            if call is None or call.formats != formats or call.weighted is not weighted:
                call = self._dispatch_call(plan, formats, weighted)
            args, fast_path = call.args, plan.fast_path
            tokens = fast_path.dispatch(args, x, topk_idx, topk_weights)
            if tokens < 0:
                tokens = self._validation.dispatch(geometry, args, x, topk_idx, topk_weights)
            if call.adds or statistics is not NO_STATISTICS:
                statistics.check(geometry, self.device)
                call.adds = statistics is not NO_STATISTICS
                args.expert_totals = address_of(statistics.expert_totals)
                args.wait_ns = address_of(statistics.wait_ns)
            if global_scale is not None or formats[0] is RowFormat.NVFP4:
                check_global_scale(formats[0], global_scale, self.device)
                args.global_scale = address_of(global_scale)
            stream = self._follow()
            empty = self._allocator.empty()
            dispatched = call.outputs.allocate(empty, fast_path, args, tokens, stream)
        except BaseException as error:
            self.refuse_dispatch(error)
            raise
        if not self._late:
            self._last_routing = dispatched.routing
        if return_hook:
            kept = (*written_of(dispatched), statistics.expert_totals, statistics.wait_ns)
            return dispatched, self._send(flight, args, call.launch, kept, stream)
        call.launch(args, stream)
        return dispatched, None

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
        ready, y = (y, y.y) if isinstance(y, ReadyRows) else (None, y)
        if self._looks or self._reports.fatal():
            self._check_before()
        plan = self._plan
        if plan is None or plan.geometry is not geometry or self._stale is not None:
            plan = self._plan_of(geometry, partial(self._loader.combine_sources, geometry, logfmt))
        flight, late = self._flights[1], self._late
        if flight.sent != flight.received:
            flight.check("combine", return_hook)
        try:
            own = None if late else self._own_routing(plan, routing, late_weights)
            weighted = own is None or own.weighted
            call = plan.combine
            if call is None or call.weighted is not weighted or call.logfmt is not logfmt:
                call = self._combine_call(plan, weighted, logfmt)
            args, fast_path = call.args, plan.fast_path
            if own is not None:
                tokens, block = own.tokens, own.block
            else:
                ranges = routing.ranges if type(routing) is LateRouting else None
                tokens, block = fast_path.late(args, ranges, topk_idx, late_weights), None
            if (result := out) is None and tokens >= 0:
                shape, strides = (tokens, geometry.hidden), (geometry.hidden, 1)
                result = self._allocator.empty()(shape, strides, torch.bfloat16)
            if tokens < 0 or not fast_path.combine(args, tokens, y, result, block):
                own_tokens = (topk_idx, late_weights) if late else None
                result = self._validation.combine(geometry, args, y, routing, own_tokens, result)
            args.aborted = aborted_of(routing)
            if call.adds or wait_ns is not None:
                self._add_waits(call, wait_ns, geometry)
            sends = None if ready is None else self._loader.ready_send(plan, args, ready, logfmt)
        except BaseException as error:
            self._tell(partial(self._refuse_combine, error, routing, None, logfmt=logfmt), error)
            raise
        assert result is not None
        stream = self._follow() if sends is None else self._order.follow_calls()
        if own is not None:
            self._keep((own.block,), own.stream, stream)
        if return_hook or sends is not None:
            # The receive half reads the routing too.
            kept = (result, wait_ns, topk_idx, *read_of(routing))
            receive = self._send(flight, args, call.launch, kept, stream, raises=True, sends=sends)
            return result, hook_if_asked(receive, return_hook)
        call.launch(args, stream)
        if self._reports.passing():
            self.check()
        return result, None

    def _add_waits(
        self, call: CombineCall, wait_ns: torch.Tensor | None, geometry: Geometry
    ) -> None:
        """Sets in the call's arguments where to add nanoseconds."""
        Statistics(wait_ns=wait_ns).check(geometry, self.device)
        call.adds = wait_ns is not None
        call.args.wait_ns = address_of(wait_ns)

    def _own_routing(
        self, plan: Plan, routing: AnyRouting, late_weights: torch.Tensor | None
    ) -> CudaRouting:
        """``routing`` if it is what a combine without weights of its own takes."""
        if not isinstance(routing, CudaRouting) or late_weights is not None:
            raise UsageError("this mode's weights come with dispatch; combine takes its routing")
        if routing.layout is not plan.layout and routing.layout != plan.layout:
            raise ArgumentError("routing", "of another geometry", f"of {plan.geometry}")
        return routing

    def _send(
        self,
        flight: Flight,
        args: Arguments,
        launch: Launch,
        kept: tuple[torch.Tensor | None, ...],
        stream: int,
        *,
        raises: bool = False,
        sends: Launch | None = None,
    ) -> Hook:
        """Launches the send half of a call on ``stream``, the current one, by ``sends`` if that is
        another kernel; the hook launches the other, for which ``kept`` must stay, and ``raises``
        what was reported."""
        sending, receiving = args.copy(), args.copy()
        sending.phases, receiving.phases = _SEND, _RECEIVE
        (sends or launch)(sending, stream)
        flight.sent += 1
        ticket = flight.sent

        def ready() -> None:
            self._memory.base(self._memory.rank)  # raises if it is closed
            if flight not in self._flights:
                raise UsageError("reset() has given up this call; its hook receives nothing")
            if self._reports.fatal():
                self.check()
            if flight.received != ticket - 1:
                raise UsageError("receive hooks must be called in the order of their sends")

        def receive() -> None:
            here = self._follow()
            self._keep(kept, stream, here)
            launch(receiving, here)
            flight.arrived(here)
            if raises and self._reports.passing():
                self.check()

        return once(receive, ready)

    # ---- refusals and reports -------------------------------------------------------------------

    def check(self) -> None:
        """See :meth:`LowLatencyBackend.check`."""
        self._check(self._reports.fatal() or self._reports.passing())

    def _check_before(self) -> None:
        """Raises what ends the mode, before a call sends anything."""
        self._check(self._reports.fatal())

    def _check(self, reported: bool) -> None:
        """Raises what kernels have ``reported``, and what has ended the network; warns of ranks
        that kernels have masked. Where that is an error it is raised: the call that is about to be
        made has sent nothing, and can be made again."""
        if reported:
            geometry = None if self._plan is None else self._plan.geometry
            raise self._reports.take(self._memory.rank, geometry, self._config.timeout_s)
        if self._between is not None:
            self._between.check()
        for peer, call in self._reports.new_late(self._memory.ranks):
            self._late_peers.warn(LatePeer(peer, call, self._config.timeout_s))
        self._late_peers.raise_held()

    def refuse_dispatch(self, error: BaseException, geometry: Geometry | None = None) -> None:
        """See :meth:`LowLatencyBackend.refuse_dispatch`."""
        self._tell(partial(self._refuse_dispatch, error, geometry), error)

    def _refuse_dispatch(self, error: BaseException, geometry: Geometry | None) -> None:
        plan = self._plan_to_refuse(error, geometry)
        if plan is None:
            return
        launch, args = self._any_dispatch(plan)
        args.tokens, args.refused = 0, True
        # Of an earlier call, whose tensors may be gone.
        args.rows = args.counts = args.expert_totals = args.wait_ns = 0
        self._take_part(self._flights[0], args, launch)

    def _any_dispatch(self, plan: Plan) -> tuple[Launch, _core.CudaDispatchArgs]:
        """A kernel that clears rows which arrive, whatever their encoding, and its arguments."""
        call = plan.dispatch or self._dispatch_call(plan, BF16_ROWS, False)
        return call.launch, call.args.copy()

    def refuse_combine(
        self,
        error: BaseException,
        routing: AnyRouting | None = None,
        geometry: Geometry | None = None,
    ) -> None:
        """See :meth:`LowLatencyBackend.refuse_combine`. Without a routing it takes that of the last
        dispatch, whose rows the peers most likely send."""
        logfmt = not self._token_major  # the peers may send it, and its kernel takes either
        self._tell(partial(self._refuse_combine, error, routing, geometry, logfmt=logfmt), error)

    @staticmethod
    def _tell(refuse: Callable[[], None], error: BaseException) -> None:
        tell(lambda _: refuse(), error)  # no reason travels: the peers learn who refused

    def _refuse_combine(
        self,
        error: BaseException,
        routing: AnyRouting | None,
        geometry: Geometry | None,
        *,
        logfmt: bool,
    ) -> None:
        plan = self._plan_to_refuse(error, geometry)
        if plan is None:
            return
        call = self._combine_call(plan, True, logfmt)
        args = call.args.copy()
        args.refused, args.out, args.tokens, args.wait_ns = True, 0, 0, 0
        args.table = args.ranges = args.aborted = 0
        if self._late:
            if isinstance(routing, LateRouting) and is_plain(
                routing.ranges, plan.layout.ranges, torch.int64, self.device
            ):
                args.aborted = aborted_of(routing)
        else:
            if not isinstance(routing, CudaRouting) or routing.layout != plan.layout:
                routing = self._last_routing
            if isinstance(routing, CudaRouting):
                # The peers send this rank's rows, and somebody must take them.
                args.tokens, args.table = routing.tokens, table_of(routing)
                self._keep((routing.block,), routing.stream, self._follow())
        kept = () if routing is None else read_of(routing)
        self._take_part(self._flights[1], args, call.launch, kept)

    def _take_part(
        self,
        flight: Flight,
        args: Arguments,
        launch: Launch,
        kept: tuple[torch.Tensor | None, ...] = (),
    ) -> None:
        """Launches a refused call: behind a call in flight the half that takes must wait, and
        ``kept`` stay."""
        if flight.sent - flight.received >= MOST_IN_FLIGHT:
            return  # the peers cannot have begun this call either
        stream = self._follow()
        if flight.sent == flight.received:
            launch(args, stream)
            return
        sending, receiving = args.copy(), args.copy()
        sending.phases, receiving.phases = _SEND, _RECEIVE
        launch(sending, stream)
        flight.sent += 1

        def take(here: int) -> None:
            self._keep(kept, stream, here)
            launch(receiving, here)

        flight.refused.append((flight.sent, take))

    def _keep(self, kept: tuple[torch.Tensor | None, ...], before: int, here: int) -> None:
        """Tells the allocator that ``kept`` are used on the current stream ``here``, if that is
        another than where they were made or are used already."""
        if here == before:
            return
        current = torch.cuda.current_stream(self.device)
        for tensor in kept:
            if tensor is not None:
                tensor.record_stream(current)

    def _plan_to_refuse(self, error: BaseException, geometry: Geometry | None) -> Plan | None:
        """The plan by which the peers make the call that is refused; None if no kernel runs."""
        if self._stale is not None:
            return None  # nobody makes calls before the memory is ready again
        plan = self._plan
        if plan is not None and geometry in (None, plan.geometry):
            return plan
        # The others agree about the memory, in their first call of this geometry; in no capture.
        if not torch.cuda.is_current_stream_capturing():
            reason = error if isinstance(error, FanfoldError) else FanfoldError(str(error))
            with contextlib.suppress(Exception):  # the caller raises what it has found
                agree(self._memory.group, {}, reason)
        return None

    # ---- the memory -----------------------------------------------------------------------------

    def quiesce(self) -> None:
        """See :meth:`LowLatencyBackend.quiesce`."""
        self._check_idle()
        self._wait()
        self.check()

    def _wait(self) -> None:
        """Waits for all calls so far."""
        self._follow()
        wait_for_kernels(self._memory)

    def reset(self) -> None:
        """See :meth:`LowLatencyBackend.reset`."""
        if self._plan is not None:
            self._lay_out(self._plan.geometry, None)

    def set_masked(self, rank: int, masked: bool) -> None:
        """See :meth:`LowLatencyBackend.set_masked`. Waits for the calls so far. A rank that comes
        back counts other calls than its peers do, so all ranks must :meth:`reset` first."""
        self._follow()
        if not masked and self._masked[rank].item():
            self._stale = f"rank {rank} was masked, and missed calls"
        self._masked[rank] = int(masked)

    def masked(self) -> torch.Tensor:
        """See :meth:`LowLatencyBackend.masked`."""
        self._follow()
        return self._masked.clone()  # a caller may write to what it gets

    def _check_unmasked(self, geometry: Geometry) -> None:
        if self._masked.any().item():
            raise UsageError(
                "a rank is masked, so the memory of all ranks cannot be readied for "
                f"{geometry}; unmask it when it is back, or make a new object without it"
            )

    def _check_idle(self) -> None:
        if any(flight.sent != flight.received for flight in self._flights):
            raise UsageError(
                "a call is in flight; call its hook first. If that is lost, all ranks must give "
                "the call up: reset(), or clean_low_latency_buffer() of a Buffer"
            )

    def _plan_of(self, geometry: Geometry, sources: _Sources) -> Plan:
        plan = self._plan
        if self._stale is not None:
            raise UsageError(
                f"{self._stale}: all ranks must ready the memory first (reset(), or "
                "clean_low_latency_buffer() of a Buffer)"
            )
        if plan is not None and plan.geometry == geometry:
            plan.geometry = geometry  # the next call most likely brings this very object
            return plan
        if torch.cuda.is_current_stream_capturing():
            raise UsageError(
                f"the first call of {geometry} readies the memory of all ranks, which a CUDA graph "
                "cannot hold; call dispatch and combine once before the capture"
            )
        return self._lay_out(geometry, sources)

    def _lay_out(self, geometry: Geometry, sources: _Sources | None) -> Plan:
        """Readies the memory of all ranks for a geometry. Collective; waits for all calls. What
        fails on one rank is raised by all, unless CUDA is lost, by which a group of NCCL meets.

        Args:
            geometry: of the calls to come.
            sources: of kernels to load; None to reset, which gives up calls in flight.
        """
        core = core_geometry(geometry)
        error: Exception | None = None
        try:
            if sources is not None:
                self._check_idle()
            self._wait()
            if self._between is not None:
                self._between.fence()
            self._check_unmasked(geometry)
            calls, first_absent, nbytes = self._loader.calls(self._place, core)
            usable = self._memory.usable_bytes
            if nbytes > usable:
                least = f"at least {nbytes} for {geometry}"
                raise ArgumentError("symmetric memory", f"{usable} bytes", least)
            if self._between is not None:
                self._between.check_bytes(cuda_bytes_between_hosts(geometry))
            if sources is not None:
                jit.load_all(sources(), self.device.index, self._config)
        except Exception as failure:
            error = failure
        # When all have come here, no kernel runs anywhere, and what kernels have sent is there.
        agree(self._memory.group, dataclasses.asdict(geometry), error)
        if self._between is not None:
            self._between.meet()
        self._plan = self._last_routing = self._stale = None
        self._flights = (Flight(), Flight())
        try:
            region = self._memory.tensor
            region[:first_absent].zero_()
            region[first_absent:nbytes].fill_(0xFF)
            self._epochs.fill_(_core.CUDA_FIRST_EPOCH)
            self._state[-4:].zero_()
            if self._between is not None:
                self._between.prepare(core)
            self._wait()
            self._reports.clear()
        except Exception as failure:
            error = failure
        agree(self._memory.group, {}, error)
        layout = self._loader.layout(geometry, core)
        self._plan = Plan(geometry, calls, layout, fast_path_of(geometry, layout, self.device))
        return self._plan

    # ---- kernels --------------------------------------------------------------------------------

    def _dispatch_call(self, plan: Plan, formats: Formats, weighted: bool) -> DispatchCall:
        key = (formats, weighted)
        known = plan.dispatches.get(key)
        if known is None:
            launch = self._loader.load(self._loader.dispatch_source(plan.geometry, formats))
            args = plan.core.dispatch_arguments(
                kernels.encoding(*formats), _WITH_DISPATCH if weighted else _NONE
            )
            outputs = Outputs.of(
                plan.geometry, *formats, weighted=weighted, layout=plan.layout, late=self._late
            )
            known = DispatchCall(formats, weighted, launch, args, outputs)
            plan.dispatches[key] = known
        plan.dispatch = known
        return known

    def _combine_call(self, plan: Plan, weighted: bool, logfmt: bool) -> CombineCall:
        logfmt = bool(logfmt)
        key = (weighted, logfmt)
        known = plan.combines.get(key)
        if known is None:
            (source,) = self._loader.combine_sources(plan.geometry, logfmt)
            weights = _WITH_COMBINE if self._late else _WITH_DISPATCH if weighted else _NONE
            launch, args = self._loader.load(source), plan.core.combine_arguments(logfmt, weights)
            args.weighted = weighted
            known = plan.combines[key] = CombineCall(weighted, logfmt, launch, args)
        plan.combine = known
        return known
