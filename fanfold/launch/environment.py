"""A rank's place among the ranks of its job, as launchers pass it in the environment.

Nothing here reads the environment or changes anything: :func:`place_in` is a pure function.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Mapping
from dataclasses import dataclass

from fanfold.errors import ConfigError

__all__ = ["Place", "place_in"]


@dataclass(frozen=True)
class Place:
    """A rank's place, and where all ranks meet.

    Attributes:
        launcher: what started the ranks, for messages.
        rank, size: of the job.
        local: the rank among those of its host, and their number; None if not known.
        address, port: of the rendezvous, which rank 0 serves.
    """

    launcher: str
    rank: int
    size: int
    local: tuple[int, int] | None
    address: str
    port: int


@dataclass(frozen=True)
class _Launcher:
    """The variables in which a launcher passes its place to each process. Of several names for one
    thing the first that is set counts."""

    name: str
    rank: str
    size: tuple[str, ...]
    local_rank: str
    local_size: str
    jobs: tuple[str, ...] = ()  # identify the job, so that all its ranks derive the same port
    hosts: tuple[str, ...] = ()  # list the hosts, rank 0's first
    step: str = ""  # set only in a process that the launcher started, though others may be


_PMI = _Launcher("MPI (PMI)", "PMI_RANK", ("PMI_SIZE",), "MPI_LOCALRANKID", "MPI_LOCALNRANKS")
# A batch script has SLURM_PROCID and SLURM_NTASKS, too, but is one process and no step.
_SLURM = _Launcher(
    "SLURM",
    "SLURM_PROCID",
    ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"),
    "SLURM_LOCALID",
    "SLURM_NTASKS_PER_NODE",
    ("SLURM_JOB_ID", "SLURM_STEP_ID"),
    ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST"),
    "SLURM_STEP_ID",
)
_LAUNCHERS = (
    _Launcher("torchrun", "RANK", ("WORLD_SIZE",), "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    _Launcher(
        "Open MPI",
        "OMPI_COMM_WORLD_RANK",
        ("OMPI_COMM_WORLD_SIZE",),
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
        ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid", "OMPI_MCA_orte_hnp_uri"),
    ),
    _PMI,
    _SLURM,
)


def place_in(environment: Mapping[str, str]) -> Place | None:
    """The place that the variables of ``environment`` give; None if no launcher set any.

    Where several launchers did, the first of torchrun, Open MPI, PMI and SLURM counts that set both
    the rank and the number of ranks: a batch script may export some of another one's.

    Raises:
        ConfigError: a variable is malformed, or one is missing beside others that are set.
    """
    started = [each for each in _LAUNCHERS if _started(environment, each)]
    if not started:
        return None
    launcher = next((each for each in started if _complete(environment, each)), started[0])
    if launcher is _PMI and _same_place(environment, _PMI, _SLURM):
        launcher = _SLURM  # srun --mpi=pmi2 sets both, and SLURM's variables name the hosts
    size_name = _size_name(environment, launcher)
    for missing, given in ((launcher.rank, size_name), (size_name, launcher.rank)):
        if missing not in environment:
            raise ConfigError(
                f"environment variable {given} is {environment.get(given)!r}, but {missing} is "
                f"missing: {launcher.name} sets both; set both, or neither for a single process"
            )
    size = _integer(environment, size_name, 1, 1 << 20)
    rank = _integer(environment, launcher.rank, 0, size - 1)
    if launcher in (_PMI, _SLURM) and size == 1 and "MASTER_ADDR" not in environment:
        return None  # an interactive shell, or a single process
    local = _local(environment, launcher)
    if address := environment.get("MASTER_ADDR", ""):
        pass
    elif _on_one_host(environment, launcher, size, local):
        address = "127.0.0.1"
    else:
        address = _first_host(environment, launcher)
    if "MASTER_PORT" in environment:
        port = _integer(environment, "MASTER_PORT", 1, 65535)
    else:
        port = _derived_port(environment, launcher)
    return Place(launcher.name, rank, size, local, address, port)


def _started(environment: Mapping[str, str], launcher: _Launcher) -> bool:
    """Whether any variable of the launcher is set."""
    if launcher.step:
        return launcher.step in environment or launcher.size[0] in environment
    return any(name in environment for name in (launcher.rank, *launcher.size))


def _complete(environment: Mapping[str, str], launcher: _Launcher) -> bool:
    return launcher.rank in environment and _size_name(environment, launcher) in environment


def _integer(environment: Mapping[str, str], name: str, low: int, high: int) -> int:
    text = environment[name]
    try:
        value = int(text)
    except ValueError:
        value = low - 1
    if not low <= value <= high:
        raise ConfigError(
            f"environment variable {name} is {text!r}, but must be an integer from {low} to {high}"
        )
    return value


def _size_name(environment: Mapping[str, str], launcher: _Launcher) -> str:
    """The variable of the job's size."""
    return next((name for name in launcher.size if name in environment), launcher.size[0])


