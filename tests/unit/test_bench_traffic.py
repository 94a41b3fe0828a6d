"""Rows that a call moves between hosts and inside them, against plain loops and by hand."""

from __future__ import annotations

import pytest
import torch

from fanfold.bench.report import Traffic
from fanfold.bench.settings import MODES
from fanfold.bench.traffic import RowsMoved, rows_moved
from fanfold.bench.workload import Workload
from fanfold.geometry import Mode

# Four ranks with two experts each, of which ranks 2 and 3 are on another host.
BY_HAND = torch.tensor(
    [
        [0, 2, 4, 6],  # to all ranks
        [4, 5, 6, 7],  # to both of the other host
        [6, 7, -1, 6],  # to rank 3 alone
        [2, 3, 0, -1],  # to both of this host
        [-1, -1, -1, -1],
    ],
    dtype=torch.int64,
    device="cpu",
)


@pytest.mark.parametrize(
    ("mode", "rank", "expected"),
    [
        # Rank 0's own rows: two tokens. To rank 1: two. To rank 2: two. To rank 3: three.
        ("low_latency", 0, RowsMoved(total=9, remote=7, between_hosts=5, inside_hosts=2)),
        # Three tokens cross, to rank 2, which hands on three to rank 3.
        ("high_throughput", 0, RowsMoved(total=9, remote=7, between_hosts=3, inside_hosts=5)),
        # Three tokens cross, to rank 3, which hands on two to rank 2.
        ("high_throughput", 1, RowsMoved(total=9, remote=7, between_hosts=3, inside_hosts=4)),
        # Three go to rank 3. Two tokens cross, to rank 0, which hands on two to rank 1.
        ("high_throughput", 2, RowsMoved(total=9, remote=7, between_hosts=2, inside_hosts=5)),
    ],
)
def test_by_hand(mode: Mode, rank: int, expected: RowsMoved) -> None:
    through_gateways = mode == "high_throughput"
    found = rows_moved(BY_HAND, rank, 8, (0, 0, 1, 1), through_gateways=through_gateways)
    assert found == expected


def by_loops(
    topk_idx: torch.Tensor, rank: int, local: int, host: list[int], mode: Mode
) -> RowsMoved:
    """The same with one transfer after the other."""
    place = [p for p, h in enumerate(host) if h == host[rank]].index(rank)
    total, transfers = 0, []  # of source and target
    for choices in topk_idx.tolist():
        ranks = sorted({expert // local for expert in choices if expert >= 0})
        total += len(ranks)
        for there in sorted({host[peer] for peer in ranks}):
            wanted = [peer for peer in ranks if host[peer] == there]
            if there == host[rank] or mode == "low_latency":
                transfers += [(rank, peer) for peer in wanted]
                continue
            members = [peer for peer, h in enumerate(host) if h == there]
            gateway = members[place % len(members)]
            transfers += [(rank, gateway), *((gateway, peer) for peer in wanted)]
    moved = [(source, target) for source, target in transfers if source != target]
    between = sum(host[source] != host[target] for source, target in moved)
    remote = sum(
        len({expert // local for expert in choices if expert >= 0} - {rank})
        for choices in topk_idx.tolist()
    )
    return RowsMoved(total, remote, between, len(moved) - between)


@pytest.mark.parametrize(
    "host", [[0, 0, 0, 0, 0, 0], [0, 0, 0, 1, 1, 1], [0, 0, 1, 1, 2, 2], [0, 1, 2, 3, 4, 5],
             [0, 1, 0, 1, 0, 1], [0, 0, 0, 0, 1, 1]],
)  # fmt: skip
@pytest.mark.parametrize("mode", MODES)
def test_of_any_routing(mode: Mode, host: list[int]) -> None:
    workload = Workload(
        ranks=6, tokens=40, hidden=0, top_k=4, experts=12, seed=2, none_share=0.4,
        duplicate_share=0.2, uneven=True,
    )  # fmt: skip
    for rank in range(6):
        topk_idx = workload.batch(rank).topk_idx
        through_gateways = mode == "high_throughput"
        found = rows_moved(topk_idx, rank, 12, host, through_gateways=through_gateways)
        assert found == by_loops(topk_idx, rank, 2, host, mode)
        if len(set(host)) == 1:
            assert (found.between_hosts, found.inside_hosts) == (0, found.remote)
        elif mode == "low_latency":
            assert found.between_hosts + found.inside_hosts == found.remote


def test_bytes_are_a_mean_over_ranks() -> None:
    rows = [RowsMoved(10, 7, 5, 2), RowsMoved(20, 9, 6, 3)]
    traffic = Traffic.of(rows, 4)
    assert traffic == Traffic(remote=32.0, total=60.0, between_hosts=22.0, inside_hosts=10.0)
    assert traffic + traffic == Traffic(64.0, 120.0, 44.0, 20.0)
