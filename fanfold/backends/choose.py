"""Decides where the calls of a group run: on the ranks' GPUs, or on the host, and says why.

Nothing else decides it. ``fanfold doctor`` prints the reason, and error messages quote it."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Literal

import torch

from fanfold.config import Config
from fanfold.errors import ArgumentError, UnavailableError
from fanfold.geometry import Mode, on_device
from fanfold.gpus import identity, lacking, unreachable_from
from fanfold.group import Group, agree
from fanfold.jit import nvrtc
from fanfold.memory.cuda import are_threads, unavailable
from fanfold.memory.hosts import host_identity

__all__ = ["LEAST_CAPABILITY", "BackendChoice", "choose"]

LEAST_CAPABILITY: dict[Mode, tuple[int, int]] = {
    "low_latency": (8, 0),
    "high_throughput": (9, 0),  # the first with the bulk copies that its kernels make
}
"""The lowest compute capability that the kernels of each mode run on."""

_LEAST = min(LEAST_CAPABILITY.values())


@dataclass(frozen=True)
class BackendChoice:
    """The backend chosen for this rank; all ranks have the same one.

    Attributes:
        backend: ``"host"`` or ``"cuda"``.
        device: where this rank's tensors must be.
        reason: why, in one line that error messages show.
        capability: the lowest compute capability of the ranks' GPUs; (0, 0) on the host.
        across_hosts: whether GPUs of several hosts were chosen.
    """

    backend: Literal["host", "cuda"]
    device: torch.device
    reason: str
    capability: tuple[int, int] = (0, 0)
    across_hosts: bool = False

    def supports(self, mode: Mode) -> bool:
        """Whether the kernels of ``mode`` run on the GPUs of all ranks."""
        return self.backend == "cuda" and self._lacking(mode) is None

    def for_mode(self, mode: Mode, config: Config) -> BackendChoice:
        """The choice for one mode: the host, where the mode's kernels do not run on these GPUs.

        Raises:
            UnavailableError: ``config.backend`` is ``"cuda"``, and they do not; on all ranks.
        """
        lacking = None if self.backend == "host" else self._lacking(mode)
        return self if lacking is None else self.on_host(lacking, config)

    def _lacking(self, mode: Mode) -> str | None:
        """Why the GPUs do not do for ``mode``, or None."""
        least = LEAST_CAPABILITY[mode]
        if self.capability >= least:
            return None
        needed, oldest = (".".join(map(str, pair)) for pair in (least, self.capability))
        return (
            f"{mode.replace('_', ' ')} needs compute capability {needed}, and the oldest GPU of "
            f"these ranks has {oldest}"
        )

    @staticmethod
    def on_host(obstacle: str, config: Config) -> BackendChoice:
        """The host, because of an obstacle on the GPU.

        Raises:
            UnavailableError: ``config.backend`` is ``"cuda"``.
        """
        if config.backend == "cuda":
            source = config.source_of("backend")
            raise UnavailableError(f"the setting backend is 'cuda' (from {source}), but {obstacle}")
        return BackendChoice("host", torch.device("cpu"), obstacle)

    def check_devices(self, **tensors: object) -> None:
        """Raises ArgumentError for the first tensor that is not on :attr:`device`; passes over
        arguments that are no tensors."""
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


def choose(
    group: Group, config: Config, mode: Mode = "low_latency", *, may_cross_hosts: bool = False
) -> BackendChoice:
    """Chooses the backend of ``mode`` for all ranks of ``group``. Collective.

    Looks at CUDA only where ``config.backend`` is not ``"host"``, and may initialise it then: call
    it in ranks, never in a process that is to fork.

    Args:
        group: the ranks.
        config: ``backend`` decides: ``"auto"`` takes the GPUs where every rank has a CUDA device of
            its own, or ``share_gpus`` says that several may have one, or ranks are threads that
            have one together, those of a host within each other's reach, and the mode's kernels can
            be compiled for it.
        mode: whose calls are to run.
        may_cross_hosts: whether the caller can have kernels send to ranks on other hosts. If not,
            or if ``"auto"`` finds ranks that are threads, ranks on several hosts run on the host.

    Raises:
        ArgumentError: the ranks' settings of ``backend``, ``share_gpus``, ``hosts`` or
            ``gpu_memory`` differ.
        UnavailableError: ``"cuda"`` was asked for and is not possible; says why. On all ranks.
    """
    agree(
        group,
        {
            "backend": config.backend,
            "share_gpus": config.share_gpus,
            "hosts": config.hosts,
            "gpu_memory": config.gpu_memory,
        },
    )
    setting = f"the setting backend is '{config.backend}' (from {config.source_of('backend')})"
    if config.backend == "host":
        return BackendChoice("host", torch.device("cpu"), setting)
    seats = group.all_gather(_look(group))
    obstacle, apart = _obstacle(seats, config.share_gpus), _apart(seats, config)
    as_threads = config.backend == "auto" and any(seat.process for seat in seats)
    if obstacle is None and apart is not None and (as_threads or not may_cross_hosts):
        whose = "kernels of ranks that are threads" if may_cross_hosts else "kernels"
        obstacle = f"{whose} do not reach across hosts, and {apart}"
    if obstacle is None:
        device = torch.device(seats[group.rank].device)
        is_shared = len({seat.identity for seat in seats}) < group.size
        has = "ranks share GPUs" if is_shared else "each rank has a GPU of its own"
        reason = f"{has}; this is this rank's"
        oldest = min(seat.capability for seat in seats)
        across = apart is not None
        chosen = BackendChoice("cuda", device, reason, oldest, across)
        return chosen.for_mode(mode, config)
    if config.backend == "cuda":
        raise UnavailableError(f"{setting}, but {obstacle}")
    return BackendChoice("host", torch.device("cpu"), obstacle)


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
    if capability < _LEAST:
        name = torch.cuda.get_device_name(device)
        least, actual = (".".join(map(str, pair)) for pair in (_LEAST, capability))
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
    owners: dict[str, int] = {}
    for rank, seat in enumerate(seats):
        owner = owners.setdefault(seat.identity, rank)
        if owner == rank or share or 0 != seat.process == seats[owner].process:
            continue
        if seats[owner].device == seat.device:
            return (
                f"rank {owner} and rank {rank} both have {seat.device} as current device; call "
                "torch.cuda.set_device(local_rank) first, or let ranks time-slice it, for "
                "tests (share_gpus=True, FANFOLD_SHARE_GPUS=1)"
            )
        return (
            f"rank {owner}'s {seats[owner].device} and rank {rank}'s {seat.device} are the same "
            f"GPU ({seat.identity}); give each rank a GPU of its own, or let them time-slice one, "
            "for tests (share_gpus=True, FANFOLD_SHARE_GPUS=1)"
        )
    for rank, seat in enumerate(seats):
        for far in seat.unreachable:
            if far in owners:
                return (
                    f"{seat.device} of rank {rank} has no peer access to the GPU of rank "
                    f"{owners[far]} (nvidia-smi topo -p2p r shows which have)"
                )
    return None


def _apart(seats: list[_Seat], config: Config) -> str | None:
    """Why these ranks are on several hosts, or None."""
    if min(config.hosts or 1, len(seats)) > 1:
        return f"hosts is {config.hosts} (from {config.source_of('hosts')})"
    for rank, seat in enumerate(seats):
        if seat.host != seats[0].host:
            return (
                f"rank {rank} and rank 0 are not processes of one user in one PID namespace of one "
                f"host ({seat.host} against {seats[0].host})"
            )
    return None
