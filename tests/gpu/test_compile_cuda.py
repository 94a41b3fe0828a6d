"""Functions under torch.compile on GPUs, against the same functions without it, bit for bit."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from tests.distributed import test_compile as compiling
from tests.gpu.conftest import GpuPools

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]

BACKENDS = ["aot_eager", pytest.param("inductor", marks=pytest.mark.long)]


@pytest.fixture(autouse=True)
def divides(ranks: int) -> None:
    """Skips where the experts cannot be spread."""
    if compiling.EXPERTS % ranks:
        pytest.skip(f"{compiling.EXPERTS} experts cannot be spread over {ranks} ranks")


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("capacity", [None, 300])
def test_training(gpus: GpuPools, ranks: int, backend: str, capacity: int | None) -> None:
    assert gpus.run(ranks, compiling.train, backend, None, capacity) == [0] * ranks


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "options",
    [
        {"mode": "low_latency"},
        {"mode": "low_latency", "dispatch_dtype": "fp8"},
        {"mode": "low_latency", "dispatch_dtype": "fp8", "scale_format": "ue8m0"},
        {"mode": "high_throughput", "dispatch_dtype": "fp8"},
    ],
    ids=lambda options: "-".join(options.values()),
)
def test_inference(gpus: GpuPools, ranks: int, backend: str, options: dict[str, object]) -> None:
    gpus.run(ranks, compiling.infer, backend, options)


@pytest.mark.parametrize("mode", ["high_throughput", "low_latency"])
def test_the_native_face(gpus: GpuPools, ranks: int, mode: str) -> None:
    gpus.run(ranks, compiling.native, mode)


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_order_of_calls(gpus: GpuPools, ranks: int, backend: str) -> None:
    results = gpus.run(ranks, compiling.in_order, backend)
    for plain, compiled in results:
        assert compiled == plain
    assert len({tuple(name for name, _ in compiled) for _, compiled in results}) == 1


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("run", ["plain", "autocast", "checkpoint"])
def test_a_layer_trains(gpus: GpuPools, ranks: int, backend: str, run: str) -> None:
    if (backend, run) == ("inductor", "autocast"):
        pytest.skip("both round; see the same without autocast, and aot_eager with it")
    gpus.run(ranks, compiling.moe, backend, compiling.LAYERS["plain"], run)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_layer_infers_in_low_latency(gpus: GpuPools, ranks: int, backend: str) -> None:
    gpus.run(ranks, compiling.moe, backend, compiling.LAYERS["plain"], "plain", "low_latency")


def _with_graphs_of_its_own(group: dist.ProcessGroup, mode: str, capacity: int | None) -> None:
    """``mode="reduce-overhead"``: the compiler captures what lies between the calls."""
    torch._dynamo.reset()
    with compiling.open_ep(group, mode) as ep:
        layer = compiling.layer_of(ep, capacity)
        compiled = torch.compile(layer, mode="reduce-overhead", fullgraph=True)
        # Warm-up, capture and replays, with other numbers of tokens in between.
        for step in (0, 0, 0, 1, 2, 0, 1):
            torch.compiler.cudagraph_mark_step_begin()
            if mode == "high_throughput":
                got = compiling.gradients(compiled, step, ep)
                compiling.assert_equal(got, compiling.gradients(layer, step, ep))
            with torch.no_grad():
                given = compiling.inputs_of(step, ep)
                compiling.assert_equal([compiled(*given).clone()], [layer(*given)])
        ep.synchronize()


@pytest.mark.long
@pytest.mark.parametrize(
    ("mode", "capacity"),
    [("high_throughput", None), ("high_throughput", 300), ("low_latency", None)],
)
def test_reduce_overhead(gpus: GpuPools, ranks: int, mode: str, capacity: int | None) -> None:
    gpus.run(ranks, _with_graphs_of_its_own, mode, capacity)


def _in_a_graph_of_the_users(group: dist.ProcessGroup, mode: str) -> None:
    """A compiled function that a CUDA graph captures, replayed with other inputs."""
    torch._dynamo.reset()
    with compiling.open_ep(group, mode) as ep, torch.no_grad():
        layer = compiling.layer_of(ep, 300 if mode == "high_throughput" else None)
        compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
        x, idx, weights = compiling.inputs_of(0, ep)
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(2):
                compiled(x, idx, weights)
        side.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = compiled(x, idx, weights)
        for factor in (2, 3):
            x.mul_(factor)
            weights.mul_(factor)
            graph.replay()
            ep.synchronize()
            compiling.assert_equal([out], [layer(x, idx, weights)])


@pytest.mark.parametrize("mode", ["high_throughput", "low_latency"])
def test_a_cuda_graph_may_hold_a_compiled_function(gpus: GpuPools, ranks: int, mode: str) -> None:
    gpus.run(ranks, _in_a_graph_of_the_users, mode)
