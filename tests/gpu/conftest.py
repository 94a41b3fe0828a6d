"""Ranks on GPUs, shared by the tests of this folder, which are skipped without a GPU.

Where there is only one, two ranks time-slice it, but for tests marked ``gpu_each``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from fanfold.config import NCCL_GIN
from fanfold.launch import RankPool
from tests.gpu.hosts import NETWORKS, PROXIED, Run, on_hosts
from tests.gpu.one_gpu import OneGpu

MOST_RANKS = 4
MOST_OF_EVERY = 8
TAKE_TURNS = 2
"""Ranks on the only GPU."""


def gpu_count() -> int:
    """GPUs that PyTorch sees; asked for without initialising CUDA in this process."""
    return torch.cuda.device_count()


def ranks_there(test: pytest.Item) -> int:
    """How many ranks a test can have; 1 also where there is no GPU and it will be skipped."""
    if gpu_count() == 1 and test.get_closest_marker("gpu_each") is None:
        return TAKE_TURNS
    return max(1, gpu_count())


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A test that takes ``ranks`` and names none runs alone, and with all there can be up to four;
    one that takes ``every_ranks`` with each number from one to all there can be, up to eight."""
    given = any("ranks" in mark.args[0] for mark in metafunc.definition.iter_markers("parametrize"))
    there = ranks_there(metafunc.definition)
    if "ranks" in metafunc.fixturenames and not given:
        metafunc.parametrize("ranks", sorted({1, min(there, MOST_RANKS)}))
    if "every_ranks" in metafunc.fixturenames:
        metafunc.parametrize("every_ranks", range(1, min(there, MOST_OF_EVERY) + 1))


@pytest.fixture(autouse=True)
def needs_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Skips without a GPU, and lets ranks share the only one."""
    if gpu_count() == 0:
        built = "" if torch.version.cuda else ", and is built without CUDA"
        pytest.skip(f"PyTorch {torch.__version__} sees no GPU (nvidia-smi){built}")
    if gpu_count() == 1:
        monkeypatch.setenv("FANFOLD_SHARE_GPUS", "1")


@pytest.fixture
def hopper(needs_gpu: None) -> None:
    """Skips without compute capability 9.0, which the kernels of FP8 products are for."""
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("needs a GPU of compute capability 9.0")


@pytest.fixture
def ranks_at_most(request: pytest.FixtureRequest) -> int:
    """As many ranks as there can be, up to four."""
    return min(ranks_there(request.node), MOST_RANKS)


@pytest.fixture
def most_ranks(ranks_at_most: int) -> int:
    """The same for a test that needs several; skipped where there can be but one."""
    if ranks_at_most < 2:
        pytest.skip(f"needs two GPUs, there is {gpu_count()}")
    return ranks_at_most


class GpuPools:
    """Pools of ranks by their number, kept because a process needs seconds to open its GPU; of more
    ranks than most tests have only the last one, as a process holds 3 GiB of the CPU's memory."""

    def __init__(self) -> None:
        self._running: dict[int, RankPool] = {}

    def __call__(self, ranks: int) -> RankPool:
        if ranks not in self._running or not self._running[ranks].alive:
            self.close(ranks)
            for other in list(self._running):
                if max(ranks, other) > MOST_RANKS:
                    self.close(other)
            self._running[ranks] = RankPool(ranks, timeout_s=200.0)
        return self._running[ranks]

    def run(self, ranks: int, function: Callable[..., Any], *args: Any) -> list[Any]:
        """``function(group, *args)`` on every rank. A failure ends the pool: a process in which a
        kernel has failed cannot use CUDA any more."""
        try:
            return self(ranks).run(function, *args)
        except BaseException:
            self.close(ranks)
            raise

    def close(self, ranks: int) -> None:
        pool = self._running.pop(ranks, None)
        if pool is not None:
            pool.close()

    def close_all(self) -> None:
        for ranks in list(self._running):
            self.close(ranks)


@pytest.fixture(scope="session")
def gpus() -> Iterator[GpuPools]:
    """``gpus.run(ranks, function, *args)`` runs a function on that many ranks."""
    pools = GpuPools()
    yield pools
    pools.close_all()


@pytest.fixture(scope="session")
def of_network(gpus: GpuPools) -> Iterator[Callable[[str], GpuPools]]:
    """The pools for a network: NCCL reads its environment once in a process."""
    with_plugin = GpuPools()
    yield lambda network: with_plugin if network == NCCL_GIN else gpus
    with_plugin.close_all()


def _runs_on(network: str, pools: GpuPools) -> Run:
    def run(ranks: int, test: Callable[..., Any], *args: Any) -> list[Any]:
        return pools.run(ranks, on_hosts, network, test, args)

    return run


@pytest.fixture(params=NETWORKS)
def run_on_hosts(request: pytest.FixtureRequest, of_network: Callable[[str], GpuPools]) -> Run:
    """``run_on_hosts(ranks, test, *args)``: ``test(group, *args)`` on ranks of two hosts."""
    return _runs_on(request.param, of_network(request.param))


@pytest.fixture(params=PROXIED)
def run_by_proxies(request: pytest.FixtureRequest, gpus: GpuPools) -> Run:
    """The same, of networks that proxies carry."""
    return _runs_on(request.param, gpus)


@pytest.fixture(scope="module")
def one_gpu() -> Iterator[OneGpu]:
    """Ranks that are threads."""
    made = OneGpu()
    yield made
    made.close()
