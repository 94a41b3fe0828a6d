"""A caller writes over everything that calls on a GPU have returned, whenever it likes: later calls
give the same bits, and nobody waits in vain. Kernels run on the CPU."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import pytest
import torch

from fanfold.backends.low_latency.cuda import CudaLowLatency
from fanfold.backends.low_latency.protocol import Dispatched, LateRouting
from fanfold.deep_ep.low_latency_handle import handle_of, late_routing
from fanfold.errors import ArgumentError, PeerRefused
from fanfold.formats import ScaleFormat
from fanfold.geometry import Geometry
from tests.distributed import test_functional as calls
from tests.emulation.deep_ep import run
from tests.emulation.layers import emulated_layers
from tests.emulation.world import Builder, emulated
from tests.unit.test_kernels_emulated import (
    CTAS,
    Caller,
    Shape,
    batches_of,
    check_received,
    sums_of,
    world_of,
)

BYTES = {"zeros": 0x00, "ones": 0xFF, "random": None}
SHAPES = [
    Shape(Geometry(3, 9, 4, 272, 12)),
    Shape(Geometry(2, 6, 5, 144, 10), ScaleFormat.UE8M0, late=True),
    Shape(Geometry(3, 6, 2, 16, 7), late=True, grid=(7, 2)),
]


@pytest.fixture
def gpu(builder: Builder) -> Iterator[None]:
    with emulated(builder, CTAS):
        yield


def scribble(byte: int | None, *tensors: torch.Tensor | None) -> None:
    for tensor in tensors:
        if tensor is None:
            continue
        # Scales are stored transposed.
        raw = tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)
        if byte is None:
            raw.copy_(torch.randint(0, 256, raw.shape, dtype=torch.uint8))
        else:
            raw.fill_(byte)


def handed_out(received: Dispatched) -> tuple[torch.Tensor | None, ...]:
    """All that a caller of either face gets of a low-latency dispatch."""
    return (
        received.tokens, received.scales, received.counts, received.row_weights,
        received.source_tokens, received.routing.ranges,
    )  # fmt: skip


# ---- low latency --------------------------------------------------------------------------------


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(
    ("byte", "hooks"),
    [
        pytest.param(0x00, False, id="zeros"),
        pytest.param(0xFF, True, id="ones, hooks"),
        pytest.param(None, False, id="random"),
        pytest.param(None, True, id="random, hooks"),
        pytest.param(0x00, True, id="zeros, hooks", marks=pytest.mark.long),
        pytest.param(0xFF, False, id="ones", marks=pytest.mark.long),
    ],
)
def test_low_latency(shape: Shape, byte: int | None, hooks: bool) -> None:
    world = world_of(shape)
    turns = [batches_of(shape, turn) for turn in range(6)]

    def program(rank: int, mode: CudaLowLatency) -> None:
        call = Caller(shape, mode, rank)
        for turn, batches in enumerate(turns):
            scribbles = (turn + rank) % 2 == 0  # so that ranks would go different ways
            received, hook = call.dispatch(batches[rank], return_hook=hooks)
            if hook is not None:
                scribble(byte, *handed_out(received))
                hook()
            check_received(shape.geometry, batches, rank, received, shape.scale_format)
            if scribbles:
                scribble(byte, *handed_out(received))
            out, hook = call.combine(batches[rank], received, return_hook=hooks)
            scribble(byte, *handed_out(received), mode.masked())
            if hook is not None:
                scribble(byte, out)
                hook()
            mode.check()
            # Where rows lie is what a caller says with late weights, who may have said anything.
            if not (shape.late and any((turn + r) % 2 == 0 for r in range(shape.geometry.ranks))):
                assert torch.equal(out, sums_of(shape.geometry, batches, rank))
            scribble(byte, out)

    world.run(program)
    world.check_absent()
    world.run(lambda rank, mode: _one_round(shape, rank, mode))


def _one_round(shape: Shape, rank: int, mode: CudaLowLatency) -> None:
    batches = batches_of(shape, 9)
    call = Caller(shape, mode, rank)
    received, _ = call.dispatch(batches[rank])
    check_received(shape.geometry, batches, rank, received, shape.scale_format)
    out, _ = call.combine(batches[rank], received)
    mode.check()
    assert torch.equal(out, sums_of(shape.geometry, batches, rank))


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("byte", BYTES.values(), ids=BYTES)
def test_a_void_dispatch_stays_void(shape: Shape, byte: int | None) -> None:
    world = world_of(shape)
    batches = batches_of(shape, 0)

    def program(rank: int, mode: CudaLowLatency) -> None:
        call = Caller(shape, mode, rank)
        if rank == 0:
            bad = dataclasses.replace(batches[0], x=batches[0].x.float())
            with pytest.raises(ArgumentError, match=r"x\.dtype"):
                call.dispatch(bad)
        else:
            aborted, _ = call.dispatch(batches[rank])
            if rank == 1:
                scribble(byte, *handed_out(aborted))
            with pytest.raises(PeerRefused, match="rank 0"):
                call.combine(batches[rank], aborted)
        _one_round(shape, rank, mode)

    world.run(program)
    world.check_absent()


@pytest.mark.usefixtures("gpu")
def test_masks_are_copies() -> None:
    world = world_of(SHAPES[0])

    def program(rank: int, mode: CudaLowLatency) -> None:
        mode.masked().fill_(1)
        _one_round(SHAPES[0], rank, mode)
        assert not mode.masked().any()

    world.run(program)


def test_the_handle_carries_what_its_tensors_may_lose() -> None:
    geometry = Geometry(2, 4, 1, 16, 3)
    ranges, source_tokens = torch.zeros((2, 2), dtype=torch.int64), torch.zeros((2, 6))
    aborted = torch.ones(1, dtype=torch.int64)
    routing = LateRouting(ranges, source_tokens, aborted)
    handle = handle_of(Dispatched(ranges, None, ranges, routing), geometry)
    assert type(handle) is tuple
    for given in (handle, list(handle)):
        assert late_routing(given).aborted is aborted
    copied = (handle[0], handle[1].clone(), *handle[2:])
    assert late_routing(copied).aborted is None


# ---- high throughput ----------------------------------------------------------------------------


@pytest.fixture
def layers(builder: Builder) -> Iterator[None]:
    with emulated_layers(builder, CTAS):
        yield


def high_throughput_rounds(
    ep: Any,
    mine: dict[str, Any],
    capacity: int | None,
    write: Callable[..., None],
    in_place: bool = False,
) -> list[torch.Tensor]:
    """Dispatches, by a plan of its own and again by that, and combines; ``write`` is called in
    between with all that was returned."""
    found: list[torch.Tensor] = []

    def keep(received: Any) -> None:
        for begin, count in received.expert_ranges():
            rows = slice(begin, begin + count)
            found.extend((received.tokens[rows].clone(), received.source_token[rows].clone()))
        found.extend((received.tokens_per_expert.clone(), received.offsets.clone()))

    for _ in range(3):
        received = ep.dispatch(
            mine["x"], mine["idx"], mine["weights"], capacity=capacity, in_place=in_place
        )
        keep(received)
        y = torch.ones_like(received.tokens, dtype=torch.bfloat16)
        write(received.tokens, received.scales, received.tokens_per_expert, received.offsets)
        write(received.source_rank, received.source_token)
        again = ep.dispatch(mine["x"], previous=received, in_place=in_place)
        keep(again)
        found.append(ep.combine(y, again, weighted=False).clone())
        write(again.tokens, again.scales, again.tokens_per_expert, again.offsets)
        write(again.source_rank, again.source_token)
        found.append(ep.combine(y, received, weighted=False))
    return found


def _high_throughput(
    group: Any,
    case: calls.Case,
    capacity: int | None,
    write: Callable[..., None],
    in_place: bool,
) -> list[torch.Tensor]:
    mine = case.inputs()[group.rank]
    rows = calls.room_for(case) if in_place else 0
    with calls.open_ep(group, case, in_place_rows=rows) as ep:
        found = high_throughput_rounds(ep, mine, capacity, write, in_place)
        ep.check()
    return found


@cache
def unspoilt(bounded: bool, in_place: bool) -> list[list[torch.Tensor]]:
    """What ranks find of whom nobody writes over results."""
    case = calls.CASES[2]
    capacity = calls.room_for(case) if bounded else None
    return run(len(case.tokens), _high_throughput, case, capacity, lambda *_: None, in_place)


@pytest.mark.usefixtures("layers")
@pytest.mark.parametrize(("bounded", "in_place"), [(False, False), (True, False), (False, True)])
@pytest.mark.parametrize("byte", BYTES.values(), ids=BYTES)
def test_high_throughput(byte: int | None, bounded: bool, in_place: bool) -> None:
    case = calls.CASES[2]
    ranks = len(case.tokens)
    capacity = calls.room_for(case) if bounded else None
    found = run(
        ranks, _high_throughput, case, capacity, lambda *all_: scribble(byte, *all_), in_place
    )
    for mine, theirs in zip(found, unspoilt(bounded, in_place), strict=True):
        assert len(mine) == len(theirs)
        assert all(map(torch.equal, mine, theirs))
