"""High throughput on the ranks' GPUs, enqueued on the current stream.

With ``num_worst_tokens``, for a cached dispatch and for combine the CPU waits for nothing. A new
routing without it makes the CPU wait for the plan's numbers of rows, and for the other ranks' CPUs,
which exchange what DeepEP's list and handle hold while the GPUs move rows.
"""

from __future__ import annotations

import contextlib
from functools import partial

import torch

from fanfold.backends.high_throughput.cuda import CudaHighThroughput
from fanfold.backends.high_throughput.plan import CudaDispatched, CudaPlan
from fanfold.backends.staging import Staging, named_tensors
from fanfold.deep_ep.calls_backend import (
    CallsBackend,
    Counts,
    ReceivedTensors,
    gather_counts,
    received_rows,
)
from fanfold.deep_ep.events import EventHandle
from fanfold.deep_ep.handles import GpuHandle, Handle, Received, check_channels, make_handle
from fanfold.deep_ep.names import HIGH_THROUGHPUT
from fanfold.deep_ep.routes import Bias, Route, Rows
from fanfold.deep_ep.runtime import Runtime
from fanfold.deep_ep.streams import record
from fanfold.errors import ArgumentError, FanfoldError, UsageError
from fanfold.refusal import Refusing
from fanfold.representation import worded

__all__ = ["CudaBackend"]


class CudaBackend(CallsBackend[GpuHandle]):
    """Calls on the GPUs' mode; see :class:`CallsBackend`.

    Args:
        runtime: of the Buffer.
        mode: its high-throughput mode.
    """

    looks = False

    def __init__(self, runtime: Runtime, mode: CudaHighThroughput) -> None:
        super().__init__(runtime)
        self._mode = mode
        self.device = runtime.choice.device
        self.streams = runtime.streams

    def refuse_dispatch(self, error: BaseException, handle: object) -> None:
        """See :meth:`CallsBackend.refuse_dispatch`."""
        self._mode.refuse_dispatch(error, handle.plan if isinstance(handle, GpuHandle) else None)

    def refuse_combine(self, error: BaseException, handle: object) -> None:
        """See :meth:`CallsBackend.refuse_combine`."""
        self._mode.refuse_combine(error, handle.plan if isinstance(handle, GpuHandle) else None)

    def staging(self, **tensors: object) -> Staging:
        """None: the tensors must be on the GPU."""
        for name, value in tensors.items():
            if value is not None:
                self._runtime.choice.check_devices(**dict(named_tensors(name, value)))
        return Staging()

    def validate_handle(self, handle: object, channels: int) -> GpuHandle:
        """See :meth:`CallsBackend.validate_handle`."""
        if not isinstance(handle, GpuHandle):
            raise ArgumentError(
                "handle",
                worded(handle),
                "the very object that dispatch returned: GPUs work by the plan that it carries, "
                "which a tuple of its tensors lacks",
            )
        if handle.plan.ranks != self._runtime.ranks:
            bound = f"one of {self._runtime.ranks} ranks, as this group"
            raise ArgumentError("handle", f"one of {handle.plan.ranks} ranks", bound)
        check_channels(handle.channels, channels)
        return handle

    def send(self, x: Rows, route: Route, num_worst_tokens: int, channels: int) -> ReceivedTensors:
        """See :meth:`CallsBackend.send`."""
        self._mode.use_sms(2 * channels)
        if num_worst_tokens:
            dispatched, counts = self._dispatch(x, route, num_worst_tokens, []), None
        else:
            dispatched, counts = self._dispatch_and_count(x, route, channels)
        plan = dispatched.plan
        known = route.topk_weights is not None
        return ReceivedTensors(
            rows=received_rows(dispatched),
            topk_idx=plan.topk_idx if known else None,
            topk_weights=plan.topk_weights,
            named=[] if counts is None else counts.named,
            handle=self._handle(plan, channels, counts),
            plan=plan,
        )

    def send_again(self, x: Rows, handle: GpuHandle) -> Rows:
        """See :meth:`CallsBackend.send_again`."""
        self._mode.use_sms(2 * handle.channels)
        with HIGH_THROUGHPUT:
            return received_rows(self._mode.dispatch_cached(x, handle.plan, layout="token_major"))

    def combine(
        self, y: torch.Tensor, handle: GpuHandle, weights: torch.Tensor | None, bias: Bias
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """See :meth:`CallsBackend.combine`."""
        self._mode.use_sms(2 * handle.channels)
        with HIGH_THROUGHPUT:
            return self._mode.combine(
                y, handle.plan, layout="token_major", topk_weights=weights, bias=bias
            )

    def _dispatch(
        self, x: Rows, route: Route, num_worst_tokens: int, planned: list[CudaPlan]
    ) -> CudaDispatched:
        """Enqueues; ``planned`` gets the plan when the CPU knows that it is a good one."""
        with HIGH_THROUGHPUT:
            return self._mode.dispatch(
                x,
                route.topk_idx,
                route.topk_weights,
                num_experts=route.num_experts,
                layout="token_major",
                capacity=num_worst_tokens or None,
                planned=planned.append,
            )

    def _dispatch_and_count(
        self, x: Rows, route: Route, channels: int
    ) -> tuple[CudaDispatched, Counts]:
        """Enqueues, then exchanges the counts while the GPU works."""
        if torch.cuda.is_current_stream_capturing():
            raise UsageError("a dispatch in a CUDA graph needs num_worst_tokens")
        with Refusing(self._mode.refuse_dispatch):
            # One copy, which has come when the CPU knows the plan, as it is enqueued before it.
            numbers = torch.cat([route.tokens_per_rank, route.tokens_per_expert])
            numbers = numbers.to("cpu", non_blocking=True)
        tokens = len(route.topk_idx)
        planned: list[CudaPlan] = []
        try:
            dispatched = self._dispatch(x, route, 0, planned)
        except BaseException as error:
            if planned:  # the peers' calls are good so far, and they have come to exchange counts
                gather_counts(self._runtime, tokens, numbers, channels, error)
            raise
        try:
            counts = gather_counts(self._runtime, tokens, numbers, channels)
        except FanfoldError:
            # The kernels may have seen the same refusal; it is not to be raised twice.
            with contextlib.suppress(FanfoldError):
                self._mode.quiesce()
            raise
        return dispatched, counts

    def _handle(self, plan: CudaPlan, channels: int, counts: Counts | None) -> GpuHandle:
        """The handle, with whatever is known."""
        make = partial(_tensors_of, plan, channels, counts, self._runtime.rank, EventHandle())
        handle = GpuHandle.of(plan, channels, make)
        if torch.cuda.is_current_stream_capturing():
            handle.tensors()
        return handle


def _tensors_of(
    plan: CudaPlan, channels: int, counts: Counts | None, rank: int, done: EventHandle
) -> Handle:
    """The tensors of a handle, on the current stream, after ``done``."""
    device = plan.block.device
    done.current_stream_wait()
    record(tuple(plan.tensors()), torch.cuda.current_stream(device))
    if counts is not None:
        prefix = counts.rank_prefix.to(device, non_blocking=True)
        num_tokens = counts.num_tokens.to(device, non_blocking=True)
    else:
        prefix = torch.full((plan.ranks, plan.ranks), -1, dtype=torch.int32, device=device)
        prefix[:, rank] = plan.source_prefix
        num_tokens = None
    received = Received(
        rank=rank,
        rank_prefix=prefix,
        num_tokens=num_tokens,
        is_token_in_rank=plan.is_token_in_rank,
        source_token=plan.source_token,
    )
    return make_handle(received, channels)
