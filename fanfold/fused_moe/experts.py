"""What experts compute on the CPU, with the same bits whatever the number of rows and threads.

Values of e4m3 are multiples of 2**-9 up to 448, so a sum of 128 products is a multiple of 2**-18
below 2**25: FP64 holds it exactly, in whatever order a BLAS library adds. The blocks of 128 are
scaled and added by operations on elements, in order.
"""

from __future__ import annotations

import torch

from fanfold.formats import BLOCK, E4M3_MAX
from fanfold.fused_moe.weights import ExpertWeights

__all__ = ["SMALLEST_AMAX", "activate", "grouped_experts", "run_expert"]

SMALLEST_AMAX = 1e-6
"""Of 128 columns between the GEMMs: smaller ones count as this."""

_ROWS = 1024  # that are computed at a time, to bound what the FP64 sums take


def grouped_experts(
    tokens: tuple[torch.Tensor, torch.Tensor],
    row_weights: torch.Tensor,
    ranges: list[tuple[int, int]],
    weights: ExpertWeights,
    clamp: float | None,
) -> torch.Tensor:
    """The results of rows that are packed expert by expert.

    Args:
        tokens: values ``[rows, hidden]`` e4m3 and scales ``[rows, hidden / 128]`` float32.
        row_weights: ``[rows]`` float32.
        ranges: where each expert's rows begin, and how many there are.
        weights: of these experts.
        clamp: see :func:`activate`.

    Returns:
        ``[rows, hidden]`` bfloat16; 0 where no expert has a row.
    """
    values, scales = tokens
    y = torch.zeros(values.shape, dtype=torch.bfloat16, device=values.device)
    for expert, (begin, count) in enumerate(ranges):
        for first in range(begin, begin + count, _ROWS):
            rows = slice(first, min(first + _ROWS, begin + count))
            y[rows] = run_expert(
                (values[rows], scales[rows]), row_weights[rows], weights, expert, clamp
            )
    return y


def run_expert(
    tokens: tuple[torch.Tensor, torch.Tensor],
    row_weights: torch.Tensor,
    weights: ExpertWeights,
    expert: int,
    clamp: float | None,
) -> torch.Tensor:
    """The results of one expert's rows: ``[rows, hidden]`` bfloat16."""
    sums = _scaled_matmul(*tokens, weights.l1[expert], weights.l1_scales[expert])
    activations = activate(sums, row_weights, clamp)
    result = _scaled_matmul(*activations, weights.l2[expert], weights.l2_scales[expert])
    return result.float().bfloat16()


def activate(
    sums: torch.Tensor, row_weights: torch.Tensor, clamp: float | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """SwiGLU with the routing weights, quantised: what the second GEMM multiplies.

    ``v = silu(min(gate, clamp)) * clamp(up, -clamp, clamp) * weight`` is taken in FP64 and rounded
    to FP32. Each 128 columns of a row get ``scale = amax * (1 / 448)``, and their values are
    ``e4m3(v * (448 / amax))``, all of it in FP32, with ``amax = max(amax(|v|), 1e-6)``. A NaN does
    not count for amax.

    Args:
        sums: ``[rows, 2 * intermediate]`` float64, gate before up.
        row_weights: ``[rows]`` float32.
        clamp: a positive number, or None.

    Returns:
        Values ``[rows, intermediate]`` e4m3 and scales ``[rows, intermediate / 128]`` float32.
    """
    gate, up = sums.chunk(2, dim=1)
    if clamp is not None:
        gate, up = gate.clamp(max=clamp), up.clamp(-clamp, clamp)
    # Each operation is rounded by itself: fused ones would depend on a row's place in a vector.
    v = (gate / (1 + (-gate).exp()) * up * row_weights.double().unsqueeze(1)).float()
    blocks = v.unflatten(1, (v.shape[1] // BLOCK, BLOCK))
    magnitudes = blocks.abs().nan_to_num(nan=0.0, posinf=float("inf"))
    largest = magnitudes.amax(2).clamp(min=SMALLEST_AMAX)
    most = torch.full_like(largest, E4M3_MAX)
    scaled = blocks * (most / largest).unsqueeze(2)
    values = scaled.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)
    return values.flatten(1), largest * (torch.ones_like(most) / most)


def _scaled_matmul(
    a: torch.Tensor, a_scales: torch.Tensor, b: torch.Tensor, b_scales: torch.Tensor
) -> torch.Tensor:
    """``a @ b.T`` of e4m3 matrices.

    Args:
        a: ``[M, K]``.
        a_scales: ``[M, K / 128]``.
        b: ``[N, K]``.
        b_scales: ``[N / 128, K / 128]``.

    Returns:
        ``[M, N]`` float64.
    """
    shape = (a.shape[0], b_scales.shape[0], BLOCK)
    total = torch.zeros(shape, dtype=torch.float64, device=a.device)
    for block in range(b_scales.shape[1]):
        columns = slice(block * BLOCK, (block + 1) * BLOCK)
        part = (a[:, columns].double() @ b[:, columns].double().T).view(shape)  # exact
        scales = a_scales[:, block].double().unsqueeze(1) * b_scales[:, block].double()  # exact
        total += part.mul_(scales.unsqueeze(2))
    return total.flatten(1)
