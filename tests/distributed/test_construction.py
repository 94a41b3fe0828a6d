"""Whatever goes wrong on one rank while an object is made ends it on all, at once and by name."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

from fanfold import high_throughput
from fanfold.backends import opening
from fanfold.deep_ep import Buffer
from fanfold.deep_ep import runtime as deep_ep_runtime
from fanfold.errors import ArgumentError, ConfigError, FanfoldError
from fanfold.launch import RankPool
from fanfold.memory import host as symmetric
from fanfold.memory import hosts
from tests.distributed.layers import Shape, works

FAILING = 1


def _raising(error: BaseException) -> mock.Mock:
    return mock.Mock(side_effect=error)


# What is wrong on the failing rank: arguments, and patches of what the constructor calls.
_ERROR = MemoryError("no memory left")
NATIVE: dict[str, tuple[str, dict[str, Any], Callable[[], Any], type[Exception]]] = {
    "config of another type": (
        "low_latency", {"config": {}}, contextlib.nullcontext, ArgumentError),
    "argument": ("low_latency", {"num_experts": "12"}, contextlib.nullcontext, ArgumentError),
    "format": ("high_throughput", {"dispatch_dtype": 3}, contextlib.nullcontext, ArgumentError),
    "variable": (
        "low_latency", {"config": None},
        lambda: mock.patch.dict(os.environ, {"FANFOLD_TIMEOUT_S": "soon"}), ConfigError),
    "identity": (
        "low_latency", {},
        lambda: mock.patch.object(hosts, "host_identity", _raising(OSError("no /proc"))),
        OSError),
    "choice": (
        "high_throughput", {},
        lambda: mock.patch.object(high_throughput, "choose", _raising(_ERROR)), MemoryError),
    "memory": (
        "high_throughput", {},
        lambda: mock.patch.object(symmetric._core, "SymmetricMemory", _raising(_ERROR)),
        MemoryError),
    "low latency": (
        "low_latency", {},
        lambda: mock.patch.object(opening.low_latency, "open_low_latency", _raising(_ERROR)),
        MemoryError),
    "high throughput": (
        "high_throughput", {},
        lambda: mock.patch.object(opening, "HostHighThroughput", mock.Mock(
            side_effect=_ERROR, staging_bytes=opening.HostHighThroughput.staging_bytes)),
        MemoryError),
}  # fmt: skip

DEEP_EP: dict[str, tuple[dict[str, Any], Callable[[], Any], type[Exception]]] = {
    "argument": ({"num_nvl_bytes": -1}, contextlib.nullcontext, ArgumentError),
    "variable": (
        {}, lambda: mock.patch.dict(os.environ, {"FANFOLD_BACKEND": "gpu"}), ConfigError),
    "exchange": (
        {}, lambda: mock.patch.object(deep_ep_runtime.Exchange, "__init__", _raising(_ERROR)),
        MemoryError),
    "low latency": (
        {}, lambda: mock.patch.object(deep_ep_runtime, "HostLowLatency", _raising(_ERROR)),
        MemoryError),
}  # fmt: skip


def _outcome(make: Callable[[], object]) -> tuple[str, str]:
    try:
        make()
    except Exception as error:
        return type(error).__name__, str(error)
    return "", ""


def _native(group: dist.ProcessGroup, name: str) -> tuple[tuple[str, str], bool]:
    mode, changes, patch, _ = NATIVE[name]
    shape = Shape(mode=mode)
    failing = dist.get_rank(group) == FAILING
    with patch() if failing else contextlib.nullcontext():
        outcome = _outcome(lambda: shape.open(group, **(changes if failing else {})))
    with shape.open(group) as ep:
        return outcome, works(ep, shape)


def _deep_ep(group: dist.ProcessGroup, name: str) -> tuple[tuple[str, str], bool]:
    changes, patch, _ = DEEP_EP[name]
    failing = dist.get_rank(group) == FAILING
    sizes = {"num_nvl_bytes": 1 << 20, "num_rdma_bytes": 1 << 20, "low_latency_mode": True}
    with patch() if failing else contextlib.nullcontext():
        outcome = _outcome(lambda: Buffer(group, **(sizes | (changes if failing else {}))))
    return outcome, Buffer(group, **sizes).group_size == dist.get_world_size(group)


def _check(outcomes: list[tuple[tuple[str, str], bool]], error: type[Exception]) -> None:
    for rank, ((kind, text), usable) in enumerate(outcomes):
        assert usable
        if rank == FAILING:
            assert kind == error.__name__
        else:
            assert kind == FanfoldError.__name__
            assert f"rank {FAILING} failed: {error.__name__}: " in text
            assert outcomes[FAILING][0][1] in text


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", NATIVE)
def test_native(pools: Callable[[int], RankPool], name: str) -> None:
    _check(pools(3).run(_native, name), NATIVE[name][3])


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", DEEP_EP)
def test_deep_ep(pools: Callable[[int], RankPool], name: str) -> None:
    _check(pools(3).run(_deep_ep, name), DEEP_EP[name][2])
