"""The low-latency mode of GPUs with its kernels on CPUs: ranks of one process, each a thread.

The kernels' sources are compiled by the host's compiler (``cuda.hpp``) for the constants at hand,
and a launch runs them to their end. Everything above them is the mode as it is; only what it asks
of ``torch.cuda`` is answered here. A rank's kernels wait for those of the others, so all ranks must
make the same calls: :meth:`World.run` gives each a thread.
"""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import os
import shutil
import subprocess
import threading
import types
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from fanfold import _core, kernel_reports
from fanfold.backends.low_latency import cuda, cuda_required_bytes
from fanfold.backends.low_latency.cuda import CudaLowLatency
from fanfold.backends.low_latency.sizes import core_geometry
from fanfold.backends.low_latency.token_major import CudaTokenMajor
from fanfold.config import Config
from fanfold.geometry import Geometry
from fanfold.jit import KernelSource
from fanfold.stream_order import StreamOrder
from tests.emulation.pinned import PAGEABLE

HERE = Path(__file__).parent
KERNELS = HERE.parent.parent / "fanfold" / "kernels"
CORE = HERE.parent.parent / "csrc"
OF_TESTS = HERE.parent / "kernels"
ARGUMENTS = {
    "fanfold::low_latency::dispatch": "DispatchArgs",
    "fanfold::low_latency::combine": "CombineArgs",
    "fanfold::formats::quantize": "QuantizeArgs",
    "fanfold::high_throughput::layout": "DispatchLayoutArgs",
    "fanfold::high_throughput::plan": "PlanArgs",
    "fanfold::high_throughput::dispatch": "HighThroughputDispatchArgs",
    "fanfold::high_throughput::combine": "HighThroughputCombineArgs",
    "fanfold::push_commands": "PushCommandsArgs",
    "fanfold::gin::fence": "GinBetweenCallsArgs",
    "fanfold::gin::await_fences": "GinBetweenCallsArgs",
    "fanfold::ring::push": "RingPushArgs",
    "fanfold::ring::clock": "RingClockArgs",
    "fanfold::fused_moe::layer": "FusedMoeArgs",
    "fanfold::grouped_gemm::multiply": "GroupedGemmArgs",
}
# Kernels that declare their dynamic shared memory themselves, and the namespace where they do.
_MEMORY_OF = {
    "fanfold::fused_moe::layer": "fanfold::fused_moe",
    "fanfold::grouped_gemm::multiply": "fanfold::grouped_gemm",
}
COMPILER = os.environ.get("CXX") or shutil.which("c++") or "c++"
_OPTIONS = (
    "-std=c++20", "-Og", "-w", "-ffp-contract=off", "-fPIC", "-fvisibility=hidden",
    "-fno-exceptions", "-pthread", "-Wno-psabi",
)  # fmt: skip
_PRELUDE, _RUNTIME = "prelude.hpp", ("ctas.cpp", "late.cpp")


