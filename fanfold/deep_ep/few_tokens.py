"""Dispatches of few tokens by an ``ElasticBuffer``: over the low-latency protocol, which is faster
there. Their handles serve for calls of high throughput, too, by a plan that is made when needed."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

import torch

from fanfold.backends.choose import BackendChoice
from fanfold.backends.high_throughput import Plan
from fanfold.backends.high_throughput.cuda import CudaHighThroughput
from fanfold.backends.high_throughput.plan import CudaPlan
from fanfold.backends.high_throughput.protocol import HighThroughputBackend
from fanfold.backends.low_latency import check_cuda_geometry, cuda_required_bytes
from fanfold.backends.low_latency.token_major import CudaTokenMajor, TokenMajorRows, takes_rows
from fanfold.backends.opening import memory_of_gpus
from fanfold.backends.ranges import ranged_call
from fanfold.config import Config
from fanfold.errors import ArgumentError, UsageError
from fanfold.geometry import Geometry
from fanfold.group import Group, agree, together
from fanfold.memory import GpuPeerMemory
from fanfold.refusal import Refusing
from fanfold.representation import show_fields
from fanfold.stream_order import StreamOrder

__all__ = ["AnyPlan", "FewTokens", "RoutedFew"]

_LOG = logging.getLogger(__name__)

AnyPlan = Plan | CudaPlan
_PLANNED_COLUMNS = 16  # of the rows that make a plan


class FewTokens:
    """The low-latency protocol of one ElasticBuffer. Its memory is made in the first call that
    uses it.

    Args:
        group, choice, config: of the ElasticBuffer.
        most_tokens: of a rank, in a call that uses it.
        order: of the streams of its other calls, on GPUs.

    Attributes:
        mode: the backend; None while there is no memory.
        dispatch, combine: its ``dispatch_rows`` and ``combine_rows``, in ranges if the setting
            ``ranges`` asks for those.
        last: the geometry of the last dispatch without a handle; None if that used high throughput.
        token: an object that handles of its dispatches keep to name it; they keep no memory.
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
        self.last: Geometry | None = None
        self._group, self._choice, self._config = group, choice, config
        self._most_tokens, self._order = most_tokens, order
        self._memory: GpuPeerMemory | None = None
        self._failed = False

    def open_memory(
        self,
        backend: CudaHighThroughput,
        geometry: Geometry,
        topk_idx: torch.Tensor,
        *,
        scaled: bool,
    ) -> bool:
        """Makes the memory, in the first call. Collective; the CPU waits for the GPU.

        Args:
            backend: high throughput, by which the ranks first check that they all make such a call.
            geometry: of the call.
            topk_idx: of its dispatch.
            scaled: whether its rows come with scales.

        Returns:
            False if that failed, on all ranks alike: a warning gives the reason, and all calls use
            high throughput.

        Raises:
            ArgumentError, PeerRefused, PeerTimeout: the ranks do not all make this call.
        """
        with Refusing(backend.refuse_dispatch):
            # Reports of earlier calls are raised before this rank takes part.
            backend.quiesce()
            # Bad entries are left to the call itself.
            no_experts = torch.full_like(topk_idx, -1)
        make_plan(backend, no_experts, geometry.num_experts, 1, None)
        backend.quiesce()
        agree(self._group, dataclasses.asdict(geometry))
        try:
            with together(self._group) as ranks, _current(self._choice.device):
                self._make(ranks, geometry, scaled=scaled)
        except Exception as failure:
            self._failed, self.mode = True, None
            self.close()
            self._memory = None
            _LOG.warning("dispatches of few tokens use high throughput, as: %s", failure)
            return False
        return True

    def _make(self, ranks: Group, geometry: Geometry, *, scaled: bool) -> None:
        # As in high throughput a late rank ends the calls, whatever the setting.
        config = dataclasses.replace(self._config, late_peers="raise")
        nbytes = bytes_for_few_tokens(geometry)
        self._memory = memory_of_gpus(ranks, nbytes, config)
        mode = CudaTokenMajor(self._memory, config, self._choice.check_devices, self._order)
        mode.lay_out(geometry, scaled=scaled)
        self.dispatch = ranged_call(mode.dispatch_rows, "fanfold::low_latency::dispatch", config)
        self.combine = ranged_call(mode.combine_rows, "fanfold::low_latency::combine", config)
        self.mode = mode

    def geometry_of(
        self, x: object, topk_idx: object, num_experts: object, most_tokens: object
    ) -> Geometry | None:
        """That of a plain dispatch of such tensors, of most_tokens of a rank at most, which may not
        have been checked; None if it uses high throughput. Ranks whose calls are alike get the same
        answer. Hidden size, experts and top-k are those of the first call, as every change of
        them makes all ranks wait for each other."""
        parts = x if isinstance(x, tuple) else (x,)
        if isinstance(x, tuple) and len(x) != 2:
            return None
        if type(most_tokens) is not int or not 0 < most_tokens <= self._most_tokens:
            return None
        if type(num_experts) is not int or self._failed:
            return None
        mode, first = self.mode, None
        if mode is not None:
            first = mode.geometry
            assert first is not None
            if num_experts == first.num_experts and mode.suits(x, topk_idx):
                return first
        tensors = (*parts, topk_idx)
        if not all(isinstance(each, torch.Tensor) and each.dim() == 2 for each in tensors):
            return None
        if not takes_rows(x):  # type: ignore[arg-type]
            return None
        sizes = (num_experts, topk_idx.shape[1], parts[0].shape[1])  # type: ignore[attr-defined]
        if first is None:
            return self._first_geometry(*sizes)
        return first if sizes == (first.num_experts, first.top_k, first.hidden) else None

    def to_refuse(self, most_tokens: object, *, expands: object) -> Geometry | None:
        """That of a dispatch to refuse whose arguments do not determine the protocol: most likely
        it is the last one's."""
        above = type(most_tokens) is int and most_tokens > self._most_tokens
        return None if expands is True or above else self.last

    def _first_geometry(self, num_experts: int, top_k: int, hidden: int) -> Geometry | None:
        if torch.cuda.is_current_stream_capturing():  # a CUDA graph cannot make memory
            return None
        try:
            ranks = self._group.size
            geometry = Geometry(ranks, num_experts, top_k, hidden, self._most_tokens)
            check_cuda_geometry(geometry)
        except ArgumentError:
            return None
        return geometry

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


