"""Which interface of this machine other hosts reach.

A machine has several: eth0, a bridge of Docker, a second network. A library that takes the first
one, or the one that the host's name resolves to, may announce an address that no other host can
reach.
"""

from __future__ import annotations

import contextlib
import fcntl
import ipaddress
import socket
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

__all__ = [
    "Address",
    "Stack",
    "default_interface",
    "interface_in_common",
    "interface_towards",
    "this_stack",
]

_SIOCGIFADDR, _SIOCGIFNETMASK = 0x8915, 0x891B
# Of a block that documentation uses (RFC 5737): the route to it is the default route.
_ANYWHERE = "192.0.2.1"

_Network = ipaddress.IPv4Network | ipaddress.IPv6Network


@dataclass(frozen=True)
class Address:
    """One address of an interface.

    Attributes:
        interface: its name, as ``"eth0"``.
        text: the address and the length of its network's prefix, as ``"10.0.0.1/24"``.
        speed: of the interface, in Mb/s; 0 if unknown.
    """

    interface: str
    text: str
    speed: int = 0

    @property
    def ip(self) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
        """Without the prefix."""
        return ipaddress.ip_interface(self.text).ip

    @property
    def network(self) -> _Network:
        """All addresses that it reaches without a router."""
        return ipaddress.ip_interface(self.text).network


@dataclass(frozen=True)
class Stack:
    """The addresses that processes share which share a network: those of a host, or of a container.

    Attributes:
        name: differs between any two.
        addresses: of interfaces that are up; none that only this machine reaches.
    """

    name: str
    addresses: tuple[Address, ...]


def this_stack(boot: str) -> Stack:
    """That of this process. ``boot`` is a name of the running kernel."""
    name = ""
    with contextlib.suppress(OSError):
        name = str(Path("/proc/self/ns/net").readlink())
    return Stack(f"{boot} {name}", tuple(_addresses()))


def interface_in_common(own: Stack, stacks: Sequence[Stack]) -> str:
    """The interface of ``own`` in the network that all ``stacks`` have in common: the fastest one
    if there are several, the same one on all. Empty if there is none.

    An address that two stacks have, as the bridges of Docker do, reaches neither from the other.
    """
    others = {stack.name: stack for stack in stacks}.values()
    common: dict[_Network, int] = {}
    for network in dict.fromkeys(a.network for stack in others for a in stack.addresses):
        within = [[a for a in stack.addresses if a.network == network] for stack in others]
        places = [a.ip for addresses in within for a in addresses]
        if all(within) and len(places) == len(set(places)):
            common[network] = min(a.speed for addresses in within for a in addresses)
    if len(others) < 2 or not common:
        return ""
    best = max(common, key=lambda network: (network.version == 4, common[network]))
    return next(a.interface for a in own.addresses if a.network == best)


def interface_towards(host: str) -> str:
    """The interface through which the kernel sends to ``host``, a name or an address. If that is
    this machine, the interface that has the address. Empty if it is a loopback address or cannot be
    found."""
    with contextlib.suppress(OSError):
        for family, kind, protocol, _, where in socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM):
            with contextlib.suppress(OSError), socket.socket(family, kind, protocol) as probe:
                probe.connect(where)  # sends nothing
                own = ipaddress.ip_address(str(probe.getsockname()[0]).partition("%")[0])
                return next((a.interface for a in _addresses() if a.ip == own), "")
    return ""


def default_interface() -> str:
    """The interface of the default route; empty if there is none."""
    return interface_towards(_ANYWHERE)


def _addresses() -> Iterator[Address]:
    """Those of interfaces that are up, without those that only this machine or link reaches."""
    names = [name for _, name in socket.if_nameindex()]
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        for name in names:
            request = struct.pack("256s", name.encode()[:15])
            with contextlib.suppress(OSError):
                answers = [
                    socket.inet_ntoa(fcntl.ioctl(asked, number, request)[20:24])
                    for number in (_SIOCGIFADDR, _SIOCGIFNETMASK)
                ]
                text = ipaddress.ip_interface("/".join(answers)).with_prefixlen
                yield from _usable(name, text)
    with contextlib.suppress(OSError):
        for line in Path("/proc/net/if_inet6").read_text().splitlines():
            digits, _, prefix, _, _, name = line.split()
            ip = ipaddress.IPv6Address(int(digits, 16))
            yield from _usable(name, f"{ip}/{int(prefix, 16)}")


def _usable(name: str, text: str) -> Iterator[Address]:
    ip = ipaddress.ip_address(text.partition("/")[0])
    folder = Path("/sys/class/net") / name
    state, speed = "", 0
    with contextlib.suppress(OSError, ValueError):
        state = (folder / "operstate").read_text().strip()
        speed = max(0, int((folder / "speed").read_text()))
    if not (ip.is_loopback or ip.is_link_local or state == "down"):
        yield Address(name, text, speed)
