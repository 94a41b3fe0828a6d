"""File descriptors: whether there are enough, and what to say where there are not.

A library that runs out of them in the middle of a rendezvous leaves its peers to wait until their
time is over. So they are counted before ranks start or meet.
"""

from __future__ import annotations

import errno
import resource
from pathlib import Path

from fanfold.errors import SystemFailure

__all__ = [
    "advice",
    "check_descriptors",
    "for_joining",
    "for_launching",
    "for_memory",
]

_USUAL_LIMIT = 1024

# Beside those for each rank: the loops of the store and of gloo, multiprocessing's pipes to its
# server and its resource tracker, and descriptors that are open for a moment.
_AROUND_RANKS = 16


def for_launching(ranks: int) -> int:
    """Descriptors that a pool of ranks takes in the process that starts them: for each rank a
    connection, the two pipes of its multiprocessing.Process, and its connection to the store."""
    return 4 * ranks + _AROUND_RANKS


def for_joining(ranks: int, rank: int) -> int:
    """Descriptors that a gloo group takes in a rank: a connection to each peer, and in rank 0,
    which has the store, another one to each."""
    return ranks * (2 if rank == 0 else 1) + _AROUND_RANKS


def for_memory(ranks: int) -> int:
    """Descriptors that symmetric memory on a host takes in a rank while it is made: its own memory,
    a handle of each peer's process, and one peer's memory at a time."""
    return ranks + 1


def check_descriptors(needed: int, purpose: str) -> None:
    """Raises SystemFailure unless this process may open ``needed`` more file descriptors.

    Args:
        needed: as the functions above count.
        purpose: what takes them, with its values.
    """
    limit, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    used = _used(limit)
    if limit == resource.RLIM_INFINITY or used + needed <= limit:
        return
    wanted = max(_USUAL_LIMIT, 1 << (used + needed - 1).bit_length())
    bound = ""
    if most != resource.RLIM_INFINITY and wanted > most:
        wanted = max(used + needed, most)
        bound = f" (without privileges the most is {most})"
    raise SystemFailure(
        f"{purpose}: this takes up to {needed} file descriptors, but this process has {used} open "
        f"and a limit of {limit}; raise it before the start, with `ulimit -n {wanted}`{bound}, or "
        "use fewer ranks"
    )


def _used(limit: int) -> int:
    try:
        return len(list(Path("/proc/self/fd").iterdir())) - 1  # without that of the listing
    except OSError:
        return limit  # none is left for the listing


def advice(error: BaseException) -> str:
    """What to do about an error of the system, to be appended to its message: empty unless there
    were too few file descriptors."""
    if not isinstance(error, OSError) or error.errno not in (errno.EMFILE, errno.ENFILE):
        return ""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return (
        f": this process has its limit of {limit} file descriptors open; raise it before the "
        f"start, with `ulimit -n {max(_USUAL_LIMIT, 2 * limit)}`"
    )
