"""What PyTorch and the JIT say of a GPU to who asks for a kernel that is optional
(:mod:`fanfold.jit.optional`)."""

from __future__ import annotations

import types
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch

from fanfold.jit import KernelSource, optional


class Gpu:
    """The answers, and what was loaded."""

    def __init__(self) -> None:
        self.capability, self.capturing = (9, 0), False
        self.loaded: list[KernelSource] = []
        self.lacking: Exception | None = None

    def load(self, source: KernelSource, index: int) -> Any:
        if self.lacking is not None:
            raise self.lacking
        self.loaded.append(source)
        return types.SimpleNamespace()

    def find(self) -> None:
        if self.lacking is not None:
            raise self.lacking

    def forget(self) -> None:
        """What was found out about this GPU."""
        optional._can_run.cache_clear()


@contextmanager
def answering(loaded: dict[Any, Any]) -> Iterator[Gpu]:
    """A GPU with all that such kernels need, for which nothing of ``loaded`` is loaded yet."""
    gpu = Gpu()
    answers = {
        "get_device_capability": lambda index: gpu.capability,
        "get_device_properties": lambda index: types.SimpleNamespace(multi_processor_count=132),
        "is_current_stream_capturing": lambda: gpu.capturing,
    }
    gpu.forget()
    with (
        mock.patch.multiple(torch.cuda, **answers),
        mock.patch.object(torch.version, "cuda", "13.0"),
        mock.patch.object(optional, "load", gpu.load),
        mock.patch.object(optional.nvrtc, "find", gpu.find),
        mock.patch.dict(loaded, clear=True),
    ):
        yield gpu
    gpu.forget()
