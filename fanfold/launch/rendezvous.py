"""Joins ranks that torchrun, an MPI's mpirun or SLURM's srun started."""

from __future__ import annotations

import os
from datetime import timedelta

import torch.distributed as dist

from fanfold.descriptors import check_descriptors, for_joining
from fanfold.interfaces import default_interface, interface_towards
from fanfold.launch.environment import place_in
from fanfold.launch.rank import take_local_device

__all__ = ["join"]


def join(timeout_s: float = 300.0) -> dist.ProcessGroup | None:
    """Joins the ranks that torchrun, an MPI's mpirun or SLURM's srun started.

    Reads ``RANK`` and ``WORLD_SIZE``, ``OMPI_COMM_WORLD_RANK`` and ``_SIZE``, ``PMI_RANK`` and
    ``PMI_SIZE``, or ``SLURM_PROCID`` and ``SLURM_STEP_NUM_TASKS`` (``SLURM_NTASKS``), whichever
    come first in this order. The rendezvous is at ``MASTER_ADDR`` and ``MASTER_PORT``. Under Open
    MPI and SLURM both have defaults where the job's variables suffice: rank 0's host, and a port
    derived from the job's identity. gloo takes the interface through which this host reaches
    ``MASTER_ADDR``, unless ``GLOO_SOCKET_IFNAME`` names another. A GPU becomes current as in a
    :class:`~fanfold.launch.RankPool`.

    Returns:
        The default ``torch.distributed`` group (gloo), made here or before; None if no launcher
        started this process. Keep it in a function, not in a global: PyTorch may abort a process
        that still holds a gloo group when the interpreter ends.

    Raises:
        ConfigError, SystemFailure: a malformed or missing variable; too few file descriptors.
    """
    if dist.is_initialized():
        return dist.group.WORLD
    place = place_in(os.environ)
    if place is None:
        return None
    rank, size, address = place.rank, place.size, place.address
    check_descriptors(for_joining(size, rank), f"joining {size} ranks as rank {rank}")
    if place.local is not None:
        take_local_device(*place.local)
    _name_interface(address)
    host = f"[{address}]" if ":" in address else address
    dist.init_process_group(
        "gloo",
        init_method=f"tcp://{host}:{place.port}",
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=timeout_s),
    )
    return dist.group.WORLD


def _name_interface(address: str) -> None:
    """Has gloo take the interface that reaches the rendezvous. By itself gloo takes the address of
    the host's own name, which may be one of loopback (127.0.1.1 on Debian) or none at all."""
    if address in ("127.0.0.1", "localhost", "::1"):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    # Rank 0's host may know itself by an address of loopback.
    elif name := interface_towards(address) or default_interface():
        os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
