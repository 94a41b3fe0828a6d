"""One program that makes every call of the native face, and what came of it."""

from __future__ import annotations

import os
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from fanfold import functional
from fanfold.bench.dispatchers import open_dispatcher
from fanfold.formats import ScaleFormat, dequantize, quantize
from fanfold.group import as_group
from fanfold.nn import MoE, MoEOptions, average_gradients

EXPERTS, TOP_K, HIDDEN = 8, 3, 256

Results = dict[str, torch.Tensor | None]


def every_call(group: dist.ProcessGroup, backend: str = "host") -> Results:
    """Runs the program on every rank; its results are on the CPU, by name."""
    with mock.patch.dict(os.environ, {"FANFOLD_TIMEOUT_S": "20", "FANFOLD_BACKEND": backend}):
        results: Results = {}
        for dtype in ("bf16", "fp8"):
            for mode in ("low_latency", "high_throughput"):
                _round_trip(group, mode, dtype, results)
        _gradients(group, results)
        _layer(group, results)
        _formats(group, backend, results)
        return {name: _on_cpu(value) for name, value in results.items()}


def round_trips(group: Any, mode: str, dtype: str) -> Results:
    """The calls of one mode alone; ``group`` is anything that Fanfold takes."""
    results: Results = {}
    _round_trip(group, mode, dtype, results)
    return results


def assert_same_results(found_of: list[Results], wanted_of: list[Results]) -> None:
    """Asserts equal bits on all ranks."""
    for found, wanted in zip(found_of, wanted_of, strict=True):
        assert found.keys() == wanted.keys()
        for name, value in wanted.items():
            other = found[name]
            if value is None or other is None:
                assert value is other, name
                continue
            assert other.dtype == value.dtype, name
            assert torch.equal(other, value), name


def _on_cpu(value: torch.Tensor | None) -> torch.Tensor | None:
    if value is None:
        return None
    if isinstance(value, DTensor):  # parameters of experts: each rank says its own
        value = value.to_local()
    value = value.detach().cpu().clone()
    return value.view(torch.uint8) if value.dtype is torch.float8_e4m3fn else value


def _open(group: Any, mode: Any, **settings: Any) -> Any:
    return open_dispatcher(
        mode, group, num_experts=EXPERTS, top_k=TOP_K, hidden=HIDDEN, max_tokens=16, **settings
    )


def _tokens(group: Any, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Rows, indices and weights of this rank."""
    count = 9 + as_group(group).rank
    generator = torch.Generator().manual_seed(count)
    cpu: dict[str, Any] = {"generator": generator, "device": "cpu"}
    x = torch.randn((count, HIDDEN), dtype=torch.float32, **cpu).bfloat16()
    topk_idx = torch.randint(-1, EXPERTS, (count, TOP_K), dtype=torch.int64, **cpu)
    weights = torch.rand((count, TOP_K), dtype=torch.float32, **cpu)
    return x.to(device), topk_idx.to(device), weights.to(device)


def _outputs(tokens: torch.Tensor, scales: torch.Tensor | None) -> torch.Tensor:
    values = tokens.float() if scales is None else dequantize(tokens, scales)
    return (values * 0.75).bfloat16()


def _round_trip(group: Any, mode: str, dtype: str, results: Results) -> None:
    with _open(group, mode, dispatch_dtype=dtype) as ep:
        x, topk_idx, weights = _tokens(group, ep.device)
        received = ep.dispatch(x, topk_idx, weights)
        counts = received.tokens_per_expert.cpu()
        y = torch.zeros(received.tokens.shape, dtype=torch.bfloat16, device=ep.device)
        found: Results = {"counts": counts}
        for expert in range(ep.experts_per_rank):
            rows = received.expert(expert)
            scales = received.scales
            scales = None if scales is None else received.expert(expert, of=scales)
            received.expert(expert, of=y).copy_(_outputs(rows, scales))
            found[f"rows {expert}"] = rows
            found[f"scales {expert}"] = scales
        found["out"] = ep.combine(y, received)
        found["plain"] = ep.combine(y, received, weighted=False)
        found["source ranks"] = received.source_rank
        found["source tokens"] = received.source_token
        if mode == "high_throughput":
            found["again"] = ep.dispatch(x, previous=received).tokens
            found["biased"] = ep.combine(y, received, bias=x)
            assert received.weights is not None
            found["weights"] = ep.combine_weights(received.weights, received)
            roomy = ep.dispatch(x, topk_idx, weights, capacity=96)
            rows = int(roomy.offsets[-1])  # behind them GPUs write nothing
            found["with a capacity"] = roomy.tokens[:rows]
            found["offsets"] = received.offsets
        else:
            pending, hook = ep.dispatch(x, topk_idx, weights, return_hook=True)
            hook()
            found["hooked"] = pending.tokens_per_expert
            found["hooked out"], hook = ep.combine(y, pending, return_hook=True)
            hook()
        ep.check()
        for name, value in found.items():
            results[f"{mode} {dtype}: {name}"] = _on_cpu(value)


def _gradients(group: dist.ProcessGroup, results: Results) -> None:
    with _open(group, "high_throughput") as ep:
        x, topk_idx, weights = _tokens(group, ep.device)
        x.requires_grad_()
        weights.requires_grad_()
        tokens, row_weights, received = functional.dispatch(ep, x, topk_idx, weights)
        out = functional.combine(ep, tokens * 0.5, received, row_weights)
        out.float().square().sum().backward()
        results |= {"gradient of x": x.grad, "gradient of weights": weights.grad}


def _layer(group: dist.ProcessGroup, results: Results) -> None:
    with _open(group, "high_throughput") as ep:
        # Modules put their parameters where PyTorch's default device is.
        with torch.device(ep.device):
            layer = MoE(
                HIDDEN,
                64,
                EXPERTS,
                TOP_K,
                dispatcher=ep,
                options=MoEOptions(shared_intermediate=32, seed=5),
            ).to(ep.device)
        x = _tokens(group, ep.device)[0].float()
        out = layer(x)
        (out.square().mean() + layer.balance_loss).backward()
        average_gradients(layer, group)
        results |= {"layer": out, "balance loss": layer.balance_loss}
        for name, parameter in layer.named_parameters():
            results[f"layer: {name}"] = parameter
            results[f"gradient: {name}"] = parameter.grad
        layer.statistics.reset()
        results["rows"] = layer.statistics.expert_rows


def _formats(group: dist.ProcessGroup, backend: str, results: Results) -> None:
    device = torch.device("cuda", torch.cuda.current_device()) if backend == "cuda" else "cpu"
    x = _tokens(group, torch.device(device))[0]
    for form in ScaleFormat:
        values, scales = quantize(x, form)
        results |= {f"{form.value}": values, f"{form.value} scales": scales}
        results[f"{form.value} back"] = dequantize(values, scales)
