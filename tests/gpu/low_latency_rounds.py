"""Low latency as a mode, below the faces: weights that come with dispatch or, as in the deep_ep
face, with combine."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from fanfold.backends.low_latency import HostLowLatency, cuda_required_bytes
from fanfold.backends.low_latency.cuda import CudaLowLatency
from fanfold.backends.opening import memory_of_gpus
from fanfold.config import Config
from fanfold.formats import BF16_ROWS
from fanfold.geometry import Geometry
from fanfold.group import as_group
from fanfold.memory.host import SymmetricMemory
from tests.distributed.cuda_rounds import settle
from tests.gpu.support import Case, Tokens, tokens_of

Calls = tuple[torch.Tensor, ...]


def geometry_of(case: Case) -> Geometry:
    return Geometry(case.ranks, case.experts, case.top_k, case.hidden, case.max_tokens)


@contextmanager
def opened(
    group: dist.ProcessGroup, case: Case, late: bool, **settings: Any
) -> Iterator[CudaLowLatency]:
    """The mode on the ranks' current GPUs. Collective."""
    nbytes = cuda_required_bytes(geometry_of(case), late_weights=late)
    config = Config.resolve(**{"timeout_s": 30.0, **settings})
    memory = memory_of_gpus(as_group(group), nbytes, config)
    yield CudaLowLatency(memory, config, late)
    as_group(group).all_gather(None)  # a rank may still write to one that has read all it wants
    memory.close()


def round_of(
    mode: HostLowLatency | CudaLowLatency, geometry: Geometry, tokens: Tokens, late: bool
) -> tuple[Any, torch.Tensor]:
    """What one dispatch brings, and what combine makes of it, with the rows' own values as the
    experts' outputs."""
    weights = tokens.topk_weights
    received, _ = mode.dispatch(
        geometry,
        tokens.x,
        tokens.topk_idx,
        None if late else weights,
        formats=BF16_ROWS,
    )
    out, _ = mode.combine(
        geometry,
        received.tokens,
        received.routing,
        tokens.topk_idx,
        late_weights=weights if late else None,
    )
    return received, out


def _seen(geometry: Geometry, received: Any, out: torch.Tensor) -> Calls:
    """All that means something, on the CPU."""
    settle(out.device)
    valid = torch.arange(geometry.expert_capacity) < received.counts.cpu().unsqueeze(1)
    rows = received.tokens.cpu().view(torch.int16)[valid]
    return received.counts.cpu(), rows, received.source_tokens.cpu()[valid], out.cpu()


def on_the_host(group: dist.ProcessGroup, cases: list[Case], late: bool) -> list[Calls]:
    """What the host backend makes of ``cases``, of one geometry. Collective."""
    ranks, geometry = as_group(group), geometry_of(cases[0])
    memory = SymmetricMemory(ranks, HostLowLatency.required_bytes(geometry), Config.resolve())
    mode = HostLowLatency(memory, 0, memory.usable_bytes)
    found = [
        _seen(geometry, *round_of(mode, geometry, tokens_of(case, ranks.rank), late))
        for case in cases
    ]
    memory.close()
    return found


def like_the_host(group: dist.ProcessGroup, case: Case, late: bool, **settings: Any) -> None:
    """Asserts that rounds on GPUs give the host backend's bits. Collective."""
    geometry = geometry_of(case)
    (expected,) = on_the_host(group, [case], late)
    with opened(group, case, late, **settings) as mode:
        own = tokens_of(case, as_group(group).rank).to(mode.device)
        for _ in range(3):  # both halves of the memory, and one again
            found = _seen(geometry, *round_of(mode, geometry, own, late))
            mode.check()
            names = ("counts", "rows", "source tokens", "sums")
            for name, there, here in zip(names, expected, found, strict=True):
                assert torch.equal(there, here), f"{name} of {case} with {settings}"
