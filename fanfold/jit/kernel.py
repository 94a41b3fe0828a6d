"""Kernels from source to the GPU: what identifies one, compiling it through the cache, loading it.

A kernel's sources are files under ``fanfold/kernels``; what is special to the sizes at hand comes
as a header ``constants.h`` that exists only in memory. Headers are found by their path from that
folder, as ``#include "device/memory.cuh"``, and only so.
"""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import re
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fanfold.config import Config
from fanfold.errors import ArgumentError, CompileError, UnavailableError, UsageError
from fanfold.jit import log as compiler_log
from fanfold.jit import nvrtc
from fanfold.jit.cache import Cache, Entry
from fanfold.jit.yields import with_yields

if TYPE_CHECKING:
    import torch

    from fanfold import _core

__all__ = [
    "KERNELS", "Binary", "ForeignHeaders", "KernelSource", "architecture_of", "cache_of",
    "capability_of", "check_architecture", "compile", "compile_in", "load", "load_all",
    "refuse_in_capture",
]  # fmt: skip

_LOG = logging.getLogger(__name__)

KERNELS = Path(__file__).parent.parent / "kernels"
"""The folder of the kernels' sources."""

_FORMAT = 3  # of the key and the metadata of an entry
_SUFFIXES = (".h", ".hpp", ".cuh", ".cu")
_CONSTANTS = "constants.h"
_OPTIONS = (
    "-std=c++20",
    # A product and a sum round as often as the source says, as on the host
    # (docs/decisions/arithmetic.md); where one rounding is wanted, the kernel says fmaf.
    "--fmad=false",
    "-lineinfo",
    "--ptxas-options=-v",
)
_NAME_MAP = "__nv_name_map"  # the file in which the compiler looks for the entry's name
_REGISTERS_OF_AN_SM = 65536
_REGISTER_STEP = 8
_MOST_REGISTERS = 255


@dataclass(frozen=True)
class ForeignHeaders:
    """Headers of another library, which a kernel includes as ``<name>``.

    Attributes:
        folder: where they are installed.
        digest: of all their texts; part of the key under which the kernel is cached.
        texts: what the compiler gets in place of a file of the folder, or of one that it lacks, by
            the name that is included.
    """

    folder: str = field(compare=False)
    digest: str
    texts: tuple[tuple[str, str], ...] = field(compare=False, repr=False)


