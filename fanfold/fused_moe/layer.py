"""The fused MoE layer; see :class:`FusedMoE`."""

from __future__ import annotations

from types import TracebackType
from typing import Literal

import torch

from fanfold.backends.choose import BackendChoice, choose
from fanfold.backends.ranges import ranged_call
from fanfold.base_dispatcher import GroupLike, HasGeometry, checked_config
from fanfold.config import Config
from fanfold.copying import not_copied
from fanfold.errors import ArgumentError, UsageError
from fanfold.forks import Owner
from fanfold.fused_moe.call import CallChecks, FusedCall, Tokens, checked_clamp
from fanfold.fused_moe.cuda import (
    MOST_COLUMNS,
    MOST_EXPERTS,
    MOST_RANKS,
    MOST_ROWS,
    CudaLayer,
    most_rows,
)
from fanfold.fused_moe.host import HostLayer
from fanfold.fused_moe.tuning import FusedMoeTuning
from fanfold.fused_moe.weights import ExpertWeights, check_columns
from fanfold.geometry import MAX_HIDDEN, MAX_TOKENS, Geometry, check_integer
from fanfold.group import agree, as_group, together
from fanfold.refusal import Refusing
from fanfold.representation import described, worded

__all__ = ["FusedMoE"]

_MOST_INTERMEDIATE = 1 << 20


