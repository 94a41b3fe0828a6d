"""The high-throughput half of ``Buffer``: DeepEP's calls in terms of
:mod:`fanfold.backends.high_throughput`, on the ranks' GPUs or on the host."""

from __future__ import annotations

from typing import Any

import torch

from fanfold.backends.high_throughput import Layout, dispatch_layout
from fanfold.backends.high_throughput.cuda import CudaHighThroughput
from fanfold.deep_ep.base import BufferBase
from fanfold.deep_ep.calls_backend import CallsBackend, ReceivedTensors
from fanfold.deep_ep.cuda_backend import CudaBackend
from fanfold.deep_ep.events import EventHandle, EventOverlap, check_ordering
from fanfold.deep_ep.handles import GpuHandle, Handle
from fanfold.deep_ep.routes import (
    Bias,
    Given,
    Route,
    Rows,
    channels_of,
    new_route,
    tokens_of,
)
from fanfold.deep_ep.sizes import Config, check_count
from fanfold.deep_ep.staged_backend import StagedBackend
from fanfold.errors import ArgumentError
from fanfold.geometry import check_tensor
from fanfold.refusal import Refusing

__all__ = ["HighThroughputCalls"]

Event = EventOverlap | EventHandle | None
AnyHandle = Handle | GpuHandle
DispatchReturn = tuple[
    Rows, torch.Tensor | None, torch.Tensor | None, list[int] | None, AnyHandle | None, EventOverlap
]
CombineReturn = tuple[torch.Tensor, torch.Tensor | None, EventOverlap]


