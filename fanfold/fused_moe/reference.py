"""The exact result of a fused MoE layer, for tests, and the measure of a difference from it.

It shares no arithmetic with :class:`fanfold.FusedMoE`: weights are expanded to FP64 and multiplied
as whole matrices, token by slot.
"""

from __future__ import annotations

import torch

from fanfold.formats import BLOCK, E4M3_MAX, quantize
from fanfold.fused_moe.weights import ExpertWeights

__all__ = ["difference", "reference"]

_SMALLEST_AMAX = 1e-6


def difference(x: torch.Tensor, y: torch.Tensor) -> float:
    """``1 - 2 <x, y> / (<x, x> + <y, y>)`` in FP64: 0 for equal tensors, 1 for orthogonal ones.

    NaN if either holds a NaN or an infinity, so that no bound accepts it.

        >>> x = torch.ones(3, dtype=torch.float32, device="cpu")
        >>> fanfold.fused_moe.difference(x, x * 1.01) < 1e-4
        True
    """
    x, y = x.double(), y.double()
    # The same as above without its cancellation: <x - y, x - y> / (<x, x> + <y, y>).
    total = float((x * x + y * y).sum())
    return float((x - y).square().sum()) / total if total else 0.0


def reference(
    x: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
    topk_idx: torch.Tensor,
    topk_weights: torch.Tensor,
    weights: ExpertWeights,
    *,
    activation_clamp: float | None = None,
    shared_expert: ExpertWeights | None = None,
) -> torch.Tensor:
    """What :meth:`fanfold.FusedMoE.forward` returns, from the weights of all experts, on one rank.

    Quantisation is simulated exactly; the GEMMs are summed in FP64. The roundings are those of the
    layer, up to 1 in 10**16 before each.

        >>> gate_up = torch.randn(4, 256, 128, dtype=torch.bfloat16, device="cpu")
        >>> down = torch.randn(4, 128, 128, dtype=torch.bfloat16, device="cpu")
        >>> weights = fanfold.fused_moe.ExpertWeights.quantize(gate_up, down)
        >>> x = torch.randn(3, 128, dtype=torch.bfloat16, device="cpu")
        >>> idx = torch.tensor([[0, 1], [2, -1], [3, 3]], dtype=torch.int64, device="cpu")
        >>> topk_weights = torch.full((3, 2), 0.5, dtype=torch.float32, device="cpu")
        >>> fanfold.fused_moe.reference(x, idx, topk_weights, weights).shape
        torch.Size([3, 128])

    Args:
        x, topk_idx, topk_weights, shared_expert: as of :meth:`fanfold.FusedMoE.forward`.
        weights: of all experts, in order.
        activation_clamp: as of :class:`fanfold.FusedMoE`.

    Returns:
        ``[n, hidden]`` bfloat16.
    """
    values, scales = x if isinstance(x, tuple) else quantize(x)
    tokens = values.double() * scales.double().repeat_interleave(BLOCK, dim=1)
    total = torch.zeros(tokens.shape, dtype=torch.float32, device=tokens.device)
    for slot in range(topk_idx.shape[1]):
        for expert in topk_idx[:, slot].unique().tolist():
            if expert >= 0:
                rows = topk_idx[:, slot] == expert
                factor = topk_weights[rows, slot]
                total[rows] += _expert(tokens[rows], factor, weights, expert, activation_clamp)
    if shared_expert is not None:
        factor = torch.ones(len(tokens), dtype=torch.float32, device=tokens.device)
        total += _expert(tokens, factor, shared_expert, 0, activation_clamp)
    return total.bfloat16()


def _expert(
    tokens: torch.Tensor,
    factor: torch.Tensor,
    weights: ExpertWeights,
    expert: int,
    clamp: float | None,
) -> torch.Tensor:
    """``[rows, hidden]`` float32 with the precision of bfloat16."""
    gate, up = (tokens @ _wide(weights.l1[expert], weights.l1_scales[expert]).T).chunk(2, dim=1)
    if clamp is not None:
        gate, up = gate.clamp(max=clamp), up.clamp(min=-clamp, max=clamp)
    v = (torch.sigmoid(gate) * gate * up * factor.double().unsqueeze(1)).float()
    largest = v.abs().unflatten(1, (-1, BLOCK)).amax(2).clamp(min=_SMALLEST_AMAX)
    factors = (torch.full_like(largest, E4M3_MAX) / largest).repeat_interleave(BLOCK, dim=1)
    quantised = (v * factors).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)
    one = torch.ones_like(largest)
    scales = largest * (one / (one * E4M3_MAX))
    activations = quantised.double() * scales.double().repeat_interleave(BLOCK, dim=1)
    result: torch.Tensor = activations @ _wide(weights.l2[expert], weights.l2_scales[expert]).T
    return result.float().bfloat16().float()


def _wide(values: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """A matrix in FP64, exactly."""
    wide = scales.double().repeat_interleave(BLOCK, dim=0).repeat_interleave(BLOCK, dim=1)
    return wide * values.double()
