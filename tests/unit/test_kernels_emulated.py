"""The low-latency kernels, run on the CPU, against a few lines of Python: any number of ranks, the
halves of calls, refusals and late ranks, without a GPU. What only hardware shows (its memory order,
its speed, its instructions) is for ``tests/gpu``.
"""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch

from fanfold.backends.low_latency.cuda import CudaLowLatency
from fanfold.backends.low_latency.protocol import Statistics
from fanfold.errors import ArgumentError, PeerRefused, PeerTimeout
from fanfold.formats import BF16_ROWS, RowFormat, ScaleFormat, quantize
from fanfold.geometry import Geometry
from tests import nvfp4
from tests.emulation.world import Builder, World, emulated

CTAS = 7


@pytest.fixture(autouse=True)
def gpu(builder: Builder) -> Iterator[None]:
    with emulated(builder, CTAS):
        yield


@dataclasses.dataclass
class Batch:
    """What one rank sends, and the outputs that its experts will give."""

    x: torch.Tensor
    topk_idx: torch.Tensor
    topk_weights: torch.Tensor

    @classmethod
    def of(cls, geometry: Geometry, tokens: int, seed: int) -> Batch:
        numbers = torch.Generator().manual_seed(seed)
        shape = (tokens, geometry.top_k)
        # Duplicates and absent choices are as likely as others.
        topk_idx = torch.randint(-1, geometry.num_experts, shape, generator=numbers)
        return cls(
            torch.randn((tokens, geometry.hidden), generator=numbers).bfloat16(),
            topk_idx,
            torch.rand(shape, generator=numbers),
        )

    def choices(self, token: int) -> dict[int, float]:
        """The token's experts in order of first mention, with their weights."""
        found: dict[int, torch.Tensor] = {}
        for expert, weight in zip(
            self.topk_idx[token].tolist(), self.topk_weights[token], strict=True
        ):
            if expert >= 0:
                found[expert] = found[expert] + weight if expert in found else weight
        return {expert: float(weight) for expert, weight in found.items()}


def rows_of(geometry: Geometry, batches: list[Batch]) -> list[list[tuple[int, int, float]]]:
    """For each expert the (source, token, weight) of its rows, in order."""
    rows: list[list[tuple[int, int, float]]] = [[] for _ in range(geometry.num_experts)]
    for source, batch in enumerate(batches):
        for token in range(len(batch.x)):
            for expert, weight in batch.choices(token).items():
                rows[expert].append((source, token, weight))
    return rows


def outputs_of(geometry: Geometry, rank: int) -> torch.Tensor:
    shape = (geometry.experts_per_rank, geometry.expert_capacity, geometry.hidden)
    numbers = torch.Generator().manual_seed(1000 + rank)
    return torch.randn(shape, generator=numbers).bfloat16()


