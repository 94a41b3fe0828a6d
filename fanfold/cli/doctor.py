"""``fanfold doctor``: what this machine can do, and for each thing it cannot, why and what to do.

Each probe runs in a child process, because what it looks at may be broken in ways that no exception
tells of: a library that aborts, a driver that hangs. The probes are in ``doctor_host``,
``doctor_devices``, ``doctor_modes`` and ``doctor_networks``.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import pickle
import shutil
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection, Pipe

import fanfold
from fanfold.cli import doctor_devices as devices
from fanfold.cli import doctor_host as host
from fanfold.cli import doctor_modes as modes
from fanfold.cli import doctor_networks as networks
from fanfold.cli.doctor_host import Outcome, Status
from fanfold.descriptors import advice

__all__ = ["PROBES", "Finding", "Probe", "add_arguments", "answer", "examine", "run"]


@dataclass(frozen=True)
class Finding:
    """What a probe found.

    Attributes:
        name: of the thing looked at.
        status: ``"ok"``; ``"missing"``, which may be right for this machine; or ``"problem"``.
        detail: versions, sizes, or why it does not work.
        hint: what to install or change; empty if nothing.
    """

    name: str
    status: Status
    detail: str
    hint: str = ""


@dataclass(frozen=True)
class Probe:
    """One thing to look at.

    Attributes:
        name: of its findings.
        function: returns status, detail and perhaps a hint; what it raises is a problem.
        hint: what to do if it raises, dies or hangs.
        module: a Python module whose absence is ``"missing"`` rather than a problem.
        used: whether this version of Fanfold uses it.
        limit_s: seconds until it is given up.
    """

    name: str
    function: Callable[[], Outcome]
    hint: str = ""
    module: str = ""
    used: bool = True
    limit_s: float = 20.0

    def look(self) -> Finding:
        """Runs the probe; never raises."""
        try:
            return self.finding(*self.function())
        except (Exception, SystemExit) as error:
            absent = isinstance(error, ModuleNotFoundError) and error.name == self.module
            detail = f"{type(error).__name__}: {_first_line(error)}{advice(error)}"
            return self.finding("missing" if absent else "problem", detail, self.hint)

    def finding(self, status: Status, detail: str, hint: str = "") -> Finding:
        """A finding of this probe, which says so where the thing is not used yet."""
        return Finding(self.name, status, detail if self.used else f"{detail} (not used yet)", hint)


def _first_line(error: BaseException) -> str:
    lines = [line for line in str(error).splitlines() if line.strip()] or ["no message"]
    return lines[0].strip()[:400]


PROBES: tuple[Probe, ...] = (
    Probe("system", host.system),
    Probe("python", host.python),
    Probe("torch", host.torch, "pip install torch; python -c 'import torch' shows more",
          module="torch", limit_s=120.0),
    Probe("numpy", host.numpy, "pip install numpy", module="numpy"),
    Probe("core", host.core, "build it again for this Python: make build, or pip install .",
          module="fanfold._core"),
    Probe("rich", host.rich, "pip install rich", module="rich"),
    Probe("matplotlib", host.matplotlib, "for pictures: pip install 'fanfold[plot]'",
          module="matplotlib"),
    Probe("settings", host.settings),
    Probe("cores", host.cores),
    Probe("memory", host.memory),
    Probe("shared memory", host.shared_memory),
    Probe("self-test", host.self_test, "first solve the problems in the lines above",
          limit_s=30.0),
    Probe("torchrun", host.torchrun),
    Probe("slurm", host.slurm),
    Probe("mpi4py", host.mpi4py, used=False),
    Probe("driver", devices.driver, "install the NVIDIA driver again"),
    Probe("gpus", devices.gpus, "look at nvidia-smi and dmesg", limit_s=60.0),
    Probe("gpu links", devices.links, "look at nvidia-smi topo -m", limit_s=60.0),
    Probe("nvrtc", devices.nvrtc, "install it again"),
    Probe("low latency", modes.low_latency, "first solve the problems in the lines above",
          limit_s=2 * modes.START_S + 10),
    Probe("high throughput", modes.high_throughput, "first solve the problems in the lines above",
          limit_s=2 * modes.START_S + 10),
    Probe("nccl", devices.nccl, "install it again"),
    Probe("libfabric", networks.libfabric, "install it with all its libraries",
          module="fanfold._core"),
    Probe("networks", networks.networks, "look at fi_info", module="fanfold._core"),
)  # fmt: skip
"""What is looked at, in the order of printing."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of ``fanfold doctor``."""
    parser.description = (
        "Reports what this machine can do, and for each thing it cannot, why and what to install "
        "or change. Prints whatever is missing, and always exits with 0."
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead")


def run(args: argparse.Namespace) -> int:
    """Examines this machine and prints what was found: always 0."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")
    findings = []
    show = (lambda finding: None) if args.json else _printer()
    for finding in examine(PROBES):
        findings.append(finding)
        show(finding)
    test = next(finding for finding in findings if finding.name == "self-test")
    works = test.status == "ok"
    if args.json:
        used = {probe.name: probe.used for probe in PROBES}
        listed = [asdict(finding) | {"used": used[finding.name]} for finding in findings]
        print(json.dumps({"fanfold": fanfold.__version__, "works": works, "findings": listed}))
    else:
        print(f"\nFanfold {fanfold.__version__} {_verdict(works, findings)}.")
    return 0


def _verdict(works: bool, findings: Sequence[Finding]) -> str:
    """Whether the host backend passed its self-test, and where each mode will run."""
    places, able = [], True
    for finding in findings:
        if finding.name in ("low latency", "high throughput"):
            able = able and finding.status == "ok"
            backend = finding.detail.partition(",")[0]
            where = f"on {backend}" if finding.status == "ok" else modes.CANNOT_RUN
            places.append(f"{finding.name} {where}")
    if not works:
        beside = [place for place in places if place.endswith("cuda")]
        on_gpus = f" ({', '.join(beside)})" if beside else ""
        return f"does not work here: the self-test on the host did not pass{on_gpus}"
    return f"works here{'' if able else ', but not as it is set'}: {', '.join(places)}"


# ---- probes in a child process ------------------------------------------------------------------


def examine(probes: Sequence[Probe]) -> Iterator[Finding]:
    """One finding for each probe, in order, each as soon as it is there; never raises."""
    done = 0
    while done < len(probes):
        for finding in _from_child(probes[done:]):
            done += 1
            yield finding


def _from_child(probes: Sequence[Probe]) -> Iterator[Finding]:
    """The findings of a fresh child process until a probe takes it down; at least one."""
    near, far = Pipe(duplex=False)
    program = (
        f"import pickle, sys; sys.path[:] = {sys.path!r}; from fanfold.cli.doctor import answer; "
        f"answer({far.fileno()}, pickle.loads({pickle.dumps(list(probes))!r}))"
    )
    with near:
        try:
            with far:
                child = subprocess.Popen(
                    [sys.executable, "-c", program],
                    pass_fds=[far.fileno()],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                )
        except (OSError, TypeError, ValueError):
            # No child can start: then without its protection.
            yield from (probe.look() for probe in probes)
            return
        try:
            for probe in probes:
                if not near.poll(probe.limit_s):
                    lost = f"no answer within {probe.limit_s:g} s"
                elif finding := _receive(near):
                    yield finding
                    continue
                else:
                    lost = f"the probe {_end(child)}"
                yield probe.finding("problem", lost, probe.hint)
                return
            _end(child)
        finally:
            child.kill()
            child.wait()


def _receive(near: Connection) -> Finding | None:
    """The next finding, None if the child has ended before it."""
    try:
        return Finding(**json.loads(near.recv_bytes()))
    except (EOFError, OSError):
        return None


def _end(child: subprocess.Popen[bytes]) -> str:
    """How the child ended, which it is about to do."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        child.wait(timeout=10.0)
    code = child.returncode
    if code is None or code >= 0:
        return f"ended its process with exit code {code}"
    return f"was killed by signal {-code} ({signal.Signals(-code).name})"


def answer(descriptor: int, probes: Sequence[Probe]) -> None:
    """The child's program: sends one finding for each probe to the pipe ``descriptor``."""
    with Connection(descriptor, readable=False) as connection:
        for probe in probes:
            connection.send_bytes(json.dumps(asdict(probe.look())).encode())


# ---- printing -----------------------------------------------------------------------------------

_STYLES = {"ok": "green", "missing": "yellow", "problem": "bold red"}
_INDENT = 25


def _printer() -> Callable[[Finding], None]:
    """Prints a finding: in colour on a terminal if rich imports, else plainly."""
    terminal = sys.stdout.isatty()
    width = shutil.get_terminal_size().columns if terminal else 1 << 20

    def plain(finding: Finding) -> None:
        print(_block(finding, width), flush=True)

    if not terminal:
        return plain
    try:
        from rich.console import Console
        from rich.text import Text
    except Exception:
        return plain
    console = Console()

    def coloured(finding: Finding) -> None:
        text = Text(_block(finding, width))
        text.stylize(_STYLES[finding.status], 0, len(finding.status))
        console.print(text, soft_wrap=True)

    return coloured


def _block(finding: Finding, width: int) -> str:
    """The lines of a finding: status, name and detail in columns, the hint below the detail."""
    lines = [f"{finding.status:<8} {finding.name:<15} {finding.detail}"]
    if finding.hint:
        lines.append(f"{'':{_INDENT}}-> {finding.hint}")
    margin = " " * _INDENT
    return "\n".join(
        textwrap.fill(
            line, max(width, 60), subsequent_indent=margin,
            break_long_words=False, break_on_hyphens=False,
        )
        for line in lines
    )  # fmt: skip
