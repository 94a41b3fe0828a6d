"""The fused MoE layer; see :class:`FusedMoE`."""

from __future__ import annotations

import dataclasses
import math
from types import TracebackType
from typing import Literal

import torch

from fanfold.base_dispatcher import GroupLike, HasGeometry, checked_config
from fanfold.config import Config
from fanfold.copying import not_copied
from fanfold.errors import ArgumentError, UnavailableError, UsageError
from fanfold.forks import Owner
from fanfold.formats import BLOCK, quantize
from fanfold.fused_moe.experts import grouped_experts
from fanfold.fused_moe.weights import ExpertWeights, check_columns
from fanfold.geometry import (
    MAX_HIDDEN,
    MAX_TOKENS,
    Geometry,
    check_integer,
    check_tensor,
    check_topk,
)
from fanfold.group import agree, as_group, together
from fanfold.high_throughput import HighThroughput
from fanfold.refusal import Refusing
from fanfold.representation import described, worded

__all__ = ["FusedMoE"]

_CPU = torch.device("cpu")
_INSTEAD = (
    "the kernel of FusedMoE for GPUs is not built yet; copy to the CPU and back, or use "
    "HighThroughput with the grouped GEMMs of fanfold.deep_gemm on the GPU"
)
_MOST_INTERMEDIATE = 1 << 20

Tokens = torch.Tensor | tuple[torch.Tensor, torch.Tensor]