@dataclass(frozen=True)
class KernelSource:
    """One kernel for one set of sizes.

    Attributes:
        file: path under ``fanfold/kernels``, such as ``"low_latency/dispatch.cu"``.
        entry: qualified name of the function, such as ``"fanfold::low_latency::dispatch"``; it is
            no template and has no overload.
        constants: names and values of ``constants.h``; a mapping is accepted, and sorted pairs are
            kept, so that equal sets are equal sources.
        threads: of a CTA at launch, which bounds the registers; 0 where unknown.
        yields: whether multiplications of accumulators let other warps issue between them
            (:mod:`fanfold.jit.yields`).
        foreign: headers of another library that it includes, where ``constants.h`` defines
            ``FANFOLD_FOREIGN``; None: none.
    """

    file: str
    entry: str
    constants: tuple[tuple[str, int], ...] | Mapping[str, int] = ()
    threads: int = 0
    yields: bool = False
    foreign: ForeignHeaders | None = None

    def __post_init__(self) -> None:
        """Sorts and checks the constants, and checks the entry.

        Raises:
            ArgumentError: for a name that C++ would not take, or a value that is no integer of 64
                bits.
        """
        if not re.fullmatch(r"[A-Za-z_]\w*(::[A-Za-z_]\w*)*", self.entry, re.ASCII):
            bound = "a qualified C++ name, such as 'fanfold::low_latency::dispatch'"
            raise ArgumentError("entry", repr(self.entry), bound)
        given = self.constants
        pairs = given.items() if isinstance(given, Mapping) else given
        object.__setattr__(self, "constants", tuple(sorted((n, int(v)) for n, v in pairs)))
        for name, value in self.pairs:
            if not re.fullmatch(r"[A-Za-z_]\w*", name, re.ASCII):
                raise ArgumentError("a constant's name", repr(name), "a C++ identifier")
            if not -(1 << 63) < value < 1 << 63:
                raise ArgumentError(name, value, "an integer of 64 bits")

    @property
    def pairs(self) -> tuple[tuple[str, int], ...]:
        """The constants as sorted pairs."""
        return tuple(
            self.constants.items() if isinstance(self.constants, Mapping) else self.constants
        )

    @property
    def header(self) -> str:
        """The text of ``constants.h``."""
        lines = [
            f"inline constexpr {'int' if abs(value) < 1 << 31 else 'long long'} {name} = {value};"
            for name, value in self.pairs
        ]
        foreign = [] if self.foreign is None else ["#define FANFOLD_FOREIGN"]
        return "\n".join(["#pragma once", *foreign, "namespace fanfold {", *lines, "}", ""])

    @property
    def register_limit(self) -> int:
        """Most registers per thread with which a CTA of ``threads`` can start."""
        if self.threads == 0:
            return _MOST_REGISTERS
        share = _REGISTERS_OF_AN_SM // self.threads
        return min(_MOST_REGISTERS, share // _REGISTER_STEP * _REGISTER_STEP)

    def __str__(self) -> str:
        """File, entry and constants, for people."""
        constants = ", ".join(f"{name} = {value}" for name, value in self.pairs)
        return f"{self.file} ({self.entry}; {constants or 'no constants'})"


@dataclass(frozen=True)
class Binary:
    """A compiled kernel; counts are -1 where the compiler did not say.

    Attributes:
        image: the CUBIN.
        symbol: the kernel's name in it, which is mangled.
        registers: per thread.
        spill_bytes: stored plus loaded by spilling, per thread.
        stack_bytes: per thread.
        shared_bytes: static shared memory of a CTA.
        log: what the compiler said.
        from_cache: whether it was compiled earlier.
        seconds: that getting it took just now.
    """

    image: bytes
    symbol: str
    registers: int
    spill_bytes: int
    stack_bytes: int
    shared_bytes: int
    log: str
    from_cache: bool
    seconds: float


def compile(  # noqa: A001, called as jit.compile
    source: KernelSource,
    arch: str = "sm_90a",
    *,
    options: Sequence[str] = (),
    config: Config | None = None,
) -> Binary:
    """The kernel compiled for ``arch``, from the cache if any process has compiled it before.

    Args:
        source: what to compile.
        arch: a real architecture, such as ``"sm_90a"``.
        options: of NVRTC, after the usual ones.
        config: whose cache folder is used; None resolves the settings.

    Raises:
        ArgumentError: ``arch`` is no real architecture, or the file does not exist.
        CompileError: the compiler refuses the source.
        UnavailableError: there is no NVRTC, or it does not know ``arch``.
    """
    return compile_in(KERNELS, cache_of(config), source, arch, tuple(options))


def cache_of(config: Config | None = None) -> Cache:
    """The cache that the settings name."""
    return Cache((config or Config.resolve()).cache_folder())


def compile_in(
    root: Path, cache: Cache, source: KernelSource, arch: str, options: tuple[str, ...] = ()
) -> Binary:
    """As :func:`compile`, with the sources under ``root`` and a cache."""
    began = time.perf_counter()
    capability_of(arch)
    tree = _read_tree(root)
    if source.file not in tree.files:
        raise ArgumentError("file", repr(source.file), f"a source under {root}")
    job = _Job(tree, source, arch, (f"--gpu-architecture={arch}", *_OPTIONS, *options))
    binary = _cached(cache, job.key)
    if binary is None:
        with cache.lock(job.key):
            # Another process may have compiled it while this one waited.
            binary = _cached(cache, job.key)
            if binary is None:
                binary = job.compile()
                # The library that answers may be another than the one expected: the key again.
                cache.store(job.key, Entry(binary.image, job.metadata(binary)))
    binary = replace(binary, seconds=time.perf_counter() - began)
    _log(source, arch, binary)
    return binary


def _log(source: KernelSource, arch: str, binary: Binary) -> None:
    """What was compiled, and at level DEBUG what the cache had."""
    level = logging.DEBUG if binary.from_cache else logging.INFO
    _LOG.log(
        level,
        "%s %s for %s in %.3g s",
        "loaded" if binary.from_cache else "compiled",
        source,
        arch,
        binary.seconds,
        extra={
            "kernel": source.file,
            "arch": arch,
            "from_cache": binary.from_cache,
            "seconds": binary.seconds,
        },
    )


def _cached(cache: Cache, key: str) -> Binary | None:
    entry = cache.load(key)
    if entry is None:
        return None
    try:
        return Binary(image=entry.image, from_cache=True, seconds=0.0, **entry.metadata["binary"])
    except (KeyError, TypeError):
        return None  # written by a version that keeps other metadata


# ---- one compilation ----------------------------------------------------------------------------


@dataclass(frozen=True)
class _Tree:
    """Every source under a folder, as it was when first looked at in this process.

    The compiler sees these texts rather than the files, so that what is stored under a key is
    what the key was made of, also while somebody edits the files.
    """

    files: Mapping[str, str]
    digest: str


@functools.cache
def _read_tree(root: Path) -> _Tree:
    paths = sorted(path for path in root.rglob("*") if path.suffix in _SUFFIXES)
    files = {path.relative_to(root).as_posix(): path.read_text("utf-8") for path in paths}
    return _Tree(files, hashlib.sha256(json.dumps(files).encode()).hexdigest())


@dataclass(frozen=True)
class _Job:
    """A source with everything else that decides what comes out."""

    tree: _Tree
    source: KernelSource
    arch: str
    options: tuple[str, ...]

    @property
    def key(self) -> str:
        """Names the result; asks for the compiler's identity without opening it."""
        given = self.source
        foreign = given.foreign and given.foreign.digest
        source = (given.file, given.entry, given.pairs, given.yields, foreign)
        parts = (_FORMAT, self.tree.digest, source, self.options, nvrtc.find().identity)
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:40]

    def compile(self) -> Binary:
        """Compiles, without a cache."""
        compiler = nvrtc.library()
        check_architecture(self.arch)
        headers = {name: text for name, text in self.tree.files.items() if not name.endswith(".cu")}
        headers[_CONSTANTS] = self.source.header
        options = self.options
        foreign = self.source.foreign
        if foreign is not None:
            headers.update(foreign.texts)
            # They mark some functions of theirs for no place.
            options = (
                *options,
                f"--include-path={foreign.folder}",
                "--device-as-default-execution-space",
            )
        if compiler.version >= (13, 0):
            # NVRTC's own cache would answer without the log that has the registers.
            options = (*options, "--no-cache")
        text = self.tree.files[self.source.file]
        entry = self.source.entry
        try:
            made = compiler.compile(self.source.file, text, headers, options, entry)
        except nvrtc.Rejected as error:
            reason = compiler_log.first_error(str(error))
            if "--nv_arch" in reason:  # such as sm_90f, as only later ones have families
                bound = f"one that {compiler} knows"
                raise ArgumentError("arch", repr(self.arch), bound) from None
            if reason.startswith(_NAME_MAP):
                reason = f"it has no kernel {entry}: {reason}"
            raise self._error(compiler, reason, str(error), options) from None
        needs = compiler_log.resources(made.log, made.symbol)
        image = with_yields(made.image)[0] if self.source.yields else made.image
        return Binary(
            image=image, symbol=made.symbol, log=made.log, from_cache=False, seconds=0.0,
            **asdict(needs),
        )  # fmt: skip

    def metadata(self, binary: Binary) -> dict[str, Any]:
        """What the cache keeps beside the image: what ``Binary`` needs, and what people ask."""
        needs = asdict(replace(binary, image=b""))
        for absent in ("image", "from_cache", "seconds"):
            del needs[absent]
        return {
            "binary": needs,
            "file": self.source.file,
            "entry": self.source.entry,
            "constants": dict(self.source.pairs),
            "arch": self.arch,
            "compiler": str(nvrtc.library()),
        }

    def _error(
        self, compiler: nvrtc.Nvrtc, reason: str, log: str, options: tuple[str, ...]
    ) -> CompileError:
        foreign = self.source.foreign
        texts = {**self.tree.files, _CONSTANTS: self.source.header}
        texts |= () if foreign is None else foreign.texts
        context = [
            compiler_log.excerpt(log, texts),
            f"Kernel: {self.source}",
            f"Compiler: {compiler}, options {' '.join(options)}",
        ]
        shown = "\n".join(filter(None, context))
        return CompileError(self.source.file, self.arch, reason, shown, log)


