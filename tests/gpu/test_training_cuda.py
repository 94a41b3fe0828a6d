"""Gradients through high throughput on GPUs: of the calls, and of a whole layer, against plain
PyTorch on the CPU."""

from __future__ import annotations

import dataclasses

import pytest
import torch
import torch.distributed as dist

from fanfold.config import Config
from fanfold.nn.sharding import local_part
from tests.distributed import test_functional as calls
from tests.distributed import test_nn as layers
from tests.gpu.conftest import GpuPools
from tests.gpu.support import own_device

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]


def _config() -> Config:
    return Config.resolve(backend="cuda", timeout_s=30.0)


def _case(case: calls.Case, ranks: int) -> calls.Case:
    return dataclasses.replace(case, tokens=(case.tokens * 2)[-ranks:])


def _gradients(group: dist.ProcessGroup, case: calls.Case) -> tuple[torch.Tensor, ...]:
    """Output and gradients of one rank, all work on its GPU."""
    device = own_device()
    mine = {name: t.to(device) for name, t in case.inputs()[dist.get_rank(group)].items()}
    with calls.open_ep(group, case, config=_config()) as ep:
        assert ep.device == device
        x, weights = mine["x"].requires_grad_(), mine["weights"].requires_grad_()
        with device:  # where the layer makes tensors of its own
            out = calls.run_layer(ep, case, x, weights, mine["idx"])
        out.backward(mine["grad"])
        assert x.grad is not None
        assert weights.grad is not None
        return tuple(tensor.detach().cpu() for tensor in (out, x.grad, weights.grad))


@pytest.mark.parametrize("case", calls.CASES, ids=lambda case: f"seed{case.seed}")
def test_gradients(gpus: GpuPools, ranks: int, case: calls.Case) -> None:
    case = _case(case, ranks)
    check_gradients(case, gpus.run(ranks, _gradients, case))


def check_gradients(case: calls.Case, of_ranks: list[tuple[torch.Tensor, ...]]) -> None:
    """Of all ranks, against plain PyTorch."""
    wanted = [calls.reference_gradients(case, rank) for rank in range(len(case.tokens))]
    for got, want in zip(of_ranks, wanted, strict=True):
        for name, ours, theirs in zip(("out", "x", "weights"), got, want, strict=True):
            if case.integers:
                assert torch.equal(ours, theirs), name
                continue
            # As on the host; the GPU's tanh errs in its last places, too.
            near = {"rtol": 1e-3, "atol": 1e-3} if name == "weights" else {"rtol": 2**-7,
                                                                         "atol": 2**-5}  # fmt: skip
            torch.testing.assert_close(ours, theirs, **near)


def _captured_step(group: dist.ProcessGroup, case: calls.Case) -> list[tuple[torch.Tensor, ...]]:
    """Outputs and gradients of one rank: without a capacity, with one, and of a CUDA graph that
    holds both passes, replayed with other inputs than it was captured with."""
    device = own_device()
    mine = {name: t.to(device) for name, t in case.inputs()[dist.get_rank(group)].items()}
    x, weights, idx = (torch.zeros_like(mine[name]) for name in ("x", "weights", "idx"))
    x.requires_grad_()
    weights.requires_grad_()
    with calls.open_ep(group, case, config=_config()) as ep:

        def load() -> None:
            with torch.no_grad():
                for tensor, name in ((x, "x"), (weights, "weights"), (idx, "idx")):
                    tensor.copy_(mine[name])

        def step(capacity: int | None) -> torch.Tensor:
            out = calls.run_layer_by_row(ep, case, capacity, x, weights, idx)
            x.grad, weights.grad = torch.autograd.grad(out, (x, weights), mine["grad"])
            return out.detach()

        def results(out: torch.Tensor) -> tuple[torch.Tensor, ...]:
            ep.synchronize()
            assert x.grad is not None
            assert weights.grad is not None
            return tuple(tensor.cpu() for tensor in (out, x.grad, weights.grad))

        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):  # with other inputs, zeros; compiles what the graph holds
            step(calls.room_for(case))
        side.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = step(calls.room_for(case))
        kept = out, x.grad, weights.grad
        load()
        taken = []
        for _ in range(2):
            for tensor in kept:
                tensor.fill_(float("nan"))
            graph.replay()
            taken.append(results(out))
        return [results(step(None)), results(step(calls.room_for(case))), *taken]