def _same_place(environment: Mapping[str, str], one: _Launcher, other: _Launcher) -> bool:
    """Whether both launchers give the same rank and size. An mpirun within a step of SLURM's starts
    ranks of its own, and then they do not."""
    return _started(environment, other) and all(
        environment.get(a) == environment.get(b)
        for a, b in (
            (one.rank, other.rank),
            (_size_name(environment, one), _size_name(environment, other)),
        )
    )


def _local(environment: Mapping[str, str], launcher: _Launcher) -> tuple[int, int] | None:
    """The rank among those of its host, and their number."""
    if launcher.local_rank not in environment:
        return None
    local_rank = _integer(environment, launcher.local_rank, 0, 1 << 20)
    # The variable of SLURM that names a number of tasks may be of the job, of which this is a step.
    if launcher is _SLURM and (tasks := _tasks_of_nodes(environment)):
        return local_rank, tasks[_integer(environment, "SLURM_NODEID", 0, len(tasks) - 1)]
    if launcher.local_size not in environment:
        return None
    return local_rank, _integer(environment, launcher.local_size, 1, 1 << 20)


def _on_one_host(
    environment: Mapping[str, str], launcher: _Launcher, size: int, local: tuple[int, int] | None
) -> bool:
    if launcher is not _SLURM and environment.get(launcher.local_size) == str(size):
        return True
    return local is not None and local[1] == size


def _tasks_of_nodes(environment: Mapping[str, str]) -> list[int]:
    """The tasks of each node of a step of SLURM, in order; empty if they are not known."""
    counts = environment.get("SLURM_STEP_TASKS_PER_NODE", "")  # "2(x3),1"
    if "SLURM_NODEID" not in environment:
        return []
    if not re.fullmatch(r"\d+(\(x\d+\))?(,\d+(\(x\d+\))?)*", counts):
        return []
    tasks: list[int] = []
    for part in counts.split(","):
        count, _, times = part.rstrip(")").partition("(x")
        tasks += [int(count)] * int(times or 1)
    return tasks


def _first_host(environment: Mapping[str, str], launcher: _Launcher) -> str:
    """Rank 0's host, if the launcher's variables name it."""
    hosts = next((environment[name] for name in launcher.hosts if environment.get(name)), "")
    # "node[07-09,12],other" or "node07,other": the first name.
    match = re.match(r"([^,\[]+)(?:\[(\w+)[^\]]*\]([^,]*))?", hosts)
    if match is None:
        raise ConfigError(
            f"{launcher.name} started this process ({launcher.rank} is set), but no variable "
            "names rank 0's host: set MASTER_ADDR to its host"
        )
    return "".join(part or "" for part in match.groups())


def _derived_port(environment: Mapping[str, str], launcher: _Launcher) -> int:
    """A port that is the same on all ranks of a job and rarely that of another job."""
    job = ":".join(environment.get(name, "") for name in launcher.jobs)
    if not job.strip(":"):
        raise ConfigError(
            f"{launcher.name} started this process ({launcher.rank} is set), but MASTER_PORT is "
            "missing: set it to a free port of rank 0's host"
        )
    return 20000 + zlib.crc32(job.encode()) % 12000
