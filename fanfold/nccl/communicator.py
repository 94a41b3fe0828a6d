"""A communicator of NCCL's, and the windows of memory that its ranks share."""

from __future__ import annotations

import ctypes
from typing import Any

from fanfold.errors import UnavailableError
from fanfold.group import Group
from fanfold.nccl.library import NcclLibrary

__all__ = ["Communicator"]

_IDENTITY_BYTES = 128  # NCCL_UNIQUE_ID_BYTES
_SYMMETRIC = 1  # NCCL_WIN_COLL_SYMMETRIC
_SUCCESS = 0


class _Identity(ctypes.Structure):
    """``ncclUniqueId``."""

    _fields_ = (("internal", ctypes.c_char * _IDENTITY_BYTES),)


class _Team(ctypes.Structure):
    """``ncclTeam``."""

    _fields_ = (("ranks", ctypes.c_int), ("rank", ctypes.c_int), ("stride", ctypes.c_int))


class Communicator:
    """A communicator of the ranks' current CUDA devices. Construction is collective: every rank
    must come, as NCCL waits for all.

    Args:
        library: whose it is, the same version on all ranks.
        group: the ranks.

    Raises:
        UnavailableError: NCCL refuses, with what it says.
    """

    def __init__(self, library: NcclLibrary, group: Group) -> None:
        self.library = library
        self._functions = ctypes.CDLL(library.path)
        self._functions.ncclGetErrorString.restype = ctypes.c_char_p
        self._functions.ncclGetLastError.restype = ctypes.c_char_p
        self._functions.ncclTeamLsa.restype = _Team
        self._comm: ctypes.c_void_p | None = None
        identity = _Identity()
        if group.rank == 0:
            self._call("ncclGetUniqueId", ctypes.byref(identity))
        (first, *_) = group.all_gather(bytes(identity))
        comm = ctypes.c_void_p()
        self._call(
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
        self._call(
            "ncclCommWindowRegister",
            self._comm, ctypes.c_void_p(address), ctypes.c_size_t(nbytes), ctypes.byref(window),
            _SYMMETRIC,
        )  # fmt: skip
        if not window.value:
            raise UnavailableError(
                f"{self.library} gives no window of {nbytes} bytes and no reason: the GPUs lack "
                "peer access, or cuMem is off (NCCL_CUMEM_ENABLE=0); NCCL_DEBUG=INFO says more"
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

    def close(self) -> None:
        """Ends it; harmless when repeated. Its windows must have ended."""
        if self._comm is not None:
            comm, self._comm = self._comm, None
            self._call("ncclCommDestroy", comm)

    def _call(self, function: str, *arguments: Any) -> None:
        result = getattr(self._functions, function)(*arguments)
        if result != _SUCCESS:
            said = self._functions.ncclGetErrorString(result) or b"?"
            last = self._functions.ncclGetLastError(self._comm) or b""
            raise UnavailableError(
                f"{function} of {self.library} fails: {said.decode(errors='replace')} ({result})"
                f"{': ' if last else ''}{last.decode(errors='replace').strip()}. NCCL_DEBUG=INFO "
                "says more"
            )
