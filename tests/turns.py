"""Turns of tests in several processes: many at once, or one alone."""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def turn(folder: Path, *, alone: bool) -> Iterator[None]:
    """A turn in which others may have theirs, but not while one is ``alone``.

    Whoever comes behind one that waits to be alone waits too, or it would wait for ever.
    """
    with (folder / "queue").open("w") as queue, (folder / "turn").open("w") as held:
        fcntl.flock(queue, fcntl.LOCK_EX)
        fcntl.flock(held, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
        fcntl.flock(queue, fcntl.LOCK_UN)
        yield
