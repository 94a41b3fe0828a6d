"""Expert-major rows handed to PyTorch's grouped matrix product as they arrive, without the CPU."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from tests.distributed.test_grouped_product import (
    EXPERTS,
    Tokens,
    all_matrices,
    expected,
    gradients,
    most_rows,
    needs_grouped_products,
    open_layer,
    round_trip,
)
from tests.gpu.conftest import GpuPools
from tests.gpu.support import own_device

pytestmark = [pytest.mark.gpu, needs_grouped_products]


def _tokens(seed: int) -> Tokens:
    drawn, device = Tokens.drawn(seed), own_device()
    return Tokens(*(tensor.to(device) for tensor in vars(drawn).values()))


def _rounds(group: dist.ProcessGroup) -> None:
    rank, ranks = group.rank(), group.size()
    local = EXPERTS // ranks
    matrices = all_matrices()[rank * local : (rank + 1) * local].to(own_device())
    with open_layer(group) as ep:
        assert ep.device == own_device()
        for seed, capacity in enumerate((None, most_rows(ranks), None)):
            out = round_trip(ep, _tokens(10 * seed + rank), matrices, capacity)
            assert torch.equal(out.cpu(), expected(Tokens.drawn(10 * seed + rank)))

        wanted, got = (gradients(ep, _tokens(rank), matrices, n) for n in (None, most_rows(ranks)))
        assert all(map(torch.equal, wanted, got))
        assert all(bool(grad.any()) for grad in wanted)

        tokens, graph = _tokens(rank), torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = round_trip(ep, tokens, matrices, most_rows(ranks))
        for seed in (50, 60):
            for kept, given in zip(vars(tokens).values(), vars(_tokens(seed + rank)).values(),
                                   strict=True):  # fmt: skip
                kept.copy_(given)
            graph.replay()
            assert torch.equal(out.cpu(), expected(Tokens.drawn(seed + rank)))
        ep.synchronize()


def test_a_grouped_product_of_what_arrives(gpus: GpuPools, ranks: int) -> None:
    if EXPERTS % ranks:
        pytest.skip(f"{EXPERTS} experts are not divisible by {ranks} ranks")
    gpus.run(ranks, _rounds)
