"""Defaults of arguments, where DeepEP 2 keeps them."""

from fanfold.deep_ep.utils.semantic import (
    value_or,
)

__all__ = [
    "value_or",
]
