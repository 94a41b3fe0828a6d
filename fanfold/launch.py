"""Starting ranks on this host, and joining ranks that another launcher started.

Ranks are forked from a server that has torch and fanfold imported, so a start costs tens of
milliseconds. They die with this process, whatever kills it, and no file is ever created: the
rendezvous store lives in this process and listens on the loopback interface only.
"""

from __future__ import annotations

import atexit
import contextlib
import multiprocessing.spawn
import os
import re
import signal
import socket
import sys
import time
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

from fanfold.config import Config
from fanfold.descriptors import check_descriptors, for_joining, for_launching
from fanfold.errors import (
    ArgumentError,
    ConfigError,
    FanfoldError,
    PeerRefused,
    PeerTimeout,
    UsageError,
)
from fanfold.forks import Owner
from fanfold.forkserver import ForkServer
from fanfold.gpus import take_device
from fanfold.pickling import Raised, pack, unpack

__all__ = ["LaunchError", "RankFailure", "RankPool", "join", "launch"]

MAX_RANKS = 1024
GRACE_S = 2.0  # that launch() leaves the other ranks to end by themselves after one failed
POOL_GRACE_S = 30.0  # the same for the ranks of a RankPool, which are to be used again

_SERVER = ForkServer(
    "fanfold.launch:_be_rank", preload=("fanfold.nn", "fanfold.deep_ep", "fanfold.bench.run")
)
atexit.register(_SERVER.stop)


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


def _suspicion(failure: RankFailure) -> int:
    """Sorts deaths before exceptions before those that only say that another rank failed."""
    if failure.error is None:
        return 0
    told = isinstance(failure.error, (PeerRefused, PeerTimeout))
    return 2 if told or type(failure.error) is FanfoldError else 1


# ---- what a rank runs ---------------------------------------------------------------------------


@dataclass(frozen=True)
class _Setup:
    """What a fresh rank is told first."""

    rank: int
    ranks: int
    store_port: int
    timeout_s: float
    environment: dict[str, str]
    main: dict[str, Any]  # how multiprocessing.spawn would prepare the interpreter


_importing_main = False


def _import_main(preparation: dict[str, Any]) -> None:
    """Makes the launching program's main module importable, so that its functions unpickle."""
    global _importing_main
    _importing_main = True
    try:
        multiprocessing.spawn.prepare(preparation)
    finally:
        _importing_main = False


def _be_rank(connection: Connection) -> None:
    """The life of a rank: join the group, then run what arrives until the connection closes."""
    setup: _Setup = unpack(connection.recv_bytes())
    os.environ.clear()
    os.environ.update(setup.environment)
    # Gloo would else resolve the host's name, which may fail or take seconds in a container.
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    os.chdir(setup.main["dir"])
    sys.path[:] = setup.main["sys_path"]
    torch.set_num_threads(1)
    try:
        timeout = timedelta(seconds=setup.timeout_s)
        store = TCPStore("127.0.0.1", setup.store_port, is_master=False, timeout=timeout)
        dist.init_process_group(
            "gloo", store=store, rank=setup.rank, world_size=setup.ranks, timeout=timeout
        )
        _take_device(setup.rank, setup.ranks)
        connection.send_bytes(pack(os.getpid()))
    except Exception as error:
        connection.send_bytes(pack(Raised.of(error)))
    with contextlib.suppress(EOFError):
        while payload := connection.recv_bytes():
            connection.send_bytes(_answer(payload, setup.main))


def _take_device(local_rank: int, local_ranks: int) -> None:
    config = Config.resolve()
    if config.backend != "host":
        take_device(local_rank, local_ranks, share=config.share_gpus)


def _answer(payload: bytes, main: dict[str, Any]) -> bytes:
    """The pickled result of the pickled call, or what it raised."""
    try:
        if b"__main__" in payload and main:
            _import_main(main)
            main.clear()
        function, args = unpack(payload)
        return pack(function(dist.group.WORLD, *args))
    except BaseException as error:
        return pack(Raised.of(error))


