"""The native face gives the same bits whatever a program has set as default dtype and device."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from fanfold.launch import RankPool
from tests.distributed.every_call import Results, assert_same_results, every_call
from tests.process_defaults import ProcessDefaults, UnderDefaults

RANKS = 2


@pytest.fixture(scope="module")
def plain(pools: Callable[[int], RankPool]) -> list[Results]:
    """The results under PyTorch's own defaults."""
    return pools(RANKS).run(every_call)


@pytest.mark.parametrize(
    "defaults",
    [
        ProcessDefaults(torch.bfloat16, "meta"),
        ProcessDefaults(torch.float64, "meta"),
        ProcessDefaults(torch.float16, "cpu"),
    ],
    ids=str,
)
def test_defaults_change_nothing(
    defaults: ProcessDefaults, plain: list[Results], pools: Callable[[int], RankPool]
) -> None:
    assert_same_results(UnderDefaults(pools(RANKS), defaults).run(every_call), plain)
