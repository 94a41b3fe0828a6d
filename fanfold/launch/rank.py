"""The program of a rank, and values and exceptions on their way to and from it."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import io
import multiprocessing
import os
import resource
import signal
import traceback
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

from fanfold.config import Config
from fanfold.gpus import take_device

__all__ = ["Raised", "Setup", "be_rank", "pack", "take_local_device", "unpack"]

_PR_SET_PDEATHSIG = 1


def pack(value: object) -> bytes:
    """Pickles ``value`` with torch: plain pickle cannot restore tensors of every dtype, and the
    one of torch.multiprocessing shares memory with a process that may end."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def unpack(packed: bytes) -> Any:
    """The value that :func:`pack` received. It runs code, so only for bytes of one's own ranks."""
    return torch.load(io.BytesIO(packed), weights_only=False)


@dataclass(frozen=True)
class Raised:
    """An exception in parts that can be pickled, and its traceback as text."""

    kind: type[BaseException]
    args: tuple[Any, ...]
    attributes: dict[str, Any]
    text: str

    @classmethod
    def packed(cls, error: BaseException) -> bytes:
        """``error``, ready to travel; as a RuntimeError if its own parts cannot be pickled."""
        text = "".join(traceback.format_exception(error))
        attributes = {k: v for k, v in vars(error).items() if not k.startswith("__")}
        try:
            packed = pack(cls(type(error), error.args, attributes, text))
            unpack(packed)
        except Exception:  # a lock, a generator, a local class: anything may hang on an exception
            named = f"{type(error).__name__}: {error}"
            return pack(cls(RuntimeError, (named,), {}, text))
        return packed

    def error(self) -> BaseException:
        """The exception, made without its ``__init__``, whose parameters are unknown."""
        error: BaseException = self.kind.__new__(self.kind, *self.args)
        error.args = self.args
        vars(error).update(self.attributes)
        return error


@dataclass(frozen=True)
class Setup:
    """What a fresh rank needs to be one of ``ranks``, and what it takes over from the program.

    ``multiprocessing`` itself passes on the current folder, ``sys.path`` and the main module.
    """

    rank: int
    ranks: int
    store_port: int
    timeout_s: float
    environment: dict[str, str]
    descriptor_limit: tuple[int, int]
    outputs: dict[int, Connection]  # standard output and error, by descriptor


def be_rank(setup: Setup, calls: Connection) -> None:
    """Joins the group, then runs the calls that arrive until the connection closes."""
    _end_with_program()
    # Ctrl-C reaches the whole foreground group; only the program decides what follows.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        _take_over(setup)
        _join_group(setup)
        calls.send_bytes(pack(os.getppid()))
    except Exception as error:
        calls.send_bytes(Raised.packed(error))
    with contextlib.suppress(EOFError):
        while payload := calls.recv_bytes():
            calls.send_bytes(_answer(payload))


def _end_with_program() -> None:
    """Has the kernel kill this process, even if it is stopped, when its program or its server ends.

    A process of the context holds a pipe on whose end its server waits, so neither would end by
    itself. The program holds the other end of this process's sentinel.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    program = multiprocessing.parent_process()
    assert program is not None
    sentinel = program.sentinel
    fcntl.fcntl(sentinel, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(sentinel, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(sentinel, fcntl.F_SETFL, os.O_ASYNC)
    if not program.is_alive():  # it ended before the kernel knew
        os._exit(1)


def _take_over(setup: Setup) -> None:
    """Replaces what this process has from the server by what the program has now."""
    for number, output in setup.outputs.items():
        with output:
            os.dup2(output.fileno(), number)
    resource.setrlimit(resource.RLIMIT_NOFILE, setup.descriptor_limit)
    os.environ.clear()
    os.environ.update(setup.environment)


def _join_group(setup: Setup) -> None:
    # Otherwise gloo resolves the host's name, which may fail or take seconds in a container.
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    timeout = timedelta(seconds=setup.timeout_s)
    store = TCPStore("127.0.0.1", setup.store_port, is_master=False, timeout=timeout)
    dist.init_process_group(
        "gloo", store=store, rank=setup.rank, world_size=setup.ranks, timeout=timeout
    )
    take_local_device(setup.rank, setup.ranks)


def take_local_device(local_rank: int, local_ranks: int) -> None:
    """Makes the GPU of a rank of this host current, unless the settings name the host backend."""
    config = Config.resolve()
    if config.backend != "host":
        take_device(local_rank, local_ranks, share=config.share_gpus)


def _answer(payload: bytes) -> bytes:
    """The pickled result of the pickled call, or the exception that it raised."""
    try:
        function, args = unpack(payload)
        return pack(function(dist.group.WORLD, *args))
    except BaseException as error:
        return Raised.packed(error)
