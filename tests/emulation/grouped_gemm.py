"""The grouped GEMM of GPUs with its kernel on CPUs.

The arguments, the schedule of tiles, the stages, the sums and the stores are what runs on a GPU;
see :mod:`tests.emulation.fused_moe` for what is not.
"""

from __future__ import annotations

import contextlib
import ctypes
import types
from collections.abc import Iterator
from unittest import mock

import torch

from fanfold import grouped_gemm
from tests.emulation.world import CORE, HERE, Builder, Grid

__all__ = ["emulated"]

_SOURCES = (
    *(HERE / f"{name}.cpp" for name in ("grouped_gemm", "tensor_map")),
    CORE / "cuda" / "grouped_gemm.cpp",
)


class _Sizes(ctypes.Structure):
    """``GroupedGemmSizes`` of csrc/cuda/grouped_gemm.h."""

    _fields_ = [("of_call", ctypes.c_uint64 * 6), ("tile_rows", ctypes.c_uint32)]


@contextlib.contextmanager
def emulated(builder: Builder, ctas: int) -> Iterator[None]:
    """Within it products of tensors of the CPU are the kernel's, on ``ctas`` CTAs."""
    host = builder.load_host("grouped_gemm", *_SOURCES)

    class Args:
        """In place of ``_core.CudaGroupedGemmArgs``."""

        def __init__(self, addresses: list[int], sizes: list[int], tile_rows: int) -> None:
            self._operands = (ctypes.c_size_t * 6)(*addresses)
            self._sizes = _Sizes((ctypes.c_uint64 * 6)(*sizes), tile_rows)

        def launch(
            self, kernel: ctypes.CDLL, ctas: int, threads: int, shared: int, stream: int
        ) -> None:
            assert shared <= 227 << 10
            del stream
            grid = Grid(ctas, cluster=2, threads=threads, seed=1)
            host.run_grouped_gemm(
                self._operands, ctypes.byref(self._sizes), kernel.emulate_grid, ctypes.byref(grid)
            )

    def on_cpu(operands: grouped_gemm.Operands, d: torch.Tensor, rows: int, fast: bool) -> None:
        if d.numel() > 0:
            grouped_gemm._on_gpu(operands, d, rows, fast)

    with (
        mock.patch.object(grouped_gemm, "_core", types.SimpleNamespace(CudaGroupedGemmArgs=Args)),
        mock.patch.object(
            grouped_gemm, "_loaded", lambda kind, index: (builder.load(kind.source), ctas)
        ),
        mock.patch("fanfold.deep_gemm.multiply", on_cpu),
        mock.patch.object(torch._C, "_cuda_getCurrentRawStream", create=True, return_value=0),
    ):
        yield