@not_copied(
    why="it holds memory that the ranks of its group share",
    instead="Make one in each process with the same arguments; several layers may use one.",
)
class FusedMoE(HasGeometry):
    """A whole FP8 MoE layer for inference: dispatch, both GEMMs with SwiGLU, and combine.

    If each rank has a GPU of its own as current CUDA device, of compute capability 9.0 and on one
    host, a call is one kernel on each, which the CPU never waits for and CUDA graphs can hold.
    Otherwise it runs on the CPU and takes CPU tensors. Construction is collective. Layers of one
    geometry can share one object, as each call is given the weights.

        >>> import fanfold, torch
        >>> from fanfold.fused_moe import ExpertWeights
        >>> sizes = dict(num_experts=4, top_k=2, hidden=128, intermediate=256, max_tokens=16)
        >>> with fanfold.FusedMoE(**sizes) as moe:
        ...     gate_up = torch.randn(4, 2 * 256, 128, device=moe.device).bfloat16() / 11
        ...     down = torch.randn(4, 128, 256, device=moe.device).bfloat16() / 16
        ...     weights = ExpertWeights.quantize(gate_up, down)  # of this rank's experts
        ...     x = torch.randn(16, 128, device=moe.device).bfloat16()
        ...     topk_weights, topk_idx = torch.rand(16, 4, device=moe.device).topk(2)
        ...     y = moe.forward(x, topk_idx, topk_weights, weights)
        >>> y.shape, y.dtype
        (torch.Size([16, 128]), torch.bfloat16)

    Args:
        group: a ``torch.distributed`` group of any backend; the default group if None, and this
            process alone if there is none.
        num_experts: experts of all ranks; a multiple of the ranks, up to 32767. Rank r holds
            experts ``r * num_experts / ranks`` onwards.
        top_k: experts per token, 1 to 32.
        hidden: columns of a token, a multiple of 128, up to 65536.
        intermediate: columns between the GEMMs, a multiple of 128.
        max_tokens: most tokens one rank passes to one call, up to ``2**24 / top_k``.
        activation_clamp: SwiGLU limits the gate to at most this, and the up projection to this on
            both sides; None for no limit. Calls of a layer that has one may have another, so
            ``math.inf`` is for layers of which some calls will have one.
        config: the settings; resolved from the environment if None. ``backend`` decides where
            calls run: ``"auto"`` takes the GPU where the kernel serves the layer. With
            ``fast_accumulation`` the GPU takes 3 to 8% less time with thousands of tokens, and
            sums of many terms of one sign come out too small.

    Attributes:
        config: the settings.
        geometry: the sizes.
        intermediate, activation_clamp: as given.

    It cannot be copied or pickled (CopyError).

    Raises:
        ArgumentError: a size out of bounds, or ranks that disagree about one (naming both values);
            on all ranks alike.
        UnavailableError: the ranks cannot share memory, or ``config.backend`` is ``"cuda"`` and the
            kernel does not serve this layer; says why.
    """

    def __init__(
        self,
        group: GroupLike = None,
        *,
        num_experts: int,
        top_k: int,
        hidden: int,
        intermediate: int,
        max_tokens: int,
        activation_clamp: float | None = None,
        config: Config | None = None,
    ) -> None:
        self._closed = False
        self._owner = Owner("this FusedMoE")
        self._group = as_group(group)
        with together(self._group) as ranks:
            self.config = checked_config(config)
            self.geometry = Geometry(ranks.size, num_experts, top_k, hidden, max_tokens)
            check_columns("hidden", hidden, MAX_HIDDEN)
            check_columns("intermediate", intermediate, _MOST_INTERMEDIATE)
            check_integer("max_tokens", max_tokens, 0, MAX_TOKENS // top_k)
            self.intermediate, self.activation_clamp = intermediate, checked_clamp(activation_clamp)
            signature: dict[str, object] = {
                "mode": "fused_moe",
                "num_experts": num_experts,
                "top_k": top_k,
                "hidden": hidden,
                "intermediate": intermediate,
                "max_tokens": max_tokens,
                "activation_clamp": self.activation_clamp,
                "fast_accumulation": self.config.fast_accumulation,
            }
            agree(ranks, signature)
            self._choice = self._chosen(choose(ranks, self.config, "high_throughput"))
        clamps = self.activation_clamp is not None
        self._layer: HostLayer | CudaLayer
        if self._choice.backend == "cuda":
            self._layer = CudaLayer(self._group, self.geometry, intermediate, clamps, self.config)
        else:
            self._layer = HostLayer(group, self.geometry, self.config)
        self._run = ranged_call(self._layer.run, "fanfold::fused_moe::layer", self.config)
        self._checks = CallChecks(
            self.geometry,
            intermediate,
            MOST_COLUMNS if self.backend == "cuda" else _MOST_INTERMEDIATE,
            self.device,
            self._choice.check_devices,
        )

    def _chosen(self, choice: BackendChoice) -> BackendChoice:
        """``choice``, or the CPU where the kernel does not serve this layer.

        Raises:
            UnavailableError: ``config.backend`` is ``"cuda"``.
        """
        obstacle = None
        geometry = self.geometry
        if choice.backend == "host":
            return choice
        if geometry.ranks > MOST_RANKS:
            obstacle = f"the kernel of FusedMoE serves up to {MOST_RANKS} ranks"
        elif choice.capability[0] != 9:
            found = ".".join(map(str, choice.capability))
            obstacle = (
                f"the kernel of FusedMoE needs compute capability 9.0, and this GPU has {found}"
            )
        elif max(geometry.hidden, self.intermediate) > MOST_COLUMNS:
            obstacle = f"the kernel of FusedMoE takes hidden and intermediate up to {MOST_COLUMNS}"
        elif geometry.num_experts > MOST_EXPERTS:
            obstacle = f"the kernel of FusedMoE takes up to {MOST_EXPERTS} experts"
        elif (rows := most_rows(geometry, self.intermediate)) > MOST_ROWS:
            obstacle = (
                f"the kernel of FusedMoE takes up to {MOST_ROWS} rows, and {rows} may come (ranks "
                "* max_tokens * top_k, and blocks of 128 for each expert)"
            )
        return choice if obstacle is None else choice.on_host(obstacle, self.config)

    # ---- sizes ----------------------------------------------------------------------------------

    @property
    def device(self) -> torch.device:
        """Where tensors must be."""
        return self._choice.device

    @property
    def backend(self) -> Literal["host", "cuda"]:
        """Where calls run: ``"host"``, the CPU, or ``"cuda"``."""
        return self._choice.backend

    @property
    def tuning(self) -> FusedMoeTuning | None:
        """When the kernel changes its form: what ``config.swap_ab_rows`` and ``group_rows`` ask
        for, else what was measured. Rank 0's. None on the CPU, which has one form."""
        return self._layer.tuning if isinstance(self._layer, CudaLayer) else None

    @property
    def rank(self) -> int:
        """This rank's number in the group."""
        return self._layer.rank

    # ---- the call -------------------------------------------------------------------------------

    @torch.no_grad()
    def forward(
        self,
        x: Tokens,
        topk_idx: torch.Tensor,
        topk_weights: torch.Tensor,
        weights: ExpertWeights,
        *,
        shared_expert: ExpertWeights | None = None,
        statistics: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
        activation_clamp: float | None = None,
    ) -> torch.Tensor:
        """Sends tokens to their experts and returns the sums of the results. Collective.

        Each slot, a top-k entry that is not -1, gets the result of one expert in bfloat16.
        A token's slots are summed in FP32 in their order, then the shared expert's result is added,
        and the sum is rounded to bfloat16. ``docs/fused_moe.md`` has the arithmetic. The same input
        gives the same bits, on any number of ranks, but with ``fast_accumulation``: there the bits
        depend on whether the call has so few tokens that it is swapped (:attr:`tuning`). No
        gradients are recorded.

        Args:
            x: ``[n, hidden]`` bfloat16, contiguous, 0 <= n <= max_tokens; n may differ between
                ranks. Quantised here by :func:`fanfold.formats.quantize`. Or a pair of values
                ``[n, hidden]`` float8_e4m3fn and scales ``[n, hidden / 128]`` float32.
            topk_idx: ``[n, top_k]`` int64, -1 for none. An expert that a token names twice counts
                twice.
            topk_weights: ``[n, top_k]`` float32; not read where topk_idx is -1.
            weights: of this rank's experts.
            shared_expert: weights of one expert that gets every token of this rank, with weight 1;
                its intermediate size may be another, on GPUs up to 16384. Ranks need not agree
                about it.
            statistics: ``[experts_per_rank]`` int32, to which the number of received slots of each
                local expert is added when the call succeeds (and, on GPUs, when it is given up for
                a rank that is late).
            out: ``[n, hidden]`` bfloat16 to write to; may be ``x``. Made if None.
            activation_clamp: in place of the layer's, for this rank's experts and the shared one: a
                positive number, or ``math.inf`` for no limit. None for the layer's; a layer without
                one takes no other.

        Returns:
            ``[n, hidden]`` bfloat16; 0 for a token without experts.

        On a GPU all calls of the process on it follow each other, whatever streams they are made
        on; replays of different graphs that hold some must not run at the same time, as one call
        takes all SMs. What only the GPU can find, an entry of topk_idx out of range, is raised by a
        later call after it has been enqueued, or by :meth:`check`.

        Raises:
            ArgumentError: bad input: nothing was sent, the call is aborted on all ranks (the others
                raise PeerRefused), and this object stays usable.
            PeerRefused: another rank refused its input; this object stays usable.
            PeerTimeout: a peer did not arrive in time; close this object.
            UsageError: closed, or failed earlier; or a shared expert has a new size, and a CUDA
                graph is being captured, or ranks are threads: see :meth:`prepare_shared_expert`.
        """
        self._check_open()
        with Refusing(self._layer.refuse):
            call = FusedCall(
                x, topk_idx, topk_weights, weights, shared_expert, statistics, out,
                self._clamp(activation_clamp),
            )  # fmt: skip
            self._checks.check(call)
        return self._run(call)

    def refuse(self, error: BaseException) -> None:
        """Aborts the next call on all ranks in place of this rank's :meth:`forward`, because of
        ``error``, found by a layer above. The others raise PeerRefused."""
        self._check_open()
        self._layer.refuse(error)

    def prepare_shared_expert(self, intermediate: int) -> None:
        """Loads what calls with a shared expert of a size need. Collective, as construction is.

        The first such call does it otherwise, but not while a CUDA graph is captured, nor on ranks
        that are threads.

        Args:
            intermediate: columns between the GEMMs of the shared expert, the same on all ranks.

        Raises:
            ArgumentError: no multiple of 128, more than 16384 on GPUs, or ranks that disagree; on
                all ranks alike.
        """
        self._check_open()
        with together(self._group):
            check_columns("intermediate", intermediate, self._checks.most_shared)
        self._layer.prepare_shared_expert(intermediate)

    def check(self) -> None:
        """Raises what earlier calls have found wrong since; does not wait for them."""
        self._check_open()
        self._layer.check()

    def close(self) -> None:
        """Releases the memory. Not collective; harmless when repeated."""
        self._closed = True
        self._layer.close()

    def __enter__(self) -> FusedMoE:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        names = ("ranks", "num_experts", "top_k", "hidden", "intermediate", "max_tokens", "backend")
        state = "closed" if getattr(self, "_closed", False) else ""
        return described(self, state, rank="_layer.rank", **{name: name for name in names})

    # ---- checks ---------------------------------------------------------------------------------

    def _clamp(self, asked: object) -> float | None:
        """Of one call; None for no limit."""
        if asked is None:
            return self.activation_clamp
        if self.activation_clamp is None:
            bound = "None: this layer was made without a limit, which no call can set"
            raise ArgumentError("activation_clamp", worded(asked), bound)
        return checked_clamp(asked)

    def _check_open(self) -> None:
        if self._closed:
            raise UsageError("this FusedMoE is closed; make a new one")
        self._owner.check()
