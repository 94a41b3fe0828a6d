"""fp8 and nvfp4 rows: against PyTorch's own conversion, and back."""

from __future__ import annotations

import pytest
import torch

from fanfold import formats
from fanfold.errors import ArgumentError
from fanfold.formats import (
    RowFormat,
    ScaleFormat,
    blocks,
    dequantize,
    dequantize_nvfp4,
    nvfp4_scale_shape,
    nvfp4_scales_by_row,
    quantize,
    scale_columns,
)
from tests import nvfp4
from tests.kernels.rows import unusual_rows


def _rows(hidden: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(hidden)
    x = torch.randn((9, hidden), generator=generator) * torch.logspace(-6, 4, 9).unsqueeze(1)
    x[3] = 0.0
    return x.bfloat16()


def _expected(x: torch.Tensor, power_of_two: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """The formula of DeepEP, block by block, with PyTorch's conversion to e4m3."""
    values = torch.empty(x.shape, dtype=torch.float8_e4m3fn)
    scales = torch.empty((x.shape[0], blocks(x.shape[1])))
    for begin in range(0, x.shape[1], 128):
        block = x[:, begin : begin + 128].float()
        amax = block.abs().amax(1).clamp(min=1e-4)
        # Not `448.0 / amax`, which PyTorch computes as a reciprocal and a product.
        scale, factor = amax / 448.0, torch.tensor(448.0) / amax
        if power_of_two:
            scale = torch.exp2(torch.ceil(torch.log2(scale)))
            factor = 1.0 / scale
        scales[:, begin // 128] = scale
        values[:, begin : begin + 128] = (block * factor.unsqueeze(1)).to(torch.float8_e4m3fn)
    return values, scales


@pytest.mark.parametrize("hidden", [16, 128, 144, 512, 2880])
@pytest.mark.parametrize("scale_format", list(ScaleFormat))
def test_quantize(hidden: int, scale_format: ScaleFormat) -> None:
    x = _rows(hidden)
    values, scales = quantize(x, scale_format)
    expected_values, expected_scales = _expected(x, scale_format is not ScaleFormat.FLOAT32)
    assert torch.equal(values.view(torch.uint8), expected_values.view(torch.uint8))
    assert scales.shape == (9, scale_columns(hidden, scale_format))
    if scale_format is ScaleFormat.UE8M0:
        for block in range(blocks(hidden)):
            exponent = (scales[:, block // 4] >> (block % 4 * 8)) & 0xFF
            assert torch.equal(torch.exp2(exponent.float() - 127.0), expected_scales[:, block])
    else:
        assert torch.equal(scales, expected_scales)


def test_values_that_are_no_numbers() -> None:
    x = torch.ones((2, 256), dtype=torch.bfloat16)
    x[0, 3], x[1, 200] = torch.nan, torch.inf
    back = dequantize(*quantize(x))
    assert back[0].isnan().nonzero().flatten().tolist() == [3]
    assert back[1].isnan().nonzero().flatten().tolist() == list(range(128, 256))


@pytest.mark.parametrize("scale_format", list(ScaleFormat))
@pytest.mark.parametrize("hidden", [4, 8, 130, 2880])
@pytest.mark.parametrize("rows", [0, 1, 29])
def test_quantize_anywhere(scale_format: ScaleFormat, hidden: int, rows: int) -> None:
    """The way of devices without a kernel, taken on the CPU."""
    x = unusual_rows(rows, hidden)
    values, scales = quantize(x, scale_format)
    power_of_two = scale_format is not ScaleFormat.FLOAT32
    got_values, got_scales = formats._quantize_anywhere(x, power_of_two)
    if scale_format is ScaleFormat.UE8M0:
        got_scales = formats._packed(got_scales)
    for got, wanted in ((got_values, values), (got_scales, scales)):
        assert (got.shape, got.dtype) == (wanted.shape, wanted.dtype)
        assert got.is_contiguous()
        assert torch.equal(got.view(torch.uint8), wanted.view(torch.uint8))


@pytest.mark.parametrize("scale_format", list(ScaleFormat))
def test_dequantize_is_close(scale_format: ScaleFormat) -> None:
    x = _rows(400)
    back = dequantize(*quantize(x, scale_format))
    # Half a step of e4m3's 3 fraction bits, and the fixed step below its smallest normal number.
    amax = torch.stack([b.abs().amax(1) for b in x.float().split(128, dim=1)], dim=1)
    floor = amax.clamp(min=1e-4).repeat_interleave(128, dim=1)[:, :400] / 448.0 * 2.0**-9
    assert bool(((back - x.float()).abs() <= x.float().abs() / 16.0 + floor * 2.0).all())


@pytest.mark.parametrize(("rows", "hidden"), [(0, 32), (5, 96), (150, 320)])
def test_nvfp4_scales_by_row(rows: int, hidden: int) -> None:
    numbers = torch.Generator().manual_seed(rows)
    shape = nvfp4_scale_shape(2, rows, hidden)
    assert shape == (2, -(-rows // 128), -(-hidden // 64), 32, 4, 4)
    tiles = torch.randint(0, 127, shape, generator=numbers, dtype=torch.uint8)
    tiles = tiles.view(torch.float8_e4m3fn)
    found = nvfp4_scales_by_row(tiles, rows, hidden)
    assert found.shape == (2, rows, hidden // 16)
    for expert in range(2):
        expected = nvfp4.by_row(tiles, expert, rows, hidden // 16)
        assert torch.equal(found[expert].float(), expected.float())


def test_dequantize_nvfp4() -> None:
    values = torch.arange(256, dtype=torch.uint8).view(4, 64)
    scales = torch.arange(1, 33).view(4, 8).to(torch.float8_e4m3fn)
    expected = nvfp4.dequantized(values, scales, 3.0)
    for global_scale in (torch.tensor(3.0), torch.tensor([3.0])):
        assert torch.equal(dequantize_nvfp4(values, scales, global_scale), expected)


def test_dequantized_nvfp4_is_close() -> None:
    x = _rows(480)
    x[4:] = 0.0  # magnitudes that are in the range of e4m3 together
    global_scale = 448.0 * 6.0 / float(x.float().abs().max())
    back = dequantize_nvfp4(*nvfp4.quantized(x, global_scale), torch.tensor(global_scale))
    # Half of e2m1's largest step is a sixth of the block's largest value; and e4m3's half step.
    amax = x.float().view(9, -1, 16).abs().amax(-1).repeat_interleave(16, dim=-1)
    assert bool(((back - x.float()).abs() <= amax * (1 / 6 + 1 / 8) + 2.0**-9 / global_scale).all())


@pytest.mark.parametrize("name", ["bf16", torch.bfloat16, RowFormat.BF16])
def test_names(name: object) -> None:
    assert RowFormat.of(name) is RowFormat.BF16  # type: ignore[arg-type]


def test_unknown_name() -> None:
    with pytest.raises(ArgumentError, match="'int8'"):
        RowFormat.of("int8")
    with pytest.raises(ArgumentError, match="uint8"):
        RowFormat.of(torch.uint8)


def test_columns_of_a_row() -> None:
    for row_format, step in ((RowFormat.BF16, 8), (RowFormat.FP8, 16), (RowFormat.NVFP4, 32)):
        row_format.check_hidden(3 * step)
        with pytest.raises(ArgumentError, match=f"a multiple of {step}"):
            row_format.check_hidden(3 * step + step // 2)
    assert RowFormat.NVFP4.columns(96) == 48
    assert RowFormat.FP8.columns(96) == 96
