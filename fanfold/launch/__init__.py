"""Starts ranks on this host, and joins ranks that another launcher started.

:func:`launch` and :class:`RankPool` start ranks with ``multiprocessing``'s "forkserver" context,
whose server has torch and Fanfold imported: a start takes tens of milliseconds. They meet at a
torch ``TCPStore`` in the program, on the loopback interface, and end with the program, whatever
ends it. :func:`join` is for ranks that torchrun, mpirun or srun started.

Own code remains where ``multiprocessing`` and torch's launchers do not give what ranks promise:

- ``pool``: torch's ``spawn`` and ``elastic_launch`` run one function and pass results as exit codes
  and files. A pool keeps its ranks for many calls and brings values, exceptions with their
  attributes, and the rank that failed first.
- ``rank``: a process of the context outlives a program, or a server, that is killed, and has
  environment, output and limits of the server; ``multiprocessing`` pickles a tensor as shared
  memory of a process that may have ended.
- ``server``: the context's server keeps the program's first limit of file descriptors and leaves
  its socket behind when the program is killed.
- ``rendezvous``: torch reads torchrun's variables only.
"""

from __future__ import annotations

from fanfold.launch.pool import MAX_RANKS, LaunchError, RankFailure, RankPool, launch
from fanfold.launch.rendezvous import join

__all__ = ["MAX_RANKS", "LaunchError", "RankFailure", "RankPool", "join", "launch"]
