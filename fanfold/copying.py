"""Objects that no copy and no pickle can stand for: they hold memory of other processes."""

from __future__ import annotations

from collections.abc import Callable
from typing import NoReturn, TypeVar

from fanfold.errors import CopyError

__all__ = ["not_copied"]

_Class = TypeVar("_Class", bound=type)


def not_copied(why: str, instead: str) -> Callable[[_Class], _Class]:
    """A decorator: ``copy.copy``, ``copy.deepcopy`` and ``pickle`` of the class raise CopyError.

    Args:
        why: completes "... cannot be copied or pickled: ".
        instead: what to do, as a sentence.
    """

    def refuse(self: object, protocol: object = None) -> NoReturn:
        del protocol
        name = type(self).__name__
        raise CopyError(f"{name} cannot be copied or pickled: {why}. {instead}")

    def mark(cls: _Class) -> _Class:
        # copy.copy, copy.deepcopy and every pickler come here.
        cls.__reduce_ex__ = refuse  # type: ignore[method-assign]
        return cls

    return mark
