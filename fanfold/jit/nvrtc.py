"""NVRTC, CUDA's run-time compiler: finding it, and compiling with it.

It is looked for next to PyTorch, then in CUDA toolkits, then in a wheel of its own. Finding reads
names of files only; the library is opened when something must be compiled, so that a process whose
kernels are all cached never opens it. Compiling needs no driver and no GPU.
"""

from __future__ import annotations

import functools
import importlib.util
import re
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, starmap
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fanfold.config import cuda_toolkit
from fanfold.errors import UnavailableError

if TYPE_CHECKING:
    import ctypes

__all__ = [
    "Candidate", "Compiled", "Nvrtc", "Rejected", "candidates", "find", "library", "looked_at",
]  # fmt: skip

OLDEST = (12, 0)
_INSTALL = (
    "install a CUDA build of PyTorch, which brings it, or a CUDA toolkit (CUDA_HOME names one), or "
    "`pip install nvidia-cuda-nvrtc` (nvidia-cuda-nvrtc-cu12 for a driver of CUDA 12)"
)
_USUAL = Path("/usr/local")  # of toolkits
# Stable sonames, for where a toolkit is known to the loader alone.
_SONAMES = ("libnvrtc.so.13", "libnvrtc.so.12")


class Rejected(Exception):
    """The compiler refused a program; the text is its log."""


@dataclass(frozen=True)
class Candidate:
    """A libnvrtc that may do.

    Attributes:
        path: of the library, or a soname that the loader knows.
        origin: what it belongs to, for people.
        builtins: the library that it opens by soname, which must be open before; None if the
            loader is to find it.
    """

    path: str
    origin: str
    builtins: str | None = None

    @property
    def identity(self) -> str:
        """Tells versions apart without opening the library: names and sizes of its two files."""
        files = [Path(name) for name in (self.path, self.builtins) if name]
        sizes = [f"{file.resolve().name}={_size(file)}" for file in files]
        return " ".join(sizes)


def _size(file: Path) -> int:
    try:
        return file.stat().st_size
    except OSError:
        return 0  # a soname


@dataclass(frozen=True)
class Compiled:
    """A program that the compiler accepts.

    Attributes:
        image: the CUBIN.
        log: what the compiler said.
        symbol: the mangled name of the kernel that was asked for; empty if none was.
    """

    image: bytes
    log: str
    symbol: str


