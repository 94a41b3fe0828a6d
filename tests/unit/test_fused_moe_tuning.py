"""What is kept of ``fanfold tune fused-moe``, and what layers choose by it, without a GPU."""

from __future__ import annotations

import dataclasses
import json
import logging
from pathlib import Path

import pytest

import fanfold
from fanfold.cli.main import main
from fanfold.config import Config
from fanfold.errors import ArgumentError, ConfigError
from fanfold.fused_moe import FusedMoeTuning, tuning
from fanfold.fused_moe.tuning import FORMS, TunedLayer, TunedPoint, best_tuning, tuning_for
from fanfold.geometry import Geometry

LAYER = TunedLayer(
    gpu="GPU of tests",
    ranks=1,
    experts=64,
    top_k=8,
    hidden=7168,
    intermediate=2048,
    fast_accumulation=False,
)
DEFAULT = FusedMoeTuning()


def point(tokens: int, rows: int, times: tuple[float, float, float], **layer: object) -> TunedPoint:
    """``times``: of rows, swap_ab and groups."""
    of = dataclasses.replace(LAYER, **layer)
    return TunedPoint(of, tokens, rows, dict(zip(FORMS, times, strict=True)))


POINTS = [
    point(64, 512, (700, 690, 720)),
    point(512, 4096, (750, 745, 760)),
    point(1024, 8192, (950, 980, 955)),
    point(2048, 16384, (1520, 1700, 1500)),
]


def keep(folder: Path, points: list[TunedPoint], *more: str) -> Config:
    """Settings with which the points are this user's."""
    lines = [json.dumps(each.record()) for each in points]
    file = folder / "tuned" / "fused_moe.jsonl"
    file.parent.mkdir()
    file.write_text("".join(f"{line}\n" for line in [*lines, *more]))
    return Config.resolve(cache_dir=str(folder))


# ---- the model ----------------------------------------------------------------------------------


def test_changes_are_half_way_between_what_was_measured() -> None:
    assert best_tuning(POINTS) == FusedMoeTuning(swap_ab_rows=96, group_rows=12289)


def test_without_points_the_defaults_hold() -> None:
    assert best_tuning([]) == DEFAULT
    assert FusedMoeTuning(32, 12288) == DEFAULT


def test_a_form_that_is_never_best_is_never_taken() -> None:
    never = [
        dataclasses.replace(each, microseconds={"rows": 1.0, "swap_ab": 2.0, "groups": 2.0})
        for each in POINTS
    ]
    assert best_tuning(never) == FusedMoeTuning(swap_ab_rows=0, group_rows=16385)


def test_a_form_that_is_always_best_is_taken_to_the_end() -> None:
    swapped = [point(8, 64, (2, 1, 3)), point(64, 512, (2, 1, 3))]
    assert best_tuning(swapped) == FusedMoeTuning(swap_ab_rows=8, group_rows=12288)
    grouped = [point(8, 64, (2, 3, 1)), point(64, 512, (2, 3, 1))]
    assert best_tuning(grouped) == FusedMoeTuning(swap_ab_rows=0, group_rows=1)


def test_few_rows_without_groups_say_nothing_of_many() -> None:
    few = [point(8, 64, (1, 2, 2)), point(64, 512, (1, 2, 2))]
    assert best_tuning(few) == FusedMoeTuning(0, DEFAULT.group_rows)


def test_points_that_are_swapped_say_nothing_of_groups() -> None:
    """Which are timed with tokens as rows."""
    swapped = [point(64, 512, (7, 1, 3)), point(4096, 32768, (5, 9, 6))]
    assert best_tuning(swapped).group_rows == 32769


def test_what_is_swapped_is_not_in_groups() -> None:
    """Where groups are best for all else: the swapped form was not measured with them."""
    swapped = [point(64, 512, (7, 1, 3)), point(256, 2048, (7, 4, 6))]
    assert best_tuning([*swapped, point(4096, 32768, (5, 9, 4))]) == FusedMoeTuning(272, 2049)
    many = point(2048, 45056, (7, 1, 3), experts=512, top_k=22)
    assert best_tuning([many]).group_rows == 45057


@pytest.mark.parametrize("tokens", [1, 31, 33, 48])
def test_all_tokens_that_were_best_swapped_are_swapped(tokens: int) -> None:
    """Also where an expert gets less than a row, a mean, or a part of one more."""
    few = [
        point(tokens, 8 * tokens, (10, 5, 11), experts=256),
        point(tokens + 100, 8 * tokens + 800, (10, 15, 11), experts=256),
    ]
    geometry = Geometry(1, 256, 8, 7168, 1000)
    chosen = best_tuning(few).swapped_tokens(geometry)
    assert tokens <= chosen < tokens + 100


