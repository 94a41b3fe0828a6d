"""The low-latency combine that waits for outputs, its kernels run on the CPU: rows are read only
once their signal has come, and none waits for the signal of another."""

from __future__ import annotations

import contextlib
import random
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from fanfold.backends.low_latency import kernels
from fanfold.backends.low_latency.cuda import CudaLowLatency
from fanfold.backends.low_latency.protocol import ReadyRows
from fanfold.errors import PeerTimeout, SignalTimeout
from fanfold.geometry import Geometry
from tests.emulation.world import Builder, emulated
from tests.unit.conftest import Compiled
from tests.unit.test_kernels_emulated import (
    Batch,
    Caller,
    Shape,
    batches_of,
    outputs_of,
    sums_of,
    world_of,
)
from tests.waiting import wait_until

CTAS = 7
SHAPE = Shape(Geometry(4, 8, 3, 144, 9), late=True, grid=(7, 2))
MANY_EXPERTS = Shape(Geometry(2, 40, 4, 16, 40), late=True, grid=(7, 2))


@pytest.fixture(autouse=True)
def gpu(builder: Builder) -> Iterator[None]:
    with emulated(builder, CTAS):
        yield


class Producer(threading.Thread):
    """Acts as the kernel that writes the outputs of one rank: in any order, each block's rows,
    then its signal, which reaches ``bound`` in two steps.

    Attributes:
        y: NaN wherever no row is written yet; rows that no expert has stay so.
    """

    def __init__(
        self,
        geometry: Geometry,
        rank: int,
        counts: torch.Tensor,
        block_rows: int,
        *,
        dtype: torch.dtype = torch.int32,
        bound: int = 5,
        sms: int = 2,
        seed: int = 0,
    ) -> None:
        super().__init__(daemon=True)
        self.outputs = outputs_of(geometry, rank)
        self.y = torch.full_like(self.outputs, torch.nan)
        self.blocks = -(-geometry.expert_capacity // block_rows)
        # More than are needed: the stride follows from the rows, not from the tensor.
        signals = torch.zeros(geometry.experts_per_rank * self.blocks + 3, dtype=dtype)
        self.ready = ReadyRows(self.y, signals, block_rows, bound, sms)
        self.counts = counts.tolist()
        self.order = [
            (expert, block)
            for expert, count in enumerate(self.counts)
            for block in range(-(-count // block_rows))
        ]
        random.Random(seed * 100 + rank).shuffle(self.order)

    def write(self, expert: int, block: int) -> None:
        """The block's rows, then its signal."""
        rows = self.ready.block_rows
        place = slice(block * rows, min((block + 1) * rows, self.counts[expert]))
        signal = expert * self.blocks + block
        self.ready.signals[signal] = self.ready.ready_at - 1  # not enough
        time.sleep(0.001)
        self.y[expert, place] = self.outputs[expert, place]
        self.ready.signals[signal] = self.ready.ready_at + signal % 2  # or more

    def run(self) -> None:
        for expert, block in self.order:
            self.write(expert, block)


def combine(caller: Caller, batch: Batch, received: Any, producer: Producer, **rest: Any) -> Any:
    return caller.mode.combine(
        caller.shape.geometry,
        producer.ready,
        received.routing,
        batch.topk_idx,
        late_weights=batch.topk_weights,
        **rest,
    )


def round_of(
    shape: Shape, turn: int, block_rows: int, sms: int, hooks: bool
) -> Callable[[int, CudaLowLatency], None]:
    """What a rank does in one round of many, checked to the last bit. The second one's combine is
    an ordinary one, in the fourth that of one rank only."""
    batches = batches_of(shape, turn)

    def round_(rank: int, mode: CudaLowLatency) -> None:
        caller = Caller(shape, mode, rank)
        received, _ = caller.dispatch(batches[rank])
        out = torch.full_like(batches[rank].x, torch.nan)
        if turn == 1 or (turn == 3 and rank == 0):
            _, hook = caller.combine(batches[rank], received, out=out, return_hook=hooks)
        else:
            dtype = torch.uint32 if turn == 2 else torch.int32
            options = {"dtype": dtype, "seed": turn, "sms": sms}
            producer = Producer(shape.geometry, rank, received.counts, block_rows, **options)
            producer.start()
            rest = {"out": out, "return_hook": hooks}
            _, hook = combine(caller, batches[rank], received, producer, **rest)
            producer.join()
        if hook is not None:
            hook()
        mode.check()
        assert torch.equal(out, sums_of(shape.geometry, batches, rank))

    return round_


@pytest.mark.parametrize(
    ("shape", "block_rows", "sms", "hooks"),
    [(SHAPE, 4, 2, True), (SHAPE, 36, 7, False), (MANY_EXPERTS, 3, 1, False)],
    ids=["blocks", "experts", "one SM"],
)
def test_rows_are_read_once_they_are_written(
    shape: Shape, block_rows: int, sms: int, hooks: bool
) -> None:
    world = world_of(shape)
    for turn in range(4):
        world.run(round_of(shape, turn, block_rows, sms, hooks))
        world.check_absent()


def test_two_calls_in_flight_and_logfmt() -> None:
    world = world_of(SHAPE)
    turns = [batches_of(SHAPE, turn) for turn in range(2)]

    def program(rank: int, mode: CudaLowLatency) -> None:
        caller = Caller(SHAPE, mode, rank)
        calls = []
        for turn, batches in enumerate(turns):
            received, _ = caller.dispatch(batches[rank])
            producer = Producer(SHAPE.geometry, rank, received.counts, 4, seed=turn)
            producer.start()
            options = {"logfmt": True, "return_hook": True}
            calls.append(combine(caller, batches[rank], received, producer, **options))
            producer.join()
        for batches, (out, hook) in zip(turns, calls, strict=True):
            hook()
            wanted = sums_of(SHAPE.geometry, batches, rank).float()
            torch.testing.assert_close(out.float(), wanted, rtol=0.02, atol=0.04)
        mode.check()

    world.run(program)
    world.check_absent()


def test_no_row_waits_for_the_signal_of_another() -> None:
    """The outputs of the first token come last, after rows of others have been seen to arrive."""
    geometry = Geometry(1, 4, 2, 64, 90)
    shape = Shape(geometry, late=True, grid=(7, 2))
    world = world_of(shape)
    batch = Batch.of(geometry, 90, seed=1)
    batch.topk_idx[0] = torch.tensor([2, -1])
    results = world.modes[0]._memory.tensor[-2 * 90 * 128 :]  # two halves of slots of 128 bytes

    def program(rank: int, mode: CudaLowLatency) -> None:
        caller = Caller(shape, mode, rank)
        received, _ = caller.dispatch(batch)
        producer = Producer(geometry, rank, received.counts, 16)
        producer.order.sort(key=lambda place: place == (2, 0))
        *early, last = producer.order
        without = sum(
            all(not (expert == 2 and row < 16) for expert, row in rows_of_token(batch, token))
            for token in range(90)
            if batch.choices(token)
        )

        def produce() -> None:
            for place in early:
                producer.write(*place)
            arrived = lambda: int((results.view(-1, 128) != 0xFF).any(1).sum())  # noqa: E731
            wait_until(lambda: arrived() >= without, "rows of the other blocks", pause_s=0.001)
            producer.write(*last)

        thread = threading.Thread(target=produce, daemon=True)
        thread.start()
        out, hook = combine(caller, batch, received, producer, return_hook=True)
        thread.join()
        hook()
        mode.check()
        assert torch.equal(out, sums_of(geometry, [batch], 0))

    def rows_of_token(batch: Batch, token: int) -> list[tuple[int, int]]:
        """The token's experts, and how many rows each has of tokens before."""
        return [
            (expert, sum(expert in batch.choices(before) for before in range(token)))
            for expert in batch.choices(token)
        ]

    world.run(program)
    world.check_absent()


def test_experts_and_ranks_without_rows_are_not_waited_for() -> None:
    world = world_of(SHAPE)
    batches = [Batch.of(SHAPE.geometry, 3 * (rank == 1), seed=rank) for rank in range(4)]
    batches[1].topk_idx.fill_(2)  # all rows go to the first expert of rank 1

    def program(rank: int, mode: CudaLowLatency) -> None:
        caller = Caller(SHAPE, mode, rank)
        received, _ = caller.dispatch(batches[rank])
        producer = Producer(SHAPE.geometry, rank, received.counts, 4)
        assert len(producer.order) == (rank == 1)
        producer.start()
        out, _ = combine(caller, batches[rank], received, producer)
        mode.check()
        assert torch.equal(out, sums_of(SHAPE.geometry, batches, rank))

    world.run(program)
    world.check_absent()


def test_masked_ranks_are_left_out() -> None:
    world = world_of(SHAPE)
    batches = batches_of(SHAPE, 1)
    lost = batches[2]
    batches[2] = Batch.of(SHAPE.geometry, 0, seed=0)
    for batch in batches:
        there = (batch.topk_idx < 4) | (batch.topk_idx > 5)  # rank 2 has experts 4 and 5
        batch.topk_idx[~there] = -1

    def program(rank: int, mode: CudaLowLatency) -> None:
        caller = Caller(SHAPE, mode, rank)
        caller.dispatch(lost if rank == 2 else batches[rank])  # all ranks' geometry
        if rank == 2:
            return
        mode.set_masked(2, True)
        received, _ = caller.dispatch(batches[rank])
        producer = Producer(SHAPE.geometry, rank, received.counts, 4)
        producer.start()
        out, _ = combine(caller, batches[rank], received, producer)
        mode.check()
        assert torch.equal(out, sums_of(SHAPE.geometry, batches, rank))

    world.run(program)


def without_a_signal(shape: Shape) -> Callable[[int, CudaLowLatency], Exception]:
    """What a rank of a call does in which a signal of rank 1 does not come, for which a token of
    rank 0 waits; returns how the mode has ended."""
    batches = batches_of(shape, 0)
    batches[0].topk_idx[0, 0] = 3  # rank 1 has its row in (1, 0)
    batches[0].topk_idx[0, 1:] = -1

    def program(rank: int, mode: CudaLowLatency) -> Exception:
        caller = Caller(shape, mode, rank)
        received, _ = caller.dispatch(batches[rank])
        producer = Producer(shape.geometry, rank, received.counts, 4)
        if rank == 1:
            producer.order.remove((1, 0))
            producer.ready.signals[producer.blocks] = 2
        producer.start()
        with contextlib.suppress(SignalTimeout, PeerTimeout):  # from here, or later
            combine(caller, batches[rank], received, producer)
        with pytest.raises((SignalTimeout, PeerTimeout)) as caught:  # the mode has ended
            caller.dispatch(batches[rank])
        return caught.value

    return program


def test_a_signal_that_does_not_come_is_named() -> None:
    errors = world_of(SHAPE, timeout_s=0.5).run(without_a_signal(SHAPE))
    late = errors[1]
    assert isinstance(late, SignalTimeout)
    assert (late.rank, late.expert, late.block) == (1, 1, 0)
    assert (late.value, late.expected, late.seconds) == (2, 5, 0.5)
    assert "block 0 of its local expert 1: expected 5 or more, have 2" in str(late)
    assert all(isinstance(errors[rank], PeerTimeout) for rank in (0, 2, 3))


@pytest.mark.parametrize(
    ("sizes", "logfmt"), [((8, 256, 8, 7168), False), ((32, 2048, 32, 16384), True)]
)
def test_compiles_for_hopper(
    compiled: Compiled, sizes: tuple[int, int, int, int], logfmt: bool
) -> None:
    source = kernels.combine_kernel(
        Geometry(*sizes, 128), late=True, logfmt=logfmt, awaits_signals=True
    )
    binary = compiled(source, "sm_90a")
    assert (binary.spill_bytes, binary.stack_bytes) == (0, 0)
    assert 0 < binary.registers <= source.register_limit
