"""A libnccl of the tests' own (``nccl.cpp``): its ranks are threads, and its GPUs are the CPU."""

from __future__ import annotations

import ctypes
import gc
import threading
import types
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import torch

from fanfold.jit import ForeignHeaders
from fanfold.memory import gin, gpu_regions, nccl
from fanfold.nccl import headers
from fanfold.nccl.communicator import Communicator
from fanfold.nccl.library import NcclLibrary
from tests.emulation.world import HERE, Builder


def over_cpu(address: int, nbytes: int, device: torch.device, owner: object) -> torch.Tensor:
    """In the place of :func:`fanfold.memory.nccl.tensor_over`."""
    memory = (ctypes.c_uint8 * nbytes).from_address(address)
    memory.owner = owner  # type: ignore[attr-defined]
    return torch.frombuffer(memory, dtype=torch.uint8)


@contextmanager
def emulated_nccl(builder: Builder) -> Iterator[ctypes.CDLL]:
    """Within it the process has loaded it. Afterwards nothing of it may be left."""
    library = builder.load_host("nccl", HERE / "nccl.cpp")
    library.behave_well()
    path = str(builder.folder / "nccl" / "host.so")
    cpu = types.SimpleNamespace(
        device=lambda *_: torch.device("cpu"), cuda=torch.cuda, Tensor=torch.Tensor
    )
    of_the_emulation = ForeignHeaders("", "of the emulation", ())
    with (
        mock.patch.object(nccl, "loaded", side_effect=lambda: NcclLibrary.open(path)),
        mock.patch.object(nccl, "tensor_over", over_cpu),
        mock.patch.object(gin, "tensor_over", over_cpu),
        mock.patch.object(headers, "of", return_value=of_the_emulation),
        mock.patch.object(gpu_regions, "torch", cpu),
        # One that a process keeps would be one rank's only.
        mock.patch.object(Communicator, "_kept", [ctypes.c_void_p()]),
        mock.patch.multiple(torch.cuda, current_device=lambda: 0, set_device=lambda index: None),
    ):
        yield library
    gc.collect()
    # Communicators end when all their ranks have ended them, in threads of their own.
    for thread in threading.enumerate():
        if thread.name == "fanfold-nccl":
            thread.join(20.0)
    assert library.left() == 0, "memory, windows or communicators are left"
    library.release_all()
