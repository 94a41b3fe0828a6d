"""Several hosts on one machine, for tests of real launches.

Each host is a set of Linux namespaces: network, processes, mounts and host name. A switch, which is
a network namespace with a bridge, joins them. Everything ends with the process that made it.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType

import pytest

__all__ = ["Hosts", "Program", "address_of", "need_namespaces", "torchrun"]

_TOOLS = ("unshare", "nsenter", "ip", "tc", "mount", "hostname")
_BOUND_S = 100.0
_SCRIPTS = Path(sys.executable).parent
# What a launcher, or the tests' own environment, would say of another job.
_FOREIGN = re.compile(
    "(RANK|WORLD_SIZE|LOCAL_.*|GROUP_.*|MASTER_.*|GLOO_.*|FANFOLD_.*|SLURM_.*|OMPI_.*|PM.*|FI_.*)$"
)

# The first process of a host. It gives the host names and mounts of its own, and no server to ask
# for names, then waits for the end of its input, which is the end of the test. All other processes
# of the host end with it.
_HOST = """
read -r pid rest </proc/self/stat
mount -t proc proc /proc
mount -t sysfs sysfs /sys
mount -t tmpfs tmpfs /dev/shm
mount -t tmpfs tmpfs /mnt
{ echo "127.0.1.1 $1"; cat "$2"; } >/mnt/hosts
mount --bind /mnt/hosts /etc/hosts
if [ -e /etc/resolv.conf ]; then mount --bind /dev/null /etc/resolv.conf; fi
hostname "$1"
ip link set lo up
echo $pid
exec cat
"""


def address_of(host: int) -> str:
    """Where other hosts reach a host."""
    return f"10.77.0.{host + 1}"


def need_namespaces() -> None:
    """Skips where namespaces cannot be made, unless the environment requires them."""
    missing = [tool for tool in _TOOLS if shutil.which(tool, path=_path()) is None]
    reason = f"{', '.join(missing)} not found" if missing else ""
    if not missing:
        try:
            Hosts(1, Path("/etc/hosts")).close()
        except (RuntimeError, OSError) as error:
            reason = f"namespaces cannot be made here: {error}"
    if reason and os.environ.get("REQUIRE_NAMESPACES") == "ON":
        pytest.fail(reason)
    if reason:
        pytest.skip(reason)


def _path() -> str:
    return os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin"])


def _waiting(command: list[str]) -> tuple[subprocess.Popen[str], str]:
    """Starts what writes a line when it is ready, then waits for the end of its input."""
    process = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PATH": _path()},
    )
    assert process.stdout is not None
    line = process.stdout.readline().strip()
    if not line:
        _, error = process.communicate()
        raise RuntimeError(error.strip() or f"exit code {process.returncode} of {command[0]}")
    return process, line


class Program:
    """A program that runs on a host. ``output`` is what it has written so far."""

    def __init__(self, process: subprocess.Popen[bytes], log: Path) -> None:
        self._process, self._log = process, log

    @property
    def output(self) -> str:
        return self._log.read_text(errors="replace")

    def wait(self) -> int:
        """Its exit code."""
        try:
            return self._process.wait(_BOUND_S)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"no end within {_BOUND_S:.0f} s:\n{self.output}") from None

    def wait_for(self, text: str, count: int = 1) -> None:
        """Returns when ``text`` has come ``count`` times."""
        deadline = time.monotonic() + _BOUND_S
        while self.output.count(text) < count:
            ended = self._process.poll() is not None and self.output.count(text) < count
            assert not ended, f"ended without {text!r}:\n{self.output}"
            assert time.monotonic() < deadline, f"no {text!r}:\n{self.output}"
            time.sleep(0.02)

    def stop(self) -> None:
        """Ends the process that entered the host; the host ends the rest."""
        self._process.kill()
        self._process.wait()


class Hosts:
    """``count`` hosts with a link each to one switch: eth0 at :func:`address_of`.

    As on real machines a host has a second interface that is up but reaches no other host: bridge0,
    which has the same address on every host, as Docker's has. And as on Debian a host's own name is
    that of an address of loopback.
    """

    def __init__(self, count: int, hosts_file: Path) -> None:
        self.count = count
        self._programs: list[Program] = []
        self._first: list[subprocess.Popen[str]] = []
        self._pids: list[str] = []
        self._ended: set[int] = set()
        root = os.geteuid() == 0
        user = [] if root else ["--user", "--map-root-user"]
        self._user = [] if root else ["--user", "--preserve-credentials"]
        try:
            switch = ["unshare", *user, "--net", "sh", "-c", "echo $$ && exec cat"]
            self._switch, self._switch_pid = _waiting(switch)
            self._first.append(self._switch)
            self._in_switch("ip link add switch type bridge && ip link set switch up")
            for host in range(count):
                self._add(host, hosts_file)
        except BaseException:
            self.close()
            raise

    def _add(self, host: int, hosts_file: Path) -> None:
        enter = ["nsenter", "--target", self._switch_pid, *self._user, "--"] if self._user else []
        apart = ["unshare", "--net", "--pid", "--fork", "--mount", "--uts", "--ipc"]
        script = ["sh", "-ec", _HOST, "sh", f"host{host}", str(hosts_file)]
        process, pid = _waiting([*enter, *apart, *script])
        self._first.append(process)
        self._pids.append(pid)
        self._in_switch(
            f"ip link add link{host} type veth peer name eth0 netns {pid} && "
            f"ip link set link{host} master switch up"
        )
        self._on(host, f"ip address add {address_of(host)}/24 dev eth0 && ip link set eth0 up")
        self._on(host, "ip route add default via 10.77.0.254")
        # Of two equally fast interfaces libfabric lists the later one first.
        self._on(host, "ip link add bridge0 type veth peer name container0")
        self._on(host, "ip address add 172.17.0.1/16 dev bridge0")
        self._on(host, "ip link set bridge0 up && ip link set container0 up")

    def __enter__(self) -> Hosts:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def start(self, host: int, command: list[str], log: Path, **environment: str) -> Program:
        """Starts a program on a host."""
        kept = {name: value for name, value in os.environ.items() if not _FOREIGN.match(name)}
        with log.open("wb") as output:
            process = subprocess.Popen(
                [*self._enter(host), *command],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={
                    **kept,
                    "PATH": f"{_SCRIPTS}:{_path()}",
                    **environment,
                },
            )
        self._programs.append(Program(process, log))
        return self._programs[-1]

    def processes(self, host: int) -> list[str]:
        """Command lines of the host's processes but its first one."""
        listing = "for p in /proc/[0-9]*; do tr '\\0' ' ' <$p/cmdline && echo; done"
        lines = self._on(host, listing).splitlines()
        return [line for line in lines if "python" in line]

    def shared_memory(self, host: int) -> list[str]:
        """The files in the host's /dev/shm."""
        return self._on(host, "ls -A /dev/shm").split()

    def cut(self, host: int) -> None:
        """Takes the host's link down, as an unplugged cable does."""
        self._in_switch(f"ip link set link{host} down")

    def join_again(self, host: int) -> None:
        """Brings the host's link up again."""
        self._in_switch(f"ip link set link{host} up")

    def slow(self, host: int, rate: str) -> None:
        """Lets no more than ``rate`` (of ``tc``, as "10mbit") through the host's link."""
        shaped = f"root tbf rate {rate} burst 16k latency 50ms"
        self._in_switch(f"tc qdisc add dev link{host} {shaped}")
        self._on(host, f"tc qdisc add dev eth0 {shaped}")

    def held_back(self, host: int) -> int:
        """How many packets have had to wait because of :meth:`slow`, both ways."""
        counts = self._in_switch(f"tc -s qdisc show dev link{host}")
        counts += self._on(host, "tc -s qdisc show dev eth0")
        return sum(int(count) for count in re.findall(r"overlimits (\d+)", counts))

    def speed_up(self, host: int) -> None:
        """Ends what :meth:`slow` began."""
        self._in_switch(f"tc qdisc del dev link{host} root")
        self._on(host, "tc qdisc del dev eth0 root")

    def kill(self, host: int) -> None:
        """Ends all of the host's processes at once, with SIGKILL, and its network with them."""
        self._ended.add(host)
        self._end(self._first[host + 1])

    def close(self) -> None:
        """Ends all hosts with all that runs on them. Harmless when repeated."""
        while self._first:
            self._end(self._first.pop())
        for program in self._programs:
            program.stop()

    @staticmethod
    def _end(first: subprocess.Popen[str]) -> None:
        assert first.stdin is not None
        with contextlib.suppress(OSError):
            first.stdin.close()
        first.wait(_BOUND_S)
        for stream in (first.stdout, first.stderr):
            if stream is not None:
                stream.close()

    def _enter(self, host: int) -> list[str]:
        kinds = ["--net", "--pid", "--mount", "--uts", "--ipc"]
        return ["nsenter", "--target", self._pids[host], *self._user, *kinds, "--"]

    def _on(self, host: int, script: str) -> str:
        return _run([*self._enter(host), "sh", "-ec", script])

    def _in_switch(self, script: str) -> str:
        enter = ["nsenter", "--target", self._switch_pid, *self._user, "--net", "--"]
        return _run([*enter, "sh", "-ec", script])


def _run(command: list[str]) -> str:
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=_BOUND_S, env={"PATH": _path()}
    )
    if done.returncode != 0:
        raise RuntimeError(f"{command[-1]}: {done.stderr.strip()}")
    return done.stdout


def torchrun(hosts: int, ranks_per_host: int, program: list[str]) -> list[str]:
    """torchrun's command line, the same on every host; they meet at host 0."""
    return [
        *(sys.executable, "-m", "torch.distributed.run"),
        f"--nnodes={hosts}",
        f"--nproc-per-node={ranks_per_host}",
        "--rdzv-backend=c10d",
        f"--rdzv-endpoint={address_of(0)}:29500",
        *program,
    ]


@contextlib.contextmanager
def hosts_on_this_machine(count: int, folder: Path) -> Iterator[Hosts]:
    """``count`` hosts that know each other's names, as host0, host1, ..."""
    need_namespaces()
    known = folder / "hosts"
    lines = ["127.0.0.1 localhost", *(f"{address_of(h)} host{h}" for h in range(count))]
    known.write_text("\n".join(lines) + "\n")
    with Hosts(count, known) as made:
        yield made
