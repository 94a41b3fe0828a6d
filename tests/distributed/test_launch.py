"""Ranks start, answer, fail and disappear as they should."""

from __future__ import annotations

import multiprocessing
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from fanfold.errors import ArgumentError, ConfigError, PeerRefused, PeerTimeout, UsageError
from fanfold.launch import LaunchError, RankFailure, RankPool, join, launch
from tests.waiting import wait_until

pytestmark = pytest.mark.one_host  # pools know nothing of hosts

BOUND_S = 30.0


def whoami(group, *args):
    return dist.get_rank(group), dist.get_world_size(group), args


def shared_sum(group, value):
    tensor = torch.tensor([value + dist.get_rank(group)])
    dist.all_reduce(tensor, group=group)
    return int(tensor)


def give_tensors(group):
    rank = dist.get_rank(group)
    return {
        dtype: torch.full((3,), rank + 1.0).to(dtype)
        for dtype in (torch.bfloat16, torch.float8_e4m3fn, torch.int64)
    }


def facts(group):
    return os.environ.get("FANFOLD_TEST_FACT"), torch.get_num_threads(), str(Path.cwd())


def preloaded(group):
    return {"fanfold.launch.server", "fanfold.nn"} <= sys.modules.keys()


def refuse(group, culprit):
    if dist.get_rank(group) == culprit:
        raise ArgumentError("x.dtype", "float16", "bfloat16")
    raise PeerRefused(dist.get_rank(group), culprit, "dispatch", "x.dtype is wrong")


def time_out(group):
    raise PeerTimeout(dist.get_rank(group), 1, "combine", 5, 4, 1.5, False)


def die(group, culprit, number):
    if dist.get_rank(group) == culprit:
        os.kill(os.getpid(), number)
    return "alive"


def leave(group, culprit, code=7):
    if dist.get_rank(group) == culprit:
        os._exit(code)
    time.sleep(3600)


def sleep(group, seconds):
    time.sleep(seconds)
    return os.getpid()


def unpicklable(group):
    return lambda: None


def start_process(group):
    process = multiprocessing.get_context("fork").Process(target=sys.exit, args=(3,))
    process.start()
    process.join(BOUND_S)
    return process.exitcode


def raise_local(group):
    class LocalError(Exception):
        pass

    raise LocalError("cannot travel as itself")


