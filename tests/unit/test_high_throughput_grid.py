"""CTAs of high-throughput kernels: those asked for, and those of the model."""

from __future__ import annotations

import dataclasses
import random

import pytest

from fanfold.backends.high_throughput import grid as model
from fanfold.backends.high_throughput.grid import Grid, sms_for
from fanfold.backends.high_throughput.kernels import (
    DEFAULT_MOST_CTAS,
    CombineKind,
    DispatchKind,
    Sizes,
)

MAIN = Sizes(4, 256, 8)
ORDERS = [(expert_major, in_place) for expert_major in (False, True) for in_place in (False, True)]


def dispatch(sizes: Sizes, row_bytes: int, *, expert_major: bool, in_place: bool) -> DispatchKind:
    return DispatchKind(sizes, row_bytes, 0, expert_major, False, False, in_place)


def combine(sizes: Sizes, row_bytes: int, *, expert_major: bool) -> CombineKind:
    return CombineKind(sizes, row_bytes, expert_major, expert_major, False)


def of_dispatches(grid: Grid) -> list[tuple[int, int]]:
    return [
        grid.of_dispatch(dispatch(MAIN, 64, expert_major=expert_major, in_place=in_place))
        for expert_major, in_place in ORDERS
    ]


@pytest.mark.parametrize(
    ("grid", "expected"),
    [
        (Grid(4, 64, 24), [(24, 9), (24, 12), (24, 8), (24, 8)]),
        (Grid(4, 64, 12), [(12, 5), (12, 8), (12, 4), (12, 4)]),
        (Grid(4, 64, 8), [(8, 3), (8, 5), (8, 3), (8, 3)]),
        (Grid(4, 64, 2), [(2, 1), (2, 1), (2, 1), (2, 1)]),
        (Grid(4, 64, 40, 5), [(40, 5)] * 4),
        (Grid(1, 64, 24), [(24, 24)] * 4),
    ],
)
def test_what_is_asked_for_is_taken(grid: Grid, expected: list[tuple[int, int]]) -> None:
    assert of_dispatches(grid) == expected
    assert grid.of_plan() == expected[0]
    assert {grid.of_combine(combine(MAIN, 64, expert_major=em)) for em in (False, True)} == {
        expected[0]
    }


@pytest.mark.parametrize(
    ("row_bytes", "ctas", "expected"),
    [(7168, 24, (8, 8)), (7168, 12, (3, 2)), (14336, 24, (6, 4)), (14336, 12, (3, 2)),
     (10224, 24, (8, 8)), (10240, 24, (6, 4)), (7168, 20, (7, 7)), (7168, 19, (5, 4))],
)  # fmt: skip
def test_senders_of_pulled_rows(row_bytes: int, ctas: int, expected: tuple[int, int]) -> None:
    """Token-major and expert-major."""
    for expert_major, senders in enumerate(expected):
        kind = dispatch(
            Sizes(2, 256, 8), row_bytes, expert_major=bool(expert_major), in_place=False
        )
        kind = dataclasses.replace(kind, pulls=True)
        assert Grid(2, 64, ctas).of_dispatch(kind) == (ctas, senders)
        assert Grid(2, 64, ctas, 5).of_dispatch(kind) == (ctas, 5)


def test_a_small_gpu_bounds_the_model() -> None:
    assert {ctas for ctas, _ in of_dispatches(Grid(4, 10))} == {10}
    assert Grid(4, 10).of_plan() == (10, 4)


@pytest.mark.parametrize("sizes", [MAIN, Sizes(4, 512, 22), Sizes(3, 96, 1), Sizes(2, 8, 8)])
def test_rows_of_a_token_are_what_random_choices_give(sizes: Sizes) -> None:
    numbers, tokens = random.Random(0), 4000
    local = sizes.experts // sizes.ranks
    pushed = 0
    for token in range(tokens):
        own = token % sizes.ranks
        to = {e // local for e in numbers.sample(range(sizes.experts), sizes.top_k)}
        pushed += len(to - {own})
    assert model._rows_pushed(sizes) == pytest.approx(pushed / tokens, rel=0.05)


def test_who_stores_more_takes_more() -> None:
    """Four ranks, top-8: token-major stores 3.6 rows a token, in place 0.9; expert-major 8 and 5.3.
    Shorter rows cost more SMs for each byte, a combine that adds experts up more than one that
    does not."""
    for row_bytes in (2048, 7392, 14336):
        token, token_in_place, expert, expert_in_place = (
            model._dispatch_ns(dispatch(MAIN, row_bytes, expert_major=em, in_place=in_place))
            for em, in_place in ORDERS
        )
        assert token_in_place < token < expert_in_place < expert
        plain, added = (combine(MAIN, row_bytes, expert_major=em) for em in (False, True))
        assert model._combine_ns(plain) < model._combine_ns(added)
        assert sms_for(plain) < sms_for(added) <= DEFAULT_MOST_CTAS


def test_any_layer_has_some_and_no_more_than_24() -> None:
    numbers = random.Random(1)
    for _ in range(500):
        ranks = numbers.randint(1, 32)
        experts = ranks * numbers.randint(1, 1024 // ranks)
        sizes = Sizes(ranks, experts, numbers.randint(1, 32))
        row_bytes = 16 * numbers.randint(1, 2048)
        kinds = [
            *(dispatch(sizes, row_bytes, expert_major=em, in_place=at) for em, at in ORDERS),
            *(combine(sizes, row_bytes, expert_major=em) for em in (False, True)),
        ]
        for kind in kinds:
            sms = sms_for(kind)
            assert 10 <= sms <= DEFAULT_MOST_CTAS
            if ranks == 1:
                assert sms == DEFAULT_MOST_CTAS
            ctas, senders = (
                Grid(ranks, 64).of_dispatch(kind)
                if isinstance(kind, DispatchKind)
                else Grid(ranks, 64).of_combine(kind)
            )
            assert ctas == sms
            assert 1 <= senders <= ctas - int(ranks > 1)
