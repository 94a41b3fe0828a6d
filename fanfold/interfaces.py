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
_IFF_LOOPBACK = 0x8
# Of blocks that documentation uses (RFC 5737, RFC 3849): the route to it is the default route.
_ANYWHERE = ("192.0.2.1", "2001:db8::1")

_Network = ipaddress.IPv4Network | ipaddress.IPv6Network
_Ip = ipaddress.IPv4Address | ipaddress.IPv6Address


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
    """The stack of this process. ``boot`` is a name of the running kernel."""
    name = ""
    with contextlib.suppress(OSError):
        name = str(Path("/proc/self/ns/net").readlink())
    addresses: tuple[Address, ...] = ()
    with contextlib.suppress(OSError):  # a sandbox may hide them
        addresses = tuple(_addresses())
    return Stack(f"{boot} {name}", addresses)


def interface_in_common(own: Stack, stacks: Sequence[Stack]) -> str:
    """The interface of ``own`` in the network that all ``stacks`` have in common: the fastest one
    if there are several, the same one on all. Empty if there is none. IPv4 comes before IPv6, and a
    speed that is not known is the lowest.

    An address that two stacks have, as the bridges of Docker do, reaches neither from the other.
    """
    hosts = [_networks(stack) for stack in {stack.name: stack for stack in stacks}.values()]
    if len(hosts) < 2:
        return ""
    common: dict[_Network, int] = {}
    for network in hosts[0]:
        within = [host.get(network, []) for host in hosts]
        places = [ip for found in within for ip, _ in found]
        if all(within) and len(places) == len(set(places)):
            common[network] = min(speed for found in within for _, speed in found)
    best = max(common, key=lambda network: (network.version == 4, common[network]), default=None)
    return next((a.interface for a in own.addresses if a.network == best), "")


def _networks(stack: Stack) -> dict[_Network, list[tuple[_Ip, int]]]:
    """The addresses of each network, with the speed of their interfaces."""
    networks: dict[_Network, list[tuple[_Ip, int]]] = {}
    for address in stack.addresses:
        parsed = ipaddress.ip_interface(address.text)
        networks.setdefault(parsed.network, []).append((parsed.ip, address.speed))
    return networks


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
    return next(filter(None, map(interface_towards, _ANYWHERE)), "")


def _addresses() -> Iterator[Address]:
    """The addresses of interfaces that are up, without those that only this machine or link
    reaches."""
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
    state, speed, flags = "", 0, 0
    with contextlib.suppress(OSError, ValueError):
        flags = int((folder / "flags").read_text(), 16)
        state = (folder / "operstate").read_text().strip()
        speed = max(0, int((folder / "speed").read_text()))
    local = ip.is_loopback or ip.is_link_local or flags & _IFF_LOOPBACK
    if not local and state not in ("down", "lowerlayerdown", "notpresent"):
        yield Address(name, text, speed)
