"""What ``fanfold doctor`` says of networks: libfabric, the networks that it finds, and the choice.

:func:`describe` is pure: tests give it the records of any machine.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from fanfold.cli.doctor_host import Outcome
from fanfold.errors import UnavailableError

if TYPE_CHECKING:
    from fanfold._core import Network

__all__ = ["RdmaDevice", "describe", "libfabric", "networks", "rdma_devices"]

# libfabric offers more, which Fanfold never takes: udp, sockets, hooks.
_SERVED = (
    "efa", "cxi", "verbs;ofi_rxm", "tcp", "net", "tcp;ofi_rxm", "net;ofi_rxm", "shm",
)  # fmt: skip


@dataclass(frozen=True)
class RdmaDevice:
    """A device under ``/sys/class/infiniband``.

    Attributes:
        name: the kernel's: ``"mlx5_0"``, ``"rdmap0s6"``.
        driver: the kernel module: ``"mlx5_core"``, ``"efa"``; empty if unknown.
    """

    name: str
    driver: str


def rdma_devices(folder: Path = Path("/sys/class/infiniband")) -> list[RdmaDevice]:
    """The RDMA devices that the kernel knows, by name."""
    found = []
    for path in sorted(folder.glob("*")):
        driver = path / "device" / "driver"
        found.append(RdmaDevice(path.name, driver.resolve().name if driver.exists() else ""))
    return found


def libfabric() -> Outcome:
    """libfabric's version and place, and the RDMA devices that the kernel knows."""
    from fanfold import _core

    devices = rdma_devices()
    names = ", ".join(device.name for device in devices) or "none"
    try:
        major, minor, path = _core.libfabric_version()
    except UnavailableError as error:
        reason, _, advice = str(error).partition(": install")
        return "missing", f"{reason}; RDMA devices: {names}", _needed(f"install{advice}")
    return "ok", f"{major}.{minor}, {path}; RDMA devices: {names}"


def networks() -> Outcome:
    """The networks that libfabric finds, and the one that Fanfold would take between hosts."""
    from fanfold import _core

    try:
        found = _core.find_networks()
    except UnavailableError as error:
        return "missing", str(error).partition(":")[0], _needed("first install libfabric")
    return describe(found, rdma_devices())


def describe(found: Sequence[Network], devices: Sequence[RdmaDevice]) -> Outcome:
    """Status, detail and hint for these networks.

    Args:
        found: what libfabric finds, in its order.
        devices: what the kernel knows.
    """
    from fanfold import _core

    served = [network for network in found if network.provider in _SERVED]
    lines = "; ".join(dict.fromkeys(_line(network) for network in served)) or "none"
    hint = "; ".join(_hints(found, devices))
    try:
        chosen, reason = _core.choose_network(list(found), "libfabric", False)
    except UnavailableError as error:
        return "missing", f"{error}; found: {lines}", hint or _needed("connect a network")
    first = found[chosen[0]]
    between = f"between hosts {first.provider} on {first.nic}, because {reason}"
    between += f"; rows of GPUs {_place([found[index] for index in chosen])}"
    if any(network.provider == "shm" and not network.refusal for network in found):
        between += "; on one host shm"
    detail = f"{between}; found: {lines}"
    return ("ok", detail, hint) if hint else ("ok", detail)


def _line(network: Network) -> str:
    """One network in words: ``efa on rdmap0s6 (100 Gb/s, up, NUMA node 0, reaches GPU memory)``."""
    if network.provider == "shm":
        return "shm"
    parts = []
    if network.bits_per_second > 0:
        parts.append(f"{network.bits_per_second / 1e9:g} Gb/s")
    if network.loopback:
        parts.append("this host only")
    elif network.state == "unknown":
        parts.append("link state unknown")
    else:
        parts.append(network.state)
    if network.numa_node >= 0:
        parts.append(f"NUMA node {network.numa_node}")
    if network.refusal:
        parts.append(f"not usable: {network.refusal}")
    elif not network.why_no_gpu_memory:
        parts.append("reaches GPU memory")
    return f"{network.provider} on {network.nic} ({', '.join(parts)})"


def _place(chosen: Sequence[Network]) -> str:
    """Where rows may lie that GPUs exchange over the networks, and why not on the GPU."""
    why = next((each.why_no_gpu_memory for each in chosen if each.why_no_gpu_memory), "")
    if why:
        return f"lie in pinned memory of the CPU, as {why}"
    return "may lie in memory of the GPU"


def _hints(found: Sequence[Network], devices: Sequence[RdmaDevice]) -> list[str]:
    """What to install or change, so that Fanfold uses the RDMA devices of this machine."""
    usable = {network.provider.split(";")[0] for network in found if not network.refusal}
    hints = []
    efa = [device.name for device in devices if device.driver == "efa"]
    verbs = [device.name for device in devices if device.driver != "efa"]
    if efa and "efa" not in usable:
        hints.append(
            f"libfabric does not offer efa for {', '.join(efa)}: run the EFA installer of AWS "
            "(efa_installer.sh); Debian, Ubuntu: apt install libfabric1 ibverbs-providers"
        )
    if verbs and "verbs" not in usable:
        hints.append(
            f"libfabric does not offer verbs for {', '.join(verbs)}: Debian, Ubuntu: apt install "
            "libfabric1 ibverbs-providers rdma-core, and raise the limit of locked memory "
            "(ulimit -l unlimited)"
        )
    down = sorted({network.nic for network in found if network.state == "down"})
    if down:
        hints.append(f"the link of {', '.join(down)} is down: look at its cable and switch port")
    refused = sorted({network.refusal for network in found if "set FI_" in network.refusal})
    return hints + refused


def _needed(advice: str) -> str:
    return f"only needed between hosts; {advice}"
