"""The command line: a test of each kind starts it as users do, the others run it in place."""

from __future__ import annotations

import contextlib
import io
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from fanfold.cli.main import main
from tests.waiting import wait_until

pytestmark = pytest.mark.one_host  # the tests say themselves on how many hosts they run

FANFOLD = [sys.executable, "-m", "fanfold.cli.main"]
TINY = ["--ranks", "2", "--tokens", "16", "--hidden", "64", "--top-k", "2", "--experts", "4",
        "--iterations", "3", "--warmup", "1"]  # fmt: skip
BOUND_S = 90.0
PAUSE_S = 0.1  # to look through /proc takes about 10 ms

CLEARED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def environment(**changes):
    kept = {name: value for name, value in os.environ.items() if name not in CLEARED}
    return {**kept, "COLUMNS": "120", **changes}


def fanfold(*arguments, command=FANFOLD, **changes):
    return subprocess.run(
        [*command, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=BOUND_S,
        env=environment(**changes),
    )


def inside(*arguments, **changes):
    """The same in this process, which has imported what takes a new one seconds."""
    out, err = io.StringIO(), io.StringIO()
    with pytest.MonkeyPatch.context() as patch:
        for name in CLEARED:
            patch.delenv(name, raising=False)
        for name, value in {"COLUMNS": "120", **changes}.items():
            patch.setenv(name, value)
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = main([str(argument) for argument in arguments])
    return subprocess.CompletedProcess(arguments, code, out.getvalue(), err.getvalue())


def ranks_of(marker):
    """Processes with ``marker`` among their environment variables' text."""

    def marked(path):
        with contextlib.suppress(OSError):
            return marker.encode() in path.read_bytes()
        return False

    return [path for path in Path("/proc").glob("[0-9]*/environ") if marked(path)]


@pytest.mark.parametrize(
    ("run", "mode", "more"),
    [
        (fanfold, "low-latency", ["--baseline"]),
        (inside, "high-throughput", ["--dtype", "fp8", "--baseline"]),
    ],
)
def test_bench_checks_times_and_writes_a_line(tmp_path, run, mode, more):
    path = tmp_path / "results.jsonl"
    done = run("bench", mode, *TINY, *more, "--json", path)
    assert done.returncode == 0, done.stderr
    for word in ("dispatch", "combine", "baseline total", "GB/s", "times as long", "Checked"):
        assert word in done.stdout
    (line,) = path.read_text().splitlines()
    fields = json.loads(line)
    assert fields["mode"] == mode.replace("-", "_")
    assert (fields["backend"], fields["transport"], fields["hosts"]) == ("host", "shm", 1)
    assert (fields["ranks"], fields["tokens"], fields["hidden"]) == (2, 16, 64)
    assert (fields["top_k"], fields["experts"], fields["iterations"]) == (2, 4, 3)
    assert fields["checked"] is True
    assert 0 < fields["bytes_remote"] < fields["bytes_total"] <= 16 * 2 * 64 * 4
    for name in ("dispatch_us", "combine_us", "total_us", "baseline_total_us", "ratio"):
        assert fields[name] > 0
    assert fields["total_us"] <= fields["total_us_p90"] <= fields["total_us_p99"]


def test_bench_appends_and_plot_draws(tmp_path):
    path = tmp_path / "results.jsonl"
    path.write_text(json.dumps({"an": "earlier line"}) + "\n")
    done = inside("bench", "low-latency", *TINY, "--no-check", "--json", path)
    assert done.returncode == 0, done.stderr
    assert "NOT checked" in done.stdout
    first, second = path.read_text().splitlines()
    assert json.loads(first) == {"an": "earlier line"}
    assert json.loads(second)["checked"] is False
    pytest.importorskip("matplotlib")
    path.write_text(second)
    picture = tmp_path / "p.png"
    done = fanfold("plot", path, "--out", picture, DISPLAY="")
    assert done.returncode == 0, done.stderr
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_bench_joins_under_torchrun(tmp_path):
    path = tmp_path / "results.jsonl"
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone",
                "--nproc-per-node=2", "--no-python", *FANFOLD]  # fmt: skip
    options = [*TINY[2:], "--json", path]
    done = fanfold("bench", "low-latency", *options, command=torchrun)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("Checked against the oracle") == 1
    (line,) = path.read_text().splitlines()
    assert json.loads(line)["ranks"] == 2


