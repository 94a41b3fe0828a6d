"""What becomes of a GPU's memory whose owner is gone; stand-ins play the part of the device."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

from fanfold.letting_go import drop_left, let_go


class _Kept:
    pass


class _Owner:
    def __init__(self, kept: _Kept) -> None:
        self.itself = self  # only the garbage collector ends it
        weakref.finalize(self, let_go, torch.device("cuda", 3), kept).atexit = False


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> dict[str, object]:
    """What the stand-in says of a capture, and the devices that were waited for."""
    # What other tests have left is let go now: these tests count the waits for their own.
    gc.collect()
    drop_left()
    said: dict[str, object] = {"capturing": False, "waited": []}
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: said["capturing"])
    monkeypatch.setattr(torch.cuda, "synchronize", lambda which: said["waited"].append(which))  # type: ignore[attr-defined]
    return said


def test_the_memory_goes_after_a_wait(device: dict[str, object]) -> None:
    kept = _Kept()
    alive = weakref.ref(kept)
    _Owner(kept)
    del kept
    assert alive() is not None
    gc.collect()
    assert alive() is None
    assert device["waited"] == [torch.device("cuda", 3)]


def test_a_capture_is_not_waited_in(device: dict[str, object]) -> None:
    kept = _Kept()
    alive = weakref.ref(kept)
    device["capturing"] = True
    _Owner(kept)
    del kept
    gc.collect()
    drop_left()
    assert alive() is not None
    assert device["waited"] == []
    device["capturing"] = False
    drop_left()
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
    let_go(torch.device("cuda", 3), kept)
    del kept
    assert alive() is None