def exists(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.mark.parametrize("ranks", [1, 2, 5])
def test_every_rank_runs_and_answers_in_order(ranks):
    assert launch(whoami, ranks, ("a", 2)) == [(r, ranks, ("a", 2)) for r in range(ranks)]


def test_pool_runs_many_calls_over_one_group():
    with RankPool(3) as pool:
        assert len(set(pool.pids)) == 3
        for value in range(20):
            assert pool.run(shared_sum, value) == [3 * value + 3] * 3
        assert pool.run_each(whoami, [("a",), (), ("b", "c")]) == [
            (0, 3, ("a",)),
            (1, 3, ()),
            (2, 3, ("b", "c")),
        ]
    with pytest.raises(UsageError, match="closed"):
        pool.run(whoami)


def test_tensors_of_every_dtype_travel():
    for rank, tensors in enumerate(launch(give_tensors, 2)):
        for dtype, tensor in tensors.items():
            assert tensor.dtype == dtype
            assert tensor.float().tolist() == [rank + 1.0] * 3


def test_ranks_see_the_environment_of_the_call(monkeypatch, tmp_path):
    for value in ("first", "second"):
        monkeypatch.setenv("FANFOLD_TEST_FACT", value)
        monkeypatch.chdir(tmp_path)
        assert launch(facts, 2) == [(value, 1, str(tmp_path))] * 2


def test_the_server_has_imported_what_ranks_need():
    assert launch(preloaded, 1) == [True]


def test_exception_of_a_rank_is_raised_and_the_pool_goes_on():
    with RankPool(3) as pool:
        with pytest.raises(ArgumentError, match=r"x\.dtype is float16") as caught:
            pool.run(refuse, 2)
        assert caught.value.argument == "x.dtype"
        assert isinstance(caught.value.__cause__, LaunchError)
        assert caught.value.__cause__.rank == 2
        assert "test_launch.py" in str(caught.value.__cause__)
        assert pool.run(whoami) == [(r, 3, ()) for r in range(3)]
        outcomes = pool.outcomes(refuse, 1)
        assert [type(outcome.error) for outcome in outcomes] == [
            PeerRefused,
            ArgumentError,
            PeerRefused,
        ]
        assert outcomes[2].error.peer == 1


def test_exceptions_keep_their_fields():
    with RankPool(1) as pool, pytest.raises(PeerTimeout) as caught:
        pool.run(time_out)
    assert (caught.value.phase, caught.value.expected, caught.value.seconds) == ("combine", 5, 1.5)


def test_what_cannot_travel_says_so():
    with RankPool(1) as pool:
        with pytest.raises(Exception, match="pickle"):
            pool.run(unpicklable)
        with pytest.raises(RuntimeError, match="LocalError: cannot travel"):
            pool.run(raise_local)
        assert pool.run(whoami) == [(0, 1, ())]


def test_launch_names_the_rank_that_raised():
    with pytest.raises(LaunchError) as caught:
        launch(refuse, 3, (1,))
    assert caught.value.rank == 1
    assert isinstance(caught.value.__cause__, ArgumentError)
    assert str(caught.value).startswith("rank 1 raised ArgumentError: x.dtype is float16")


def test_launch_kills_the_others_when_a_rank_dies():
    began = time.monotonic()
    with pytest.raises(LaunchError) as caught:
        launch(leave, 3, (1,))
    assert time.monotonic() - began < BOUND_S
    assert (caught.value.rank, caught.value.exitcode) == (1, 7)


def test_an_exit_code_is_reported_as_it_is():
    """Also 255, which multiprocessing reports of a process whose server has died."""
    with RankPool(1) as pool:
        assert pool.outcomes(leave, 0, 255)[0].exitcode == 255


def test_ranks_may_start_processes():
    assert launch(start_process, 2) == [3, 3]


def test_launch_is_bounded():
    with pytest.raises(LaunchError, match=r"rank 0 did not finish in 1\.5 s"):
        launch(sleep, 2, (3600,), timeout_s=1.5)


def test_a_pool_may_last_for_years():
    with RankPool(1, timeout_s=1e8) as pool:
        assert pool.run(whoami)


def test_a_pool_whose_ranks_were_late_is_closed():
    with RankPool(2, timeout_s=1.5) as pool:
        with pytest.raises(LaunchError, match="did not finish"):
            pool.run(sleep, 3600)
        assert not pool.alive
        with pytest.raises(UsageError, match="closed"):
            pool.run(whoami)


def test_dead_rank_is_found_and_named():
    with RankPool(3) as pool:
        assert pool.alive
        outcomes = pool.outcomes(die, 1, signal.SIGKILL)
        assert not pool.alive
        assert [outcomes[0], outcomes[2]] == ["alive", "alive"]
        assert isinstance(outcomes[1], RankFailure)
        assert outcomes[1].exitcode == -signal.SIGKILL
        with pytest.raises(LaunchError, match=r"rank 1 was killed by signal 9 \(SIGKILL\)"):
            pool.run(whoami)


def test_signals_reach_a_rank():
    with RankPool(2) as pool:
        pool.kill(1, signal.SIGSTOP)
        pool.submit(whoami, [(), ()])
        with pytest.raises(UsageError, match="running a call"):
            pool.run(whoami)
        pool.kill(1, signal.SIGCONT)
        assert pool.collect() == [(0, 2, ()), (1, 2, ())]
        pool.kill(0)
        with pytest.raises(LaunchError, match="rank 0"):
            pool.run(whoami)


def test_nothing_is_left_when_a_pool_closes():
    with RankPool(3) as pool:
        pids = pool.pids
        pool.kill(1, signal.SIGSTOP)
    wait_until(lambda: not any(exists(pid) for pid in pids), "ranks gone")


@pytest.mark.parametrize("ranks", [0, -1, 2.0, True, 5000])
def test_number_of_ranks_is_checked(ranks):
    with pytest.raises(ArgumentError, match="ranks is"):
        launch(whoami, ranks)


PARENT = """
import os, signal, sys, time
from fanfold.launch import RankPool

def nap(group, seconds):
    time.sleep(seconds)

if __name__ == "__main__":
    with RankPool(3) as pool:
        pool.submit(nap, [(3600,)] * 3)
        print(*pool.pids, flush=True)
        pool.kill(1, signal.SIGSTOP)
        print("ready", flush=True)
        pool.collect()
"""


@pytest.mark.parametrize(
    "number", [signal.SIGKILL, pytest.param(signal.SIGINT, marks=pytest.mark.long)]
)
def test_nothing_is_left_when_the_parent_is_killed(tmp_path, number):
    script = tmp_path / "parent.py"
    script.write_text(PARENT)
    with tempfile.TemporaryDirectory() as temporary:  # a short path
        _kill_parent(script, Path(temporary), number)


def _kill_parent(script, temporary, number):
    environment = {**os.environ, "TMPDIR": str(temporary)}
    with subprocess.Popen(
        [sys.executable, str(script)],
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
        # A shell that starts the tests in the background has them ignore it, and children inherit.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    ) as parent:
        pids = [int(word) for word in parent.stdout.readline().split()]
        servers = {int(Path(f"/proc/{p}/stat").read_text().rpartition(")")[2].split()[1])
                   for p in pids}  # fmt: skip
        assert parent.stdout.readline() == "ready\n"
        assert all(exists(pid) for pid in [*pids, *servers])
        parent.send_signal(number)
        parent.wait(BOUND_S)
    wait_until(lambda: not any(exists(pid) for pid in [*pids, *servers]), "all gone")
    assert list(temporary.iterdir()) == []


def test_a_long_temporary_folder_is_an_error(tmp_path):
    script, temporary = tmp_path / "parent.py", tmp_path / ("long" * 20)
    script.write_text(PARENT)
    temporary.mkdir()
    done = subprocess.run(
        [sys.executable, str(script)],
        env={**os.environ, "TMPDIR": str(temporary)},
        capture_output=True,
        text=True,
        timeout=BOUND_S,
        check=False,
    )
    assert done.returncode != 0
    assert "set TMPDIR to a shorter one" in done.stderr


@pytest.mark.skipif(sys.version_info < (3, 11), reason="Python has no safe path before 3.11")
def test_files_of_the_current_folder_are_no_modules(tmp_path):
    """Unless the program itself would import them from there: its main module is elsewhere."""
    (tmp_path / "queue.py").write_text("raise RuntimeError('a file of the current folder')")
    bench = ("bench", "low-latency", "--ranks", "2", "--iterations", "1", "--tokens", "4")
    done = subprocess.run(
        [Path(sys.executable).with_name("fanfold"), *bench],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=BOUND_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "a file of the current folder" not in done.stderr


LEFT_OPEN = """
import os, sys
from fanfold.launch import RankPool

def say(group, text):
    os.write(1, text.encode())
    return os.getpid()

if __name__ == "__main__":
    first = RankPool(1)
    first.run(say, "first")
    os.dup2(os.open(sys.argv[1], os.O_WRONLY | os.O_CREAT), 1)
    second = RankPool(1)
    print(*first.pids, *second.run(say, "second"), file=sys.stderr)
    child = os.fork()
    if child == 0:
        sys.exit()
    os.waitpid(child, 0)
    assert first.alive and second.alive
"""


def test_a_program_may_leave_pools_open(tmp_path):
    """It ends soon, and so do the ranks; a forked child that ends first leaves them alone."""
    script = tmp_path / "left_open.py"
    script.write_text(LEFT_OPEN)
    done = subprocess.run(
        [sys.executable, str(script), str(tmp_path / "output")],
        capture_output=True, text=True, timeout=90,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr  # from 3.12 on, Python warns of the fork
    pids = done.stderr.splitlines()[0]
    assert not any(exists(int(pid)) for pid in pids.split())
    # Ranks write to the standard output that the program had when they started.
    assert (done.stdout, (tmp_path / "output").read_text()) == ("first", "second")


SERVER_KILLED = """
import os, signal, sys, time
from fanfold.launch import LaunchError, RankPool
from tests.distributed.test_launch import exists

def parent(group):
    return os.getppid()

def nap(group):
    os.kill(os.getppid(), 0)
    signal.pause()

if __name__ == "__main__":
    with RankPool(2) as pool:
        (server, _) = pool.run(parent)
        print(*pool.pids, flush=True)
        pool.submit(nap, [(), ()])
        os.kill(server, signal.SIGKILL)
        try:
            print(*pool.collect(), sep="; ", flush=True)
            while any(exists(pid) for pid in pool.pids):  # the pool is still open
                time.sleep(0.01)
            pool.run(parent)
        except LaunchError as error:
            print(error.exitcode, flush=True)
    with RankPool(1) as pool:
        print(pool.run(parent) != [server], flush=True)  # a new server starts by itself
"""


def test_ranks_die_with_the_server(tmp_path):
    script = tmp_path / "server_killed.py"
    script.write_text(SERVER_KILLED)
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, timeout=90,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
    )  # fmt: skip
    pids, outcomes, exitcode, again = done.stdout.splitlines()
    assert outcomes.count("was killed by signal 9") == 2, done.stderr
    assert (exitcode, again) == (str(-signal.SIGKILL), "True")
    wait_until(lambda: not any(exists(int(pid)) for pid in pids.split()), "ranks gone")


UNGUARDED = """
from fanfold.launch import launch

def f(group):
    return 1

launch(f, 2)
"""


def test_an_unguarded_main_module_does_not_multiply(tmp_path):
    script = tmp_path / "unguarded.py"
    script.write_text(UNGUARDED)
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, timeout=BOUND_S
    )
    assert done.returncode != 0
    assert "if __name__" in done.stderr


JOINER = """
import torch, torch.distributed as dist
from fanfold.launch import join

def main():
    group = join()
    total = torch.ones(1)
    dist.all_reduce(total)
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    print(f"joined {rank} of {ranks} sum {int(total)}", flush=True)

main()
dist.destroy_process_group()
"""

CLEARED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "GLOO_SOCKET_IFNAME")


def clean_environment():
    return {
        name: value
        for name, value in os.environ.items()
        if name not in CLEARED and not name.startswith(("OMPI_", "SLURM_", "PMIX_"))
    }


def join_as(group, variables):
    dist.destroy_process_group()
    os.environ.update(variables)
    joined = join()
    total = torch.ones(1)
    dist.all_reduce(total, group=joined)
    return dist.get_rank(joined), dist.get_world_size(joined), int(total), joined is join()


def open_mpi(rank):
    return {
        "OMPI_COMM_WORLD_RANK": str(rank),
        "OMPI_COMM_WORLD_SIZE": "2",
        "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
        "PMIX_NAMESPACE": f"prterun-{os.getpid()}@1",
    }


def slurm(rank):
    return {
        "SLURM_PROCID": str(rank),
        "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_JOB_ID": str(os.getpid()),
        "SLURM_STEP_ID": "0",
        "SLURM_STEP_NODELIST": "localhost",
    }


@pytest.mark.parametrize("variables_of", [open_mpi, slurm])
def test_join_reads_the_launchers_variables(monkeypatch, variables_of):
    for name in set(os.environ) - set(clean_environment()):
        monkeypatch.delenv(name)
    with RankPool(2) as pool:
        results = pool.run_each(join_as, [(variables_of(rank),) for rank in range(2)])
    assert results == [(0, 2, 2, True), (1, 2, 2, True)]


def test_join_under_torchrun(tmp_path):
    script = tmp_path / "joiner.py"
    script.write_text(JOINER)
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2",
         str(script)],
        env=clean_environment(), capture_output=True, text=True, timeout=90,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = re.findall(r"joined (\d) of 2 sum 2", done.stdout)
    assert sorted(found) == ["0", "1"], done.stdout


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"RANK": "two", "WORLD_SIZE": "4"}, "RANK is 'two'"),
        ({"RANK": "4", "WORLD_SIZE": "4"}, "RANK is '4', but must be an integer from 0 to 3"),
        ({"RANK": "0", "WORLD_SIZE": "0"}, "WORLD_SIZE is '0'"),
        ({"RANK": "0", "WORLD_SIZE": "2"}, "MASTER_ADDR"),
        ({"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}, "MASTER_PORT"),
        ({"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2"}, "Open MPI.*MASTER_ADDR"),
    ],
)
def test_join_names_a_malformed_or_missing_variable(monkeypatch, variables, message):
    for name in set(os.environ) - set(clean_environment()):
        monkeypatch.delenv(name)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=message):
        join()


def test_join_without_a_launcher(monkeypatch):
    for name in set(os.environ) - set(clean_environment()):
        monkeypatch.delenv(name)
    assert join() is None
    # What an interactive shell under SLURM has started nothing.
    monkeypatch.setenv("SLURM_PROCID", "0")
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "1")
    assert join() is None
