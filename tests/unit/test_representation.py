"""What repr shows of public objects, and that they refuse to be copied or pickled."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import fanfold
from fanfold import deep_ep
from fanfold.backends import high_throughput, low_latency
from fanfold.backends.high_throughput.plan import CudaDispatched, CudaPlan
from fanfold.bench.dispatchers import open_dispatcher
from fanfold.deep_ep.handles import GpuHandle
from fanfold.deep_ep.runtime import Runtime
from fanfold.errors import CopyError, UsageError
from fanfold.geometry import Geometry
from fanfold.memory.cuda import CudaSymmetricMemory
from fanfold.memory.host import SymmetricMemory
from fanfold.nn import MoE, MoEOptions, MoEStatistics

MODES = ("low_latency", "high_throughput")

HALF_MADE = [
    fanfold.LowLatency,
    fanfold.HighThroughput,
    fanfold.LowLatencyResult,
    fanfold.HighThroughputResult,
    fanfold.Config,
    deep_ep.Buffer,
    deep_ep.Config,
    deep_ep.EventHandle,
    deep_ep.EventOverlap,
    Runtime,
    Geometry,
    MoE,
    MoEOptions,
    MoEStatistics,
    SymmetricMemory,
    CudaSymmetricMemory,
    CudaPlan,
    CudaDispatched,
    high_throughput.Plan,
    high_throughput.Dispatched,
    high_throughput.Layout,
    low_latency.Dispatched,
    low_latency.Routing,
    low_latency.CudaRouting,
    low_latency.LateRouting,
]


class NothingRuns(TorchDispatchMode):
    """Within it every operation on a tensor fails: each could wait for a GPU."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError(f"repr ran {func}")


def shown(thing: object) -> str:
    with NothingRuns():
        return repr(thing)


CLASSES = {"low_latency": "LowLatency", "high_throughput": "HighThroughput"}


def opened(mode: Any = "high_throughput") -> Any:
    return open_dispatcher(mode, num_experts=4, top_k=2, hidden=32, max_tokens=8)


def dispatched(ep: Any) -> Any:
    idx = torch.arange(10).reshape(5, 2) % 4
    return ep.dispatch(torch.ones(5, 32, dtype=torch.bfloat16), idx, torch.ones(5, 2))


def buffer() -> deep_ep.Buffer:
    group = _Alone()
    nbytes = deep_ep.Buffer.get_low_latency_rdma_size_hint(8, 64, 1, 4)
    return deep_ep.Buffer(
        group,
        1 << 20,
        nbytes,
        low_latency_mode=True,
        explicitly_destroy=True,  # type: ignore[arg-type]
    )


class _Alone:
    rank, size = 0, 1

    def all_gather(self, value: Any) -> list[Any]:
        return [value]


@pytest.mark.parametrize("mode", MODES)
def test_native(mode: str) -> None:
    ep = opened(mode)
    sizes = "rank=0, ranks=1, num_experts=4, top_k=2, hidden=32, max_tokens=8"
    text = f"{CLASSES[mode]}({sizes}, backend='host', device='cpu'"
    assert shown(ep) == f"{text})"
    received = dispatched(ep)
    for part in ("tokens=<bfloat16 [", "weights=<float32 [", "num_tokens=5"):
        assert part in shown(received)
    assert ("complete=True" in shown(received)) is (mode == "low_latency")
    assert "bfloat16" in shown(received.source)
    ep.close()
    assert shown(ep) == f"{text}, closed)"
    assert "tokens=<bfloat16 [" in shown(received)


def test_a_dispatch_that_has_not_arrived() -> None:
    with opened("low_latency") as ep:
        x = torch.ones(5, 32, dtype=torch.bfloat16)
        received, hook = ep.dispatch(x, torch.zeros(5, 2, dtype=torch.int64), return_hook=True)
        assert "complete=False" in shown(received)
        hook()
        assert "complete=True" in shown(received)


def test_layer() -> None:
    with opened() as ep:
        layer = MoE(32, 16, 4, 2, dispatcher=ep)
        layer(torch.ones(3, 32))
        assert "hidden=32, intermediate=16, num_experts=4, top_k=2" in shown(layer)
        assert "HighThroughput(" in shown(layer)
        assert "backend='host'" in shown(torch.nn.Sequential(layer))
        assert "expert_rows=<int64 [4] on cpu>" in shown(layer.statistics)
        assert "bytes_sent=<int64 [] on cpu>" in shown(layer.statistics)
    assert "closed" in shown(layer)


def test_deep_ep() -> None:
    made = buffer()
    for part in ("rank=0", "group_size=1", "num_nvl_bytes=1048576", "backend='host'"):
        assert part in shown(made)
    assert "rdma_bytes=" in shown(made.runtime)
    assert "destroyed" not in shown(made)
    made.destroy()
    assert "destroyed" in shown(made)
    event = deep_ep.EventOverlap(deep_ep.EventHandle(), (torch.ones(3), None))
    assert shown(event).startswith("EventOverlap(event=EventHandle(complete), extra_tensors=(<fl")
    assert shown(deep_ep.EventOverlap()).startswith("EventOverlap(event=None")


def test_handle_of_a_gpu_is_not_looked_into() -> None:
    handle = GpuHandle.of(CudaPlan.__new__(CudaPlan), 10, lambda: pytest.fail("looked into"))
    assert shown(handle) == "GpuHandle(channels=10)"


def test_settings() -> None:
    text = shown(fanfold.Config.resolve(timeout_s=7.0))
    assert "timeout_s=7.0" in text
    assert "backend='host'" in text


@pytest.mark.parametrize("kind", HALF_MADE)
def test_half_made(kind: type) -> None:
    assert shown(kind.__new__(kind)).startswith(f"{kind.__name__}(")


def pickled(value: object) -> bytes:
    return pickle.dumps(value)


def saved(value: object) -> None:
    torch.save(value, io.BytesIO())


@pytest.mark.parametrize("attempt", [copy.copy, copy.deepcopy, pickled, saved])
def test_no_copies(attempt: Callable[[object], object]) -> None:
    made = buffer()
    with opened() as ep:
        layer = MoE(32, 16, 4, 2, dispatcher=ep)
        for thing, advice in (
            (ep, "several layers may use one"),
            (layer, "state_dict"),
            (dispatched(ep), "pass the object itself to combine"),
            (made, "with the same arguments"),
            (made.runtime, "Make a Buffer"),
            (ep.memory, "construction is collective"),
        ):
            name = type(thing).__name__
            with pytest.raises(CopyError, match=rf"^{name} cannot be copied .*{advice}") as raised:
                attempt(thing)
            assert isinstance(raised.value, TypeError)
            assert isinstance(raised.value, UsageError)
        if attempt is not copy.copy:  # which takes the layer as it is
            with pytest.raises(CopyError, match=r"^MoE cannot"):
                attempt(torch.nn.Sequential(layer))
        again = MoE(32, 16, 4, 2, dispatcher=ep, options=MoEOptions(seed=1))
        again.load_state_dict(layer.state_dict())
        assert torch.equal(again.w_in, layer.w_in)
    made.destroy()
