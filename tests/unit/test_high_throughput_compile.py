"""The high-throughput kernels compile for a broad range of sizes, without spilling, and with few
enough registers and shared memory for their CTAs to start. NVRTC needs no GPU.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from fanfold import _core
from fanfold.backends.high_throughput.kernels import (
    MOST_SHARED_BYTES,
    CombineKind,
    DispatchKind,
    Kernel,
    Sizes,
    combine_kernel,
    dispatch_kernel,
    lags,
    most_batches,
    plan_kernel,
)
from fanfold.backends.high_throughput.layer_kernels import shared_bytes_of
from fanfold.errors import ArgumentError
from fanfold.jit import KernelSource
from tests.unit.conftest import Compiled
from tests.unit.test_kernels_compile import check, short

# Ranks, experts, top-k and hidden of the layers that the mode is measured with, and the extremes.
NAMED = [
    (4, 256, 8, 7168),
    (4, 512, 22, 1024),
    (8, 128, 4, 2880),
    (1, 1, 1, 16),
    (1, 256, 8, 7168),
    (32, 2048, 32, 16384),
    (32, 256, 8, 7168),
    (8, 512, 22, 2880),
    (9, 72, 7, 2880),
]
# More ranks than a word has bits, up to the bound.
MANY_RANKS = [(64, 256, 8, 7168), (256, 512, 8, 7168), (1024, 2048, 32, 16384)]
SMALL_SHARED_BYTES = shared_bytes_of("sm_120a")


def dispatches(sizes: Sizes, hidden: int) -> Iterator[DispatchKind]:
    """bf16 and fp8 rows, in both orders, by a new plan with weights and by a cached one; pulled
    ones first."""
    formats = ((2 * hidden, 0), (hidden, -(-hidden // 128)))
    if sizes.ranks > 1:
        for row_bytes, scale_words in formats:
            yield DispatchKind(sizes, row_bytes, scale_words, True, False, False, pulls=True)
            yield DispatchKind(sizes, row_bytes, scale_words, False, True, True, pulls=True)
    for row_bytes, scale_words in formats:
        for expert_major in (False, True):
            yield DispatchKind(sizes, row_bytes, scale_words, expert_major, True, True)
            yield DispatchKind(sizes, row_bytes, scale_words, expert_major, False, False)
        yield DispatchKind(sizes, row_bytes, scale_words, True, True, True, in_place=True)
        yield DispatchKind(sizes, row_bytes, scale_words, False, True, True, in_place=True)
        yield DispatchKind(sizes, row_bytes, scale_words, False, False, False, in_place=True)


def combines(sizes: Sizes, hidden: int) -> Iterator[CombineKind]:
    """Both orders, with weights, numbers of the lanes and biases, and without."""
    yield CombineKind(sizes, 2 * hidden, False, False, False)
    yield CombineKind(sizes, 2 * hidden, False, False, True)
    yield CombineKind(sizes, 2 * hidden, True, True, False)
    yield CombineKind(sizes, 2 * hidden, True, False, True)
    yield CombineKind(sizes, 16, True, False, True)
    yield CombineKind(sizes, 2 * hidden, False, False, True, True)
    yield CombineKind(sizes, 2 * hidden, True, True, True, True)


def kernels(ranks: int, experts: int, top_k: int, hidden: int) -> list[Kernel]:
    sizes = Sizes(ranks, experts, top_k)
    return [
        plan_kernel(sizes),
        *(dispatch_kernel(kind) for kind in dispatches(sizes, hidden)),
        *(combine_kernel(kind, ctas) for kind in combines(sizes, hidden) for ctas in (16, 24)),
    ]


def some_kernels(ranks: int, experts: int, top_k: int, hidden: int) -> list[Kernel]:
    """One of each that differs much from the others."""
    sizes = Sizes(ranks, experts, top_k)
    every = list(dispatches(sizes, hidden))
    pulled = [kind for kind in every if kind.pulls]
    bf16_new, _, bf16_experts, *_ = every[len(pulled) :]
    *_, fp8_experts_in_place, fp8_in_place, _ = dispatches(sizes, hidden)
    tokens, _, experts_weighted, *_ = combines(sizes, hidden)
    found = [bf16_new, bf16_experts, fp8_experts_in_place, fp8_in_place, *pulled[:1], *pulled[3:]]
    return [
        plan_kernel(sizes),
        *(dispatch_kernel(kind) for kind in found),
        *(combine_kernel(kind, 16) for kind in (tokens, experts_weighted)),
    ]


def drawn(count: int) -> Iterator[tuple[int, int, int, int]]:
    chance = random.Random(5)
    for _ in range(count):
        ranks = chance.randint(1, 16)
        local = chance.choice([1, 3, 8, 60, 256])
        hidden = 16 * chance.choice([8, 17, 64, 180, 512, 1024])
        yield ranks, ranks * local, chance.randint(1, 32), hidden


def sources(every: list[Kernel]) -> list[KernelSource]:
    return list(dict.fromkeys(kernel.source for kernel in every))


FEW = sources(
    [
        kernel
        for layer in (NAMED[0], NAMED[3], NAMED[4], NAMED[5], MANY_RANKS[2])
        for kernel in some_kernels(*layer)
    ]
)
LAYERS = [*NAMED, *MANY_RANKS, *drawn(4)]
# Every third kernel of each layer, from another one on in the next.
MANY = sources(
    [kernel for number, layer in enumerate(LAYERS) for kernel in kernels(*layer)[number % 3 :: 3]]
)
MORE = [
    source
    for source in sources([kernel for layer in [*LAYERS, *drawn(12)] for kernel in kernels(*layer)])
    if source not in set(MANY)
]


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


@pytest.mark.parametrize("arch", ["sm_100a", "sm_120a"])
def test_for_other_gpus(compiled: Compiled, arch: str) -> None:
    some = sources(some_kernels(*NAMED[1])[::2])
    for source in some:
        binary = compiled(source, arch)
        assert 0 < binary.registers <= source.register_limit, f"{source}: {binary.registers}"


@pytest.mark.parametrize("layer", [*NAMED, *MANY_RANKS, *drawn(30)])
@pytest.mark.parametrize("most", [MOST_SHARED_BYTES, SMALL_SHARED_BYTES])
def test_shared_memory_suffices(layer: tuple[int, int, int, int], most: int) -> None:
    sizes = Sizes(*layer[:3])
    for kind in dispatches(sizes, layer[3]):
        kernel = dispatch_kernel(kind, most)
        constants = dict(kernel.source.pairs)
        rows = constants["kWarps"] * (constants["kAhead"] + constants["kBehind"])
        assert rows * kind.held_bytes <= kernel.shared_bytes <= most
        assert constants["kAhead"] >= 1
        assert constants["kBehind"] >= 1
    for combine in combines(sizes, layer[3]):
        for ctas in (16, 24):
            kernel = combine_kernel(combine, ctas, most)
            constants = dict(kernel.source.pairs)
            of_a_warp = 16 * constants["kPieces"] * constants["kSliceUnits"]
            assert (constants["kWarps"] - 1) * of_a_warp < kernel.shared_bytes <= most


def test_rows_that_do_not_fit_name_the_bound() -> None:
    sizes = Sizes(4, 256, 8)
    with pytest.raises(ArgumentError, match="at most") as raised:
        dispatch_kernel(DispatchKind(sizes, 131072, 0, True, True, True))
    most = int(str(raised.value).split("at most ")[1].split()[0])
    dispatch_kernel(DispatchKind(sizes, most // 16 * 16, 0, True, True, True))
    with pytest.raises(ArgumentError):
        dispatch_kernel(DispatchKind(sizes, most // 16 * 16 + 16, 0, True, True, True))


@pytest.mark.parametrize("slots", [4, 5, 27, 127, 128])
@pytest.mark.parametrize("ctas", [1, 2, 12, 24, 64])
@pytest.mark.parametrize("expert_major", [False, True])
def test_a_combine_lags_less_than_its_ring_is_long(
    expert_major: bool, ctas: int, slots: int
) -> None:
    kind = CombineKind(Sizes(4, 256, 8), 14336, expert_major, False, False)
    lag, last_lag = lags(kind, ctas, slots)
    assert 1 <= last_lag <= lag
    assert 2 * lag - last_lag <= slots


def test_one_rank_ends_with_parts_for_all_warps() -> None:
    kind = CombineKind(Sizes(1, 256, 8), 14336, True, False, False)
    assert kind.sums_are_results
    assert lags(kind, 24, 4) == (99, 99)  # of 4 slices and 2 parts, for 264 warps


def test_lags_are_those_that_were_measured() -> None:
    kind = CombineKind(Sizes(4, 256, 8), 14336, False, False, False)
    assert lags(kind, 24, 146) == (48, 20)
    assert lags(kind, 12, 146) == (28, 14)


def test_a_plan_has_room_for_the_words_of_all_batches() -> None:
    kernel = dispatch_kernel(DispatchKind(Sizes(4, 8, 2), 64, 0, False, True, True))
    short = dict(kernel.source.pairs)["kShortTokens"]
    most = 0
    for tokens in range(1000):
        most = max(most, _core.cuda_dispatch_batches(tokens, short))
        assert most_batches(tokens) == most
