"""Dispatches of few tokens by an ``ElasticBuffer``: over the low-latency protocol, which is faster
there. What such a routing is used for besides, high throughput does by a plan of its own."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from fanfold.backends.choose import BackendChoice
from fanfold.backends.high_throughput import Plan
from fanfold.backends.high_throughput.cuda import CudaHighThroughput
from fanfold.backends.high_throughput.plan import CudaPlan
from fanfold.backends.high_throughput.protocol import HighThroughputBackend
from fanfold.backends.low_latency import check_cuda_geometry, cuda_required_bytes
from fanfold.backends.low_latency.token_major import CudaTokenMajor, TokenMajorRows, takes_rows
from fanfold.backends.opening import open_gpu_memory
from fanfold.backends.ranges import ranged_call
from fanfold.config import Config
from fanfold.deep_ep.routing_sizes import RoutingSizes
from fanfold.errors import ArgumentError, FanfoldError, UsageError
from fanfold.geometry import Geometry
from fanfold.group import Group, agree
from fanfold.memory import GpuPeerMemory
from fanfold.refusal import Refusing
from fanfold.representation import show_fields
from fanfold.stream_order import StreamOrder

__all__ = ["AnyPlan", "FewTokens", "RoutedFew"]

_LOG = logging.getLogger(__name__)

AnyPlan = Plan | CudaPlan
_PLANNED_COLUMNS = 16  # of the rows that make a plan


class FewTokens:
    """The protocol of one ElasticBuffer. It has no memory before the first call that goes by it.

    Args:
        group, choice, config: of the ElasticBuffer.
        most_tokens: of a rank, in a call that goes by it.
        order: of the streams of its other calls, on GPUs.

    Attributes:
        mode: what makes the calls, but in a range if the setting ``ranges`` asks for it: those are
            ``dispatch`` and ``combine`` (:meth:`CudaTokenMajor.dispatch_rows`, ``combine_rows``).
            None before the first.
        last: the geometry of the last dispatch without a handle, if it went by this protocol.
        token: what handles of its dispatches know it by; they keep none of its memory.
        known: the sizes of earlier dispatches that went by it, by what they were asked for.
    """

    dispatch: Callable[..., TokenMajorRows]
    combine: Callable[..., torch.Tensor]

    def __init__(
        self,
        group: Group,
        choice: BackendChoice,
        config: Config,
        most_tokens: int,
        order: StreamOrder | None,
    ) -> None:
        self.mode: CudaTokenMajor | None = None
        self.token = object()
        self.known: dict[tuple[object, ...], RoutingSizes] = {}
        self.last: Geometry | None = None
        self._group, self._choice, self._config = group, choice, config
        self._most_tokens, self._order = most_tokens, order
        self._memory: GpuPeerMemory | None = None
        self._has_no_memory = False

    def settle(
        self,
        backend: CudaHighThroughput,
        geometry: Geometry,
        topk_idx: torch.Tensor,
        expert_alignment: int,
    ) -> bool:
        """Makes its memory, in the first call that is to go by it. Collective; the CPU waits.

        Args:
            backend: of high throughput. By it the ranks see first that they all make such a call.
            geometry: of the call.
            topk_idx, expert_alignment: of its dispatch.

        Returns:
            False if there is no memory for it, on all ranks: a warning says why, and all calls go
            by high throughput.

        Raises:
            ArgumentError, PeerRefused, PeerTimeout: this is not what all ranks do.
        """
        with Refusing(backend.refuse_dispatch):
            backend.quiesce()  # raises what earlier calls have found, before this rank takes part
        nowhere = torch.full_like(topk_idx, -1)  # what is wrong with its entries, the call finds
        make_plan(backend, nowhere, geometry.num_experts, expert_alignment, None)
        backend.quiesce()
        # As in high throughput a late rank ends the calls, whatever the setting.
        strict = dataclasses.replace(self._config, late_peers="raise")
        memory, mode, error = None, None, None
        try:
            nbytes = bytes_for_few_tokens(geometry)
            memory = open_gpu_memory(self._group, self._choice, nbytes, 0, strict)
            mode = CudaTokenMajor(memory, strict, self._choice.check_devices, self._order)
        except FanfoldError as failure:
            error = failure
        try:
            agree(self._group, {}, error)
        except FanfoldError as failure:
            if memory is not None:
                memory.close()
            self._has_no_memory = True
            _LOG.warning("few tokens go by high throughput: %s", failure)
            return False
        assert mode is not None
        self._memory, self.mode = memory, mode
        config = self._config
        self.dispatch = ranged_call(mode.dispatch_rows, "fanfold::low_latency::dispatch", config)
        self.combine = ranged_call(mode.combine_rows, "fanfold::low_latency::combine", config)
        return True

    def geometry_of(
        self, x: object, topk_idx: object, num_experts: object, most_tokens: object
    ) -> Geometry | None:
        """That of a plain dispatch of such tensors, of most_tokens of a rank at most, which may not
        have been checked; None if it does not go by this protocol. Ranks whose calls are alike find
        alike. The first one decides about hidden size, experts and top-k, as every change of those
        makes all ranks wait for each other."""
        parts = x if isinstance(x, tuple) else (x,)
        if isinstance(x, tuple) and len(x) != 2:
            return None
        if type(most_tokens) is not int or not 0 < most_tokens <= self._most_tokens:
            return None
        if type(num_experts) is not int:
            return None
        known = None if self.mode is None else self.mode.geometry
        if known is not None and num_experts == known.num_experts:
            assert self.mode is not None
            if self.mode.suits(x, topk_idx):
                self.last = known
                return known
        tensors = (*parts, topk_idx)
        if not all(isinstance(each, torch.Tensor) and each.dim() == 2 for each in tensors):
            return None
        if not takes_rows(x):  # type: ignore[arg-type]
            return None
        sizes = (num_experts, topk_idx.shape[1], parts[0].shape[1])  # type: ignore[attr-defined]
        if known is None:
            known = self._new_geometry(*sizes)
        if known is None or sizes != (known.num_experts, known.top_k, known.hidden):
            return None
        self.last = known
        return known

    def to_refuse(self, most_tokens: object, *, expands: object) -> Geometry | None:
        """That of a dispatch to refuse whose arguments do not tell: most likely it would have gone
        by the protocol of the last one."""
        above = type(most_tokens) is int and most_tokens > self._most_tokens
        return None if expands is True or above else self.last

    def _new_geometry(self, num_experts: int, top_k: int, hidden: int) -> Geometry | None:
        if self._has_no_memory:
            return None
        try:
            ranks = self._group.size
            geometry = Geometry(ranks, num_experts, top_k, hidden, self._most_tokens)
            check_cuda_geometry(geometry)
        except ArgumentError:
            return None
        if self._memory is None:
            # The ranks cannot agree about memory in a CUDA graph.
            return None if torch.cuda.is_current_stream_capturing() else geometry
        return geometry if bytes_for_few_tokens(geometry) <= self._memory.usable_bytes else None

    def check(self) -> None:
        """Raises what its calls have found wrong; does not wait for them."""
        if self.mode is not None:
            self.mode.check()

    @property
    def bytes_per_rank(self) -> int:
        """Of its memory."""
        return 0 if self._memory is None else self._memory.bytes_per_rank

    def close(self) -> None:
        """Releases the memory."""
        if self._memory is not None:
            self._memory.close()


def bytes_for_few_tokens(geometry: Geometry) -> int:
    """Of symmetric memory, on every rank."""
    return cuda_required_bytes(geometry, late_weights=False, token_major=True)


def make_plan(
    backend: HighThroughputBackend,
    topk_idx: torch.Tensor,
    num_experts: int,
    expert_alignment: int,
    capacity: int | None,
) -> AnyPlan:
    """A plan of high throughput for a routing, by a dispatch of short rows. Collective; without a
    ``capacity`` the CPU waits, and raises what any rank has found."""
    shape = (topk_idx.shape[0], _PLANNED_COLUMNS)
    plan: AnyPlan = backend.dispatch(
        torch.zeros(shape, dtype=torch.bfloat16, device=topk_idx.device),
        topk_idx,
        num_experts=num_experts,
        layout="token_major",
        expert_alignment=expert_alignment,
        capacity=capacity,
    ).plan
    return plan


@dataclass(eq=False)
class RoutedFew:
    """What a dispatch of few tokens leaves for later calls.

    Attributes:
        token: of the :class:`FewTokens` that made it.
        geometry: of the dispatch.
        rows: what it brought, the handle's tensors among it.
        expert_alignment: of the dispatch.
        received: rows of the result.
    """

    token: object
    geometry: Geometry
    rows: TokenMajorRows
    expert_alignment: int
    received: int
    _plan: AnyPlan | None = field(default=None, repr=False)

    __repr__ = show_fields

    @property
    def ranks(self) -> int:
        """R."""
        return self.geometry.ranks

    @property
    def tokens(self) -> int:
        """Of this rank."""
        return self.rows.routing.tokens

    @property
    def top_k(self) -> int:
        """K."""
        return self.geometry.top_k

    @property
    def block(self) -> torch.Tensor:
        """What combine reads, and all else that the dispatch left but the rows."""
        return self.rows.words

    @property
    def topk_idx(self) -> torch.Tensor:
        """Of this rank's tokens, a copy, from which a plan is made."""
        return self.rows.own_topk_idx

    def tensors(self) -> tuple[torch.Tensor, ...]:
        """All that it holds."""
        return (self.block,)

    def plan(self, backend: HighThroughputBackend, *, captured: bool) -> AnyPlan:
        """The same routing for high throughput, which brings the same rows. Collective when it is
        first asked for, and the CPU waits then, but in a capture; anew in each call if this was
        ``captured``, as replays write it anew.

        Raises:
            UsageError: another rank has refused the dispatch, so no rank may make calls by it.
        """
        if self._plan is not None:
            return self._plan
        topk_idx, device = self.topk_idx, self.block.device
        capturing = device.type == "cuda" and torch.cuda.is_current_stream_capturing()
        if not capturing and self.rows.aborted.item():
            raise UsageError("another rank has refused the dispatch of this handle; make a new one")
        experts, alignment = self.geometry.num_experts, self.expert_alignment
        plan = make_plan(backend, topk_idx, experts, alignment, self.received)
        if device.type == "cuda":
            self.block.record_stream(torch.cuda.current_stream(device))
        if not capturing and not captured:
            self._plan = plan
        return plan
