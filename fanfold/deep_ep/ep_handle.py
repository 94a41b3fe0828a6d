"""The handle of DeepEP's second interface: what one routing means on this rank."""

from __future__ import annotations

from collections.abc import Callable

import torch

from fanfold.backends.high_throughput.plan import CudaPlan
from fanfold.backends.high_throughput.protocol import HighThroughputBackend
from fanfold.copying import not_copied
from fanfold.deep_ep.events import EventHandle, event_on
from fanfold.deep_ep.few_tokens import AnyPlan, RoutedFew
from fanfold.deep_ep.routing_sizes import RoutingSizes, worst_rows
from fanfold.deep_ep.streams import record
from fanfold.representation import described

__all__ = [
    "AnyPlan",
    "EPHandle",
    "first_rows",
]


@not_copied(why="GPUs work by the plan that it carries", instead="Pass the same object on.")
class EPHandle:
    """What :meth:`fanfold.deep_ep.ElasticBuffer.dispatch` returns for combine and for further
    dispatches by the same routing.

    R ranks, E_l experts of this rank, K top-k, N received rows: one for each (token, rank), ordered
    by source rank, then source token. Without ``do_cpu_sync`` N is R * num_max_tokens_per_rank, and
    what stands behind the rows that came means nothing. All tensors are where the routing was, and
    the caller's to keep: no later call reads them.

        >>> buffer = fanfold.deep_ep.ElasticBuffer(group, num_max_tokens_per_rank=8)
        >>> x = torch.ones((2, 64), dtype=torch.bfloat16, device=buffer.device)
        >>> topk_idx = torch.tensor([[0, 3], [3, -1]], device=buffer.device)
        >>> handle = buffer.dispatch(x, topk_idx, num_experts=4, do_expand=True)[3]
        >>> handle.num_recv_tokens, handle.psum_num_recv_tokens_per_expert.tolist()
        (2, [1, 1, 1, 3])
        >>> handle.recv_src_metadata.tolist()
        [[0, 0, 0, 1], [1, 1, 2, -1]]

    Attributes:
        do_expand: whether the result is expanded.
        num_experts: of all ranks.
        expert_alignment: what each expert's rows are padded to.
        num_max_tokens_per_rank: most tokens of a rank.
        num_sms: SMs of the dispatch, which combine takes, too, if it is given no number. Calls of
            few tokens take all SMs.
        topk_idx: ``[T, K]`` int64, of this rank's tokens; a copy unless ``do_handle_copy`` was
            False.
        num_recv_tokens: N.
        num_expanded_tokens: rows, with their padding, of an expanded result.
        num_recv_tokens_per_expert_list: rows for each expert, rounded up to ``expert_alignment``;
            [] without ``do_cpu_sync``.
        psum_num_recv_tokens_per_scaleup_rank: ``[R]`` int32: rows from ranks 0 to r, also where
            hosts are distinguished.
        psum_num_recv_tokens_per_expert: ``[E_l]`` int32: aligned rows of the experts before e, and
            those of e: without padding if expanded, else with it.
        num_unaligned_recv_tokens_per_expert: ``[E_l]`` int32: rows of each expert.
        recv_src_metadata: ``[N, 2 + K]`` int32: source rank * num_max_tokens_per_rank + source
            token; the row's own number; and, if expanded, the row of each top-k entry in the
            expanded result, -1 for none, else -1.
        dst_buffer_slot_idx, token_metadata_at_forward, channel_linked_list: None; DeepEP's kernels
            alone need them.
    """

    dst_buffer_slot_idx = None
    token_metadata_at_forward = None
    channel_linked_list = None

    def __init__(
        self,
        plan: AnyPlan | RoutedFew,
        sizes: RoutingSizes,
        topk_idx: torch.Tensor | None,
        expanded_rows: int,
        counts_of_experts: list[int],
    ) -> None:
        self._plan, self._sizes, self._topk_idx = plan, sizes, topk_idx
        self.do_expand, self.num_experts = sizes.do_expand, sizes.num_experts
        self.expert_alignment = sizes.expert_alignment
        self.num_max_tokens_per_rank = sizes.num_max_tokens_per_rank
        self.num_sms = sizes.num_sms
        self._received = worst_rows(plan.ranks, sizes)
        self.num_expanded_tokens = expanded_rows
        if sizes.knows_counts:
            assert plan.received is not None
            self._received = plan.received
        self.num_recv_tokens = self._received
        where = plan.block if topk_idx is None and isinstance(plan, RoutedFew) else topk_idx
        assert where is not None
        self._device = device = where.device
        self.num_recv_tokens_per_expert_list = counts_of_experts
        self._known: dict[str, tuple[torch.Tensor, EventHandle | None]] = {}
        self._done: EventHandle | None = None
        ended = sizes.knows_counts and isinstance(plan, RoutedFew)
        if device.type == "cuda" and not ended:
            self._done = event_on(device)
        self._made_in_capture = _is_capturing(device)
        if self._made_in_capture:
            # Each replay writes them anew.
            _ = self.psum_num_recv_tokens_per_scaleup_rank, self.recv_src_metadata
            _ = self.psum_num_recv_tokens_per_expert, self.num_unaligned_recv_tokens_per_expert
            _ = self.topk_idx

    def __repr__(self) -> str:
        names = ("do_expand", "num_experts", "expert_alignment", "num_max_tokens_per_rank")
        paths = {name: name for name in (*names, "num_sms", "num_recv_tokens")}
        return described(self, **paths)

    def _tensors(self) -> tuple[torch.Tensor, ...]:
        """All that it holds, and its plan."""
        own = (value for value in vars(self).values() if isinstance(value, torch.Tensor))
        if isinstance(self._plan, RoutedFew):
            return *own, *self._plan.tensors()
        of_plan = (value for value in vars(self._plan).values() if isinstance(value, torch.Tensor))
        return *own, *of_plan

    def _plan_for(self, backend: HighThroughputBackend) -> AnyPlan:
        """The plan for calls of high throughput. Collective where low latency has routed the
        tokens, in the first call that asks."""
        plan = self._plan
        if not isinstance(plan, RoutedFew):
            return plan
        if plan.made is not None:
            return plan.made
        if self._done is not None and not _is_capturing(self._device):
            self._done.current_stream_wait()  # the CPU reads what the dispatch wrote
        keeps, counted = not self._made_in_capture, self._sizes.knows_counts
        return plan.make(backend, keeps=keeps, may_be_aborted=not counted)

    # Made when they are first read, as most programs read few of them.

    @property
    def topk_idx(self) -> torch.Tensor:
        """See :class:`EPHandle`."""
        plan = self._plan
        if self._topk_idx is not None:
            return self._topk_idx
        assert isinstance(plan, RoutedFew)
        return self._read("topk_idx", lambda: plan.topk_idx.clone())

    @property
    def psum_num_recv_tokens_per_scaleup_rank(self) -> torch.Tensor:
        """See :class:`EPHandle`."""
        plan, device = self._plan, self._device
        if isinstance(plan, RoutedFew):
            return self._read("ranks", lambda: plan.rows.rank_ends)
        return self._read("ranks", lambda: _prefix(plan).to(device))

    @property
    def num_unaligned_recv_tokens_per_expert(self) -> torch.Tensor:
        """See :class:`EPHandle`."""

        plan, device = self._plan, self._device
        if isinstance(plan, RoutedFew):
            return self._read("unaligned", lambda: plan.rows.expert_rows)

        def make() -> torch.Tensor:
            return plan.tokens_per_expert.to(device, torch.int32, copy=True)

        return self._read("unaligned", make)

    @property
    def psum_num_recv_tokens_per_expert(self) -> torch.Tensor:
        """See :class:`EPHandle`."""

        plan, device = self._plan, self._device
        if isinstance(plan, RoutedFew):
            return self._read("experts", lambda: plan.rows.expert_ends)

        def make() -> torch.Tensor:
            if not self.do_expand:
                return plan.offsets[1:].to(device, torch.int32, copy=True)
            return (plan.offsets[:-1] + plan.tokens_per_expert).to(device, torch.int32)

        return self._read("experts", make)

    @property
    def recv_src_metadata(self) -> torch.Tensor:
        """See :class:`EPHandle`."""
        return self._read("sources", self._sources)

    def _read(self, name: str, make: Callable[[], torch.Tensor]) -> torch.Tensor:
        plan, capturing = self._plan, _is_capturing(self._device)
        if name in self._known:
            known, ready = self._known[name]
            if ready is not None and not capturing:
                ready.current_stream_wait()  # another stream may have made it
            return known
        # A capture cannot wait for an event from before it, and its tensors hold nothing until the
        # graph is replayed: they are made anew for the next reader.
        passing = capturing and not self._made_in_capture
        if isinstance(plan, (CudaPlan, RoutedFew)) and not passing:
            if self._done is not None:
                self._done.current_stream_wait()
            if plan.block.is_cuda:
                record(tuple(plan.tensors()), torch.cuda.current_stream(plan.block.device))
        made = make()
        if not passing:
            # Read before a graph that was made in it is replayed, it holds nothing anyway.
            ready, device = None, self._device
            if device.type == "cuda" and not capturing:
                ready = EventHandle(torch.cuda.current_stream(device))
            self._known[name] = made, ready
        return made

    def _sources(self) -> torch.Tensor:
        plan, rows, device = self._plan, self._received, self._device
        if isinstance(plan, RoutedFew):
            return plan.rows.sources[:rows]
        made = torch.full((rows, 2 + plan.top_k), -1, dtype=torch.int32, device=device)
        numbers = torch.arange(rows, dtype=torch.int32, device=device)
        prefix = _prefix(plan).to(device)
        source = torch.searchsorted(prefix, numbers, right=True)
        tokens = first_rows(plan.source_token.to(device), rows, -1)
        known = numbers < prefix[-1]
        place = source * self.num_max_tokens_per_rank + tokens
        made[:, 0] = torch.where(known, place, -1).to(torch.int32)
        made[:, 1] = torch.where(known, numbers, -1)
        if self.do_expand:
            assert plan.rows_of is not None
            slots = first_rows(plan.rows_of.to(device), rows, -1)
            made[:, 2:] = torch.where(known.unsqueeze(1), slots, -1)
        return made


def _prefix(plan: AnyPlan) -> torch.Tensor:
    """A copy of the plan's ``source_prefix``: zeros if a rank has refused the call, where only its
    first number is written, -1."""
    return torch.where(plan.source_prefix[:1] < 0, 0, plan.source_prefix)


def _is_capturing(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def first_rows(tensor: torch.Tensor, rows: int, absent: int) -> torch.Tensor:
    """The first ``rows`` rows of ``tensor``, with ``absent`` behind them if it has fewer."""
    if tensor.shape[0] == rows:
        return tensor
    filled = tensor.new_full((rows, *tensor.shape[1:]), absent)
    least = min(rows, tensor.shape[0])
    filled[:least] = tensor[:least]
    return filled
