"""What `fanfold doctor` says of networks, for machines of any kind."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fanfold import _core
from fanfold.cli import doctor_networks
from fanfold.cli.doctor_networks import RdmaDevice, describe, rdma_devices
from fanfold.errors import UnavailableError


def network(provider: str, nic: str, **fields: Any) -> _core.Network:
    record = _core.Network()
    record.provider, record.nic = provider, nic
    for name, value in fields.items():
        setattr(record, name, value)
    return record


COPIES = "net moves bytes by the CPU"
ETHERNET = {"bits_per_second": 10_000_000_000, "state": "up", "why_no_gpu_memory": COPIES}
SHM = network("shm", "shm", loopback=True, why_no_gpu_memory="shm moves bytes by the CPU")


def test_a_host_with_sockets_only():
    sockets = network("sockets", "eth0", **ETHERNET)  # Fanfold never takes it
    status, detail = describe([sockets, network("net", "eth0", **ETHERNET), SHM], [])
    assert status == "ok"
    assert detail.startswith("between hosts net on eth0, because it is the best that was found")
    assert "on one host shm" in detail
    assert f"rows of GPUs lie in pinned memory of the CPU, as {COPIES}; " in detail
    assert "found: net on eth0 (10 Gb/s, up); shm" in detail


def test_a_host_with_efa():
    efa = network("efa", "rdmap0s6-rdm", bits_per_second=100_000_000_000, state="up", numa_node=1)
    outcome = describe([network("net", "eth0", **ETHERNET), efa], [RdmaDevice("rdmap0s6", "efa")])
    assert outcome[0] == "ok"
    assert len(outcome) == 2, "no hint is needed"
    assert "between hosts efa on rdmap0s6-rdm" in outcome[1]
    assert "rows of GPUs may lie in memory of the GPU; " in outcome[1]
    assert "efa on rdmap0s6-rdm (100 Gb/s, up, NUMA node 1, reaches GPU memory)" in outcome[1]


@pytest.mark.parametrize(
    ("driver", "advice"),
    [("efa", "EFA installer"), ("mlx5_core", "rdma-core"), ("irdma", "ibverbs-providers")],
)
def test_rdma_devices_that_libfabric_does_not_offer(driver: str, advice: str):
    _, detail, hint = describe(
        [network("net", "eth0", **ETHERNET)], [RdmaDevice("device0", driver)]
    )
    assert "between hosts net on eth0" in detail
    assert "device0" in hint
    assert advice in hint


def test_links_that_are_down_and_refusals():
    cxi = network("cxi", "cxi0", refusal="its writes carry 0 bytes (set FI_CXI_ENABLE_WRITEDATA=1)")
    verbs = network("verbs;ofi_rxm", "mlx5_0", state="down")
    status, detail, hint = describe([cxi, verbs], [RdmaDevice("mlx5_0", "mlx5_core")])
    assert status == "missing"
    assert "no usable network" in detail
    assert "verbs;ofi_rxm on mlx5_0 (down, reaches GPU memory)" in detail
    assert "cxi on cxi0 (link state unknown, not usable: its writes carry 0 bytes" in detail
    assert detail.count("reaches GPU memory") == 1, "what is not usable says only why"
    assert "the link of mlx5_0 is down" in hint
    assert "FI_CXI_ENABLE_WRITEDATA=1" in hint


def test_networks_of_this_machine_say_why_they_reach_no_gpu():
    try:
        found = _core.find_networks()
    except UnavailableError:
        pytest.skip("no libfabric")
    for record in found:
        if record.provider in {"shm", "net", "tcp", "net;ofi_rxm", "tcp;ofi_rxm"}:
            assert record.why_no_gpu_memory == f"{record.provider} moves bytes by the CPU"


def test_no_network_at_all():
    status, detail, hint = describe([], [])
    assert status == "missing"
    assert detail.endswith("found: none")
    assert "only needed between hosts" in hint


def test_no_libfabric(monkeypatch: pytest.MonkeyPatch):
    def missing() -> Any:
        raise UnavailableError("there is no libfabric (no such file): install it (apt install x)")

    monkeypatch.setattr(_core, "libfabric_version", missing)
    monkeypatch.setattr(_core, "find_networks", missing)
    status, detail, hint = doctor_networks.libfabric()  # type: ignore[misc]
    assert (status, detail.split(";")[0]) == ("missing", "there is no libfabric (no such file)")
    assert hint == "only needed between hosts; install it (apt install x)"
    status, detail, hint = doctor_networks.networks()  # type: ignore[misc]
    assert (status, detail) == ("missing", "there is no libfabric (no such file)")
    assert "first install libfabric" in hint


def test_rdma_devices_of_the_kernel(tmp_path: Path):
    drivers = tmp_path / "drivers" / "mlx5_core"
    drivers.mkdir(parents=True)
    classes = tmp_path / "infiniband"
    (classes / "mlx5_1" / "device").mkdir(parents=True)
    (classes / "mlx5_1" / "device" / "driver").symlink_to(drivers)
    (classes / "rxe0").mkdir()
    assert rdma_devices(classes) == [RdmaDevice("mlx5_1", "mlx5_core"), RdmaDevice("rxe0", "")]
    assert rdma_devices(tmp_path / "none") == []
