"""What programs import from ``deep_ep.utils.envs``: process groups, seeds, and speeds of links.

>>> from fanfold.deep_ep.utils.envs import EnvOverride
>>> with EnvOverride([("FANFOLD_TIMEOUT_S", "20", True)]):
...     pass  # the variable is set here, and as it was behind
"""

from __future__ import annotations

import logging
import os
import random
import re
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import torch
import torch.distributed as dist

from fanfold.deep_ep.buffer import get_logical_domain_size, get_physical_domain_size
from fanfold.errors import UsageError

__all__ = [
    "EnvOverride",
    "check_torch_deterministic",
    "dist_print",
    "get_global_seed",
    "get_local_seed",
    "get_logical_domain_size",
    "get_nvlink_gbs",
    "get_physical_domain_size",
    "get_rdma_gbs",
    "init_dist",
    "init_seed",
]

_LOG = logging.getLogger("fanfold.deep_ep")

_ADDRESS, _PORT = "127.0.0.1", 8361
_INFINIBAND = Path("/sys/class/infiniband")
_COMMAND_S = 20.0


class EnvOverride:
    """Sets environment variables while a ``with`` statement lasts.

    Args:
        envs: names, values, and whether to set them.
    """

    def __init__(self, envs: Iterable[tuple[str, str, bool]]) -> None:
        self.envs = {name: value for name, value, enabled in envs if enabled}
        self._before: dict[str, str | None] = {}

    def __enter__(self) -> EnvOverride:
        self._before = {name: os.environ.get(name) for name in self.envs}
        os.environ.update(self.envs)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for name, value in self._before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@dataclass
class _Started:
    """What :func:`init_dist` and :func:`init_seed` were given last."""

    local_rank: int | None = None
    local_seed: int = 0
    global_seed: int = 0


_started = _Started()


def init_dist(
    local_rank: int, num_local_ranks: int, seed: int = 0
) -> tuple[int, int, dist.ProcessGroup]:
    """Starts torch.distributed as DeepEP's programs do: over NCCL on GPUs, over Gloo without.

    The variables MASTER_ADDR and MASTER_PORT say where (default ``127.0.0.1:8361``), and, unlike
    with torchrun, WORLD_SIZE is the number of hosts and RANK that of this host (default 1 and 0).
    bfloat16 becomes PyTorch's default dtype and the GPU ``local_rank`` its default device.

    Args:
        local_rank: of this process on its host, from 0.
        num_local_ranks: on each host.
        seed: for :func:`init_seed`.

    Returns:
        The rank, the number of ranks, and a new group of all of them.

    Raises:
        UsageError: torch.distributed has been started already.
    """
    if dist.is_initialized():
        raise UsageError(
            f"init_dist({local_rank}, {num_local_ranks}) starts torch.distributed, and this "
            "process has started it already; call it once, or pass Buffer the group that there is"
        )
    gpu = torch.device("cuda", local_rank) if torch.cuda.is_available() else None
    if gpu is not None:
        torch.cuda.set_device(gpu)
        torch.set_default_device(gpu)
    torch.set_default_dtype(torch.bfloat16)
    address, port = os.environ.get("MASTER_ADDR", _ADDRESS), os.environ.get("MASTER_PORT", _PORT)
    hosts, host = int(os.environ.get("WORLD_SIZE", 1)), int(os.environ.get("RANK", 0))
    dist.init_process_group(
        "gloo" if gpu is None else "nccl",
        init_method=f"tcp://{address}:{port}",
        world_size=hosts * num_local_ranks,
        rank=host * num_local_ranks + local_rank,
        device_id=gpu,
    )
    _started.local_rank = local_rank
    init_seed(seed)
    group = dist.new_group(list(range(hosts * num_local_ranks)))
    assert isinstance(group, dist.ProcessGroup)  # every rank is in it
    return dist.get_rank(), dist.get_world_size(), group


def init_seed(global_seed: int) -> None:
    """Seeds PyTorch and :mod:`random` with ``global_seed`` + this process's rank."""
    _started.global_seed = global_seed
    _started.local_seed = global_seed + dist.get_rank()
    torch.manual_seed(_started.local_seed)
    random.seed(_started.local_seed)


def get_local_seed() -> int:
    """The seed of this rank: the last ``init_seed``'s + the rank; 0 without one."""
    return _started.local_seed


def get_global_seed() -> int:
    """The last :func:`init_seed`'s seed; 0 without one."""
    return _started.global_seed


def dist_print(s: str = "", once_in_node: bool = False) -> None:
    """Prints ``s``, then waits for all ranks. Collective; after :func:`init_dist`.

    Args:
        s: a line.
        once_in_node: only the first rank of each host prints.

    Raises:
        UsageError: there was no :func:`init_dist`.
    """
    if _started.local_rank is None:
        raise UsageError("dist_print needs the rank on its host: call init_dist first")
    if not once_in_node or _started.local_rank == 0:
        print(s, flush=True)
    dist.barrier()


def check_torch_deterministic() -> None:
    """Refuses that PyTorch fills new memory, as it does if deterministic algorithms are asked for:
    DeepEP's programs rely on it, and every output of a call then costs one kernel more.

    Raises:
        UsageError: it does.
    """
    fills = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    if torch.are_deterministic_algorithms_enabled() and fills:
        raise UsageError(
            "PyTorch fills uninitialised memory (torch.use_deterministic_algorithms(True)); set "
            "torch.utils.deterministic.fill_uninitialized_memory = False"
        )


def get_nvlink_gbs(factor: float = 0.9) -> float:
    """GB/s of all NVLinks of the first GPU that ``nvidia-smi nvlink -s`` lists, times ``factor``;
    0, and a warning in the log, where it lists none."""
    try:
        done = subprocess.run(
            ["nvidia-smi", "nvlink", "-s"],
            capture_output=True,
            text=True,
            timeout=_COMMAND_S,
            check=True,
        )
        speeds = _link_speeds(done.stdout)
    except (OSError, subprocess.SubprocessError) as error:
        _LOG.warning("the speed of NVLink is unknown: nvidia-smi nvlink -s fails: %s", error)
        return 0.0
    if not speeds:
        _LOG.warning("the speed of NVLink is unknown: nvidia-smi nvlink -s lists no link")
    return factor * sum(speeds)


def _link_speeds(listed: str) -> list[float]:
    """GB/s of each link of the first GPU."""
    first = re.split(r"^GPU \d+:", listed, flags=re.MULTILINE)[1:2]
    return [
        float(speed) for text in first for speed in re.findall(r"Link \d+: ([\d.]+) GB/s", text)
    ]


def get_rdma_gbs(nic_name: str = "mlx5_0") -> float:
    """GB/s of the first port of an RDMA device, as the kernel reports it; times the number of
    ports where it is one of a bond. 0, and a warning in the log, where there is no such device."""
    device = _INFINIBAND / nic_name
    try:
        rate = (device / "ports" / "1" / "rate").read_text()  # such as "400 Gb/sec (4X NDR)"
    except OSError as error:
        _LOG.warning("the speed of the RDMA device %r is unknown: %s", nic_name, error)
        return 0.0
    bonds = device.glob("device/net/*/upper_*/bonding/slaves")
    bonded = sum(len(bond.read_text().split()) for bond in bonds)
    return float(rate.split()[0]) / 8 * max(bonded, 1)
