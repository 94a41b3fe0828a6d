"""The native face and its gradients over high-throughput kernels that run on the CPU, on one host
and on several."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch

from fanfold.backends.high_throughput.cuda import CudaHighThroughput
from tests.distributed import test_functional as calls
from tests.emulation.deep_ep import PLACED, run
from tests.emulation.high_throughput import CTAS
from tests.emulation.hosts import without_pinning
from tests.emulation.layers import emulated_layers
from tests.emulation.world import Builder


@pytest.fixture(autouse=True, params=[1, calls.RANKS], ids=["one host", "a host each"])
def gpus(
    request: pytest.FixtureRequest, builder: Builder, monkeypatch: pytest.MonkeyPatch
) -> Iterator[None]:
    placed = dataclasses.replace(PLACED, across_hosts=request.param > 1)
    if placed.across_hosts:
        monkeypatch.setenv("FANFOLD_HOSTS", str(request.param))
        monkeypatch.setenv("FANFOLD_NETWORK", "loopback:5")
    with emulated_layers(builder, CTAS, placed), without_pinning():
        yield


CASES = [pytest.param(calls.CASES[2], marks=pytest.mark.long), calls.CASES[5]]


def _gradients(group: Any, case: calls.Case, capacity: int | None) -> tuple[torch.Tensor, ...]:
    mine = case.inputs()[group.rank]
    x, weights = mine["x"].requires_grad_(), mine["weights"].requires_grad_()
    with calls.open_ep(group, case) as ep:
        out = calls.run_layer_by_row(ep, case, capacity, x, weights, mine["idx"])
        out.backward(mine["grad"])
        ep.check()
    assert x.grad is not None
    assert weights.grad is not None
    return out.detach(), x.grad, weights.grad


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"seed{case.seed}")
def test_a_capacity_changes_no_gradient_and_nothing_waits(case: calls.Case) -> None:
    """Rows that no token fills hold what is not a number, in both passes."""
    ranks = len(case.tokens)
    wanted = run(ranks, _gradients, case, None)
    with mock.patch.object(CudaHighThroughput, "_await_totals", side_effect=AssertionError):
        results = run(ranks, _gradients, case, calls.room_for(case))
    for rank, (without, within) in enumerate(zip(wanted, results, strict=True)):
        assert all(map(torch.equal, without, within))
        if case.integers:
            assert all(map(torch.equal, within, calls.reference_gradients(case, rank)))
