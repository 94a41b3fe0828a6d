"""What programs import from ``deep_ep.utils.math``: sizes, differences, fp8 rows.

>>> from fanfold.deep_ep.utils.math import align, ceil_div
>>> ceil_div(7, 4), align(7, 4)
(2, 8)
"""

from __future__ import annotations

import torch

from fanfold.formats import dequantize, quantize

__all__ = [
    "align",
    "calc_diff",
    "ceil_div",
    "count_bytes",
    "per_token_cast_back",
    "per_token_cast_to_fp8",
    "safe_div",
]


def ceil_div(x: int, y: int) -> int:
    """``x / y``, rounded up."""
    return -(-x // y)


def align(x: int, y: int) -> int:
    """``x`` rounded up to a multiple of ``y``."""
    return ceil_div(x, y) * y


def safe_div(a: float, b: float) -> float:
    """``a / b``, or 0 for 0 / 0.

    Raises:
        ZeroDivisionError: ``b`` alone is 0.
    """
    return 0 if a == 0 and b == 0 else a / b


def calc_diff(x: torch.Tensor, y: torch.Tensor) -> float:
    """``1 - 2<x', y'> / (<x', x'> + <y', y'>)`` of ``x' = x + 1`` and ``y' = y + 1`` in float64: 0
    for equal tensors, also of zeros."""
    x, y = x.double() + 1, y.double() + 1
    return 1 - (2 * (x * y).sum() / (x.square() + y.square()).sum()).item()


def per_token_cast_to_fp8(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Values ``[T, H]`` float8_e4m3fn and scales ``[T, ceil(H / 128)]`` float32 of the rows ``x``
    ``[T, H]`` (float32 rows are rounded to bfloat16 first); see :func:`fanfold.formats.quantize`.
    """
    return quantize(x.contiguous() if x.dtype is torch.bfloat16 else x.to(torch.bfloat16))


def per_token_cast_back(x_fp8: torch.Tensor, x_scales: torch.Tensor) -> torch.Tensor:
    """``[T, H]`` bfloat16: values times scales, which are float32 or, four to an int32, UE8M0."""
    return dequantize(x_fp8, x_scales).to(torch.bfloat16)


def count_bytes(*tensors: object) -> int:
    """Bytes of tensors, also of those in tuples and lists; None counts as none."""
    total = 0
    for each in tensors:
        if isinstance(each, torch.Tensor):
            total += each.nbytes
        elif isinstance(each, (tuple, list)):
            total += count_bytes(*each)
    return total
