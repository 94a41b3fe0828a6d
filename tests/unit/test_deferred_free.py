"""Memory of a GPU whose owner is gone is freed when the GPU is idle; the device is a stand-in."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

from fanfold.deferred_free import drain_deferred_frees, free_when_idle


class _Kept:
    pass


class _Owner:
    def __init__(self, kept: _Kept) -> None:
        self.itself = self  # only the garbage collector ends it
        weakref.finalize(self, free_when_idle, torch.device("cuda", 3), kept).atexit = False


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> dict[str, object]:
    """Whether the stand-in captures a graph, and the devices that were waited for."""
    # Frees that other tests deferred come first: these tests count the waits for their own.
    gc.collect()
    drain_deferred_frees()
    said: dict[str, object] = {"capturing": False, "waited": []}
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: said["capturing"])
    monkeypatch.setattr(torch.cuda, "synchronize", lambda which: said["waited"].append(which))  # type: ignore[attr-defined]
    return said


def test_memory_is_freed_after_a_wait(device: dict[str, object]) -> None:
    kept = _Kept()
    alive = weakref.ref(kept)
    _Owner(kept)
    del kept
    assert alive() is not None
    gc.collect()
    assert alive() is None
    assert device["waited"] == [torch.device("cuda", 3)]


def test_a_capture_defers_the_free(device: dict[str, object]) -> None:
    kept = _Kept()
    alive = weakref.ref(kept)
    device["capturing"] = True
    _Owner(kept)
    del kept
    gc.collect()
    drain_deferred_frees()
    assert alive() is not None
    assert device["waited"] == []
    device["capturing"] = False
    drain_deferred_frees()
    assert alive() is None
    assert device["waited"] == [torch.device("cuda", 3)]


def test_a_broken_device_keeps_nothing(
    device: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(which: torch.device) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(torch.cuda, "synchronize", fail)
    kept = _Kept()
    alive = weakref.ref(kept)
    free_when_idle(torch.device("cuda", 3), kept)
    del kept
    assert alive() is None
