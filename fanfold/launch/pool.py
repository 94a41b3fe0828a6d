"""Ranks as processes of this host, for one call or for many."""

from __future__ import annotations

import atexit
import contextlib
import multiprocessing
import os
import resource
import signal
import socket
import sys
import tempfile
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import forkserver
from multiprocessing.connection import Connection, Pipe, wait
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

from torch._C._distributed_c10d import TCPStore

from fanfold.config import Config
from fanfold.descriptors import check_descriptors, for_launching
from fanfold.errors import ArgumentError, FanfoldError, PeerRefused, PeerTimeout, UsageError
from fanfold.forks import Owner
from fanfold.launch.rank import Raised, Setup, be_rank, pack, unpack

__all__ = ["MAX_RANKS", "LaunchError", "RankFailure", "RankPool", "launch"]

MAX_RANKS = 1024
GRACE_S = 2.0  # that launch() leaves the other ranks to end by themselves after one failed
LONGEST_WAIT_S = 1e6  # poll() takes at most 2^31 ms
POOL_GRACE_S = 30.0  # the same for the ranks of a RankPool, which are to be used again

# A program has one server for all uses of the context. It imports what is named before it starts.
_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["fanfold.launch.server"])
_SERVER_DIED = 255  # multiprocessing's exit code for it, and one that a process may have


@dataclass(frozen=True)
class RankFailure:
    """How one rank failed.

    Attributes:
        rank: which one.
        exitcode: of its process as ``subprocess`` counts it (-9: killed by signal 9); None if the
            process lives and its function raised.
        text: the traceback, or a sentence about how it ended.
        error: the exception that the function raised, or None.
    """

    rank: int
    exitcode: int | None
    text: str
    error: BaseException | None = None

    def headline(self) -> str:
        """The failure in one line."""
        if self.error is not None:
            return f"rank {self.rank} raised {type(self.error).__name__}: {self.error}"
        return f"rank {self.rank} {self.text}"


class LaunchError(FanfoldError, RuntimeError):
    """One or more ranks raised, died or did not finish in time.

    Attributes:
        failures: one :class:`RankFailure` for each failed rank, the likely cause first.
        rank: the rank of the first of them.
        exitcode: its exit code, or None.
    """

    def __init__(self, failures: Sequence[RankFailure]) -> None:
        self.failures = tuple(sorted(failures, key=_suspicion))
        self.rank = self.failures[0].rank
        self.exitcode = self.failures[0].exitcode
        details = [f"--- rank {f.rank} ---\n{f.text}" for f in self.failures if f.error is not None]
        super().__init__("\n".join([f.headline() for f in self.failures] + details))
        self.__cause__ = self.failures[0].error


def _suspicion(failure: RankFailure) -> int:
    """Sorts deaths before exceptions before reports of another rank's failure."""
    if failure.error is None:
        return 0
    of_another = isinstance(failure.error, (PeerRefused, PeerTimeout))
    return 2 if of_another or type(failure.error) is FanfoldError else 1


_PENDING = object()


@dataclass
class _Rank:
    """One started rank as its pool sees it."""

    rank: int
    process: ForkServerProcess
    calls: Connection
    server: int = 0  # pid of the process that forked it; 0 until the rank has joined its group

    def outcome(self) -> Any:
        """What its function returned, its failure, or _PENDING."""
        try:
            if self.calls.poll():
                value = unpack(self.calls.recv_bytes())
                if isinstance(value, Raised):
                    return RankFailure(self.rank, None, value.text, value.error())
                return value
        except (EOFError, OSError):
            self.process.join(5.0)  # its exit code is on its way from the server
        return _PENDING if self.process.exitcode is None else self.ended()

    def ended(self) -> RankFailure:
        """The failure that its end is."""
        code = self.process.exitcode or 0
        if code == _SERVER_DIED and self.server and _ends(self.server):
            code = -signal.SIGKILL  # by the kernel, because the server has died
        how = f"died with exit code {code}"
        if code < 0:
            how = f"was killed by signal {-code} ({signal.Signals(-code).name})"
        return RankFailure(self.rank, code, how)


def _ends(child: int) -> bool:
    """Whether a child has ended or does so in a second: its pipes close somewhat earlier."""
    deadline = time.monotonic() + 1.0
    try:
        while os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
            if time.monotonic() > deadline:
                return False
            time.sleep(0.01)
    except ChildProcessError:  # multiprocessing has seen its end
        pass
    return True


_open_pools: weakref.WeakSet[RankPool] = weakref.WeakSet()


@atexit.register
def _close_pools() -> None:
    """At exit, before multiprocessing waits for the ranks to end by themselves."""
    for pool in tuple(_open_pools):
        pool.close()


