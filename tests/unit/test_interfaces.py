"""Which interface other hosts reach, for machines of any kind."""

from __future__ import annotations

import socket

import pytest

from fanfold.interfaces import (
    Address,
    Stack,
    default_interface,
    interface_in_common,
    interface_towards,
    this_stack,
)


def stacks(*machines: dict[str, str], speeds: dict[str, int] | None = None) -> list[Stack]:
    """A stack for each machine, whose interfaces have these addresses."""
    return [
        Stack(str(n), tuple(Address(i, a, (speeds or {}).get(i, 1000)) for i, a in each.items()))
        for n, each in enumerate(machines)
    ]


def chosen(every: list[Stack]) -> list[str]:
    return [interface_in_common(own, every) for own in every]


def test_the_network_that_all_have() -> None:
    every = stacks(
        {"eth0": "192.168.1.5/24", "eth1": "10.0.0.1/16"},
        {"eth1": "192.168.9.5/24", "ens3": "10.0.4.2/16"},
    )
    assert chosen(every) == ["eth1", "ens3"]


def test_an_address_that_two_machines_have_reaches_neither() -> None:
    docker = {"docker0": "172.17.0.1/16"}
    every = stacks({**docker, "eth0": "10.0.0.1/24"}, {**docker, "eth0": "10.0.0.2/24"})
    assert chosen(every) == ["eth0", "eth0"]
    assert chosen(stacks(docker, docker)) == ["", ""]


def test_the_fastest_of_several() -> None:
    first = {"eth0": "10.0.0.1/24", "eth1": "10.1.0.1/24"}
    second = {"eth0": "10.0.0.2/24", "eth1": "10.1.0.2/24"}
    assert chosen(stacks(first, second, speeds={"eth1": 10_000})) == ["eth1", "eth1"]
    assert chosen(stacks(first, second)) == ["eth0", "eth0"]
    # A network is as fast as its slowest machine.
    mixed = {"eth0": "10.0.0.3/24", "slow": "10.1.0.3/24"}
    every = stacks(first, second, mixed, speeds={"eth1": 10_000, "slow": 100})
    assert chosen(every) == ["eth0", "eth0", "eth0"]


def test_networks_that_no_machine_shares() -> None:
    every = stacks({"eth0": "10.0.0.1/32"}, {"eth0": "10.0.0.2/32"})
    assert chosen(every) == ["", ""]
    assert chosen(stacks({"eth0": "10.0.0.1/24"}, {})) == ["", ""]


def test_ranks_of_one_machine_are_one_stack() -> None:
    (own,) = stacks({"eth0": "10.0.0.1/24"})
    assert interface_in_common(own, [own, own]) == ""
    two = stacks({"eth0": "10.0.0.1/24"}, {"eth0": "10.0.0.2/24"})
    assert chosen([two[0], two[0], two[1], two[1]]) == ["eth0"] * 4


def test_ranks_of_one_machine_that_see_different_addresses() -> None:
    late = Stack("x", ())
    full = Stack("x", (Address("eth0", "10.0.0.1/24"),))
    other = Stack("y", (Address("eth0", "10.0.0.2/24"),))
    assert interface_in_common(late, [late, full, other]) == ""
    assert interface_in_common(full, [late, full, other]) == "eth0"


def test_many_machines() -> None:
    machines = (
        {"eth0": f"10.0.{n // 250}.{n % 250 + 1}/16", "rail": f"10.9.{n % 256}.{n // 256 * 2}/31"}
        for n in range(600)
    )
    every = stacks(*machines)
    assert interface_in_common(every[0], every) == "eth0"


def test_a_sandbox_may_hide_interfaces(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused() -> list[tuple[int, str]]:
        raise OSError(97, "Address family not supported by protocol")

    monkeypatch.setattr(socket, "if_nameindex", refused)
    assert this_stack("boot").addresses == ()


def test_ipv4_before_ipv6() -> None:
    every = stacks(
        {"eth1": "fd00::1/64", "eth0": "10.0.0.1/24"}, {"eth1": "fd00::2/64", "eth0": "10.0.0.2/24"}
    )
    assert chosen(every) == ["eth0", "eth0"]
    assert chosen(stacks({"eth1": "fd00::1/64"}, {"eth1": "fd00::2/64"})) == ["eth1", "eth1"]


def test_this_machine() -> None:
    stack = this_stack("boot")
    assert stack == this_stack("boot")
    assert stack.name != this_stack("other").name
    for address in stack.addresses:
        assert not address.ip.is_loopback
        assert interface_towards(str(address.ip)) == address.interface
    names = {address.interface for address in stack.addresses}
    assert default_interface() in names | {""}


@pytest.mark.parametrize("host", ["127.0.0.1", "no-such-host.invalid"])
def test_what_no_interface_reaches(host: str) -> None:
    assert interface_towards(host) == ""
