"""The kernels for more ranks than there are GPUs: several ranks time-slice one.

The faces refuse that, as it is slow; the modes themselves do not mind. In low latency grids of
sizes that no number of ranks divides show that every row has exactly one CTA to take it.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from tests.distributed import routings
from tests.distributed.cuda_rounds import run_case
from tests.gpu.conftest import GpuPools
from tests.gpu.low_latency_rounds import like_the_host
from tests.gpu.support import Case, case_of
from tests.gpu.test_high_throughput_cuda import LAYOUTS, opened

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

GRIDS: tuple[dict[str, int], ...] = ({"ctas": 27, "senders": 6}, {"ctas": 32, "senders": 3})


def _on_grids(group: dist.ProcessGroup, case: Case, late: bool) -> None:
    rank = dist.get_rank(group)
    torch.cuda.set_device(rank % torch.cuda.device_count())
    for grid in GRIDS:
        like_the_host(group, case, late, **grid)


@pytest.mark.parametrize("ranks", range(3, 9))
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
    gpus.run(ranks, _on_grids, case, late)


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


@pytest.mark.parametrize("ranks", range(3, 9))
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
