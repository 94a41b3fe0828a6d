"""``fanfold demo``: a short run through its real entry point, and its check, which must be able to
fail."""

from __future__ import annotations

import argparse
import functools
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from fanfold import functional
from fanfold.backends.choose import BackendChoice
from fanfold.cli import demo, demo_model, demo_report
from fanfold.cli.demo_model import (
    Decoding,
    DemoSettings,
    RankRun,
    Training,
    decode,
    train_plain,
    train_rank,
)
from fanfold.cli.demo_report import (
    TOLERANCE,
    WINDOW,
    DemoReport,
    ProgressLine,
    compare,
    compare_gradients,
)
from fanfold.cli.main import main
from fanfold.errors import ArgumentError

SMALL = DemoSettings(
    ranks=2, steps=30, layers=2, hidden=48, intermediate=32, num_experts=8, context=32, warmup=5
)


def run_demo(*options: object) -> subprocess.CompletedProcess[str]:
    script = Path(sys.executable).parent / "fanfold"
    return subprocess.run(
        [script, "demo", *map(str, options)], capture_output=True, text=True, timeout=400
    )


def check_figures(path: Path, ranks: int, steps: int) -> dict[str, object]:
    (line,) = path.read_text().splitlines()
    figures = json.loads(line)
    assert figures["passed"]
    assert figures["settings"]["ranks"] == ranks
    assert len(figures["losses"]) == len(figures["plain_losses"]) == steps
    assert figures["dispatch_bytes"] == figures["combine_bytes"] > 0
    assert figures["dispatch_ms_per_step"] > 0
    for row in figures["expert_load"]:
        assert sum(row) == pytest.approx(len(row))
    return figures


def test_demo_trains_checks_itself_and_draws(tmp_path):
    done = run_demo(
        "--ranks", 2, "--steps", 6, "--out", tmp_path / "a.png", "--json", tmp_path / "a.jsonl"
    )
    assert done.returncode == 0, done.stderr
    for word in (
        "tokens/s",
        "dispatch",
        "combine",
        "moved",
        "load",
        "check     passed",
        "a.png",
        "the two loss curves differ by at most",
        "backend   high throughput: host (",
    ):
        assert word in done.stdout
    assert "low latency (decoding)" not in done.stdout
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    check_figures(tmp_path / "a.jsonl", ranks=2, steps=6)


@pytest.mark.long
@pytest.mark.timeout(500)
def test_the_whole_demo_learns(tmp_path):
    done = run_demo("--out", tmp_path / "a.png", "--json", tmp_path / "a.jsonl")
    assert done.returncode == 0, done.stderr + done.stdout
    figures = check_figures(tmp_path / "a.jsonl", ranks=4, steps=DemoSettings().steps)
    assert 5.4 < figures["losses"][0] < 5.7  # ln 256 = 5.55: nothing known
    assert sum(figures["losses"][-10:]) / 10 < 2.6


