"""Sizes, differences and fp8 rows, where DeepEP 2 keeps them."""

from fanfold.deep_ep.utils.math import (
    align,
    calc_diff,
    ceil_div,
    count_bytes,
    per_token_cast_back,
    per_token_cast_to_fp8,
    safe_div,
)

__all__ = [
    "align",
    "calc_diff",
    "ceil_div",
    "count_bytes",
    "per_token_cast_back",
    "per_token_cast_to_fp8",
    "safe_div",
]
