"""A small process that has imported what is slow to import, and forks itself at request.

Everything ends with its parent: the server when its control socket closes, which happens at any
death of the process that started it, and the forked processes by the kernel's parent-death signal
when the server ends. Nothing has a name in any file system.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import os
import resource
import select
import signal
import socket
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import NoReturn

__all__ = ["ForkServer", "serve"]

_PR_SET_PDEATHSIG = 1


class ForkServer:
    """The starting process's handle of its server, which starts at the first use.

    Args:
        entry: ``"module:function"``; the server imports the module, and each forked process runs
            ``function(connection)`` and ends when it returns.
        preload: modules to import as well; those that cannot be imported are left out.
    """

    def __init__(self, entry: str, preload: Sequence[str] = ()) -> None:
        self._entry = entry
        self._preload = tuple(preload)
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._owner = 0

    def fork(self) -> tuple[Connection, Connection]:
        """A fresh process with this process's standard output and error.

        Returns:
            A connection to it; and one that brings its pid first, and when it has ended its exit
            code (-n: killed by signal n), or EOFError if the server itself died.
        """
        calls, far_calls = Pipe()
        report, far_report = Pipe(duplex=False)
        with self._lock, far_calls, far_report:
            control = self._running()
            if self._process is not None:
                _give_limit(self._process.pid)
            with Path(os.devnull).open("wb") as null:
                outputs = [n if _is_open(n) else null.fileno() for n in (1, 2)]
                descriptors = [far_calls.fileno(), far_report.fileno(), *outputs]
                socket.send_fds(control, [b"fork"], descriptors)
        return calls, report

    def _running(self) -> socket.socket:
        if self._process is not None and self._control is not None and self._owner == os.getpid():
            if self._process.poll() is None:
                return self._control
            self.stop()
        near, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        program = (
            f"import sys; sys.path[:] = {sys.path!r}; from fanfold.forkserver import serve; "
            f"serve({far.fileno()}, {self._entry!r}, {self._preload!r})"
        )
        with far:
            self._process = subprocess.Popen(
                [sys.executable, "-c", program], pass_fds=[far.fileno()], stdin=subprocess.DEVNULL
            )
        self._control, self._owner = near, os.getpid()
        return near

    def stop(self) -> None:
        """Ends the server and with it every forked process. Harmless when repeated."""
        if self._control is not None:
            self._control.close()
        if self._process is not None and self._owner == os.getpid():
            try:
                self._process.wait(timeout=5.0)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        self._process = self._control = None


def _give_limit(pid: int) -> None:
    """Gives a child, and what it forks, this process's limit of file descriptors, which may have
    changed since the child started."""
    with contextlib.suppress(OSError, ValueError):
        resource.prlimit(pid, resource.RLIMIT_NOFILE, resource.getrlimit(resource.RLIMIT_NOFILE))


def _is_open(descriptor: int) -> bool:
    try:
        os.fstat(descriptor)
    except OSError:
        return False
    return True


def serve(control: int, entry: str, preload: Sequence[str]) -> None:
    """The server's program: forks until the process that started it has ended."""
    module, _, name = entry.partition(":")
    function = getattr(importlib.import_module(module), name)
    for optional in preload:
        with contextlib.suppress(ImportError):
            importlib.import_module(optional)
    with socket.socket(fileno=control) as connection:
        _Server(connection, function).run()


class _Server:
    """Forks at request and reports how each child ended."""

    def __init__(self, control: socket.socket, function: Callable[[Connection], None]) -> None:
        self._control = control
        self._function = function
        self._reports: dict[int, Connection] = {}  # by pid
        self._woken, self._waker = os.pipe()
        os.set_blocking(self._waker, False)
        # Ctrl-C reaches the whole foreground group; what to do about it is the starter's choice.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGCHLD, lambda number, frame: None)
        signal.set_wakeup_fd(self._waker)

    def run(self) -> None:
        """Serves until the other end of the control socket is closed."""
        control = self._control.fileno()
        message = b"fork"
        while message:
            ready, _, _ = select.select([control, self._woken], [], [])
            if self._woken in ready:
                os.read(self._woken, 4096)
                self._reap()
            if control in ready:
                message, descriptors, _, _ = socket.recv_fds(self._control, 16, 4)
                if message:
                    self._fork(*descriptors)

    def _fork(self, calls: int, report: int, *outputs: int) -> None:
        server = os.getpid()
        pid = os.fork()
        if pid == 0:
            self._become(Connection(calls), report, outputs, server)
        for descriptor in (calls, *outputs):
            os.close(descriptor)
        self._reports[pid] = Connection(report, readable=False)
        self._report(self._reports[pid], pid)

    def _become(
        self, calls: Connection, report: int, outputs: Sequence[int], server: int
    ) -> NoReturn:
        """The life of a forked process, which never returns into the server's code."""
        code = 1
        try:
            _die_with_parent(server)
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            self._control.close()
            for number, descriptor in enumerate(outputs, start=1):
                os.dup2(descriptor, number)
            for connection in self._reports.values():
                connection.close()
            for descriptor in (self._woken, self._waker, report, *outputs):
                os.close(descriptor)
            self._function(calls)
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            for stream in (sys.stdout, sys.stderr):
                with contextlib.suppress(Exception):
                    stream.flush()
            # Not sys.exit: exit handlers that the server registered are none of its business.
            os._exit(code)

    def _reap(self) -> None:
        while self._reports:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return
            with self._reports.pop(pid) as report:
                self._report(report, os.waitstatus_to_exitcode(status))

    @staticmethod
    def _report(connection: Connection, value: int) -> None:
        with contextlib.suppress(BrokenPipeError):
            connection.send(value)


def _die_with_parent(parent: int) -> None:
    """Has the kernel kill this process when its parent ends, also if that happened already."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)