# ---- on the GPU ---------------------------------------------------------------------------------

# Architectures whose own instructions (TMA, bulk copies, clusters) need the suffix.
_SPECIFIC = {(9, 0): "sm_90a", (10, 0): "sm_100a", (12, 0): "sm_120a"}

_loaded: dict[tuple[KernelSource, int], _core.CudaKernel] = {}
_loading = threading.Lock()


def architecture_of(capability: tuple[int, int]) -> str:
    """What to compile for, for GPUs of a compute capability."""
    return _SPECIFIC.get(capability, f"sm_{capability[0]}{capability[1]}")


def capability_of(arch: str) -> tuple[int, int]:
    """The compute capability of the GPUs that an architecture, such as ``"sm_90a"``, is for.

    Raises:
        ArgumentError: ``arch`` is no real architecture.
    """
    number = re.fullmatch(r"sm_(\d{1,9})[af]?", arch, re.ASCII)
    if number is None:
        raise ArgumentError("arch", repr(arch), "a real architecture, such as 'sm_90a'")
    return divmod(int(number[1]), 10)


def check_architecture(arch: str) -> None:
    """Raises UnavailableError unless there is an NVRTC that compiles for ``arch``."""
    compiler = nvrtc.library()
    major, minor = capability_of(arch)
    if 10 * major + minor not in compiler.architectures:
        known = ", ".join(f"sm_{known}" for known in compiler.architectures)
        raise UnavailableError(
            f"{compiler} does not compile for {arch}, only for {known}: install a newer "
            "one (`fanfold jit where` says where it is looked for), or take the host backend "
            "(FANFOLD_BACKEND=host)"
        )


