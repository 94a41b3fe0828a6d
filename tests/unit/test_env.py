"""`fanfold env` shows every setting whatever the environment holds, and says what is malformed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from fanfold.cli.env import explain
from fanfold.config import settings

PROGRAM = """
import argparse, sys
from fanfold.cli import env
parser = argparse.ArgumentParser()
env.add_arguments(parser)
sys.exit(env.run(parser.parse_args()))
"""


def run_env(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    clean = {name: text for name, text in os.environ.items() if not name.startswith("FANFOLD_")}
    return subprocess.run(
        [sys.executable, "-c", PROGRAM, *arguments],
        env=clean | variables, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip


def test_every_setting_with_its_default() -> None:
    done = run_env()
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    for setting in settings():
        [line] = [line for line in lines if line.split()[:1] == [setting.name]]
        shown = "auto" if setting.default is None else str(setting.default)
        assert line.split() == [setting.name, shown, "default", setting.variable]
        assert " ".join(setting.help.split()) in " ".join(done.stdout.split())


def test_malformed_ones_do_not_hide_the_rest() -> None:
    done = run_env(
        FANFOLD_TIMEOUT_S="soon", FANFOLD_LATE_PEERS="mask", FANFOLD_STAGING_BYTES="1"
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (2, "")
    lines = done.stdout.splitlines()
    rows = {line.split()[0]: line.split()[1:3] for line in lines if not line.startswith(" ")}
    assert rows == {
        "timeout_s": ["malformed", "environment"],
        "spin_us": ["auto", "default"],
        "late_peers": ["mask", "environment"],
        "staging_bytes": ["malformed", "environment"],
        "ring_bytes": ["16777216", "default"],
        "backend": ["auto", "default"],
        "share_gpus": ["False", "default"],
        "hosts": ["auto", "default"],
        "network": ["libfabric", "default"],
        "network_memory": ["auto", "default"],
        "gpu_memory": ["torch", "default"],
        "proxy_threads": ["auto", "default"],
        "cache_dir": ["auto", "default"],
        "ctas": ["auto", "default"],
        "senders": ["auto", "default"],
        "dispatch_transfer": ["auto", "default"],
        "few_tokens": ["256", "default"],
        "ranges": ["False", "default"],
        "fast_accumulation": ["False", "default"],
        "swap_ab_rows": ["auto", "default"],
        "group_rows": ["auto", "default"],
    }
    errors = [line for line in lines if line.startswith("    error: ")]
    assert len(errors) == 2
    assert "FANFOLD_TIMEOUT_S" in errors[0]
    assert "'soon'" in errors[0]
    assert "FANFOLD_STAGING_BYTES" in errors[1]


def test_json() -> None:
    done = run_env("--json", FANFOLD_SPIN_US="7", FANFOLD_TIMEOUT_S="")
    assert done.returncode == 2
    rows = {row["name"]: row for row in json.loads(done.stdout)["settings"]}
    assert list(rows) == [setting.name for setting in settings()]
    assert rows["spin_us"]["value"] == 7.0
    assert rows["spin_us"]["source"] == "environment"
    assert rows["spin_us"]["error"] is None
    assert rows["timeout_s"]["value"] is None
    assert "FANFOLD_TIMEOUT_S" in rows["timeout_s"]["error"]
    assert rows["late_peers"]["value"] == "raise"
    assert all(rows[setting.name]["help"] == setting.help for setting in settings())


def test_misspelt_variables() -> None:
    done = run_env(FANFOLD_TIMEOUT="5", FANFOLD_COLOUR="red")
    assert (done.returncode, done.stderr) == (2, "")
    assert done.stdout.splitlines()[-2:] == [
        "error: FANFOLD_COLOUR is in the environment, but is no setting",
        "error: FANFOLD_TIMEOUT is in the environment, but is no setting; FANFOLD_TIMEOUT_S is one",
    ]
    done = run_env("--json", FANFOLD_TIMEOUT="5")
    assert done.returncode == 2
    assert json.loads(done.stdout)["unknown"] == {"FANFOLD_TIMEOUT": "FANFOLD_TIMEOUT_S"}


def test_needs_neither_torch_nor_rich() -> None:
    program = "import sys; sys.modules['torch'] = sys.modules['rich'] = None\n" + PROGRAM
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_explain_never_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    for setting in settings():
        monkeypatch.setenv(setting.variable, "\udcff")
    assert all(row.error for row in explain())


def test_the_guide_explains_every_setting() -> None:
    text = (Path(__file__).parents[2] / "docs" / "tuning.md").read_text()
    rows = [line.split("|")[1:-1] for line in text.splitlines() if line.startswith("| `")]
    explained = {row[0].strip(" `"): row[1:] for row in rows}
    for setting in settings():
        default, *sentences = explained.pop(setting.name)
        assert all(sentence.strip() for sentence in sentences)
        shown = {None: "auto", False: "0"}.get(setting.default, str(setting.default))
        if setting.name.endswith("_bytes"):
            shown = f"{int(str(setting.default)) >> 20} MiB"
        assert default.strip(" `") == shown.removesuffix(".0")
    assert not explained, "what is no setting"
