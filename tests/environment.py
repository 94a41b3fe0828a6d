"""Variables of the environment, set by ranks that may be threads of one process."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator

__all__ = ["environment"]

_lock = threading.Lock()
_inside = 0  # threads in a block
_before: dict[str, str | None] = {}  # what the first of them found


@contextlib.contextmanager
def environment(**variables: str) -> Iterator[None]:
    """Sets ``variables`` for the block. Ranks set the same ones in the same order, and what the
    first has found comes back when the last has left."""
    global _inside
    with _lock:
        _inside += 1
        for name, value in variables.items():
            _before.setdefault(name, os.environ.get(name))
            os.environ[name] = value
    try:
        yield
    finally:
        with _lock:
            _inside -= 1
            if _inside == 0:
                for name, found in _before.items():
                    os.environ.pop(name, None)
                    if found is not None:
                        os.environ[name] = found
                _before.clear()
