"""What ``fanfold doctor`` looks at on the host; each probe is one small function.

A probe returns a status, a detail and perhaps a hint; what it raises is a problem. At import this
module needs only the standard library: what may be missing or broken is imported inside the probes.
Nowhere does a probe start a process without a time limit.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import mmap
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    import torch.distributed as dist

__all__ = [
    "Outcome", "Status", "core", "cores", "dispatch_and_combine", "matplotlib", "memory", "mpi4py",
    "numpy", "python", "rich", "self_test", "settings", "shared_memory", "slurm", "system", "torch",
    "torchrun",
]  # fmt: skip

Status = Literal["ok", "missing", "problem"]
Outcome = tuple[Status, str] | tuple[Status, str, str]

OLDEST_PYTHON = (3, 10)
OLDEST_TORCH = (2, 4)
GIB = 1 << 30
LEAST_MEMORY = GIB // 2
"""Bytes below which ranks, which need about 0.3 GiB each for PyTorch alone, hardly start."""


# ---- Python and its packages --------------------------------------------------------------------


def system() -> Outcome:
    """The operating system, kernel and C library."""
    detail = f"{platform.system()} {platform.release()}, {platform.machine()}"
    if sys.platform != "linux":
        return "problem", detail, "the host backend needs Linux (memfd_create, futex, /proc)"
    return "ok", f"{detail}, {' '.join(platform.libc_ver())}"


def python() -> Outcome:
    """The interpreter and its version."""
    detail = f"{platform.python_version()} ({platform.python_implementation()}), {sys.executable}"
    if sys.version_info[:2] < OLDEST_PYTHON:
        return "problem", detail, "install Python {}.{} or newer".format(*OLDEST_PYTHON)
    return "ok", detail


def torch() -> Outcome:
    """PyTorch: version, kind of build, and whether it has gloo."""
    import torch as found
    import torch.distributed as dist

    build = "CPU build"
    if found.version.cuda:
        build = f"CUDA {found.version.cuda} build"
    elif found.version.hip:
        build = f"ROCm {found.version.hip} build"
    detail = f"{found.__version__}, {build}"
    numbers = re.findall(r"\d+", found.__version__)
    if tuple(map(int, numbers[:2])) < OLDEST_TORCH:
        wanted = "{}.{}".format(*OLDEST_TORCH)
        return (
            "problem",
            detail,
            f"install PyTorch {wanted} or newer: pip install 'torch>={wanted}'",
        )
    if not (dist.is_available() and dist.is_gloo_available()):
        return "problem", f"{detail} without torch.distributed and gloo", "install another build"
    return "ok", f"{detail}, with gloo"


def core() -> Outcome:
    """Fanfold's own C++ core."""
    found = importlib.import_module("fanfold._core")
    return "ok", f"imports ({Path(str(found.__file__)).name})"


def numpy() -> Outcome:
    """The package through which torch.distributed exchanges Python objects."""
    return "ok", str(importlib.import_module("numpy").__version__)


def rich() -> Outcome:
    """The package that colours and draws tables."""
    importlib.import_module("rich")
    return "ok", importlib.metadata.version("rich")


def matplotlib() -> Outcome:
    """The package behind the plots."""
    return "ok", str(importlib.import_module("matplotlib").__version__)


def settings() -> Outcome:
    """Whether the environment sets anything, and rightly."""
    from fanfold.cli.env import explain

    rows = explain()
    errors = [row.error for row in rows if row.error is not None]
    if errors:
        return "problem", "; ".join(errors), "correct or unset it; `fanfold env` explains all"
    changed = [f"{row.variable}={row.value}" for row in rows if row.source != "default"]
    return "ok", ", ".join(changed) or "all at their defaults"


# ---- cores and memory ---------------------------------------------------------------------------


def _text(path: Path | str) -> str:
    """The stripped text of a file of the kernel; empty if it is not there or not readable."""
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""


