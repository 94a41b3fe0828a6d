"""A HighThroughput that runs on emulated GPUs; ranks are threads."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import torch

from fanfold import high_throughput
from fanfold.backends import opening
from fanfold.backends.choose import BackendChoice
from fanfold.backends.high_throughput.room import Room
from tests.emulation.deep_ep import PLACED, Memory
from tests.emulation.high_throughput import emulated
from tests.emulation.world import Builder


def _unwritten(room: Room, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Memory for results in which whatever reads before it was written finds no number."""
    filling = float("nan") if dtype.is_floating_point else -77
    return torch.full(shape, filling, dtype=dtype, device=room.device)


@contextmanager
def emulated_layers(builder: Builder, ctas: int, placed: BackendChoice = PLACED) -> Iterator[None]:
    """Within it a HighThroughput takes the CPU for a GPU of compute capability 9.0."""
    with (
        emulated(builder, ctas),
        mock.patch.object(high_throughput, "choose", return_value=placed),
        mock.patch.object(opening, "CudaSymmetricMemory", Memory),
        mock.patch.object(Room, "empty", _unwritten),
    ):
        yield
