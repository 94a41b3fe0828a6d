"""The folder that keeps compiled kernels between processes.

An entry is one file, written under a temporary name, synced and renamed, so that no reader ever
sees a part of one and a process may be killed at any moment. Its checksum is verified when it is
read; a damaged one counts as absent and is written anew. Nothing here raises for the state of the
folder: without a usable one, kernels are compiled in every process.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import struct
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["Cache", "Entry"]

_MAGIC = b"fanfold1"
_HEADER = struct.Struct("<8sQ32s")  # magic, bytes of the payload, their sha256
_METADATA = struct.Struct("<I")  # the payload: bytes of the metadata, the metadata, the image
_SUFFIX = ".kernel"
_LOCK_SUFFIX = ".lock"
_TEMPORARY = ".tmp"

LOCK_WAIT_S = 30.0  # far above any compile: after it the work is done twice instead
_LOCK_POLL_S = 0.005
_ABANDONED_S = 3600.0  # a temporary file of that age belongs to nobody


@dataclass(frozen=True)
class Entry:
    """A compiled kernel as the cache keeps it.

    Attributes:
        image: the CUBIN.
        metadata: what else is known about it, as JSON has it.
    """

    image: bytes
    metadata: dict[str, Any]


class Cache:
    """Compiled kernels in one folder, made at the first store.

    Attributes:
        folder: where they are; None for a cache that keeps nothing.
    """

    def __init__(self, folder: Path | None) -> None:
        """Looks at nothing yet."""
        # Kernels have a folder of their own inside: clearing must never touch another's files.
        self.folder = None if folder is None else folder / "kernels"

    def load(self, key: str) -> Entry | None:
        """The entry of ``key``; None if there is none, or it is damaged."""
        if self.folder is None:
            return None
        try:
            return _unpack((self.folder / f"{key}{_SUFFIX}").read_bytes())
        except OSError:
            return None

    def store(self, key: str, entry: Entry) -> None:
        """Keeps the entry; where that fails, says so once per process and goes on."""
        if self.folder is None:
            _warn_once("this user has no home, so there is no folder for compiled kernels")
            return
        temporary = self.folder / f"{key}.{os.getpid()}.{os.urandom(4).hex()}{_TEMPORARY}"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            try:
                _write_synced(temporary, _pack(entry))
                temporary.replace(self.folder / f"{key}{_SUFFIX}")
            except BaseException:
                temporary.unlink(missing_ok=True)
                raise
            _sync_folder(self.folder)
            self._remove_abandoned()
        except OSError as error:
            _warn_once(f"compiled kernels cannot be kept in {self.folder} ({error})")

    @contextlib.contextmanager
    def lock(self, key: str) -> Iterator[None]:
        """Held by one process at a time, so that the ranks of a host compile a kernel once.

        The lock belongs to an open file and ends with its process. Where it cannot be had, the
        block runs without it: all it saves is work.
        """
        path = None if self.folder is None else self.folder / f"{key}{_LOCK_SUFFIX}"
        handle = None if path is None else _locked(path)
        try:
            yield
        finally:
            if path is not None and handle is not None:
                # Removed while held: whoever waits for it looks into the cache next.
                with contextlib.suppress(OSError):
                    path.unlink(missing_ok=True)
                os.close(handle)

    def entries(self) -> Iterator[tuple[str, Path, Entry | None]]:
        """Key, file and content of every entry, in order of their keys; None for a damaged one."""
        for path in self._files(_SUFFIX):
            key = path.name.removesuffix(_SUFFIX)
            yield key, path, self.load(key)

    def clear(self) -> int:
        """Removes every entry and what killed processes left; the number of entries.

        Raises:
            OSError: a file cannot be removed.
        """
        removed = 0
        for suffix in (_SUFFIX, _TEMPORARY, _LOCK_SUFFIX):
            for path in self._files(suffix):
                path.unlink(missing_ok=True)
                removed += suffix == _SUFFIX
        return removed

    def _files(self, suffix: str) -> list[Path]:
        return [] if self.folder is None else sorted(self.folder.glob(f"*{suffix}"))

    def _remove_abandoned(self) -> None:
        oldest = time.time() - _ABANDONED_S
        for path in self._files(_TEMPORARY):
            with contextlib.suppress(OSError):
                if path.stat().st_mtime < oldest:
                    path.unlink()


def _locked(path: Path) -> int | None:
    """The file at ``path``, open and locked; None where that cannot be had in time."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    except OSError:
        return None
    deadline = time.monotonic() + LOCK_WAIT_S
    while (taken := _try_lock(handle)) is False and time.monotonic() < deadline:
        time.sleep(_LOCK_POLL_S)
    if taken:
        return handle
    os.close(handle)
    return None


def _try_lock(handle: int) -> bool | None:
    """Whether the lock was free; None on a file system without locks."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


def _pack(entry: Entry) -> bytes:
    metadata = json.dumps(entry.metadata, sort_keys=True).encode()
    payload = _METADATA.pack(len(metadata)) + metadata + entry.image
    return _HEADER.pack(_MAGIC, len(payload), hashlib.sha256(payload).digest()) + payload


def _unpack(data: bytes) -> Entry | None:
    """The entry in a file's bytes; None unless every byte is as it was written."""
    if len(data) < _HEADER.size + _METADATA.size:
        return None
    magic, length, checksum = _HEADER.unpack_from(data)
    payload = data[_HEADER.size :]
    if magic != _MAGIC or length != len(payload):
        return None
    if hashlib.sha256(payload).digest() != checksum:
        return None
    end = _METADATA.size + _METADATA.unpack_from(payload)[0]
    return Entry(payload[end:], json.loads(payload[_METADATA.size : end]))


def _write_synced(path: Path, data: bytes) -> None:
    with path.open("xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _sync_folder(folder: Path) -> None:
    """Makes the renaming last through a power failure."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


_warned = False


def _warn_once(reason: str) -> None:
    global _warned
    if not _warned:
        _warned = True
        warnings.warn(
            f"{reason}, so every process compiles its kernels anew, within a second or two: name "
            "a writable folder with FANFOLD_CACHE_DIR",
            RuntimeWarning,
            stacklevel=2,
        )
