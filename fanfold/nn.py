"""A Mixture-of-Experts layer whose experts are spread over the ranks of a group.

    ep = fanfold.ExpertParallel(group, num_experts=64, top_k=8, hidden=1024, max_tokens=4096,
                                mode="high_throughput")
    layer = fanfold.nn.MoE(1024, 2048, num_experts=64, top_k=8, expert_parallel=ep)
    out = layer(x)                                  # x [..., 1024] on each rank
    (loss(out) + layer.balance_loss).backward()
    fanfold.nn.average_gradients(layer)             # over the ranks; experts need no all-reduce

Every rank runs the layer on tokens of its own and holds ``num_experts / ranks`` experts. Calls are
collective, backward passes too (see :mod:`fanfold.functional`).
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812 (torch's own convention)
from torch.compiler import is_dynamo_compiling

from fanfold import functional
from fanfold.copying import not_copied
from fanfold.errors import ArgumentError
from fanfold.expert_parallel import ExpertParallel
from fanfold.experts import swiglu_experts
from fanfold.geometry import Mode, check_activations, check_integer
from fanfold.layer_statistics import MoEStatistics
from fanfold.operators import Registration, register
from fanfold.received import Received
from fanfold.refusal import Refusing
from fanfold.representation import details, module_repr, show_fields, worded
from fanfold.seeding import seeded_normal

__all__ = ["MoE", "MoEOptions", "MoEStatistics", "Router", "average_gradients", "seeded_normal"]

_MOST_COLUMNS = (1 << 31) - 1


@dataclass(frozen=True)
class MoEOptions:
    """How a MoE layer is built, beyond its four sizes.

    Attributes:
        score: how router logits become scores: ``"softmax"`` over all experts, or ``"sigmoid"`` of
            each.
        renormalize: divide a token's top-k scores by their sum, so that its weights add up to 1.
        balance: coefficient of the load-balancing loss.
        shared_intermediate: width of a shared expert that every token passes on its own rank; 0
            for none.
        latent: if given, tokens are projected to this many columns before they are dispatched,
            routed experts work on those, and what comes back is projected to ``hidden`` again
            (LatentMoE): rows on the wire shrink by ``hidden / latent``.
        seed: of the initial weights. Each expert's depend on (seed, expert) alone, so a layer
            starts equal on any number of ranks. Give each layer of a model its own.
        dtype: of the parameters and of the experts' matrix products. The router computes in
            float32 always.
    """

    score: Literal["softmax", "sigmoid"] = "softmax"
    renormalize: bool = True
    balance: float = 0.01
    shared_intermediate: int = 0
    latent: int | None = None
    seed: int = 0
    dtype: torch.dtype = torch.float32

    __repr__ = show_fields

    def __post_init__(self) -> None:
        """Checks every bound.

        Raises:
            ArgumentError: for the first one that does not hold.
        """
        if self.score not in ("softmax", "sigmoid"):
            raise ArgumentError("score", repr(self.score), "'softmax' or 'sigmoid'")
        if not getattr(self.dtype, "is_floating_point", False):
            raise ArgumentError("dtype", worded(self.dtype), "a floating-point torch.dtype")
        check_integer("shared_intermediate", self.shared_intermediate, 0, _MOST_COLUMNS)


class Router(torch.nn.Module):
    """Chooses each token's experts and their weights.

    Args:
        hidden: columns of a token.
        num_experts: experts to choose from.
        top_k: experts per token.
        options: score, renormalisation, balance and seed.
    """

    def __init__(self, hidden: int, num_experts: int, top_k: int, options: MoEOptions) -> None:
        super().__init__()
        self.num_experts, self.top_k, self.options = num_experts, top_k, options
        initial = seeded_normal((num_experts, hidden), hidden**-0.5, options.seed, "router")
        self.weight = torch.nn.Parameter(initial)

    def forward(self, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The choice for ``tokens [T, hidden]``.

        Returns:
            topk_idx ``[T, top_k]`` int64, topk_weights ``[T, top_k]`` float32, and the balance loss
            over this rank's tokens: ``balance * E * sum over e of f_e P_e`` with f_e the share of
            the T * top_k choices that fell on e and P_e the mean score (of sigmoid scores, each
            token's divided by their sum), as in Switch Transformers, arXiv:2101.03961, equations 4
            to 6. It is ``balance`` where the load is even.
        """
        # Near ties decide where tokens go, so autocast must not round what is compared.
        with torch.autocast(tokens.device.type, enabled=False):
            logits = F.linear(tokens.float(), self.weight.float())
        if self.options.score == "softmax":
            scores = shares = logits.softmax(-1)
        else:
            scores = logits.sigmoid()
            shares = scores / scores.sum(-1, keepdim=True)
        weights, indices = scores.topk(self.top_k, dim=-1)
        if self.options.renormalize:
            weights = weights / weights.sum(-1, keepdim=True)
        chosen = indices.flatten()
        # Not by bincount, which waits for the GPU to find out how long its result is.
        choices = chosen.new_zeros(self.num_experts)
        choices.scatter_add_(0, chosen, torch.ones_like(chosen))
        count = max(tokens.shape[0], 1)
        # Integers divided would have the dtype that is the process's default.
        per_expert = (choices.float() / (count * self.top_k)) * (shares.sum(0) / count)
        return indices, weights, self.options.balance * self.num_experts * per_expert.sum()


