"""`fanfold doctor` prints every line and exits with 0, whatever is missing or broken."""

from __future__ import annotations

import json
import os
import pty
import select
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from fanfold.cli import doctor_devices, doctor_host
from fanfold.cli.doctor import PROBES, Probe

PROGRAM = """
import argparse, sys
from fanfold.cli import doctor
parser = argparse.ArgumentParser()
doctor.add_arguments(parser)
sys.exit(doctor.run(parser.parse_args()))
"""
NAMES = [probe.name for probe in PROBES]
UNUSED = ["mpi4py"]


def environment(*packages: Path, **variables: str | None) -> dict[str, str]:
    """The environment without FANFOLD_*, with folders of packages that hide the real ones."""
    kept = {name: text for name, text in os.environ.items() if not name.startswith("FANFOLD_")}
    path = os.pathsep.join([*map(str, packages), kept.get("PYTHONPATH", "")]).strip(os.pathsep)
    changed = {**kept, "PYTHONPATH": path, **variables}
    return {name: text for name, text in changed.items() if text is not None}


def fake_package(folder: Path, name: str, body: str) -> None:
    (folder / name).mkdir(parents=True)
    (folder / name / "__init__.py").write_text(body, encoding="utf-8")


def run_doctor(*arguments: str, env: dict[str, str]) -> str:
    """What doctor prints; it exits with 0 and is silent on standard error."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *arguments],
        env=env, capture_output=True, text=True, timeout=110, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def by_name(printed: str) -> dict[str, dict[str, Any]]:
    return {finding["name"]: finding for finding in json.loads(printed)["findings"]}


def test_it_works_here_without_home_and_with_odd_variables(tmp_path: Path) -> None:
    (tmp_path / "libcuda.so.1").write_text("no library")
    env = environment(
        HOME=None, FANFOLD_TIMEOUT_S="soon", LD_LIBRARY_PATH=f"{tmp_path}:/nonexistent::."
    )
    printed = run_doctor("--json", env=env)
    assert json.loads(printed)["works"] is True
    found = by_name(printed)
    assert list(found) == NAMES
    for name in (
        "system",
        "python",
        "torch",
        "numpy",
        "core",
        "rich",
        "cores",
        "memory",
        "shared memory",
    ):
        assert found[name]["status"] == "ok", found[name]
    assert found["self-test"]["detail"].endswith("2048 values are right")
    for mode in ("low latency", "high throughput"):
        assert found[mode]["status"] == "problem"
        assert found[mode]["detail"].startswith("cannot run: ")
        assert "FANFOLD_TIMEOUT_S is 'soon'" in found[mode]["detail"]
    assert found["settings"]["status"] == "problem"
    assert "FANFOLD_TIMEOUT_S is 'soon'" in found["settings"]["detail"]
    assert found["driver"]["status"] == found["gpus"]["status"] == "problem"
    assert str(tmp_path / "libcuda.so.1") in found["driver"]["detail"]
    assert [name for name in NAMES if not found[name]["used"]] == UNUSED
    for finding in found.values():
        assert finding["detail"].endswith("(not used yet)") == (not finding["used"])
        assert finding["status"] == "ok" or finding["hint"]


@pytest.mark.parametrize(
    ("body", "status", "told"),
    [
        ("raise ImportError('undefined symbol: boo')", "problem", "ImportError: undefined symbol"),
        ("raise ModuleNotFoundError('gone', name='torch')", "missing", "ModuleNotFoundError: gone"),
        ("import os; os.abort()", "problem", "signal 6 (SIGABRT)"),
        ("import sys; sys.exit(3)", "problem", "SystemExit: 3"),
    ],
)
def test_torch_that_does_not_import(tmp_path: Path, body: str, status: str, told: str) -> None:
    fake_package(tmp_path, "torch", body)
    fake_package(tmp_path, "rich", "raise ImportError('no rich')")
    lines = run_doctor(env=environment(tmp_path)).splitlines()
    rows = {line[9:24].strip(): line for line in lines if line[:1].strip() and line[8:9] == " "}
    assert [name for name in rows if name in NAMES] == NAMES
    assert rows["torch"].startswith(status)
    assert told in rows["torch"]
    assert rows["rich"].startswith("problem")
    assert rows["core"].startswith("ok")
    assert rows["shared memory"].startswith("ok")
    assert rows["self-test"].startswith("problem")
    assert "does not work here" in lines[-1]


def terminal_output(env: dict[str, str]) -> str:
    """What doctor prints to a terminal of 80 columns."""
    near, far = pty.openpty()
    child = subprocess.Popen(
        [sys.executable, "-c", PROGRAM], env=env | {"COLUMNS": "80", "TERM": "xterm"},
        stdout=far, stderr=far, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    os.close(far)
    chunks, deadline = [], time.monotonic() + 110
    try:
        while select.select([near], [], [], max(0.0, deadline - time.monotonic()))[0]:
            chunks.append(os.read(near, 65536))
    except OSError:  # how a terminal says that its other end is closed
        pass
    finally:
        os.close(near)
        child.kill() if time.monotonic() > deadline else None
        assert child.wait(timeout=10) == 0
    return b"".join(chunks).decode()


@pytest.mark.parametrize("rich", [True, False])
def test_colours_on_a_terminal_only_with_rich(tmp_path: Path, rich: bool) -> None:
    fake_package(tmp_path, "torch", "raise ImportError('broken')")
    if not rich:
        fake_package(tmp_path, "rich", "raise RuntimeError('broken too')")
    printed = terminal_output(environment(tmp_path, NO_COLOR=None))
    assert ("\x1b[" in printed) == rich
    assert "does not work here" in printed
    assert all(f" {name} " in printed.replace("\x1b[0m", "") for name in NAMES)


@pytest.mark.parametrize(
    ("backend", "detail", "end"),
    [
        (
            "host",
            "host, because the setting backend is 'host' (from environment)",
            "works here: low latency on host, high throughput on host.",
        ),
        (
            "auto",
            "host, because rank 0 cannot use a GPU: ",
            "works here: low latency on host, high throughput on host.",
        ),
        (
            "cuda",
            "cannot run: the setting backend is 'cuda' (from environment), but rank 0 cannot use",
            "works here, but not as it is set: low latency cannot run, high throughput cannot run.",
        ),
    ],
)
def test_each_mode_has_a_backend_and_a_reason(backend: str, detail: str, end: str) -> None:
    env = environment(FANFOLD_BACKEND=backend, CUDA_VISIBLE_DEVICES="")
    lines = run_doctor(env=env).splitlines()
    for mode in ("low latency", "high throughput"):
        (line,) = [line for line in lines if line[9:].startswith(mode)]
        assert line[9:].removeprefix(mode).strip().startswith(detail)
    assert lines[-1].endswith(end)


PROBE_MODULE = """
import os, signal, sys, time
from fanfold.cli.doctor import Probe, examine

