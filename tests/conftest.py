"""Pools of ranks that the whole test session shares, and settings of hypothesis."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from typing import Any

import hypothesis
import pytest

from fanfold.launch import RankPool
from fanfold.thread_ranks import ThreadRanks
from tests.turns import turn

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


@pytest.fixture(autouse=True)
def gpu_turn(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[None]:
    """Keeps tests marked ``alone`` alone on the GPUs, whatever number of processes run tests."""
    if request.node.get_closest_marker("gpu") is None:
        yield
        return
    folder = tmp_path_factory.getbasetemp().parent / "turns"  # of all processes of this run
    folder.mkdir(exist_ok=True)
    with turn(folder, alone=request.node.get_closest_marker("alone") is not None):
        yield


def pytest_collection_finish() -> None:
    """Keeps PyTorch, the tests and all that has been imported with them out of later collections of
    garbage, each of which would take 0.1 s and more."""
    gc.collect()
    gc.freeze()


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Runs a test of ranks on every placement that its mark names."""
    mark = metafunc.definition.get_closest_marker("placements")
    if mark is not None and "placement" in metafunc.fixturenames:
        metafunc.parametrize("placement", mark.args, indirect=True, scope="session")


@pytest.fixture(scope="session")
def placement(request: pytest.FixtureRequest) -> str:
    """What the ranks of ``pools`` are: ``"processes"``, or ``"threads"`` of this process."""
    return getattr(request, "param", "processes")


@pytest.fixture(scope="session")
def process_pools() -> Iterator[Callable[[int], RankPool]]:
    """``process_pools(ranks)``: that many processes, started at first use, reused until a test has
    ended one of them."""
    running: dict[int, RankPool] = {}

    def pool(ranks: int) -> RankPool:
        if ranks not in running or not running[ranks].alive:
            if ranks in running:
                running[ranks].close()
            running[ranks] = RankPool(ranks, timeout_s=120.0)
        return running[ranks]

    yield pool
    for used in running.values():
        used.close()


@pytest.fixture(scope="session")
def pools(placement: str, process_pools: Callable[[int], RankPool]) -> Callable[[int], Any]:
    """``pools(ranks)``: a pool of that many ranks, which are processes; threads where the mark
    ``placements`` says so.

    Threads start in microseconds, so a test of results takes them. A test needs processes if it
    kills or stops ranks (then it makes a pool of its own), if its ranks use torch.distributed, or
    if they change what a process has once: the environment, defaults and the random generator of
    PyTorch, filters of warnings, the garbage collector.
    """
    if placement == "processes":
        return process_pools
    return lambda ranks: ThreadRanks(ranks, timeout_s=100.0)