def _control_group_files(name: str, controller: str, old_name: str) -> Iterator[str]:
    """The texts of ``name`` (``old_name`` under version 1) in this process's control groups."""
    for line in _text("/proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        root, wanted = Path("/sys/fs/cgroup"), name
        if controllers:
            if controller not in controllers.split(","):
                continue
            root, wanted = root / controller, old_name
        # Inside a container the path may name what only the host sees; then the root is the limit.
        folder = root / path.lstrip("/")
        for place in (folder, *folder.parents):
            if place.is_relative_to(root) and (text := _text(place / wanted)):
                yield text


def cores() -> Outcome:
    """The cores that this process may use."""
    allowed, present = len(os.sched_getaffinity(0)), os.cpu_count() or 1
    detail = f"{allowed} of {present} may be used"
    model = re.search(r"^model name\s*:\s*(.+)$", _text("/proc/cpuinfo"), re.MULTILINE)
    quotas = []
    for text in _control_group_files("cpu.max", "cpu", "cpu.cfs_quota_us"):
        quota, _, period = text.partition(" ")
        if quota.isdigit():
            quotas.append(int(quota) / int(period or 100000))
    if quotas:
        detail += f", control group quota {min(quotas):g}"
    if model:
        detail += f", {model[1]}"
    if min([allowed, *quotas]) < 2:
        return "ok", detail, "ranks time-slice one core: they work, but timings mean little"
    return "ok", detail


def memory() -> Outcome:
    """Main memory, and the limit of the control group."""
    sizes = dict(re.findall(r"^(\w+):\s+(\d+) kB", _text("/proc/meminfo"), re.MULTILINE))
    total, available = (int(sizes[name]) << 10 for name in ("MemTotal", "MemAvailable"))
    detail = f"{total / GIB:.1f} GiB, {available / GIB:.1f} GiB of it available"
    texts = _control_group_files("memory.max", "memory", "memory.limit_in_bytes")
    limits = [int(text) for text in texts if text.isdigit() and int(text) < total]
    detail += f"; control group limit {min(limits) / GIB:.1f} GiB" if limits else "; no lower limit"
    if min([available, *limits]) < LEAST_MEMORY:
        return "problem", detail, "free memory or raise the limit: a rank needs about 0.3 GiB"
    return "ok", detail


_OPEN_AND_ADD = """
import mmap, os, sys
with mmap.mmap(os.open(sys.argv[1], os.O_RDWR), 0) as memory:
    memory[0] += 1
"""


def shared_memory() -> Outcome:
    """Whether another process can open anonymous shared memory of this one."""
    try:
        descriptor = os.memfd_create("fanfold")
    except OSError as error:
        policy = _text("/proc/sys/vm/memfd_noexec") or "absent"
        detail = f"memfd_create fails: {error} (vm.memfd_noexec is {policy})"
        return (
            "problem",
            detail,
            "allow memfd_create (seccomp profile), set vm.memfd_noexec below 2",
        )
    try:
        os.ftruncate(descriptor, mmap.PAGESIZE)
        with mmap.mmap(descriptor, 0) as mapped:
            mapped[0] = 41
            path = f"/proc/{os.getpid()}/fd/{descriptor}"
            child = subprocess.run(
                [sys.executable, "-I", "-S", "-c", _OPEN_AND_ADD, path],
                capture_output=True, text=True, timeout=15.0, check=False,
            )  # fmt: skip
            shared = mapped[0] == 42
    finally:
        os.close(descriptor)
    if not shared:
        reason = (child.stderr.strip().splitlines() or ["it wrote elsewhere"])[-1]
        hint = (
            "run all ranks as one user in one container or PID namespace; allow ptrace reads "
            "(SYS_PTRACE, or a looser seccomp or security profile); mount /proc without hidepid"
        )
        return "problem", f"a child cannot open {path}: {reason}; {_guards()}", hint
    detail = f"memfd works, a child opens it through /proc; {_guards()}"
    try:
        os.close(os.pidfd_open(os.getpid()))
    except OSError as error:
        hint = "allow pidfd_open (Linux 5.3): else a dead peer is noticed only when time is over"
        return "ok", f"{detail}; pidfd_open fails ({error})", hint
    return "ok", detail


def _guards() -> str:
    """What may keep a process from opening another's memory, and a limit that does not count."""
    parts = []
    for line in _text("/proc/self/mountinfo").splitlines():
        fields = line.split()
        if fields[4] == "/proc":
            hidden = re.search(r"hidepid=(\w+)", line)
            parts = [f"hidepid {hidden[1] if hidden else 'off'}"]
    parts.append(f"ptrace_scope {_text('/proc/sys/kernel/yama/ptrace_scope') or 'absent'}")
    try:
        size = os.statvfs("/dev/shm")
        parts.append(f"/dev/shm {size.f_blocks * size.f_frsize / GIB:.1f} GiB (does not bound it)")
    except OSError:
        parts.append("/dev/shm absent (not needed)")
    return ", ".join(parts)


# ---- the self-test ------------------------------------------------------------------------------

SELF_TEST_S = 13.0
"""Seconds for the start of the ranks, and again for what they do."""


def dispatch_and_combine(group: dist.ProcessGroup) -> int:
    """What each rank of the self-test runs: both modes once, against a result known beforehand.

    Returns:
        How many values were compared.
    """
    import torch

    import fanfold.config
    from fanfold.bench.dispatchers import open_dispatcher
    from fanfold.geometry import Mode

    config = fanfold.config.Config(timeout_s=SELF_TEST_S - 3.0, backend="host")
    sizes: dict[str, Any] = {"num_experts": 4, "top_k": 2, "hidden": 64, "max_tokens": 8}
    # Small integers and halves: every sum is exact in bfloat16.
    x = (torch.arange(8 * 64, dtype=torch.int64, device="cpu").reshape(8, 64) % 7).to(
        torch.bfloat16
    )
    topk_idx = torch.stack(
        [
            torch.arange(8, dtype=torch.int64, device="cpu") % 4,
            (torch.arange(8, dtype=torch.int64, device="cpu") + 1) % 4,
        ],
        dim=1,
    )
    topk_weights = torch.full((8, 2), 0.5, dtype=torch.float32, device="cpu")
    expected = x * (topk_idx + 1).sum(dim=1, keepdim=True).to(torch.bfloat16) * 0.5
    modes: tuple[Mode, ...] = ("low_latency", "high_throughput")
    for mode in modes:
        with open_dispatcher(mode, group, **sizes, config=config) as ep:
            received = ep.dispatch(x, topk_idx, topk_weights)
            y = torch.zeros_like(received.tokens)
            for local in range(ep.experts_per_rank):
                factor = ep.rank * ep.experts_per_rank + local + 1
                received.expert(local, of=y).copy_(received.expert(local) * factor)
            out = ep.combine(y, received)
            if not torch.equal(out, expected):
                wrong = int((out != expected).sum())
                raise ArithmeticError(f"{mode}: {wrong} of {out.numel()} values are wrong")
    return 2 * expected.numel()


def self_test() -> Outcome:
    """Two ranks, started, tested and ended."""
    from fanfold.config import default_environment
    from fanfold.launch import launch

    # The host is tested, not the settings: those have a line of their own.
    with default_environment():
        counts = launch(dispatch_and_combine, 2, timeout_s=SELF_TEST_S)
    return "ok", f"2 ranks dispatched and combined in both modes; {sum(counts)} values are right"


# ---- launchers ----------------------------------------------------------------------------------


def _output(*command: str) -> str:
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=10.0, check=False,
        stdin=subprocess.DEVNULL,
    )  # fmt: skip
    return (done.stdout.strip() or done.stderr.strip()).splitlines()[0]


