"""The mirror of benchmarks: what it needs of the library is there, without a GPU."""

from __future__ import annotations

import runpy
import types
from pathlib import Path
from typing import Any

import torch

from fanfold.memory import GpuPeerMemory

FILE = Path(__file__).parents[2] / "benchmarks" / "mirror.py"


def test_its_memory_has_what_that_of_gpus_has() -> None:
    program = runpy.run_path(str(FILE))
    memory = program["_MirrorMemory"]
    region = types.SimpleNamespace(
        device=torch.device("cuda", 0), usable_bytes=256, tensor=torch.zeros(256),
        close=lambda: None, base=lambda peer: 4096 * peer,
    )  # fmt: skip
    memory.__init__.__globals__["CudaSymmetricMemory"] = lambda group, nbytes: region
    group: Any = types.SimpleNamespace(rank=1, size=2)
    mirrored = memory(group, 4, 256)
    wanted = {
        name for each in GpuPeerMemory.__mro__ for name in vars(each).get("__annotations__", {})
    }
    wanted |= {
        name
        for each in GpuPeerMemory.__mro__[:2]
        for name, value in vars(each).items()
        if not name.startswith("_") and (callable(value) or isinstance(value, property))
    }
    assert {"between", "usable_bytes", "base", "ranks"} <= wanted
    assert [name for name in wanted if not hasattr(mirrored, name)] == []
    assert [mirrored.base(peer) for peer in range(4)] == [4096, 0, 0, 0]
