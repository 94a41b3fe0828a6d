"""Where low latency runs, decided from what ranks say of themselves; without any GPU."""

from __future__ import annotations

import dataclasses
import re
import threading
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch

from fanfold import gpus, launch
from fanfold.backends import choose as choosing
from fanfold.backends.choose import BackendChoice, choose
from fanfold.cli import doctor_modes
from fanfold.config import Config
from fanfold.errors import ArgumentError, UnavailableError
from fanfold.geometry import Mode
from fanfold.jit import kernel, nvrtc
from fanfold.launch import rank as launching
from fanfold.memory.hosts import host_identity

HOST = host_identity()
find = nvrtc.find


class Ranks:
    """Groups of threads that exchange what they pass to ``all_gather``."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._barrier = threading.Barrier(size, timeout=20.0)
        self._values: list[Any] = [None] * size

    def run(self, function: Callable[[Any], Any]) -> list[Any]:
        """``function(group)`` for every rank, each in a thread; results or exceptions."""
        results: list[Any] = [None] * self.size

        def be(rank: int) -> None:
            try:
                results[rank] = function(Member(self, rank))
            except Exception as error:
                results[rank] = error

        threads = [threading.Thread(target=be, args=(rank,)) for rank in range(self.size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20.0)
        return results

    def gather(self, rank: int, value: Any) -> list[Any]:
        self._values[rank] = value
        self._barrier.wait()
        values = list(self._values)
        self._barrier.wait()
        return values


@dataclasses.dataclass
class Member:
    """One rank's group."""

    ranks: Ranks
    rank: int

    @property
    def size(self) -> int:
        return self.ranks.size

    def all_gather(self, value: Any) -> list[Any]:
        return self.ranks.gather(self.rank, value)


def seat(index: int, identity: str, **changes: Any) -> Any:
    values = {"host": HOST, "device": f"cuda:{index}", "identity": identity, "capability": (9, 0)}
    return choosing._Seat(**{**values, **changes})


GOOD = [seat(0, "a"), seat(1, "b")]


def decide(
    monkeypatch: pytest.MonkeyPatch,
    seats: list[Any],
    *,
    may_cross_hosts: bool = False,
    mode: Mode = "low_latency",
    **settings: Any,
) -> list[Any]:
    """What ``choose`` gives to ranks that are seated so."""
    settings = {"backend": "auto", **settings}
    local = threading.local()

    def be(group: Member) -> BackendChoice:
        local.rank = group.rank
        config = Config.resolve(**settings)
        return choose(group, config, mode, may_cross_hosts=may_cross_hosts)

    monkeypatch.setattr(choosing, "_look", lambda group: seats[local.rank])
    return Ranks(len(seats)).run(be)


def test_a_gpu_for_each_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    placed = decide(monkeypatch, GOOD)
    assert [p.backend for p in placed] == ["cuda", "cuda"]
    assert [p.device for p in placed] == [torch.device("cuda:0"), torch.device("cuda:1")]


def test_the_oldest_gpu_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    seats = [seat(0, "a", capability=(10, 0)), seat(1, "b", capability=(8, 9))]
    assert [p.capability for p in decide(monkeypatch, seats)] == [(8, 9), (8, 9)]
    seats[1] = seat(1, "a", capability=(8, 9))
    assert [p.capability for p in decide(monkeypatch, seats)] == [(0, 0), (0, 0)]


@pytest.mark.parametrize(
    ("capability", "backend", "wanted"),
    [((9, 0), "auto", "cuda"), ((8, 9), "auto", "host"), ((9, 0), "cuda", "cuda")],
)
def test_high_throughput_leaves_older_gpus(
    capability: tuple[int, int], backend: str, wanted: str
) -> None:
    there = BackendChoice("cuda", torch.device("cuda:0"), "each has one", capability)
    assert there.supports("low_latency")
    assert there.supports("high_throughput") == (wanted == "cuda")
    placed = there.for_mode("high_throughput", Config.resolve(backend=backend))
    assert placed.backend == wanted
    assert placed.device.type == ("cuda" if wanted == "cuda" else "cpu")
    if wanted == "host":
        with pytest.raises(UnavailableError, match=r"needs compute capability 9\.0, .* has 8\.9"):
            there.for_mode("high_throughput", Config.resolve(backend="cuda"))


