"""Refusing a call on all ranks because of a mistake found on this one.

Every rank takes part in every call. One that cannot, for bad input or for want of memory, says so
to the others, who then raise PeerRefused instead of waiting for it.
"""

from __future__ import annotations

from collections.abc import Callable

__all__ = ["Refusing", "tell"]


class Refusing:
    """Calls ``refuse`` with whatever its block raises, and lets that pass."""

    def __init__(self, refuse: Callable[[BaseException], None]) -> None:
        self._refuse = refuse

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None:
            self._refuse(error)


def tell(refuse: Callable[[str], None], error: BaseException) -> None:
    """Passes the text of ``error`` to the core's ``refuse``.

    The caller's own mistake is what it must see, so a failure to tell the others only becomes the
    context of ``error``.
    """
    try:
        refuse(str(error))
    except Exception as failure:  # for want of memory, too
        error.__context__ = failure
