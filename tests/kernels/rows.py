"""Rows that quantisation is tried on."""

from __future__ import annotations

import torch

__all__ = ["HIDDEN", "every_bf16", "unusual_rows"]

# Whole segments of four blocks, blocks beside them, ragged blocks, rows whose values begin on
# boundaries of 8 bytes only, rows shorter than a block.
HIDDEN = (512, 7168, 640, 1024, 2880, 4096, 136, 392, 1032, 8, 16, 120, 128, 248)


def every_bf16(hidden: int) -> torch.Tensor:
    """All bfloat16, in order and so in blocks of one size; a row more is filled up with zeros."""
    rows = -(-65536 // hidden)
    bits = torch.zeros(rows * hidden, dtype=torch.int64)
    bits[:65536] = torch.arange(65536)
    return (bits - (bits >> 15 << 16)).to(torch.int16).view(torch.bfloat16).view(rows, hidden)


def unusual_rows(rows: int, hidden: int, seed: int = 0) -> torch.Tensor:
    """Rows of all magnitudes, among them zeros of both signs, infinities, NaNs of both signs,
    subnormal numbers, single large values and blocks whose largest value is at either end."""
    numbers = torch.Generator().manual_seed(seed)
    x = torch.randn((rows, hidden), generator=numbers)
    x *= torch.exp2(torch.randint(-30, 30, (rows, 1), generator=numbers))
    x = x.bfloat16()
    columns = torch.randint(0, hidden, (rows,), generator=numbers).tolist()
    for row, column in enumerate(columns):
        match row % 13:
            case 1:
                x[row] = 0.0
            case 2:
                x[row] = -0.0
            case 3:
                x[row, column] = torch.inf
            case 4:
                x[row, column:] = -torch.inf
            case 5:
                x[row, column] = torch.nan
            case 6:
                x[row].view(torch.int16)[::3] = -1  # a negative NaN
            case 7:
                x[row] *= 2.0**-100
                x[row].view(torch.int16)[column] = 1  # the smallest of all
            case 8:
                x[row, column] = -torch.finfo(torch.bfloat16).max
            case 9:
                x[row, -1] = 1e4
            case 10:
                x[row, ::128] = -1e4
            case 11:
                x[row, 127::128] = torch.nan
                x[row, ::2] = 1e-6
    return x