@not_copied(
    why="it holds memory that the ranks of its group share",
    instead="Make one in each process with the same arguments; several layers may use one.",
)
class FusedMoE(HasGeometry):
    """A whole FP8 MoE layer for inference: dispatch, both GEMMs with SwiGLU, and combine.

    It runs on the CPU and takes CPU tensors: the kernel for GPUs is not built yet. Construction is
    collective. Layers of one geometry can share one object, as each call is given the weights.

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
            both sides; None for no limit.
        config: the settings; resolved from the environment if None. ``backend`` must not be
            ``"cuda"``.

    Attributes:
        config: the settings.
        geometry: the sizes.
        intermediate, activation_clamp: as given.

    It cannot be copied or pickled (CopyError).

    Raises:
        ArgumentError: a size out of bounds, or ranks that disagree about one (naming both values);
            on all ranks alike.
        UnavailableError: the ranks cannot share memory, or ``config.backend`` is ``"cuda"``.
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
        with together(as_group(group)) as ranks:
            self.config = checked_config(config)
            _check_backend(self.config)
            self.geometry = Geometry(ranks.size, num_experts, top_k, hidden, max_tokens)
            check_columns("hidden", hidden, MAX_HIDDEN)
            check_columns("intermediate", intermediate, _MOST_INTERMEDIATE)
            check_integer("max_tokens", max_tokens, 0, MAX_TOKENS // top_k)
            self.intermediate, self.activation_clamp = intermediate, _checked(activation_clamp)
            signature: dict[str, object] = {
                "mode": "fused_moe",
                "num_experts": num_experts,
                "top_k": top_k,
                "hidden": hidden,
                "intermediate": intermediate,
                "max_tokens": max_tokens,
                "activation_clamp": self.activation_clamp,
            }
            agree(ranks, signature)
        # A row for each (token, slot): the results of slots return one by one, and are summed in
        # the order of slots. Low latency would need memory for all of them on every expert; high
        # throughput streams any number through a little memory.
        self._dispatcher = HighThroughput(
            group,
            num_experts=num_experts,
            top_k=1,
            hidden=hidden,
            max_tokens=max_tokens * top_k,
            dispatch_dtype="fp8",
            config=dataclasses.replace(self.config, backend="host"),
        )

    # ---- sizes ----------------------------------------------------------------------------------

    @property
    def device(self) -> torch.device:
        """Where tensors must be: the CPU."""
        return _CPU

    @property
    def backend(self) -> Literal["host"]:
        """Where calls run: ``"host"``, the CPU."""
        return "host"

    @property
    def rank(self) -> int:
        """This rank's number in the group."""
        return self._dispatcher.rank

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
    ) -> torch.Tensor:
        """Sends tokens to their experts and returns the sums of the results. Collective.

        Each slot, a top-k entry that is not -1, gets the result of one expert in bfloat16.
        A token's slots are summed in FP32 in their order, then the shared expert's result is added,
        and the sum is rounded to bfloat16. ``docs/fused_moe.md`` has the arithmetic. The same input
        gives the same bits, on any number of ranks. No gradients are recorded.

        Args:
            x: ``[n, hidden]`` bfloat16, contiguous, 0 <= n <= max_tokens; n may differ between
                ranks. Quantised here by :func:`fanfold.formats.quantize`. Or a pair of values
                ``[n, hidden]`` float8_e4m3fn and scales ``[n, hidden / 128]`` float32.
            topk_idx: ``[n, top_k]`` int64, -1 for none. An expert that a token names twice counts
                twice.
            topk_weights: ``[n, top_k]`` float32; not read where topk_idx is -1.
            weights: of this rank's experts.
            shared_expert: weights of one expert that gets every token of this rank, with weight 1;
                its intermediate size may be another. Ranks need not agree about it.
            statistics: ``[experts_per_rank]`` int32, to which the number of received slots of each
                local expert is added when the call succeeds.
            out: ``[n, hidden]`` bfloat16 to write to; may be ``x``. Made if None.

        Returns:
            ``[n, hidden]`` bfloat16; 0 for a token without experts.

        Raises:
            ArgumentError: bad input: nothing was sent, the call is aborted on all ranks (the others
                raise PeerRefused), and this object stays usable.
            PeerRefused: another rank refused its input; this object stays usable.
            PeerTimeout: a peer did not arrive in time; close this object.
            UsageError: closed, or failed earlier.
        """
        self._check_open()
        ep = self._dispatcher
        with Refusing(ep.refuse_dispatch):
            values, scales = self._checked_tokens(x)
            tokens = values.shape[0]
            self._check_routing(tokens, topk_idx, topk_weights)
            self._check_weights(weights, shared_expert)
            self._check_outputs(tokens, statistics, out)
            each = self.top_k
            rows = values.view(torch.uint8).repeat_interleave(each, dim=0).view(values.dtype)
            row_scales = scales.repeat_interleave(each, dim=0)
        received = ep.dispatch((rows, row_scales), topk_idx.view(-1, 1), topk_weights.view(-1, 1))
        with Refusing(ep.refuse_combine):
            assert received.scales is not None
            assert received.weights is not None
            y = grouped_experts(
                (received.tokens, received.scales),
                received.weights,
                received.expert_ranges(),
                weights,
                self.activation_clamp,
            )
            shared = self._shared_result((values, scales), shared_expert)
        slots = ep.combine(y, received, weighted=False).view(tokens, each, self.hidden)
        total = torch.zeros((tokens, self.hidden), dtype=torch.float32, device=_CPU)
        for slot in range(each):
            total += slots[:, slot]
        if shared is not None:
            total += shared
        if statistics is not None:
            statistics += received.tokens_per_expert
        return total.bfloat16() if out is None else out.copy_(total)

    def close(self) -> None:
        """Releases the memory. Not collective; harmless when repeated."""
        self._closed = True
        self._dispatcher.close()

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
        return described(self, state, rank="_dispatcher.rank", **{name: name for name in names})

    # ---- checks ---------------------------------------------------------------------------------

    def _check_open(self) -> None:
        if self._closed:
            raise UsageError("this FusedMoE is closed; make a new one")
        self._owner.check()

    def _checked_tokens(self, x: object) -> tuple[torch.Tensor, torch.Tensor]:
        """The values and scales of the tokens.

        Raises:
            ArgumentError: they are no tokens of this layer.
        """
        shape: tuple[int | str, ...] = ("tokens", self.hidden)
        if not isinstance(x, tuple):
            rows = _on_cpu("x", check_tensor("x", x, shape, (torch.bfloat16,)))
            self._check_count(rows)
            return quantize(rows)
        if len(x) != 2:
            raise ArgumentError("x", worded(x), "a torch.Tensor, or a pair (values, scales)")
        values = _on_cpu("x[0]", check_tensor("x[0]", x[0], shape, (torch.float8_e4m3fn,)))
        self._check_count(values)
        shape = (values.shape[0], self.hidden // BLOCK)
        scales = check_tensor("x[1]", x[1], shape, (torch.float32,), contiguous=False)
        return values, _on_cpu("x[1]", scales)

    def _check_count(self, rows: torch.Tensor) -> None:
        if rows.shape[0] > self.max_tokens:
            bound = f"at most max_tokens = {self.max_tokens}"
            raise ArgumentError("x.shape[0]", rows.shape[0], bound)

    def _check_routing(self, tokens: int, topk_idx: object, topk_weights: object) -> None:
        shape = (tokens, self.top_k)
        _on_cpu("topk_idx", check_tensor("topk_idx", topk_idx, shape, (torch.int64,)))
        check_topk(topk_idx, tokens, self.top_k, self.num_experts, _CPU)
        checked = check_tensor("topk_weights", topk_weights, shape, (torch.float32,))
        _on_cpu("topk_weights", checked)

    def _check_weights(self, weights: object, shared_expert: object) -> None:
        shape = (self.experts_per_rank, 2 * self.intermediate, self.hidden)
        _check_experts("weights", weights, shape)
        if shared_expert is not None:
            _check_experts("shared_expert", shared_expert, (1, "2 * intermediate", self.hidden))

    def _check_outputs(self, tokens: int, statistics: object, out: object) -> None:
        if statistics is not None:
            shape = (self.experts_per_rank,)
            _on_cpu("statistics", check_tensor("statistics", statistics, shape, (torch.int32,)))
        if out is not None:
            shapes = (tokens, self.hidden)
            _on_cpu("out", check_tensor("out", out, shapes, (torch.bfloat16,)))

    def _shared_result(
        self, tokens: tuple[torch.Tensor, torch.Tensor], shared_expert: ExpertWeights | None
    ) -> torch.Tensor | None:
        """``[n, hidden]`` bfloat16, or None without a shared expert."""
        if shared_expert is None:
            return None
        count = tokens[0].shape[0]
        ones = torch.ones(count, dtype=torch.float32, device=_CPU)
        return grouped_experts(tokens, ones, [(0, count)], shared_expert, self.activation_clamp)


def _check_backend(config: Config) -> None:
    if config.backend == "cuda":
        source = config.source_of("backend")
        raise UnavailableError(f"the setting backend is 'cuda' (from {source}), but {_INSTEAD}")


def _checked(clamp: object) -> float | None:
    """``activation_clamp``, if it is a positive number or None."""
    if clamp is None:
        return None
    bound = "a finite number above 0, or None"
    if not isinstance(clamp, (int, float)) or isinstance(clamp, bool):
        raise ArgumentError("activation_clamp", worded(clamp), bound)
    if not (math.isfinite(clamp) and clamp > 0):
        raise ArgumentError("activation_clamp", clamp, bound)
    return float(clamp)


def _check_experts(name: str, weights: object, expected: tuple[int | str, ...]) -> None:
    """Raises ArgumentError unless these are weights on the CPU whose L1 has the shape."""
    if not isinstance(weights, ExpertWeights):
        raise ArgumentError(name, worded(weights), "a fanfold.fused_moe.ExpertWeights")
    check_tensor(f"{name}.l1", weights.l1, expected, (torch.float8_e4m3fn,))
    _on_cpu(f"{name}.l1", weights.l1)


def _on_cpu(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """``tensor`` if it is on the CPU; else an ArgumentError that says what to do."""
    if tensor.device.type != "cpu":
        raise ArgumentError(f"{name}.device", tensor.device, f"cpu: {_INSTEAD}")
    return tensor
