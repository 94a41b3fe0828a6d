"""Ranges around calls and hooks, where the setting asks for them."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist

import fanfold
from fanfold.backends.high_throughput import HostHighThroughput
from fanfold.backends.ranges import RangedBackend, available, ranged
from fanfold.deep_ep import Buffer
from fanfold.errors import ArgumentError
from fanfold.thread_ranks import ThreadRanks
from tests.environment import environment
from tests.unit.test_metrics import SIZES, tokens

LOW = "fanfold::low_latency"
HIGH = "fanfold::high_throughput"


class Ranges:
    """Takes the place of NVTX."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.open: list[str] = []
        self.closed: list[str] = []
        monkeypatch.setattr(torch.cuda.nvtx, "mark", lambda _: None)
        monkeypatch.setattr(torch.cuda.nvtx, "range_push", self.open.append)
        monkeypatch.setattr(torch.cuda.nvtx, "range_pop", self.pop)

    def pop(self) -> None:
        self.closed.append(self.open.pop())


@pytest.fixture
def ranges(monkeypatch: pytest.MonkeyPatch) -> Ranges:
    """The ranges of the test, over a PyTorch that has NVTX."""
    return Ranges(monkeypatch)


def low_latency_calls(**settings: bool) -> None:
    config = fanfold.Config.resolve(**settings)
    with fanfold.LowLatency(**SIZES, config=config) as ep:
        received, hook = ep.dispatch(*tokens(), return_hook=True)
        hook()
        ep.combine(received.tokens, received)


def test_calls_and_hooks_are_ranges(ranges: Ranges) -> None:
    low_latency_calls(ranges=True)
    assert ranges.closed == [f"{LOW}::dispatch", f"{LOW}::dispatch hook", f"{LOW}::combine"]
    ranges.closed.clear()
    with fanfold.HighThroughput(**SIZES, config=fanfold.Config.resolve(ranges=True)) as ep:
        received = ep.dispatch(*tokens())
        again = ep.dispatch(tokens()[0], previous=received)
        ep.combine(again.tokens, again)
        ep.combine_weights(torch.ones((16,), dtype=torch.float32, device="cpu"), received)
    names = ("dispatch", "dispatch_cached", "combine", "combine_weights")
    assert ranges.closed == [f"{HIGH}::{name}" for name in names]
    assert ranges.open == []


def test_without_the_setting_there_are_none(ranges: Ranges) -> None:
    low_latency_calls()
    assert ranges.closed == []
    backend = object()
    assert ranged(backend, "low_latency", fanfold.Config()) is backend


def test_a_call_that_raises_ends_its_range(ranges: Ranges) -> None:
    with fanfold.LowLatency(**SIZES, config=fanfold.Config.resolve(ranges=True)) as ep:
        x, topk_idx, topk_weights = tokens()
        with pytest.raises(ArgumentError):
            ep.dispatch(x, topk_idx + 99, topk_weights)
    assert ranges.closed == [f"{LOW}::dispatch"]
    assert ranges.open == []


def buffer_calls(group: dist.ProcessGroup) -> None:
    nbytes = Buffer.get_low_latency_rdma_size_hint(8, 64, 1, 8)
    with environment(FANFOLD_RANGES="1"):
        buffer = Buffer(group, 1 << 20, num_rdma_bytes=nbytes, low_latency_mode=True)
    x, topk_idx, topk_weights = tokens()
    rows, _, handle, _, hook = buffer.low_latency_dispatch(
        x, topk_idx, 8, 8, use_fp8=False, return_recv_hook=True
    )
    hook()
    buffer.low_latency_combine(rows, topk_idx, topk_weights, handle)
    per_rank, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(topk_idx, 8)
    sizes = {"is_token_in_rank": in_rank, "num_tokens_per_expert": per_expert}
    rows, _, _, _, handle, _ = buffer.dispatch(x, num_tokens_per_rank=per_rank, **sizes)
    buffer.combine(rows, handle)


