"""``HybridEPBuffer`` on GPUs, bit for bit: the programs and the oracle of the conformance tests,
and rounds without the CPU, in graphs too."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from fanfold.backends.high_throughput.cuda import CudaHighThroughput
from fanfold.deep_ep import HybridEPBuffer
from fanfold.group import as_group
from tests.conformance import test_deep_ep_hybrid as conformance
from tests.conformance.test_deep_ep_hybrid import LAYER, WIDE, Layer, Sorted, own_of
from tests.distributed.layers import caught
from tests.environment import environment
from tests.gpu.conftest import GpuPools
from tests.gpu.from_host import FromHost
from tests.gpu.one_gpu import OneGpu, capture, meet, wait
from tests.gpu.support import own_device

pytestmark = [pytest.mark.gpu, pytest.mark.gpu_each, pytest.mark.timeout(300)]

ROOM = 400


def open_buffer(group: Any, layer: Layer, **options: Any) -> HybridEPBuffer:
    """A Buffer whose calls run on the ranks' GPUs."""
    with environment(FANFOLD_TIMEOUT_S="30", FANFOLD_BACKEND="cuda"):
        buffer = HybridEPBuffer(group, layer.hidden, max(layer.tokens), layer.local, **options)
    assert isinstance(buffer._backend, CudaHighThroughput)
    return buffer


def open_from_host(group: Any, layer: Layer, **options: Any) -> FromHost:
    return FromHost(open_buffer(group, layer, **options))


def _conformance(group: Any, program: str, *args: Any) -> None:
    """``program`` of the conformance tests; ranks may be threads, of which the first patches."""
    ranks = as_group(group)
    with contextlib.ExitStack() as stack:
        if ranks.rank == 0 or isinstance(group, dist.ProcessGroup):
            stack.enter_context(mock.patch.object(conformance, "open_buffer", open_from_host))
        ranks.all_gather(None)
        getattr(conformance, program)(group, *args)
        ranks.all_gather(None)


