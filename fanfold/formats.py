"""Row encodings: how the values of one token travel, and what arrives.

``RowFormat.BF16``   hidden x bfloat16.
``RowFormat.FP8``    hidden x float8_e4m3fn with one scale per 128 columns (the last block may be
                     ragged): value = e4m3 * scale, scale = max(amax(|x|), 1e-4) / 448.
``RowFormat.NVFP4``  hidden x e2m1 (0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives) with one
                     float8_e4m3fn scale per 16 columns: value = e2m1 * scale / global_scale, where
                     scale = e4m3(global_scale * amax(|x|) / 6). Low latency only.

Scales of fp8 rows can be rounded up to a power of two, and then packed as UE8M0: four exponent
bytes to an int32, value 2**(byte - 127), the block of the lowest index in the lowest byte.
"""

from __future__ import annotations

import enum
from typing import Literal

import torch

from fanfold import _core, quantizing
from fanfold.errors import ArgumentError
from fanfold.geometry import check_hidden
from fanfold.lending import lend

__all__ = [
    "BF16_ROWS",
    "BLOCK",
    "E4M3_MAX",
    "NVFP4_BLOCK",
    "Formats",
    "RowFormat",
    "RowFormatName",
    "ScaleFormat",
    "ScaleFormatName",
    "blocks",
    "dequantize",
    "dequantize_nvfp4",
    "nvfp4_scale_shape",
    "nvfp4_scales_by_row",
    "quantize",
    "scale_columns",
]

RowFormatName = Literal["bf16", "fp8", "nvfp4"]
ScaleFormatName = Literal["float32", "power_of_two", "ue8m0"]

BLOCK = 128
"""Columns that share one scale."""

NVFP4_BLOCK = 16
"""Columns of an nvfp4 row that share one scale."""

E4M3_MAX = 448.0
"""The largest float8_e4m3fn."""

_SMALLEST_AMAX = 1e-4


class RowFormat(enum.Enum):
    """How a row's values are encoded."""

    BF16 = "bf16"
    FP8 = "fp8"
    NVFP4 = "nvfp4"

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of a received row."""
        return _DTYPES[self.value]

    def columns(self, hidden: int) -> int:
        """Elements of a received row: two columns are in one of nvfp4."""
        return hidden // 2 if self is RowFormat.NVFP4 else hidden

    def check_hidden(self, hidden: int) -> None:
        """Raises ArgumentError unless a row of ``hidden`` columns is a multiple of 16 bytes."""
        if self is RowFormat.NVFP4 and hidden % 32:
            raise ArgumentError(
                "hidden", hidden, "a multiple of 32 for nvfp4: a row must be a multiple of 16 bytes"
            )
        check_hidden(hidden, self.dtype.itemsize)

    @classmethod
    def of(cls, value: RowFormat | str | torch.dtype) -> RowFormat:
        """The format that ``value`` names: a RowFormat, ``"bf16"``, ``"fp8"``, ``"nvfp4"``, or the
        dtype of the first two."""
        for member in cls:
            # Bytes may be anything.
            if value in (member, member.value) or value is member.dtype is not torch.uint8:
                return member
        raise ArgumentError("dispatch_dtype", repr(value), _NAMES)


_NAMES = "'bf16' or 'fp8', or in low latency 'nvfp4'"
_DTYPES = {"bf16": torch.bfloat16, "fp8": torch.float8_e4m3fn, "nvfp4": torch.uint8}


class ScaleFormat(enum.Enum):
    """How the scales of fp8 rows are rounded and stored."""

    FLOAT32 = "float32"
    POWER_OF_TWO = "power_of_two"
    UE8M0 = "ue8m0"

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of a scale tensor."""
        return torch.int32 if self is ScaleFormat.UE8M0 else torch.float32


Formats = tuple[RowFormat, ScaleFormat]
"""How the rows of a call travel."""

BF16_ROWS: Formats = (RowFormat.BF16, ScaleFormat.FLOAT32)


