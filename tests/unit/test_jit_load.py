"""Loading kernels on a GPU, which stand-ins play: compiled together, once, and without a lock where
there is nothing to load."""

from __future__ import annotations

import contextlib
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from fanfold import jit
from fanfold.config import Config
from fanfold.gpus import shared_by_threads
from fanfold.jit import kernel
from fanfold.jit.kernel import KernelSource


def test_several_are_compiled_at_the_same_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """And each once, also where no cache keeps them."""
    all_at_once = threading.Barrier(3, timeout=20.0)
    sources = [KernelSource("test/scale.cu", "scale", {"kScale": scale}) for scale in range(4)]
    compiled: list[KernelSource] = []

    def compile_one(source: KernelSource, arch: str, config: Config | None) -> str:
        compiled.append(source)
        all_at_once.wait()
        return f"{source} for {arch}"

    monkeypatch.setattr(kernel, "_loaded", {(sources[1], 0): "loaded before"})
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(kernel, "compile", compile_one)
    monkeypatch.setattr(kernel, "_into", lambda device, source, binary: binary)
    wanted = [f"{source} for sm_90a" for source in sources]
    wanted[1] = "loaded before"
    assert jit.load_all([*sources, sources[0]], 0) == [*wanted, wanted[0]]  # type: ignore[comparison-overlap]
    assert jit.load(sources[2], 0) == wanted[2]  # type: ignore[comparison-overlap]
    assert len(compiled) == 3
    assert set(compiled) == {sources[0], sources[2], sources[3]}


def test_what_is_loaded_waits_for_no_other_loading(monkeypatch: pytest.MonkeyPatch) -> None:
    source = KernelSource("test/scale.cu", "scale", {"kScale": 1})
    monkeypatch.setattr(kernel, "_loaded", {(source, 0): "loaded before"})
    with ThreadPoolExecutor(1) as other, kernel._loading:
        assert other.submit(jit.load, source, 0).result(timeout=20.0) == "loaded before"


@pytest.mark.parametrize("threads", [True, False])
@pytest.mark.parametrize("captured", [True, False])
def test_a_rank_that_is_a_thread_loads_when_its_kernels_have_ended(
    monkeypatch: pytest.MonkeyPatch, threads: bool, captured: bool
) -> None:
    """The driver may wait for all kernels before it loads one, and those for another rank's launch,
    which it holds up meanwhile."""
    events: list[str] = []

    class Stream:
        def synchronize(self) -> None:
            events.append("locked" if kernel._loading.locked() else "waited")

    def into(device: torch.device, source: KernelSource, binary: str) -> str:
        events.append("loaded")
        return binary

    monkeypatch.setattr(kernel, "_loaded", {})
    monkeypatch.setattr(kernel, "compile", lambda source, arch, config: "compiled")
    monkeypatch.setattr(kernel, "_into", into)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream())
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: captured)
    with shared_by_threads() if threads else contextlib.nullcontext():
        jit.load(KernelSource("test/scale.cu", "scale", {"kScale": 1}), 0)
    assert events == (["waited", "loaded"] if threads and not captured else ["loaded"])
