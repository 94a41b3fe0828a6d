"""Buffers on GPUs as the programs of the conformance tests, which work on the CPU, see them."""

from __future__ import annotations

from typing import Any

import torch

from fanfold.deep_ep import EPHandle
from fanfold.deep_ep.handles import GpuHandle
from tests.gpu.support import own_device

__all__ = ["FromHost", "moved"]


class Copied(tuple):  # type: ignore[type-arg]
    """Copies of a handle's tensors on the CPU, with the handle."""

    handle: GpuHandle


class HandleFromHost:
    """An ElasticBuffer's handle, its tensors copied to the CPU when they are read."""

    def __init__(self, handle: EPHandle) -> None:
        self.handle = handle

    def __getattr__(self, name: str) -> Any:
        return moved(getattr(self.handle, name), torch.device("cpu"))


def moved(value: Any, device: torch.device) -> Any:
    """``value`` with all its tensors on ``device``; strides stay as they are."""
    if isinstance(value, torch.Tensor):
        there = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=device)
        return there.copy_(value)
    if isinstance(value, GpuHandle):
        copied = Copied(tensor.to(device) for tensor in value)
        copied.handle = value
        return copied
    if isinstance(value, Copied | HandleFromHost):
        return value.handle
    if type(value) is tuple:
        return tuple(moved(part, device) for part in value)
    return value


class FromHost:
    """Carries the tensors of a Buffer's calls there and back."""

    def __init__(self, buffer: Any) -> None:
        self._buffer = buffer
        self._handles: dict[int, HandleFromHost] = {}

    def __getattr__(self, name: str) -> Any:
        attribute = getattr(self._buffer, name)
        if name in ("destroy", "group_size") or not callable(attribute):
            return attribute

        def call(*args: Any, **options: Any) -> Any:
            there = own_device()
            on_gpu = {name: moved(value, there) for name, value in options.items()}
            result = attribute(*moved(args, there), **on_gpu)
            # Only what this rank's kernels do is waited for: other ranks may be threads.
            if hasattr(self._buffer, "get_comm_stream"):
                self._buffer.get_comm_stream().synchronize()
            torch.cuda.current_stream(there).synchronize()
            for name, value in options.items():
                if isinstance(value, torch.Tensor):  # statistics, to which a call adds
                    value.copy_(on_gpu[name])
            return self._brought(result)

        return call

    def _brought(self, result: Any) -> Any:
        if isinstance(result, EPHandle):
            return self._handles.setdefault(id(result), HandleFromHost(result))
        if type(result) is tuple:
            return tuple(self._brought(part) for part in result)
        return moved(result, torch.device("cpu"))
