"""``fanfold bench fused-moe`` on several ranks of the host."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch.distributed as dist

from fanfold.bench import fused_moe
from fanfold.bench.fused_moe import FusedMoeSettings
from fanfold.cli.main import main
from fanfold.errors import ArgumentError, FanfoldError

pytestmark = pytest.mark.one_host  # its line says nothing of hosts

SMALL = FusedMoeSettings(
    tokens=(6, 3), ranks=2, hidden=128, intermediate=128, top_k=2, experts=4, backend="host",
    iterations=2, warmup=0, pause_ms=0.0,
)  # fmt: skip


def refused(group: dist.ProcessGroup, settings: FusedMoeSettings) -> str:
    try:
        fused_moe.check_ranks(settings, group)
    except ArgumentError as error:
        return str(error)
    return ""


def with_one_wrong_rank(group: dist.ProcessGroup, settings: FusedMoeSettings) -> str:
    """What a rank raises where only rank 1 gets a wrong result."""
    before = fused_moe.MOST_DIFFERENCE
    if dist.get_rank(group) == 1:
        fused_moe.MOST_DIFFERENCE = -1.0
    try:
        fused_moe.bench_ranks(group, settings)
    except FanfoldError as error:
        return str(error)
    finally:
        fused_moe.MOST_DIFFERENCE = before
    return ""


def test_ranks_share_the_experts(pools):
    of_ranks = pools(2).run(fused_moe.bench_ranks, SMALL)
    for number, tokens in enumerate(SMALL.tokens):
        points = [points[number] for points in of_ranks]
        batches = [SMALL.workload(tokens).batch(rank).topk_idx for rank in range(2)]
        for rank, point in enumerate(points):
            own = [each[each // 2 == rank] for each in batches]
            assert point.slots == sum(len(each) for each in own)
            assert point.experts_hit == len({int(e) for each in own for e in each})
            assert point.differences["fused"] == 0.0
            assert 0 < point.differences["unfused"] < 1e-3
            assert len(point.microseconds["unfused"]) == 2
        assert sum(point.slots for point in points) == 2 * tokens * 2


def test_a_wrong_result_of_one_rank_ends_all(pools):
    first, second = pools(2).run(with_one_wrong_rank, SMALL)
    assert "rank 1 failed: fused with 6 tokens" in first
    assert "fused with 6 tokens: the difference from the reference is 0, but must be" in second


def test_joined_ranks_refuse_another_number(pools):
    said = pools(2).run(refused, dataclasses.replace(SMALL, ranks=4))
    assert said == ["ranks is 4, but must be 2, the ranks that were started"] * 2


def test_the_command_starts_ranks(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path = tmp_path / "r.jsonl"
    arguments = ["--ranks", "2", "--tokens", "3", "--hidden", "128", "--intermediate", "128",
                 "--top-k", "2", "--experts", "4", "--iterations", "1", "--warmup", "0",
                 "--json", str(path)]  # fmt: skip
    assert main(["bench", "fused-moe", *arguments]) == 0
    assert "fused-moe: 2 ranks" in " ".join(capsys.readouterr().out.split())
    fields = json.loads(path.read_text())
    assert (fields["ranks"], fields["slots"]) == (2, 12)
    assert fields["total_us"] > 0
