"""Products of FP8 rows with the weights of their groups, on GPUs of compute capability 9.0 by a
kernel, on CPUs by PyTorch.

Row ``r`` of a group ``g``: ``d[r, n] = sum over k of a[r, k] * a_scales[r, k // 128] *
b[g, n, k] * b_scales[g, n // 128, k // 128]``, summed in FP32 and rounded to bfloat16. A kernel
adds 128 products at a time in the tensor cores, whose sums have about 14 bits behind the leading
one; against an FP64 sum its results differ by ``1 - similarity`` of about 3e-6, the rounding to
bfloat16 included.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

from fanfold import _core, jit
from fanfold.errors import ArgumentError, UnavailableError
from fanfold.formats import BLOCK
from fanfold.jit import KernelSource
from fanfold.representation import worded

__all__ = ["MOST_DEPTH", "Kind", "Operands", "Pair", "multiply", "pair_of", "scales_for_kernel"]

Pair = tuple[torch.Tensor, torch.Tensor]
"""e4m3 values and their float32 scales."""

MOST_DEPTH = 128 * BLOCK
"""A warp holds the scales of so many columns."""

_THREADS = 384
_SHARED_BYTES = {64: 198656, 128: 232448}  # by rows of a tile
_FEW_ROWS = 64
_CAPABILITY = 9


def pair_of(name: str, given: object) -> Pair:
    """``given``, if it is a pair.

    Raises:
        ArgumentError: it is something else.
    """
    if isinstance(given, (tuple, list)) and len(given) == 2:
        values, scales = given
        return values, scales
    raise ArgumentError(name, worded(given), "a pair of e4m3 values and float32 scales")


@dataclass(frozen=True)
class Operands:
    """What one call multiplies; all on one device.

    Attributes:
        a: ``[slices, rows, depth]`` e4m3, contiguous; one slice, or one for each group.
        a_scales: ``[slices, rows, depth / 128]`` float32.
        b: ``[groups, columns, depth]`` e4m3, contiguous.
        b_scales: ``[groups, columns / 128, depth / 128]`` float32, contiguous.
        groups: int32, contiguous. With one slice the group of each row, negative for rows of none,
            the same for 128 rows from a multiple of 128 on but for negative ones at their end.
            With a slice for each group, the rows of each.
        masked: whether there is a slice for each group.
    """

    a: torch.Tensor
    a_scales: torch.Tensor
    b: torch.Tensor
    b_scales: torch.Tensor
    groups: torch.Tensor
    masked: bool

    @property
    def depth(self) -> int:
        """Columns of ``a`` and ``b``."""
        return self.a.shape[2]


def multiply(operands: Operands, d: torch.Tensor, usual_rows: int, fast_accumulation: bool) -> None:
    """Writes the products to ``d``, ``[slices, rows, columns]`` bfloat16, contiguous. Rows that no
    group has are left, or get anything.

    Args:
        operands: checked.
        d: on the same device.
        usual_rows: of a group, most often; decides how a kernel works, not the result.
        fast_accumulation: whether the tensor cores may keep sums (kernels/gemm/sum.cuh).

    Raises:
        UnavailableError: for a GPU of another compute capability than 9.0, or without NVRTC.
        UsageError: the kernel is not loaded yet, and a CUDA graph is being captured.
    """
    if d.numel() == 0:
        return
    if operands.a.is_cuda:
        _on_gpu(operands, d, usual_rows, fast_accumulation)
    else:
        _anywhere(operands, d)


# ---- PyTorch ------------------------------------------------------------------------------------


def _anywhere(operands: Operands, d: torch.Tensor) -> None:
    for group, (weights, scales) in enumerate(zip(operands.b, operands.b_scales, strict=True)):
        part = group if operands.masked else 0
        if operands.masked:
            places = torch.arange(d.shape[1], dtype=torch.int32, device=d.device)
            rows = places < operands.groups[group]
        else:
            rows = operands.groups == group
        left = _dequantized(operands.a[part][rows], operands.a_scales[part][rows])
        right_scales = scales.repeat_interleave(BLOCK, dim=0)[: weights.shape[0]]
        d[part, rows] = (left @ _dequantized(weights, right_scales).T).bfloat16()


def _dequantized(values: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    return values.float() * scales.repeat_interleave(BLOCK, dim=1)


# ---- the kernel ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Kind:
    """A kernel; the number of rows is free.

    Attributes:
        columns: of the result, a multiple of 64.
        depth: a multiple of 128, at most :data:`MOST_DEPTH`.
        groups: of weights.
        masked: whether each group has a slice of rows.
        few: whether groups have few rows.
        fast_accumulation: whether sums stay in the tensor cores (kernels/gemm/sum.cuh).
    """

    columns: int
    depth: int
    groups: int
    masked: bool
    few: bool = False
    fast_accumulation: bool = False

    @property
    def tile_rows(self) -> int:
        """Rows that a CTA multiplies at a time."""
        return 64 if self.few else 128

    @property
    def source(self) -> KernelSource:
        """What to compile."""
        constants = {
            "kColumns": self.columns,
            "kDepth": self.depth,
            "kMostDepth": self.depth,
            "kGroups": self.groups,
            "kMasked": int(self.masked),
            "kTileRows": self.tile_rows,
            "kTwoLevels": int(not self.fast_accumulation),
            "kSharedBytes": _SHARED_BYTES[self.tile_rows],
        }
        entry = "fanfold::grouped_gemm::multiply"
        return KernelSource("grouped_gemm/multiply.cu", entry, constants, _THREADS, yields=True)


def scales_for_kernel(scales: torch.Tensor) -> torch.Tensor:
    """``[slices, rows, blocks]`` float32 with rows innermost, each column of them on 16 bytes: as
    they are where they are so already, else copied."""
    slices, rows, blocks = scales.shape
    column = scales.stride(2) if blocks > 1 else -(-rows // 4) * 4
    if (
        (rows == 1 or scales.stride(1) == 1)
        and column >= rows
        and column % 4 == 0
        and (slices == 1 or scales.stride(0) == blocks * column)
        and scales.data_ptr() % 16 == 0
    ):
        return scales
    padded = -(-rows // 4) * 4
    made = torch.empty_strided(
        (slices, rows, blocks), (blocks * padded, 1, padded), dtype=torch.float32,
        device=scales.device,
    )  # fmt: skip
    return made.copy_(scales)


def _on_gpu(operands: Operands, d: torch.Tensor, usual_rows: int, fast_accumulation: bool) -> None:
    a, b, index = operands.a, operands.b, operands.a.device.index
    slices, rows, depth = a.shape
    groups, columns, _ = b.shape
    few = operands.masked and usual_rows <= _FEW_ROWS
    kind = Kind(columns, depth, groups, operands.masked, few, fast_accumulation and not few)
    kernel, ctas = _loaded(kind, index)
    tile_rows = kind.tile_rows
    scales = scales_for_kernel(operands.a_scales)
    scale_rows = scales.stride(2) if depth > BLOCK else -(-rows // 4) * 4
    tensors = (a, scales, b, operands.b_scales, d, operands.groups)
    args = _core.CudaGroupedGemmArgs(
        [tensor.data_ptr() for tensor in tensors],
        [slices, rows, scale_rows, columns, depth, groups],
        tile_rows,
    )
    stream = torch._C._cuda_getCurrentRawStream(index)
    args.launch(kernel, ctas, _THREADS, _SHARED_BYTES[tile_rows], stream)


@functools.cache
def _loaded(kind: Kind, index: int) -> tuple[_core.CudaKernel, int]:
    """A kernel, and how many CTAs run it."""
    properties = torch.cuda.get_device_properties(index)
    if properties.major != _CAPABILITY:
        raise UnavailableError(
            f"{properties.name} has compute capability {properties.major}.{properties.minor}, and "
            "the grouped GEMM has a kernel for 9.0 (Hopper) only: use another GPU, or CPU tensors"
        )
    jit.refuse_in_capture(kind.source)
    kernel = jit.load(kind.source, index)
    kernel.allow_shared_bytes(_SHARED_BYTES[kind.tile_rows])
    return kernel, properties.multi_processor_count // 2 * 2
