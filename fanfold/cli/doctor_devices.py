"""What ``fanfold doctor`` looks at beside the host: GPUs, their compiler, and networks.

As in ``doctor_host``, a probe returns a status, a detail and perhaps a hint. The libraries are
asked through their C interfaces, so that the answers do not depend on the build of PyTorch.
"""

from __future__ import annotations

import ctypes
import re
import shutil
import sys
from collections.abc import Iterator
from ctypes import byref, c_char_p, c_int, c_size_t
from itertools import combinations, groupby
from pathlib import Path
from typing import Any

from fanfold.cli.doctor_host import Outcome
from fanfold.errors import UnavailableError
from fanfold.jit.nvrtc import Rejected, library
from fanfold.nccl import headers
from fanfold.nccl.library import NcclLibrary, version_text

__all__ = ["driver", "gpus", "links", "nccl", "nvrtc"]

_NVIDIA_VENDOR = "0x10de"
_NO_DEVICE = 100
_CAPABILITY_MAJOR, _CAPABILITY_MINOR = 75, 76  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_*
_NATIVE_ATOMICS = 3  # CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED
_NO_NEED = "nothing to do: the host backend needs none"


def _load(*names: str) -> ctypes.CDLL | None:
    """The first of the libraries that exists, None if none does.

    Raises:
        OSError: one exists and cannot be loaded.
    """
    return next((library for library in map(_load_one, names) if library is not None), None)


def _load_one(name: str) -> ctypes.CDLL | None:
    try:
        return ctypes.CDLL(name)
    except OSError as error:
        text = str(error)
        # A library that exists but needs another one names that other one.
        if "No such file" in text and f"{name}: " in text and "needed by" not in text:
            return None
        raise


# ---- NVIDIA driver and GPUs ---------------------------------------------------------------------


def driver() -> Outcome:
    """The NVIDIA driver: its version, and the newest CUDA that it serves."""
    vendors = Path("/sys/bus/pci/devices").glob("*/vendor")
    devices = sum(path.read_text().strip() == _NVIDIA_VENDOR for path in vendors)
    cuda = _load("libcuda.so.1")
    if cuda is None:
        if devices:
            hint = "install the driver; in a container, start it with its GPUs (--gpus all)"
            return "problem", f"no libcuda.so.1, but {devices} NVIDIA devices on the bus", hint
        return "missing", "no libcuda.so.1, and no NVIDIA device on the bus", _NO_NEED
    version = c_int()
    _call(cuda, "cuDriverGetVersion", byref(version))
    served = f"serves CUDA {version.value // 1000}.{version.value % 1000 // 10}"
    kernel = Path("/proc/driver/nvidia/version")
    if not kernel.exists():
        return "problem", f"libcuda.so.1 {served}, but no kernel module is loaded", "load nvidia.ko"
    number = re.search(r"\b\d+\.\d+(\.\d+)?\b", kernel.read_text())
    return "ok", f"{number[0] if number else 'unknown version'}, {served}"


def _call(cuda: ctypes.CDLL, name: str, *args: Any) -> None:
    code = getattr(cuda, name)(*args)
    if code != 0:
        text = c_char_p()
        cuda.cuGetErrorName(code, byref(text))
        raise RuntimeError(f"{name} fails: {(text.value or b'unknown error').decode()} ({code})")


def _started() -> tuple[ctypes.CDLL, int] | None:
    """The driver's library, initialised, and the number of GPUs; None where there is none."""
    cuda = _load("libcuda.so.1")
    if cuda is None or cuda.cuInit(0) == _NO_DEVICE:
        return None
    _call(cuda, "cuInit", 0)
    count = c_int()
    _call(cuda, "cuDeviceGetCount", byref(count))
    return cuda, count.value


def gpus() -> Outcome:
    """The GPUs: how many of which kind, and whether PyTorch sees them."""
    started = _started()
    if started is None:
        return "missing", "no GPU that a driver serves", _NO_NEED
    cuda, count = started
    kinds = [_gpu(cuda, index) for index in range(count)]
    detail = "; ".join(f"{len(list(same))} x {kind}" for kind, same in groupby(kinds))
    return _seen_by_torch(count, detail)


def _seen_by_torch(count: int, detail: str) -> Outcome:
    try:
        import torch
    except Exception as error:
        return "ok", f"{detail}; PyTorch does not import ({type(error).__name__})"
    if not torch.version.cuda:
        hint = "to use them from PyTorch, install a CUDA build of it"
        return "ok", f"{detail}; PyTorch is a build without CUDA", hint
    seen = torch.cuda.device_count()
    if seen != count:
        hint = f"the driver may be too old for PyTorch's CUDA {torch.version.cuda}"
        return "problem", f"{detail}; PyTorch sees {seen} of {count}", hint
    return "ok", f"{detail}; PyTorch sees all"