def test_tokens_of_a_geometry() -> None:
    """As many as give an expert the rows, if all ranks have as many."""
    chosen = FusedMoeTuning(swap_ab_rows=96)
    assert chosen.swapped_tokens(Geometry(1, 64, 8, 7168, 100)) == 768
    assert chosen.swapped_tokens(Geometry(4, 64, 8, 7168, 100)) == 192
    assert chosen.swapped_tokens(Geometry(1, 1, 1, 7168, 100)) == 96
    assert FusedMoeTuning(swap_ab_rows=0).swapped_tokens(Geometry(1, 64, 8, 7168, 100)) == 0


def test_one_slow_call_does_not_turn_the_choice() -> None:
    """Times that are worse here and better there: what is least on the whole."""
    noisy = [*POINTS, point(256, 2048, (700, 701, 710))]
    assert best_tuning(noisy).swap_ab_rows == 96


# ---- what is kept -------------------------------------------------------------------------------


def test_a_line_is_read_as_it_was_written() -> None:
    assert TunedPoint.of(json.loads(json.dumps(POINTS[0].record()))) == POINTS[0]


@pytest.mark.parametrize(
    "change",
    [
        {"tokens": "8"},
        {"tokens": -1},
        {"tokens": True},
        {"rows": 1.5},
        {"gpu": None},
        {"gpu": ["a"]},
        {"extra": 1},
        {"experts": 0},
        {"experts": "64"},
        {"fast_accumulation": 0},
        {"microseconds": {"rows": 1.0}},
        {"microseconds": {"rows": 1.0, "swap_ab": 0.0, "groups": 1.0}},
        {"microseconds": {"rows": "10", "swap_ab": 1.0, "groups": 1.0}},
        {"microseconds": {"rows": float("inf"), "swap_ab": 1.0, "groups": 1.0}},
        {"microseconds": {"rows": float("nan"), "swap_ab": 1.0, "groups": 1.0}},
        {"microseconds": {"rows": 10**400, "swap_ab": 1.0, "groups": 1.0}},
        {"microseconds": 3},
    ],
    ids=str,
)
def test_a_line_that_is_no_point(change: dict[str, object]) -> None:
    with pytest.raises(ArgumentError, match="a point of `fanfold tune fused-moe`"):
        TunedPoint.of({**POINTS[0].record(), **change})


@pytest.mark.parametrize("line", ["null", "5", "[1]", '"gpu"', "[" * 100_000, "{}", "\x00"])
def test_any_other_line_is_left_out(tmp_path: Path, line: str) -> None:
    assert tuning_for(LAYER, keep(tmp_path, POINTS, line)) == best_tuning(POINTS)


def test_layers_choose_by_their_own_points(tmp_path: Path) -> None:
    other = point(64, 512, (1, 2, 3), hidden=4096)
    config = keep(tmp_path, [*POINTS, other])
    assert tuning_for(LAYER, config) == best_tuning(POINTS)
    assert tuning_for(other.layer, config) == best_tuning([other])


def test_another_layer_of_the_gpu_chooses_by_all_of_it(tmp_path: Path) -> None:
    fast = point(64, 512, (1, 2, 3), fast_accumulation=True)
    config = keep(tmp_path, [*POINTS, fast])
    asked = dataclasses.replace(LAYER, hidden=1024)
    assert tuning_for(asked, config) == best_tuning(POINTS)
    assert tuning_for(dataclasses.replace(asked, gpu="another"), config) == DEFAULT


def test_a_layer_of_several_ranks_chooses_by_such(tmp_path: Path) -> None:
    two = [point(64, 512, (2, 3, 1), ranks=2), point(2048, 16384, (2, 3, 1), ranks=2)]
    config = keep(tmp_path, [*POINTS, *two])
    four, one = (dataclasses.replace(LAYER, ranks=ranks, hidden=1024) for ranks in (4, 1))
    assert tuning_for(four, config) == best_tuning(two)
    assert tuning_for(one, config) == best_tuning(POINTS)


def test_a_layer_of_several_ranks_chooses_by_one_where_there_is_nothing_else(
    tmp_path: Path,
) -> None:
    asked = dataclasses.replace(LAYER, ranks=4)
    assert tuning_for(asked, keep(tmp_path, POINTS)) == best_tuning(POINTS)


