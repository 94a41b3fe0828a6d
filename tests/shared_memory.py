"""Shared memory that has a name in ``/dev/shm``."""

from __future__ import annotations

import re
from collections.abc import Collection
from pathlib import Path

__all__ = ["named_memory"]

# Of libfabric's endpoints, by the process: as Fanfold calls them, and as the provider does.
_ENDPOINT = re.compile(r"fanfold-(\d+)-|(\d+):")


def named_memory(pids: Collection[int]) -> list[Path]:
    """All that has a name, but for semaphores of multiprocessing and for endpoints of libfabric of
    processes other than ``pids``: other tests run meanwhile."""
    found = []
    for path in Path("/dev/shm").iterdir():
        endpoint = _ENDPOINT.match(path.name)
        of_others = endpoint is not None and int(endpoint[1] or endpoint[2]) not in pids
        if not of_others and not path.name.startswith("sem.mp-"):
            found.append(path)
    return sorted(found)
