"""The clock and the power of a GPU, as NVML reports them."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

import torch

__all__ = ["Load", "Nvml", "open_nvml"]

_SM_CLOCK = 1  # NVML_CLOCK_SM
_MILLI = 1e-3


@dataclass(frozen=True)
class Load:
    """One sample; None for what NVML does not report.

    Attributes:
        sm_mhz: the clock of the SMs.
        watts: the power of the board; on recent GPUs the mean of the last second.
    """

    sm_mhz: int | None = None
    watts: float | None = None


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

    def sample(self) -> Load:
        """The load at this moment. Takes some ten microseconds of the CPU."""
        clock = self._read("nvmlDeviceGetClockInfo", ctypes.c_int(_SM_CLOCK))
        milliwatts = self._read("nvmlDeviceGetPowerUsage")
        return Load(clock, None if milliwatts is None else milliwatts * _MILLI)

    def _read(self, function: str, *arguments: Any) -> int | None:
        if self._library is None:
            return None
        value = ctypes.c_uint()
        failed = getattr(self._library, function)(self._handle, *arguments, ctypes.byref(value))
        return None if failed else value.value


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
