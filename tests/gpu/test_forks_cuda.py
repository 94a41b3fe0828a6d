"""A forked child that uses its parent's objects gets UsageError on GPUs, too."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from fanfold.deep_ep import Buffer
from tests.conformance.deep_ep_reference import inputs
from tests.distributed.test_forks import Calls, in_child
from tests.gpu import test_deep_ep_cuda as deep_ep
from tests.gpu.conftest import GpuPools
from tests.gpu.support import answers, assert_combined, case_of, open_layer, tokens_of

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]


def _native(group: dist.ProcessGroup) -> dict[str, str]:
    case = case_of(dist.get_world_size(group))
    answer = answers(group, [case])[0]
    ep = open_layer(group, case)
    mine = tokens_of(case, ep.rank).to(ep.device)
    received = ep.dispatch(mine.x, mine.topk_idx, mine.topk_weights)
    y = answer.spread(received.tokens, ep.device)
    _, hook = ep.dispatch(mine.x, mine.topk_idx, mine.topk_weights, return_hook=True)
    torch.cuda.synchronize()
    calls: Calls = {
        "dispatch": lambda: ep.dispatch(mine.x, mine.topk_idx, mine.topk_weights),
        "combine": lambda: ep.combine(y, received),
        "hook": hook,
        "check": ep.check,
    }
    found = in_child(calls, ep.close)
    hook()
    assert_combined(ep.combine(y, received), answer)
    ep.close()
    return found


def _deep_ep(group: dist.ProcessGroup) -> dict[str, str]:
    case = deep_ep.case_of(dist.get_world_size(group))
    mine = deep_ep.on_gpu(inputs(case, dist.get_rank(group)))
    buffer: Buffer = deep_ep.open_buffer(group, case)
    result = deep_ep.dispatch(buffer, case, mine)
    torch.cuda.synchronize()
    calls: Calls = {
        "dispatch": lambda: deep_ep.dispatch(buffer, case, mine),
        "scratch": lambda: buffer.get_local_buffer_tensor(torch.uint8, use_rdma_buffer=True),
        "destroy": buffer.destroy,
    }
    found = in_child(calls, calls.clear)
    again = deep_ep.dispatch(buffer, case, mine)
    assert torch.equal(again[1], result[1])
    buffer.destroy()
    return found


@pytest.mark.parametrize("program", [_native, _deep_ep])
def test_forked_child(gpus: GpuPools, ranks: int, program: object) -> None:
    for found in gpus.run(ranks, program):  # type: ignore[arg-type]
        assert set(found.values()) == {"UsageError"}, found
