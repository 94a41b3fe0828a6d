"""The native face: expert-parallel dispatch and combine over a group of ranks.

    with fanfold.ExpertParallel(group, num_experts=64, top_k=8, hidden=1024, max_tokens=128) as ep:
        received = ep.dispatch(x, topk_idx, topk_weights)
        y = torch.empty_like(received.tokens)
        for e in range(ep.experts_per_rank):
            received.expert(e, of=y).copy_(expert[e](received.expert(e)))
        out = ep.combine(y, received)

Two modes share it. ``"low_latency"`` is for decoding: fixed buffers, room for every token of every
rank at each local expert (the layout of masked grouped matrix products). ``"high_throughput"`` is
for training and prefill: rows packed expert by expert (the layout of contiguous grouped matrix
products), tensors of any length streamed through little memory, reusable routing, gradients.

Both run on the ranks' GPUs where each rank has one of its own as current CUDA device, and take
tensors there: see :attr:`ExpertParallel.device`. Low latency enqueues its work on the current
stream, waits for nothing and can be captured in CUDA graphs; high throughput waits for the number
of rows that come, or with a ``capacity`` or ``previous`` for nothing. Elsewhere they run on the
host and take CPU tensors, and so does high throughput with GPUs before compute capability 9.0; on
the host it also takes tensors of other devices, which it copies there and back: slow.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import TracebackType
from typing import Literal, overload

import torch
import torch.distributed as dist
from torch.compiler import is_dynamo_compiling

from fanfold.config import Config
from fanfold.copying import not_copied
from fanfold.errors import ArgumentError, UsageError
from fanfold.expert_parallel.high_throughput import HighThroughputCalls, refuse_given
from fanfold.expert_parallel.low_latency import open_placed
from fanfold.expert_parallel.missing import Survivors
from fanfold.expert_parallel.options import check_options, checked_config
from fanfold.forks import Owner
from fanfold.formats import RowFormat, RowFormatName, ScaleFormatName
from fanfold.geometry import Geometry, Mode
from fanfold.group import Group, agree, as_group, together
from fanfold.low_latency import Hook
from fanfold.operators import Shapes, register
from fanfold.placement import Placement, place
from fanfold.received import LowLatencySource, Received
from fanfold.refusal import Refusing
from fanfold.representation import described, worded
from fanfold.symmetric import SymmetricMemory
from fanfold.symmetric_cuda import CudaSymmetricMemory

__all__ = ["ExpertParallel"]

Rows = torch.Tensor | tuple[torch.Tensor, torch.Tensor]


@not_copied(
    why="it holds memory that the ranks of its group share",
    instead="Make one in each process with the same arguments; several layers may use one.",
)
class ExpertParallel(Survivors):
    """Dispatch and combine for one geometry. Construction is collective.

    Args:
        group: a ``torch.distributed`` group of any backend; the default group if None, and this
            process alone if there is none.
        num_experts: experts of all ranks; a multiple of the ranks, up to 32767. Rank r holds
            experts ``r * num_experts / ranks`` onwards.
        top_k: experts per token, 1 to 32.
        hidden: columns of a row, from 16; a row must be a multiple of 16 bytes.
        max_tokens: most tokens one rank passes to one call. Low latency sizes its memory by it.
        mode: ``"low_latency"`` or ``"high_throughput"``.
        dispatch_dtype: ``"bf16"`` or ``"fp8"`` (or their torch dtypes): how rows travel to the
            experts. They always come back as bfloat16.
        scale_format: of fp8 rows: ``"float32"``, ``"power_of_two"`` or ``"ue8m0"``.
        expert_alignment: high throughput pads each expert's rows to a multiple of this.
        in_place_rows: high throughput on GPUs: memory for this many rows, with their padding, into
            which peers write in a dispatch in place.
        config: a :class:`fanfold.Config`; resolved from the environment if None.

    Attributes:
        device: where the calls work: this rank's GPU, which takes tensors of its own only, or the
            CPU, where high throughput takes tensors of any device.
        memory: the ranks' symmetric memory.

    It cannot be copied or pickled (CopyError). ``repr`` waits for nothing, closed or not.

    Raises:
        ArgumentError: a size out of bounds, or ranks that disagree about one (naming both values);
            on all ranks alike.
        UnavailableError: the ranks cannot share memory, or ``config.backend`` is ``"cuda"`` and
            they cannot run on their GPUs.
    """

    memory: SymmetricMemory | CudaSymmetricMemory

    def __init__(
        self,
        group: dist.ProcessGroup | Group | None = None,
        *,
        num_experts: int,
        top_k: int,
        hidden: int,
        max_tokens: int,
        mode: Mode = "low_latency",
        dispatch_dtype: RowFormatName | torch.dtype | RowFormat = "bf16",
        scale_format: ScaleFormatName = "float32",
        expert_alignment: int = 1,
        in_place_rows: int = 0,
        config: Config | None = None,
    ) -> None:
        self._closed = False
        self._owner = Owner("this ExpertParallel")
        with together(as_group(group)) as self._group:
            self.config = checked_config(config)
            self.geometry = Geometry(self._group.size, num_experts, top_k, hidden, max_tokens)
            self._formats = check_options(
                hidden, mode, dispatch_dtype, scale_format, expert_alignment, in_place_rows
            )
            facts: dict[str, object] = {
                "num_experts": num_experts,
                "top_k": top_k,
                "hidden": hidden,
                "max_tokens": max_tokens,
                "mode": mode,
                "dispatch_dtype": self._formats[0].value,
                "scale_format": scale_format,
                "expert_alignment": expert_alignment,
                "in_place_rows": in_place_rows,
                "staging_bytes": self.config.staging_bytes,
                "ring_bytes": self.config.ring_bytes,
            }
            agree(self._group, facts)
            self.mode: Mode = mode
            self.expert_alignment = expert_alignment
            if mode == "low_latency":
                self._open_low_latency()
            else:
                self._open_high_throughput(in_place_rows)
        shapes = Shapes.of(self.geometry, mode, self._formats, expert_alignment)
        self.registration = register(self, shapes, base=ExpertParallel)

    def _open_high_throughput(self, in_place_rows: int) -> None:
        self._high_throughput = HighThroughputCalls(
            self,
            self._group,
            self.geometry,
            self.config,
            self._formats,
            self.expert_alignment,
            in_place_rows,
            self._check_received,
        )
        self.device, self.memory = self._high_throughput.device, self._high_throughput.memory

    def _open_low_latency(self) -> None:
        geometry = self.geometry
        self._placement: Placement = place(self._group, self.config)
        self.device = self._placement.device
        self._on_host = self.device.type == "cpu"
        self.memory, self._low_latency = open_placed(
            self._group, self._placement, geometry, self.config
        )
        # The same in every call, so it is made once.
        begins = torch.arange(self.experts_per_rank + 1, dtype=torch.int64, device="cpu")
        self._offsets = (begins * geometry.expert_capacity).to(self.device)

    @property
    def backend(self) -> Literal["host", "cuda"]:
        """Whether the calls run on the CPU or on the ranks' GPUs."""
        return "host" if self.device.type == "cpu" else "cuda"

    @property
    def rank(self) -> int:
        """This process's place in the group."""
        return self._group.rank

    @property
    def ranks(self) -> int:
        """Size of the group."""
        return self.geometry.ranks

    @property
    def num_experts(self) -> int:
        """Experts of all ranks."""
        return self.geometry.num_experts

    @property
    def experts_per_rank(self) -> int:
        """Local experts of each rank."""
        return self.geometry.experts_per_rank

    @property
    def top_k(self) -> int:
        """Experts per token."""
        return self.geometry.top_k

    @property
    def hidden(self) -> int:
        """Columns of a row."""
        return self.geometry.hidden

    @property
    def max_tokens(self) -> int:
        """Most tokens one rank passes to one call."""
        return self.geometry.max_tokens

    @overload
    def dispatch(
        self,
        x: Rows,
        topk_idx: torch.Tensor | None = None,
        topk_weights: torch.Tensor | None = None,
        *,
        previous: Received | None = None,
        capacity: int | None = None,
        in_place: bool = False,
        return_hook: Literal[False] = False,
    ) -> Received: ...

    @overload
    def dispatch(
        self,
        x: Rows,
        topk_idx: torch.Tensor | None = None,
        topk_weights: torch.Tensor | None = None,
        *,
        previous: Received | None = None,
        capacity: int | None = None,
        in_place: bool = False,
        return_hook: Literal[True],
    ) -> tuple[Received, Hook]: ...

    @overload
    def dispatch(
        self,
        x: Rows,
        topk_idx: torch.Tensor | None = None,
        topk_weights: torch.Tensor | None = None,
        *,
        previous: Received | None = None,
        capacity: int | None = None,
        in_place: bool = False,
        return_hook: bool,
    ) -> Received | tuple[Received, Hook]: ...

    def dispatch(
        self,
        x: Rows,
        topk_idx: torch.Tensor | None = None,
        topk_weights: torch.Tensor | None = None,
        *,
        previous: Received | None = None,
        capacity: int | None = None,
        in_place: bool = False,
        return_hook: bool = False,
    ) -> Received | tuple[Received, Hook]:
        """Sends each token to the ranks that hold its experts. Collective.

        Args:
            x: ``[T, hidden]`` bfloat16, contiguous, 0 <= T <= max_tokens, T different on each rank
                if need be. In high throughput also a pair of fp8 values ``[T, hidden]`` and their
                scales ``[T, S]`` (float32 or int32, any strides), sent as they are.
            topk_idx: ``[T, top_k]`` int64, -1 for none. A token goes to an expert once however
                often it is named there, with the sum of its weights.
            topk_weights: ``[T, top_k]`` float32. Travel along for a weighted combine.
            previous: high throughput: reuse the routing of this earlier dispatch, and its capacity;
                topk_idx, topk_weights and capacity must then be None.
            capacity: high throughput: rows to allocate, so that no size depends on what arrives;
                what is received tells of the rows that fit.
            in_place: high throughput: the fastest way on GPUs. Tokens and scales of the result lie
                in memory of this object, into which peers write: they are valid until the next
                dispatch in place on this rank begins, or :meth:`close`. Asked for on all ranks, or
                on none; the same as False on the host.
            return_hook: low latency: return before anything has arrived, with a function that
                receives it; at most two such dispatches may be open.

        Returns:
            What arrived, or what will have arrived when the hook has run, and the hook.

        Raises:
            ArgumentError: bad input: nothing was sent, the call is void on all ranks (the others
                raise PeerRefused), and this object stays usable. Or ranks that disagree about
                the call, weights on some only for example: the call is void on all likewise.
            PeerRefused: another rank refused its input; this object stays usable.
            PeerTimeout: a peer did not arrive in time; close this object.
            UsageError: closed, failed earlier, or more than two dispatches open.

        On a GPU what kernels find is raised by a later call: PeerTimeout by any, a bad index, a
        capacity or PeerRefused by a combine or :meth:`check`.
        """
        if is_dynamo_compiling():
            from fanfold.expert_parallel import compiled

            return compiled.dispatch(  # type: ignore[no-any-return]
                self, x, topk_idx, topk_weights, previous=previous,
                capacity=capacity, in_place=in_place, return_hook=return_hook,
            )  # fmt: skip
        self._check_open()
        if self.mode == "high_throughput":
            return self._high_throughput.dispatch(
                x, topk_idx, topk_weights, previous, capacity, in_place, return_hook
            )
        if previous is not None or capacity is not None or in_place:
            with Refusing(self._low_latency.refuse_dispatch):
                refuse_given(previous=previous, capacity=capacity, in_place=in_place or None)
        return self._dispatch_low_latency(x, topk_idx, topk_weights, return_hook)

    @overload
    def combine(
        self,
        y: torch.Tensor,
        received: Received,
        *,
        weighted: bool = True,
        bias: torch.Tensor | None = None,
        logfmt: bool = False,
        out: torch.Tensor | None = None,
        return_hook: Literal[False] = False,
    ) -> torch.Tensor: ...

    @overload
    def combine(
        self,
        y: torch.Tensor,
        received: Received,
        *,
        weighted: bool = True,
        bias: torch.Tensor | None = None,
        logfmt: bool = False,
        out: torch.Tensor | None = None,
        return_hook: Literal[True],
    ) -> tuple[torch.Tensor, Hook]: ...

    @overload
    def combine(
        self,
        y: torch.Tensor,
        received: Received,
        *,
        weighted: bool = True,
        bias: torch.Tensor | None = None,
        logfmt: bool = False,
        out: torch.Tensor | None = None,
        return_hook: bool,
    ) -> torch.Tensor | tuple[torch.Tensor, Hook]: ...

    def combine(
        self,
        y: torch.Tensor,
        received: Received,
        *,
        weighted: bool = True,
        bias: torch.Tensor | None = None,
        logfmt: bool = False,
        out: torch.Tensor | None = None,
        return_hook: bool = False,
    ) -> torch.Tensor | tuple[torch.Tensor, Hook]:
        """Brings the experts' outputs back and sums them for each token. Collective.

        The sum is taken in fp32, per rank over its experts in top-k order, rounded to bfloat16,
        then over ranks in order, rounded again. Products are rounded before they are added.

        Args:
            y: bfloat16, shaped like ``received.tokens``: the output of each row in its place.
            received: what dispatch returned; may be combined more than once.
            weighted: multiply each row by its routing weight, if dispatch had weights.
            bias: high throughput: ``[num_tokens, hidden]`` bfloat16 that each sum starts from.
            logfmt: low latency: send rows as LogFMT-10; on GPUs all ranks do or none.
            out: ``[num_tokens, hidden]`` bfloat16 to write to, in other memory than ``y`` if on a
                GPU; made if not given.
            return_hook: low latency: return before anything has arrived, with a function that
                completes the result.

        Returns:
            ``[num_tokens, hidden]`` bfloat16 (zeros, or the bias, for a token without experts), and
            the hook if asked for.

        Raises:
            ArgumentError, PeerRefused, PeerTimeout, UsageError: as :meth:`dispatch`.
        """
        if is_dynamo_compiling():
            from fanfold.expert_parallel import compiled

            return compiled.combine(  # type: ignore[no-any-return]
                self, y, received, weighted=weighted, bias=bias, logfmt=logfmt,
                out=out, return_hook=return_hook,
            )  # fmt: skip
        self._check_open()
        if self.mode == "high_throughput":
            return self._high_throughput.combine(
                y, received, weighted, bias, logfmt, out, return_hook
            )
        if self._on_host or bias is not None or not self._is_own(received):
            with Refusing(self._refusal_of(received)):
                self._check_received(received)
                refuse_given(bias=bias)
                self._placement.check(y=y, out=out)
        source = received.source
        assert isinstance(source, LowLatencySource)
        routing = source.dispatched.routing
        result, hook = self._low_latency.combine(
            self.geometry,
            y,
            routing if weighted else routing.unweighted(),
            source.topk_idx,
            logfmt=logfmt,
            out=out,
            return_hook=return_hook,
        )
        return result if hook is None else (result, hook)

    def combine_weights(self, row_values: torch.Tensor, received: Received) -> torch.Tensor:
        """Brings one number of each row back to the top-k place it came from. Collective.

        High throughput only; what the gradient of the routing weights needs.

        Args:
            row_values: ``[rows]`` float32.
            received: what dispatch returned.

        Returns:
            ``[num_tokens, top_k]`` float32; 0 where topk_idx is -1.
        """
        if is_dynamo_compiling():
            from fanfold.expert_parallel import compiled

            return compiled.combine_weights(self, row_values, received)
        self._check_open()
        if self.mode != "high_throughput":
            raise UsageError("combine_weights works in high_throughput mode only")
        return self._high_throughput.combine_weights(row_values, received)

    def use_sms(self, sms: int | None) -> None:
        """High throughput on GPUs: how many SMs calls from here on take, to leave the others to
        what runs beside them. Local: ranks need not take the same. On the host it changes nothing.

        Args:
            sms: from 1; at least 2 are taken with other ranks, and at most 64 or those there are.
                None for the beginning's: ``config.ctas``, or those that keep the link busy, at
                most 24.

        Raises:
            ArgumentError: ``sms`` is no such number.
            UsageError: closed, or low latency.
        """
        self._check_open()
        if self.mode != "high_throughput":
            raise UsageError(
                "use_sms works in high_throughput mode only; low latency takes config.ctas"
            )
        self._high_throughput.use_sms(sms)

    def refuse_dispatch(self, error: BaseException) -> None:
        """Takes part in the other ranks' dispatch in place of this rank's own, which cannot be
        because of ``error``: for a layer that checks its own input before it dispatches.

        The call is void on all ranks: the others raise PeerRefused with the text of ``error``, and
        the next call works. Raise ``error`` afterwards. Nothing happens if this object is closed.
        """
        if self._closed:
            return
        mode = self._low_latency if self.mode == "low_latency" else self._high_throughput
        mode.refuse_dispatch(error)

    def reset(self) -> None:
        """Gives up the low-latency calls whose hooks are not called yet, because they are lost for
        example. Collective: every rank calls it, whatever it has in flight.

        Their hooks raise UsageError from then on, and what they were to receive is undefined. The
        next calls work. On a GPU the CPU waits until the memory is initialised; what dispatches
        before have brought cannot be combined there any more. High throughput has no hooks, so
        there is nothing to give up.

        Raises:
            PeerTimeout: a rank did not call it in time; close this object.
            UsageError: closed, or failed earlier.
        """
        self._check_open()
        if self.mode == "low_latency":
            self._low_latency.reset()

    def check(self) -> None:
        """Raises what earlier calls have found wrong since they returned; does not wait for them.

        On a GPU a call returns before its kernels have run. What those find is raised here, or by a
        later call: that a peer is late by any, else (an expert index out of range, too small a
        capacity, a peer that has refused) by a combine.

        Raises:
            ArgumentError, PeerRefused, PeerTimeout: of an earlier call.
            UsageError: closed, or failed earlier.
        """
        self._check_open()
        mode = self._low_latency if self.mode == "low_latency" else self._high_throughput
        mode.check()

    def synchronize(self) -> None:
        """Waits until the current stream has done its work, then :meth:`check`. On the host every
        call has done its work when it returns."""
        self._check_open()
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()
        self.check()

    def close(self) -> None:
        """Releases the memory, on a GPU once it is idle. Not collective; harmless when repeated."""
        self._closed = True
        self.memory.close()

    def __repr__(self) -> str:
        names = ("mode", "rank", "ranks", "num_experts", "top_k", "hidden", "max_tokens")
        state = "closed" if getattr(self, "_closed", False) else ""
        paths = {name: name for name in (*names, "backend", "device")}
        return described(self, state, **paths)

    def __enter__(self) -> ExpertParallel:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _check_open(self) -> None:
        if self._closed:
            raise UsageError("this ExpertParallel is closed; make a new one")
        self._owner.check()

    def _is_own(self, received: object) -> bool:
        """Whether ``_check_received`` has nothing to say."""
        return isinstance(received, Received) and received.owner is self and received.complete

    def _refusal_of(self, received: object) -> Callable[[BaseException], None]:
        """What refuses a combine of ``received``, whose rows the peers send, if it is known."""
        source = received.source if isinstance(received, Received) else None
        if self._is_own(received) and isinstance(source, LowLatencySource):
            return partial(self._low_latency.refuse_combine, routing=source.dispatched.routing)
        return self._low_latency.refuse_combine

    def _check_received(self, received: object, name: str = "received") -> None:
        if not isinstance(received, Received):
            raise ArgumentError(name, worded(received), "the Received that dispatch returned")
        if received.owner is not self:
            raise UsageError(f"{name} comes from another ExpertParallel; combine where you sent")
        if not received.complete:
            raise UsageError(f"{name} is not complete: call the hook of its dispatch first")

    def _dispatch_low_latency(
        self,
        x: Rows,
        topk_idx: torch.Tensor | None,
        topk_weights: torch.Tensor | None,
        return_hook: bool,
    ) -> Received | tuple[Received, Hook]:
        row_format, scale_format = self._formats
        kept_idx = None
        if self._on_host:
            with Refusing(self._low_latency.refuse_dispatch):
                self._placement.check(x=x, topk_idx=topk_idx, topk_weights=topk_weights)
                # Combine needs the routing as it was sent, whatever becomes of the caller's tensor.
                # On a GPU the kernels keep it.
                if isinstance(topk_idx, torch.Tensor):
                    kept_idx = topk_idx.clone()
        dispatched, receive = self._low_latency.dispatch(
            self.geometry,
            x,  # type: ignore[arg-type]  # the mode refuses what is no tensor
            topk_idx,  # type: ignore[arg-type]
            topk_weights,
            row_format=row_format,
            scale_format=scale_format,
            return_hook=return_hook,
        )
        received = Received.in_low_latency(
            dispatched, kept_idx, self._offsets, self, receive is None
        )
        if receive is None:
            return received

        def hook() -> None:
            receive()
            received.complete = True

        return received, hook