class RankPool:
    """Ranks on this host that stay for many calls; a context manager.

    Each rank is a fresh process, member of one gloo ``torch.distributed`` group, with one OMP
    thread. Where the host has a GPU for each, or ``share_gpus`` is set, rank r's current device is
    number r (modulo theirs), unless ``backend`` is ``"host"``. Ranks die with this process.

    Args:
        ranks: how many, 1 to 1024.
        timeout_s: seconds that any one call, and the start, may last before all ranks are killed.

    Raises:
        ArgumentError: ``ranks`` out of bounds.
        ConfigError: a malformed variable of the environment.
        LaunchError, SystemFailure: a rank could not start; there are too few file descriptors.
    """

    def __init__(self, ranks: int, *, timeout_s: float = 300.0) -> None:
        _check_ranks(ranks)
        Config.resolve()  # before there are ranks, each of which would raise the same
        check_descriptors(for_launching(ranks), f"starting {ranks} ranks")
        self.timeout_s = timeout_s
        self._owner = Owner("this RankPool")
        self._running = False
        self._ranks: list[_Rank] = []
        self._store: TCPStore | None = _loopback_store(timeout_s)
        _open_pools.add(self)
        try:
            self._start(ranks, self._store.port)
        except BaseException:
            self.close()
            raise

    def _start(self, ranks: int, port: int) -> None:
        _start_server()
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)
        with contextlib.ExitStack() as stack:
            outputs = {}
            for number in (1, 2):
                with contextlib.suppress(OSError):  # it may be closed
                    output = Connection(os.dup(number), readable=False)
                    outputs[number] = stack.enter_context(output)
            environment = dict(os.environ)
            for rank in range(ranks):
                setup = Setup(rank, ranks, port, self.timeout_s, environment, limit, outputs)
                calls, rank_calls = Pipe()
                process = _CONTEXT.Process(target=be_rank, args=(setup, rank_calls))
                self._ranks.append(_Rank(rank, process, calls))
                with rank_calls:
                    process.start()
        self._running = True
        servers = self.collect()
        if failures := _failures(servers):
            raise LaunchError(failures)
        for member, server in zip(self._ranks, servers, strict=True):
            member.server = server

    @property
    def pids(self) -> list[int]:
        """Process id of each rank."""
        return [member.process.pid or 0 for member in self._ranks]

    @property
    def alive(self) -> bool:
        """Whether it can run a call: not closed, and no rank has died."""
        try:
            self._check_alive()
        except FanfoldError:
            return False
        return True

    def run(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """``function(group, *args)`` on every rank; the results in rank order. A rank's group is
        its default ``torch.distributed`` group; ``function`` must be importable by name.

        Raises:
            Exception: what a rank raised, with its traceback and rank in ``__cause__``; if several
                did, not one that only reports another rank's failure.
            LaunchError: a rank died or has died before; or one did not answer in time, or not in
                30 s after another one failed: all are killed then.
        """
        return self.run_each(function, [args] * len(self._ranks))

    def run_each(self, function: Callable[..., Any], args_of: Sequence[Sequence[Any]]) -> list[Any]:
        """As :meth:`run`, with the arguments ``args_of[r]`` on rank r."""
        self.submit(function, args_of)
        outcomes = self.collect(grace_s=POOL_GRACE_S)
        if failures := _failures(outcomes):
            summary = LaunchError(failures)
            cause, summary.__cause__ = summary.__cause__, None  # `cause` is raised from it instead
            if cause is None:
                raise summary
            raise cause from summary
        return outcomes

    def outcomes(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """As :meth:`run`, but a rank that fails has a :class:`RankFailure` in its place."""
        self.submit(function, [args] * len(self._ranks))
        return self.collect()

    def submit(self, function: Callable[..., Any], args_of: Sequence[Sequence[Any]]) -> None:
        """Starts a call and returns; :meth:`collect` must follow."""
        self._check_alive()
        if self._running:
            raise UsageError("this pool is running a call: collect its outcomes first")
        ranks = len(self._ranks)
        if len(args_of) != ranks:
            raise ArgumentError("args_of", f"{len(args_of)} entries", f"one for each of {ranks}")
        payloads = [pack((function, tuple(args))) for args in args_of]
        self._running = True
        for member, payload in zip(self._ranks, payloads, strict=True):
            with contextlib.suppress(BrokenPipeError):
                member.calls.send_bytes(payload)

    def collect(self, *, grace_s: float | None = None) -> list[Any]:
        """What each rank returned, or its :class:`RankFailure`, when all have answered or died.

        Args:
            grace_s: if given, the seconds left to the other ranks once one has failed.

        Raises:
            LaunchError: ranks have not answered in time; all are killed then.
        """
        outcomes: dict[int, Any] = {}
        deadline = time.monotonic() + self.timeout_s
        while len(outcomes) < len(self._ranks):
            pending = [member for member in self._ranks if member.rank not in outcomes]
            sources = [c for member in pending for c in (member.calls, member.process.sentinel)]
            left = deadline - time.monotonic()
            ready = wait(sources, min(max(0.0, left), LONGEST_WAIT_S))
            if not ready and left <= LONGEST_WAIT_S:
                self.close()
                late = f"did not finish in {self.timeout_s:g} s; killed"
                failures = _failures(outcomes.values())
                raise LaunchError(failures or [RankFailure(m.rank, None, late) for m in pending])
            for member in pending:
                outcome = member.outcome()
                if outcome is not _PENDING:
                    outcomes[member.rank] = outcome
                if isinstance(outcome, RankFailure) and grace_s is not None:
                    deadline = min(deadline, time.monotonic() + grace_s)
        self._running = False
        return [outcomes[member.rank] for member in self._ranks]

    def kill(self, rank: int, number: int = signal.SIGKILL) -> None:
        """Sends a signal to one rank, for instance SIGSTOP, SIGCONT or SIGKILL."""
        member = self._ranks[rank]
        if member.process.exitcode is None and member.process.pid:
            with contextlib.suppress(ProcessLookupError):
                os.kill(member.process.pid, number)

    def close(self) -> None:
        """Kills the ranks and returns when all have ended. Harmless in a forked child."""
        members, self._ranks, self._store = self._ranks, [], None
        if self._owner.forked:
            for member in members:  # or multiprocessing would wait for the parent's at the end
                multiprocessing.process._children.discard(member.process)  # type: ignore[attr-defined]
            return
        started = [member.process for member in members if member.process.pid]
        for process in started:
            if process.exitcode is None:
                process.kill()
        deadline = time.monotonic() + 10.0
        for process in started:
            process.join(max(0.0, deadline - time.monotonic()))
            with contextlib.suppress(ValueError):  # one that the kernel has not ended yet
                process.close()
        for member in members:
            member.calls.close()

    def __enter__(self) -> RankPool:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    def _check_alive(self) -> None:
        if not self._ranks:
            raise UsageError("this pool is closed; make a new one")
        self._owner.check()
        dead = [member.ended() for member in self._ranks if member.process.exitcode is not None]
        if dead:
            raise LaunchError(dead)


def _check_ranks(ranks: object) -> None:
    if not isinstance(ranks, int) or isinstance(ranks, bool) or not 1 <= ranks <= MAX_RANKS:
        raise ArgumentError("ranks", repr(ranks), f"an integer from 1 to {MAX_RANKS}")


def _start_server() -> None:
    """Starts the context's server if there is none.

    It is a ``python -c``, which looks for modules in the current folder first: a user's
    ``queue.py`` there would take the place of the standard library's. So it gets the program's path
    instead. Ranks get the program's environment later.
    """
    path = os.pathsep.join(entry or str(Path.cwd()) for entry in sys.path)
    ours = {"PYTHONSAFEPATH": "1", "PYTHONPATH": path}
    before = {name: os.environ.get(name) for name in ours}
    os.environ.update(ours)
    try:
        forkserver.ensure_running()
    except OSError as error:
        if "AF_UNIX" not in str(error):
            raise
        raise UsageError(
            f"ranks cannot be started: the temporary folder {tempfile.gettempdir()} has too long a "
            "path for the socket of multiprocessing's fork server (75 bytes are the most): set "
            "TMPDIR to a shorter one"
        ) from error
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _failures(outcomes: Iterable[Any]) -> list[RankFailure]:
    return [outcome for outcome in outcomes if isinstance(outcome, RankFailure)]


def _loopback_store(timeout_s: float) -> TCPStore:
    """A store in this process that listens on the loopback interface only."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(MAX_RANKS)
        return TCPStore(
            "127.0.0.1",
            listener.getsockname()[1],
            is_master=True,
            timeout=timedelta(seconds=timeout_s),
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )


def launch(
    function: Callable[..., Any],
    ranks: int,
    args: Sequence[Any] = (),
    *,
    timeout_s: float = 300.0,
) -> list[Any]:
    """Runs ``function(group, *args)`` in ``ranks`` fresh processes on this host.

    The ranks are as in a :class:`RankPool`. Call it under ``if __name__ == "__main__":``.

    Args:
        function: importable by name; what it returns must be picklable.
        ranks: how many, 1 to 1024.
        args: passed to every rank.
        timeout_s: seconds until all are killed.

    Returns:
        The results in rank order.

    Raises:
        ArgumentError: ``ranks`` out of bounds.
        LaunchError: a rank raised (its exception is ``__cause__``), died or was too late. The
            others had a moment to end by themselves, then they were killed.
    """
    with RankPool(ranks, timeout_s=timeout_s) as pool:
        pool.submit(function, [args] * ranks)
        outcomes = pool.collect(grace_s=GRACE_S)
    if failures := _failures(outcomes):
        raise LaunchError(failures)
    return outcomes
