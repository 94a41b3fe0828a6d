"""``fanfold tune fused-moe`` on a GPU, and the layers that choose by what it found."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import fanfold
from fanfold.cli.main import main
from fanfold.fused_moe import FusedMoeTuning
from fanfold.fused_moe.tuning import FORMS, TunedPoint, best_tuning

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300), pytest.mark.usefixtures("hopper")]

SIZES = {"hidden": 512, "intermediate": 256}


def test_layers_choose_by_what_was_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FANFOLD_CACHE_DIR", str(tmp_path))
    sizes = [word for name, value in SIZES.items() for word in (f"--{name}", str(value))]
    asked = ["tune", "fused-moe", *sizes, "--experts", "4", "--top-k", "2", "--tokens", "8,600"]
    assert main([*asked, "--iterations", "3", "--no-fast-accumulation"]) == 0
    assert "Best for these" in capsys.readouterr().out
    lines = (tmp_path / "tuned" / "fused_moe.jsonl").read_text().splitlines()
    points = [TunedPoint.of(json.loads(line)) for line in lines]
    assert [point.tokens for point in points] == [8, 600]
    assert points[0].layer.gpu == torch.cuda.get_device_name()
    assert points[1].rows == 1200
    assert points[1].expert_rows == 300
    assert all(point.microseconds.keys() == FORMS.keys() for point in points)
    moe = {**SIZES, "num_experts": 4, "top_k": 2, "max_tokens": 8}
    with fanfold.FusedMoE(**moe) as layer:
        assert layer.tuning == best_tuning(points)
    asked = fanfold.Config.resolve(swap_ab_rows=3, group_rows=4)
    with fanfold.FusedMoE(**moe, config=asked) as layer:
        assert layer.tuning == FusedMoeTuning(3, 4)