@pytest.mark.parametrize("backend", ["auto", "cuda"])
def test_both_modes_reach_gpus_of_other_hosts(
    monkeypatch: pytest.MonkeyPatch, backend: str
) -> None:
    settings: dict[str, Any] = {"mode": "high_throughput", "backend": backend, "hosts": 2}
    for placed in decide(monkeypatch, GOOD, may_cross_hosts=True, **settings):
        assert (placed.backend, placed.across_hosts) == ("cuda", True)
        assert placed.supports("high_throughput")
        assert placed.supports("low_latency")
    for there in decide(monkeypatch, GOOD, **settings):
        assert isinstance(there, UnavailableError) == (backend == "cuda")


def test_the_same_index_of_different_gpus_will_do(monkeypatch: pytest.MonkeyPatch) -> None:
    placed = decide(monkeypatch, [seat(0, "a"), seat(0, "b")])
    assert [p.device for p in placed] == [torch.device("cuda:0")] * 2


@pytest.mark.parametrize("backend", ["auto", "cuda"])
def test_ranks_that_share_a_gpu(monkeypatch: pytest.MonkeyPatch, backend: str) -> None:
    settings: dict[str, Any] = {"backend": backend, "share_gpus": True}
    placed = decide(monkeypatch, [seat(0, "a"), seat(0, "a"), seat(1, "b")], **settings)
    assert [str(p.device) for p in placed] == ["cuda:0", "cuda:0", "cuda:1"]
    assert {p.reason for p in placed} == {"ranks share GPUs; this is this rank's"}
    placed = decide(monkeypatch, GOOD, **settings)
    assert {p.reason for p in placed} == {"each rank has a GPU of its own; this is this rank's"}
    seats = [seat(0, "a", unreachable=("b",)), seat(0, "a"), seat(1, "b")]
    for outcome in decide(monkeypatch, seats, **settings):
        assert "cuda:0 of rank 0 has no peer access to the GPU of rank 2" in str(
            outcome if backend == "cuda" else outcome.reason
        )


@pytest.mark.parametrize(
    ("seats", "reason"),
    [
        (
            [seat(0, "a"), seat(0, "a")],
            "both have cuda:0 as current device; call torch.cuda.set_device(local_rank) first",
        ),
        ([seat(0, "a"), seat(1, "a")], "rank 0's cuda:0 and rank 1's cuda:1 are the same GPU (a)"),
        (
            [seat(0, "a"), choosing._Seat(HOST, lacking="it sees no CUDA device")],
            "rank 1 cannot use a GPU: it sees no CUDA device",
        ),
        ([seat(0, "a"), seat(1, "b", host="elsewhere")], "rank 1 and rank 0 are not processes of"),
        (
            [seat(0, "a", unreachable=("b",)), seat(1, "b")],
            "cuda:0 of rank 0 has no peer access to the GPU of rank 1",
        ),
    ],
    ids=["same", "two names", "none", "hosts", "no access"],
)
def test_obstacles(monkeypatch: pytest.MonkeyPatch, seats: list[Any], reason: str) -> None:
    for placed in decide(monkeypatch, seats):
        assert (placed.backend, placed.device) == ("host", torch.device("cpu"))
        assert reason in placed.reason
    for error in decide(monkeypatch, seats, backend="cuda"):
        assert isinstance(error, UnavailableError)
        assert "the setting backend is 'cuda' (from argument), but" in str(error)
        assert reason in str(error)


@pytest.mark.parametrize(
    ("seats", "settings"),
    [
        (GOOD, {"hosts": 2}),
        ([seat(0, "a"), seat(1, "b", host="elsewhere")], {}),
        ([seat(0, "a"), seat(0, "a")], {"hosts": 2, "share_gpus": True}),
    ],
    ids=["one machine", "two machines", "one GPU"],
)
def test_gpus_of_several_hosts(
    monkeypatch: pytest.MonkeyPatch, seats: list[Any], settings: dict[str, Any]
) -> None:
    """They are taken where the caller can use them."""
    for backend in ("auto", "cuda"):
        placed = decide(monkeypatch, seats, may_cross_hosts=True, backend=backend, **settings)
        assert [(p.backend, p.across_hosts) for p in placed] == [("cuda", True)] * 2
    for placed_there in decide(monkeypatch, seats, **settings):
        assert placed_there.backend == "host"
        assert "kernels do not reach across hosts, and" in placed_there.reason
    for error in decide(monkeypatch, seats, backend="cuda", **settings):
        assert isinstance(error, UnavailableError)
        assert "kernels do not reach across hosts, and" in str(error)
    on_one = decide(monkeypatch, GOOD, may_cross_hosts=True, backend="cuda")
    assert [(p.backend, p.across_hosts) for p in on_one] == [("cuda", False)] * 2