def test_calls_of_a_buffer_are_ranges(ranges: Ranges) -> None:
    ThreadRanks(1, timeout_s=100.0).run(buffer_calls)
    assert ranges.closed == [
        f"{LOW}::dispatch",
        f"{LOW}::dispatch hook",
        f"{LOW}::combine",
        f"{HIGH}::dispatch",
        f"{HIGH}::combine",
    ]


def test_in_all_else_it_is_the_backend() -> None:
    backend = HostHighThroughput.__new__(HostHighThroughput)
    wrapped = RangedBackend(backend, HIGH)
    assert isinstance(wrapped, HostHighThroughput)
    assert wrapped.device == torch.device("cpu")
    with pytest.raises(AttributeError):
        wrapped.nothing  # noqa: B018


def test_compiled_calls_have_ranges_too(ranges: Ranges) -> None:
    with fanfold.HighThroughput(**SIZES, config=fanfold.Config.resolve(ranges=True)) as ep:

        @torch.compile(fullgraph=True, backend="aot_eager")
        def layer(x: torch.Tensor, idx: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
            received = ep.dispatch(x, idx, weights)
            return ep.combine(received.tokens, received)

        out = layer(*tokens())
        assert torch.equal(out, torch.full_like(out, 2.0))
    assert ranges.closed == [f"{HIGH}::dispatch", f"{HIGH}::combine"]


def test_a_hook_in_compiled_code_has_a_range(ranges: Ranges) -> None:
    with fanfold.LowLatency(**SIZES, config=fanfold.Config.resolve(ranges=True)) as ep:

        @torch.compile(backend="aot_eager")
        def layer(x: torch.Tensor, idx: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
            received, hook = ep.dispatch(x, idx, weights, return_hook=True)
            hook()
            return ep.combine(received.tokens, received)

        out = layer(*tokens())
        assert torch.equal(out, torch.full_like(out, 2.0))
    assert f"{LOW}::dispatch hook" in ranges.closed
    assert ranges.open == []


def profiled(**settings: bool) -> list[str]:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        low_latency_calls(**settings)
    names = [event.name for event in profiler.events()]
    return [name for name in names if name.startswith("fanfold::")]


def test_a_profiler_has_record_functions(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(_: str) -> None:
        raise RuntimeError("NVTX functions not installed. Are you sure you have a CUDA build?")

    monkeypatch.setattr(torch.cuda.nvtx, "mark", missing)
    monkeypatch.setattr(torch.cuda.nvtx, "range_push", missing)
    assert not available()
    assert profiled(ranges=True) == [f"{LOW}::dispatch", f"{LOW}::dispatch hook", f"{LOW}::combine"]
    assert profiled(ranges=False) == []


def test_without_a_profiler_nothing_is_recorded(
    ranges: Ranges, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.profiler, "record_function", lambda _: pytest.fail("recorded"))
    low_latency_calls(ranges=True)
    assert len(ranges.closed) == 3


def test_a_fused_layer_is_a_range(ranges: Ranges) -> None:
    config = fanfold.Config.resolve(ranges=True)
    layer = fanfold.FusedMoE(
        num_experts=2, top_k=1, hidden=128, intermediate=128, max_tokens=4, config=config
    )
    with layer:
        weights = fanfold.fused_moe.ExpertWeights.quantize(
            torch.ones((2, 256, 128), dtype=torch.bfloat16, device="cpu"),
            torch.ones((2, 128, 128), dtype=torch.bfloat16, device="cpu"),
        )
        x = torch.ones((4, 128), dtype=torch.bfloat16, device="cpu")
        idx = torch.zeros((4, 1), dtype=torch.int64, device="cpu")
        layer.forward(x, idx, torch.ones((4, 1), dtype=torch.float32, device="cpu"), weights)
    # On the CPU it is a dispatch and a combine.
    assert ranges.closed == [f"{HIGH}::dispatch", f"{HIGH}::combine", "fanfold::fused_moe::layer"]


def test_a_copy_of_a_backend_with_ranges_does_not_recurse() -> None:
    class Backend:
        value = 7

    assert copy.copy(RangedBackend(Backend(), "fanfold")).value == 7
