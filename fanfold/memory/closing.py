"""Closes memories whose last reference is gone, in threads.

Between hosts closing waits for the peers, for some seconds at most. The garbage collector runs
finalisers in the middle of any code, also of a call that the peers wait for, so a finaliser must
not wait.
"""

from __future__ import annotations

import _thread
import os
import sys
from multiprocessing.util import Finalize

from fanfold import _core
from fanfold.memory.rows import NetworkRows

__all__ = ["close_in_a_thread", "wait_at_exit"]

_LONGEST_CLOSE_S = 10.0
_closing: list[_thread.LockType] = []  # one for each thread, which releases it at its end
_at_exit: Finalize | None = None


def wait_at_exit() -> None:
    """Has the end of this process wait for the threads of :func:`close_in_a_thread`. Before it is
    called, and once the process ends, memories are closed without a thread."""
    global _at_exit
    if _at_exit is None or not _at_exit.still_active():  # a new process of multiprocessing
        # Not `atexit`: processes of multiprocessing end without it.
        _at_exit = Finalize(None, _wait, exitpriority=0)


def close_in_a_thread(core: _core.SymmetricMemory, rows: NetworkRows) -> None:
    """Closes ``core``, then the ``rows`` that it has registered, in a thread of its own. Takes no
    locks, so that finalisers may call it."""
    if _at_exit is not None and _at_exit.still_active() and not sys.is_finalizing():
        ended = _thread.allocate_lock()
        ended.acquire()
        _closing.append(ended)
        try:
            _thread.start_new_thread(_close_and_release, (core, rows, ended))
            return
        except RuntimeError:  # no more threads
            _closing.remove(ended)
    _close(core, rows)


def _close(core: _core.SymmetricMemory, rows: NetworkRows) -> None:
    core.close()
    rows.close()


def _close_and_release(
    core: _core.SymmetricMemory, rows: NetworkRows, ended: _thread.LockType
) -> None:
    try:
        _close(core, rows)
    finally:
        _closing.remove(ended)
        ended.release()


def _wait() -> None:
    """Peers may still wait for what the threads deliver."""
    for ended in tuple(_closing):
        ended.acquire(timeout=_LONGEST_CLOSE_S)


os.register_at_fork(after_in_child=_closing.clear)  # a child has no threads to wait for
