"""Kernels for what PyTorch's own functions do, too, only slower: those do it where a kernel cannot
be had."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import torch

from fanfold.errors import UnavailableError
from fanfold.jit import nvrtc
from fanfold.jit.kernel import KernelSource, load, refuse_in_capture

if TYPE_CHECKING:
    from fanfold import _core

__all__ = ["load_where_possible"]

_LEAST_CAPABILITY = (9, 0)


def load_where_possible(source: KernelSource, device_index: int) -> _core.CudaKernel | None:
    """The kernel, ready to launch on a GPU; None where the GPU is older than compute capability
    9.0, or no NVRTC compiles for it: that stays so in this process.

    Raises:
        UsageError: it is not loaded yet, and a CUDA graph is being captured. The other way would
            stay in the graph, and nobody would know why it is slow.
        CompileError, DriverFailure: as :func:`fanfold.jit.load`.
    """
    if not _can_run(device_index):
        return None
    refuse_in_capture(source)
    try:
        return load(source, device_index)
    except UnavailableError:  # the NVRTC that is there does not know this GPU
        return None


@functools.cache
def _can_run(device_index: int) -> bool:
    """Whether this GPU has what such kernels need, and there is a compiler."""
    capability = torch.cuda.get_device_capability
    if torch.version.cuda is None or capability(device_index) < _LEAST_CAPABILITY:
        return False
    try:
        nvrtc.find()
    except UnavailableError:
        return False
    return True