def torchrun() -> Outcome:
    """PyTorch's launcher, whose ranks Fanfold joins."""
    beside = Path(sys.executable).parent / "torchrun"
    found = str(beside) if beside.is_file() else shutil.which("torchrun")
    if found:
        return "ok", found
    return "missing", "not beside this Python, nor on PATH", "use python -m torch.distributed.run"


def slurm() -> Outcome:
    """SLURM's launcher, whose ranks Fanfold joins."""
    if shutil.which("srun") is None:
        return "missing", "no srun on PATH", "only needed to start ranks as a SLURM job"
    job = re.search(r"/job_(\d+)", _text("/proc/self/cgroup"))
    where = f"this process belongs to job {job[1]}" if job else "this process belongs to no job"
    return "ok", f"{_output('srun', '--version')}; {where}"


def mpi4py() -> Outcome:
    """MPI for Python, and the launcher of MPI, whose ranks Fanfold joins."""
    starter = shutil.which("mpirun")
    start = f"mpirun is {starter}" if starter else "no mpirun on PATH"
    if importlib.util.find_spec("mpi4py") is None:
        hint = "not needed: ranks that mpirun starts are joined without it"
        return "missing", f"not installed; {start}", hint
    return "ok", f"{importlib.metadata.version('mpi4py')}; {start}"
