"""Programs that torchrun starts on several hosts, which are namespaces of this machine: results,
links that are slowed or cut and hosts that die while calls run, and the tutorial."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.distributed.test_across_hosts import need
from tests.several_hosts import Hosts, Program, hosts_on_this_machine, torchrun
from tools.snippets import snippets_of

ROOT = Path(__file__).parents[2]
TUTORIAL = "docs/tutorials/02-from-one-host-to-two.md"

# Launches begin with six processes that import PyTorch, which takes long on a busy machine.
pytestmark = [
    pytest.mark.usefixtures("with_libfabric"),
    pytest.mark.timeout(300),
    pytest.mark.one_host,  # the tests make hosts of their own
]


@pytest.fixture
def with_libfabric() -> None:
    need("libfabric:tcp")


def launched(hosts: Hosts, ranks_per_host: int, folder: Path, steps: list[str]) -> list[Program]:
    """tests/distributed/launched_rank.py on every host, with ``steps``."""
    program = ["-m", "tests.distributed.launched_rank", str(folder), *steps]
    command = torchrun(hosts.count, ranks_per_host, program)
    variables = {"PYTHONPATH": str(ROOT), "FANFOLD_BACKEND": "host"}
    return [
        hosts.start(host, command, folder / f"log{host}", **variables)
        for host in range(hosts.count)
    ]


def await_all(programs: list[Program], text: str, count: int) -> None:
    try:
        for program in programs:
            program.wait_for(text, count)
    except AssertionError as error:
        # A rank mostly fails because of one on another host, which says why.
        logs = (f"host {host}:\n{program.output}" for host, program in enumerate(programs))
        raise AssertionError("\n".join([str(error).split("\n")[0], *logs])) from None


def nothing_is_left(hosts: Hosts, host: int) -> bool:
    return hosts.processes(host) == [] and hosts.shared_memory(host) == []


def check_lost(program: Program, name: str, count: int) -> list[str]:
    """All ranks of a host have lost a peer in step ``name``, and say which, in what, how much was
    outstanding and for how long. A peer on the same host may have been lost because it itself waits
    for another host; one of the ranks must have lost a rank elsewhere. Returns the lost ranks."""
    program.wait_for(f"lost in {name}", count)
    said = re.findall(rf"^rank \d lost in {name} (.*)$", program.output, re.MULTILINE)
    assert len(said) == count
    assert any("a peer elsewhere" in line for line in said), said
    timeout = r"PeerTimeout: rank \d waited \S+ s for rank \d in .+: expected \d+, have \d+;"
    transport = (
        r"TransportError: transport libfabric:\S+ between rank \d and rank \d"
        r"( over eth0, [^()]+ \(FANFOLD_NETWORK=[^()]+\))?: .+; \d+ messages "
        r"\(\d+ bytes\) were outstanding, and nothing had moved for \S+ s;"
    )
    for line in said:
        assert re.search(f"{timeout}|{transport}", line), line
        path = r"over eth0, from 10\.77\.0\.\d port \d+ to 10\.77\.0\.\d port \d+"
        assert "a peer here" in line or re.search(path, line), line
    return [match[1] for line in said if (match := re.search(r"(?:s for|and) rank (\d)", line))]


def test_two_hosts_whose_link_is_slowed_then_cut(tmp_path: Path) -> None:
    steps = ["check", "until_file", "until_failure:low_latency:cut", "await:joined", "check"]
    with hosts_on_this_machine(2, tmp_path) as hosts:
        programs = launched(hosts, 2, tmp_path, steps)
        await_all(programs, "right on hosts [0, 0, 1, 1]", 2)

        await_all(programs, "has done 2 rounds", 2)
        hosts.slow(1, "20mbit")
        held_back = hosts.held_back(1)
        done = programs[0].output.count("has done")
        programs[0].wait_for("has done", done + 6)
        assert hosts.held_back(1) > held_back
        (tmp_path / "enough").touch()
        await_all(programs, "right to the end", 2)
        hosts.speed_up(1)

        await_all(programs, "is in cut", 2)
        hosts.cut(1)
        for program in programs:
            check_lost(program, "cut", 2)
        hosts.join_again(1)
        (tmp_path / "joined").touch()
        await_all(programs, "right on hosts [0, 0, 1, 1]", 4)
        for host, program in enumerate(programs):
            assert program.wait() == 0, program.output
            assert nothing_is_left(hosts, host)


def test_three_hosts_of_which_one_dies(tmp_path: Path) -> None:
    steps = ["check", "until_failure:high_throughput:death", "fail"]
    with hosts_on_this_machine(3, tmp_path) as hosts:
        programs = launched(hosts, 1, tmp_path, steps)
        await_all(programs, "right on hosts [0, 1, 2]", 1)
        await_all(programs, "is in death", 1)
        (dead,) = re.findall(r"^rank (\d) is in death", programs[2].output, re.MULTILINE)
        hosts.kill(2)
        lost = [rank for program in programs[:2] for rank in check_lost(program, "death", 1)]
        assert dead in lost  # the other survivor may wait for the one that waits for it
        for host, program in enumerate(programs[:2]):
            assert program.wait() != 0  # by the step `fail`, behind its error
            assert nothing_is_left(hosts, host)


def test_the_tutorial(tmp_path: Path) -> None:
    text = (ROOT / TUTORIAL).read_text()
    snippets = list(snippets_of(TUTORIAL, text))
    (script,) = (s for s in snippets if s.word == "saved")
    (command,) = (s for s in snippets if s.reason.startswith("needs two hosts"))
    (tmp_path / script.reason).write_text(script.text)
    shown = re.findall(r"^rank \d of 4 on host\d: .*$", text, re.MULTILINE)
    assert len(shown) == 4
    with hosts_on_this_machine(2, tmp_path) as hosts:
        shell = ["sh", "-ec", f"cd {tmp_path} && {command.text}"]
        programs = [hosts.start(host, shell, tmp_path / f"log{host}") for host in range(2)]
        found: list[str] = []
        for program in programs:
            assert program.wait() == 0, program.output
            # An unbuffered Python writes the end of a line apart, so two ranks can share a line.
            found += re.findall(r"rank \d of \d on host\d: right in both modes", program.output)
    # Which host has which ranks is torchrun's choice.
    assert sorted(found) in (sorted(shown), sorted(_hosts_swapped(shown)))


def _hosts_swapped(lines: list[str]) -> list[str]:
    return [re.sub(r"host(\d)", lambda m: f"host{1 - int(m[1])}", line) for line in lines]
