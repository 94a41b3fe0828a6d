"""A forked child that uses its parent's objects gets UsageError, and the parent goes on."""

from __future__ import annotations

import gc
import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from fanfold.deep_ep import Buffer
from fanfold.errors import UsageError
from fanfold.launch import RankPool
from fanfold.nn import MoE
from tests.distributed.layers import Shape, good_call, works

Calls = dict[str, Callable[[], object]]


def _raised(call: Callable[[], object]) -> str:
    try:
        call()
    except BaseException as error:
        return type(error).__name__
    return "nothing"


def in_child(calls: Calls, end: Callable[[], object]) -> dict[str, str]:
    """What each call raises in a forked child, which then ends as Python programs do."""
    # A thread of gloo drops its last Python object after the collective has returned. A fork at
    # that moment hangs in CPython 3.11 before it returns: the child waits for a lock that the
    # thread held. Not Fanfold's to mend, so let the thread finish.
    time.sleep(0.1)
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        found = {name: _raised(call) for name, call in calls.items()}
        calls.clear()
        end()
        gc.collect()
        os.write(writing, json.dumps(found).encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as answers:
        text = answers.read()
    _, status = os.waitpid(child, 0)
    assert status == 0, f"the child ended with status {status}"
    return dict(json.loads(text))


def _native(group: dist.ProcessGroup, mode: str) -> dict[str, str]:
    shape = Shape(mode=mode)
    ep = shape.open(group)
    call = good_call(shape, ep.rank)
    arguments = (call.x, call.topk_idx, call.topk_weights)
    received = ep.dispatch(*arguments)
    calls: Calls = {
        "dispatch": lambda: ep.dispatch(*arguments),
        "bad dispatch": lambda: ep.dispatch(call.x.float(), *arguments[1:]),
        "combine": lambda: ep.combine(received.tokens, received),
        "check": ep.check,
        "synchronize": ep.synchronize,
    }
    hook = None
    if mode == "low_latency":
        pending, hook = ep.dispatch(*arguments, return_hook=True)
        calls |= {"hook": hook}
    else:
        layer = MoE(32, 16, 12, 3, dispatcher=ep)
        calls |= {
            "cached": lambda: ep.dispatch(call.x, previous=received),
            "weights": lambda: ep.combine_weights(torch.ones(len(received.tokens)), received),
            "use_sms": lambda: ep.use_sms(4),
            "use_zero_padding": lambda: ep.use_zero_padding(False),
            "layer": lambda: layer(call.x),
        }
    found = in_child(calls, ep.close)
    if hook is not None:
        hook()
        assert torch.equal(pending.tokens_per_expert, received.tokens_per_expert)
    assert works(ep, shape)
    ep.close()
    return found


def _deep_ep(group: dist.ProcessGroup) -> dict[str, str]:
    size = Buffer.get_low_latency_rdma_size_hint(8, 32, dist.get_world_size(group), 12)
    buffer = Buffer(group, 1 << 20, size, True, explicitly_destroy=True)
    call = good_call(Shape(), dist.get_rank(group))

    def decode(hook: bool = False) -> Any:
        return buffer.low_latency_dispatch(
            call.x, call.topk_idx, 8, 12, use_fp8=False, return_recv_hook=hook
        )

    def prefill() -> Any:
        per_rank, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(call.topk_idx, 12)
        return buffer.dispatch(
            call.x,
            num_tokens_per_rank=per_rank,
            is_token_in_rank=in_rank,
            num_tokens_per_expert=per_expert,
            topk_idx=call.topk_idx,
            topk_weights=call.topk_weights,
        )

    rows, _, handle, _, _ = decode()
    arrived = prefill()
    pending = decode(hook=True)
    calls: Calls = {
        "low_latency_dispatch": decode,
        "low_latency_combine": lambda: buffer.low_latency_combine(
            rows, call.topk_idx, call.topk_weights, handle
        ),
        "hook": pending[4],
        "clean": lambda: buffer.clean_low_latency_buffer(8, 32, 12),
        "dispatch": prefill,
        "combine": lambda: buffer.combine(arrived[0], arrived[4]),
        "cached": lambda: buffer.dispatch(call.x, handle=arrived[4]),
        "scratch": lambda: buffer.get_local_buffer_tensor(torch.uint8),
        "next buffer": lambda: buffer.get_next_low_latency_combine_buffer(handle),
        "destroy": buffer.destroy,
    }

    def drop() -> None:
        nonlocal buffer
        del buffer

    found = in_child(calls, drop)
    pending[4]()
    out, _, _ = buffer.low_latency_combine(rows, call.topk_idx, call.topk_weights, handle)
    assert torch.equal(out.float(), call.x.float() * 3)
    assert torch.equal(prefill()[0], arrived[0])
    buffer.destroy()
    return found


@pytest.mark.parametrize("mode", ["low_latency", "high_throughput"])
def test_native(pools: Callable[[int], RankPool], mode: str) -> None:
    for found in pools(2).run(_native, mode):
        assert set(found.values()) == {"UsageError"}, found


def test_deep_ep(pools: Callable[[int], RankPool]) -> None:
    for found in pools(2).run(_deep_ep):
        assert set(found.values()) == {"UsageError"}, found


def _number(group: dist.ProcessGroup) -> int:
    return dist.get_rank(group)


def test_pools_belong_to_their_process() -> None:
    """A child that ends, and runs its exit handlers, leaves the parent's ranks alone."""
    with RankPool(2, timeout_s=60.0) as pool:
        child = os.fork()
        if child == 0:
            try:
                pool.run(_number)
            except UsageError:
                pool.close()
                sys.stdout.flush()
                os._exit(0)
            os._exit(1)
        assert os.waitpid(child, 0)[1] == 0
        assert pool.run(_number) == [0, 1]
