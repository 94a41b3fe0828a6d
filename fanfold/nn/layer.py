"""The layer: router, dispatch, this rank's experts, combine."""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable

import torch
from torch.compiler import is_dynamo_compiling
from torch.distributed.device_mesh import DeviceMesh

from fanfold import functional
from fanfold.base_dispatcher import BaseDispatcher
from fanfold.copying import not_copied
from fanfold.errors import ArgumentError
from fanfold.geometry import check_activations, check_integer
from fanfold.nn.experts import swiglu_experts
from fanfold.nn.meters import Meters
from fanfold.nn.router import (
    MOST_COLUMNS,
    MoEOptions,
    Router,
    SeededLinear,
    SharedExpert,
    apply_linear,
)
from fanfold.nn.seeding import seeded_normal
from fanfold.nn.sharding import (
    ShardedExperts,
    agree_on_layer,
    copy_whole,
    local_part,
    open_mesh,
    parameter_device,
)
from fanfold.nn.statistics import MoEStatistics
from fanfold.refusal import Refusing
from fanfold.representation import details, module_repr

__all__ = ["MoE"]

DEFAULTS = MoEOptions()


@not_copied(
    why="its dispatcher holds memory that the ranks share",
    instead="Save layer.state_dict(), and load it into another layer made with the same arguments.",
)
class MoE(ShardedExperts):
    """Router, dispatch, this rank's SwiGLU experts, combine; optionally a shared expert.

    ``out = sum over a token's experts e of w_e * W_out_e (silu(W_gate_e x) * W_up_e x)``, plus the
    shared expert's output. Rows travel as bfloat16 (or as the dispatcher says), so the routed
    part carries bfloat16's rounding: see :mod:`fanfold.functional`.

        >>> ep = fanfold.HighThroughput(num_experts=8, top_k=2, hidden=64, max_tokens=16)
        >>> layer = fanfold.nn.MoE(64, 128, num_experts=8, top_k=2, dispatcher=ep)
        >>> out = layer(torch.randn((2, 5, 64), device=ep.device))
        >>> (out.square().mean() + layer.balance_loss).backward()
        >>> out.shape
        torch.Size([2, 5, 64])
        >>> ep.close()

    Args:
        hidden: columns of a token.
        intermediate: width of one expert.
        num_experts: routed experts of all ranks.
        top_k: experts per token.
        dispatcher: what moves the tokens; layers may share one. Its hidden is this layer's, or the
            layer's latent width if there is one. A :class:`fanfold.HighThroughput` trains and
            infers, a :class:`fanfold.LowLatency` infers: assign another one to ``dispatcher`` to
            change over. The layer does not close it.
        options: everything else.
        device: of the parameters; ``"meta"`` leaves them without values until ``to_empty`` and
            :meth:`reset_parameters`. If None, PyTorch's default device if one is set, else the
            device where the dispatcher works.
        device_mesh: over which the experts are spread: its last dimension is the group of
            the dispatcher, in the same order. A dimension before it has replicas of the experts.
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
        ArgumentError: a size that is out of bounds or is not the dispatcher's, or ranks that
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
        dispatcher: BaseDispatcher,
        options: MoEOptions = DEFAULTS,
        device: torch.device | str | None = None,
        device_mesh: DeviceMesh | None = None,
    ) -> None:
        super().__init__()
        self.hidden, self.intermediate = hidden, intermediate
        self.num_experts, self.top_k, self.options = num_experts, top_k, options
        values = {"hidden": hidden, "intermediate": intermediate, **dataclasses.asdict(options)}
        error: Exception | None = None
        try:
            place = parameter_device(dispatcher, device, device_mesh)
            mesh = open_mesh(dispatcher, place, device_mesh)
            self._make(dispatcher, mesh, place)
        except Exception as failure:  # whatever it is, the other ranks must hear of it
            error = failure
        agree_on_layer(dispatcher, device_mesh, values, error)

    def _make(self, ep: BaseDispatcher, mesh: DeviceMesh | None, device: torch.device) -> None:
        """All but what ranks must agree about."""
        for name in ("hidden", "intermediate"):
            check_integer(name, getattr(self, name), 1, MOST_COLUMNS)
        rows = torch.zeros(ep.experts_per_rank, dtype=torch.int64, device="cpu")
        self.statistics = MoEStatistics(expert_rows=rows)
        self.dispatcher = ep
        self.mesh, self.expert_ranks = mesh, ep.ranks
        first = ep.rank * ep.experts_per_rank
        self.local_experts = range(first, first + ep.experts_per_rank)
        self._balance_loss = torch.zeros((), dtype=torch.float32, device="cpu")
        self._balance_loss_again: Callable[[], torch.Tensor | None] = _nothing
        self._make_parameters(device)
        if device.type != "meta":
            self.reset_parameters()

    @property
    def width(self) -> int:
        """Columns of the rows that travel: latent, or hidden without one."""
        return self.hidden if self.options.latent is None else self.options.latent

    @property
    def dispatcher(self) -> BaseDispatcher:
        """What moves the tokens."""
        return self._dispatcher

    @dispatcher.setter
    def dispatcher(self, ep: BaseDispatcher) -> None:
        wanted = {"hidden": self.width, "num_experts": self.num_experts, "top_k": self.top_k}
        local = getattr(self, "local_experts", None)
        if local is not None:
            wanted |= {"rank": local.start // len(local), "experts_per_rank": len(local)}
        for name, value in wanted.items():
            if getattr(ep, name) != value:
                raise ArgumentError(
                    f"dispatcher.{name}", getattr(ep, name), f"{value}, as the layer's is"
                )
        self._dispatcher = ep
        self._meters = Meters(ep, self.statistics)

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
            ArgumentError: ``x`` has another last dimension or no floating dtype; the call is
                aborted on all ranks.
            PeerRefused, PeerTimeout, UsageError: as ``HighThroughput.dispatch``.
            UsageError: DDP wraps the layer, but nobody prepared it.
        """
        ep = self.dispatcher
        with Refusing(ep.refuse_dispatch):
            check_activations("x", x, self.hidden, ep.max_tokens, self.w_in.device)
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
        w_in, w_out = self.local_weights()
        meter = self._meters.for_routing(indices)
        tokens, row_weights, received = functional.dispatch(meter, rows, indices, weights)
        y = swiglu_experts(tokens, w_in, w_out, received)
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

    def extra_repr(self) -> str:
        """The sizes, and what moves the tokens, for ``print``."""
        names = ("hidden", "intermediate", "num_experts", "top_k", "local_experts")
        return details(self, **{name: name for name in (*names, "dispatcher")})

    __repr__ = module_repr


def _nothing() -> None:
    """What a weak reference to nothing would return."""