class Nvrtc:
    """An open libnvrtc.

    Attributes:
        path: the file, or soname, that was opened.
        origin: what it belongs to.
        version: major and minor.
        architectures: the compute capabilities that it compiles for, such as 90.
    """

    def __init__(self, candidate: Candidate) -> None:
        """Opens it.

        Raises:
            OSError: it cannot be loaded.
            UnavailableError: it is too old.
        """
        import ctypes

        if candidate.builtins is not None:
            ctypes.CDLL(candidate.builtins, mode=ctypes.RTLD_GLOBAL)
        self._library = ctypes.CDLL(candidate.path)
        self.path = candidate.path
        self.origin = candidate.origin
        major, minor = ctypes.c_int(), ctypes.c_int()
        self._call("nvrtcVersion", ctypes.byref(major), ctypes.byref(minor))
        self.version = (major.value, minor.value)
        if self.version < OLDEST:
            raise UnavailableError(
                f"{self.path} is NVRTC {major.value}.{minor.value}, but 12.0 or newer is needed"
            )
        count = ctypes.c_int()
        self._call("nvrtcGetNumSupportedArchs", ctypes.byref(count))
        numbers = (ctypes.c_int * count.value)()
        self._call("nvrtcGetSupportedArchs", numbers)
        self.architectures = tuple(numbers)

    def __str__(self) -> str:
        """Version and place, for people."""
        return f"NVRTC {self.version[0]}.{self.version[1]} ({self.path}, {self.origin})"

    def compile(
        self,
        name: str,
        text: str,
        headers: Mapping[str, str],
        options: Sequence[str],
        entry: str = "",
    ) -> Compiled:
        """Compiles a program to a CUBIN.

        Args:
            name: of the program, as the log is to call it.
            text: its source.
            headers: what its ``#include "..."`` find, by exactly the name between the quotes.
            options: of the command line; the architecture must be a real one (``sm_90a``).
            entry: qualified name of the kernel whose symbol is wanted, such as ``"a::b::f"``; empty
                for none.

        Raises:
            Rejected: with the log, also where the program has no ``entry``.
        """
        import ctypes

        strings = ctypes.c_char_p * len(headers)
        contents = strings(*(content.encode() for content in headers.values()))
        names = strings(*(header.encode() for header in headers))
        program = ctypes.c_void_p()
        self._call(
            "nvrtcCreateProgram", ctypes.byref(program), text.encode(), name.encode(),
            len(headers), contents, names,
        )  # fmt: skip
        try:
            if entry:
                self._call("nvrtcAddNameExpression", program, entry.encode())
            given = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
            code = self._library.nvrtcCompileProgram(program, len(options), given)
            log = self._fetch(program, "ProgramLog").rstrip(b"\0").decode(errors="replace")
            if code:
                raise Rejected(log.strip() or self._error(code))
            image = self._fetch(program, "CUBIN")
            symbol = self._lowered(program, entry) if entry else ""
        finally:
            self._library.nvrtcDestroyProgram(ctypes.byref(program))
        if not image:  # what a virtual architecture (compute_90a) gives
            raise Rejected(f"{log}\nno CUBIN came out of options {' '.join(options)}")
        return Compiled(image, log, symbol)

    def _lowered(self, program: ctypes.c_void_p, entry: str) -> str:
        """The symbol of ``entry``; the library owns the text until the program is destroyed."""
        import ctypes

        text = ctypes.c_char_p()
        self._call("nvrtcGetLoweredName", program, entry.encode(), ctypes.byref(text))
        return (text.value or b"").decode()

    def _fetch(self, program: ctypes.c_void_p, what: str) -> bytes:
        import ctypes

        size = ctypes.c_size_t()
        self._call(f"nvrtcGet{what}Size", program, ctypes.byref(size))
        buffer = ctypes.create_string_buffer(size.value)
        if size.value:
            self._call(f"nvrtcGet{what}", program, buffer)
        return buffer.raw

    def _call(self, function: str, *arguments: Any) -> None:
        if code := getattr(self._library, function)(*arguments):
            raise OSError(f"{function} of {self._library._name} fails: {self._error(code)}")

    def _error(self, code: int) -> str:
        import ctypes

        text = self._library.nvrtcGetErrorString
        text.restype = ctypes.c_char_p
        return f"{(text(code) or b'unknown error').decode()} ({code})"


# ---- where it may be ----------------------------------------------------------------------------


def _torch_folders() -> Iterator[tuple[str, Path]]:
    """Where PyTorch's own wheels put CUDA's libraries; torch itself is not imported."""
    spec = importlib.util.find_spec("torch")
    for place in map(Path, (spec.submodule_search_locations or ()) if spec else ()):
        for folder in (*_wheel_folders(place.parent, _cuda_of_torch(place)), place / "lib"):
            yield "next to PyTorch", folder


def _cuda_of_torch(place: Path) -> str:
    """The major version of CUDA that PyTorch was built with; empty if none."""
    try:
        text = (place / "version.py").read_text(encoding="utf-8")
    except OSError:
        return ""
    found = re.search(r"^cuda\b[^=\n]*=\s*['\"](\d+)", text, re.MULTILINE)
    return found[1] if found else ""


def _wheel_folders(packages: Path, major: str = "") -> list[Path]:
    """The folders of NVIDIA's wheels under ``packages``, the newest CUDA first.

    Those of CUDA ``major`` come before all others: a driver that serves PyTorch loads what they
    compile.
    """
    folders = sorted(packages.glob("nvidia/cu[0-9]*/lib"), key=_numbers, reverse=True)
    folders.append(packages / "nvidia/cuda_nvrtc/lib")  # CUDA 12's
    own = "cuda_nvrtc" if major == "12" else f"cu{major}"
    return sorted(folders, key=lambda folder: folder.parent.name != own)