class HighThroughputCalls(BufferBase):
    """High-throughput dispatch and combine with DeepEP's arguments."""

    def get_dispatch_layout(
        self,
        topk_idx: torch.Tensor,
        num_experts: int,
        previous_event: Event = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor, torch.Tensor, EventOverlap]:
        """Where this rank's tokens go. Local: nothing is communicated, and on a GPU the CPU does
        not wait.

        Args:
            topk_idx: ``[T, K]`` int64, -1 for none; on any device, where the results then are.
            num_experts: of all ranks.
            previous_event, async_finish, allocate_on_comm_stream: as in dispatch.

        Returns:
            tokens for each rank ``[R]`` int32; None, as all ranks are on one host; tokens for each
            expert ``[E]`` int32, which counts an expert as often as a token names it; ``[T, R]``
            bool, whether a token goes to a rank; and the event.

        Raises:
            ArgumentError: bad input.
            UsageError: destroyed; or a CUDA graph is being captured, and the kernel of these sizes
                is not loaded yet.
        """
        runtime = self._open()
        previous = check_ordering(previous_event, async_finish, allocate_on_comm_stream)

        def call() -> tuple[Layout, None]:
            return dispatch_layout(topk_idx, num_experts, self.group_size), None

        layout, _, event = runtime.streams.run(
            call, async_finish=async_finish, inputs=topk_idx, previous=previous
        )
        counts = layout.tokens_per_rank, None, layout.tokens_per_expert
        return *counts, layout.is_token_in_rank, event

    def dispatch(
        self,
        x: Rows,
        handle: AnyHandle | None = None,
        num_tokens_per_rank: torch.Tensor | None = None,
        num_tokens_per_rdma_rank: torch.Tensor | None = None,
        is_token_in_rank: torch.Tensor | None = None,
        num_tokens_per_expert: torch.Tensor | None = None,
        topk_idx: torch.Tensor | None = None,
        topk_weights: torch.Tensor | None = None,
        expert_alignment: int = 1,
        num_worst_tokens: int = 0,
        config: Config | None = None,
        previous_event: Event = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> DispatchReturn:
        """Sends each token once to every rank that it goes to. Collective.

        On a GPU the CPU waits only for a new routing without num_worst_tokens, which is given on
        all ranks or on none. What only the kernels find (an index out of range, more rows than
        num_worst_tokens, a rank that refused or is late) is raised by a later combine.

        Args:
            x: ``[T, hidden]`` bfloat16 (or any dtype whose rows are multiples of 16 bytes),
                contiguous; or a pair of values ``[T, hidden]`` of a 1-byte dtype and scales
                ``[T, S]`` float32 or int32 of any strides, sent as they are. Where high throughput
                runs on GPUs all tensors are on :attr:`Buffer.device`, else on any one device.
            handle: reuse the routing of an earlier dispatch; then everything about routing must be
                None. On a GPU the very object that dispatch returned.
            num_tokens_per_rank, num_tokens_per_rdma_rank, is_token_in_rank, num_tokens_per_expert:
                what get_dispatch_layout returned; all but the second must be given for a new
                routing. On a GPU they are believed, as reading them would wait, and where there is
                topk_idx that alone says where tokens go.
            topk_idx: ``[T, K]`` int64, -1 for none, or None if the receivers need not know.
            topk_weights: ``[T, K]`` float32; given with topk_idx, and only then.
            expert_alignment: what the counts of the list are rounded up to.
            num_worst_tokens: rows to allocate whatever arrives; needs topk_idx.
            config: num_sms // 2 is the number of channels in the handle; of a given handle it must
                be the same. The default is get_dispatch_config.
            previous_event: what to wait for first.
            async_finish: return an event. On a GPU the work runs on the communication stream,
                after previous_event, or without it after what the current stream was given;
                otherwise it is done, or enqueued on the current stream.
            allocate_on_comm_stream: needs previous_event and async_finish; changes nothing here.

        Returns:
            With N rows received (or num_worst_tokens):

            - rows ``[N, hidden]``, or a pair with scales ``[N, S]``, row-major, ordered by source
              rank, then source token;
            - ``[N, K]`` int64: local expert ids, -1 for experts elsewhere and for unused rows
              (which on a GPU are not written in the first item);
            - ``[N, K]`` float32: weights, 0 for experts elsewhere;
            - list of the rows for each local expert, counted as often as named, rounded up to
              expert_alignment; [] with num_worst_tokens;
            - the handle (:mod:`fanfold.deep_ep.handles`);
            - the event, which holds None without async_finish.

            With a handle all but the first and the last are None; without topk_idx the second and
            the third are.

        Raises:
            ArgumentError: bad input, or ranks that disagree: the call is aborted on all ranks.
            PeerRefused: another rank refused its input.
            PeerTimeout: a rank did not arrive in time.
            UsageError: no memory for this mode, a masked rank, or destroyed.
        """
        backend = self._calls_backend()
        self._calls["dispatch"] += 1
        given: Given = {
            "num_tokens_per_rank": num_tokens_per_rank,
            "num_tokens_per_rdma_rank": num_tokens_per_rdma_rank,
            "is_token_in_rank": is_token_in_rank,
            "num_tokens_per_expert": num_tokens_per_expert,
            "topk_idx": topk_idx,
            "topk_weights": topk_weights,
        }
        refusing = Refusing(lambda error: backend.refuse_dispatch(error, handle))
        with refusing:
            previous = check_ordering(previous_event, async_finish, allocate_on_comm_stream)

        def call() -> tuple[ReceivedTensors, None]:
            route = validated = None
            with refusing:
                channels = channels_of(config, self.get_dispatch_config(self.group_size))
                check_count("expert_alignment", expert_alignment, 1)
                check_count("num_worst_tokens", num_worst_tokens, 0)
                staging = backend.staging(x=x, **given)
                rows = staging.host(x)
                if handle is None:
                    routing = {name: staging.host(tensor) for name, tensor in given.items()}
                    tokens = tokens_of(rows)
                    route = new_route(
                        routing, self.group_size, tokens, backend.device, backend.looks
                    )
                    _check_worst(num_worst_tokens, route)
                else:
                    validated = backend.validate_handle(staging.host(handle), channels)
                    _check_reuse(given, validated.rows, num_worst_tokens)
            if route is None:
                return ReceivedTensors(staging.back(backend.send_again(rows, validated))), None
            return backend.send(rows, route, num_worst_tokens, channels).back(staging), None

        inputs = (x, *given.values())
        received, _, event = backend.streams.run(
            call, async_finish=async_finish, inputs=inputs, previous=previous
        )
        return _returned(received, handle, expert_alignment, event)

    def combine(
        self,
        x: torch.Tensor,
        handle: AnyHandle,
        topk_weights: torch.Tensor | None = None,
        bias: Bias = None,
        config: Config | None = None,
        previous_event: Event = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> CombineReturn:
        """Brings rows back to the ranks they came from and sums them, unweighted. Collective.

        Works from the handle alone. On a GPU the CPU waits for nothing, and what kernels have found
        wrong in earlier calls is raised here, after this one has been enqueued.

        Args:
            x: ``[N, hidden]`` bfloat16, contiguous: a row for each received one.
            handle: what dispatch returned.
            topk_weights: ``[N, K]`` float32 that travel back to the top-k slots they came from. On
                a GPU K is that of the dispatch; if it had no topk_idx, the number of ranks.
            bias: one or two ``[T, hidden]`` bfloat16 that each sum starts from.
            config: as in dispatch; the default is get_combine_config.
            previous_event: what to wait for first.
            async_finish: as in dispatch.
            allocate_on_comm_stream: needs previous_event and async_finish; changes nothing here.

        Returns:
            ``[T, hidden]`` bfloat16: the sum over ranks in order, in fp32, rounded once (zeros, or
            the bias, for a token that went nowhere); ``[T, K]`` float32: the sums of topk_weights
            for each top-k slot, or None; and the event.

        Raises:
            ArgumentError, PeerRefused, PeerTimeout, UsageError: as dispatch.
        """
        backend = self._calls_backend()
        self._calls["combine"] += 1
        refusing = Refusing(lambda error: backend.refuse_combine(error, handle))
        with refusing:
            previous = check_ordering(previous_event, async_finish, allocate_on_comm_stream)

        def call() -> tuple[tuple[torch.Tensor, torch.Tensor | None], None]:
            with refusing:
                channels = channels_of(config, self.get_combine_config(self.group_size))
                staging = backend.staging(x=x, topk_weights=topk_weights, bias=bias)
                y, weights, biases = staging.host((x, topk_weights, bias))
                validated = backend.validate_handle(staging.host(handle), channels)
                shape = (validated.rows, "hidden")
                check_tensor("x", y, shape, (torch.bfloat16,), device=backend.device)
                if weights is not None:
                    top_k = "top_k" if validated.top_k is None else validated.top_k
                    check_tensor("topk_weights", weights, (validated.rows, top_k), (torch.float32,),
                                 device=backend.device)  # fmt: skip
            return staging.back(backend.combine(y, validated, weights, biases)), None

        inputs = (x, topk_weights, bias)
        (out, summed), _, event = backend.streams.run(
            call, async_finish=async_finish, inputs=inputs, previous=previous
        )
        return out, summed, event

    def internode_dispatch(
        self,
        x: Rows,
        handle: AnyHandle | None = None,
        num_tokens_per_rank: torch.Tensor | None = None,
        num_tokens_per_rdma_rank: torch.Tensor | None = None,
        is_token_in_rank: torch.Tensor | None = None,
        num_tokens_per_expert: torch.Tensor | None = None,
        topk_idx: torch.Tensor | None = None,
        topk_weights: torch.Tensor | None = None,
        expert_alignment: int = 1,
        num_worst_tokens: int = 0,
        config: Config | None = None,
        previous_event: Event = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> DispatchReturn:
        """The same as :meth:`dispatch`, as all ranks are on one host."""
        return self.dispatch(
            x,
            handle,
            num_tokens_per_rank,
            num_tokens_per_rdma_rank,
            is_token_in_rank,
            num_tokens_per_expert,
            topk_idx,
            topk_weights,
            expert_alignment,
            num_worst_tokens,
            config,
            previous_event,
            async_finish,
            allocate_on_comm_stream,
        )

    def internode_combine(
        self,
        x: torch.Tensor,
        handle: AnyHandle,
        topk_weights: torch.Tensor | None = None,
        bias: Bias = None,
        config: Config | None = None,
        previous_event: Event = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> CombineReturn:
        """The same as :meth:`combine`, as all ranks are on one host."""
        return self.combine(
            x,
            handle,
            topk_weights,
            bias,
            config,
            previous_event,
            async_finish,
            allocate_on_comm_stream,
        )

    def _calls_backend(self) -> CallsBackend[Any]:
        """What carries the calls out."""
        runtime = self._open()
        mode = runtime.high_throughput
        if isinstance(mode, CudaHighThroughput):
            return CudaBackend(runtime, mode)
        return StagedBackend(runtime, mode)


def _returned(
    received: ReceivedTensors, handle: object, expert_alignment: int, event: EventOverlap
) -> DispatchReturn:
    """What dispatch returns, in DeepEP's order; ``handle`` is the caller's."""
    if handle is not None:
        return received.rows, None, None, None, None, event
    listed = [-(-count // expert_alignment) * expert_alignment for count in received.named]
    return received.rows, received.topk_idx, received.topk_weights, listed, received.handle, event


def _check_worst(num_worst_tokens: int, route: Route) -> None:
    if num_worst_tokens and route.topk_weights is None:
        raise ArgumentError(
            "num_worst_tokens", num_worst_tokens, "0 without topk_idx and topk_weights"
        )


def _check_reuse(given: Given, rows: int, num_worst_tokens: int) -> None:
    """Raises ArgumentError for what does not go with a handle."""
    for name, tensor in given.items():
        if tensor is not None:
            raise ArgumentError(name, "given", "None with a handle, which has the routing")
    if num_worst_tokens not in (0, rows):
        raise ArgumentError("num_worst_tokens", num_worst_tokens, f"0 or {rows}, as for the handle")
