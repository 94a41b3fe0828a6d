"""Every test of ranks runs twice: as the process is, and under defaults of other programs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from fanfold.launch import RankPool
from tests.process_defaults import ProcessDefaults, UnderDefaults

DEFAULTS = {"": None, "bfloat16 on meta": ProcessDefaults(torch.bfloat16, "meta")}


@pytest.fixture(scope="session", params=DEFAULTS)
def pools(pools: Callable[[int], RankPool], request: pytest.FixtureRequest) -> Callable[[int], Any]:
    """The session's pools, under defaults."""
    defaults = DEFAULTS[request.param]
    return pools if defaults is None else lambda ranks: UnderDefaults(pools(ranks), defaults)
