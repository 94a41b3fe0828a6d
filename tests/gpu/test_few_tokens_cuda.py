"""ElasticBuffer's dispatches of few tokens on GPUs, which go by the low-latency protocol: the
programs and the oracle of its other tests, and that no CPU waits."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

from fanfold.deep_ep.few_tokens import RoutedFew
from fanfold.group import as_group
from tests.conformance.deep_ep_reference import Case, combined, inputs
from tests.conformance.test_deep_ep_high_throughput import outputs
from tests.environment import environment
from tests.gpu.conftest import GpuPools
from tests.gpu.one_gpu import OneGpu
from tests.gpu.support import own_device
from tests.gpu.test_deep_ep_elastic_cuda import (
    LATE_CYCLES,
    MOST,
    _conformance,
    _graph,
    _of_handle,
    _random_case,
    open_buffer,
    small_case,
)
from tests.gpu.test_deep_ep_high_throughput_cuda import case_of, on_gpu

pytestmark = [pytest.mark.gpu, pytest.mark.gpu_each, pytest.mark.timeout(300)]

THREADS = [2, 3, 4]


def _few(group: Any, function: Callable[..., Any], *args: Any) -> Any:
    """``function(group, *args)``, whose ElasticBuffers have the protocol."""
    with environment(FANFOLD_FEW_TOKENS=str(MOST)):
        result = function(group, *args)
        as_group(group).all_gather(None)
    return result


def _against_torch(pool: Any, ranks: int, seed: int) -> None:
    numbers = random.Random(seed)
    case, sync = _random_case(numbers, ranks, seed), numbers.choice([True, False, None])
    pool.run(ranks, _few, _conformance, "_plain", case, case, sync, numbers.choice([1, 8, 128]))


@pytest.mark.parametrize("seed", range(6))
def test_against_torch(gpus: GpuPools, ranks: int, seed: int) -> None:
    _against_torch(gpus, ranks, seed)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("ranks", THREADS)
def test_threads_against_torch(one_gpu: OneGpu, ranks: int, seed: int) -> None:
    _against_torch(one_gpu, ranks, 100 + seed)


@pytest.mark.parametrize("sync", [False, True])
def test_fp8(gpus: GpuPools, one_gpu: OneGpu, ranks: int, sync: bool) -> None:
    gpus.run(ranks, _few, _conformance, "_fp8", small_case(ranks), False, sync)
    one_gpu.run(3, _few, _conformance, "_fp8", small_case(3), False, sync)


def test_biases_and_events(gpus: GpuPools, one_gpu: OneGpu, ranks: int) -> None:
    gpus.run(ranks, _few, _conformance, "_biases", small_case(ranks))
    one_gpu.run(3, _few, _conformance, "_biases", small_case(3))


def test_what_a_caller_overwrites_changes_nothing(gpus: GpuPools, ranks: int) -> None:
    found = gpus.run(ranks, _few, _conformance, "_overwrites", small_case(ranks), False)
    assert found == [[True] * 3] * ranks


@pytest.mark.parametrize("asynchronous", [False, True])
def test_graphs(gpus: GpuPools, one_gpu: OneGpu, ranks: int, asynchronous: bool) -> None:
    """With handles that are used again, by plans of high throughput, in the graph."""
    for pool, count in ((gpus, ranks), (one_gpu, 3)):
        cases = [
            case_of(count, seed=seed, unrouted=unrouted)
            for seed, unrouted in enumerate((0.2, 0.9, 0.0, 1.0))
        ]
        pool.run(count, _few, _graph, cases, False, asynchronous)


def _without_the_cpu(group: Any, case: Case, rounds: int) -> None:
    rank = as_group(group).rank
    buffer, mine = open_buffer(group), on_gpu(inputs(case, rank))
    made = outputs(case, rank).cuda()

    def one_round() -> torch.Tensor:
        rows, _, _, handle, _ = buffer.dispatch(
            mine.x, mine.topk_idx, mine.topk_weights, num_experts=case.experts, do_cpu_sync=False
        )
        assert isinstance(handle._plan, RoutedFew)
        y = rows.new_zeros(rows.shape)
        y[: len(made)] = made
        out, _, _ = buffer.combine(y, handle)
        return out

    wanted = combined(case, rank, [outputs(case, peer) for peer in range(case.ranks)]).cuda()
    wrong = (one_round() != wanted).any()  # loads the kernels
    torch.cuda.current_stream().synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(rounds):
            wrong |= (one_round() != wanted).any()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert not wrong.cpu()
    buffer.destroy()


def test_without_waiting_for_the_cpu(gpus: GpuPools, ranks: int) -> None:
    gpus.run(ranks, _few, _without_the_cpu, case_of(ranks), 200)


def _from_another_device(group: Any, case: Case) -> None:
    rank = as_group(group).rank
    buffer, mine = open_buffer(group), on_gpu(inputs(case, rank))
    wanted = combined(case, rank, [outputs(case, peer) for peer in range(case.ranks)]).cuda()
    made = outputs(case, rank).cuda()
    other = (torch.cuda.current_device() + 1) % torch.cuda.device_count()
    with torch.cuda.device(other):  # also in the first call, which makes the memory
        for sync in (True, False):
            rows, _, _, handle, _ = buffer.dispatch(
                mine.x, mine.topk_idx, mine.topk_weights, num_experts=case.experts, do_cpu_sync=sync
            )
            assert isinstance(handle._plan, RoutedFew)
            y = torch.zeros_like(rows)
            y[: len(made)] = made
            out, _, _ = buffer.combine(y, handle)
            assert torch.equal(out, wanted)
            assert torch.equal(handle.topk_idx, mine.topk_idx)
    buffer.destroy()


def test_another_current_device(gpus: GpuPools, ranks: int) -> None:
    gpus.run(ranks, _few, _from_another_device, case_of(ranks))


def _read_on_another_stream(group: Any, cases: list[Case]) -> None:
    rank, device = as_group(group).rank, own_device()
    buffer, given = open_buffer(group), [on_gpu(inputs(case, rank)) for case in cases]

    def dispatch(number: int) -> Any:
        mine, experts = given[number], cases[number].experts
        return buffer.dispatch(
            mine.x, mine.topk_idx, mine.topk_weights, num_experts=experts, do_cpu_sync=False
        )[3]

    kept = dispatch(0)
    wanted = [each.cpu() for each in _of_handle(kept)]
    dispatch(1)  # what it leaves in memory is not what is wanted
    torch.cuda._sleep(LATE_CYCLES)
    handle = dispatch(0)
    with torch.cuda.stream(torch.cuda.Stream(device)):
        found = [each.clone() for each in _of_handle(handle)]
    torch.cuda.synchronize(device)
    came = int(wanted[1][-1])  # rows; those behind them mean nothing
    for each, right in zip(found, wanted, strict=True):
        assert torch.equal(each.cpu()[:came], right[:came])
    buffer.destroy()


@pytest.mark.parametrize("few", [False, True])
def test_a_handle_is_read_on_another_stream(gpus: GpuPools, ranks: int, few: bool) -> None:
    cases = [case_of(ranks, seed=seed) for seed in (1, 2)]
    if few:
        gpus.run(ranks, _few, _read_on_another_stream, cases)
    else:
        gpus.run(ranks, _read_on_another_stream, cases)