def _current(device: torch.device) -> AbstractContextManager[object]:
    """Has memory made there, whatever the caller's current device."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


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
    """The routing of a dispatch of few tokens.

    Attributes:
        token: of the :class:`FewTokens` that made it.
        geometry: of the dispatch.
        rows: its result, with the handle's tensors.
        expert_alignment: of the dispatch.
        received: rows of the result.
        made: the plan for calls of high throughput, once there is one.
    """

    token: object
    geometry: Geometry
    rows: TokenMajorRows
    expert_alignment: int
    received: int
    made: AnyPlan | None = field(default=None, repr=False)

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
        """The memory of combine's table and of the handle's tensors."""
        return self.rows.words

    @property
    def topk_idx(self) -> torch.Tensor:
        """Of this rank's tokens, a copy, from which a plan is made."""
        return self.rows.own_topk_idx

    def tensors(self) -> tuple[torch.Tensor, ...]:
        """The tensors that it holds."""
        return (self.block,)

    def make(self, backend: HighThroughputBackend, *, keeps: bool, may_be_aborted: bool) -> AnyPlan:
        """The same routing for high throughput, with the same rows. Collective.

        Args:
            backend: makes it, by a dispatch.
            keeps: whether it is kept in :attr:`made`, unless a CUDA graph is being captured. That
                of a captured dispatch is not, as every replay has another routing.
            may_be_aborted: whether the CPU must check that the dispatch was not aborted.

        Raises:
            UsageError: another rank has refused the dispatch, so no rank may make calls by it.
        """
        topk_idx, device = self.topk_idx, self.block.device
        capturing = device.type == "cuda" and torch.cuda.is_current_stream_capturing()
        if may_be_aborted and not capturing and self.rows.aborted.item():
            raise UsageError("another rank has refused the dispatch of this handle; make a new one")
        experts, alignment = self.geometry.num_experts, self.expert_alignment
        plan = make_plan(backend, topk_idx, experts, alignment, self.received)
        if device.type == "cuda":
            self.block.record_stream(torch.cuda.current_stream(device))
        if keeps and not capturing:
            self.made = plan
        return plan