def test_what_the_settings_ask_for_comes_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keep(tmp_path, POINTS)
    monkeypatch.setenv("FANFOLD_SWAP_AB_ROWS", "7")
    config = Config.resolve(cache_dir=str(tmp_path))
    assert tuning_for(LAYER, config) == FusedMoeTuning(7, best_tuning(POINTS).group_rows)
    config = Config.resolve(cache_dir=str(tmp_path), swap_ab_rows=0, group_rows=5)
    assert tuning_for(LAYER, config) == FusedMoeTuning(0, 5)


@pytest.mark.parametrize("name", ["swap_ab_rows", "group_rows"])
@pytest.mark.parametrize("value", [-1, 2**31, 1.0, True, "3"])
def test_settings_out_of_bounds(name: str, value: object) -> None:
    with pytest.raises(ConfigError, match=name):
        Config.resolve(**{name: value})


def test_the_last_line_of_a_number_of_tokens_holds(tmp_path: Path) -> None:
    config = keep(tmp_path, [point(64, 512, (2, 1, 3)), point(64, 512, (1, 2, 3))])
    assert tuning_for(LAYER, config).swap_ab_rows == 0


def test_lines_that_are_no_points_are_logged_and_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = keep(tmp_path, POINTS, "{", '{"gpu": 1}')
    with caplog.at_level(logging.WARNING):
        assert tuning_for(LAYER, config) == best_tuning(POINTS)
    assert [record.getMessage().split(" is left out")[0][-6:] for record in caplog.records] == [
        "line 5",
        "line 6",
    ]


def test_a_file_that_cannot_be_read_is_logged_and_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "tuned" / "fused_moe.jsonl").mkdir(parents=True)
    with caplog.at_level(logging.WARNING):
        assert tuning_for(LAYER, Config.resolve(cache_dir=str(tmp_path))) == DEFAULT
    assert "is left out" in caplog.text


def test_own_points_come_before_those_of_fanfold(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shipped = tmp_path / "shipped"
    shipped.mkdir()
    lines = [
        json.dumps(each.record()) + "\n" for each in (*POINTS, point(9, 9, (1, 2, 3), top_k=1))
    ]
    (shipped / "tuned.jsonl").write_text("".join(lines))
    monkeypatch.setattr(tuning.resources, "files", lambda package: shipped)
    own = point(64, 512, (1, 2, 3))
    nothing = Config.resolve(cache_dir=str(tmp_path / "none"))
    assert tuning_for(LAYER, nothing) == best_tuning(POINTS)
    (tmp_path / "own").mkdir()
    assert tuning_for(LAYER, keep(tmp_path / "own", [own])) == best_tuning([own])


def test_all_lines_that_come_with_fanfold_are_points() -> None:
    text = tuning.resources.files("fanfold.fused_moe").joinpath("tuned.jsonl").read_text()
    points = [TunedPoint.of(json.loads(line)) for line in text.splitlines()]
    assert len({(point.layer, point.tokens) for point in points}) == len(points) > 0


# ---- where it is asked for ----------------------------------------------------------------------


@pytest.mark.parametrize("number", [-1, 2**31, 1.5, True])
def test_numbers_out_of_bounds(number: object) -> None:
    for name in ("swap_ab_rows", "group_rows"):
        with pytest.raises(ArgumentError, match=name):
            FusedMoeTuning(**{name: number})


def test_the_cpu_has_one_form() -> None:
    sizes = {"num_experts": 2, "top_k": 1, "hidden": 128, "intermediate": 128, "max_tokens": 4}
    with fanfold.FusedMoE(**sizes, config=Config.resolve(backend="host", swap_ab_rows=3)) as moe:
        assert moe.tuning is None


def test_without_a_gpu_nothing_is_tuned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    file = tmp_path / "points.jsonl"
    sizes = ["--hidden", "128", "--intermediate", "128", "--tokens", "1", "--file", str(file)]
    assert main(["tune", "fused-moe", *sizes]) == 2
    assert "cuda" in capsys.readouterr().err
    assert file.read_text() == ""


def test_the_command_keeps_what_it_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FANFOLD_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr("fanfold.cli.tune.tune", lambda settings: POINTS[: len(settings.tokens)])
    assert main(["tune", "fused-moe", "--tokens", "64,512,1024,2048"]) == 0
    out = capsys.readouterr().out
    assert "swap_ab_rows=96" in out
    assert "GPU of tests" in out
    assert tuning_for(LAYER, Config.resolve()) == best_tuning(POINTS)
    assert main(["tune", "fused-moe", "--tokens", "8,x"]) == 2