def sums_of(geometry: Geometry, batches: list[Batch], source: int) -> torch.Tensor:
    """What combine gives ``source``: per rank in fp32, rounded, then over ranks likewise."""
    rows = rows_of(geometry, batches)
    locals_ = geometry.experts_per_rank
    outputs = [outputs_of(geometry, rank) for rank in range(geometry.ranks)]
    batch = batches[source]
    out = torch.zeros_like(batch.x)
    for token in range(len(batch.x)):
        per_rank: dict[int, torch.Tensor] = {}
        for expert, weight in batch.choices(token).items():
            place = next(i for i, row in enumerate(rows[expert]) if row[:2] == (source, token))
            y = outputs[expert // locals_][expert % locals_, place].float()
            before = per_rank.get(expert // locals_, torch.zeros(geometry.hidden))
            per_rank[expert // locals_] = before + torch.tensor(weight) * y
        total = torch.zeros(geometry.hidden)
        for rank in sorted(per_rank):
            total = total + per_rank[rank].bfloat16().float()
        out[token] = total.bfloat16()
    return out


def check_received(
    geometry: Geometry, batches: list[Batch], rank: int, received: Any, scale_format: Any
) -> None:
    """``scale_format`` is that of fp8 rows, a number for nvfp4 rows, or None."""
    rows = rows_of(geometry, batches)
    for local in range(geometry.experts_per_rank):
        expected = rows[rank * geometry.experts_per_rank + local]
        count = int(received.counts[local])
        assert count == len(expected)
        assert received.source_tokens[local, :count].tolist() == [row[1] for row in expected]
        if isinstance(scale_format, float):
            blocks = geometry.hidden // 16
            columns = 4 * received.scales.shape[2]
            tiles = nvfp4.by_row(received.scales, local, count, columns).view(torch.uint8)
            assert not tiles[:, blocks:].any()
        for place, (source, token, weight) in enumerate(expected):
            x = batches[source].x[token : token + 1]
            if scale_format is None:
                assert torch.equal(received.tokens[local, place], x[0])
            elif isinstance(scale_format, float):
                values, scales = nvfp4.quantized(x, scale_format)
                assert torch.equal(received.tokens[local, place], values[0])
                assert torch.equal(tiles[place, :blocks], scales[0].view(torch.uint8))
            else:
                values, scales = quantize(x, scale_format)
                found = received.tokens[local, place].view(torch.uint8)
                assert torch.equal(found, values[0].view(torch.uint8))
                assert torch.equal(received.scales[local, place], scales[0])
            if received.row_weights is not None:
                assert float(received.row_weights[local, place]) == weight


@dataclasses.dataclass(frozen=True)
class Shape:
    geometry: Geometry
    scale_format: ScaleFormat | float | None = None  # as in check_received
    late: bool = False
    grid: tuple[int, int] = (CTAS, 2)


SHAPES = [
    Shape(Geometry(3, 9, 4, 272, 12)),
    Shape(Geometry(4, 8, 3, 528, 9), ScaleFormat.FLOAT32, grid=(7, 3)),
    Shape(Geometry(2, 6, 5, 144, 10), ScaleFormat.UE8M0, late=True),
    Shape(Geometry(5, 5, 2, 16, 7), late=True, grid=(7, 2)),
    Shape(Geometry(1, 3, 6, 256, 8), ScaleFormat.POWER_OF_TWO, grid=(2, 1)),
    # More tokens than a CTA looks at together, and more than it has warps.
    Shape(Geometry(2, 6, 3, 16, 150), late=True, grid=(3, 1)),
    Shape(Geometry(1, 1030, 2, 16, 40), grid=(3, 1)),
    Shape(Geometry(1, 3, 2, 16, 40), grid=(2, 1)),
    # Less than a segment of 1024 columns, several, ragged tiles of scales.
    Shape(Geometry(3, 6, 4, 96, 12), 300.0, grid=(7, 3)),
    Shape(Geometry(2, 2, 6, 1312, 100), 0.75, late=True),
]


# A CTA pushes the headers of more tokens than it has warps.
FEW_CTAS = Shape(Geometry(3, 9, 3, 16, 60), grid=(4, 1))


class Caller:
    """The calls of one rank."""

    def __init__(self, shape: Shape, mode: CudaLowLatency, rank: int) -> None:
        self.shape, self.mode, self.rank = shape, mode, rank

    def dispatch(self, batch: Batch, **rest: Any) -> Any:
        form = self.shape.scale_format
        formats, scale = BF16_ROWS, None
        if isinstance(form, float):
            formats, scale = (RowFormat.NVFP4, ScaleFormat.FLOAT32), torch.tensor(form)
        elif form is not None:
            formats = (RowFormat.FP8, form)
        return self.mode.dispatch(
            self.shape.geometry,
            batch.x,
            batch.topk_idx,
            None if self.shape.late else batch.topk_weights,
            formats=formats,
            global_scale=scale,
            **rest,
        )

    def combine(self, batch: Batch, received: Any, **rest: Any) -> Any:
        y = outputs_of(self.shape.geometry, self.rank)
        weights = batch.topk_weights if self.shape.late else None
        return self.mode.combine(
            self.shape.geometry, y, received.routing, batch.topk_idx, late_weights=weights, **rest
        )


def batches_of(shape: Shape, turn: int) -> list[Batch]:
    geometry = shape.geometry
    counts = (geometry.max_tokens, 0, 3, geometry.max_tokens // 2)
    batches = [
        Batch.of(geometry, counts[(rank + turn) % 4], 10 * turn + rank)
        for rank in range(geometry.ranks)
    ]
    if isinstance(shape.scale_format, float):
        for rank, batch in enumerate(batches):
            batch.x = nvfp4.awkward_rows(len(batch.x), geometry.hidden, 5 * turn + rank)
    return batches


def world_of(shape: Shape, **settings: Any) -> World:
    ctas, senders = shape.grid
    return World(shape.geometry, late=shape.late, ctas=ctas, senders=senders, **settings)


def run_round(world: World, shape: Shape, batches: list[Batch], hooks: bool) -> None:
    """A dispatch and a combine on all ranks, of which every bit is checked."""

    def round_(rank: int, mode: CudaLowLatency) -> None:
        call = Caller(shape, mode, rank)
        received, hook = call.dispatch(batches[rank], return_hook=hooks)
        if hook is not None:
            hook()
        mode.check()
        check_received(shape.geometry, batches, rank, received, shape.scale_format)
        out = torch.full_like(batches[rank].x, torch.nan)
        _, hook = call.combine(batches[rank], received, out=out, return_hook=hooks)
        if hook is not None:
            hook()
        mode.check()
        assert torch.equal(out, sums_of(shape.geometry, batches, rank))

    world.run(round_)
    world.check_absent()


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("hooks", [False, True])
def test_rounds(shape: Shape, hooks: bool) -> None:
    world = world_of(shape)
    for turn in range(4):
        run_round(world, shape, batches_of(shape, turn), hooks)


def test_two_calls_in_flight() -> None:
    shape = SHAPES[0]
    world = world_of(shape)
    turns = [batches_of(shape, turn) for turn in range(4)]

    def program(rank: int, mode: CudaLowLatency) -> None:
        call = Caller(shape, mode, rank)
        for first, second in (turns[:2], turns[2:]):
            a, take_a = call.dispatch(first[rank], return_hook=True)
            b, take_b = call.dispatch(second[rank], return_hook=True)
            take_a()
            take_b()
            check_received(shape.geometry, first, rank, a, None)
            check_received(shape.geometry, second, rank, b, None)

    world.run(program)
    world.check_absent()


def test_logfmt() -> None:
    shape = Shape(Geometry(3, 9, 3, 400, 6))
    world = world_of(shape)
    batches = batches_of(shape, 0)

    def program(rank: int, mode: CudaLowLatency) -> None:
        call = Caller(shape, mode, rank)
        received, _ = call.dispatch(batches[rank])
        out, _ = call.combine(batches[rank], received, logfmt=True)
        expected = sums_of(shape.geometry, batches, rank).float()
        torch.testing.assert_close(out.float(), expected, rtol=0.02, atol=0.04)
        # The words of the coded rows are absent again.
        out, _ = call.combine(batches[rank], received)
        assert torch.equal(out.float(), expected)

    world.run(program)
    world.check_absent()


@pytest.mark.parametrize("shape", [SHAPES[1], SHAPES[2], SHAPES[8]], ids=str)
@pytest.mark.parametrize("in_flight", [False, True])
def test_a_refused_dispatch_leaves_nothing_behind(shape: Shape, in_flight: bool) -> None:
    world = world_of(shape)
    turns = [batches_of(shape, turn) for turn in range(5)]

    def program(rank: int, mode: CudaLowLatency) -> None:
        call = Caller(shape, mode, rank)
        before, hook = call.dispatch(turns[0][rank], return_hook=in_flight)
        if rank == 0:
            bad = dataclasses.replace(turns[1][0], x=turns[1][0].x.float())
            with pytest.raises(ArgumentError, match=r"x\.dtype"):
                call.dispatch(bad, return_hook=in_flight)
        else:
            aborted, take = call.dispatch(turns[1][rank], return_hook=in_flight)
        if hook is not None:
            hook()
            if rank != 0:
                take()
        check_received(shape.geometry, turns[0], rank, before, shape.scale_format)
        if rank == 0:
            call.combine(turns[0][rank], before)
        else:
            # Raised by the first combine that follows, which has been made all the same.
            with pytest.raises(PeerRefused, match="rank 0"):
                call.combine(turns[0][rank], before)
            call.combine(turns[1][rank], aborted)
        for batches in turns[2:]:
            received, _ = call.dispatch(batches[rank])
            check_received(shape.geometry, batches, rank, received, shape.scale_format)
            out, _ = call.combine(batches[rank], received)
            assert torch.equal(out, sums_of(shape.geometry, batches, rank))

    world.run(program)
    world.check_absent()


@pytest.mark.parametrize("shape", [SHAPES[0], SHAPES[2]], ids=str)
@pytest.mark.parametrize("logfmt", [False, True])
def test_a_refused_combine_leaves_nothing_behind(shape: Shape, logfmt: bool) -> None:
    world = world_of(shape)
    turns = [batches_of(shape, turn) for turn in range(4)]

    def program(rank: int, mode: CudaLowLatency) -> None:
        call = Caller(shape, mode, rank)
        received, _ = call.dispatch(turns[0][rank])
        if rank == 1:
            out = torch.empty_like(turns[0][1].x).float()
            with pytest.raises(ArgumentError, match=r"out\.dtype"):
                call.combine(turns[0][rank], received, out=out, logfmt=logfmt)
        else:
            with pytest.raises(PeerRefused, match="rank 1"):
                call.combine(turns[0][rank], received, logfmt=logfmt)
        for batches in turns[1:]:
            received, _ = call.dispatch(batches[rank])
            out, _ = call.combine(batches[rank], received)
            assert torch.equal(out, sums_of(shape.geometry, batches, rank))

    world.run(program)
    world.check_absent()


@pytest.mark.parametrize("hooks", [False, True])
@pytest.mark.parametrize("shape", [SHAPES[0], SHAPES[2]], ids=["early", "late"])
def test_waits_for_a_peer_are_counted(shape: Shape, hooks: bool) -> None:
    """What the others wait for the rank that sleeps, in a dispatch and in a combine."""
    world = world_of(shape)
    batches = batches_of(shape, 0)
    ranks = shape.geometry.ranks
    slept_s, last = 0.5, ranks - 1
    barrier = threading.Barrier(ranks, timeout=60.0)

    def whole(made: tuple[Any, Any]) -> Any:
        if made[1] is not None:
            made[1]()
        return made[0]

    def program(rank: int, mode: CudaLowLatency) -> list[torch.Tensor]:
        call = Caller(shape, mode, rank)
        received, _ = call.dispatch(batches[rank])  # has the kernels built
        call.combine(batches[rank], received)
        waits = [torch.full((ranks,), 7) for _ in range(2)]
        calls = (
            lambda received, wait_ns: call.dispatch(
                batches[rank], statistics=Statistics(wait_ns=wait_ns), return_hook=hooks
            ),
            lambda received, wait_ns: call.combine(
                batches[rank], received, wait_ns=wait_ns, return_hook=hooks
            ),
        )
        for each, wait_ns in zip(calls, waits, strict=True):
            barrier.wait()
            if rank == last:
                time.sleep(slept_s)
            received = whole(each(received, wait_ns))
        mode.check()
        return waits

    for rank, waits in enumerate(world.run(program)):
        for what, wait in zip(("dispatch", "combine"), waits, strict=True):
            assert bool((wait > 7).all()), what
            if rank != last:
                assert int(wait[last]) > slept_s * 1e9 / 50, f"{what}: {wait.tolist()}"


@pytest.mark.parametrize("shape", [SHAPES[0], FEW_CTAS], ids=str)
def test_a_late_rank_is_named(shape: Shape) -> None:
    world = world_of(shape, timeout_s=0.5)
    batches = batches_of(shape, 0)

    def program(rank: int, mode: CudaLowLatency) -> None:
        call = Caller(shape, mode, rank)
        received, _ = call.dispatch(batches[rank])
        mode.check()
        if rank == 2:
            return
        call.dispatch(batches[rank])
        with pytest.raises(PeerTimeout, match="rank 2 in low_latency dispatch"):
            mode.check()
        with pytest.raises(PeerTimeout):
            call.combine(batches[rank], received)

    world.run(program)


def test_a_late_acknowledgement_is_named() -> None:
    """A call first waits until every peer has received the last but one."""
    world = world_of(FEW_CTAS, timeout_s=0.5)
    batches = [Batch.of(FEW_CTAS.geometry, 60, rank) for rank in range(3)]

    def program(rank: int, mode: CudaLowLatency) -> None:
        call = Caller(FEW_CTAS, mode, rank)
        call.dispatch(batches[rank])
        if rank == 2:
            return
        call.dispatch(batches[rank], return_hook=True)
        mode.check()
        call.dispatch(batches[rank], return_hook=True)
        with pytest.raises(PeerTimeout, match="rank 2 in low_latency dispatch"):
            mode.check()

    world.run(program)


@pytest.mark.filterwarnings("ignore::fanfold.errors.LatePeerWarning")
@pytest.mark.parametrize("shape", [SHAPES[0], FEW_CTAS], ids=str)
def test_a_late_rank_is_masked(shape: Shape) -> None:
    world = world_of(shape, timeout_s=0.5, late_peers="mask")
    batches = batches_of(shape, 2)

    def program(rank: int, mode: CudaLowLatency) -> None:
        call = Caller(shape, mode, rank)
        call.dispatch(batches[rank])
        if rank == 2:
            return
        call.dispatch(batches[rank])
        mode.check()
        assert mode.masked().tolist() == [0, 0, 1]
        received, _ = call.dispatch(batches[rank])
        live = [*batches[:2], dataclasses.replace(batches[2], x=batches[2].x[:0])]
        check_received(shape.geometry, live, rank, received, None)

    world.run(program)


@pytest.mark.parametrize("hooks", [False, True])
@pytest.mark.parametrize("shape", [SHAPES[0], SHAPES[1], SHAPES[3]], ids=["bf16", "fp8", "late"])
def test_a_masked_rank_is_left_out(shape: Shape, hooks: bool) -> None:
    """The others' rows and sums are as if nobody had chosen its experts and it had no tokens."""
    geometry = shape.geometry
    gone, world, batches = geometry.ranks - 1, world_of(shape), batches_of(shape, 0)
    without = [
        dataclasses.replace(
            each,
            topk_idx=each.topk_idx.where(each.topk_idx // geometry.experts_per_rank != gone, -1),
        )
        for each in batches
    ]
    without[gone] = dataclasses.replace(batches[gone], x=batches[gone].x[:0])

    def program(rank: int, mode: CudaLowLatency) -> None:
        call = Caller(shape, mode, rank)
        received, _ = call.dispatch(batches[rank])
        call.combine(batches[rank], received)
        if rank == gone:
            return
        mode.set_masked(gone, True)
        for _ in range(3):
            received, hook = call.dispatch(batches[rank], return_hook=hooks)
            if hook is not None:
                hook()
            check_received(geometry, without, rank, received, shape.scale_format)
            out, hook = call.combine(batches[rank], received, return_hook=hooks)
            if hook is not None:
                hook()
            assert torch.equal(out, sums_of(geometry, without, rank))
        mode.check()

    world.run(program)


def test_an_index_out_of_range_is_none() -> None:
    shape = SHAPES[0]
    world = world_of(shape)
    batches = batches_of(shape, 0)
    bad = dataclasses.replace(batches[0], topk_idx=batches[0].topk_idx.clone())
    batches[0].topk_idx[2, 1] = -1
    bad.topk_idx[2, 1] = 9

    def program(rank: int, mode: CudaLowLatency) -> None:
        call = Caller(shape, mode, rank)
        own = bad if rank == 0 else batches[rank]
        received, _ = call.dispatch(own)
        check_received(shape.geometry, batches, rank, received, None)
        if rank == 0:
            with pytest.raises(ArgumentError, match=r"topk_idx\[2, 1\].*is 9"):
                call.combine(own, received)
        else:
            call.combine(own, received)

    world.run(program)


def test_ranks_that_disagree_are_told_and_wait_for_nothing() -> None:
    shape = SHAPES[0]
    world = world_of(shape)
    batches = batches_of(shape, 0)

    def program(rank: int, mode: CudaLowLatency) -> None:
        call = Caller(dataclasses.replace(shape, late=rank == 0), mode, rank)  # without weights
        received, _ = call.dispatch(batches[rank])
        y = outputs_of(shape.geometry, rank)
        # As if the host had enqueued the combine before the dispatch told it.
        with mock.patch.object(mode._reports, "fatal", return_value=False):
            mode.combine(shape.geometry, y, received.routing, None)
        assert mode._reports._words[0] == 0, "a wait ran out"
        with pytest.raises(ArgumentError, match="the same on all ranks"):
            mode.combine(shape.geometry, y, received.routing, None)

    world.run(program)


@pytest.mark.parametrize("late", [False, True])
def test_ranks_that_disagree_about_logfmt_are_told_and_wait_for_nothing(late: bool) -> None:
    shape = dataclasses.replace(SHAPES[0], late=late)
    world = world_of(shape)
    batches = batches_of(shape, 0)

    def program(rank: int, mode: CudaLowLatency) -> None:
        call = Caller(shape, mode, rank)
        received, _ = call.dispatch(batches[rank])
        call.combine(batches[rank], received, logfmt=rank == 0)
        assert mode._reports._words[0] == 0, "a wait ran out"
        with pytest.raises(ArgumentError, match=r"LogFMT.*the same on all ranks"):
            call.dispatch(batches[rank])

    world.run(program)


@pytest.mark.parametrize("shape", [SHAPES[0], Shape(Geometry(3, 6, 2, 64, 5), late=True)], ids=str)
def test_a_refused_combine_of_an_aborted_dispatch_is_aborted_too(shape: Shape) -> None:
    world = world_of(shape)
    turns = [batches_of(shape, turn) for turn in range(3)]

    def program(rank: int, mode: CudaLowLatency) -> None:
        call = Caller(shape, mode, rank)
        own = turns[0][rank]
        if rank == 2:
            with pytest.raises(ArgumentError, match="x"):
                call.dispatch(dataclasses.replace(own, x=own.x.float()))
        else:
            received, _ = call.dispatch(own)
            out = own.x.float() if rank == 1 else None
            with pytest.raises(ArgumentError if rank == 1 else PeerRefused):
                call.combine(own, received, out=out)
        for batches in turns[1:]:
            received, _ = call.dispatch(batches[rank])
            if rank == 1 and batches is turns[1]:  # told late, as its own mistake came first
                with pytest.raises(PeerRefused):
                    call.combine(batches[rank], received)
                continue
            out, _ = call.combine(batches[rank], received)
            assert torch.equal(out, sums_of(shape.geometry, batches, rank))

    world.run(program)
    world.check_absent()