def blocks(hidden: int) -> int:
    """Scales of a row: ceil(hidden / 128)."""
    return -(-hidden // BLOCK)


def scale_columns(hidden: int, scale_format: ScaleFormat) -> int:
    """Last dimension of a scale tensor: a column per block, or per four blocks if packed."""
    count = blocks(hidden)
    return -(-count // 4) if scale_format is ScaleFormat.UE8M0 else count


def quantize(
    x: torch.Tensor, scale_format: ScaleFormat = ScaleFormat.FLOAT32
) -> tuple[torch.Tensor, torch.Tensor]:
    """fp8 rows of ``x``, as dispatch makes them (formula at the top of this module).

    Args:
        x: ``[T, hidden]`` bfloat16, contiguous. In one pass on the CPU, and on GPUs where there is
            NVRTC and compute capability 9.0, if ``hidden`` is a multiple of 8; elsewhere by
            PyTorch's own functions. The bits are the same.
        scale_format: how the scales are rounded and stored.

    Returns:
        Values ``[T, hidden]`` float8_e4m3fn and scales ``[T, scale_columns(hidden)]``.

    Raises:
        UsageError: the kernel is not loaded yet, and a CUDA graph is being captured: call this
            once before.
    """
    tokens, hidden = x.shape
    power_of_two = scale_format is not ScaleFormat.FLOAT32
    packed = scale_format is ScaleFormat.UE8M0
    kernel = quantizing.quantizer_of(x, power_of_two=power_of_two, packed=packed)
    if kernel is not None:
        values = torch.empty_like(x, dtype=torch.float8_e4m3fn)
        shape = (tokens, scale_columns(hidden, scale_format))
        scales = torch.empty(shape, dtype=scale_format.dtype, device=x.device)
        kernel.run(x, values, scales)
        return values, scales
    if x.device.type == "cpu":
        values = torch.empty((tokens, hidden), dtype=torch.float8_e4m3fn, device=x.device)
        scales = torch.empty((tokens, blocks(hidden)), dtype=torch.float32, device=x.device)
        _core.quantize_fp8(lend(x), tokens, hidden, power_of_two, lend(values), lend(scales))
    else:
        values, scales = _quantize_anywhere(x, power_of_two)
    return values, _packed(scales) if packed else scales


def _packed(scales: torch.Tensor) -> torch.Tensor:
    """Powers of two as UE8M0."""
    tokens, count = scales.shape
    exponents = scales.view(torch.int32) >> 23
    columns = -(-count // 4)
    padding = columns * 4 - count
    words = torch.nn.functional.pad(exponents, (0, padding)).reshape(tokens, columns, 4)
    shifts = torch.tensor([0, 8, 16, 24], dtype=torch.int32, device=scales.device)
    return (words << shifts).sum(-1, dtype=torch.int32)


def _quantize_anywhere(x: torch.Tensor, power_of_two: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """fp8 values and float32 scales by functions that every device has."""
    tokens, hidden = x.shape
    padding = blocks(hidden) * BLOCK - hidden
    wide = torch.nn.functional.pad(x.float(), (0, padding)).view(tokens, blocks(hidden), BLOCK)
    # A NaN does not count, as in the other ways.
    magnitudes = wide.abs().nan_to_num(nan=0.0, posinf=float("inf"))
    largest = magnitudes.amax(-1).clamp(min=_SMALLEST_AMAX)
    # With a number PyTorch may multiply by a reciprocal instead, which rounds twice.
    most = torch.full_like(largest, E4M3_MAX)
    scales, factors = largest / most, most / largest
    if power_of_two:
        bits = (scales.view(torch.int32) + 0x7FFFFF) & ~0x7FFFFF  # rounds up
        scales = bits.view(torch.float32)
        factors = torch.ones_like(scales) / scales
    scaled = (wide * factors.unsqueeze(-1)).clamp(-E4M3_MAX, E4M3_MAX)
    scaled = scaled.nan_to_num(nan=torch.nan)  # all NaNs are the positive one
    return scaled.to(torch.float8_e4m3fn).flatten(1)[:, :hidden].contiguous(), scales


def dequantize(values: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """float32 values of fp8 rows.

    Args:
        values: ``[..., hidden]`` float8_e4m3fn.
        scales: ``[..., ceil(hidden / 128)]`` float32, or ``[..., ceil(blocks / 4)]`` int32 UE8M0.

    Returns:
        ``[..., hidden]`` float32.
    """
    hidden = values.shape[-1]
    if scales.dtype == torch.int32:
        shifts = torch.tensor([0, 8, 16, 24], dtype=torch.int32, device=scales.device)
        exponents = (scales.unsqueeze(-1) >> shifts) & 0xFF
        scales = torch.exp2(exponents.flatten(-2)[..., : blocks(hidden)].float() - 127.0)
    return values.float() * scales.repeat_interleave(BLOCK, dim=-1)[..., :hidden]


# ---- nvfp4 --------------------------------------------------------------------------------------

_TILE_ROWS, _TILE_COLUMNS = 128, 64
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def nvfp4_scale_shape(experts: int, rows: int, hidden: int) -> tuple[int, ...]:
    """The shape of the scales of received nvfp4 rows, which lie in tiles of 128 rows by 64 columns
    as block-scaled matrix products read them: ``[experts, ceil(rows / 128), ceil(hidden / 64), 32,
    4, 4]``. The scale of row r and block b (16 columns) of expert e is at ``[e, r // 128, b // 4,
    r % 32, r // 32 % 4, b % 4]``."""
    return (experts, -(-rows // _TILE_ROWS), -(-hidden // _TILE_COLUMNS), 32, 4, 4)


def nvfp4_scales_by_row(scales: torch.Tensor, rows: int, hidden: int) -> torch.Tensor:
    """The scales of received nvfp4 rows, a row after the other.

    Args:
        scales: of :func:`nvfp4_scale_shape`, float8_e4m3fn, as dispatch returns them.
        rows: that each expert has room for.
        hidden: columns of a row.

    Returns:
        ``[experts, rows, hidden / 16]`` float8_e4m3fn, a copy.
    """
    by_row = scales.view(torch.uint8).permute(0, 1, 4, 3, 2, 5).flatten(4).flatten(1, 3)
    return by_row[:, :rows, : hidden // NVFP4_BLOCK].contiguous().view(torch.float8_e4m3fn)


def dequantize_nvfp4(
    values: torch.Tensor, scales: torch.Tensor, global_scale: torch.Tensor
) -> torch.Tensor:
    """float32 values of nvfp4 rows.

    Args:
        values: ``[..., hidden / 2]`` uint8, the first of two columns in the low half.
        scales: ``[..., hidden / 16]`` float8_e4m3fn, as :func:`nvfp4_scales_by_row` returns them.
        global_scale: float32, of one element.

    Returns:
        ``[..., hidden]`` float32: e2m1 * (scale / global_scale).
    """
    positive = torch.tensor(_E2M1, dtype=torch.float32, device=values.device)
    table = torch.cat([positive, -positive])
    codes = torch.stack([values & 0xF, values >> 4], dim=-1).flatten(-2)
    factors = scales.float() / global_scale.reshape(())
    return table[codes.long()] * factors.repeat_interleave(NVFP4_BLOCK, dim=-1)
