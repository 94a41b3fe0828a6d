"""Where the ranks of a group run their calls: on their GPUs, or on the host, and why."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Literal

import torch

from fanfold.config import Config
from fanfold.errors import ArgumentError, UnavailableError
from fanfold.geometry import on_device
from fanfold.gpus import identity, lacking, unreachable_from
from fanfold.group import Group, agree
from fanfold.jit import nvrtc
from fanfold.symmetric import host_identity
from fanfold.symmetric_cuda import are_threads, unavailable

__all__ = ["LEAST_CAPABILITY", "Placement", "place"]

LEAST_CAPABILITY = (8, 0)
"""Of GPUs, for any kernel; high throughput needs more."""


@dataclass(frozen=True)
class Placement:
    """What was chosen for this rank; all ranks have the same backend.

    Attributes:
        backend: ``"host"`` or ``"cuda"``.
        device: where this rank's tensors must be.
        reason: why, in one line that error messages show.
        capability: the lowest compute capability of the ranks' GPUs; (0, 0) on the host.
    """

    backend: Literal["host", "cuda"]
    device: torch.device
    reason: str
    capability: tuple[int, int] = (0, 0)

    def check(self, **tensors: object) -> None:
        """Raises ArgumentError for the first tensor that is not on :attr:`device`; what is no
        tensor is left to others."""
        for name, tensor in tensors.items():
            if isinstance(tensor, torch.Tensor) and not on_device(tensor, self.device):
                raise ArgumentError(
                    f"{name}.device",
                    tensor.device,
                    f"{self.device}, where these ranks run this call ({self.reason})",
                )


@dataclass(frozen=True)
class _Seat:
    """What one rank says of itself.

    Attributes:
        host: whose memory and PID namespace it shares.
        device: its current device, such as ``"cuda:0"``; "" if it has none.
        identity: of that device, the same in all processes of a host.
        unreachable: identities of devices that it sees, but whose memory its device does not reach.
        lacking: why it cannot run on a GPU, or None.
        capability: of that device.
        process: that this rank is a thread of; 0 if it is a process of its own.
    """

    host: str
    device: str = ""
    identity: str = ""
    unreachable: tuple[str, ...] = ()
    lacking: str | None = None
    capability: tuple[int, int] = (0, 0)
    process: int = 0


def place(group: Group, config: Config) -> Placement:
    """Chooses for all ranks of ``group``. Collective.

    Looks at CUDA only where ``config.backend`` is not ``"host"``, and may initialise it then: call
    it in ranks, never in a process that is to fork.

    Args:
        group: the ranks.
        config: ``backend`` decides: ``"auto"`` takes the GPUs where every rank has a CUDA device of
            its own, or ``share_gpus`` says that several may have one, or ranks are threads that
            have one together, all on one host and within each other's reach, and kernels can be
            compiled for it.

    Raises:
        ArgumentError: the ranks' settings of ``backend`` or of ``share_gpus`` differ.
        UnavailableError: ``"cuda"`` was asked for and is not possible; says why. On all ranks.
    """
    agree(group, {"backend": config.backend, "share_gpus": config.share_gpus})
    setting = f"the setting backend is '{config.backend}' (from {config.source_of('backend')})"
    if config.backend == "host":
        return Placement("host", torch.device("cpu"), setting)
    seats = group.all_gather(_look(group))
    obstacle = _obstacle(seats, config.share_gpus)
    if obstacle is None:
        device = torch.device(seats[group.rank].device)
        is_shared = len({seat.identity for seat in seats}) < group.size
        has = "ranks share GPUs" if is_shared else "each rank has a GPU of its own"
        reason = f"{has}; this is this rank's"
        return Placement("cuda", device, reason, min(seat.capability for seat in seats))
    if config.backend == "cuda":
        raise UnavailableError(f"{setting}, but {obstacle}")
    return Placement("host", torch.device("cpu"), obstacle)


def _look(group: Group) -> _Seat:
    """This process's seat."""
    host = host_identity()
    obstacle = lacking() or unavailable(group)
    if obstacle is not None:
        return _Seat(host, lacking=obstacle)
    try:
        current = torch.cuda.current_device()
        capability = torch.cuda.get_device_capability(current)
        return _Seat(
            host,
            f"cuda:{current}",
            identity(current),
            unreachable_from(current),
            lacking=_no_kernels_for(current, capability),
            capability=capability,
            process=os.getpid() if are_threads(group) else 0,
        )
    except (RuntimeError, AssertionError) as failure:
        return _Seat(host, lacking=f"its CUDA device does not answer: {failure}")


def _no_kernels_for(device: int, capability: tuple[int, int]) -> str | None:
    """Why there can be no kernels for a device, or None; compiles nothing and opens no compiler."""
    if capability < LEAST_CAPABILITY:
        name = torch.cuda.get_device_name(device)
        least, actual = (".".join(map(str, pair)) for pair in (LEAST_CAPABILITY, capability))
        return f"kernels need compute capability {least}, and cuda:{device} ({name}) has {actual}"
    try:
        nvrtc.find()
    except UnavailableError as error:
        return str(error)
    return None


def _obstacle(seats: list[_Seat], share: bool) -> str | None:
    """What keeps these ranks from running on their GPUs, or None."""
    for rank, seat in enumerate(seats):
        if seat.lacking is not None:
            return f"rank {rank} cannot use a GPU: {seat.lacking}"
    for rank, seat in enumerate(seats):
        if seat.host != seats[0].host:
            return (
                f"rank {rank} and rank 0 are not processes of one user in one PID namespace of one "
                f"host ({seat.host} against {seats[0].host})"
            )
    owners: dict[str, int] = {}
    for rank, seat in enumerate(seats):
        owner = owners.setdefault(seat.identity, rank)
        if owner == rank or share or 0 != seat.process == seats[owner].process:
            continue
        if seats[owner].device == seat.device:
            return (
                f"rank {owner} and rank {rank} both have {seat.device} as current device; call "
                "torch.cuda.set_device(local_rank) first, or let ranks take turns on it, for "
                "tests (share_gpus=True, FANFOLD_SHARE_GPUS=1)"
            )
        return (
            f"rank {owner}'s {seats[owner].device} and rank {rank}'s {seat.device} are the same "
            f"GPU ({seat.identity}); give each rank a GPU of its own, or let them take turns, for "
            "tests (share_gpus=True, FANFOLD_SHARE_GPUS=1)"
        )
    for rank, seat in enumerate(seats):
        for far in seat.unreachable:
            if far in owners:
                return (
                    f"{seat.device} of rank {rank} has no peer access to the GPU of rank "
                    f"{owners[far]} (nvidia-smi topo -p2p r shows which have)"
                )
    return None