def train(group: dist.ProcessGroup, broken: str) -> Training:
    """One rank of a small training, with one gradient of the library broken. The optimizer is the
    one that a GPU gets, which refuses experts and other parameters in one group."""
    original = functional._Dispatch.backward

    def backward(ctx: object, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        _, grad_x, _, grad_weights, _ = original(ctx, *gradients)
        if broken == "tokens":
            grad_x = torch.zeros_like(grad_x)
        elif broken == "weights":
            grad_weights = torch.zeros_like(grad_weights)
        return None, grad_x, None, grad_weights, None

    adam = functools.partial(torch.optim.Adam, foreach=True)
    with (
        mock.patch.object(functional._Dispatch, "backward", staticmethod(backward)),
        mock.patch.object(torch.optim, "Adam", adam),
    ):
        return train_rank(group, SMALL, lambda step, loss: None).training


def train_alone(group: dist.ProcessGroup) -> Training:
    del group
    return train_plain(SMALL, lambda step, loss: None)


@pytest.fixture(scope="module")
def alone(pools) -> Training:
    (training,) = pools(1).run(train_alone)
    return training


@pytest.mark.parametrize("broken", ["nothing", "tokens", "weights"])
def test_the_check_tells_a_broken_gradient(pools, alone, broken):
    runs = pools(2).run(train, broken)
    losses = [sum(pair) / 2 for pair in zip(*(run.losses for run in runs), strict=True)]
    assert losses[-1] < losses[0] - 1
    curves = compare(losses, alone.losses)
    gradients = compare_gradients([run.gradients for run in runs], alone.gradients)
    if broken == "nothing":
        assert curves.passed, str(curves)
        assert gradients.passed, str(gradients)
    else:
        assert not gradients.passed, str(gradients)
        assert "FAILED" in str(gradients)


def decode_on_the_host(group: dist.ProcessGroup, broken: bool) -> tuple[Decoding, bool]:
    """What GPUs do after the training, here with a model that has learnt nothing."""
    choice = BackendChoice("host", torch.device("cpu"), "a test")
    with demo_model._open(SMALL, group) as ep:
        model = demo_model._parallel_model(SMALL, ep)
        if broken:
            weigh = functional._combine

            def unweighted(ep, y, received, weights, bias):
                return weigh(ep, y, received, None if ep.mode == "low_latency" else weights, bias)

            with mock.patch.object(functional, "_combine", unweighted):
                decoding = decode(model, SMALL, group, choice)
        else:
            decoding = decode(model, SMALL, group, choice)
        return decoding, all(moe.dispatcher is ep for moe in model.layers)


@pytest.mark.parametrize("broken", [False, True])
def test_decoding_agrees_with_the_mode_of_the_training(pools, broken):
    results = pools(2).run(decode_on_the_host, broken)
    for decoding, restored in results:
        assert decoding.backend == "host"
        assert restored
        assert 5.0 < decoding.training_loss < 6.0
        assert decoding.seconds_per_byte > 0
        assert len(decoding.text) > SMALL.prompt
        same = abs(decoding.loss - decoding.training_loss) < 1e-3
        assert same != broken
    assert results[0][0].text[: SMALL.prompt] != results[1][0].text[: SMALL.prompt]


@pytest.mark.parametrize(
    ("loss", "backend", "passed"),
    [(2.0, "cuda", True), (2.03, "host", False), (float("nan"), "cuda", False)],
)
def test_the_report_of_a_run_on_gpus(capsys, loss, backend, passed):
    decoding = Decoding("cuda", loss, 2.01, "If the\nname", 0.0015)
    report = small_report(
        device="cuda:0", reason="each has one", backend=backend, decoding=decoding
    )
    report.print()
    out = capsys.readouterr().out
    assert f"high throughput (training): {backend}" in out
    assert ("to and from the ranks' GPUs" in out) is (backend == "host")
    assert "low latency (decoding): cuda" in out
    assert r"'If the\nname', 1.5 ms per byte" in out
    assert ("passed: on one batch" in out) is passed
    assert report.passed is passed
    figures = report.figures()
    assert figures["backends"] == {"high_throughput": backend, "low_latency": "cuda"}
    assert figures["device"] == "cuda:0"
    json.dumps(figures)


@pytest.mark.gpu
@pytest.mark.timeout(500)
def test_the_demo_on_gpus(tmp_path):
    if torch.cuda.device_count() == 0:
        pytest.skip("no GPU")
    done = run_demo("--steps", 30, "--out", tmp_path / "a.png", "--json", tmp_path / "a.jsonl")
    assert done.returncode == 0, done.stderr + done.stdout
    assert "low latency (decoding): cuda" in done.stdout
    (line,) = (tmp_path / "a.jsonl").read_text().splitlines()
    figures = json.loads(line)
    assert figures["passed"]
    assert figures["device"] == "cuda:0"
    # As everything in tests/gpu it needs GPUs that have both modes' kernels.
    assert figures["backends"] == {"high_throughput": "cuda", "low_latency": "cuda"}
    assert figures["decoding_difference"] <= TOLERANCE


def test_compare_says_where_curves_part():
    curve = [5.0 - 0.01 * step for step in range(100)]
    assert compare(curve, curve).passed
    jump = 1.01 * TOLERANCE
    parted = [loss + jump * (step >= 50) for step, loss in enumerate(curve)]
    comparison = compare(parted, curve)
    assert not comparison.passed
    assert "FAILED: the two loss curves part at step 70" in str(comparison)
    assert comparison.parted_at == 50 + WINDOW  # the first window that lies in the jump as a whole
    assert comparison.largest == pytest.approx(jump)
    assert compare([loss + 0.9 * TOLERANCE for loss in curve], curve).passed
    assert not compare([*curve[:-1], float("nan")], curve).passed
    assert compare(curve[:3], curve[:3]).passed


def arguments(tmp_path: Path, *options: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    demo.add_arguments(parser)
    return parser.parse_args(["--out", str(tmp_path / "demo.png"), *options])


@pytest.mark.parametrize(
    ("backend", "share", "gpus", "usable", "ranks"),
    [
        ("auto", "0", 0, False, 4),
        ("auto", "0", 1, True, 1),
        ("auto", "0", 3, True, 2),
        ("auto", "0", 3, False, 4),
        ("cuda", "0", 4, True, 4),
        ("auto", "0", 8, True, 4),
        ("auto", "1", 1, True, 4),
        ("host", "0", 1, True, 4),
    ],
)
def test_ranks_by_default(tmp_path, monkeypatch, backend, share, gpus, usable, ranks):
    monkeypatch.setattr(demo, "launch", lambda function, ranks: [usable] * ranks)
    monkeypatch.setenv("FANFOLD_BACKEND", backend)
    monkeypatch.setenv("FANFOLD_SHARE_GPUS", share)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    assert demo._settings(arguments(tmp_path)).ranks == ranks
    assert demo._settings(arguments(tmp_path, "--ranks", "2")).ranks == 2


def test_a_check_that_fails_is_the_exit_code(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(demo_report, "TOLERANCE", -1.0)
    assert demo.run(arguments(tmp_path, "--ranks", "1", "--steps", "2")) == 1
    assert "FAILED: the two loss curves part at step 2" in capsys.readouterr().out


def dies(group: dist.ProcessGroup, settings: DemoSettings) -> RankRun:
    if dist.get_rank(group) == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return train_rank(group, settings, lambda step, loss: None)


def test_a_rank_that_dies_ends_the_demo(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(demo, "_train_rank", dies)
    options = ["--ranks", "2", "--steps", "500", "--out", str(tmp_path / "demo.png")]
    assert main(["demo", *options]) == 2
    assert "rank 1 was killed by signal 9" in capsys.readouterr().err
    assert not (tmp_path / "demo.png").exists()


@pytest.mark.parametrize(
    ("options", "argument"),
    [
        (["--ranks", "3"], "--ranks"),
        (["--ranks", "0"], "--ranks"),
        (["--steps", "0"], "--steps"),
        (["--seed", "-1"], "--seed"),
        (["--seed", "9" * 30], "--seed"),
        (["--out", "no/such/folder/demo.png"], "--out"),
        (["--out", "demo.xyz"], "--out"),
        (["--out", "/"], "--out"),
        (["--json", "/"], "--json"),
        (["--json", "no/such/folder/demo.jsonl"], "--json"),
    ],
)
def test_options_out_of_bounds_are_refused_before_anything_starts(tmp_path, options, argument):
    with pytest.raises(ArgumentError) as caught:
        demo.run(arguments(tmp_path, *options))
    assert caught.value.argument == argument


def small_report(**more: object) -> DemoReport:
    settings = DemoSettings(ranks=2, steps=3, layers=2, num_experts=4)
    rows = torch.ones((3, 2, 2), dtype=torch.int64)
    training = Training([3.0, 2.0, 1.0], {"w": torch.ones(2)}, 1.0)
    run = RankRun(training, 0.1, 0.1, 1000, 1000, rows, **more)
    return DemoReport(settings, [run, run], training)


def test_the_picture_is_where_the_demo_says(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    demo._draw(small_report(), tmp_path / "picture")
    assert capsys.readouterr().out == f"picture   {tmp_path / 'picture'}\n"
    assert list(tmp_path.iterdir()) == [tmp_path / "picture"]


def test_without_matplotlib_only_the_picture_is_missing(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    small_report().print()
    demo._draw(small_report(), tmp_path / "demo.png")
    out = capsys.readouterr().out
    assert "check     passed" in out
    assert "pip install 'fanfold[plot]'" in out
    assert not (tmp_path / "demo.png").exists()


def test_progress_is_a_bar_on_a_terminal_and_a_few_lines_elsewhere(monkeypatch, capsys):
    with ProgressLine("training", 100) as progress:
        for step in range(100):
            progress(step + 1, 1.0)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 5
    assert lines[-1].startswith("training: step 100 of 100, loss 1.000")
    monkeypatch.setenv("FORCE_COLOR", "1")
    with ProgressLine("training", 100) as progress:
        progress(100, 2.5)
    out = capsys.readouterr().out
    assert "100/100" in out
    assert "loss 2.500" in out
