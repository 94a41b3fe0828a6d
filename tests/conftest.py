"""Pools of ranks that the whole test session shares, and settings of hypothesis."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import hypothesis
import pytest

from fanfold.launch import RankPool

hypothesis.settings.register_profile(
    "default", deadline=None, derandomize=True, print_blob=True, max_examples=40
)
# `make test-long` asks for this one: new examples each time.
hypothesis.settings.register_profile("long", deadline=None, print_blob=True, max_examples=2000)
hypothesis.settings.load_profile("default")


@pytest.fixture(autouse=True)
def on_the_host(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keeps tests without the mark `gpu` on the host backend, on machines with GPUs too."""
    if request.node.get_closest_marker("gpu") is None:
        monkeypatch.setenv("FANFOLD_BACKEND", "host")


@pytest.fixture(scope="session")
def pools() -> Iterator[Callable[[int], RankPool]]:
    """``pools(ranks)``: a running pool of that many ranks, started at first use, reused later.

    A test that kills or stops ranks makes a pool of its own.
    """
    running: dict[int, RankPool] = {}

    def pool(ranks: int) -> RankPool:
        if ranks not in running:
            running[ranks] = RankPool(ranks, timeout_s=120.0)
        return running[ranks]

    yield pool
    for used in running.values():
        used.close()
