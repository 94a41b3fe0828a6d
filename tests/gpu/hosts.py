"""Ranks of this machine that act as two hosts."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

import fanfold
from fanfold import _core
from fanfold.config import NCCL_GIN
from fanfold.launch import RankFailure
from fanfold.memory import rows
from fanfold.nccl import library
from tests.distributed import routings
from tests.distributed.layers import caught

KILLED = 1

PROXIED = ["libfabric:tcp", "libfabric:shm"]
NETWORKS = [*PROXIED, NCCL_GIN]
PLUGIN = Path(__file__).parents[2] / "build" / "nccl_plugin" / "libnccl-net-fanfold.so"
Run = Callable[..., list[Any]]
Test = Callable[..., Any]


def patience(network: str) -> float:
    """Seconds that waits for a killed rank may last: sockets tell at once that it has ended, shared
    memory never does, and a kernel knows nothing of NCCL's errors. But where ranks share a GPU
    without MPS, each put of NCCL's takes milliseconds, and rows are many of them."""
    return {"libfabric:tcp": 100.0, "libfabric:shm": 2.0, NCCL_GIN: 10.0}[network]


def two_hosts(group: dist.ProcessGroup, network: str) -> Any:
    """The settings of the ranks, half of them on each host."""
    nccl = over_plugin(dist.get_rank(group)) if network == NCCL_GIN else {}
    settings = {"FANFOLD_HOSTS": "2", "FANFOLD_NETWORK": network, **nccl}
    return mock.patch.dict(os.environ, settings)


def over_plugin(rank: int) -> dict[str, str]:
    """What has NCCL take its GIN from the plugin, and each rank for a host: in processes that have
    not used NCCL, which reads its environment once."""
    assert PLUGIN.exists(), f"{PLUGIN} is missing: `make nccl-plugin` builds it"
    named = "NCCL_NET_PLUGIN" if library.loaded().version < (2, 30, 4) else "NCCL_RMA_PLUGIN"
    return {named: str(PLUGIN), "NCCL_HOSTID": f"host of rank {rank}", "NCCL_NVLS_ENABLE": "0"}


def own_gpu(group: dist.ProcessGroup) -> Any:
    """The settings of ranks that share GPUs, if there are more than GPUs; this one's becomes the
    current one."""
    gpus = torch.cuda.device_count()
    torch.cuda.set_device(dist.get_rank(group) % gpus)
    shared = {"FANFOLD_SHARE_GPUS": "1"} if dist.get_world_size(group) > gpus else {}
    return mock.patch.dict(os.environ, shared)


def on_hosts(group: dist.ProcessGroup, network: str, test: Test, args: tuple[Any, ...]) -> Any:
    """One rank's part: ``test(group, *args)``. Its oracles add sums as on one host, as kernels do
    it at a token's source."""
    one_host = [0] * dist.get_world_size(group)
    placed = mock.patch.object(routings, "PLACED", one_host)
    with two_hosts(group, network), own_gpu(group), placed:
        return test(group, *args)


class PinnedRows:
    """In the place of :class:`fanfold.memory.rows.GpuRows`, which needs a NIC on the PCI bus:
    memory that networks of the CPU write, too, apart from the other. Attributes are those."""

    device = dmabuf = -1

    def __init__(self, nbytes: int, device: torch.device) -> None:
        del device
        self.nbytes = nbytes
        self._memory = torch.empty(
            nbytes + 4096, dtype=torch.uint8, device="cpu", pin_memory=True
        ).fill_(0xA5)
        self.address = -(-self._memory.data_ptr() // 4096) * 4096

    def close(self) -> None:
        """It goes with this object."""


def with_rows_apart(group: dist.ProcessGroup, test: Test, *args: Any) -> Any:
    """One rank's part: ``test(group, *args)`` where rows have memory of their own."""
    chosen: list[object] = []
    choose = rows.NetworkRows.choose

    def noted(self: rows.NetworkRows, carrier: _core.Carrier) -> None:
        choose(self, carrier)
        if self.memory is not None or self.why_none:  # of kernels, and not of the host's oracle
            chosen.append(self.memory)

    with (
        mock.patch.object(rows, "GpuRows", PinnedRows),
        mock.patch.object(rows, "why_no_rows_on", return_value=""),
        mock.patch.object(rows.NetworkRows, "choose", noted),
    ):
        result = test(group, *args)
    assert chosen
    assert None not in chosen
    return result


def call_after_a_kill(
    group: dist.ProcessGroup, call: Callable[[], object]
) -> tuple[Exception | None, float]:
    """Kills one rank; what another then sees of ``call``, and after how long."""
    dist.barrier(group)
    if dist.get_rank(group) == KILLED:
        os.kill(os.getpid(), signal.SIGKILL)
    start = time.monotonic()
    return caught(call), time.monotonic() - start


def check_ended(outcomes: Sequence[Any]) -> None:
    """The others have ended within the bound, and name the rank that was killed."""
    others = list(outcomes)
    assert isinstance(others.pop(KILLED), RankFailure)
    for error, seconds in others:
        assert isinstance(error, (fanfold.PeerTimeout, fanfold.TransportError))
        assert f"rank {KILLED}" in str(error)
        assert seconds < 30.0
