"""Both modes with more ranks than a word has bits, a warp has lanes or a grid has CTAs; the kernels
run on the CPU, as in ``test_kernels_emulated.py`` and ``test_high_throughput_emulated.py``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from unittest import mock

import pytest
import torch

from fanfold.backends.high_throughput import kernels
from fanfold.backends.high_throughput.cuda import CudaHighThroughput
from fanfold.backends.low_latency import kernels as low_latency_kernels
from fanfold.backends.low_latency.cuda import CudaLowLatency
from fanfold.errors import ArgumentError, PeerRefused, PeerTimeout
from fanfold.formats import ScaleFormat
from fanfold.geometry import Geometry
from tests.distributed.cuda_rounds import run_case
from tests.distributed.routings import Case, results_of
from tests.emulation import high_throughput, world
from tests.emulation.world import Builder
from tests.unit import test_kernels_emulated as few
from tests.unit.test_high_throughput_emulated import LAYOUTS, tiny_ring
from tests.unit.test_kernels_emulated import (
    Batch,
    Caller,
    Shape,
    batches_of,
    check_received,
    sums_of,
    world_of,
)


@pytest.fixture
def low_latency(builder: Builder) -> Iterator[None]:
    """A GPU for low latency, whose CTAs have fewer threads, as there are many."""
    warps = ("_DISPATCH_WARPS", "_COMBINE_WARPS", "_COMBINE_WARPS_OF_SHORT_ROWS")
    with (
        world.emulated(builder, 3),
        mock.patch.multiple(low_latency_kernels, **dict.fromkeys(warps, 2)),
    ):
        yield


@pytest.fixture
def packed(builder: Builder) -> Iterator[None]:
    """The same for high throughput."""
    with (
        high_throughput.emulated(builder, 3),
        mock.patch.multiple(kernels, _MANY_WARPS=1, _FEW_WARPS=1),
    ):
        yield


# ---- low latency --------------------------------------------------------------------------------

SHAPES = [
    Shape(Geometry(48, 96, 4, 16, 3), ScaleFormat.FLOAT32, grid=(2, 1)),
    Shape(Geometry(72, 72, 3, 16, 3), late=True, grid=(2, 1)),
    Shape(Geometry(33, 66, 7, 400, 3), grid=(3, 2)),
]


@pytest.mark.usefixtures("low_latency")
@pytest.mark.parametrize(
    "shape", [pytest.param(SHAPES[0], marks=pytest.mark.long), *SHAPES[1:]], ids=str
)
def test_low_latency(shape: Shape) -> None:
    ranks = world_of(shape)
    for turn in range(2):
        batches = batches_of(shape, turn)

        def round_(rank: int, mode: CudaLowLatency, batches: list[Batch] = batches) -> None:
            call = Caller(shape, mode, rank)
            received, _ = call.dispatch(batches[rank])
            check_received(shape.geometry, batches, rank, received, shape.scale_format)
            out, _ = call.combine(batches[rank], received)
            mode.check()
            assert torch.equal(out, sums_of(shape.geometry, batches, rank))

        ranks.run(round_)
        ranks.check_absent()


@pytest.mark.usefixtures("low_latency")
def test_low_latency_names_the_late_rank() -> None:
    """A rank that misses the second dispatch; the others are in the same call."""
    shape = dataclasses.replace(SHAPES[2], late=True)
    ranks = world_of(shape, timeout_s=1.0)
    batches = batches_of(shape, 0)

    def program(rank: int, mode: CudaLowLatency) -> None:
        call = Caller(shape, mode, rank)
        call.dispatch(batches[rank])
        mode.check()
        if rank == 32:
            return
        call.dispatch(batches[rank])
        with pytest.raises(PeerTimeout, match="rank 32 in low_latency dispatch"):
            mode.check()

    ranks.run(program)


@pytest.mark.usefixtures("low_latency")
def test_low_latency_names_the_rank_that_refused() -> None:
    shape = SHAPES[2]
    ranks = world_of(shape)
    turns = [batches_of(shape, turn) for turn in range(2)]

    def program(rank: int, mode: CudaLowLatency) -> None:
        call = Caller(shape, mode, rank)
        if rank == 32:
            bad = dataclasses.replace(turns[0][rank], x=turns[0][rank].x.float())
            with pytest.raises(ArgumentError, match=r"x\.dtype"):
                call.dispatch(bad)
        else:
            aborted, _ = call.dispatch(turns[0][rank])
            with pytest.raises(PeerRefused, match="rank 32"):
                call.combine(turns[0][rank], aborted)
        received, _ = call.dispatch(turns[1][rank])
        check_received(shape.geometry, turns[1], rank, received, None)
        if rank != 32:
            out, _ = call.combine(turns[1][rank], received, logfmt=True)
            expected = sums_of(shape.geometry, turns[1], rank)
            torch.testing.assert_close(out, expected, rtol=0.02, atol=0.04)
        else:
            call.combine(turns[1][rank], received, logfmt=True)

    ranks.run(program)


@pytest.mark.usefixtures("low_latency")
def test_low_latency_leaves_out_a_masked_rank() -> None:
    few.test_a_masked_rank_is_left_out(SHAPES[2], hooks=False)


# ---- high throughput ----------------------------------------------------------------------------


def run_packed(case: Case, layout: str, in_place: bool) -> None:
    result_bytes = results_of(case, layout) if in_place else 0
    ring_bytes = tiny_ring(case)
    ranks = high_throughput.World(case.ranks, ring_bytes, ctas=2, result_bytes=result_bytes)
    ranks.run(lambda rank, mode: run_case(mode, case, rank, layout, in_place=in_place))


# Ranks of more than one word. Some have more batches than their rings have slots.
WORDS = Case(tokens=(2, 0, 11) * 11, experts_per_rank=1, top_k=3, hidden=16, alignment=2, biases=1)
CASES = [
    Case(tokens=(2, 0, 3, 1, 0, 11) * 8, experts_per_rank=2, top_k=3, hidden=16, alignment=2),
    Case(tokens=(1, 0, 2) * 24, experts_per_rank=1, top_k=4, hidden=16, biases=1),
]


@pytest.mark.usefixtures("packed")
@pytest.mark.parametrize(
    "layout", ["expert_major", pytest.param("token_major", marks=pytest.mark.long)]
)
def test_high_throughput(layout: str) -> None:
    run_packed(WORDS, layout, in_place=False)


@pytest.mark.usefixtures("packed")
def test_high_throughput_names_the_rank_that_refused() -> None:
    ranks = high_throughput.World(WORDS.ranks, tiny_ring(WORDS), ctas=2)
    idx = torch.zeros((1, WORDS.top_k), dtype=torch.int64)

    def program(rank: int, mode: CudaHighThroughput) -> None:
        x = torch.zeros((1, WORDS.hidden), dtype=torch.bfloat16)
        own, error, message = (
            (idx.int(), ArgumentError, "topk_idx") if rank == 32 else (idx, PeerRefused, "rank 32")
        )
        with pytest.raises(error, match=message):
            mode.dispatch(x, own, num_experts=WORDS.experts)

    ranks.run(program)


@pytest.mark.usefixtures("packed")
@pytest.mark.long
@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.ranks} ranks")
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("in_place", [False, True])
def test_high_throughput_of_more_ranks(case: Case, layout: str, in_place: bool) -> None:
    run_packed(case, layout, in_place)
