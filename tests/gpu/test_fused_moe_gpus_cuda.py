"""FusedMoE on ranks that are processes, each with a GPU of its own; where there is but one GPU, two
time-slice it."""

from __future__ import annotations

import pytest

from tests.gpu import fused_moe_rounds as rounds
from tests.gpu.conftest import GpuPools

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300), pytest.mark.usefixtures("hopper")]


def test_random_geometries(gpus: GpuPools, most_ranks: int) -> None:
    gpus.run(most_ranks, rounds.geometries, 0)


def test_repeated_calls_give_the_same_bits(gpus: GpuPools, most_ranks: int) -> None:
    gpus.run(most_ranks, rounds.repeated, 200)


def test_a_refusal_ends_the_call_on_all_ranks(gpus: GpuPools, most_ranks: int) -> None:
    for rank, said in enumerate(gpus.run(most_ranks, rounds.refused)):
        rounds.check_refusals(rank, said)


@pytest.mark.gpu_each
@pytest.mark.parametrize("fast", [False, True])
def test_graphs(gpus: GpuPools, most_ranks: int, fast: bool) -> None:
    gpus.run(most_ranks, rounds.graphs, fast)


@pytest.mark.gpu_each
def test_thousands_of_calls_without_a_pause(gpus: GpuPools, most_ranks: int) -> None:
    gpus.run(most_ranks, rounds.bursts, 150)


@pytest.mark.gpu_each
@pytest.mark.parametrize("fast", [False, True])
def test_large_calls(gpus: GpuPools, most_ranks: int, fast: bool) -> None:
    gpus.run(most_ranks, rounds.large, fast)


def test_a_rank_that_does_not_come(gpus: GpuPools, most_ranks: int) -> None:
    rounds.check_absence(gpus.run(most_ranks, rounds.absent))
