"""Objects that belong to one process and are of no use to a child that it forks.

PyTorch's data loaders and ``multiprocessing`` fork by default on Linux. The child has the parent's
objects, but neither the memory that they share with other ranks nor their CUDA context.
"""

from __future__ import annotations

from fanfold import _core
from fanfold.errors import UsageError

__all__ = ["Owner"]


class Owner:
    """The process that made an object.

    Args:
        what: the object in an error, such as ``"this Buffer"``.
    """

    __slots__ = ("_generation", "_what")

    def __init__(self, what: str) -> None:
        self._what = what
        self._generation = _core.fork_generation()

    @property
    def forked(self) -> bool:
        """Whether this process is a forked child of the one that made the object."""
        return _core.fork_generation() != self._generation

    def check(self) -> None:
        """Raises UsageError in a forked child."""
        if _core.fork_generation() != self._generation:
            raise UsageError(
                f"{self._what} was made before this process was forked, and a forked child has "
                "none of the memory that its ranks share: use it in the parent, or make one in "
                "this process"
            )