def good(): return "ok", "fine"
def raises(): raise ValueError("\\n\\nodd value\\nand more")
def dies(): os.kill(os.getpid(), signal.SIGSEGV)
def leaves(): os._exit(7)
def hangs(): time.sleep(60)
def noisy(): os.write(1, b"noise"); os.write(2, b"noise"); return "ok", "heard"

def main():
    names = (good, raises, dies, noisy, hangs, leaves, good)
    for finding in examine([Probe(f.__name__, f, "a hint", limit_s=5.0) for f in names]):
        print(finding.name, finding.status, finding.detail, sep="|")
"""


def probes_of(tmp_path: Path, program: str) -> list[str]:
    (tmp_path / "odd_probes.py").write_text(PROBE_MODULE, encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=environment(tmp_path), capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.splitlines()


def test_a_probe_that_takes_its_process_down_costs_one_line(tmp_path: Path) -> None:
    assert probes_of(tmp_path, "import odd_probes; odd_probes.main()") == [
        "good|ok|fine",
        "raises|problem|ValueError: odd value",
        "dies|problem|the probe was killed by signal 11 (SIGSEGV)",
        "noisy|ok|heard",
        "hangs|problem|no answer within 5 s",
        "leaves|problem|the probe ended its process with exit code 7",
        "good|ok|fine",
    ]


def test_where_no_child_can_start(tmp_path: Path) -> None:
    program = (
        "import sys, odd_probes as o; sys.executable = '/nonexistent'\n"
        "print(*o.examine([o.Probe('a', o.good), o.Probe('b', o.raises)]), sep='\\n')"
    )
    first, second = probes_of(tmp_path, program)
    assert "'a', status='ok'" in first
    assert "ValueError: odd value" in second


RANKS_MODULE = """
import os, signal, time
from pathlib import Path
from fanfold.cli.doctor import Probe, examine
from fanfold.launch import launch

def parent_of(pid): return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])

def kill_the_probe(group):
    group.barrier().wait()
    if group.rank() == 0:
        os.kill(parent_of(os.getppid()), signal.SIGKILL)  # above the ranks' server
    time.sleep(60)

def probe(): launch(kill_the_probe, 2)

def main():
    [finding] = examine([Probe("ranks", probe, limit_s=45.0)])
    print(finding.detail)
