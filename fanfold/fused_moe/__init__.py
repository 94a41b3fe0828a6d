"""A whole FP8 MoE layer for inference in one call; see :class:`FusedMoE`.

:class:`FusedMoeTuning` says when the kernel changes its form.
:class:`ExpertWeights` holds and checks what the experts multiply with, :func:`quantize_weights` and
:func:`dequantize_weights` convert weights, and :mod:`fanfold.fused_moe.reference` has the exact
result for tests.
"""

from fanfold.fused_moe.layer import FusedMoE
from fanfold.fused_moe.reference import difference, reference
from fanfold.fused_moe.tuning import FusedMoeTuning
from fanfold.fused_moe.weights import ExpertWeights, dequantize_weights, quantize_weights

__all__ = [
    "ExpertWeights",
    "FusedMoE",
    "FusedMoeTuning",
    "dequantize_weights",
    "difference",
    "quantize_weights",
    "reference",
]
