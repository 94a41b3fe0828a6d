"""The layer: router, dispatch, this rank's experts, combine."""

from __future__ import annotations

import dataclasses
import time
import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 (torch's own convention)
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh

from fanfold import functional
from fanfold.errors import ArgumentError
from fanfold.expert_parallel import ExpertParallel
from fanfold.formats import dequantize
from fanfold.geometry import check_integer
from fanfold.nn.router import (
    MoEOptions,
    Router,
    SeededLinear,
    SharedExpert,
    apply_linear,
    seeded_normal,
)
from fanfold.nn.sharding import (
    ShardedExperts,
    agree_on_layer,
    copy_whole,
    local_part,
    open_mesh,
    parameter_device,
)
from fanfold.nn.statistics import MoEStatistics
from fanfold.received import Received
from fanfold.refusal import Refusing

__all__ = ["MoE"]

MOST_WIDTH = 2**31 - 1
DEFAULTS = MoEOptions()


class MoE(ShardedExperts):
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
        device: of the parameters; ``"meta"`` leaves them without values until ``to_empty`` and
            :meth:`reset_parameters`. If None, PyTorch's default device if one is set, else the
            device where expert_parallel computes.
        device_mesh: over which the experts are spread: its last dimension is the group of
            expert_parallel, in the same order. A dimension before it has replicas of the experts.
            If None, one is made of the group.

    Construction is collective. Parameters of the routed experts (``w_in [num_experts,
    2 * intermediate, width]``, gate above up, and ``w_out [num_experts, width, intermediate]``) are
    DTensors of which each rank holds its E_l experts; without a torch.distributed group they are
    plain tensors of the local experts. They carry the attribute ``expert_parallel = True``. All
    other parameters are replicated: each rank has a copy, which starts equal, as ``options.seed``
    is, and stays so if every rank's optimizer sees averaged gradients. If one rank holds all
    experts, and without ``device_mesh``, their parameters are plain and replicated as well.
    :func:`fanfold.nn.average_gradients` averages them, or DDP or FSDP2 after
    :func:`fanfold.nn.prepare_data_parallel`.

    Attributes:
        balance_loss: of the latest forward pass; add it to the loss. A pass inside a backward pass
            (activation checkpointing computes it again) puts its own here for as long as the output
            of that pass is part of a graph.
        statistics: rows, bytes and times since the last ``statistics.reset()``.

    Raises:
        ArgumentError: a size that is out of bounds or is not the ExpertParallel's, or ranks that
            disagree about one or about an option; or a mesh that is not the group's.
        FanfoldError: another rank refused.
    """

    def __init__(
        self,
        hidden: int,
        intermediate: int,
        num_experts: int,
        top_k: int,
        *,
        expert_parallel: ExpertParallel,
        options: MoEOptions = DEFAULTS,
        device: torch.device | str | None = None,
        device_mesh: DeviceMesh | None = None,
    ) -> None:
        super().__init__()
        self.hidden, self.intermediate = hidden, intermediate
        self.num_experts, self.top_k, self.options = num_experts, top_k, options
        facts = {"hidden": hidden, "intermediate": intermediate, **dataclasses.asdict(options)}
        error: Exception | None = None
        mesh = None
        try:
            for name in ("hidden", "intermediate"):
                check_integer(name, getattr(self, name), 1, MOST_WIDTH)
            self.expert_parallel = expert_parallel
            place = parameter_device(expert_parallel, device, device_mesh)
            mesh = open_mesh(expert_parallel, place, device_mesh)
        except ArgumentError as refused:
            error = refused
        agree_on_layer(expert_parallel, mesh, facts, error)
        self.mesh, self.expert_ranks = mesh, expert_parallel.ranks
        first = expert_parallel.rank * expert_parallel.experts_per_rank
        self.local_experts = range(first, first + expert_parallel.experts_per_rank)
        self._balance_loss = torch.zeros((), dtype=torch.float32, device="cpu")
        self._balance_loss_again: Callable[[], torch.Tensor | None] = _nothing
        rows = torch.zeros(len(self.local_experts), dtype=torch.int64, device="cpu")
        self.statistics = MoEStatistics(expert_rows=rows)
        self._make_parameters(place)
        if place.type != "meta":
            self.reset_parameters()

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
            ArgumentError: ``x`` has another width or dtype; the other ranks raise PeerRefused, and
                the layer stays usable.
            ArgumentError, PeerRefused, PeerTimeout, UsageError: as ``ExpertParallel.dispatch``.
            UsageError: DDP wraps the layer, but nobody prepared it.
        """
        self._check_input(x)
        tokens = x.reshape(-1, self.hidden)
        indices, weights, balance_loss = self.router(tokens)
        rows = tokens if self.latent_in is None else apply_linear(self.latent_in, tokens)
        routed = self._routed(rows.to(torch.bfloat16).contiguous(), indices, weights)
        self._keep_balance_loss(balance_loss, routed)
        if self.latent_out is not None:
            routed = apply_linear(self.latent_out, routed)
        out = routed.to(x.dtype)
        if self.shared is not None:
            out = out + self.shared(tokens).to(x.dtype)
        return out.reshape(x.shape)

    def _check_input(self, x: object) -> None:
        """Refuses ``x`` on all ranks if it is no batch of tokens."""
        if not isinstance(x, torch.Tensor):
            error = ArgumentError("x", f"a {type(x).__name__}", "a tensor")
        elif x.dim() == 0 or x.shape[-1] != self.hidden:
            error = ArgumentError("x.shape", list(x.shape), f"[..., {self.hidden}], [..., hidden]")
        elif not x.is_floating_point():
            error = ArgumentError("x.dtype", x.dtype, "a floating-point dtype")
        else:
            return
        with Refusing(_refuse_dispatch(self.expert_parallel)):
            raise error

    def _keep_balance_loss(self, loss: torch.Tensor, routed: torch.Tensor) -> None:
        """Makes ``loss`` the attribute, not to outlive the graph of ``routed`` in a backward pass.

        What a checkpoint computes again is never run backward itself: a loss kept here would hold
        all that was computed before it, of every layer, until the layer's next pass."""
        if torch._C._current_graph_task_id() == -1 or routed.grad_fn is None:
            self._balance_loss, self._balance_loss_again = loss, _nothing
            return
        routed.grad_fn.metadata["fanfold.balance_loss"] = loss  # type: ignore[index]
        self._balance_loss_again = weakref.ref(loss)

    def _routed(
        self, rows: torch.Tensor, indices: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        weights_here = self.local_weights()
        meter = _Meter(self.expert_parallel, self.statistics, indices)
        tokens, row_weights, received = functional.dispatch(meter, rows, indices, weights)
        self.statistics.tokens += rows.shape[0]
        counts = received.tokens_per_expert
        # On the rows' device, as reading them would wait for it.
        self.statistics.expert_rows = self.statistics.expert_rows.to(counts.device) + counts
        y: torch.Tensor = _Experts.apply(  # type: ignore[no-untyped-call]
            tokens, *weights_here, received, torch.is_grad_enabled()
        )
        return functional.combine(meter, y, received, row_weights)

    def expert_names(self) -> tuple[str, ...]:
        """Names of the routed experts' parameters."""
        return ("w_in", "w_out")

    def _make_parameters(self, device: torch.device) -> None:
        options, hidden, width = self.options, self.hidden, self.width
        local, dtype = len(self.local_experts), options.dtype
        self.router = Router(hidden, self.num_experts, self.top_k, options, device)
        self.w_in = self.make_expert_parameter((local, 2 * self.intermediate, width), dtype, device)
        self.w_out = self.make_expert_parameter((local, width, self.intermediate), dtype, device)
        self.latent_in: SeededLinear | None = None
        self.latent_out: SeededLinear | None = None
        self.shared: SharedExpert | None = None
        if options.latent is not None:
            self.latent_in = SeededLinear(hidden, width, options, "latent_in", device)
            self.latent_out = SeededLinear(width, hidden, options, "latent_out", device)
        if options.shared_intermediate:
            self.shared = SharedExpert(hidden, options, device)

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Sets all parameters to the values of ``options.seed``, after ``to_empty`` for instance.
        Every rank sets what it holds; nothing is sent."""
        for name, parameter in zip(self.expert_names(), self.expert_parameters(), strict=True):
            shape, std = tuple(parameter.shape[1:]), parameter.shape[-1] ** -0.5
            values = [
                seeded_normal(shape, std, self.options.seed, f"{name} {expert}", parameter.dtype)
                for expert in self.local_experts
            ]
            if self.mesh is None:
                copy_whole(parameter, torch.stack(values))
            else:
                local_part(parameter).copy_(torch.stack(values))
        for part in self.children():
            part.reset_parameters()  # type: ignore[operator]

    def __deepcopy__(self, memo: dict[int, Any]) -> MoE:
        """A layer with parameters of its own and the same ExpertParallel."""
        memo[id(self._balance_loss)] = self._balance_loss.detach().clone()
        copied: MoE = self.deep_copied(memo, {"expert_parallel": self.expert_parallel})
        copied._balance_loss_again = _nothing
        return copied

    def extra_repr(self) -> str:
        """The sizes, for ``print``."""
        return (
            f"hidden={self.hidden}, intermediate={self.intermediate}, "
            f"num_experts={self.num_experts}, top_k={self.top_k}, "
            f"local_experts={self.local_experts.start}..{self.local_experts.stop - 1}"
        )


class _Experts(torch.autograd.Function):
    """The local SwiGLU experts over the received rows, each on its slice of the one allocation.

    Written out, because autograd would cut the rows into tensors of their own and join them again.
    """

    @staticmethod
    def forward(
        ctx: Any,
        tokens: torch.Tensor,
        w_in: torch.Tensor,
        w_out: torch.Tensor,
        received: Received,
        train: bool,
    ) -> torch.Tensor:
        y = tokens.new_empty(tokens.shape, dtype=torch.bfloat16)
        train = train and any(ctx.needs_input_grad)
        projected = w_in.new_empty((tokens.shape[0], w_in.shape[1])) if train else None
        # Read once: on a GPU each time would wait for it. And nothing of `received` but this is
        # kept, as its rows are the checkpointing's to keep or to let go.
        ctx.places = received.places()
        for expert, place in enumerate(ctx.places):
            rows = _in_dtype(received, expert, place, w_in.dtype)
            hidden = rows @ w_in[expert].T
            if projected is not None:
                _rows_at(place, projected).copy_(hidden)
            gate, up = hidden.chunk(2, dim=-1)
            _rows_at(place, y).copy_((F.silu(gate) * up) @ w_out[expert].T)
        ctx.save_for_backward(tokens, w_in, w_out, projected)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_y: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        tokens, w_in, w_out, projected = ctx.saved_tensors
        # Padding rows are sent to nobody, so nothing reads their gradient.
        grad_tokens = torch.empty_like(tokens)
        grad_in, grad_out = torch.empty_like(w_in), torch.empty_like(w_out)
        for expert, place in enumerate(ctx.places):
            rows, grad, hidden = (
                _rows_at(place, tensor).to(w_in.dtype) for tensor in (tokens, grad_y, projected)
            )
            gate, up = hidden.chunk(2, dim=-1)
            sigmoid = gate.sigmoid()
            silu = gate * sigmoid
            torch.mm(grad.T, silu * up, out=grad_out[expert])
            grad_middle = grad @ w_out[expert]
            grad_gate = grad_middle * up * (sigmoid + silu * (1 - sigmoid))
            grad_hidden = torch.cat([grad_gate, grad_middle * silu], dim=-1)
            torch.mm(grad_hidden.T, rows, out=grad_in[expert])
            _rows_at(place, grad_tokens).copy_(grad_hidden @ w_in[expert])
        return grad_tokens, grad_in, grad_out, None, None


def _rows_at(place: tuple[int, int], tensor: torch.Tensor) -> torch.Tensor:
    """A view of the rows of one local expert, whose place ``Received.places`` says."""
    begin, count = place
    return tensor.flatten(0, tensor.dim() - 2)[begin : begin + count]


def _in_dtype(
    received: Received, expert: int, place: tuple[int, int], dtype: torch.dtype
) -> torch.Tensor:
    """The rows of one local expert in the dtype of the weights."""
    rows = _rows_at(place, received.tokens)
    if received.scales is None:
        return rows.to(dtype)
    if received.scales.dim() == 3:  # low latency: packed scales have no flat view
        scales = received.scales[expert, : rows.shape[0]]
    else:
        scales = _rows_at(place, received.scales)
    return dequantize(rows, scales).to(dtype)


class _Meter:
    """An ExpertParallel that adds its times and bytes to a layer's statistics."""

    def __init__(
        self, ep: ExpertParallel, statistics: MoEStatistics, topk_idx: torch.Tensor
    ) -> None:
        self._ep, self._statistics = ep, statistics
        self._remote_rows = _remote_rows(ep, topk_idx)

    @property
    def mode(self) -> str:
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


def _refuse_dispatch(ep: ExpertParallel) -> Callable[[BaseException], None]:
    """What makes a dispatch that this rank cannot take part in fail on all ranks."""
    mode = ep._low_latency if ep.mode == "low_latency" else ep._high_throughput._mode
    return mode.refuse_dispatch


def _nothing() -> None:
    """What a weak reference to nothing would return."""
