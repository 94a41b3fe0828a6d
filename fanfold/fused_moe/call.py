"""What one call of a fused MoE layer is given, checked."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from fanfold.errors import ArgumentError
from fanfold.formats import BLOCK, quantize
from fanfold.fused_moe.weights import ExpertWeights, check_columns
from fanfold.geometry import Geometry, check_aligned, check_tensor, check_topk
from fanfold.representation import worded

__all__ = ["CallChecks", "FusedCall", "Tokens", "checked_clamp"]

Tokens = torch.Tensor | tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class FusedCall:
    """One call, as :meth:`fanfold.FusedMoE.forward` describes it."""

    x: Tokens
    topk_idx: torch.Tensor
    topk_weights: torch.Tensor
    weights: ExpertWeights
    shared_expert: ExpertWeights | None
    statistics: torch.Tensor | None
    out: torch.Tensor | None
    clamp: float | None = None
    """Of the activation; None for no limit."""

    def quantized(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Values and scales of the tokens."""
        return self.x if isinstance(self.x, tuple) else quantize(self.x)

    @property
    def tokens(self) -> int:
        """Of this rank."""
        return self.topk_idx.shape[0]


@dataclass(frozen=True)
class CallChecks:
    """What a layer asks of the tensors of a call.

    Attributes:
        geometry, intermediate: of the layer.
        most_shared: intermediate columns of a shared expert.
        device: where tensors must be.
        check_devices: raises for tensors (by name) that are elsewhere, and says why.
    """

    geometry: Geometry
    intermediate: int
    most_shared: int
    device: torch.device
    check_devices: Callable[..., None]

    def check(self, call: FusedCall) -> None:
        """Raises ArgumentError unless the call can run."""
        tokens = self._check_tokens(call.x)
        self._check_routing(tokens, call.topk_idx, call.topk_weights)
        shape = (self.geometry.experts_per_rank, 2 * self.intermediate, self.geometry.hidden)
        self._check_weights("weights", call.weights, shape)
        if call.shared_expert is not None:
            shared = (1, "2 * intermediate", self.geometry.hidden)
            self._check_weights("shared_expert", call.shared_expert, shared)
            columns = call.shared_expert.intermediate
            check_columns("shared_expert.intermediate", columns, self.most_shared)
        if call.statistics is not None:
            experts = (self.geometry.experts_per_rank,)
            self._check("statistics", call.statistics, experts, torch.int32)
        if call.out is not None:
            shapes = (tokens, self.geometry.hidden)
            self._check("out", call.out, shapes, torch.bfloat16, aligned=True)

    def _check(
        self,
        name: str,
        tensor: object,
        shape: tuple[int | str, ...],
        dtype: torch.dtype,
        *,
        contiguous: bool = True,
        aligned: bool = False,
    ) -> torch.Tensor:
        checked = check_tensor(name, tensor, shape, (dtype,), contiguous=contiguous)
        self.check_devices(**{name: checked})
        if aligned and self.device.type == "cuda":
            check_aligned(name, checked)
        return checked

    def _check_tokens(self, x: object) -> int:
        """How many there are."""
        shape: tuple[int | str, ...] = ("tokens", self.geometry.hidden)
        if not isinstance(x, tuple):
            rows = self._check("x", x, shape, torch.bfloat16, aligned=True)
            return self._check_count(rows)
        if len(x) != 2:
            raise ArgumentError("x", worded(x), "a torch.Tensor, or a pair (values, scales)")
        count = self._check_count(
            self._check("x[0]", x[0], shape, torch.float8_e4m3fn, aligned=True)
        )
        blocks = (count, self.geometry.hidden // BLOCK)
        self._check("x[1]", x[1], blocks, torch.float32, contiguous=False)
        return count

    def _check_count(self, rows: torch.Tensor) -> int:
        most = self.geometry.max_tokens
        if rows.shape[0] > most:
            raise ArgumentError("x.shape[0]", rows.shape[0], f"at most max_tokens = {most}")
        return rows.shape[0]

    def _check_routing(self, tokens: int, topk_idx: object, topk_weights: object) -> None:
        top_k, experts = self.geometry.top_k, self.geometry.num_experts
        checked = self._check("topk_idx", topk_idx, (tokens, top_k), torch.int64)
        if self.device.type == "cpu":  # a kernel looks by itself
            check_topk(checked, tokens, top_k, experts, self.device)
        self._check("topk_weights", topk_weights, (tokens, top_k), torch.float32)

    def _check_weights(self, name: str, weights: object, shape: tuple[int | str, ...]) -> None:
        if not isinstance(weights, ExpertWeights):
            raise ArgumentError(name, worded(weights), "a fanfold.fused_moe.ExpertWeights")
        self._check(f"{name}.l1", weights.l1, shape, torch.float8_e4m3fn, aligned=True)
        if self.device.type == "cuda":
            check_aligned(f"{name}.l2", weights.l2)


def checked_clamp(clamp: object) -> float | None:
    """``activation_clamp``, if it is a positive number or None."""
    if clamp is None:
        return None
    bound = "a number above 0, or None"
    if not isinstance(clamp, (int, float)) or isinstance(clamp, bool):
        raise ArgumentError("activation_clamp", worded(clamp), bound)
    if not clamp > 0:
        raise ArgumentError("activation_clamp", clamp, bound)
    try:
        return float(clamp)
    except OverflowError:
        raise ArgumentError("activation_clamp", worded(clamp), f"{bound}, of a float") from None
