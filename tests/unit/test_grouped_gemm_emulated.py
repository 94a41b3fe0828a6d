"""The kernel of grouped FP8 products, run on the CPU, against FP64 sums: schedule of tiles, stages,
scales and stores without a GPU. What only hardware shows is for ``tests/gpu``.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch

from fanfold.grouped_gemm import MOST_DEPTH
from tests.emulation.grouped_gemm import emulated
from tests.emulation.world import Builder
from tests.grouped_gemms import Case, check

CPU = torch.device("cpu")
ROUNDING = 3e-6  # to bfloat16; the emulated products are exact
# Three blocks of columns, the last not whole; the stages wrap around.
SHAPE = Case((), columns=576, depth=640)
ROWS = [
    (0, 0, 0),
    (1, 0, 130),  # a single block; a pair and half a block
    (64, 300, 65),
    (128, 129, 384),
]

pytestmark = pytest.mark.timeout(200)


@pytest.mark.parametrize("ctas", [2, 6])
@pytest.mark.parametrize("fast", [False, True], ids=["two levels", "fast"])
def test_contiguous(builder: Builder, ctas: int, fast: bool) -> None:
    with emulated(builder, ctas):
        for seed, rows in enumerate(ROWS):
            case = dataclasses.replace(SHAPE, rows=rows, fast=fast, seed=seed)
            assert check(case, CPU) < ROUNDING, case


@pytest.mark.parametrize("ctas", [2, 6])
@pytest.mark.parametrize("most", [384, 50], ids=["many rows", "few rows"])
def test_masked(builder: Builder, ctas: int, most: int) -> None:
    """Groups that have few rows are multiplied by tiles of 64."""
    with emulated(builder, ctas):
        for seed, rows in enumerate(ROWS):
            fitting = tuple(min(each, most) for each in rows)
            case = dataclasses.replace(SHAPE, rows=fitting, masked=True, most=most, seed=seed)
            assert check(case, CPU) < ROUNDING, case


@pytest.mark.parametrize("fast", [False, True], ids=["two levels", "fast"])
def test_the_largest_depth(builder: Builder, fast: bool) -> None:
    """A lane holds four of the scales of each 128 columns."""
    with emulated(builder, 2):
        case = Case((70,), columns=128, depth=MOST_DEPTH, fast=fast)
        assert check(case, CPU) < ROUNDING
