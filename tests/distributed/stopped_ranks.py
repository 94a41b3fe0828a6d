"""Answers of ranks of which one is stopped and answers nothing."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fanfold.group import Group, as_group
from fanfold.launch import RankPool

__all__ = ["await_files", "collect_with_one_stopped", "reporting"]


def reporting(group: Group, folder: Path, function: Callable[..., object], *args: object) -> object:
    """``function(group, *args)``; its end is reported in ``folder``."""
    outcome = function(group, *args)
    (folder / f"done {as_group(group).rank}").touch()
    return outcome


def await_files(folder: Path, pattern: str, count: int) -> None:
    """Returns when so many files are there, or much later."""
    deadline = time.monotonic() + 40.0
    while len(list(folder.glob(pattern))) < count and time.monotonic() < deadline:
        time.sleep(0.005)


def collect_with_one_stopped(pool: RankPool, folder: Path, culprit: int) -> list[Any]:
    """Outcomes of :func:`reporting`; the culprit is killed when the others have answered, because a
    stopped process answers nothing."""
    await_files(folder, "done *", len(pool.pids) - 1)
    pool.kill(culprit, signal.SIGKILL)
    return pool.collect()
