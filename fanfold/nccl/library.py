"""Which NCCL there is, and what of its device API that version has."""

from __future__ import annotations

import ctypes
import re
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from fanfold.errors import UnavailableError

__all__ = ["FEATURES", "SIZED", "Feature", "NcclLibrary", "loaded", "version_text"]

_MAPS = Path("/proc/self/maps")
_UPGRADE = "`pip install -U nvidia-nccl-cu13` (or -cu12, as PyTorch's CUDA) brings the newest"


class Feature(NamedTuple):
    """What a version of NCCL first has.

    Attributes:
        since: that version.
        what: for messages.
    """

    since: tuple[int, int, int]
    what: str


FEATURES = {
    "windows": Feature((2, 28, 9), "windows: memory of peers that kernels load from and store to"),
    "host_pointers": Feature((2, 29, 2), "addresses of peers' memory for the host"),
}
"""What Fanfold uses of the device API, by name."""

SIZED = (2, 29, 2)
"""From here on structures that NCCL takes begin with their size."""

_FIRST_GIN, _GIN_WITH_RMA = (2, 28, 9), (2, 30, 4)


def version_text(version: tuple[int, int, int]) -> str:
    """``"2.28.9"``."""
    return ".".join(map(str, version))


@dataclass(frozen=True)
class NcclLibrary:
    """A libnccl.

    Attributes:
        path: of the file, or a name that the loader knows.
        version: major, minor and patch, as ``ncclGetVersion`` says.
    """

    path: str
    version: tuple[int, int, int]

    @classmethod
    def open(cls, path: str) -> NcclLibrary:
        """The library at ``path``.

        Raises:
            UnavailableError: it cannot be loaded, or does not say its version.
        """
        try:
            library = ctypes.CDLL(path)
        except OSError as error:
            raise UnavailableError(f"{path} cannot be loaded: {error}") from error
        number = ctypes.c_int()
        try:
            code = library.ncclGetVersion(ctypes.byref(number))
        except AttributeError:
            raise UnavailableError(f"{path} is no NCCL: it has no ncclGetVersion") from None
        if code:
            raise UnavailableError(f"ncclGetVersion of {path} returns {code}: install it again")
        return cls(path, _version_of(number.value))

    def has(self, feature: str) -> bool:
        """Whether this version has one of :data:`FEATURES`."""
        return self.version >= FEATURES[feature].since

    def require(self, feature: str) -> None:
        """Raises UnavailableError unless this version has one of :data:`FEATURES`."""
        if not self.has(feature):
            since, what = FEATURES[feature]
            raise UnavailableError(
                f"{self} has no {what}. NCCL {version_text(since)} is the first that has: "
                f"{_UPGRADE}"
            )

    @property
    def number(self) -> int:
        """``NCCL_VERSION_CODE``."""
        major, minor, patch = self.version
        return major * 10000 + minor * 100 + patch

    def require_gin(self) -> None:
        """Raises UnavailableError unless kernels put and signal by this version's GIN."""
        if self.version != _FIRST_GIN and self.version < _GIN_WITH_RMA:
            raise UnavailableError(
                f"GIN of {self} is not used: {version_text(_FIRST_GIN)} has the one that PyTorch "
                f"2.11 brings, {version_text(_GIN_WITH_RMA)} and later the one over plugins for "
                f"RMA. {_UPGRADE}"
            )

    def __str__(self) -> str:
        """Version and place, for people."""
        return f"NCCL {version_text(self.version)} ({self.path})"


def loaded() -> NcclLibrary:
    """The NCCL that this process has loaded, which is PyTorch's as a rule.

    Raises:
        UnavailableError: there is none, or none in a library of its own, or more than one.
    """
    mapped = (line.split(maxsplit=5)[5:] for line in _MAPS.read_text().splitlines())
    names = {name.removesuffix(" (deleted)") for part in mapped for name in part}
    paths = sorted(name for name in names if re.search(r"/libnccl\.so[.\d]*$", name))
    if not paths:
        raise UnavailableError(
            "this process has loaded no libnccl: import a CUDA build of PyTorch first, one that "
            "does not have NCCL built into its own libraries"
        )
    if len(paths) > 1:
        raise UnavailableError(
            f"this process has loaded more than one NCCL: {', '.join(paths)}. Their communicators "
            "do not mix: leave one (LD_LIBRARY_PATH, LD_PRELOAD and wheels bring them), or take "
            "PyTorch's memory (FANFOLD_GPU_MEMORY=torch)"
        )
    return NcclLibrary.open(paths[0])


def _version_of(number: int) -> tuple[int, int, int]:
    """Of ``NCCL_VERSION_CODE``, which had two decimal places less before 2.9."""
    thousand = 1000 if number < 10000 else 10000
    major, rest = divmod(number, thousand)
    return (major, *divmod(rest, 100))