@pytest.mark.long
def test_joined_ranks_refuse_another_number(tmp_path):
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone",
                "--nproc-per-node=2", "--no-python", *FANFOLD]  # fmt: skip
    done = fanfold("bench", "low-latency", "--ranks", 4, command=torchrun)
    assert done.returncode != 0
    assert done.stderr.count("ranks is 4, but must be 2, the ranks that were started") == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--ranks", "0"], "ranks is 0, but must be from 1 to"),
        (["--tokens", "few"], "--tokens: invalid int value: 'few'"),
        (["--json", "/nowhere/at/all"], "json is /nowhere/at/all"),
    ],
)
def test_bench_refuses_in_one_line(arguments, message):
    done = inside("bench", "high-throughput", *arguments, FANFOLD_TEST_MARK="refused")
    assert done.returncode == 2
    assert done.stdout == ""
    assert len(done.stderr.strip().splitlines()) == 1
    assert message in done.stderr
    assert ranks_of("FANFOLD_TEST_MARK=refused") == []


def test_interrupt_ends_everything():
    variable = f"FANFOLD_TEST_MARK=interrupted-{os.getpid()}"
    options = [*TINY, "--iterations", "1000000"]
    with subprocess.Popen(
        [*FANFOLD, "bench", "low-latency", *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(FANFOLD_TEST_MARK=variable.partition("=")[2]),
        # A shell that starts the tests in the background has them ignore it, and children inherit.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    ) as bench:
        # The command, the server, and its two ranks.
        wait_until(lambda: len(ranks_of(variable)) >= 4, "ranks started", pause_s=PAUSE_S)
        time.sleep(0.5)
        bench.send_signal(signal.SIGINT)
        _, errors = bench.communicate(timeout=BOUND_S)
    assert bench.returncode == 130
    assert "Traceback" not in errors
    wait_until(lambda: not ranks_of(variable), "everything ended", pause_s=PAUSE_S)


@pytest.mark.long
def test_malformed_settings_are_named():
    done = fanfold("bench", "low-latency", *TINY, FANFOLD_TIMEOUT_S="soon")
    assert done.returncode == 2
    assert "FANFOLD_TIMEOUT_S is 'soon'" in done.stderr.splitlines()[0]


def test_plot_refuses(tmp_path):
    missing = fanfold("plot", tmp_path / "none.jsonl")
    assert missing.returncode == 2
    assert "none.jsonl" in missing.stderr
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"mode": "low_latency"}\n')
    done = inside("plot", bad)
    assert done.returncode == 2
    assert "line 1: tokens is null" in done.stderr


def test_doctor_always_reports():
    done = fanfold("doctor")
    assert done.returncode == 0, done.stderr
    for word in ("torch", "memory", "NCCL", "libfabric"):
        assert word.lower() in done.stdout.lower()


def test_env_explains_every_setting():
    from fanfold.config import settings

    done = inside("env", FANFOLD_TIMEOUT_S="12.5")
    assert done.returncode == 0, done.stderr
    for setting in settings():
        assert setting.variable in done.stdout
    assert "12.5" in done.stdout
    assert "environment" in done.stdout


def test_env_with_a_malformed_variable_still_prints_the_rest():
    done = fanfold("env", FANFOLD_TIMEOUT_S="soon")
    assert done.returncode == 2
    assert "FANFOLD_TIMEOUT_S" in done.stdout + done.stderr
    assert "'soon'" in done.stdout + done.stderr
    assert "FANFOLD_STAGING_BYTES" in done.stdout
    assert "Traceback" not in done.stderr


def test_version_and_help():
    script = Path(sys.executable).with_name("fanfold")
    command = [str(script)] if script.exists() else FANFOLD
    assert fanfold("--version", command=command).stdout.startswith("fanfold 0.")
    shown = inside("--help")
    assert shown.returncode == 0
    for name in ("demo", "bench", "plot", "doctor", "env"):
        assert name in shown.stdout
    unknown = inside("bnech")
    assert unknown.returncode == 2
    assert len(unknown.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    "command",
    ["env", pytest.param("bench low-latency --ranks 1 --iterations 1", marks=pytest.mark.long)],
)
def test_a_full_disk_is_one_line(command: str) -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "fanfold.cli.main", *command.split()],
            stdout=full, stderr=subprocess.PIPE, text=True, timeout=60, check=False,
        )  # fmt: skip
    assert done.returncode == 2
    assert done.stderr == "fanfold: error: [Errno 28] No space left on device\n"


def test_results_on_a_full_disk_are_one_line() -> None:
    command = "bench low-latency --ranks 1 --tokens 2 --iterations 1 --json /dev/full"
    done = fanfold(*command.split())
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "No space left on device" in done.stderr


def test_a_malformed_variable_is_one_line() -> None:
    done = inside("bench", "low-latency", "--ranks", 2, FANFOLD_TIMEOUT_S="soon")
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "FANFOLD_TIMEOUT_S is 'soon'" in done.stderr
