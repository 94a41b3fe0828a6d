"""How the ranks of GPUs' low latency ready their memory together: what fails on one of them is
raised by all, and calls that nobody can receive are given up. With emulated kernels."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch

from fanfold.backends.low_latency import cuda
from fanfold.backends.low_latency.cuda import CudaLowLatency
from fanfold.backends.low_latency.kernels import Grid
from fanfold.errors import ArgumentError, CompileError, FanfoldError, PeerTimeout, UsageError
from fanfold.geometry import Geometry
from fanfold.jit import KernelSource
from tests.emulation.world import Builder, World, emulated

CTAS = 4
GEOMETRY = Geometry(2, 4, 2, 64, 6)
SMALLER = dataclasses.replace(GEOMETRY, max_tokens=3)
FAILING = 1
Rank = threading.local()


@pytest.fixture(autouse=True)
def gpu(builder: Builder) -> Iterator[None]:
    with emulated(builder, CTAS):
        yield


def world(**settings: Any) -> World:
    return World(GEOMETRY, ctas=CTAS, senders=1, **settings)


def check_round(mode: CudaLowLatency, geometry: Geometry = GEOMETRY) -> None:
    """A dispatch and a combine in which every rank sends its tokens to all ranks."""
    x = torch.full((3, 64), 2.0).bfloat16()
    topk_idx = torch.tensor([[0, 3]] * 3)
    got, _ = mode.dispatch(geometry, x, topk_idx, torch.ones(3, 2))
    out, _ = mode.combine(geometry, got.tokens, got.routing, None)
    mode.check()
    assert torch.equal(out, 2 * x)


def send(mode: CudaLowLatency) -> Callable[[], None]:
    x, topk_idx = torch.ones((3, 64)).bfloat16(), torch.tensor([[0, 3]] * 3)
    _, hook = mode.dispatch(GEOMETRY, x, topk_idx, return_hook=True)
    assert hook is not None
    return hook


def check_failure(rank: int, error: Exception, kind: type[Exception], message: str) -> None:
    assert message in str(error)
    assert type(error) is (kind if rank == FAILING else FanfoldError)
    assert rank == FAILING or f"rank {FAILING} failed" in str(error)


# ---- what fails on one rank ---------------------------------------------------------------------


@pytest.mark.parametrize("file", ["low_latency/dispatch.cu", "low_latency/combine.cu"])
def test_a_kernel_that_one_rank_cannot_compile(file: str) -> None:
    there, load_all = world(), cuda.jit.load_all

    def failing(sources: list[KernelSource], *rest: Any) -> Any:
        if Rank.number == FAILING and any(source.file == file for source in sources):
            raise CompileError(file, "sm_90a", "a reason", "", "")
        return load_all(sources, *rest)

    def program(rank: int, mode: CudaLowLatency) -> None:
        Rank.number = rank
        x, topk_idx = torch.ones((3, 64)).bfloat16(), torch.tensor([[0, 3]] * 3)
        with pytest.raises(FanfoldError) as caught:
            mode.dispatch(GEOMETRY, x, topk_idx)
        check_failure(rank, caught.value, CompileError, "a reason")

    with mock.patch.object(cuda.jit, "load_all", failing):
        there.run(program)
    there.run(lambda rank, mode: check_round(mode))


@pytest.mark.parametrize("before", [0, 1], ids=["with calls before it", "with its own writing"])
def test_cuda_fails_on_one_rank(before: int) -> None:
    there = world()
    there.run(lambda rank, mode: check_round(mode))

    def program(rank: int, mode: CudaLowLatency) -> None:
        left = before

        def synchronize(device: object) -> None:
            nonlocal left
            if Rank.number == FAILING:
                left -= 1
                if left < 0:
                    raise RuntimeError("CUDA error")

        Rank.number, Rank.synchronize = rank, synchronize
        with pytest.raises(Exception, match="CUDA error") as caught:
            check_round(mode, SMALLER)
        check_failure(rank, caught.value, RuntimeError, "CUDA error")

    with mock.patch.object(torch.cuda, "synchronize", lambda device: Rank.synchronize(device)):
        there.run(program)
    there.run(lambda rank, mode: check_round(mode, SMALLER))
    there.run(lambda rank, mode: check_round(mode))


@pytest.mark.parametrize("kind", ["dispatch", "combine"])
def test_a_refused_call_that_changes_the_geometry(kind: str) -> None:
    """The others are about to agree about it, and run no kernel of the geometry before."""
    there = world()
    there.run(lambda rank, mode: check_round(mode))

    def program(rank: int, mode: CudaLowLatency) -> None:
        if rank == FAILING:
            getattr(mode, f"refuse_{kind}")(ArgumentError("x", 1, "right"), geometry=SMALLER)
        else:
            with pytest.raises(FanfoldError, match=f"rank {FAILING} failed: x is 1"):
                check_round(mode, SMALLER)
        check_round(mode, SMALLER)

    there.run(program)


# ---- calls that are given up --------------------------------------------------------------------


def test_a_reset_gives_up_calls_in_flight() -> None:
    there = world()
    there.run(lambda rank, mode: check_round(mode))

    def program(rank: int, mode: CudaLowLatency) -> None:
        hooks = [send(mode), send(mode)]
        if rank == 0:
            hooks[0]()  # on this rank only
        with pytest.raises(UsageError, match="all ranks must give the call up"):
            mode.quiesce()
        mode.reset()
        mode.quiesce()
        for hook in hooks[1 - rank :]:
            with pytest.raises(UsageError, match="given up"):
                hook()
        check_round(mode)
        hook = send(mode)
        with pytest.raises(UsageError, match="given up"):
            hooks[1]()
        hook()
        check_round(mode)

    there.run(program)
    there.check_absent()


# ---- who is late --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("epoch", "received", "expected", "actual"),
    [
        (2, None, 1, 0),
        (11, None, 10, 9),
        (65540, None, 65539, 65538),
        (4, 0, 1, 0),
        (11, 7, 8, 7),
        (65540, 65536, 65537, 65536),
    ],
)
def test_a_timeout_counts_calls_from_one(
    epoch: int, received: int | None, expected: int, actual: int
) -> None:
    mode = world().modes[0]
    mode._reports._words[0:4] = [2 | 3 << 8, epoch, received or 0, received is not None]
    what = "" if received is None else " (acknowledgements of earlier calls)"
    with pytest.raises(PeerTimeout) as caught:
        mode.check()
    assert (caught.value.expected, caught.value.actual) == (expected, actual)
    assert (caught.value.peer, caught.value.phase) == (3, f"low_latency combine{what}")


def test_a_rank_that_misses_its_tenth_call() -> None:
    there = world(timeout_s=0.5)

    def program(rank: int, mode: CudaLowLatency) -> None:
        x, topk_idx = torch.ones((3, 64)).bfloat16(), torch.tensor([[0, 3]] * 3)
        for _ in range(9 + (rank != FAILING)):
            mode.dispatch(GEOMETRY, x, topk_idx)
        if rank != FAILING:
            with pytest.raises(PeerTimeout) as caught:
                mode.check()
            assert (caught.value.peer, caught.value.phase) == (FAILING, "low_latency dispatch")
            assert (caught.value.expected, caught.value.actual) == (10, 9)

    there.run(program)


def test_a_rank_that_does_not_receive() -> None:
    there = world(timeout_s=0.5)

    def program(rank: int, mode: CudaLowLatency) -> None:
        send(mode)()
        hooks = [send(mode), send(mode)]
        if rank != FAILING:
            hooks[0]()
            send(mode)
            with pytest.raises(PeerTimeout, match="acknowledgements of earlier calls") as caught:
                mode.check()
            assert (caught.value.expected, caught.value.actual) == (2, 1)

    there.run(program)


# ---- the grid -----------------------------------------------------------------------------------


def test_a_grid_has_a_cta_for_every_rank_and_one_more() -> None:
    assert Grid.of(132, 8) == Grid(132, 20)
    assert Grid.of(132, 8, ctas=9) == Grid(9, 1)
    for sms, ctas, bound in ((132, 8, "from 9"), (132, 133, "to 132"), (8, None, "from 9")):
        with pytest.raises(ArgumentError, match=bound) as caught:
            Grid.of(sms, 8, ctas=ctas)
        assert caught.value.argument == "ctas"
    assert Grid.of(132, 1024) == Grid(132, 20)
    assert Grid.of(132, 72, ctas=2) == Grid(2, 1)
    with pytest.raises(ArgumentError, match="from 2, one that sends and one that receives"):
        Grid.of(132, 72, ctas=1)
    for senders in (0, 3):
        with pytest.raises(ArgumentError, match="from 1 to 2") as caught:
            Grid.of(132, 8, ctas=10, senders=senders)
        assert caught.value.argument == "senders"
