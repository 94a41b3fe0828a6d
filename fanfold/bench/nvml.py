"""The power of a GPU, as NVML reports it."""

from __future__ import annotations

import ctypes
from typing import Any

import torch

__all__ = ["Nvml", "open_nvml"]

_MILLI = 1e-3


class Nvml:
    """Samples one GPU.

    Args:
        library: ``libnvidia-ml``, initialised; None reports nothing.
        uuid: the GPU's, as NVML spells it.
    """

    def __init__(self, library: Any, uuid: str) -> None:
        self._library = library
        self._handle = ctypes.c_void_p()
        if library is not None and library.nvmlDeviceGetHandleByUUID(
            uuid.encode(), ctypes.byref(self._handle)
        ):
            self._library = None

    def watts(self) -> float | None:
        """The power of the board, on recent GPUs the mean of the last second; None if NVML does not
        report it. Takes some ten microseconds of the CPU."""
        if self._library is None:
            return None
        milliwatts = ctypes.c_uint()
        if self._library.nvmlDeviceGetPowerUsage(self._handle, ctypes.byref(milliwatts)):
            return None
        return milliwatts.value * _MILLI


def open_nvml(device: torch.device) -> Nvml:
    """What samples ``device``, a GPU; reports nothing where NVML is missing."""
    uuid = getattr(torch.cuda.get_device_properties(device), "uuid", None)
    try:
        library = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        library = None
    if library is not None and (uuid is None or library.nvmlInit_v2()):
        library = None
    return Nvml(library, "GPU-" + str(uuid).removeprefix("GPU-"))
