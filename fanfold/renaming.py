"""Messages that name what the caller passed.

A mode checks arguments by its own names. A face whose arguments have other names renames what the
mode raises: the argument, and every mention of it in the text.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from fanfold.errors import ArgumentError, PeerRefused

__all__ = ["Renaming"]


class Renaming:
    """A context manager that renames the arguments in errors that leave its block.

    Args:
        names: the callers' names, by those of the layer below. Of two that begin alike, the longer
            one is found.
    """

    def __init__(self, names: Mapping[str, str]) -> None:
        self._names = dict(names)
        longest_first = sorted(map(re.escape, self._names), key=len, reverse=True)
        # Whole words only, and no attribute of something else.
        self._pattern = re.compile(rf"(?<![\w.])(?:{'|'.join(longest_first)})(?!\w)")

    def rename(self, error: BaseException | None) -> None:
        """Renames what ``error`` names: an ArgumentError of this rank, or that of a peer."""
        if isinstance(error, ArgumentError):
            error.__init__(*map(self._renamed, (error.argument, error.value, error.bound)))  # type: ignore[misc]
        elif isinstance(error, PeerRefused):
            reason = self._renamed(error.reason)
            error.__init__(error.rank, error.peer, error.phase, reason)  # type: ignore[misc]

    def _renamed(self, text: str) -> str:
        return self._pattern.sub(lambda found: self._names[found.group()], text)

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self.rename(error)
