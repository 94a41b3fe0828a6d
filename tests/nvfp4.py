"""What nvfp4 rows must be, from plain PyTorch and without the library's code."""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["awkward_rows", "by_row", "dequantized", "quantized"]


def _tensor(data: Any, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.tensor(data, dtype=dtype, device="cpu")


E2M1 = _tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], torch.float64)


def _codes(values: torch.Tensor) -> torch.Tensor:
    """The nearest e2m1 of each float32, of two equally near the even one; NaN becomes 6."""
    distances = (values.abs().double().clamp(max=6.0).unsqueeze(-1) - E2M1).abs()
    nearest = distances == distances.min(-1, keepdim=True).values
    even = nearest[..., ::2]
    code = torch.where(even.any(-1), 2 * even.int().argmax(-1), nearest.int().argmax(-1))
    code = code + 8 * torch.signbit(values)
    return code.masked_fill(values.isnan(), 7).to(torch.uint8)


def quantized(x: torch.Tensor, global_scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Values ``[T, hidden / 2]`` uint8 and scales ``[T, hidden / 16]`` float8_e4m3fn."""
    given = _tensor(global_scale if global_scale > 0 else float("nan"))
    blocks = x.float().view(len(x), x.shape[1] // 16, 16)
    largest = blocks.abs().masked_fill(blocks.isnan(), 0.0).amax(-1)
    wide = given * (largest * _tensor(1.0 / 6.0))
    codes = wide.clamp(max=448.0).to(torch.float8_e4m3fn).view(torch.uint8)
    scales = codes.masked_fill(wide.isnan(), 0x7F).view(torch.float8_e4m3fn)
    factors = _tensor(1.0) / (scales.float() * (_tensor(1.0) / given))
    factors = factors.masked_fill(scales.float() == 0, 0.0)
    rows = _codes(blocks * factors.unsqueeze(-1)).view(x.shape)
    return rows[:, ::2] | rows[:, 1::2] << 4, scales


def by_row(scales: torch.Tensor, expert: int, rows: int, blocks: int) -> torch.Tensor:
    """The scales of an expert's first rows, ``[rows, blocks]``, looked up where DeepEP's hybrid-ep
    branch places each, in the order of dimensions that the library stores."""
    row = torch.arange(rows, dtype=torch.int64, device="cpu").unsqueeze(1)
    block = torch.arange(blocks, dtype=torch.int64, device="cpu")
    places = (row // 128, block // 4, row % 32, row % 128 // 32, block % 4)
    return scales.view(torch.uint8)[(expert, *places)].view(torch.float8_e4m3fn)


def dequantized(values: torch.Tensor, scales: torch.Tensor, global_scale: float) -> torch.Tensor:
    """float32 values of rows."""
    codes = torch.stack([values % 16, values // 16], dim=-1).flatten(-2).long()
    magnitudes = E2M1.float()[codes % 8]
    signed = torch.where(codes < 8, magnitudes, -magnitudes)
    return signed * (scales.float() / global_scale).repeat_interleave(16, dim=-1)


def awkward_rows(rows: int, hidden: int, seed: int) -> torch.Tensor:
    """Rows of all magnitudes. Among them are rows of one value, whose words have every bit set if
    it is negative, with one or both words of a block so; zeros of both signs; and values that are
    no numbers."""
    numbers = torch.Generator(device="cpu").manual_seed(seed)
    shape: dict[str, Any] = {"generator": numbers, "device": "cpu"}
    x = torch.randn((rows, hidden), dtype=torch.float32, **shape)
    x *= torch.exp2(torch.randint(-9, 9, (rows, 1), dtype=torch.int64, **shape).float())
    x = x.bfloat16()
    for row in range(rows):
        blocks = x[row].view(-1, 16)
        match (row + seed) % 11:
            case 1:
                x[row] = -3.0
            case 2:
                blocks[:, 8:] = -8.0
                blocks[::2, 0] = 0.0
            case 3:
                blocks[:, :8] = -8.0
                blocks[::2, 8:] = 0.0
            case 4:
                x[row] = -0.0
                x[row, : hidden // 2] = 0.0
            case 5:
                x[row, ::7] = torch.nan
                x[row].view(torch.int16)[3::9] = -1  # a negative NaN
            case 6:
                x[row, 5::40] = torch.inf
                x[row, 6::48] = -torch.inf
            case 7:
                x[row, 3::16] = -1e-3
            case 8:  # with 0.75 a scale between two e4m3, which the order of the products decides
                x[row] = 0.25
                x[row, ::16] = 1.5625
            case 9:  # with 0.75 values that are ties if the reciprocals were exact
                x[row] = 0.1875
                x[row, ::16] = 1.5
    return x
