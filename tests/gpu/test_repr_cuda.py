"""repr of what holds tensors of a GPU neither waits for it nor reads from it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

import fanfold
from fanfold.bench.dispatchers import open_dispatcher
from fanfold.deep_ep import Buffer
from fanfold.nn import MoE
from tests.gpu.conftest import GpuPools

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

HIDDEN, EXPERTS, TOP_K, MOST = 128, 8, 2, 16


def _texts(*things: object) -> list[str]:
    """Behind work that ends only when this has been done, as far as PyTorch can tell."""
    torch.cuda._sleep(50_000_000)
    torch.cuda.set_sync_debug_mode("error")
    try:
        return [repr(thing) for thing in things]
    finally:
        torch.cuda.set_sync_debug_mode("default")


def _sent(device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    idx = torch.arange(5 * TOP_K, device=device).reshape(5, TOP_K) % EXPERTS
    x = torch.ones((5, HIDDEN), dtype=torch.bfloat16, device=device)
    return x, idx, torch.ones((5, TOP_K), device=device)


def _native(group: dist.ProcessGroup, mode: Any) -> list[str]:
    config = fanfold.Config.resolve(backend="cuda", timeout_s=20.0)
    with open_dispatcher(
        mode, group, num_experts=EXPERTS, top_k=TOP_K, hidden=HIDDEN, max_tokens=MOST,
        config=config,
    ) as ep:  # fmt: skip
        layer = MoE(HIDDEN, 32, EXPERTS, TOP_K, dispatcher=ep).to(ep.device)
        with torch.no_grad():
            layer(torch.ones((3, HIDDEN), device=ep.device))
        received = ep.dispatch(*_sent(ep.device))
        texts = _texts(ep, received, received.source, layer, layer.statistics, ep.memory)
        ep.combine(received.tokens, received)
        ep.synchronize()
    return [*texts, repr(ep)]


@pytest.mark.parametrize("mode", ["low_latency", "high_throughput"])
def test_native(gpus: GpuPools, ranks: int, mode: str) -> None:
    for texts in gpus.run(ranks, _native, mode):
        assert texts[0].startswith("LowLatency(" if mode == "low_latency" else "HighThroughput(")
        assert "backend='cuda'" in texts[0]
        assert texts[-1].endswith("closed)")
        assert "<bfloat16 [" in texts[1]
        assert all("tensor(" not in text for text in texts)


def _deep_ep(group: dist.ProcessGroup) -> list[str]:
    ranks = dist.get_world_size(group)
    nbytes = Buffer.get_low_latency_rdma_size_hint(MOST, HIDDEN, ranks, EXPERTS)
    buffer = Buffer(group, 1 << 24, nbytes, low_latency_mode=True, explicitly_destroy=True)
    x, idx, weights = _sent(buffer.device)
    per_rank, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(idx, EXPERTS)
    rows, _, _, _, handle, event = buffer.dispatch(
        x, None, per_rank, None, in_rank, per_expert, idx, weights, async_finish=True
    )
    event.current_stream_wait()
    texts = _texts(buffer, buffer.runtime, handle, event)
    buffer.combine(rows, handle)  # type: ignore[arg-type]
    torch.cuda.synchronize()
    buffer.destroy()
    return [*texts, repr(buffer)]


def test_deep_ep(gpus: GpuPools, ranks: int) -> None:
    for buffer, runtime, handle, event, destroyed in gpus.run(ranks, _deep_ep):
        assert "backend='cuda'" in buffer
        assert runtime.startswith("Runtime(rank=")
        assert handle.startswith("GpuHandle(ranks=")
        assert "tensor(" not in event
        assert destroyed.endswith("destroyed)")
