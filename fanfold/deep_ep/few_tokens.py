"""Dispatches of few tokens by an ``ElasticBuffer``: over the low-latency protocol, which is faster
there. What such a routing is used for besides, high throughput does by a plan of its own."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field

import torch

from fanfold.backends.choose import BackendChoice
from fanfold.backends.high_throughput import Plan
from fanfold.backends.high_throughput.plan import CudaPlan
from fanfold.backends.high_throughput.protocol import HighThroughputBackend
from fanfold.backends.low_latency import check_cuda_geometry, cuda_required_bytes
from fanfold.backends.low_latency.token_major import CudaTokenMajor, TokenMajorRows, takes_rows
from fanfold.backends.opening import open_gpu_memory
from fanfold.backends.ranges import ranged_call
from fanfold.config import Config
from fanfold.errors import ArgumentError, FanfoldError, UsageError
from fanfold.geometry import Geometry
from fanfold.group import Group, agree
from fanfold.memory import GpuPeerMemory
from fanfold.representation import show_fields
from fanfold.stream_order import StreamOrder

__all__ = ["AnyPlan", "FewTokens", "RoutedFew", "open_few_tokens"]

AnyPlan = Plan | CudaPlan
_MOST_EXPERTS = 2048  # that the memory has room for; few bytes each
_PLANNED_COLUMNS = 16  # of the rows that make a plan


class FewTokens:
    """The protocol of one ElasticBuffer.

    Args:
        memory: of the ranks' GPUs, on one host.
        mode: over it.
        most_tokens: of a rank, in a call that goes by it.
        config: whether calls are ranges in profiles.

    Attributes:
        mode: for all but its calls.
        dispatch, combine: its calls (:meth:`CudaTokenMajor.dispatch_rows`, ``combine_rows``).
        last: the geometry of the last dispatch without a handle, if it went by this protocol.
        token: what handles of its dispatches know it by; they keep none of its memory.
    """

    def __init__(
        self, memory: GpuPeerMemory, mode: CudaTokenMajor, most_tokens: int, config: Config
    ) -> None:
        self.mode = mode
        self.dispatch = ranged_call(mode.dispatch_rows, "fanfold::low_latency::dispatch", config)
        self.combine = ranged_call(mode.combine_rows, "fanfold::low_latency::combine", config)
        self.token = object()
        self._memory, self._most_tokens = memory, most_tokens
        self.last: Geometry | None = None

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
        tensors = (*parts, topk_idx)
        if not all(isinstance(each, torch.Tensor) and each.dim() == 2 for each in tensors):
            return None
        if type(most_tokens) is not int or not 0 < most_tokens <= self._most_tokens:
            return None
        if type(num_experts) is not int or not takes_rows(x):  # type: ignore[arg-type]
            return None
        sizes = (num_experts, topk_idx.shape[1], parts[0].shape[1])  # type: ignore[attr-defined]
        known = self.mode.geometry
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
        try:
            geometry = Geometry(self._memory.ranks, num_experts, top_k, hidden, self._most_tokens)
            check_cuda_geometry(geometry)
        except ArgumentError:
            return None
        fits = bytes_for_few_tokens(geometry) <= self._memory.usable_bytes
        return geometry if fits else None

    def close(self) -> None:
        """Releases the memory."""
        self._memory.close()


def bytes_for_few_tokens(geometry: Geometry) -> int:
    """Of symmetric memory, on every rank."""
    return cuda_required_bytes(geometry, late_weights=False, token_major=True)


def open_few_tokens(
    group: Group,
    choice: BackendChoice,
    config: Config,
    geometry: tuple[int, int, int],
    order: StreamOrder | None,
) -> FewTokens | None:
    """The protocol where calls run on GPUs of one host and the setting ``few_tokens`` asks for it.
    Collective.

    Args:
        group, choice, config: of the ElasticBuffer.
        geometry: its num_max_tokens_per_rank, hidden and num_topk, the same on all ranks; without
            one of them there is no such protocol.
        order: of the streams of its other calls, on GPUs.

    Raises:
        ArgumentError: there is no such geometry.
        FanfoldError: the ranks cannot share so much memory; on all ranks.
    """
    most, hidden, top_k = geometry
    most = min(most, config.few_tokens)
    if choice.backend != "cuda" or choice.across_hosts or 0 in (most, hidden, top_k):
        return None
    experts = _MOST_EXPERTS // group.size * group.size
    nbytes = bytes_for_few_tokens(Geometry(group.size, experts, top_k, hidden, most))
    memory = open_gpu_memory(group, choice, nbytes, 0, config)
    mode, error = None, None
    try:
        # As in high throughput a late rank ends the calls, whatever the setting.
        strict = dataclasses.replace(config, late_peers="raise")
        mode = CudaTokenMajor(memory, strict, choice.check_devices, order)
    except FanfoldError as failure:
        error = failure
    try:
        agree(group, {}, error)
    except BaseException:
        memory.close()
        raise
    assert mode is not None
    return FewTokens(memory, mode, most, config)


@dataclass(eq=False)
class RoutedFew:
    """What a dispatch of few tokens leaves for later calls.

    Attributes:
        token: of the :class:`FewTokens` that made it.
        geometry: of the dispatch.
        rows: what it brought, the handle's tensors among it.
        tokens: of this rank.
        expert_alignment: of the dispatch.
        received: rows of the result.
        topk_idx: of this rank's tokens, a copy, from which a plan is made.
        captured: whether it was made in a CUDA graph, whose replays write it anew.
    """

    token: object
    geometry: Geometry
    rows: TokenMajorRows
    tokens: int
    expert_alignment: int
    received: int
    topk_idx: torch.Tensor
    captured: bool
    _plan: AnyPlan | None = field(default=None, repr=False)

    __repr__ = show_fields

    @property
    def ranks(self) -> int:
        """R."""
        return self.geometry.ranks

    @property
    def top_k(self) -> int:
        """K."""
        return self.geometry.top_k

    @property
    def block(self) -> torch.Tensor:
        """What combine reads."""
        return self.rows.routing.block

    def tensors(self) -> tuple[torch.Tensor, ...]:
        """All that it holds."""
        return self.rows.counts, self.rows.sources, self.block, self.topk_idx

    def plan(self, backend: HighThroughputBackend) -> AnyPlan:
        """The same routing for high throughput, which brings the same rows. Collective when it is
        first asked for, and the CPU waits then, but in a capture; anew in each call if it was made
        in a CUDA graph.

        Raises:
            UsageError: another rank has refused the dispatch, so no rank may make calls by it.
        """
        if self._plan is not None:
            return self._plan
        device = self.topk_idx.device
        capturing = device.type == "cuda" and torch.cuda.is_current_stream_capturing()
        if not capturing and self.rows.counts[-1].item():
            raise UsageError("another rank has refused the dispatch of this handle; make a new one")
        shape = (self.tokens, _PLANNED_COLUMNS)
        plan: AnyPlan = backend.dispatch(
            torch.zeros(shape, dtype=torch.bfloat16, device=device),
            self.topk_idx,
            num_experts=self.geometry.num_experts,
            layout="token_major",
            expert_alignment=self.expert_alignment,
            capacity=self.received,
        ).plan
        if device.type == "cuda":
            self.topk_idx.record_stream(torch.cuda.current_stream(device))
        if not capturing and not self.captured:
            self._plan = plan
        return plan
