"""Every kernel compiles for a broad range of sizes, without spilling and with few enough registers
for its CTAs to start. NVRTC needs no GPU.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from fanfold.backends.low_latency.kernels import (
    combine_kernel,
    kernel_sources,
    token_major_kernel,
)
from fanfold.formats import RowFormat, ScaleFormat
from fanfold.geometry import Geometry
from fanfold.jit import Binary, KernelSource
from tests.unit.conftest import Compiled

ROWS = [
    (RowFormat.BF16, ScaleFormat.FLOAT32),
    (RowFormat.FP8, ScaleFormat.FLOAT32),
    (RowFormat.FP8, ScaleFormat.POWER_OF_TWO),
    (RowFormat.FP8, ScaleFormat.UE8M0),
    (RowFormat.NVFP4, ScaleFormat.FLOAT32),
]
HIDDEN = [128, 136, 512, 1024, 2048, 2880, 4096, 4944, 5120, 7136, 7168, 8192, 12288, 16384]
TOP_K = [1, 2, 4, 6, 8, 9, 22, 24, 32]
EXPERTS_PER_RANK = [1, 3, 8, 32, 64, 128, 256, 1024]
RANKS = [1, 2, 3, 4, 6, 8, 16, 32]
MOST_EXPERTS = 2048
# Ranks, experts, top-k and hidden of the layers that the mode is measured with, and the extremes.
NAMED = [
    (4, 256, 8, 7168),
    (8, 256, 8, 7168),
    (4, 512, 8, 2048),
    (4, 512, 22, 1024),
    (1, 1, 1, 128),
    (8, 1024, 32, 16384),
    (2, 128, 4, 2880),
    (16, 256, 8, 7168),
    (32, 2048, 32, 16384),
    (9, 1017, 32, 16384),
    (1, 1024, 32, 512),
    (6, 540, 24, 7136),
    (1, 2048, 32, 512),
]
# More ranks than a word has bits, up to the bound.
MANY_RANKS = [
    (64, 256, 8, 7168),
    (256, 512, 8, 7168),
    (1024, 1024, 22, 1024),
    (1024, 2048, 32, 16384),
]
# The most measured top-k, the least of everything, odd numbers, the most of one word, and of all.
EXTREMES = [NAMED[3], NAMED[4], NAMED[11], NAMED[8], MANY_RANKS[3]]


@dataclass(frozen=True)
class Point:
    """One call of ``kernel_sources``."""

    geometry: Geometry
    row_format: RowFormat
    scale_format: ScaleFormat
    late_weights: bool
    logfmt: bool

    def sources(self) -> list[KernelSource]:
        return kernel_sources(
            self.geometry,
            self.row_format,
            self.scale_format,
            late_weights=self.late_weights,
            logfmt=self.logfmt,
        )


def point(sizes: tuple[int, int, int, int], rows: int, combine: int) -> Point:
    ranks, experts, top_k, hidden = sizes
    geometry = Geometry(ranks, experts, top_k, hidden, 128)
    formats = ROWS[rows % len(ROWS)]
    if hidden % {"bf16": 8, "fp8": 16, "nvfp4": 32}[formats[0].value]:  # 16 bytes
        formats = ROWS[0]
    return Point(geometry, *formats, bool(combine & 1), bool(combine & 2))


def drawn(count: int, seed: int) -> Iterator[Point]:
    """Points of the whole range, the same for the same seed."""
    chance = random.Random(seed)
    for number in range(count):
        ranks = chance.choice(RANKS)
        local = chance.choice([n for n in EXPERTS_PER_RANK if n * ranks <= MOST_EXPERTS])
        sizes = (ranks, ranks * local, chance.choice(TOP_K), chance.choice(HIDDEN))
        yield point(sizes, number, number // len(ROWS))


def token_major(sizes: tuple[int, int, int, int]) -> list[KernelSource]:
    ranks, experts, top_k, hidden = sizes
    geometry = Geometry(ranks, experts, top_k, hidden, 128)
    made = [token_major_kernel(geometry, scaled=each) for each in (False, True) if hidden % 16 == 0]
    return [*made, combine_kernel(geometry, late=False, logfmt=False, biased=True)]


def kernels(points: list[Point]) -> list[KernelSource]:
    """The kernels of the points, each once."""
    return list(dict.fromkeys(source for one in points for source in one.sources()))


FEW = kernels(
    [point(NAMED[0], rows, rows) for rows in range(len(ROWS))]
    + [point(sizes, number, number) for number, sizes in enumerate(EXTREMES)]
) + token_major(NAMED[0])
SIZES = [*NAMED, *MANY_RANKS]
# Every size in every format, each with one of the four kinds of combine.
MANY = kernels(
    [
        point(sizes, rows, number + rows)
        for (number, sizes), rows in itertools.product(enumerate(SIZES), range(len(ROWS)))
    ]
    + list(drawn(8, seed=1))
) + [source for sizes in EXTREMES for source in token_major(sizes)]
EVERY = kernels(
    [point(*each) for each in itertools.product(SIZES, range(len(ROWS)), range(4))]
    + list(drawn(60, seed=2))
    + list(drawn(140, seed=3))
) + [source for sizes in SIZES for source in token_major(sizes)]
MORE = [source for source in EVERY if source not in set(MANY)]


def short(source: KernelSource) -> str:
    sizes = " ".join(f"{name.removeprefix('k')}={value}" for name, value in source.pairs)
    return f"{source.entry} {sizes}"


def check(source: KernelSource, binary: Binary) -> None:
    told = f"{source}: {binary.registers} registers, {binary.spill_bytes} bytes spilt"
    assert binary.spill_bytes == 0, told
    # An object whose address is taken lies there, though it could be in registers: 3 times as slow.
    assert binary.stack_bytes == 0, f"{source}: {binary.stack_bytes} bytes of stack"
    assert 0 < binary.registers <= source.register_limit, told


@pytest.mark.parametrize("source", FEW, ids=short)
def test_for_hopper(compiled: Compiled, source: KernelSource) -> None:
    check(source, compiled(source, "sm_90a"))


@pytest.mark.long
@pytest.mark.parametrize("source", [each for each in MANY if each not in FEW], ids=short)
def test_many_for_hopper(compiled: Compiled, source: KernelSource) -> None:
    check(source, compiled(source, "sm_90a"))


@pytest.mark.long
@pytest.mark.parametrize("source", MORE, ids=short)
def test_more_for_hopper(compiled: Compiled, source: KernelSource) -> None:
    check(source, compiled(source, "sm_90a"))


OTHER_GPUS = ("sm_80", "sm_100a", "sm_120a")


@pytest.mark.parametrize("arch", OTHER_GPUS)
def test_for_other_gpus(compiled: Compiled, arch: str) -> None:
    check_elsewhere(compiled, arch, [point(NAMED[0], rows, rows) for rows in (0, 3)])


@pytest.mark.long
@pytest.mark.parametrize("arch", OTHER_GPUS)
def test_other_formats_for_other_gpus(compiled: Compiled, arch: str) -> None:
    check_elsewhere(compiled, arch, [point(NAMED[0], rows, rows) for rows in (1, 2)])


def check_elsewhere(compiled: Compiled, arch: str, points: list[Point]) -> None:
    for source in kernels(points):
        binary = compiled(source, arch)
        assert 0 < binary.registers <= source.register_limit, f"{source}: {binary.registers}"


@pytest.mark.parametrize(
    "other", [(8, 256, 8, 7168), (4, 512, 8, 7168), (4, 256, 9, 7168), (4, 256, 8, 7176)]
)
def test_another_size_is_another_kernel(other: tuple[int, int, int, int]) -> None:
    mine, theirs = point((4, 256, 8, 7168), 1, 0).sources(), point(other, 1, 0).sources()
    assert len(mine) == len(theirs) == 2
    assert set(mine).isdisjoint(theirs)


def test_every_format_is_another_kernel() -> None:
    every = [
        point(NAMED[0], rows, combine) for rows, combine in zip(range(4), range(4), strict=True)
    ]
    assert len(kernels(every)) == 8