def test_threads_that_act_as_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    seats = [seat(0, "a", process=7), seat(0, "a", process=7)]
    for placed in decide(monkeypatch, seats, may_cross_hosts=True, hosts=2):
        assert placed.backend == "host"
        assert "kernels of ranks that are threads do not reach across hosts" in placed.reason


def test_obstacles_of_gpus_on_several_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    seats = [seat(0, "a"), seat(1, "b", lacking="it sees no CUDA device")]
    for error in decide(monkeypatch, seats, may_cross_hosts=True, backend="cuda", hosts=2):
        assert isinstance(error, UnavailableError)
        assert "rank 1 cannot use a GPU: it sees no CUDA device" in str(error)


def told(monkeypatch: pytest.MonkeyPatch, seats: list[Any], **settings: Any) -> dict[str, str]:
    """What doctor says of ranks that are seated so; the ranks agree."""
    local = threading.local()

    def be(group: Member) -> dict[str, str]:
        local.rank = group.rank
        return doctor_modes.choices(group, Config.resolve(**settings))

    settings = {"backend": "auto", **settings}
    monkeypatch.setattr(choosing, "_look", lambda group: seats[local.rank])
    monkeypatch.setattr(kernel.nvrtc, "library", lambda: COMPILER)
    found = Ranks(len(seats)).run(be)
    assert all(each == found[0] for each in found)
    return found[0]


COMPILER = types.SimpleNamespace(architectures=[80, 86, 90, 100])
NEW = [seat(0, "a", capability=(9, 0)), seat(1, "b", capability=(10, 0))]
OLD = [seat(0, "a", capability=(9, 0)), seat(1, "b", capability=(8, 6))]
APART = [seat(0, "a", capability=(9, 0), unreachable=("b",)), seat(1, "b", capability=(9, 0))]
BARE = [seat(0, "a"), seat(1, "b", lacking="no NVRTC (libnvrtc)")]
SAME = [seat(0, "a", capability=(9, 0))] * 2
UNKNOWN = [seat(0, "a", capability=(12, 1))]
OWN = "each rank has a GPU of its own, compute capability"
NO_ACCESS = "cuda:0 of rank 0 has no peer access to the GPU of rank 1"
NEEDS = "high throughput needs compute capability 9.0, and the oldest GPU of these ranks has 8.6"


@pytest.mark.parametrize(
    ("seats", "settings", "low_latency", "high_throughput"),
    [
        (NEW, {}, f"cuda, for 2 ranks: {OWN} 9.0; a group of more ranks than GPUs is on", None),
        (NEW[:1], {}, f"cuda, for 1 rank: {OWN} 9.0", None),
        (NEW, {"backend": "host"}, "host, because the setting backend is 'host' (from arg", None),
        (NEW, {"backend": "cuda"}, "cuda, for 2 ranks: the setting backend is 'cuda' (from", None),
        (OLD, {}, f"cuda, for 2 ranks: {OWN} 8.6", f"host, because {NEEDS}"),
        (
            OLD,
            {"backend": "cuda"},
            f"cuda, for 2 ranks: the setting backend is 'cuda' (from argument), and {OWN} 8.6",
            f"cannot run: the setting backend is 'cuda' (from argument), but {NEEDS}",
        ),
        (APART, {}, f"host, because {NO_ACCESS}", None),
        (
            APART,
            {"backend": "cuda"},
            f"cannot run: the setting backend is 'cuda' (from argument), but {NO_ACCESS}",
            None,
        ),
        (BARE, {}, "host, because rank 1 cannot use a GPU: no NVRTC (libnvrtc)", None),
        (SAME, {}, "host, because rank 0 and rank 1 both have cuda:0 as current device", None),
        (SAME, {"share_gpus": True}, "cuda, for 2 ranks: ranks share GPUs, compute cap", None),
        (
            NEW,
            {"hosts": 2},
            f"cuda, for 2 ranks: {OWN} 9.0",
            None,
        ),
        (
            NEW,
            {"hosts": 2, "backend": "cuda"},
            f"cuda, for 2 ranks: the setting backend is 'cuda' (from argument), and {OWN} 9.0",
            None,
        ),
        (UNKNOWN, {}, "cannot run: ", None),
    ],
)
def test_doctor_says_which_backend_each_mode_takes(
    monkeypatch: pytest.MonkeyPatch,
    seats: list[Any],
    settings: dict[str, Any],
    low_latency: str,
    high_throughput: str | None,
) -> None:
    found = told(monkeypatch, seats, **settings)
    assert found["low_latency"].startswith(low_latency)
    assert found["high_throughput"].startswith(high_throughput or low_latency)


