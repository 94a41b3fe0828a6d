"""Prepares ``multiprocessing``'s fork server, which imports this module before it forks ranks.

Elsewhere an import does nothing.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib
import os
import resource
import socket
import sys
from pathlib import Path

# What ranks of the command line, of the tests and of most programs import. No module that may be
# run by `python -m`: a rank imports the main module as well, and Python warns of the second import.
_PRELOAD = ("fanfold.nn", "fanfold.deep_ep", "fanfold.bench.run")


def _prepare() -> None:
    for module in _PRELOAD:
        with contextlib.suppress(ImportError):
            importlib.import_module(module)
    # The server takes descriptors for each rank. A rank sets the limit that the program has; other
    # processes that the program starts from this server keep the higher one.
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    atexit.register(_remove, _listening_at(), os.getppid())


def _listening_at() -> list[Path]:
    """Paths of the sockets at which this process listens: one, where the program asks for ranks."""
    found = []
    for entry in Path("/proc/self/fd").iterdir():
        with (
            contextlib.suppress(OSError),
            socket.fromfd(int(entry.name), socket.AF_UNIX, socket.SOCK_STREAM) as candidate,
        ):
            if candidate.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                found.append(Path(candidate.getsockname()))
    return found


def _remove(sockets: list[Path], program: int) -> None:
    """Removes the socket and the temporary folder that ``multiprocessing`` made for it, if the
    program has ended: a killed program could not."""
    if os.getppid() == program:
        return
    for path in sockets:
        with contextlib.suppress(OSError):
            path.unlink()
            path.parent.rmdir()


if "multiprocessing.forkserver" in " ".join(sys.orig_argv):
    _prepare()
