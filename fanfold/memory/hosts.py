"""Which ranks are on which host."""

from __future__ import annotations

import os
import uuid
from dataclasses import dataclass
from pathlib import Path

from fanfold.config import Config, libfabric_interface
from fanfold.descriptors import advice
from fanfold.errors import SystemFailure, UnavailableError
from fanfold.group import Group, agree
from fanfold.interfaces import Stack, default_interface, interface_in_common, this_stack

__all__ = ["Hosts", "find_hosts", "host_identity"]

_PROXY_THREADS = 4


def host_identity() -> str:
    """A name for this running kernel, PID namespace and user: who share it can share memory.

    Raises:
        SystemFailure: there is no /proc to read it from, or no file descriptor to do so.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        namespace = Path("/proc/self/ns/pid").readlink()
    except OSError as error:
        why = f"{error}{advice(error)}"
        raise SystemFailure(f"nothing says which host and namespace this is: {why}") from error
    return f"{boot} {namespace} uid:{os.getuid()}"


@dataclass(frozen=True)
class Hosts:
    """Where the ranks of a group are.

    Attributes:
        host: of each rank, numbered from 0 in the order of the ranks.
        machine_ranks: ranks that share this rank's memory and cores, this one included; more than
            are on its host where one machine acts as several.
        one_machine: whether that is all of them.
        proxy_threads: of each rank, where there are several hosts.
        world: a name of this group's ranks that no other group has.
        reason: why there are several hosts, for messages; "" if there are not.
        interface: of this host, through which sockets reach the others; "" if none is chosen.
    """

    host: tuple[int, ...]
    machine_ranks: int
    one_machine: bool
    proxy_threads: int
    world: str
    reason: str
    interface: str

    @property
    def count(self) -> int:
        """How many there are."""
        return max(self.host) + 1

    @property
    def even(self) -> tuple[int, ...]:
        """``host`` if each has as many ranks; else one host for all of them."""
        sizes = {self.host.count(host) for host in self.host}
        return self.host if len(sizes) == 1 else (0,) * len(self.host)

    @property
    def several(self) -> bool:
        """Whether there is more than one."""
        return self.count > 1

    @property
    def spinning_threads(self) -> int:
        """Of each rank: its own, and those of its proxy."""
        return 1 + (self.proxy_threads if self.several else 0)

    def members(self, rank: int) -> list[int]:
        """The ranks of the host of ``rank``, ascending."""
        return [peer for peer, host in enumerate(self.host) if host == self.host[rank]]

    def others(self, rank: int) -> list[list[int]]:
        """The ranks of each host but that of ``rank``, ascending."""
        members: list[list[int]] = [[] for _ in range(self.count)]
        for peer, host in enumerate(self.host):
            members[host].append(peer)
        del members[self.host[rank]]
        return members


def find_hosts(group: Group, config: Config) -> Hosts:
    """Where the ranks of ``group`` are: by what shares memory, or by ``config.hosts``. Collective.

    Raises:
        ArgumentError: the ranks' settings of hosts, network or proxy_threads differ.
        UnavailableError: ``config.hosts`` has ranks on one host that do not share memory.
        FanfoldError: a rank cannot say where it is; raised by all ranks alike.
    """
    identity, failure = "", None
    try:
        identity = host_identity()
    except SystemFailure as error:
        failure = error
    settings: dict[str, object] = {
        "hosts": config.hosts,
        "network": config.network,
        "proxy_threads": config.proxy_threads,
    }
    agree(group, settings, failure)
    cores = len(os.sched_getaffinity(0))
    stack = this_stack(identity.partition(" ")[0])
    said = group.all_gather((identity, cores, f"{os.getpid()} {uuid.uuid4()}", stack))
    identities = [each[0] for each in said]
    machine_ranks = identities.count(identity)
    if config.hosts is None:
        host = _numbered(identities)
    else:
        host = [rank * min(config.hosts, group.size) // group.size for rank in range(group.size)]
        agree(group, {}, _apart(host, identities, config))
    threads = config.proxy_threads
    if threads is None:
        # Each rank needs a core of its own, and its proxies others.
        spare = min(c // identities.count(i) - 1 for i, c, *_ in said)
        threads = max(1, min(_PROXY_THREADS, spare, group.size - 1))
    return Hosts(
        host=tuple(host),
        machine_ranks=machine_ranks,
        one_machine=machine_ranks == group.size,
        proxy_threads=threads,
        world=said[0][2],
        reason=_reason(identities, config) if max(host) > 0 else "",
        interface=_interface(stack, [each[3] for each in said]),
    )


def _interface(own: Stack, stacks: list[Stack]) -> str:
    """The interface through which sockets reach the ranks of other hosts; "" if all ranks have one
    network stack, or if libfabric's own variables name one."""
    if libfabric_interface() or len({stack.name for stack in stacks}) == 1:
        return ""
    return interface_in_common(own, stacks) or default_interface()


def _numbered(identities: list[str]) -> list[int]:
    numbers: dict[str, int] = {}
    return [numbers.setdefault(identity, len(numbers)) for identity in identities]


def _apart(host: list[int], identities: list[str], config: Config) -> UnavailableError | None:
    """The error of two ranks on one host of ``config.hosts`` that do not share memory."""
    for rank, identity in enumerate(identities):
        first = host.index(host[rank])
        if identity != identities[first]:
            return UnavailableError(
                f"the setting hosts is {config.hosts} (from {config.source_of('hosts')}), which "
                f"has rank {first} and rank {rank} on one host, but they do not share memory "
                f"({identities[first]} against {identity}): the host backend shares it between the "
                "processes of one user in one PID namespace of one host. Leave the setting out, or "
                "start ranks of a host one after the other, all in one container or with --pid=host"
            )
    return None


def _reason(identities: list[str], config: Config) -> str:
    if config.hosts is not None:
        return f"the setting hosts is {config.hosts} (from {config.source_of('hosts')})"
    other = next(rank for rank, name in enumerate(identities) if name != identities[0])
    return (
        f"rank {other} and rank 0 do not share memory ({identities[other]} against "
        f"{identities[0]}); ranks of one host that should share it, such as those of several "
        "containers, need one user and one PID namespace (--pid=host)"
    )
