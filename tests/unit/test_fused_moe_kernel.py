"""The kernel of FusedMoE compiles for a broad range of sizes, with the registers that its
warpgroups share, and without waiting for each product. NVRTC needs no GPU.
"""

from __future__ import annotations

import pytest

from fanfold.fused_moe.cuda import MOST_COLUMNS, MOST_EXPERTS, MOST_RANKS, kernel_source
from fanfold.geometry import Geometry
from fanfold.jit import Binary, KernelSource
from tests.unit.conftest import Compiled

# Of a thread when the kernel starts: 384 threads share 65536, and take multiples of 8.
REGISTERS = 168

# Ranks, experts, top-k, hidden and intermediate, and the most bytes that ptxas may spill: the spare
# warps have 40 registers and spill. The bounds are about 1.2 times what NVRTC 13.5 needs.
SIZES: list[tuple[tuple[int, int, int, int, int], int]] = [
    ((1, 1, 1, 128, 128), 100),
    ((3, 9, 3, 1664, 128), 300),
    ((1, 8, 2, 384, 896), 350),
    ((1, 64, 6, 4096, 2048), 900),
    ((4, 256, 8, 7168, 2048), 900),
    ((1, 64, 8, 7168, 2048), 1100),
    ((1, 128, 22, 1024, 2688), 1600),
    ((1, 512, 32, 16384, 16384), 3000),
    ((MOST_RANKS, MOST_EXPERTS, 32, MOST_COLUMNS, MOST_COLUMNS), 3500),
]
# The loops of swapped tiles for 96 and 128 tokens spill a few registers, too.
SWAPPED_MORE = 150
# A kernel that swaps a and b adds FP32 sums in any case.
OPTIONS = [
    {"clamps": clamps, **sums}
    for clamps in (False, True)
    for sums in ({}, {"fast_accumulation": True}, {"swap_ab": True})
]


def source_of(sizes: tuple[int, int, int, int, int], options: dict[str, bool]) -> KernelSource:
    *layer, intermediate = sizes
    return kernel_source(Geometry(*layer, max_tokens=8192), intermediate, **options)


def check(binary: Binary, most_spilt: int, *, swap_ab: bool = False) -> None:
    assert binary.registers == REGISTERS
    assert binary.spill_bytes <= most_spilt + (SWAPPED_MORE if swap_ab else 0)
    # ptxas says so where it has to wait for each product.
    log = binary.log.lower()
    assert "wgmma" not in log
    assert "serializ" not in log


@pytest.mark.parametrize("number", range(len(SIZES)), ids=lambda number: str(SIZES[number][0]))
def test_for_hopper(compiled: Compiled, number: int) -> None:
    sizes, most_spilt = SIZES[number]
    options = OPTIONS[number % len(OPTIONS)]
    source = source_of(sizes, options)
    check(compiled(source, "sm_90a"), most_spilt, swap_ab="swap_ab" in options)


@pytest.mark.long
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize(("sizes", "most_spilt"), SIZES, ids=str)
def test_all_options_for_hopper(
    compiled: Compiled,
    sizes: tuple[int, int, int, int, int],
    most_spilt: int,
    options: dict[str, bool],
) -> None:
    check(compiled(source_of(sizes, options), "sm_90a"), most_spilt, swap_ab="swap_ab" in options)


def test_options_are_constants_of_the_kernel() -> None:
    sizes = SIZES[0][0]
    constants = [dict(source_of(sizes, options).pairs) for options in OPTIONS]
    assert [each["kClamps"] for each in constants] == [0, 0, 0, 1, 1, 1]
    assert [each["kTwoLevels"] for each in constants] == [1, 0, 1, 1, 0, 1]
    assert [each["kSwapsAb"] for each in constants] == [0, 0, 1, 0, 0, 1]