# ---- the launching side -------------------------------------------------------------------------


@dataclass
class _Rank:
    """One started rank as its pool sees it."""

    rank: int
    calls: Connection
    report: Connection
    pid: int = 0
    exitcode: int | None = None

    def signal(self, number: int) -> None:
        """Sends it a signal unless it has ended."""
        if self.exitcode is None and self.pid:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def read_report(self) -> None:
        """Reads the pid or the exit code, whichever is next."""
        try:
            value = self.report.recv()
        except (EOFError, OSError):
            self.exitcode = self.exitcode if self.exitcode is not None else -signal.SIGKILL
            return
        if self.pid:
            self.exitcode = value
        else:
            self.pid = value

    def read_pid(self) -> None:
        """Returns when the pid is known or the process has ended."""
        while not self.pid and self.exitcode is None and self.report.poll(10.0):
            self.read_report()

    def ended(self) -> RankFailure:
        """The failure that its end is."""
        code = self.exitcode if self.exitcode is not None else 0
        how = f"died with exit code {code}"
        if code < 0:
            how = f"was killed by signal {-code} ({signal.Signals(-code).name})"
        return RankFailure(self.rank, code, how)


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
        if _importing_main:
            raise UsageError(
                "a rank that is importing the main module was about to start ranks itself: start "
                'them only under `if __name__ == "__main__":`'
            )
        check_descriptors(for_launching(ranks), f"starting {ranks} ranks")
        self.timeout_s = timeout_s
        self._owner = Owner("this RankPool")
        self._running = False
        self._ranks: list[_Rank] = []
        self._store: TCPStore | None = _loopback_store(timeout_s)
        port = self._store.port
        try:
            for rank in range(ranks):
                self._ranks.append(_Rank(rank, *_SERVER.fork()))
            main = multiprocessing.spawn.get_preparation_data("rank")
            del main["authkey"]  # refuses to be pickled, and no rank needs it
            for member in self._ranks:
                member.calls.send_bytes(
                    pack(_Setup(member.rank, ranks, port, timeout_s, dict(os.environ), main))
                )
            self._running = True
            failures = _failures(self.collect())
            for member in self._ranks:
                member.read_pid()
            if failures:
                raise _error(failures)
        except BaseException:
            self.close()
            raise

    @property
    def pids(self) -> list[int]:
        """Process id of each rank."""
        return [member.pid for member in self._ranks]

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
        failures = _failures(outcomes)
        if not failures:
            return outcomes
        summary = LaunchError(failures)
        cause = summary.failures[0].error
        if cause is None:
            raise summary
        raise cause from summary

    def outcomes(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """As :meth:`run`, but a rank that fails has a :class:`RankFailure` in its place."""
        self.submit(function, [args] * len(self._ranks))
        return self.collect()

    def submit(self, function: Callable[..., Any], args_of: Sequence[Sequence[Any]]) -> None:
        """Starts a call and returns; :meth:`collect` must follow."""
        if self._running:
            raise UsageError("this pool is running a call: collect its outcomes first")
        ranks = len(self._ranks)
        if len(args_of) != ranks:
            raise ArgumentError("args_of", f"{len(args_of)} entries", f"one for each of {ranks}")
        self._check_alive()
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
            sources = [c for member in pending for c in (member.calls, member.report)]
            ready = wait(sources, max(0.0, deadline - time.monotonic()))
            if not ready:
                self.close()
                late = f"did not finish in {self.timeout_s:g} s; killed"
                failures = _failures(outcomes.values())
                raise _error(failures or [RankFailure(m.rank, None, late) for m in pending])
            for member in pending:
                if member.report in ready:
                    member.read_report()
                outcome = _outcome(member)
                if outcome is not _PENDING:
                    outcomes[member.rank] = outcome
                if isinstance(outcome, RankFailure) and grace_s is not None:
                    deadline = min(deadline, time.monotonic() + grace_s)
        self._running = False
        return [outcomes[member.rank] for member in self._ranks]

    def kill(self, rank: int, number: int = signal.SIGKILL) -> None:
        """Sends a signal to one rank, for instance SIGSTOP, SIGCONT or SIGKILL."""
        self._ranks[rank].signal(number)

    def close(self) -> None:
        """Kills the ranks and returns when all have ended. Harmless in a forked child."""
        members, self._ranks, self._store = self._ranks, [], None
        if self._owner.forked:
            return
        deadline = time.monotonic() + 10.0
        for member in members:
            member.read_pid()
            member.signal(signal.SIGKILL)
        for member in members:
            while member.exitcode is None and member.report.poll(deadline - time.monotonic()):
                member.read_report()
            member.calls.close()
            member.report.close()

    def __enter__(self) -> RankPool:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    def _check_alive(self) -> None:
        if not self._ranks:
            raise UsageError("this pool is closed; make a new one")
        self._owner.check()
        for member in self._ranks:
            while member.exitcode is None and member.report.poll():
                member.read_report()
        dead = [member.ended() for member in self._ranks if member.exitcode is not None]
        if dead:
            raise LaunchError(dead)


def _check_ranks(ranks: object) -> None:
    if not isinstance(ranks, int) or isinstance(ranks, bool) or not 1 <= ranks <= MAX_RANKS:
        raise ArgumentError("ranks", repr(ranks), f"an integer from 1 to {MAX_RANKS}")


def _failures(outcomes: Iterable[Any]) -> list[RankFailure]:
    return [outcome for outcome in outcomes if isinstance(outcome, RankFailure)]


def _error(failures: Sequence[RankFailure]) -> LaunchError:
    """The failures as one error, caused by the exception of the rank that likely failed first."""
    error = LaunchError(failures)
    error.__cause__ = error.failures[0].error
    return error


_PENDING = object()


def _outcome(member: _Rank) -> Any:
    """What has come from a rank, or that it has ended, or that neither is known yet."""
    try:
        if member.calls.poll():
            value = unpack(member.calls.recv_bytes())
            if isinstance(value, Raised):
                return RankFailure(member.rank, None, value.text, value.error())
            return value
    except (EOFError, OSError):
        # It has ended; its exit code is on its way from the server, which saw it end.
        if member.exitcode is None and member.report.poll(5.0):
            member.read_report()
    return _PENDING if member.exitcode is None else member.ended()


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
        raise _error(failures)
    return outcomes


# ---- joining ranks that another launcher started ------------------------------------------------


@dataclass(frozen=True)
class _Launcher:
    """The variables in which a launcher tells a process its place."""

    name: str
    rank: str
    size: str
    jobs: tuple[str, ...]  # identify the job, so that all its ranks derive the same port
    local: tuple[str, str]  # its place among the ranks of its host, and their number
    hosts: str | None = None  # lists the hosts, rank 0's first


_LAUNCHERS = (
    _Launcher("torchrun", "RANK", "WORLD_SIZE", (), ("LOCAL_RANK", "LOCAL_WORLD_SIZE")),
    _Launcher(
        "Open MPI",
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid", "OMPI_MCA_orte_hnp_uri"),
        ("OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    ),
    # SLURM_NTASKS is also set in a batch script, which is one process; these only by srun.
    _Launcher(
        "SLURM",
        "SLURM_PROCID",
        "SLURM_STEP_NUM_TASKS",
        ("SLURM_JOB_ID", "SLURM_STEP_ID"),
        ("SLURM_LOCALID", "SLURM_NTASKS_PER_NODE"),
        "SLURM_STEP_NODELIST",
    ),
)


def join(timeout_s: float = 300.0) -> dist.ProcessGroup | None:
    """Joins the ranks that torchrun, Open MPI's mpirun or SLURM's srun started.

    Reads ``RANK`` and ``WORLD_SIZE``, ``OMPI_COMM_WORLD_RANK`` and ``_SIZE``, or ``SLURM_PROCID``
    and ``SLURM_STEP_NUM_TASKS``, whichever come first in this order. The rendezvous is at
    ``MASTER_ADDR`` and ``MASTER_PORT``; under mpirun and srun both may be absent where the job
    tells enough: then rank 0's host, and a port derived from the job's identity. A GPU becomes
    current as in a :class:`RankPool`.

    Returns:
        The default ``torch.distributed`` group (gloo), made here or before; None if no launcher
        started this process. Keep it in a function, not in a global: PyTorch may abort a process
        that still holds a gloo group when the interpreter ends.

    Raises:
        ConfigError, SystemFailure: a malformed or missing variable; too few file descriptors.
    """
    if dist.is_initialized():
        return dist.group.WORLD
    environment = os.environ
    for launcher in _LAUNCHERS:
        if launcher.rank in environment and launcher.size in environment:
            break
    else:
        return None
    size = _integer(environment, launcher.size, 1, 1 << 20)
    rank = _integer(environment, launcher.rank, 0, size - 1)
    if launcher.name == "SLURM" and size == 1:
        return None  # an interactive shell, in which nothing was started
    address = environment.get("MASTER_ADDR", "") or _first_host(environment, launcher, size)
    if "MASTER_PORT" in environment:
        port = _integer(environment, "MASTER_PORT", 1, 65535)
    else:
        port = _derived_port(environment, launcher)
    check_descriptors(for_joining(size, rank), f"joining {size} ranks as rank {rank}")
    if all(name in environment for name in launcher.local):
        _take_device(*(_integer(environment, name, 0, 1 << 20) for name in launcher.local))
    timeout = timedelta(seconds=timeout_s)
    if address in ("127.0.0.1", "localhost", "::1"):
        environment.setdefault("GLOO_SOCKET_IFNAME", "lo")
    host = f"[{address}]" if ":" in address else address
    dist.init_process_group(
        "gloo", init_method=f"tcp://{host}:{port}", rank=rank, world_size=size, timeout=timeout
    )
    return dist.group.WORLD


def _integer(environment: Mapping[str, str], name: str, low: int, high: int) -> int:
    text = environment[name]
    try:
        value = int(text)
    except ValueError:
        value = low - 1
    if not low <= value <= high:
        raise ConfigError(
            f"environment variable {name} is {text!r}, but must be an integer from {low} to {high}"
        )
    return value


def _first_host(environment: Mapping[str, str], launcher: _Launcher, size: int) -> str:
    """Rank 0's host, where the launcher tells it."""
    if environment.get("OMPI_COMM_WORLD_LOCAL_SIZE") == str(size):
        return "127.0.0.1"
    hosts = environment.get(launcher.hosts or "", "")
    # "node[07-09,12],other" or "node07,other": the first name.
    match = re.match(r"([^,\[]+)(?:\[(\w+)[^\]]*\]([^,]*))?", hosts)
    if match is None:
        raise ConfigError(
            f"{launcher.name} started this process ({launcher.rank} is set), but nothing says "
            "where rank 0 is: set MASTER_ADDR to its host"
        )
    return "".join(part or "" for part in match.groups())


def _derived_port(environment: Mapping[str, str], launcher: _Launcher) -> int:
    """A port that all ranks of one job agree about and other jobs hardly take."""
    job = ":".join(environment.get(name, "") for name in launcher.jobs)
    if not job.strip(":"):
        raise ConfigError(
            f"{launcher.name} started this process ({launcher.rank} is set), but MASTER_PORT is "
            "missing: set it to a free port of rank 0's host"
        )
    return 20000 + zlib.crc32(job.encode()) % 12000