def test_doctor_asks_a_rank_for_each_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def answer(function: object, ranks: int, **options: Any) -> list[dict[str, str]]:
        asked.append(ranks)
        return [{"low_latency": "cuda, for", "high_throughput": "cannot run: because"}] * ranks

    monkeypatch.setattr(launch, "launch", answer)
    cases = [(0, "0", "auto"), (1, "0", "auto"), (8, "0", "auto"), (1, "1", "auto")]
    for gpu_count, share, backend in (*cases, (8, "1", "auto"), (8, "0", "host")):
        monkeypatch.setattr(torch.cuda, "device_count", lambda count=gpu_count: count)
        monkeypatch.setenv("FANFOLD_SHARE_GPUS", share)
        monkeypatch.setenv("FANFOLD_BACKEND", backend)
        doctor_modes._asked.cache_clear()
        assert doctor_modes.low_latency() == ("ok", "cuda, for")
        assert doctor_modes.high_throughput()[:2] == ("problem", "cannot run: because")
    doctor_modes._asked.cache_clear()
    assert asked == [1, 1, 8, 2, 8, 1]


@pytest.fixture
def one_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device of compute capability 9.0 with all that kernels need."""
    for name, value in {
        "current_device": lambda: 0,
        "get_device_capability": lambda device: (9, 0),
        "get_device_name": lambda device: "a GPU",
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(choosing, "lacking", lambda: None)
    monkeypatch.setattr(choosing, "identity", lambda device: "a")
    monkeypatch.setattr(choosing, "unreachable_from", lambda device: ())
    monkeypatch.setattr(choosing.nvrtc, "library", lambda: pytest.fail("opened the compiler"))
    monkeypatch.setattr(choosing.nvrtc, "find", lambda: None)


def placed_alone(backend: str) -> Any:
    [placed] = Ranks(1).run(lambda group: choose(group, Config.resolve(backend=backend)))
    return placed


@pytest.mark.parametrize("capability", [(8, 0), (9, 0)])
def test_a_gpu_that_kernels_run_on(
    one_gpu: None, monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int]
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    placed = placed_alone("cuda")
    assert (placed.backend, placed.capability) == ("cuda", capability)


def test_a_gpu_too_old_for_kernels(one_gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    reason = r"rank 0 .*: kernels need compute capability 8\.0, and cuda:0 \(a GPU\) has 7\.5"
    assert re.search(reason, placed_alone("auto").reason)
    error = placed_alone("cuda")
    assert isinstance(error, UnavailableError)
    assert re.search(reason, str(error))


def test_no_compiler_for_kernels(one_gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvrtc, "find", find)
    monkeypatch.setattr(nvrtc, "candidates", lambda: iter(()))
    placed, error = placed_alone("auto"), placed_alone("cuda")
    assert placed.backend == "host"
    assert "rank 0 cannot use a GPU: no NVRTC" in placed.reason
    assert isinstance(error, UnavailableError)
    assert "no NVRTC" in str(error)


def test_no_access_to_a_gpu_of_nobody_is_no_obstacle(monkeypatch: pytest.MonkeyPatch) -> None:
    seats = [seat(0, "a", unreachable=("c",)), seat(1, "b")]
    assert [p.backend for p in decide(monkeypatch, seats)] == ["cuda", "cuda"]


def test_host_does_not_look_at_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choosing, "_look", lambda group: pytest.fail("looked"))
    [placed] = Ranks(1).run(lambda group: choose(group, Config.resolve(backend="host")))
    assert placed.backend == "host"
    assert "'host'" in placed.reason


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("backend", ("auto", "host")),
        ("share_gpus", (True, False)),
        ("hosts", (None, 2)),
        ("gpu_memory", ("torch", "nccl")),
    ],
)
def test_settings_must_agree(
    monkeypatch: pytest.MonkeyPatch, name: str, values: tuple[Any, Any]
) -> None:
    monkeypatch.setattr(choosing, "_look", lambda group: GOOD[0])
    for error in Ranks(2).run(lambda g: choose(g, Config.resolve(**{name: values[g.rank]}))):
        assert isinstance(error, ArgumentError)
        assert error.argument == name


def test_a_tensor_elsewhere_is_told_why() -> None:
    placed = BackendChoice("cuda", torch.device("cuda:1"), "each rank has a GPU of its own")
    placed.check_devices(x=None, y="no tensor")
    with pytest.raises(ArgumentError, match=r"x.device is cpu, .* cuda:1, .* a GPU of its own"):
        placed.check_devices(x=torch.zeros(1))
    host = BackendChoice("host", torch.device("cpu"), "rank 0 cannot use a GPU")
    host.check_devices(x=torch.zeros(1))
    with pytest.raises(ArgumentError, match=r"out.device is meta, .* cpu, .* cannot use a GPU"):
        host.check_devices(x=torch.zeros(1), out=torch.zeros(1, device="meta"))


@pytest.mark.skipif(torch.version.cuda is not None, reason="PyTorch has CUDA")
def test_this_build_lacks_cuda() -> None:
    assert gpus.lacking() == "its PyTorch is built without CUDA"
    [placed] = Ranks(1).run(lambda group: choose(group, Config.resolve(backend="auto")))
    assert placed.backend == "host"
    assert "rank 0 cannot use a GPU: its PyTorch is built without CUDA" in placed.reason


class Properties:
    """A device of an older PyTorch."""

    pci_domain_id, pci_bus_id, pci_device_id = 0, 59, 0


def test_identity_of_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: Properties())
    assert gpus.identity(0) == "pci 0:59:0"
    monkeypatch.setattr(Properties, "uuid", "GPU-1234", raising=False)
    assert gpus.identity(0) == "GPU-1234"
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: object())
    assert gpus.identity(3) == "index 3"


def test_devices_out_of_reach(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda one, other: other != 2)
    monkeypatch.setattr(gpus, "identity", lambda device: f"gpu {device}")
    assert gpus.unreachable_from(0) == ("gpu 2",)
    assert gpus.unreachable_from(2) == ()


@pytest.mark.parametrize(
    ("count", "initialized", "share", "taken"),
    [
        (4, False, False, [1]),
        (2, False, False, [1]),
        (1, False, False, []),
        (0, False, False, []),
        (4, True, False, []),
        (2, False, True, [1]),
        (1, False, True, [0]),
        (0, False, True, []),
        (1, True, True, []),
    ],
)
def test_taking_a_device(
    monkeypatch: pytest.MonkeyPatch, count: int, initialized: bool, share: bool, taken: list[int]
) -> None:
    chosen: list[int] = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: initialized)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    gpus.take_device(1, 2, share=share)
    assert chosen == taken


@pytest.mark.parametrize(
    ("backend", "share", "asked"),
    [("auto", "0", [(1, 2, False)]), ("auto", "1", [(1, 2, True)]), ("host", "1", [])],
)
def test_what_a_started_rank_takes(
    monkeypatch: pytest.MonkeyPatch,
    backend: str,
    share: str,
    asked: list[tuple[int, int, bool]],
) -> None:
    seen: list[tuple[int, int, bool]] = []
    monkeypatch.setenv("FANFOLD_BACKEND", backend)
    monkeypatch.setenv("FANFOLD_SHARE_GPUS", share)
    monkeypatch.setattr(
        launching, "take_device", lambda rank, ranks, *, share: seen.append((rank, ranks, share))
    )
    launching.take_local_device(1, 2)
    assert seen == asked