def load(source: KernelSource, device_index: int, config: Config | None = None) -> _core.CudaKernel:
    """The kernel, ready to launch on a GPU; the same object for the same source and GPU.

    Must not be called while a CUDA graph is captured: call everything once before.

    Raises:
        CompileError, UnavailableError: as :func:`compile`.
        DriverFailure: the driver refuses the compiled kernel.
    """
    return load_all([source], device_index, config)[0]


def refuse_in_capture(source: KernelSource) -> None:
    """Raises UsageError if a CUDA graph is being captured, where nothing can be loaded.

    For a kernel that a call needs and that is not there.
    """
    import torch

    if torch.cuda.is_current_stream_capturing():
        raise UsageError(
            f"{source} is not loaded yet, which a CUDA graph cannot hold; make the same call once "
            "before the capture"
        )


def load_all(
    sources: Sequence[KernelSource], device_index: int, config: Config | None = None
) -> list[_core.CudaKernel]:
    """:func:`load` of each. Those that nobody has compiled before are compiled at the same time,
    as each takes the compiler about a second of one core."""
    # What is there needs no lock: loading may wait for kernels of ranks that are other threads, and
    # those for a rank that comes here for a kernel of an earlier call.
    if any((source, device_index) not in _loaded for source in sources):
        _load_missing(sources, device_index, config)
    return [_loaded[source, device_index] for source in sources]


def _load_missing(
    sources: Sequence[KernelSource], device_index: int, config: Config | None
) -> None:
    import torch

    from fanfold.gpus import threads_share_gpu

    device = torch.device("cuda", device_index)
    if threads_share_gpu() and not torch.cuda.is_current_stream_capturing():
        # The driver may wait for all kernels of the GPU before it loads one, and lets nobody launch
        # meanwhile. When this rank's kernels have ended, the other ranks have launched the ones
        # that those waited for; and it holds no lock that they need until then.
        torch.cuda.current_stream(device).synchronize()
    with _loading:
        missing = [one for one in dict.fromkeys(sources) if (one, device_index) not in _loaded]
        if missing:
            arch = architecture_of(torch.cuda.get_device_capability(device))
            job = functools.partial(compile, arch=arch, config=config)
            with ThreadPoolExecutor(len(missing)) as pool:
                binaries = list(pool.map(job, missing))
            for source, binary in zip(missing, binaries, strict=True):
                _loaded[source, device_index] = _into(device, source, binary)


def _into(device: torch.device, source: KernelSource, binary: Binary) -> _core.CudaKernel:
    import torch

    from fanfold import _core

    with torch.cuda.device(device):
        # Makes the context current that the kernel is loaded into.
        torch.empty(1, dtype=torch.float32, device=device)
        return _core.CudaKernel(binary.image, source.entry, binary.symbol)
