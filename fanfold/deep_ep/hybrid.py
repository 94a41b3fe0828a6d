"""The interface of DeepEP's branch ``hybrid-ep``, ``HybridEPBuffer``: rows that arrive sorted by
expert, over :mod:`fanfold.backends.high_throughput`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from fanfold.backends.choose import choose
from fanfold.backends.high_throughput import Rows
from fanfold.backends.high_throughput.cuda import CudaHighThroughput
from fanfold.backends.high_throughput.protocol import MOST_ALIGNMENT, MOST_ROWS, MOST_SMS
from fanfold.backends.opening import open_high_throughput
from fanfold.config import Config as Settings
from fanfold.copying import not_copied
from fanfold.deep_ep.base import Counted
from fanfold.deep_ep.elastic_calls import check_whole, rows_of_experts
from fanfold.deep_ep.ep_handle import AnyPlan
from fanfold.deep_ep.names import HYBRID, HYBRID_WEIGHTS
from fanfold.deep_ep.routes import tokens_of
from fanfold.deep_ep.routing_maps import Entries, dense, entries_of_indices, entries_of_map
from fanfold.deep_ep.streams import record
from fanfold.errors import ArgumentError, UsageError
from fanfold.forks import Owner
from fanfold.geometry import MAX_EXPERTS, MAX_TOKENS, check_flag
from fanfold.group import agree, as_group, together
from fanfold.memory.hosts import find_hosts
from fanfold.refusal import Refusing
from fanfold.representation import described, show_fields, worded

__all__ = ["HybridEPBuffer", "HybridEPConfig", "HybridEPHandle"]

_MOST_TOKENS = 65536  # of a call, where the Buffer is made for less


@dataclass
class HybridEPConfig:
    """The sizes of a HybridEPBuffer.

        >>> buffer = fanfold.deep_ep.HybridEPBuffer(group, 64, 8, 2)
        >>> buffer.config.hidden_dim, buffer.config.num_of_nodes
        (64, 1)

    Attributes:
        hidden_dim, max_num_of_tokens_per_rank: as given to the Buffer.
        num_of_experts_per_rank: its num_local_experts.
        num_of_ranks_per_node, num_of_nodes: ranks of a host, and hosts.
    """

    hidden_dim: int
    max_num_of_tokens_per_rank: int
    num_of_experts_per_rank: int
    num_of_ranks_per_node: int
    num_of_nodes: int

    __repr__ = show_fields


@not_copied(why="GPUs work by the plan that it carries", instead="Pass the same object on.")
class HybridEPHandle(tuple):  # type: ignore[type-arg]
    """What :meth:`HybridEPBuffer.dispatch_with_permute` returns for later calls: a tuple of as many
    items as DeepEP's, of which three are not None: item 3, the received tokens, ``[1]`` int32; item
    6, this rank's tokens; item 8, 0, ``[1]`` int32, as rows that have no room are an error.

        >>> buffer = fanfold.deep_ep.HybridEPBuffer(group, 64, 8, 2)
        >>> x = torch.ones((3, 64), dtype=torch.bfloat16, device=buffer.device)
        >>> routing_map = torch.tensor([[True, True]] * 3, device=buffer.device)
        >>> handle = buffer.dispatch_with_permute(hidden=x, routing_map=routing_map)[4]
        >>> len(handle), handle[6]
        (9, 3)
    """

    _plan: AnyPlan
    _entries: Entries
    _pad_multiple: int
    _rows: int
    _tokens_per_expert: torch.Tensor


@not_copied(
    why="it holds memory that the ranks of its group share",
    instead="Make one in each process with the same arguments.",
)
class HybridEPBuffer(Counted):
    """Dispatch and combine of rows sorted by expert, with the arguments and results of DeepEP's
    ``HybridEPBuffer`` as Megatron-LM uses it. Making one is collective.

    Calls run where those of :class:`ElasticBuffer` do, on the current stream.

        >>> buffer = fanfold.deep_ep.HybridEPBuffer(group, 64, 8, 2)
        >>> x = torch.ones((3, 64), dtype=torch.bfloat16, device=buffer.device)
        >>> routing_map = torch.tensor([[True, True]] * 3, device=buffer.device)
        >>> probs = torch.full((3, 2), 0.5, device=buffer.device)
        >>> rows, row_probs, _, counts, handle = buffer.dispatch_with_permute(
        ...     hidden=x, routing_map=routing_map, probs=probs
        ... )
        >>> rows.shape, counts.tolist(), row_probs[0].item()
        (torch.Size([6, 64]), [3, 3], 0.5)
        >>> out, _ = buffer.combine_with_unpermute(hidden=rows, handle=handle)
        >>> float(out[0, 0])
        2.0

    Args:
        group: a torch.distributed group of any backend and size.
        hidden_dim, use_fp8: of the rows; calls take any.
        max_num_of_tokens_per_rank: most tokens of a call; calls take at least 65536. Ranks need not
            agree.
        num_local_experts: experts of a rank, for calls that do not say; the same on all ranks.
        num_sms_dispatch_api: SMs that a dispatch takes on GPUs; None for as many as the mode
            chooses.
        num_sms_combine_api: likewise a combine.
        num_sms_preprocessing_api: from 1, then ignored.
        load_cached_kernels, use_shared_buffer, enable_custom_allgather, use_mnnvl: ignored.
        num_of_hybrid_ep_ranks_per_nvlink_domain: from 1, then ignored: hosts are found out.

    Attributes:
        group, use_fp8: as given.
        num_sms_dispatch_api, num_sms_combine_api: as given; calls read them.
        group_size: ranks of the group; ``rank`` is this one of them.
        num_of_nodes, node_rank: hosts, and this rank's; 1 and 0 where hosts have different numbers
            of ranks.
        num_of_hybrid_ep_ranks_per_nvlink_domain, local_rank: ranks of a host, and this rank's place
            among them.
        config: a :class:`HybridEPConfig`.
        device: where calls take tensors, on GPUs; where the host's results are made.
        runtime: the memory, which goes with the object.

    Raises:
        ArgumentError: a bad argument, or ranks that disagree about one; FanfoldError where it is
            another rank's.
        UnavailableError: the ranks cannot share memory, or the setting ``backend`` is ``"cuda"``
            and they cannot run on their GPUs.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        hidden_dim: int,
        max_num_of_tokens_per_rank: int,
        num_local_experts: int,
        use_fp8: bool = False,
        num_sms_dispatch_api: int | None = None,
        num_sms_combine_api: int | None = None,
        num_sms_preprocessing_api: int | None = None,
        load_cached_kernels: bool = False,
        use_shared_buffer: bool = True,
        enable_custom_allgather: bool = False,
        num_of_hybrid_ep_ranks_per_nvlink_domain: int | None = None,
        use_mnnvl: bool | None = None,
    ) -> None:
        del load_cached_kernels, use_shared_buffer, enable_custom_allgather, use_mnnvl
        self._owner = Owner("this HybridEPBuffer")
        if group is None:
            raise ArgumentError("group", None, "a torch.distributed group")
        self.group, self.use_fp8 = group, use_fp8
        self.num_sms_dispatch_api = num_sms_dispatch_api
        self.num_sms_combine_api = num_sms_combine_api
        with together(as_group(group)) as ranks:
            self.rank, self.group_size = ranks.rank, ranks.size
            check_whole("hidden_dim", hidden_dim, 1)
            check_whole("max_num_of_tokens_per_rank", max_num_of_tokens_per_rank, 0, MAX_TOKENS)
            check_whole("num_local_experts", num_local_experts, 1, MAX_EXPERTS // ranks.size)
            for name, sms in (
                ("num_sms_dispatch_api", num_sms_dispatch_api),
                ("num_sms_combine_api", num_sms_combine_api),
                ("num_sms_preprocessing_api", num_sms_preprocessing_api),
            ):
                _check_sms(name, sms)
            if num_of_hybrid_ep_ranks_per_nvlink_domain is not None:
                domain = num_of_hybrid_ep_ranks_per_nvlink_domain
                check_whole("num_of_hybrid_ep_ranks_per_nvlink_domain", domain, 1)
            settings = Settings.resolve()
            agree(ranks, {"num_local_experts": num_local_experts})
            hosts = find_hosts(ranks, settings)
            choice = choose(ranks, settings, "high_throughput", may_cross_hosts=True)
            # Megatron-LM passes what a rank happens to have at first.
            most = max(_MOST_TOKENS, *ranks.all_gather(max_num_of_tokens_per_rank))
            self.runtime, self._backend = open_high_throughput(ranks, choice, most, settings)
        self._calls = {"dispatch_with_permute": 0, "combine_with_unpermute": 0}
        self._measured = self._owner, (self.runtime,)
        node = hosts.even
        nodes, of_node = len(set(node)), node.count(0)
        self.num_of_nodes, self.num_of_hybrid_ep_ranks_per_nvlink_domain = nodes, of_node
        self.node_rank = node[self.rank]
        self.local_rank = node[: self.rank].count(self.node_rank)
        self.config = HybridEPConfig(
            hidden_dim, max_num_of_tokens_per_rank, num_local_experts, of_node, nodes
        )
        self.device = choice.device

    def dispatch_with_permute(
        self,
        *,
        hidden: torch.Tensor,
        topk_idx: torch.Tensor | None = None,
        topk_weights: torch.Tensor | None = None,
        num_of_experts_per_rank: int | None = None,
        num_of_experts: int | None = None,
        use_fp8: bool | None = None,
        routing_map: torch.Tensor | None = None,
        probs: torch.Tensor | None = None,
        scaling_factor: torch.Tensor | None = None,
        num_permuted_tokens: int | torch.Tensor | None = None,
        pad_multiple: int | None = None,
        handle: HybridEPHandle | None = None,
        non_blocking: bool = False,
        fuse_permute_dispatch: bool = False,
        num_dispatched_tokens: int | None = None,
        use_host_meta: bool | None = None,
    ) -> tuple[
        torch.Tensor, torch.Tensor | None, torch.Tensor | None, torch.Tensor, HybridEPHandle
    ]:
        """Sends each token to its experts. Collective.

        Args:
            hidden: ``[T, H]`` bfloat16, or another dtype whose rows are multiples of 16 bytes; with
                scaling_factor values of a 1-byte dtype. Of any strides.
            routing_map: ``[T, E]`` bool: which experts each token goes to, 32 at most.
            topk_idx: ``[T, K]``, -1 for none, in the place of the map; then num_of_experts is
                required. With probs it names an expert of a token once.
            topk_weights: ``[T, K]`` float32, with topk_idx.
            probs: ``[T, E]`` float32, with either, in the place of topk_weights.
            num_of_experts_per_rank: of a rank; those of the Buffer if None.
            num_of_experts: E.
            use_fp8, fuse_permute_dispatch, num_dispatched_tokens: ignored.
            scaling_factor: ``[T, S]`` float32 or int32, sent as it is.
            num_permuted_tokens: rows of the result, instead of as many as arrive. With a handle,
                None, the handle's number, or a tensor, which nobody reads.
            pad_multiple: what each expert's rows are padded to, with zeros; None for 1. With a
                handle None or the handle's.
            handle: route as an earlier dispatch did; then no routing, weights or probs are given.
            non_blocking: the CPU waits for nothing; needs num_permuted_tokens.
            use_host_meta: the opposite of non_blocking, if given.

        Returns:
            - rows ``[N, H]`` sorted by expert, those of each from a multiple of pad_multiple on,
              ordered by source rank, then token;
            - float32 ``[N]``, the probability of the row's token and expert, 0 for padding; None
              without probs and topk_weights, and with a handle;
            - scales ``[N, S]``, or None;
            - ``[E / R]`` int64: rows of each local expert, with padding; on the CPU, with
              non_blocking where the rows are;
            - the handle (the same one, if it was given).

            With num_permuted_tokens the rows behind those that came hold anything.

        Raises:
            ArgumentError: bad input, or ranks that disagree: the call is aborted on all ranks. On
                GPUs a later call raises what the kernels find: a token of more than 32 experts, or
                more rows than num_permuted_tokens, of which those in excess are dropped.
            PeerRefused: another rank refused its input; on GPUs, with non_blocking, a later call
                raises it.
            PeerTimeout: a rank did not arrive in time.
            UsageError: it failed earlier; or a CUDA graph is being captured without non_blocking.
        """
        del use_fp8, fuse_permute_dispatch, num_dispatched_tokens
        self._owner.check()
        self._calls["dispatch_with_permute"] += 1
        if use_host_meta is not None:
            non_blocking = not use_host_meta
        values = _contiguous(hidden)
        x: Rows = values if scaling_factor is None else (values, scaling_factor)
        routing = (routing_map, topk_idx, topk_weights, probs)
        plan = None if handle is None else _plan_of(handle)
        refusing = Refusing(lambda error: self._backend.refuse_dispatch(error, plan))
        if handle is not None:
            with refusing:
                _check_reuse(handle, self.group_size, routing, num_permuted_tokens, pad_multiple)
                self._use_sms("num_sms_dispatch_api")
            with HYBRID:
                again = self._backend.dispatch_cached(x, handle._plan, layout="expert_major")
            counts = _here(handle._tokens_per_expert).clone()
            return again.tokens, None, again.scales, counts, handle
        with refusing:
            padding = 1 if pad_multiple is None else pad_multiple
            check_whole("pad_multiple", padding, 1, MOST_ALIGNMENT)
            room = _room(num_permuted_tokens, non_blocking)
            self._backend.check_devices(
                hidden=hidden, scaling_factor=scaling_factor, routing_map=routing_map,
                topk_idx=topk_idx, topk_weights=topk_weights, probs=probs,
            )  # fmt: skip
            with HYBRID:
                tokens = tokens_of(x)
            entries = _entries(routing, num_of_experts, tokens)
            self._check_experts(entries.num_experts, num_of_experts_per_rank)
            waits = not non_blocking and entries.topk_idx.is_cuda
            if waits and torch.cuda.is_current_stream_capturing():
                raise UsageError("a dispatch in a CUDA graph needs non_blocking=True")
            self._use_sms("num_sms_dispatch_api")
        with HYBRID if topk_weights is None else HYBRID_WEIGHTS:
            return self._route(x, entries, padding, room, non_blocking)

    def _route(
        self, x: Rows, entries: Entries, padding: int, room: int | None, non_blocking: bool
    ) -> tuple[Any, Any, Any, torch.Tensor, HybridEPHandle]:
        counts: list[int] = []
        options: dict[str, Any] = {}
        if room is None and isinstance(self._backend, CudaHighThroughput):
            # The CPU knows the plan then, and no rows are on their way that a copy would wait for.
            options["planned"] = lambda plan: counts.extend(rows_of_experts(plan))
        dispatched = self._backend.dispatch(
            x,
            entries.topk_idx,
            entries.topk_weights,
            num_experts=entries.num_experts,
            layout="expert_major",
            expert_alignment=padding,
            capacity=room,
            **options,
        )
        plan: AnyPlan = dispatched.plan
        where = entries.topk_idx.device
        if non_blocking:
            per_expert = torch.diff(plan.offsets).to(where)
            received = plan.source_prefix[-1:].to(where, copy=True)
        else:
            listed = counts or rows_of_experts(plan)
            if room is not None:  # then nobody has looked yet at what the kernels found
                self._backend.check()
            per_expert = torch.tensor(listed, dtype=torch.int64, device="cpu")
            known = int(plan.source_prefix[-1]) if plan.received is None else plan.received
            received = torch.tensor([known], dtype=torch.int32, device="cpu")
        overflow = torch.zeros(1, dtype=torch.int32, device=where)
        items = (None, None, None, received, None, None, plan.tokens, None, overflow)
        handle = HybridEPHandle(items)
        handle._plan, handle._entries, handle._pad_multiple = plan, entries, padding
        handle._rows, handle._tokens_per_expert = dispatched.tokens.shape[0], per_expert
        probs = dispatched.row_weights
        return dispatched.tokens, probs, dispatched.scales, per_expert.clone(), handle

    def combine_with_unpermute(
        self,
        *,
        hidden: torch.Tensor,
        probs: torch.Tensor | None = None,
        handle: HybridEPHandle | None = None,
        pad_multiple: int | None = None,
        fuse_unpermute_combine: bool = False,
        num_dispatched_tokens: int | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Brings rows back to their tokens and sums them, unweighted. Collective.

        Args:
            hidden: ``[N, H]`` bfloat16, shaped as the rows of the dispatch.
            probs: ``[N]`` float32 that travel back to the token and expert of their rows.
            handle: of the dispatch.
            pad_multiple: None or that of the dispatch.
            fuse_unpermute_combine, num_dispatched_tokens: ignored.

        Returns:
            ``[T, H]`` bfloat16: each rank sums a token's rows in fp32, by ascending expert (by
            topk_idx if that was given), and rounds; the token's rank sums those, in rank order, and
            rounds once more. Of the ranks of another host it takes the rounded sum that is made
            there. ``[T, E]`` float32: the probs of each token's experts, 0 for other experts; None
            without.

        Raises:
            ArgumentError, PeerRefused, PeerTimeout, UsageError: as :meth:`dispatch_with_permute`.
        """
        del fuse_unpermute_combine, num_dispatched_tokens
        self._owner.check()
        self._calls["combine_with_unpermute"] += 1
        plan = _plan_of(handle)
        with Refusing(lambda error: self._backend.refuse_combine(error, plan)):
            known = _check_handle(handle, self.group_size)
            _check_padding(known, pad_multiple)
            rows, numbers = _contiguous(hidden), _contiguous(probs)
            self._use_sms("num_sms_combine_api")
        with HYBRID:
            out, entries = self._backend.combine(
                rows, known._plan, layout="expert_major", topk_weights=numbers
            )
        if entries is None:
            return out, None
        _here(known._entries.topk_idx)
        return out, dense(entries, known._entries)

    def update_template_config(
        self,
        hidden_dim: int | None = None,
        num_of_tokens_per_rank: int | None = None,
        num_local_experts: int | None = None,
        use_fp8: bool | None = None,
    ) -> HybridEPConfig:
        """The Buffer's sizes with some replaced; calls take any sizes without it. Local.

        Args:
            hidden_dim, num_local_experts: in the place of the Buffer's.
            num_of_tokens_per_rank: likewise of its max_num_of_tokens_per_rank, if it is more.
            use_fp8: ignored.
        """
        del use_fp8
        own = self.config
        return HybridEPConfig(
            own.hidden_dim if hidden_dim is None else hidden_dim,
            max(own.max_num_of_tokens_per_rank, num_of_tokens_per_rank or 0),
            own.num_of_experts_per_rank if num_local_experts is None else num_local_experts,
            own.num_of_ranks_per_node,
            own.num_of_nodes,
        )

    def empty_jit_cache(self) -> None:
        """Does nothing: kernels are kept by their sources (the setting ``cache_dir``)."""

    def _use_sms(self, name: str) -> None:
        """Has the next call take as many SMs as the attribute ``name`` says by now."""
        sms = getattr(self, name)
        _check_sms(name, sms)
        self._backend.use_sms(sms)

    def _check_experts(self, experts: int, per_rank: object) -> None:
        local = self.config.num_of_experts_per_rank if per_rank is None else per_rank
        check_whole("num_of_experts_per_rank", local, 1, MAX_EXPERTS)
        assert isinstance(local, int)
        if experts != local * self.group_size:
            bound = f"{local} * {self.group_size}, the experts of a rank and the ranks"
            raise ArgumentError("num_of_experts", experts, bound)

    def __repr__(self) -> str:
        names = ("rank", "group_size", "config", "device")
        return described(self, "", **{name: name for name in names})


_Routing = tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]
"""routing_map, topk_idx, topk_weights and probs."""


def _entries(routing: _Routing, num_experts: int | None, tokens: int) -> Entries:
    routing_map, topk_idx, topk_weights, probs = routing
    if routing_map is not None:
        for name, other in (("topk_idx", topk_idx), ("topk_weights", topk_weights)):
            if other is not None:
                raise ArgumentError(name, "given", "None where routing_map is given")
        entries = entries_of_map(routing_map, probs, tokens)
        if num_experts not in (None, entries.num_experts):
            bound = f"None or {entries.num_experts}, as routing_map has"
            raise ArgumentError("num_of_experts", num_experts, bound)
        return entries
    if topk_idx is None:
        raise ArgumentError("routing_map", None, "given, or topk_idx or a handle in its place")
    if num_experts is None:
        raise ArgumentError("num_of_experts", None, "the number of experts, as topk_idx is given")
    return entries_of_indices(topk_idx, topk_weights, probs, tokens, num_experts)


def _room(num_permuted_tokens: object, non_blocking: object) -> int | None:
    """Rows of a result, where that is given."""
    check_flag("non_blocking", non_blocking)
    if num_permuted_tokens is None and not non_blocking:
        return None
    check_whole("num_permuted_tokens", num_permuted_tokens, 0, MOST_ROWS)
    assert isinstance(num_permuted_tokens, int)
    return num_permuted_tokens


def _check_reuse(
    handle: HybridEPHandle,
    ranks: int,
    routing: _Routing,
    num_permuted_tokens: object,
    pad_multiple: object,
) -> None:
    _check_handle(handle, ranks)
    names = ("routing_map", "topk_idx", "topk_weights", "probs")
    for name, given in zip(names, routing, strict=True):
        if given is not None:
            raise ArgumentError(name, "given", "None with a handle, which has the routing")
    if isinstance(num_permuted_tokens, int) and num_permuted_tokens != handle._rows:
        bound = f"None or {handle._rows}, as for the handle"
        raise ArgumentError("num_permuted_tokens", num_permuted_tokens, bound)
    _check_padding(handle, pad_multiple)


def _check_handle(handle: object, ranks: int) -> HybridEPHandle:
    if not isinstance(handle, HybridEPHandle):
        bound = "the very object that dispatch_with_permute returned"
        raise ArgumentError("handle", worded(handle), bound)
    if handle._plan.ranks != ranks:
        bound = f"one of {ranks} ranks, as this group"
        raise ArgumentError("handle", f"one of {handle._plan.ranks} ranks", bound)
    return handle


def _check_padding(handle: HybridEPHandle, pad_multiple: object) -> None:
    if pad_multiple not in (None, handle._pad_multiple):
        bound = f"None or {handle._pad_multiple}, as for the handle"
        raise ArgumentError("pad_multiple", pad_multiple, bound)


def _plan_of(handle: object) -> AnyPlan | None:
    """Of what a caller passes for a handle, which need not be one."""
    return handle._plan if isinstance(handle, HybridEPHandle) else None


def _check_sms(name: str, sms: object) -> None:
    if sms is not None:
        check_whole(name, sms, 1, MOST_SMS)


def _here(tensor: torch.Tensor) -> torch.Tensor:
    """``tensor`` of a handle, which may have been made on another stream than this call's."""
    if tensor.is_cuda:
        record((tensor,), torch.cuda.current_stream(tensor.device))
    return tensor


def _contiguous(tensor: Any) -> Any:
    """Gradients come in any order; what is no tensor is another's to refuse."""
    return tensor.contiguous() if isinstance(tensor, torch.Tensor) else tensor
