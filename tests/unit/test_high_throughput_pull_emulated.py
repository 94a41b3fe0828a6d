"""Dispatches whose rows readers pull from a ring of their source, with the kernels on the CPU: the
same results as pushed ones, bit for bit, with rings so short that each credit matters.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch

from fanfold.backends.high_throughput import cuda, grid, kernels
from fanfold.backends.high_throughput.cuda import CudaHighThroughput
from fanfold.backends.high_throughput.kernels import DispatchKind, Sizes
from fanfold.errors import ArgumentError, PeerRefused, PeerTimeout
from tests.distributed.cuda_rounds import (
    dispatch,
    dispatch_kinds,
    run_case,
    sent,
    soak,
    soak_results,
)
from tests.distributed.routings import Case, Round
from tests.emulation.high_throughput import CTAS, ROOMY_RING, SMALL, World, emulated
from tests.emulation.world import Builder
from tests.unit.test_high_throughput_emulated import CASES, tiny_ring

LAYOUTS = ("expert_major", "token_major")


@pytest.fixture(autouse=True)
def gpu(builder: Builder) -> Iterator[None]:
    with emulated(builder, CTAS):
        yield


class Pulling(World):
    """With so little memory that a source has four slots for each rank. After a run, dispatches of
    all ranks have launched kernels that pull."""

    def __init__(self, case: Case, **options: Any) -> None:
        super().__init__(case.ranks, tiny_ring(case), dispatch_transfer="pull", **options)

    def run(self, program: Any) -> Any:
        with dispatch_kinds() as kinds:
            values = super().run(program)
        assert sum(kind.pulls for kind in kinds) >= len(self.modes)
        assert all(kind.pulls != kind.in_place for kind in kinds)
        return values


def pulling(case: Case, **options: Any) -> Pulling:
    return Pulling(case, **options)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("case", CASES[:3], ids=str)
def test_rounds(case: Case, layout: str) -> None:
    fewer = tuple(tokens // 4 for tokens in case.tokens[::-1])
    turns = [case, dataclasses.replace(case, tokens=fewer, seed=1)]

    def program(rank: int, mode: CudaHighThroughput) -> None:
        for turn in turns:
            run_case(mode, turn, rank, layout)

    pulling(case).run(program)


@pytest.mark.parametrize("style", ["one_rank", "one_expert", "none"])
def test_skewed_routing(style: str) -> None:
    case = dataclasses.replace(CASES[0], tokens=(90, 0, 45), style=style, biases=0)
    pulling(case).run(lambda rank, mode: run_case(mode, case, rank, "expert_major"))


@pytest.mark.parametrize("ranks", [5, pytest.param(40, marks=pytest.mark.long)])
def test_more_ranks(ranks: int) -> None:
    """Of more than a word has bits, too."""
    tokens = tuple((19, 0, 33)[rank % 3] for rank in range(ranks))
    case = dataclasses.replace(SMALL, tokens=tokens, experts_per_rank=2)
    pulling(case).run(lambda rank, mode: run_case(mode, case, rank, "expert_major"))


@pytest.mark.parametrize(("ctas", "senders"), [(2, 1), (3, 1), (3, 2)])
def test_other_grids(ctas: int, senders: int) -> None:
    world = pulling(SMALL, ctas=ctas, senders=senders)
    world.run(lambda rank, mode: run_case(mode, SMALL, rank, "expert_major"))


def test_turns_without_a_wait() -> None:
    """Among dispatches in place, which are never pulled, and combines through the same rings."""
    cases = [
        dataclasses.replace(SMALL, style=style, seed=n)
        for n, style in enumerate(("spread", "one_rank", "holes"))
    ]
    world = pulling(SMALL, result_bytes=soak_results(cases))
    world.run(lambda rank, mode: soak(mode, cases, rank, 40))


def test_ranks_take_other_numbers_of_sms() -> None:
    """Which they need not agree about; so nothing that chooses goes by it."""
    world = pulling(SMALL)

    def program(rank: int, mode: CudaHighThroughput) -> None:
        mode.use_sms(2 + rank % 2)
        run_case(mode, SMALL, rank, "expert_major")

    world.run(program)


def test_rings_that_are_too_short_are_named_as_they_are_set() -> None:
    """Though a source has the room of all of them."""
    world = World(2, 1 << 16, dispatch_transfer="pull")
    x = torch.zeros((2, 8192), dtype=torch.bfloat16, device="cpu")
    idx = torch.zeros((2, 1), dtype=torch.int64, device="cpu")
    # Two rings shall have four slots of eight rows, each with what is beside it.
    least = 4 * 8 * (2 * 8192 + 128) // 2

    def program(rank: int, mode: CudaHighThroughput) -> None:
        with pytest.raises((ArgumentError, PeerRefused)) as raised:
            mode.dispatch(x, idx, num_experts=4, capacity=8)
        text = str(raised.value)
        assert f"ring_bytes is {1 << 16}" in text
        assert f"at least {least} " in text

    world.run(program)


# ---- what goes wrong ----------------------------------------------------------------------------


def test_ranks_agree_about_the_setting_as_they_open() -> None:
    with mock.patch.object(cuda, "agree", wraps=cuda.agree) as agreed:
        pulling(SMALL)
    found = [call.args[1]["dispatch_transfer"] for call in agreed.call_args_list]
    assert found == ["pull"] * SMALL.ranks


def test_ranks_agree_how_rows_travel() -> None:
    """Also if they have opened."""
    world = World(SMALL.ranks, ROOMY_RING, dispatch_transfer="push")
    pulls = World(SMALL.ranks, ROOMY_RING, dispatch_transfer="pull").modes[1]._config

    def program(rank: int, mode: CudaHighThroughput) -> None:
        if rank == 1:
            mode._launches._config = pulls
        got = dispatch(mode, Round(SMALL, rank), "expert_major", 400)
        with pytest.raises(ArgumentError, match=r"dispatch_transfer.*the same on all ranks"):
            (mode.quiesce(), mode.combine(got.tokens, got.plan, layout="expert_major"))

    world.run(program)


def test_a_refused_dispatch_is_aborted_on_all_ranks() -> None:
    def program(rank: int, mode: CudaHighThroughput) -> None:
        expect = Round(SMALL, rank)
        if rank == 1:
            x, idx = (torch.zeros((5, n), dtype=torch.float32, device="cpu") for n in (32, 4))
            with pytest.raises(ArgumentError):
                mode.dispatch(x, idx, num_experts=9)
        else:
            with pytest.raises(PeerRefused, match="rank 1"):
                dispatch(mode, expect, "expert_major", None)
        run_case(mode, SMALL, rank, "expert_major")

    pulling(SMALL).run(program)


def test_a_late_rank_is_named() -> None:
    world = pulling(SMALL, timeout_s=0.5)

    def program(rank: int, mode: CudaHighThroughput) -> None:
        got = dispatch(mode, Round(SMALL, rank), "expert_major", None)
        if rank == 1:
            return
        x = sent(Round(SMALL, rank), mode.device)
        with pytest.raises(PeerTimeout) as raised:
            (mode.dispatch_cached(x, got.plan, layout="expert_major"), mode.quiesce())
        assert raised.value.peer == 1

    world.run(program)


# ---- the choice ---------------------------------------------------------------------------------


def kind(ranks: int, *, expert_major: bool = True, in_place: bool = False) -> DispatchKind:
    sizes = Sizes(ranks, 256, 8)
    return DispatchKind(sizes, 7168, 56, expert_major, False, False, in_place)


def test_what_is_asked_for_is_taken_where_it_can_be() -> None:
    for never in (kind(1), kind(4, in_place=True)):
        for asked in ("auto", "push", "pull"):
            assert not grid.with_transfer(never, asked).pulls
    across = dataclasses.replace(kind(2), sizes=Sizes(2, 256, 8, across_hosts=True))
    transferred = [grid.with_transfer(across, asked).pulls for asked in ("auto", "push", "pull")]
    assert transferred == [False, False, True]
    for expert_major in (False, True):
        assert grid.with_transfer(kind(4, expert_major=expert_major), "pull").pulls
        assert not grid.with_transfer(kind(4, expert_major=expert_major), "push").pulls


@pytest.mark.parametrize(
    ("ranks", "row_bytes", "expert_major", "pulls"),
    [
        (2, 7168, True, True),
        (2, 14336, True, True),
        (3, 7168, True, True),  # by the model alone
        (4, 7168, True, False),  # the link is slower when pulled, and has more to carry
        (4, 14336, True, False),
        (8, 7168, True, False),
        (2, 2048, True, False),
        (2, 7168, False, False),
    ],
)
def test_the_model_pulls_what_was_faster(
    ranks: int, row_bytes: int, expert_major: bool, pulls: bool
) -> None:
    asked = dataclasses.replace(kind(ranks, expert_major=expert_major), row_bytes=row_bytes)
    assert grid.with_transfer(asked, "auto").pulls is pulls


@pytest.mark.parametrize(
    ("ranks", "top_k", "pulls"), [(2, 2, False), (2, 22, True), (4, 22, False)]
)
def test_the_model_goes_by_top_k(ranks: int, top_k: int, pulls: bool) -> None:
    """And not beyond three ranks, where longer lists of experts were not measured."""
    asked = dataclasses.replace(kind(ranks), sizes=Sizes(ranks, 256, top_k))
    assert grid.with_transfer(asked, "auto").pulls is pulls


def test_a_pulling_grid_has_fewer_senders() -> None:
    pushed = kind(4)
    pulled = dataclasses.replace(pushed, pulls=True)
    for ctas in (2, 8, 12, 24, 64):
        of = grid.Grid(4, 64, ctas)
        assert of.of_dispatch(pulled)[0] == ctas
        assert 1 <= of.of_dispatch(pulled)[1] <= of.of_dispatch(pushed)[1] < ctas
    assert grid.Grid(4, 64, 24, 9).of_dispatch(pulled) == (24, 9)


def test_the_kernel_and_what_ranks_agree_about_say_so() -> None:
    pushed = kind(4)
    pulled = dataclasses.replace(pushed, pulls=True)
    across = dataclasses.replace(pulled, sizes=Sizes(4, 256, 8, across_hosts=True))
    rings = [kernels.core_shape(each).kept_rings for each in (pushed, pulled, across)]
    assert rings == [0, 4, 1]
    sources = [kernels.dispatch_kernel(each).source for each in (pushed, pulled)]
    assert [dict(source.pairs)["kPulls"] for source in sources] == [0, 1]