def layers_of(ranks: int) -> list[Layer]:
    few = replace(LAYER, tokens=(7, 0, 20, 9)[:ranks])
    return [
        few,
        replace(few, by="indices", pad=16),
        replace(few, by="indices and map of probs", pad=8, room=ROOM),
        replace(few, room=300),
        replace(WIDE, tokens=(5, 3, 8, 0)[:ranks], local=80 // ranks),
        replace(few, hidden=7168, local=8, pad=128, seed=5),
    ]


@pytest.mark.parametrize("number", range(6))
def test_round(gpus: GpuPools, ranks: int, number: int) -> None:
    gpus.run(ranks, _conformance, "_round", layers_of(ranks)[number])


@pytest.mark.parametrize("number", range(6))
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_round_of_threads(one_gpu: OneGpu, ranks: int, number: int) -> None:
    one_gpu.run(ranks, _conformance, "_round", layers_of(ranks)[number])


def test_fp8(one_gpu: OneGpu) -> None:
    one_gpu.run(4, _conformance, "_fp8")


def _round(buffer: HybridEPBuffer, x: torch.Tensor, routing_map: torch.Tensor,
           probs: torch.Tensor) -> tuple[torch.Tensor, ...]:  # fmt: skip
    """A dispatch that no CPU waits for, one by its handle, and a combine."""
    rows, row_probs, _, counts, handle = buffer.dispatch_with_permute(
        hidden=x, routing_map=routing_map, probs=probs, num_permuted_tokens=ROOM, pad_multiple=16,
        non_blocking=True,
    )  # fmt: skip
    again = buffer.dispatch_with_permute(hidden=x, handle=handle, num_permuted_tokens=ROOM)[0]
    out, back = buffer.combine_with_unpermute(hidden=again, probs=row_probs, handle=handle)
    assert row_probs is not None
    assert back is not None
    return rows, again, row_probs, counts, out, back


def _check(layer: Layer, rank: int, found: list[torch.Tensor]) -> None:
    rows, again, row_probs, counts, out, back = found
    wanted, own = Sorted(replace(layer, pad=16), rank), own_of(layer, rank)
    owns = [own_of(layer, peer) for peer in range(layer.ranks)]
    expected = wanted.gather([each.x for each in owns])
    for each in (rows, again):
        assert torch.equal(each[: wanted.rows], expected)
    assert counts.tolist() == wanted.counts
    for (expert, source, token), row in wanted.row_of.items():
        assert row_probs[row] == owns[source].probs[token, expert]
    assert torch.equal(back, torch.where(own.routing_map, own.probs, 0.0))
    # A row comes back as it went, once for each expert; sums of equal numbers, rounded.
    for token, chosen in enumerate(own.routing_map):
        total = torch.zeros(layer.hidden, dtype=torch.float32, device="cpu")
        for peer in range(layer.ranks):
            count = int(chosen[peer * layer.local : (peer + 1) * layer.local].sum())
            part = torch.zeros(layer.hidden, dtype=torch.float32, device="cpu")
            for _ in range(count):
                part += own.x[token].float()
            total += part.bfloat16().float()
        assert torch.equal(out[token], total.bfloat16())


def _graph(group: Any, layers: list[Layer]) -> None:
    """A whole round in a graph, replayed with other tokens and routings."""
    ranks, device = as_group(group), own_device()
    brought = [own_of(layer, ranks.rank) for layer in layers]
    there = [[value.to(device) for value in vars(own).values()] for own in brought]
    static = [value.clone() for value in there[0]]
    buffer, results = open_buffer(group, layers[0]), []

    def calls() -> torch.Tensor:
        results.append(_round(buffer, *static))
        return results[-1][0]

    calls()
    wait()
    graph, _ = capture(ranks, calls)
    result = results[-1]
    for replay in range(2 * len(layers)):
        chosen = (3 * replay + 1) % len(layers)
        for place, value in zip(static, there[chosen], strict=True):
            place.copy_(value)
        graph.replay()
        found = [each.clone() for each in result]
        if replay % 2:
            calls()
        wait()
        _check(layers[chosen], ranks.rank, [each.cpu() for each in found])
    meet(ranks)
    del graph


def test_graphs(gpus: GpuPools, one_gpu: OneGpu, ranks: int) -> None:
    for pool, count in ((gpus, ranks), (one_gpu, 3)):
        few = replace(LAYER, tokens=(7, 0, 20, 9)[:count])
        shares = enumerate((0.3, 0.0, 0.8, 0.1))
        pool.run(count, _graph, [replace(few, seed=seed, share=share) for seed, share in shares])


def _without_the_cpu(group: Any) -> None:
    layer, rank = replace(LAYER, tokens=LAYER.tokens[: as_group(group).size]), as_group(group).rank
    buffer = open_buffer(group, layer)
    given = [value.to(own_device()) for value in vars(own_of(layer, rank)).values()]
    _round(buffer, *given)  # loads the kernels
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        found = _round(buffer, *given)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    _check(layer, rank, [each.cpu() for each in found])


def test_without_waiting_for_the_cpu(gpus: GpuPools, ranks: int) -> None:
    gpus.run(ranks, _without_the_cpu)


def _too_many(group: Any) -> str:
    rank, device = as_group(group).rank, own_device()
    buffer, own = open_buffer(group, WIDE), own_of(WIDE, as_group(group).rank)
    if rank == 0:
        own.routing_map[2] = True
    rows, *_, handle = buffer.dispatch_with_permute(
        hidden=own.x.to(device), routing_map=own.routing_map.to(device), num_permuted_tokens=ROOM,
        non_blocking=True,
    )  # fmt: skip
    wait()
    error = caught(lambda: buffer.combine_with_unpermute(hidden=rows, handle=handle))
    wait()
    return "" if error is None else f"{type(error).__name__}: {error}"


def test_a_token_of_too_many_experts(one_gpu: OneGpu) -> None:
    said = one_gpu.run(WIDE.ranks, _too_many)
    assert said[0].startswith("ArgumentError: topk_idx[2, 31] of call"), said
    assert "is 80, but must be" in said[0]
