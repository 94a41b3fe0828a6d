"""The low-latency mode on a GPU that is none: tensors of the CPU, and kernels that only write down
their arguments."""

from __future__ import annotations

import types
from typing import Any

import pytest
import torch

from fanfold import Config, _core, kernel_reports
from fanfold.backends.low_latency import cuda, cuda_required_bytes
from fanfold.backends.low_latency.cuda import CudaLowLatency
from fanfold.backends.low_latency.protocol import RoutingLayout
from fanfold.backends.low_latency.sizes import core_geometry
from fanfold.geometry import Geometry
from tests.emulation.pinned import PAGEABLE

CPU = torch.device("cpu")
GEOMETRY = Geometry(ranks=4, num_experts=8, top_k=2, hidden=256, max_tokens=6)
LOCAL, CAPACITY = 2, 24
SEND, RECEIVE, WHOLE = 1, 2, 3


class Gpu:
    """Stands for ``torch.cuda`` and the driver.

    Attributes:
        launches: arguments of the kernels launched, and their streams.
        stream: the current one.
        device: the current one; None is where the mode is.
    """

    def __init__(self) -> None:
        self.launches: list[tuple[Any, int]] = []
        self.stream = 0
        self.device: int | None = None

    @property
    def last(self) -> Any:
        return self.launches[-1][0]


def _blind(geometry: Geometry, layout: RoutingLayout, device: torch.device) -> _core.CudaFastPath:
    del device
    parts = (layout.table_at, layout.source_tokens_at, layout.row_weights_at)
    return _core.CudaFastPath(None, core_geometry(geometry), *(4 * part for part in parts))


def stand_in(monkeypatch: pytest.MonkeyPatch, *, fast_path: bool = True) -> Gpu:
    """A GPU that the mode takes the CPU for; without ``fast_path`` as with a PyTorch whose tensors
    cannot be read from C++."""
    made = Gpu()
    if not fast_path:
        monkeypatch.setattr(cuda, "fast_path_of", _blind)

    def launch(
        args: Any, kernel: object, ctas: int, threads: int, stream: int, early: bool
    ) -> None:
        made.launches.append((args.copy(), stream))

    for kind in (_core.CudaDispatchArgs, _core.CudaCombineArgs):
        monkeypatch.setattr(kind, "launch", launch)
    for name, value in {
        "get_device_properties": lambda index: types.SimpleNamespace(multi_processor_count=8),
        "get_device_capability": lambda index: (9, 0),
        "is_current_stream_capturing": lambda: False,
        "synchronize": lambda device: None,
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    for name, value in {
        "_cuda_getCurrentRawStream": lambda index: made.stream,
        "_cuda_getDevice": lambda: made.device,
    }.items():
        monkeypatch.setattr(torch._C, name, value, raising=False)
    monkeypatch.setattr(cuda.jit, "load", lambda *_: object())
    monkeypatch.setattr(cuda.jit, "load_all", lambda *_: [])

    def agree(group: object, facts: object, error: Exception | None = None) -> None:
        if error is not None:
            raise error

    monkeypatch.setattr(cuda, "agree", agree)
    monkeypatch.setattr(kernel_reports, "torch", PAGEABLE)
    return made


def open_mode(*, late: bool = False, **rest: Any) -> CudaLowLatency:
    nbytes = cuda_required_bytes(GEOMETRY, late_weights=late)
    memory: Any = types.SimpleNamespace(
        device=CPU,
        rank=0,
        ranks=4,
        base=lambda peer: (peer + 1) << 40,
        usable_bytes=nbytes,
        tensor=torch.empty(nbytes, dtype=torch.uint8),
        group=types.SimpleNamespace(size=4),  # of processes
        between=None,
    )
    return CudaLowLatency(memory, Config.resolve(backend="cuda"), late, **rest)


def tokens(count: int = 5) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    x = torch.zeros((count, 256), dtype=torch.bfloat16)
    return x, torch.zeros((count, 2), dtype=torch.int64), torch.zeros((count, 2))


def outputs() -> torch.Tensor:
    return torch.zeros((LOCAL, CAPACITY, 256), dtype=torch.bfloat16)
