"""The kernels for more ranks than there are GPUs: several ranks share one and take turns.

The faces refuse that, as it is slow; the modes themselves do not mind. In low latency grids of
sizes that no number of ranks divides show that every row has exactly one CTA to take it.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from fanfold.config import Config
from fanfold.formats import RowFormat, ScaleFormat
from fanfold.geometry import Geometry
from fanfold.group import as_group
from fanfold.low_latency import HostLowLatency, cuda_required_bytes
from fanfold.low_latency.cuda import CudaLowLatency
from fanfold.symmetric import SymmetricMemory
from fanfold.symmetric_cuda import CudaSymmetricMemory
from tests.distributed import routings
from tests.distributed.cuda_rounds import run_case
from tests.gpu.conftest import GpuPools
from tests.gpu.support import Case, Tokens, case_of, tokens_of
from tests.gpu.test_high_throughput_cuda import LAYOUTS, opened

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

GRIDS = ((27, 6), (32, 3))  # CTAs, senders
Calls = tuple[torch.Tensor, ...]


def _round(
    mode: HostLowLatency | CudaLowLatency, geometry: Geometry, tokens: Tokens, late: bool
) -> Calls:
    """What one dispatch and combine give, with the rows' own values as the experts' outputs."""
    weights = tokens.topk_weights
    received, _ = mode.dispatch(
        geometry,
        tokens.x,
        tokens.topk_idx,
        None if late else weights,
        row_format=RowFormat.BF16,
        scale_format=ScaleFormat.FLOAT32,
    )
    out, _ = mode.combine(
        geometry,
        received.tokens,
        received.routing,
        tokens.topk_idx,
        late_weights=weights if late else None,
    )
    valid = torch.arange(geometry.expert_capacity) < received.counts.cpu().unsqueeze(1)
    rows = received.tokens.cpu().view(torch.int16)[valid]
    return received.counts.cpu(), rows, received.source_tokens.cpu()[valid], out.cpu()


def _like_the_host(group: dist.ProcessGroup, case: Case, late: bool) -> None:
    ranks = as_group(group)
    torch.cuda.set_device(ranks.rank % torch.cuda.device_count())
    geometry = Geometry(ranks.size, case.experts, case.top_k, case.hidden, case.max_tokens)
    own = tokens_of(case, ranks.rank)
    host_memory = SymmetricMemory(ranks, HostLowLatency.required_bytes(geometry), Config.resolve())
    expected = _round(HostLowLatency(host_memory, 0, host_memory.usable_bytes), geometry, own, late)
    for ctas, senders in GRIDS:
        memory = CudaSymmetricMemory(ranks, cuda_required_bytes(geometry, late_weights=late))
        config = Config.resolve(timeout_s=30.0, ctas=ctas, senders=senders)
        mode = CudaLowLatency(memory, config, late)
        for _ in range(3):  # both halves of the memory, and one again
            found = _round(mode, geometry, own.to(memory.device), late)
            mode.check()
            for name, there, here in zip(
                ("counts", "rows", "source tokens", "sums"), expected, found, strict=True
            ):
                assert torch.equal(there, here), f"{name} with {ctas} CTAs"
        dist.barrier(group)
        memory.close()
    host_memory.close()


@pytest.mark.parametrize("ranks", [3, 4, 6])
@pytest.mark.parametrize("late", [False, True])
def test_like_the_host(gpus: GpuPools, ranks: int, late: bool) -> None:
    tokens = tuple((19, 0, 7, 12)[rank % 4] for rank in range(ranks))
    case = case_of(
        ranks,
        tokens=tokens,
        max_tokens=19,
        routing="holes",
        top_k=5,
        hidden=272,
        experts_per_rank=3,
    )
    gpus.run(ranks, _like_the_host, case, late)


# ---- high throughput ----------------------------------------------------------------------------

SMS = 5  # of each rank: all ranks' CTAs would fit on one GPU, too
ROOMY_RING = 1 << 20  # each wait for a slot is a turn of another process


def _high_throughput(group: dist.ProcessGroup, case: routings.Case, in_place: bool) -> None:
    rank = dist.get_rank(group)
    torch.cuda.set_device(rank % torch.cuda.device_count())
    with opened(
        group,
        ring_bytes=ROOMY_RING,
        timeout_s=60.0,
        result_bytes=routings.results_of(case) if in_place else 0,
        ctas=SMS,
    ) as mode:
        for layout in LAYOUTS:
            run_case(mode, case, rank, layout, in_place)


@pytest.mark.parametrize("ranks", [3, 4, 6])
@pytest.mark.parametrize("in_place", [False, True])
def test_high_throughput(gpus: GpuPools, ranks: int, in_place: bool) -> None:
    case = routings.Case(
        tokens=tuple((19, 0, 7, 12)[rank % 4] for rank in range(ranks)),
        experts_per_rank=3,
        top_k=5,
        hidden=272,
        style="holes",
        alignment=4,
        biases=1,
    )
    gpus.run(ranks, _high_throughput, case, in_place)
