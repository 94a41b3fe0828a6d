"""Kernels that only tests use: they try what ``fanfold/kernels/device`` names."""

from __future__ import annotations

import shutil
from pathlib import Path

from fanfold.jit import KernelSource
from fanfold.jit.kernel import KERNELS

BULK_COPY = KernelSource(
    "bulk_copy.cu", "bulk_copy", {"kChunkBytes": 4096, "kThreads": 128}, threads=128
)
CONVERT = KernelSource("numbers.cu", "convert", {"kThreads": 256}, threads=256)
PRODUCTS = [
    KernelSource("wgmma.cu", "product", {"kColumns": columns}, threads=128)
    for columns in (64, 128, 192, 256)
]
"""64 rows by ``kColumns`` on the tensor cores, Hopper only."""
PUTS = KernelSource("puts.cu", "fanfold::put_and_wait", {"kThreads": 64}, threads=64)
"""Bytes and signals for all ranks over NCCL's GIN; needs its headers."""
BOXES = KernelSource("tensor_copy.cu", "boxes", threads=128)
QUANTISE = KernelSource("numbers.cu", "quantise", {"kThreads": 256}, threads=256)
PUSH = [
    KernelSource(
        "ring_push.cu", "fanfold::push_commands", {"kThreads": 64, "kWay": way}, threads=64
    )
    for way in range(4)
]
"""Threads that push into a ring: each takes its ticket first, or only when the ring has room; or
warps take theirs together, of all lanes or of some."""


def kernel_root(folder: Path) -> Path:
    """A root for ``compile_in``, made in ``folder``: these kernels and the headers of Fanfold's."""
    root = folder / "kernels"
    for room in ("device", "layout", "nccl", "protocol"):
        shutil.copytree(KERNELS / room, root / room)
    for source in Path(__file__).parent.glob("*.cu"):
        shutil.copy(source, root)
    return root
