"""Weights that come with combine, as the deep_ep face brings them, at the sizes that matter: the
host backend's bits, once and in many rounds."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.gpu.conftest import GpuPools
from tests.gpu.low_latency_rounds import geometry_of, like_the_host, on_the_host, opened, round_of
from tests.gpu.support import Case, case_of, random_case, tokens_of

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

INPUTS = 5


@pytest.mark.parametrize(
    "changes",
    [
        {"hidden": 7168, "experts_per_rank": 64, "top_k": 8, "max_tokens": 128},
        {"hidden": 2048, "experts_per_rank": 128, "top_k": 8, "max_tokens": 128},
        {"hidden": 1024, "experts_per_rank": 128, "top_k": 22, "max_tokens": 128},
        {"hidden": 16384, "experts_per_rank": 2},
        {"hidden": 256, "experts_per_rank": 256, "top_k": 32, "max_tokens": 1024},
        {"hidden": 128, "routing": "one_expert", "max_tokens": 1024},
        {"hidden": 2880, "routing": "duplicates"},
        {"hidden": 512, "routing": "none"},
    ],
    ids=str,
)
def test_like_the_host(gpus: GpuPools, ranks: int, changes: dict[str, Any]) -> None:
    case = case_of(ranks, **changes)
    tokens = tuple((case.max_tokens, 0, 3, case.max_tokens)[rank % 4] for rank in range(ranks))
    gpus.run(ranks, like_the_host, case.but(tokens=tokens), True)


@pytest.mark.parametrize("number", range(8))
def test_any_geometry(gpus: GpuPools, ranks_at_most: int, number: int) -> None:
    case = random_case(number, ranks_at_most)
    case = case.but(dtype="bf16", weighted=True, logfmt=False, specials=False)
    gpus.run(case.ranks, like_the_host, case, True)


def _many(group: dist.ProcessGroup, case: Case, rounds: int) -> int:
    """Rounds with changing routing and nothing between them that would wait; wrong sums."""
    rank, geometry = dist.get_rank(group), geometry_of(case)
    cases = [case.but(seed=seed, routing=("spread", "holes")[seed % 2]) for seed in range(INPUTS)]
    expected = [sums for *_, sums in on_the_host(group, cases, True)]
    with opened(group, case, True) as mode:
        wanted = [sums.to(mode.device).view(torch.int16) for sums in expected]
        inputs = [tokens_of(each, rank).to(mode.device) for each in cases]
        wrong = torch.zeros((), dtype=torch.int64, device=mode.device)
        for number in range(rounds):
            if number % 97 == 13 * rank:  # who is late changes
                torch.cuda._sleep(200_000)
            _, out = round_of(mode, geometry, inputs[number % INPUTS], True)
            wrong += (out.view(torch.int16) != wanted[number % INPUTS]).any()
        mode.quiesce()
    return int(wrong)


def test_many_rounds(gpus: GpuPools, ranks: int) -> None:
    case = case_of(ranks, hidden=512, max_tokens=24, experts_per_rank=8, top_k=6)
    assert gpus.run(ranks, _many, case, 10_000) == [0] * ranks