"""


def test_ranks_end_with_their_probe(tmp_path: Path) -> None:
    (tmp_path / "odd_ranks.py").write_text(RANKS_MODULE, encoding="utf-8")
    env = environment(tmp_path, FANFOLD_DOCTOR_MARK=str(tmp_path))
    done = subprocess.run(
        [sys.executable, "-c", "import odd_ranks; odd_ranks.main()"],
        env=env, capture_output=True, text=True, timeout=90, check=False,
    )  # fmt: skip
    assert (done.stderr, done.stdout) == ("", "the probe was killed by signal 9 (SIGKILL)\n")
    mark = f"FANFOLD_DOCTOR_MARK={tmp_path}"
    deadline = time.monotonic() + 20
    while marked(mark) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert marked(mark) == []


def marked(mark: str) -> list[int]:
    """The processes that have ``mark`` in their environment."""
    found = []
    for place in Path("/proc").glob("[0-9]*"):
        try:
            texts = (place / "environ").read_bytes().split(b"\0")
        except OSError:
            continue
        if mark.encode() in texts:
            found.append(int(place.name))
    return found


# ---- single probes ------------------------------------------------------------------------------


def look(function: Any) -> tuple[str, str]:
    finding = Probe("x", function).look()
    return finding.status, finding.detail


def test_control_group_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    files = {
        "/proc/self/cgroup": "0::/a/b",
        "/sys/fs/cgroup/a/b/memory.max": "max",
        "/sys/fs/cgroup/a/memory.max": str(1 << 28),
        "/sys/fs/cgroup/a/cpu.max": "150000 100000",
        "/proc/meminfo": "MemTotal: 8388608 kB\nMemAvailable: 4194304 kB",
    }
    monkeypatch.setattr(doctor_host, "_text", lambda path: files.get(str(path), ""))
    status, detail = look(doctor_host.memory)
    assert status == "problem"
    assert "8.0 GiB, 4.0 GiB of it available; control group limit 0.2 GiB" in detail
    assert "control group quota 1.5" in look(doctor_host.cores)[1]
    files["/sys/fs/cgroup/a/memory.max"] = str(2 << 30)
    assert look(doctor_host.memory)[0] == "ok"
    files["/proc/self/cgroup"] = "3:memory:/old\n4:cpu,cpuacct:/old"
    files["/sys/fs/cgroup/memory/old/memory.limit_in_bytes"] = str(1 << 30)
    files["/sys/fs/cgroup/cpu/old/cpu.cfs_quota_us"] = "50000"
    assert "limit 1.0 GiB" in look(doctor_host.memory)[1]
    assert "quota 0.5" in look(doctor_host.cores)[1]


def test_memory_that_another_process_cannot_open(monkeypatch: pytest.MonkeyPatch) -> None:
    denied = doctor_host._OPEN_AND_ADD.replace("sys.argv[1]", "'/proc/nothing'")
    monkeypatch.setattr(doctor_host, "_OPEN_AND_ADD", denied)
    finding = Probe("x", doctor_host.shared_memory).look()
    assert finding.status == "problem"
    assert "/proc/nothing" in finding.detail
    assert "hidepid" in finding.hint


class FakeCuda:
    """A driver with three GPUs of two kinds, of which only 0 and 1 have a fast link."""

    def __getattr__(self, name: str) -> Any:
        def call(*args: Any) -> int:
            answer = self.answer(name, *args)
            if answer is not None:
                (args[0]._obj if hasattr(args[0], "_obj") else args[0]).value = answer
            return 0

        return call

    def answer(self, name: str, *args: Any) -> Any:
        device = getattr(args[-1], "value", args[-1])
        return {
            "cuDeviceGetCount": lambda: 3,
            "cuDeviceGet": lambda: args[1],
            "cuDeviceGetName": lambda: b"Odd GPU" if device == 2 else b"Fine GPU",
            "cuDeviceTotalMem_v2": lambda: 16 << 30,
            "cuDeviceGetAttribute": lambda: 9 if args[1] == 75 else 0,
            "cuDeviceCanAccessPeer": lambda: int(args[1:] != (1, 2)),
            "cuDeviceGetP2PAttribute": lambda: int(args[2:] == (0, 1)),
        }.get(name, lambda: None)()


def test_gpus_and_their_links(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor_devices, "_load", lambda *names: FakeCuda())
    monkeypatch.setattr(doctor_devices, "_seen_by_torch", lambda count, detail: ("ok", detail))
    kind = "16 GiB, compute capability 9.0"
    assert look(doctor_devices.gpus) == ("ok", f"2 x Fine GPU, {kind}; 1 x Odd GPU, {kind}")
    assert look(doctor_devices.links) == (
        "ok",
        (
            "peer access with native atomics (NVLink): 0-1; "
            "peer access without native atomics (PCIe): 0-2; no peer access: 1-2"
        ),
    )


def test_slurm_and_its_job(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert look(doctor_host.slurm)[0] in ("ok", "missing")
    srun = tmp_path / "srun"
    srun.write_text("#!/bin/sh\necho slurm 99.1\n")
    srun.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setattr(doctor_host, "_text", lambda path: "0::/system.slice/job_77/step_0")
    assert look(doctor_host.slurm) == ("ok", "slurm 99.1; this process belongs to job 77")