def _toolkit_folders() -> Iterator[tuple[str, Path]]:
    named = cuda_toolkit()
    nvcc = shutil.which("nvcc")
    toolkits = [("CUDA_HOME", named)] if named else []
    toolkits += [("the toolkit of nvcc", Path(nvcc).resolve().parent.parent)] if nvcc else []
    usual = sorted(_USUAL.glob("cuda*"), key=_numbers, reverse=True)
    toolkits += [("a CUDA toolkit", path) for path in usual]
    for origin, toolkit in toolkits:
        for inner in ("lib64", "lib", "targets/x86_64-linux/lib", "targets/sbsa-linux/lib"):
            yield origin, toolkit / inner


def _sys_path_folders() -> Iterator[tuple[str, Path]]:
    for entry in sys.path:
        for folder in _wheel_folders(Path(entry or ".")):
            yield "the wheel nvidia-cuda-nvrtc", folder


def _numbers(path: Path) -> tuple[int, ...]:
    """The numbers in a path, to sort versions by."""
    return tuple(int(digits) for digits in re.findall(r"\d+", str(path)))


def _in_folder(origin: str, folder: Path) -> Iterator[Candidate]:
    """The libraries of a folder, the newest first, each with the builtins of its major version."""
    # A toolkit has the same library under several names.
    found = {path.resolve(): path for path in sorted(folder.glob("libnvrtc.so*"), key=_numbers)}
    for real, path in sorted(found.items(), key=lambda item: _numbers(item[0]), reverse=True):
        major = re.search(r"\.so\.(\d+)", real.name)
        pattern = f"libnvrtc-builtins.so.{major[1] if major else ''}*"
        builtins = sorted(folder.glob(pattern), key=_numbers)
        yield Candidate(str(path), origin, str(builtins[-1]) if builtins else None)


def looked_at() -> list[Path]:
    """Every folder that is looked into, in order."""
    groups = chain(_torch_folders(), _toolkit_folders(), _sys_path_folders())
    return list(dict.fromkeys(folder for _, folder in groups))


def candidates() -> Iterator[Candidate]:
    """Every libnvrtc there is, the preferred one first, each once."""
    seen: set[Path] = set()
    groups = chain(
        starmap(_in_folder, chain(_torch_folders(), _toolkit_folders())),
        [(Candidate(path, "the loader's path") for path in map(_loaded, _SONAMES) if path)],
        starmap(_in_folder, _sys_path_folders()),
    )
    for candidate in chain.from_iterable(groups):
        if (real := Path(candidate.path).resolve()) not in seen:
            seen.add(real)
            yield candidate


def _loaded(soname: str) -> str | None:
    """The file that the loader takes for ``soname``, whose name and size tell versions apart; None
    if it knows none."""
    import ctypes

    try:
        ctypes.CDLL(soname)
    except OSError:
        return None
    lines = Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()
    mapped = [line.split(maxsplit=5)[-1] for line in lines]
    return next((path for path in mapped if Path(path).name.startswith(soname)), soname)


# ---- the one that is used -----------------------------------------------------------------------

_refused: dict[Candidate, str] = {}


def find() -> Candidate:
    """The preferred libnvrtc, not opened yet.

    Raises:
        UnavailableError: naming every place looked at, and what is wrong with those found.
    """
    for candidate in candidates():
        if candidate not in _refused:
            return candidate
    found = [f"{candidate.path}: {reason}" for candidate, reason in _refused.items()]
    places = ", ".join(str(folder) for folder in looked_at())
    useless = f"Found, but of no use: {'; '.join(found)}. " if found else ""
    raise UnavailableError(
        f"no NVRTC (libnvrtc, CUDA's run-time compiler) of version 12.0 or newer, so kernels "
        f"cannot be compiled: {_INSTALL}. {useless}Looked in {places}, and asked the loader for "
        f"{' and '.join(_SONAMES)}"
    )


def library() -> Nvrtc:
    """The preferred libnvrtc that works, opened once per process.

    Raises:
        UnavailableError: as :func:`find`.
    """
    while True:
        candidate = find()
        try:
            return _opened(candidate)
        except (OSError, AttributeError, UnavailableError) as error:
            _refused[candidate] = str(error)


@functools.cache
def _opened(candidate: Candidate) -> Nvrtc:
    return Nvrtc(candidate)
