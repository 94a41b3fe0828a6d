"""The end of a process waits for memories that threads still close."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

CLOSES_LATE = """
import multiprocessing, pathlib, sys, time
from fanfold.memory import closing

core_closed = []

class Core:
    def close(self):
        time.sleep(0.3)
        core_closed.append(True)

class Rows:
    def close(self):
        assert core_closed  # no network has them any more
        pathlib.Path(sys.argv[1]).touch()

def drop():
    closing.wait_at_exit()
    closing.close_in_a_thread(Core(), Rows())
    assert not pathlib.Path(sys.argv[1]).exists()

"""
PLAIN = "drop()"
FORKED = """
closing.wait_at_exit()
rank = multiprocessing.get_context("fork").Process(target=drop)
rank.start()
rank.join()
assert rank.exitcode == 0
"""


@pytest.mark.parametrize("end", [PLAIN, FORKED], ids=["plain", "multiprocessing"])
def test_the_end_of_a_process_waits(tmp_path: Path, end: str) -> None:
    closed = tmp_path / "closed"
    program = [sys.executable, "-c", CLOSES_LATE + end, str(closed)]
    subprocess.run(program, check=True, timeout=100)
    assert closed.exists()
