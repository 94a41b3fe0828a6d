"""Joins ranks that torchrun, Open MPI's mpirun or SLURM's srun started."""

from __future__ import annotations

import os
import re
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist

from fanfold.descriptors import check_descriptors, for_joining
from fanfold.errors import ConfigError
from fanfold.launch.rank import take_local_device

__all__ = ["join"]


@dataclass(frozen=True)
class _Launcher:
    """The variables in which a launcher passes its place to each process."""

    name: str
    rank: str
    size: str
    jobs: tuple[str, ...]  # identify the job, so that all its ranks derive the same port
    local: tuple[str, str]  # the rank among those of its host, and their number
    hosts: str | None = None  # lists the hosts, rank 0's first


_LAUNCHERS = (
    _Launcher("torchrun", "RANK", "WORLD_SIZE", (), ("LOCAL_RANK", "LOCAL_WORLD_SIZE")),
    _Launcher(
        "Open MPI",
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid", "OMPI_MCA_orte_hnp_uri"),
        ("OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    ),
    # SLURM_NTASKS is also set in a batch script, which is one process; these only by srun.
    _Launcher(
        "SLURM",
        "SLURM_PROCID",
        "SLURM_STEP_NUM_TASKS",
        ("SLURM_JOB_ID", "SLURM_STEP_ID"),
        ("SLURM_LOCALID", "SLURM_NTASKS_PER_NODE"),
        "SLURM_STEP_NODELIST",
    ),
)


def join(timeout_s: float = 300.0) -> dist.ProcessGroup | None:
    """Joins the ranks that torchrun, Open MPI's mpirun or SLURM's srun started.

    Reads ``RANK`` and ``WORLD_SIZE``, ``OMPI_COMM_WORLD_RANK`` and ``_SIZE``, or ``SLURM_PROCID``
    and ``SLURM_STEP_NUM_TASKS``, whichever come first in this order. The rendezvous is at
    ``MASTER_ADDR`` and ``MASTER_PORT``. Under mpirun and srun both have defaults where the job's
    variables suffice: rank 0's host, and a port derived from the job's identity. A GPU becomes
    current as in a :class:`~fanfold.launch.RankPool`.

    Returns:
        The default ``torch.distributed`` group (gloo), made here or before; None if no launcher
        started this process. Keep it in a function, not in a global: PyTorch may abort a process
        that still holds a gloo group when the interpreter ends.

    Raises:
        ConfigError, SystemFailure: a malformed or missing variable; too few file descriptors.
    """
    if dist.is_initialized():
        return dist.group.WORLD
    environment = os.environ
    for launcher in _LAUNCHERS:
        if launcher.rank in environment and launcher.size in environment:
            break
    else:
        return None
    size = _integer(environment, launcher.size, 1, 1 << 20)
    rank = _integer(environment, launcher.rank, 0, size - 1)
    if launcher.name == "SLURM" and size == 1:
        return None  # an interactive shell, in which nothing was started
    address = environment.get("MASTER_ADDR", "") or _first_host(environment, launcher, size)
    if "MASTER_PORT" in environment:
        port = _integer(environment, "MASTER_PORT", 1, 65535)
    else:
        port = _derived_port(environment, launcher)
    check_descriptors(for_joining(size, rank), f"joining {size} ranks as rank {rank}")
    if all(name in environment for name in launcher.local):
        take_local_device(*(_integer(environment, name, 0, 1 << 20) for name in launcher.local))
    if address in ("127.0.0.1", "localhost", "::1"):
        environment.setdefault("GLOO_SOCKET_IFNAME", "lo")
    host = f"[{address}]" if ":" in address else address
    dist.init_process_group(
        "gloo",
        init_method=f"tcp://{host}:{port}",
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=timeout_s),
    )
    return dist.group.WORLD


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


def _first_host(environment: Mapping[str, str], launcher: _Launcher, size: int) -> str:
    """Rank 0's host, if the launcher's variables name it."""
    if environment.get("OMPI_COMM_WORLD_LOCAL_SIZE") == str(size):
        return "127.0.0.1"
    hosts = environment.get(launcher.hosts or "", "")
    # "node[07-09,12],other" or "node07,other": the first name.
    match = re.match(r"([^,\[]+)(?:\[(\w+)[^\]]*\]([^,]*))?", hosts)
    if match is None:
        raise ConfigError(
            f"{launcher.name} started this process ({launcher.rank} is set), but nothing says "
            "where rank 0 is: set MASTER_ADDR to its host"
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