class Builder:
    """Kernels compiled for the CPU, each once, also where several processes have one folder.

    Args:
        folder: keeps the libraries.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._loaded: dict[KernelSource, ctypes.CDLL] = {}

    def load(self, source: KernelSource) -> ctypes.CDLL:
        """The kernel as a library with ``emulate(arguments, ctas)``."""
        known = self._loaded.get(source)
        if known is None:
            known = ctypes.CDLL(str(self._library(source)))
            known.emulate.argtypes = (ctypes.c_void_p, ctypes.c_int)
            known.emulate.restype = None
            self._loaded[source] = known
        return known

    def load_host(self, name: str, *sources: Path) -> ctypes.CDLL:
        """C++ sources of the host as a library, ``name``; the core's headers are found."""
        with self._made_once(name) as folder:
            if folder is not None:
                _compile(
                    "-shared", "-fexceptions", f"-I{HERE}", f"-I{CORE}", f"-I{KERNELS}",
                    *map(str, sources), "-o", str(folder / "host.so"),
                )  # fmt: skip
        return ctypes.CDLL(str(self.folder / name / "host.so"))

    def _library(self, source: KernelSource) -> Path:
        name = hashlib.sha256(repr(source).encode()).hexdigest()[:16]
        with self._made_once("shared") as folder:
            if folder is not None:
                self._build_shared(folder)
        with self._made_once(name) as folder:
            if folder is not None:
                self._build(source, folder)
        return self.folder / name / "kernel.so"

    @contextmanager
    def _made_once(self, name: str) -> Iterator[Path | None]:
        """A new folder of that name, to be filled within; None if somebody has filled it."""
        folder = self.folder / name
        with (self.folder / f"{name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if (folder / "made").exists():
                yield None
                return
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
            yield folder
            (folder / "made").touch()

    def _build_shared(self, folder: Path) -> None:
        """What every kernel includes first, and what runs it."""
        prelude = folder / _PRELUDE
        shutil.copy(HERE / _PRELUDE, prelude)
        _compile("-x", "c++-header", f"-I{HERE}", f"-I{KERNELS}", str(prelude), "-o",
                 f"{prelude}.gch")  # fmt: skip
        # All that takes time; the kernels are compiled for short compilation.
        _compile(
            "-O3", "-fvisibility=default", "-shared", f"-I{KERNELS}",
            *(str(HERE / name) for name in _RUNTIME), "-o", str(folder / "libctas.so"),
        )  # fmt: skip

    def _build(self, source: KernelSource, folder: Path) -> None:
        (folder / "constants.h").write_text(source.header)
        shared = self.folder / "shared"
        memory = _MEMORY_OF.get(source.entry)
        _compile(
            *([] if memory is None else [f"-DMEMORY_OF={memory}"]),
            "-shared", "-include", str(shared / _PRELUDE), f"-I{HERE}", f"-I{folder}",
            f"-I{KERNELS}", f"-I{OF_TESTS}", f'-DKERNEL="{source.file}"', f"-DENTRY={source.entry}",
            f"-DARGUMENTS={ARGUMENTS[source.entry]}", str(HERE / "kernel.cpp"),
            str(shared / "libctas.so"), f"-Wl,-rpath,{shared}", "-o", str(folder / "kernel.so"),
        )  # fmt: skip


def _compile(*arguments: str) -> None:
    subprocess.run([COMPILER, *_OPTIONS, *arguments], check=True)


class Grid(ctypes.Structure):
    """``Grid`` of ctas.hpp."""

    _fields_ = [
        *((name, ctypes.c_int) for name in ("ctas", "cluster", "threads")),
        *((name, ctypes.c_uint32) for name in ("seed", "late_us")),
    ]


class ThreadGroup:
    """A group whose ranks are threads."""

    def __init__(self, rank: int, values: list[Any], barrier: threading.Barrier) -> None:
        self.rank, self.size = rank, barrier.parties
        self._values, self._barrier = values, barrier

    def all_gather(self, value: Any) -> list[Any]:
        self._values[self.rank] = value
        self._barrier.wait()
        gathered = list(self._values)
        self._barrier.wait()
        return gathered


def _launch(args: Any, kernel: Any, ctas: int, threads: int, stream: int, early: bool) -> None:
    del stream, early
    assert threads == kernel.cta_threads(), "a CTA of other threads than it was compiled for"
    kernel.emulate(args.address, ctas)


@contextmanager
def emulated(builder: Builder, ctas: int) -> Iterator[None]:
    """Within it the mode takes the CPU for a GPU with ``ctas`` SMs."""
    cuda_answers = {
        "get_device_properties": lambda index: types.SimpleNamespace(multi_processor_count=ctas),
        "get_device_capability": lambda index: (9, 0),
        "is_current_stream_capturing": lambda: False,
        "synchronize": lambda device: None,
    }
    with (
        mock.patch.object(_core.CudaDispatchArgs, "launch", _launch),
        mock.patch.object(_core.CudaCombineArgs, "launch", _launch),
        mock.patch.object(_core.GinBetweenCallsArgs, "launch", _launch),
        mock.patch.multiple(torch.cuda, **cuda_answers),
        mock.patch.object(torch._C, "_cuda_getCurrentRawStream", create=True, return_value=0),
        mock.patch.object(torch._C, "_cuda_getDevice", create=True, return_value=None),
        mock.patch.object(cuda.jit, "load", lambda source, *_: builder.load(source)),
        mock.patch.object(cuda.jit, "load_all", lambda every, *_: [*map(builder.load, every)]),
        mock.patch.object(kernel_reports, "torch", PAGEABLE),
        mock.patch.object(StreamOrder, "mark"),
    ):
        yield


def gpu_memory(group: ThreadGroup, regions: list[torch.Tensor], place: int) -> Any:
    """The symmetric memory of the GPU of one host whose regions are given, in the ranks' order."""
    addresses = [region.data_ptr() for region in regions]
    return types.SimpleNamespace(
        device=torch.device("cpu"),
        rank=group.rank,
        ranks=group.size,
        base=addresses.__getitem__,
        bytes_per_rank=regions[place].nbytes,
        usable_bytes=regions[place].nbytes,
        tensor=regions[place],
        group=group,
        between=None,
        close=lambda: None,
    )


class World:
    """All ranks of one geometry; only within :func:`emulated`.

    Args:
        geometry: its ``ranks`` are made.
        late: whether the weights come with combine.
        token_major: whether rows come once for each token and rank.
        settings: of :class:`Config`.
    """

    def __init__(
        self,
        geometry: Geometry,
        *,
        late: bool = False,
        token_major: bool = False,
        **settings: Any,
    ) -> None:
        config = Config.resolve(**{"timeout_s": 20.0, **settings})
        nbytes = cuda_required_bytes(geometry, late_weights=late, token_major=token_major)
        regions = [torch.empty(nbytes + 128, dtype=torch.uint8) for _ in range(geometry.ranks)]
        regions = [region[-region.data_ptr() % 128 :][:nbytes] for region in regions]
        first, _ = _core.cuda_low_latency_bytes(core_geometry(geometry), late, token_major)
        self._sentinels = [region[first:] for region in regions]
        values: list[Any] = [None] * geometry.ranks
        barrier = threading.Barrier(geometry.ranks, timeout=120.0)
        groups = [ThreadGroup(rank, values, barrier) for rank in range(geometry.ranks)]
        self.modes: list[Any] = [
            CudaTokenMajor(memory, config) if token_major else CudaLowLatency(memory, config, late)
            for memory in self._memories(geometry, config, groups, regions)
        ]

    def _memories(
        self,
        geometry: Geometry,
        config: Config,
        groups: list[ThreadGroup],
        regions: list[torch.Tensor],
    ) -> list[Any]:
        """Each rank's memory, in rank order; ``regions`` are those of the ranks' GPUs."""
        del geometry, config
        return [gpu_memory(group, regions, group.rank) for group in groups]

    def check_absent(self) -> None:
        """Asserts that every word which must begin as the sentinel is the sentinel again."""
        for rank, region in enumerate(self._sentinels):
            left = int((region != 0xFF).sum())
            assert left == 0, f"{left} bytes stand in the memory of rank {rank}"

    def run(self, program: Callable[[int, Any], Any]) -> list[Any]:
        """``program(rank, mode)`` on all ranks at once; their results."""
        with ThreadPoolExecutor(len(self.modes)) as pool:
            return list(pool.map(program, range(len(self.modes)), self.modes))