def _gpu(cuda: ctypes.CDLL, index: int) -> str:
    name, total = ctypes.create_string_buffer(256), c_size_t()
    device, major, minor = c_int(), c_int(), c_int()
    _call(cuda, "cuDeviceGet", byref(device), index)
    _call(cuda, "cuDeviceGetName", name, len(name), device)
    _call(cuda, "cuDeviceTotalMem_v2", byref(total), device)
    _call(cuda, "cuDeviceGetAttribute", byref(major), _CAPABILITY_MAJOR, device)
    _call(cuda, "cuDeviceGetAttribute", byref(minor), _CAPABILITY_MINOR, device)
    capability = f"compute capability {major.value}.{minor.value}"
    return f"{name.value.decode()}, {total.value / (1 << 30):.0f} GiB, {capability}"


def links() -> Outcome:
    """How the GPUs reach each other's memory, pair by pair."""
    started = _started()
    if started is None or started[1] < 2:
        return "missing", "no two GPUs to link", _NO_NEED
    cuda, count = started
    pairs: dict[str, list[str]] = {}
    for first, second in combinations(range(count), 2):
        pairs.setdefault(_link(cuda, first, second), []).append(f"{first}-{second}")
    if len(pairs) == 1:
        return "ok", f"every pair of {count}: {next(iter(pairs))}"
    return "ok", "; ".join(f"{kind}: {' '.join(names)}" for kind, names in pairs.items())


def _link(cuda: ctypes.CDLL, first: int, second: int) -> str:
    reachable, atomics = c_int(), c_int()
    _call(cuda, "cuDeviceCanAccessPeer", byref(reachable), first, second)
    if not reachable.value:
        return "no peer access"
    _call(cuda, "cuDeviceGetP2PAttribute", byref(atomics), _NATIVE_ATOMICS, first, second)
    if atomics.value:
        return "peer access with native atomics (NVLink)"
    return "peer access without native atomics (PCIe)"


# ---- CUDA libraries -----------------------------------------------------------------------------


def _cuda_libraries(pattern: str) -> Iterator[Path]:
    """Where wheels (PyTorch's first) and CUDA toolkits keep the libraries named ``pattern``."""
    for folder in sys.path:
        yield from sorted(Path(folder).glob(f"nvidia/*/lib/{pattern}"), reverse=True)
    nvcc = shutil.which("nvcc")
    toolkits = [Path(nvcc).resolve().parent.parent] if nvcc else []
    toolkits += sorted(Path("/usr/local").glob("cuda*"), reverse=True)
    for toolkit in toolkits:
        yield from sorted(toolkit.glob(f"lib64/{pattern}"), reverse=True)


def nvrtc() -> Outcome:
    """CUDA's run-time compiler: its version, its place, and whether it compiles a kernel."""
    try:
        compiler = library()
        architectures = compiler.architectures
        chosen = "sm_90a" if 90 in architectures else f"sm_{max(architectures)}"
        program = 'extern "C" __global__ void probe(int* place) { *place = 1; }'
        compiler.compile("probe.cu", program, {}, [f"--gpu-architecture={chosen}"])
    except UnavailableError as error:
        reason, _, rest = str(error).partition(": ")
        return "missing", reason, f"GPU kernels need it: {rest}"
    except Rejected as error:
        return "problem", f"{compiler} does not compile: {error}", "install it again"
    known = ", ".join(f"sm_{number}" for number in architectures)
    major, minor = compiler.version
    return "ok", f"{major}.{minor}, {compiler.path} ({compiler.origin}), compiles for {known}"


def nccl() -> Outcome:
    """NCCL: its version and place, and the headers that let kernels use it."""
    places = [str(path) for path in _cuda_libraries("libnccl.so.*")]
    library = _load(*places, "libnccl.so.2")
    if library is None:
        hint = "only transports nccl:lsa and nccl:gin need it; a CUDA build of PyTorch brings it"
        return "missing", "neither in PyTorch's wheels nor on the library path", hint
    try:
        found = NcclLibrary.open(library._name)
    except UnavailableError as error:
        return "problem", str(error), "install it again"
    try:
        kernels = f"device headers in {headers.find(found)}"
    except UnavailableError as error:
        kernels = f"not for kernels: {error}"
    return "ok", f"{version_text(found.version)}, {found.path}, {_transports(found)}, {kernels}"


def _transports(library: NcclLibrary) -> str:
    if not library.has("windows"):
        return "too old for nccl:lsa and nccl:gin"
    try:
        library.require_gin()
    except UnavailableError:
        return "nccl:lsa, too old for nccl:gin"
    return "nccl:lsa and, where it finds a network for it, nccl:gin"
