"""Helpers that DeepEP's programs import from ``deep_ep.utils``."""

from __future__ import annotations

import pytest
import torch

from fanfold.deep_ep.utils import math, semantic
from tests.conformance import deep_ep_reference as reference


def test_sizes() -> None:
    for x in range(20):
        for y in range(1, 9):
            assert math.ceil_div(x, y) == sum(1 for begin in range(0, x, y))
            assert math.align(x, y) == min(each for each in range(0, 40, y) if each >= x)
    assert (math.safe_div(0, 0), math.safe_div(3, 4)) == (0, 0.75)
    with pytest.raises(ZeroDivisionError):
        math.safe_div(1, 0)


def test_difference() -> None:
    x = torch.randn(50, dtype=torch.float32, device="cpu")
    assert math.calc_diff(x, x) == pytest.approx(0, abs=1e-15)
    zeros = torch.zeros(3, dtype=torch.float32, device="cpu")
    assert math.calc_diff(zeros, zeros) == 0
    ones = torch.ones(3, dtype=torch.bfloat16, device="cpu")
    assert math.calc_diff(zeros, ones) == pytest.approx(1 - 2 * 2 / (1 + 4))


@pytest.mark.parametrize("hidden", [16, 128, 200, 512])
def test_fp8_rows(hidden: int) -> None:
    generator = torch.Generator().manual_seed(hidden)
    x = torch.randn((7, hidden), generator=generator, dtype=torch.float32, device="cpu").bfloat16()
    values, scales = math.per_token_cast_to_fp8(x)
    wanted, wanted_scales = reference.fp8(x, False)
    assert torch.equal(values.view(torch.uint8), wanted.view(torch.uint8))
    assert torch.equal(scales, wanted_scales)
    back = math.per_token_cast_back(values, scales)
    assert torch.equal(back, reference.dequantized(values, scales).bfloat16())
    values, scales = reference.fp8(x, True)
    packed = math.per_token_cast_back(values, reference.ue8m0(scales))
    assert torch.equal(packed, reference.dequantized(values, scales).bfloat16())
    assert torch.equal(math.per_token_cast_to_fp8(x.T.contiguous().T)[1], wanted_scales)
    assert torch.equal(math.per_token_cast_to_fp8(x.float())[1], wanted_scales)


def test_bytes() -> None:
    x = torch.zeros((3, 4), dtype=torch.int32, device="cpu")
    assert math.count_bytes(x, None, (x, [x.byte()])) == 48 + 48 + 12
    assert math.count_bytes() == 0


def test_defaults() -> None:
    assert semantic.value_or(None, 3) == 3
    assert semantic.value_or(0, 3) == 0