@not_copied(
    why="its ExpertParallel holds memory that the ranks share",
    instead="Save layer.state_dict(), and load it into another layer made with the same arguments.",
)
class MoE(torch.nn.Module):
    """Router, dispatch, this rank's SwiGLU experts, combine; optionally a shared expert.

    ``out = sum over a token's experts e of w_e * W_out_e (silu(W_gate_e x) * W_up_e x)``, plus the
    shared expert's output. Rows travel as bfloat16 (or as the ExpertParallel says), so the routed
    part carries bfloat16's rounding: see :mod:`fanfold.functional`.

    Args:
        hidden: columns of a token.
        intermediate: width of one expert.
        num_experts: routed experts of all ranks.
        top_k: experts per token.
        expert_parallel: what moves the tokens; layers may share one. Its hidden is this layer's, or
            its latent width if there is one. high_throughput trains and infers, low_latency infers:
            assign another one to ``expert_parallel`` to change over. The layer does not close it.
        options: everything else.

    Parameters of the routed experts (``w_in [E_l, 2 * intermediate, width]``, gate above up, and
    ``w_out [E_l, width, intermediate]``) are this rank's alone and carry the attribute
    ``expert_parallel = True``; all others are replicated and must see averaged gradients:
    :func:`average_gradients` does both.

    Attributes:
        balance_loss: of the latest forward pass; add it to the loss. A pass inside a backward pass
            (activation checkpointing computes it again) puts its own here for as long as the output
            of that pass is part of a graph.
        statistics: rows, bytes and times since the last ``statistics.reset()``.

    Raises:
        ArgumentError: a size that is out of bounds or is not the ExpertParallel's.
    """

    def __init__(
        self,
        hidden: int,
        intermediate: int,
        num_experts: int,
        top_k: int,
        *,
        expert_parallel: ExpertParallel,
        options: MoEOptions = MoEOptions(),
    ) -> None:
        super().__init__()
        self.hidden, self.intermediate = hidden, intermediate
        self.num_experts, self.top_k, self.options = num_experts, top_k, options
        for name in ("hidden", "intermediate"):
            check_integer(name, getattr(self, name), 1, _MOST_COLUMNS)
        self.statistics = MoEStatistics(
            expert_rows=torch.zeros(
                expert_parallel.experts_per_rank, dtype=torch.int64, device="cpu"
            )
        )
        self.expert_parallel = expert_parallel
        first = expert_parallel.rank * expert_parallel.experts_per_rank
        self.local_experts = range(first, first + expert_parallel.experts_per_rank)
        self._balance_loss = torch.zeros((), dtype=torch.float32, device="cpu")
        self._balance_loss_again: Callable[[], torch.Tensor | None] = _nothing
        self._make_parameters()

    @property
    def width(self) -> int:
        """Columns of the rows that travel: latent, or hidden without one."""
        return self.hidden if self.options.latent is None else self.options.latent

    @property
    def expert_parallel(self) -> ExpertParallel:
        """What moves the tokens."""
        return self._expert_parallel

    @expert_parallel.setter
    def expert_parallel(self, ep: ExpertParallel) -> None:
        wanted = {"hidden": self.width, "num_experts": self.num_experts, "top_k": self.top_k}
        local = getattr(self, "local_experts", None)
        if local is not None:
            wanted |= {"rank": local.start // len(local), "experts_per_rank": len(local)}
        for name, value in wanted.items():
            if getattr(ep, name) != value:
                raise ArgumentError(
                    f"expert_parallel.{name}", getattr(ep, name), f"{value}, as the layer's is"
                )
        self._expert_parallel = ep
        self._meters = _Meters(ep, self.statistics)

    @property
    def balance_loss(self) -> torch.Tensor:
        """Of the latest forward pass; see the class."""
        again = self._balance_loss_again()
        return self._balance_loss if again is None else again

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The layer's output for this rank's tokens. Collective.

        Args:
            x: ``[..., hidden]`` of any floating dtype; up to ``max_tokens`` tokens, none included.

        Returns:
            The same shape and dtype.

        Raises:
            ArgumentError: ``x`` has another last dimension or no floating dtype; void on all ranks.
            PeerRefused, PeerTimeout, UsageError: as ``ExpertParallel.dispatch``.
        """
        ep = self.expert_parallel
        with Refusing(ep.refuse_dispatch):
            check_activations("x", x, self.hidden, ep.max_tokens, self.w_in.device)
        tokens = x.reshape(-1, self.hidden)
        indices, weights, balance_loss = self.router(tokens)
        rows = tokens if self.latent_in is None else _apply(self.latent_in, tokens)
        routed = self._routed(rows.to(torch.bfloat16).contiguous(), indices, weights)
        self._keep_balance_loss(balance_loss, routed)
        if self.latent_out is not None:
            routed = _apply(self.latent_out, routed)
        out = routed.to(x.dtype)
        if self.shared is not None:
            out = out + self.shared(tokens).to(x.dtype)
        return out.reshape(x.shape)

    def _keep_balance_loss(self, loss: torch.Tensor, routed: torch.Tensor) -> None:
        """Makes ``loss`` the attribute, not to outlive the graph of ``routed`` in a backward pass.

        What a checkpoint computes again is never run backward itself: a loss kept here would hold
        all that was computed before it, of every layer, until the layer's next pass."""
        if is_dynamo_compiling():  # which cannot see whether it is in a backward pass
            self._balance_loss, self._balance_loss_again = loss, _nothing
            return
        if torch._C._current_graph_task_id() == -1 or routed.grad_fn is None:
            self._balance_loss, self._balance_loss_again = loss, _nothing
            return
        routed.grad_fn.metadata["fanfold.balance_loss"] = loss  # type: ignore[index]
        self._balance_loss_again = weakref.ref(loss)

    def _routed(
        self, rows: torch.Tensor, indices: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        meter = self._meters.for_routing(indices)
        tokens, row_weights, received = functional.dispatch(meter, rows, indices, weights)
        y = swiglu_experts(tokens, self.w_in, self.w_out, received)
        return functional.combine(meter, y, received, row_weights)

    def _make_parameters(self) -> None:
        options, hidden, width = self.options, self.hidden, self.width
        self.router = Router(hidden, self.num_experts, self.top_k, options)
        self.w_in = self._expert_parameter("w_in", 2 * self.intermediate, width)
        self.w_out = self._expert_parameter("w_out", width, self.intermediate)
        self.latent_in: torch.nn.Linear | None = None
        self.latent_out: torch.nn.Linear | None = None
        self.shared: _SharedExpert | None = None
        if options.latent is not None:
            self.latent_in = _linear(hidden, width, options, "latent_in")
            self.latent_out = _linear(width, hidden, options, "latent_out")
        if options.shared_intermediate:
            self.shared = _SharedExpert(hidden, options)

    def _expert_parameter(self, name: str, rows: int, columns: int) -> torch.nn.Parameter:
        seed, dtype, std = self.options.seed, self.options.dtype, columns**-0.5
        initial = torch.stack(
            [
                seeded_normal((rows, columns), std, seed, f"{name} {expert}", dtype)
                for expert in self.local_experts
            ]
        )
        parameter = torch.nn.Parameter(initial)
        parameter.expert_parallel = True  # type: ignore[attr-defined]
        return parameter

    def extra_repr(self) -> str:
        """The sizes, and what moves the tokens, for ``print``."""
        names = ("hidden", "intermediate", "num_experts", "top_k", "local_experts")
        return details(self, **{name: name for name in (*names, "expert_parallel")})

    __repr__ = module_repr


class _SharedExpert(torch.nn.Module):
    """The expert that every token passes, where it lives."""

    def __init__(self, hidden: int, options: MoEOptions) -> None:
        super().__init__()
        self.w_in = _linear(hidden, 2 * options.shared_intermediate, options, "shared_in")
        self.w_out = _linear(options.shared_intermediate, hidden, options, "shared_out")

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """``[T, hidden]`` to ``[T, hidden]``."""
        gate, up = _apply(self.w_in, tokens).chunk(2, dim=-1)
        return _apply(self.w_out, F.silu(gate) * up)


class _Meters:
    """Makes a meter for each dispatch of a layer, also where a compiled graph calls it."""

    def __init__(self, ep: ExpertParallel, statistics: MoEStatistics) -> None:
        self._ep, self._statistics = ep, statistics
        self.registration = register(self, ep.registration.shapes, kind=_Meter)

    def for_routing(self, topk_idx: torch.Tensor) -> _Meter:
        """The meter of a dispatch by ``topk_idx`` and of the calls that belong to it."""
        return _Meter(self._ep, self._statistics, topk_idx, self.registration)


class _Meter:
    """An ExpertParallel that adds its times and bytes to a layer's statistics."""

    def __init__(
        self,
        ep: ExpertParallel,
        statistics: MoEStatistics,
        topk_idx: torch.Tensor,
        registration: Registration,
    ) -> None:
        self._ep, self._statistics = ep, statistics
        self.registration, self.owner = registration, ep
        self._remote_rows = _remote_rows(ep, topk_idx)

    @property
    def mode(self) -> Mode:
        """The mode of the ExpertParallel."""
        return self._ep.mode

    def dispatch(
        self,
        x: torch.Tensor,
        topk_idx: torch.Tensor | None = None,
        topk_weights: torch.Tensor | None = None,
        *,
        previous: Received | None = None,
        capacity: int | None = None,
    ) -> Received:
        """See ``ExpertParallel.dispatch``."""
        begin = time.perf_counter()
        received = self._ep.dispatch(
            x, topk_idx, topk_weights, previous=previous, capacity=capacity
        )
        self._statistics.dispatch_seconds += time.perf_counter() - begin
        if previous is None:
            self._statistics.count_rows(x.shape[0], received.tokens_per_expert)
        self._statistics.count_bytes("bytes_sent", self._remote_rows, _row_bytes(received))
        return received

    def combine(
        self,
        y: torch.Tensor,
        received: Received,
        *,
        weighted: bool = True,
        bias: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """See ``ExpertParallel.combine``."""
        begin = time.perf_counter()
        out = self._ep.combine(y, received, weighted=weighted, bias=bias)
        self._statistics.combine_seconds += time.perf_counter() - begin
        row_bytes = y.shape[-1] * y.element_size()
        self._statistics.count_bytes("bytes_returned", self._remote_rows, row_bytes)
        return out

    def combine_weights(self, row_values: torch.Tensor, received: Received) -> torch.Tensor:
        """See ``ExpertParallel.combine_weights``."""
        begin = time.perf_counter()
        values = self._ep.combine_weights(row_values, received)
        self._statistics.combine_seconds += time.perf_counter() - begin
        return values


def _remote_rows(ep: ExpertParallel, topk_idx: torch.Tensor) -> torch.Tensor:
    """Pairs of one of this rank's tokens and another rank that holds one of its experts: an int64
    scalar where ``topk_idx`` is, as reading it would wait."""
    ranks = torch.where(topk_idx < 0, ep.rank, topk_idx // ep.experts_per_rank)
    reached = topk_idx.new_zeros((topk_idx.shape[0], ep.ranks), dtype=torch.bool)
    reached.scatter_(1, ranks, True)
    reached[:, ep.rank] = False
    return reached.sum()


def _row_bytes(received: Received) -> int:
    """Bytes of one row as it travelled."""
    row = received.tokens.shape[-1] * received.tokens.element_size()
    if received.scales is not None:
        row += received.scales.shape[-1] * received.scales.element_size()
    return row


def _nothing() -> None:
    """What a weak reference to nothing would return."""


def _linear(columns: int, rows: int, options: MoEOptions, name: str) -> torch.nn.Linear:
    """A bias-free layer from ``columns`` to ``rows`` with seeded weights."""
    layer = torch.nn.Linear(columns, rows, bias=False, device="meta")
    initial = seeded_normal((rows, columns), columns**-0.5, options.seed, name, options.dtype)
    layer.weight = torch.nn.Parameter(initial)
    return layer


def _apply(layer: torch.nn.Linear, x: torch.Tensor) -> torch.Tensor:
    """``layer`` in the dtype of its weights."""
    out: torch.Tensor = layer(x.to(layer.weight.dtype))
    return out


def average_gradients(module: torch.nn.Module, group: dist.ProcessGroup | None = None) -> None:
    """Makes every gradient that of the mean of the ranks' losses. Collective.

    For data parallelism over the very ranks that share the experts. Gradients of replicated
    parameters are averaged in one all-reduce. Those of parameters marked ``expert_parallel`` are
    divided by the number of ranks, and no more: an expert's gradient is the sum over all ranks'
    tokens already. Without torch.distributed there is one rank and nothing to do.

    Args:
        module: the same on all ranks; parameters without a gradient are passed over, and must be
            the same ones on all ranks.
        group: the default group if None.
    """
    if not dist.is_initialized():
        return
    ranks = dist.get_world_size(group)
    replicated = []
    for parameter in module.parameters():
        if parameter.grad is None:
            continue
        if getattr(parameter, "expert_parallel", False):
            parameter.grad.div_(ranks)
        else:
            replicated.append(parameter.grad)
    if not replicated:
        return
    flat = torch.cat([grad.flatten().float() for grad in replicated])
    dist.all_reduce(flat, group=group)
    flat.div_(ranks)
    pieces = flat.split([grad.numel() for grad in replicated])
    for grad, piece in zip(replicated, pieces, strict=True):
        grad.copy_(piece.view_as(grad))
