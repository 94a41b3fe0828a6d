"""FusedMoE on several ranks that share one GPU as threads. Their kernels wait for each other, so a
call that ends at all has run those of all ranks at once."""

from __future__ import annotations

import pytest

from tests.gpu import fused_moe_rounds as rounds
from tests.gpu.one_gpu import OneGpu

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(300),
    pytest.mark.usefixtures("hopper"),
    pytest.mark.parametrize("ranks", [2, 3, 4]),
]


@pytest.mark.parametrize("first", [0, 6, 12, 18])
def test_random_geometries(one_gpu: OneGpu, ranks: int, first: int) -> None:
    one_gpu.run(ranks, rounds.geometries, first)


@pytest.mark.parametrize("fast", [False, True])
def test_thousands_of_calls_give_the_same_bits(one_gpu: OneGpu, ranks: int, fast: bool) -> None:
    one_gpu.run(ranks, rounds.repeated, 10_000, fast)


def test_thousands_of_calls_without_a_pause(one_gpu: OneGpu, ranks: int) -> None:
    one_gpu.run(ranks, rounds.bursts, 150)


@pytest.mark.parametrize("fast", [False, True])
def test_graphs(one_gpu: OneGpu, ranks: int, fast: bool) -> None:
    one_gpu.run(ranks, rounds.graphs, fast)


def test_a_shared_count_of_the_routing(one_gpu: OneGpu, ranks: int) -> None:
    one_gpu.run(ranks, rounds.shared_count)


def test_shared_expert(one_gpu: OneGpu, ranks: int) -> None:
    one_gpu.run(ranks, rounds.shared_expert)


def test_a_shared_expert_has_to_be_prepared(one_gpu: OneGpu, ranks: int) -> None:
    one_gpu.run(ranks, rounds.unprepared)


def test_a_refusal_ends_the_call_on_all_ranks(one_gpu: OneGpu, ranks: int) -> None:
    for rank, said in enumerate(one_gpu.run(ranks, rounds.refused)):
        rounds.check_refusals(rank, said)


def test_a_rank_that_does_not_come(one_gpu: OneGpu, ranks: int) -> None:
    rounds.check_absence(one_gpu.run(ranks, rounds.absent))


def test_a_bad_entry_is_its_own_rank_s(one_gpu: OneGpu, ranks: int) -> None:
    one_gpu.run(ranks, rounds.bad_entry)
