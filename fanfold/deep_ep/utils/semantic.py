"""What programs import from ``deep_ep.utils.semantic``.

>>> from fanfold.deep_ep.utils.semantic import value_or
>>> value_or(None, 3), value_or(0, 3)
(3, 0)
"""

from __future__ import annotations

from typing import TypeVar

__all__ = ["value_or"]

_T = TypeVar("_T")


def value_or(value: _T | None, otherwise: _T) -> _T:
    """``value``, or ``otherwise`` if it is None."""
    return otherwise if value is None else value
