"""The variables in which launchers pass a rank its place."""

from __future__ import annotations

import pytest

from fanfold.errors import ConfigError
from fanfold.launch.environment import Place, place_in

MASTER = {"MASTER_ADDR": "node7", "MASTER_PORT": "29500"}
TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    **MASTER,
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "5",
    "OMPI_COMM_WORLD_SIZE": "8",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
}
PMI = {"PMI_RANK": "5", "PMI_SIZE": "8", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "4"}
SLURM = {
    "SLURM_PROCID": "5",
    "SLURM_NTASKS": "8",
    "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_STEP_TASKS_PER_NODE": "4(x2)",
    "SLURM_JOB_ID": "4711",
    "SLURM_STEP_ID": "0",
    "SLURM_JOB_NODELIST": "node[07-09,12]",
}


def without(variables: dict[str, str], *names: str) -> dict[str, str]:
    return {name: value for name, value in variables.items() if name not in names}


@pytest.mark.parametrize(
    ("launcher", "variables"),
    [("torchrun", TORCHRUN), ("Open MPI", OPEN_MPI), ("MPI (PMI)", PMI), ("SLURM", SLURM)],
)
def test_a_place(launcher: str, variables: dict[str, str]) -> None:
    place = place_in({**variables, **MASTER})
    assert place == Place(launcher, 5, 8, (1, 4), "node7", 29500)


def test_without_a_launcher() -> None:
    assert place_in({}) is None
    assert place_in(MASTER) is None


def test_slurm_names_the_host_and_the_port() -> None:
    place = place_in(SLURM)
    assert place is not None
    assert place.address == "node07"
    assert place_in(SLURM) == place
    other = place_in({**SLURM, "SLURM_JOB_ID": "4712"})
    assert other is not None
    assert other.port != place.port
    # The nodes of a step may be fewer than those of its job.
    step = place_in({**SLURM, "SLURM_STEP_NODELIST": "node12,other"})
    assert step is not None
    assert step.address == "node12"


def test_a_step_of_slurm_without_a_size_of_its_own() -> None:
    place = place_in(without(SLURM, "SLURM_STEP_NUM_TASKS"))
    assert place is not None
    assert (place.rank, place.size) == (5, 8)


@pytest.mark.parametrize(
    "variables",
    [
        # A batch script, an allocation without a step, and an interactive shell.
        without(SLURM, "SLURM_STEP_NUM_TASKS", "SLURM_STEP_ID"),
        without(SLURM, "SLURM_STEP_NUM_TASKS", "SLURM_STEP_ID", "SLURM_PROCID"),
        {**SLURM, "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"},
    ],
)
def test_one_process_under_slurm_is_no_rank(variables: dict[str, str]) -> None:
    assert place_in(variables) is None


@pytest.mark.parametrize(
    ("tasks", "node", "local"),
    [("4(x2)", "1", (1, 4)), ("2(x3),1", "3", (1, 1)), ("3,5", "1", (1, 5)), ("?", "0", None)],
)
def test_slurm_tasks_of_a_node(tasks: str, node: str, local: tuple[int, int] | None) -> None:
    place = place_in({**SLURM, "SLURM_STEP_TASKS_PER_NODE": tasks, "SLURM_NODEID": node})
    assert place is not None
    assert place.local == local


def test_a_step_that_is_spread_more_thinly_than_its_job() -> None:
    # sbatch --ntasks-per-node=2, and in it srun -N2 -n2.
    step = {"SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "1(x2)", "SLURM_PROCID": "1",
            "SLURM_NODEID": "1", "SLURM_LOCALID": "0", "SLURM_NTASKS_PER_NODE": "2"}  # fmt: skip
    place = place_in({**SLURM, **step})
    assert place is not None
    assert (place.rank, place.size, place.local) == (1, 2, (0, 1))
    assert place.address == "node07"


def test_half_of_another_launcher_is_left_out() -> None:
    # A batch script exports MASTER_ADDR and WORLD_SIZE; srun starts the ranks.
    place = place_in({**SLURM, **MASTER, "WORLD_SIZE": "8"})
    assert place is not None
    assert (place.launcher, place.rank, place.size) == ("SLURM", 5, 8)
    assert place.address == MASTER["MASTER_ADDR"]


def test_a_single_process_of_mpi_is_no_rank() -> None:
    assert place_in({"PMI_RANK": "0", "PMI_SIZE": "1"}) is None


def test_the_launcher_inside_comes_first() -> None:
    """torchrun in a step of SLURM's, and Intel MPI's mpirun, whose proxies are such a step."""
    place = place_in({**SLURM, **TORCHRUN})
    assert place is not None
    assert place.launcher == "torchrun"
    proxies = {**SLURM, "SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2"}
    place = place_in({**proxies, **PMI, **MASTER})
    assert place is not None
    assert (place.launcher, place.rank, place.size) == ("MPI (PMI)", 5, 8)
    # srun --mpi=pmi2 sets both alike; SLURM's name the hosts.
    place = place_in({**SLURM, **PMI})
    assert place is not None
    assert (place.launcher, place.address) == ("SLURM", "node07")


def test_ranks_of_one_host_meet_there() -> None:
    job = {"PMIX_NAMESPACE": "prterun-1@1"}
    place = place_in({**OPEN_MPI, **job, "OMPI_COMM_WORLD_LOCAL_SIZE": "8"})
    assert place is not None
    assert place.address == "127.0.0.1"


@pytest.mark.parametrize("variables", [TORCHRUN, OPEN_MPI, PMI, SLURM])
def test_half_a_place_is_an_error(variables: dict[str, str]) -> None:
    rank, size = list(variables)[:2]
    sizes = [name for name in variables if name in (size, "SLURM_STEP_NUM_TASKS")]
    with pytest.raises(ConfigError, match=rf"{rank} is '5', but {sizes[-1]} is missing"):
        place_in({**without(variables, *sizes), **MASTER})
    with pytest.raises(ConfigError, match=rf"{sizes[-1]} is '8', but {rank} is missing"):
        place_in({**without(variables, rank), **MASTER})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"RANK": "two"}, "RANK is 'two'"),
        ({"RANK": "8"}, "RANK is '8', but must be an integer from 0 to 7"),
        ({"WORLD_SIZE": "0"}, "WORLD_SIZE is '0'"),
        ({"LOCAL_RANK": "-1"}, "LOCAL_RANK is '-1'"),
        ({"MASTER_PORT": "70000"}, "MASTER_PORT is '70000'"),
    ],
)
def test_a_malformed_variable_is_named(changes: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        place_in({**TORCHRUN, **changes})


@pytest.mark.parametrize("variables", [without(TORCHRUN, "MASTER_ADDR"), OPEN_MPI, PMI])
def test_a_missing_address_is_asked_for(variables: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match="set MASTER_ADDR"):
        place_in(variables)
    with pytest.raises(ConfigError, match="MASTER_PORT is missing"):
        place_in({**without(variables, "MASTER_PORT"), "MASTER_ADDR": "node7"})
