"""The layer: router, dispatch, this rank's experts, combine; or the latter three by a FusedMoE."""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable

import torch
from torch.compiler import is_dynamo_compiling
from torch.distributed.device_mesh import DeviceMesh

from fanfold import functional
from fanfold.copying import not_copied
from fanfold.errors import ArgumentError, UsageError
from fanfold.fused_moe import FusedMoE
from fanfold.geometry import check_activations, check_integer
from fanfold.nn.experts import swiglu_experts
from fanfold.nn.fused import FusedExperts
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
    AnyDispatcher,
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
            infers, a :class:`fanfold.LowLatency` infers, and so does a :class:`fanfold.FusedMoE`
            of this ``intermediate`` and without a clamp, which computes the routed experts in FP8,
            too. Assign another one to ``dispatcher`` to change over. The layer does not close it.
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

    Through a FusedMoE the layer multiplies with FP8 copies of ``w_in`` and ``w_out``, which are no
    part of the ``state_dict``. A pass makes them if there are none, and again when PyTorch knows of
    a change of the parameters; see :meth:`quantize_experts`.

        >>> sizes = dict(num_experts=8, top_k=2, hidden=128, max_tokens=16)
        >>> with fanfold.HighThroughput(**sizes) as ep:
        ...     layer = fanfold.nn.MoE(128, 256, num_experts=8, top_k=2, dispatcher=ep)
        >>> with fanfold.FusedMoE(**sizes, intermediate=256) as fused, torch.no_grad():
        ...     layer.dispatcher = fused
        ...     layer(torch.randn((2, 5, 128), device=fused.device)).shape
        torch.Size([2, 5, 128])

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
        dispatcher: AnyDispatcher,
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

    def _make(self, ep: AnyDispatcher, mesh: DeviceMesh | None, device: torch.device) -> None:
        """All but what ranks must agree about."""
        for name in ("hidden", "intermediate"):
            check_integer(name, getattr(self, name), 1, MOST_COLUMNS)
        rows = torch.zeros(ep.experts_per_rank, dtype=torch.int64, device="cpu")
        self.statistics = MoEStatistics(expert_rows=rows)
        self._fused = FusedExperts(self.statistics)
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
    def dispatcher(self) -> AnyDispatcher:
        """What moves the tokens."""
        return self._dispatcher

    @dispatcher.setter
    def dispatcher(self, ep: AnyDispatcher) -> None:
        wanted: dict[str, int | None]
        wanted = {"hidden": self.width, "num_experts": self.num_experts, "top_k": self.top_k}
        if isinstance(ep, FusedMoE):
            wanted |= {"intermediate": self.intermediate, "activation_clamp": None}
        local = getattr(self, "local_experts", None)
        if local is not None:
            wanted |= {"rank": local.start // len(local), "experts_per_rank": len(local)}
        for name, value in wanted.items():
            if getattr(ep, name) != value:
                raise ArgumentError(
                    f"dispatcher.{name}", getattr(ep, name), f"{value}, as the layer's is"
                )
        meters: Meters | None = None
        if isinstance(ep, FusedMoE):
            self._fused.attach(ep)
        else:
            meters = Meters(ep, self.statistics)
        self._dispatcher, self._meters = ep, meters

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
            PeerRefused, PeerTimeout, UsageError: as ``HighThroughput.dispatch``, or as
                ``FusedMoE.forward``.
            UsageError: DDP wraps the layer, but nobody prepared it; or a gradient is wanted, and
                the dispatcher is a LowLatency or a FusedMoE.
        """
        ep = self.dispatcher
        with Refusing(ep.refuse if isinstance(ep, FusedMoE) else ep.refuse_dispatch):
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
        ep = self.dispatcher
        if isinstance(ep, FusedMoE):
            if is_dynamo_compiling():
                from fanfold.operators.traced import between_graphs

                fused: torch.Tensor = between_graphs(
                    self._fused.run, ep, self, rows, (indices, weights)
                )
                return fused
            return self._fused.run(ep, self, rows, (indices, weights))
        assert self._meters is not None
        w_in, w_out = self.local_weights()
        meter = self._meters.for_routing(indices)
        tokens, row_weights, received = functional.dispatch(meter, rows, indices, weights)
        y = swiglu_experts(tokens, w_in, w_out, received)
        return functional.combine(meter, y, received, row_weights)

    def quantize_experts(self) -> None:
        """Makes the FP8 copies of ``w_in`` and ``w_out`` that passes through a FusedMoE use. Not
        collective; on a GPU the CPU waits.

        Passes do it by themselves: the first one after a FusedMoE was assigned to ``dispatcher`` or
        after ``train()`` or ``eval()`` changed the mode, and after changes that PyTorch counts:
        parameters that are written in place, assigned, loaded or moved, and steps of optimizers.
        Call it

        - after changes that it does not count: through ``parameter.data``, by a collective, by
          ``torch._foreach_*`` on DTensors, by the replay of a CUDA graph;
        - before a CUDA graph that holds the layer is captured, and, as a graph only reads the
          copies, after every change before it is replayed. They stay in their memory, so no new
          capture is needed. Call it on the stream of the replays;
        - on all ranks before the first pass, if ranks are threads that share a GPU: loading its
          kernels may have to wait for another rank's.

        Raises:
            ArgumentError: weights are not finite.
            UsageError: the dispatcher is no FusedMoE, or a CUDA graph is being captured.
        """
        if not isinstance(self.dispatcher, FusedMoE):
            raise UsageError(
                f"layer.dispatcher is a {type(self.dispatcher).__name__}, and only passes through "
                "a FusedMoE use FP8 copies of the experts; assign one first"
            )
        self._fused.copy(self)

    def train(self, mode: bool = True) -> MoE:
        """See ``torch.nn.Module``. A change of the mode has FP8 copies made again."""
        if mode != self.training:
            self._fused.forget()
        return super().train(mode)

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
