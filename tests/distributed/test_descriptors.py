"""With few file descriptors everything ends soon, with an error that says what to raise."""

from __future__ import annotations

import os
import re
import resource
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import pytest
import torch.distributed as dist

import fanfold
from fanfold.bench.dispatchers import open_dispatcher
from fanfold.errors import SystemFailure
from fanfold.launch import RankPool

BOUND_S = 25.0
ADVICE = r"file descriptors.*limit of \d+.*`ulimit -n \d+`"
TINY = ["--tokens", "4", "--hidden", "64", "--top-k", "2", "--experts", "32", "--iterations", "2"]


def limited(limit: int, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Python with these arguments, which may have ``limit`` file descriptors."""
    return subprocess.run(
        ["bash", "-c", f'ulimit -n {limit}; exec "$0" "$@"', sys.executable, *arguments],
        env=os.environ | variables, stdin=subprocess.DEVNULL,
        capture_output=True, text=True, timeout=BOUND_S, check=False,
    )  # fmt: skip


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("limit", "ranks"),
    [
        (8, 4),
        (27, 4),
        (56, 16),
        *(pytest.param(*few, marks=pytest.mark.long)
          for few in ((12, 4), (14, 4), (20, 4), (40, 16), (90, 32))),
    ],
)  # fmt: skip
def test_a_bench_ends_in_one_line(limit: int, ranks: int) -> None:
    bench = ["-m", "fanfold.cli.main", "bench", "low-latency", "--ranks", str(ranks)]
    done = limited(limit, *bench, *TINY)
    assert (done.returncode, done.stdout) == (2, "")
    assert len(done.stderr.splitlines()) == 1, done.stderr
    assert re.search(rf"{ranks} ranks.*{ADVICE}", done.stderr)
    assert f"limit of {limit}" in done.stderr


@pytest.mark.timeout(60)
def test_a_bench_with_enough_runs() -> None:
    bench = ["-m", "fanfold.cli.main", "bench", "low-latency", "--ranks", "16"]
    done = limited(96, *bench, *TINY)
    assert done.returncode == 0, done.stderr


@pytest.mark.timeout(60)
@pytest.mark.parametrize("limit", [10, pytest.param(15, marks=pytest.mark.long), 18])
def test_a_rank_of_a_launcher_ends_in_one_line(limit: int) -> None:
    place = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29517"}
    done = limited(limit, "-m", "fanfold.cli.main", "bench", "low-latency", *TINY, **place)
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1, done.stderr
    assert re.search(ADVICE, done.stderr)


def test_a_compiler_without_descriptors_says_what_to_raise() -> None:
    done = limited(9, "-m", "fanfold.cli.main", "jit", "warm", "--hidden", "256", "--jobs", "2")
    assert done.returncode == 2
    assert re.search(r"Too many open files.*limit of 9.*`ulimit -n \d+`", done.stderr)


PROGRAM = """
    import resource
    from fanfold.launch import RankPool

    def work(group):
        return resource.getrlimit(resource.RLIMIT_NOFILE)[0]

    if __name__ == "__main__":
        with RankPool(1) as pool:
            print(pool.run(work))
        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (200, most))
        with RankPool(8) as pool:  # too many for the limit of before
            print(pool.run(work) == [200] * 8)
"""


@pytest.mark.timeout(60)
def test_ranks_have_the_limit_that_the_program_has_now(tmp_path) -> None:
    (tmp_path / "program.py").write_text(textwrap.dedent(PROGRAM))
    command = f"ulimit -Sn 32; exec {sys.executable} {tmp_path / 'program.py'}"
    done = subprocess.run(
        ["bash", "-c", command], capture_output=True, text=True, timeout=BOUND_S, check=False
    )
    assert (done.returncode, done.stdout) == (0, "[32]\nTrue\n"), done.stderr


def open_with(
    group: dist.ProcessGroup, mode: Literal["low_latency", "high_throughput"], spare: int
) -> str:
    """What comes of a dispatcher where rank 1 has few file descriptors left."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if dist.get_rank(group) == 1:
        used = len(list(Path("/proc/self/fd").iterdir())) - 1
        resource.setrlimit(resource.RLIMIT_NOFILE, (used + spare, hard))
    try:
        open_dispatcher(mode, group, num_experts=8, top_k=2, hidden=64, max_tokens=4).close()
    except (fanfold.FanfoldError, OSError) as error:
        return f"{type(error).__name__}: {error}"
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return "open"


@pytest.mark.parametrize("mode", ["low_latency", "high_throughput"])
@pytest.mark.parametrize("spare", [0, 1, 2, 3])
def test_construction(pools: Callable[[int], RankPool], mode: str, spare: int) -> None:
    first, second, *_ = pools(4).run(open_with, mode, spare)
    assert second.startswith(SystemFailure.__name__)
    assert re.search(ADVICE, second)
    assert "rank 1 failed: " in first
    assert pools(4).run(open_with, mode, 50) == ["open"] * 4
