"""A communicator of NCCL's, and the windows of memory that its ranks share."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from typing import Any, ClassVar

import torch

from fanfold.errors import UnavailableError
from fanfold.group import Group, agree
from fanfold.nccl.library import SIZED, NcclLibrary

__all__ = ["NO_WINDOW", "Communicator"]

_IDENTITY_BYTES = 128  # NCCL_UNIQUE_ID_BYTES
_SYMMETRIC = 1  # NCCL_WIN_COLL_SYMMETRIC
_DEVICE_COMMUNICATOR_BYTES = 4096  # more than any version's ncclDevComm has
_SUCCESS = 0
_INSTEAD = "or do without NCCL (FANFOLD_GPU_MEMORY=torch, FANFOLD_NETWORK=libfabric)"
NO_WINDOW = (
    "the GPUs lack peer access, or cuMem or windows are off (NCCL_CUMEM_ENABLE=0, "
    f"NCCL_WIN_ENABLE=0): see what NCCL_DEBUG=INFO says, {_INSTEAD}"
)
"""Why NCCL gives no window, for messages."""


class _Identity(ctypes.Structure):
    """``ncclUniqueId``."""

    _fields_ = (("internal", ctypes.c_char * _IDENTITY_BYTES),)


class _Requirements(ctypes.Structure):
    """``ncclDevCommRequirements`` of 2.28.9, and what later ones have behind their first fields."""

    _fields_ = (
        ("resources", ctypes.c_void_p), ("teams", ctypes.c_void_p), ("lsa_multimem", ctypes.c_bool),
        ("barriers", ctypes.c_int), ("lsa_barriers", ctypes.c_int),
        ("rail_gin_barriers", ctypes.c_int), ("blocks", ctypes.c_int), ("slots", ctypes.c_int),
        ("gin_force_enable", ctypes.c_bool), ("gin_contexts", ctypes.c_int),
        ("gin_signals", ctypes.c_int), ("gin_counters", ctypes.c_int),
    )  # fmt: skip


class _SizedRequirements(ctypes.Structure):
    """``ncclDevCommRequirements`` of 2.30 and later, which fill in what this one lacks."""

    _fields_ = (
        ("size", ctypes.c_size_t), ("magic", ctypes.c_uint), ("version", ctypes.c_uint),
        ("of_2_28", _Requirements), ("gin_connections", ctypes.c_int),
        ("exclusive_contexts", ctypes.c_bool), ("queue_depth", ctypes.c_int),
        ("traffic_class", ctypes.c_int), ("world_gin_barriers", ctypes.c_int),
        ("strong_signals", ctypes.c_bool), ("va_signals", ctypes.c_bool),
    )  # fmt: skip

    MAGIC, EVERY_RANK, DEFAULT_CLASS = 0xCAFEBEEF, 1, -(1 << 31)


class _Team(ctypes.Structure):
    """``ncclTeam``."""

    _fields_ = (("ranks", ctypes.c_int), ("rank", ctypes.c_int), ("stride", ctypes.c_int))


class Communicator:
    """A communicator of the ranks' current CUDA devices. Construction is collective.

    NCCL waits for all ranks, for ever. So its collective calls run in a thread of their own, and
    one that takes too long is left to itself.

    Args:
        library: whose it is, the same version on all ranks.
        group: the ranks.
        timeout_s: seconds that a collective call of NCCL may take.

    Raises:
        UnavailableError: NCCL refuses, with what it says, or is not done in time.
        FanfoldError: another rank failed before NCCL was asked.
    """

    # NCCL 2.28.9 forgets its plugin when the last communicator ends, and never loads it again.
    _kept: ClassVar[list[ctypes.c_void_p]] = []

    def __init__(self, library: NcclLibrary, group: Group, timeout_s: float) -> None:
        self._needs_plugin = False
        self.library, self._timeout_s = library, timeout_s
        self._functions = ctypes.CDLL(library.path)
        self._functions.ncclGetErrorString.restype = ctypes.c_char_p
        self._functions.ncclGetLastError.restype = ctypes.c_char_p
        self._functions.ncclTeamLsa.restype = _Team
        self._comm: ctypes.c_void_p | None = None
        identity, error = _Identity(), None
        if group.rank == 0:
            try:
                self._call("ncclGetUniqueId", ctypes.byref(identity))
            except UnavailableError as failure:
                error = failure
        agree(group, {}, error)
        (first, *_) = group.all_gather(bytes(identity))
        comm = ctypes.c_void_p()
        self._collective(
            "ncclCommInitRank",
            ctypes.byref(comm), group.size, _Identity.from_buffer_copy(first), group.rank,
        )  # fmt: skip
        self._comm = comm

    def ranks_within_reach(self) -> int:
        """How many ranks, this one included, load from and store to each other's windows."""
        return int(self._functions.ncclTeamLsa(self._comm).ranks)

    def allocate(self, nbytes: int) -> int:
        """The address of memory that can be registered, on the current CUDA device."""
        address = ctypes.c_void_p()
        self._call("ncclMemAlloc", ctypes.byref(address), ctypes.c_size_t(nbytes))
        return address.value or 0

    def free(self, address: int) -> None:
        """Frees what :meth:`allocate` gave."""
        self._call("ncclMemFree", ctypes.c_void_p(address))

    def register(self, address: int, nbytes: int) -> int:
        """The handle of a window over that memory of each rank. Collective.

        Raises:
            UnavailableError: NCCL refuses, or there is no window, which NCCL calls a success.
        """
        window = ctypes.c_void_p()
        self._collective(
            "ncclCommWindowRegister",
            self._comm, ctypes.c_void_p(address), ctypes.c_size_t(nbytes), ctypes.byref(window),
            _SYMMETRIC,
        )  # fmt: skip
        if not window.value:
            raise UnavailableError(
                f"{self.library} gives no window of {nbytes} bytes and no reason: {NO_WINDOW}"
            )
        return window.value

    def deregister(self, window: int) -> None:
        """Ends a window; not collective."""
        self._call("ncclCommWindowDeregister", self._comm, ctypes.c_void_p(window))

    def address_of(self, window: int, peer: int) -> int:
        """Where this rank's kernels reach ``peer``'s memory of a window.

        Raises:
            UnavailableError: NCCL refuses, or has no function for it
                (:data:`fanfold.nccl.library.FEATURES`, ``"host_pointers"``).
        """
        self.library.require("host_pointers")
        address = ctypes.c_void_p()
        self._call(
            "ncclGetLsaDevicePointer",
            ctypes.c_void_p(window), ctypes.c_size_t(0), peer, ctypes.byref(address),
        )  # fmt: skip
        return address.value or 0

    def device_communicator(self, signals: int, counters: int) -> bytes:
        """The ``ncclDevComm`` by which kernels put and signal to all ranks by GIN (NCCL's
        networking from the GPU), which ends with the communicator; and bytes of no meaning behind
        it. Collective.

        Args:
            signals, counters: that each rank has, from number 0 on.

        Raises:
            UnavailableError: this version has no GIN, or it finds no network for it.
        """
        self.library.require_gin()
        asked = _Requirements(
            gin_force_enable=self.library.version < SIZED, gin_contexts=1, gin_signals=signals,
            gin_counters=counters,
        )  # fmt: skip
        sized = _SizedRequirements(
            size=ctypes.sizeof(_SizedRequirements), magic=_SizedRequirements.MAGIC,
            version=self.library.number, of_2_28=asked,
            gin_connections=_SizedRequirements.EVERY_RANK,
            traffic_class=_SizedRequirements.DEFAULT_CLASS,
            strong_signals=True,  # a signal comes behind all puts before it, as always in 2.28
        )  # fmt: skip
        made = ctypes.create_string_buffer(_DEVICE_COMMUNICATOR_BYTES)
        requirements = asked if self.library.version < SIZED else sized
        self._collective("ncclDevCommCreate", self._comm, ctypes.byref(requirements), made)
        self._needs_plugin = self.library.version < SIZED
        return made.raw

    def check(self) -> None:
        """Raises UnavailableError for what has ended the communicator."""
        state = ctypes.c_int(_SUCCESS)
        self._call("ncclCommGetAsyncError", self._comm, ctypes.byref(state))
        if state.value != _SUCCESS:
            raise self._failure("the network", state.value)

    def close(self) -> None:
        """Ends it, once all ranks of this host do; returns at once. Harmless when repeated. Its
        windows must have ended."""
        if self._comm is not None:
            comm, self._comm = self._comm, None
            if self._needs_plugin and not self._kept:
                self._kept.append(comm)
                return
            # It returns when the other ranks come, who may keep theirs longer, or have died.
            _Asked(lambda: self._call("ncclCommDestroy", comm)).start()

    def _collective(self, function: str, *arguments: Any) -> None:
        """A call for which NCCL waits for the other ranks."""
        device = torch.cuda.current_device()

        def call() -> None:
            torch.cuda.set_device(device)
            self._call(function, *arguments)

        asked = _Asked(call)
        asked.start()
        asked.join(self._timeout_s)
        if asked.is_alive():
            raise UnavailableError(
                f"{function} of {self.library} has not returned after {self._timeout_s:g} s: a "
                "rank has ended or hangs, or NCCL does not get through to it (NCCL_SOCKET_IFNAME, "
                f"firewalls); see what NCCL_DEBUG=INFO says, {_INSTEAD}"
            )
        if asked.error is not None:
            raise asked.error

    def _call(self, function: str, *arguments: Any) -> None:
        result = getattr(self._functions, function)(*arguments)
        if result != _SUCCESS:
            raise self._failure(function, result)

    def _failure(self, what: str, result: int) -> UnavailableError:
        said = self._functions.ncclGetErrorString(result) or b"?"
        last = self._functions.ncclGetLastError(self._comm) or b""
        return UnavailableError(
            f"{what} of {self.library} fails: {said.decode(errors='replace')} ({result})"
            f"{': ' if last else ''}{last.decode(errors='replace').strip()}. See what "
            f"NCCL_DEBUG=INFO says, {_INSTEAD}"
        )


class _Asked(threading.Thread):
    """A call of NCCL's in a thread that the end of the process does not wait for.

    Attributes:
        error: what the call raised.
    """

    def __init__(self, call: Callable[[], None]) -> None:
        super().__init__(name="fanfold-nccl", daemon=True)
        self._call = call
        self.error: Exception | None = None

    def run(self) -> None:
        try:
            self._call()
        except Exception as error:
            self.error = error