@pytest.mark.parametrize("case", calls.CASES, ids=lambda case: f"seed{case.seed}")
def test_a_graph_holds_both_passes(gpus: GpuPools, ranks: int, case: calls.Case) -> None:
    case = _case(case, ranks)
    for rank, (without, *within) in enumerate(gpus.run(ranks, _captured_step, case)):
        if case.integers:
            assert all(map(torch.equal, without, calls.reference_gradients(case, rank)))
        for got in within:
            assert torch.equal(got[0], without[0])
            assert torch.equal(got[1], without[1])
            # PyTorch's sum over a row may take another order where there are more rows.
            torch.testing.assert_close(got[2], without[2], rtol=1e-5, atol=1e-5)


def _train_once(group: dist.ProcessGroup, problem: layers.Problem) -> dict[str, object]:
    """As the host's test does, on this rank's GPU."""
    device = own_device()
    with layers.open_ep(group, problem.options, expert_alignment=16, config=_config()) as ep:
        layer = layers.make_layer(ep, problem.options).to(device)
        x, grad = (tensor.to(device) for tensor in problem.inputs()[ep.rank])
        x.requires_grad_()
        out = layer(x)
        ((out * grad).sum() + layer.balance_loss).backward()
        layers.average_gradients(layer)
        named = dict(layer.named_parameters())
        assert x.grad is not None
        grads = {name: p.grad for name, p in named.items() if p.grad is not None}
        return {
            "out": out.detach().cpu(),
            "grad_x": x.grad.cpu(),
            "parameters": {name: local_part(p).cpu() for name, p in named.items()},
            "gradients": {name: local_part(grad).cpu() for name, grad in grads.items()},
            "local": {name for name, p in named.items() if getattr(p, "expert_parallel", False)},
        }


@pytest.mark.parametrize("name", ["softmax", "latent", "bfloat16"])
def test_a_layer(gpus: GpuPools, ranks: int, name: str) -> None:
    problem = layers.PROBLEMS[name]
    problem = dataclasses.replace(problem, tokens=(problem.tokens * 2)[:ranks])
    results = gpus.run(ranks, _train_once, problem)
    full = {n: v.clone().requires_grad_() for n, v in layers.all_parameters(results).items()}
    loss = torch.zeros(())
    inputs = problem.inputs()
    for rank, (x, grad) in enumerate(inputs):
        out, balance = layers.plain_layer(full, x.requires_grad_(), problem)
        layers.assert_near(results[rank]["out"], out, f"output of rank {rank}")
        loss = loss + (out * grad).sum() + balance
    loss.backward()
    for rank, (x, _) in enumerate(inputs):
        layers.assert_near(results[rank]["grad_x"], x.grad, f"gradient of rank {rank}'s input")
    for parameter, value in full.items():
        got = results[0]["gradients"][parameter]
        if parameter in results[0]["local"]:
            got = torch.cat([result["gradients"][parameter] for result in results])
        layers.assert_near(got * problem.ranks, value.grad, f"gradient of {parameter}")


def _backward_without_waiting(group: dist.ProcessGroup, problem: layers.Problem) -> bool:
    """Where PyTorch raises for whatever waits for the GPU."""
    device = own_device()
    with layers.open_ep(group, problem.options, config=_config()) as ep:
        layer = layers.make_layer(ep, problem.options).to(device)
        x = problem.inputs()[ep.rank][0].to(device).requires_grad_()
        for _ in range(2):
            out = layer(x)
            loss = out.sum() + layer.balance_loss
            torch.cuda.set_sync_debug_mode("error")
            try:
                loss.backward()
            finally:
                torch.cuda.set_sync_debug_mode("default")
        ep.synchronize()
        return bool((layer.w_in.grad != 0).any())


def test_a_backward_pass_does_not_wait_for_the_gpu(gpus: GpuPools, ranks: int) -> None:
    problem = layers.PROBLEMS["shared"]
    problem = dataclasses.replace(problem, tokens=(problem.tokens * 2)[:ranks])
    assert all(gpus.run(ranks, _backward_without_waiting, problem))
