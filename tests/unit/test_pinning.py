"""Which ranges of memory are pinned. CUDA is stood in for."""

from __future__ import annotations

import pytest

from fanfold.errors import SystemFailure
from fanfold.memory import pinning
from fanfold.memory.pinning import PinnedRanges


class Cuda:
    """Pins what it is asked for, up to ``most`` bytes in all."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, most: int = 1 << 30) -> None:
        self.pinned: dict[int, int] = {}
        self.asked: list[int] = []
        self._most = most
        monkeypatch.setattr(pinning, "_pin", self._pin)
        monkeypatch.setattr(pinning, "_unpin", self._unpin)

    def _pin(self, address: int, nbytes: int) -> None:
        assert address not in self.pinned
        if sum(self.pinned.values()) + nbytes > self._most:
            raise RuntimeError("out of memory")
        self.asked.append(address)
        self.pinned[address] = nbytes

    def _unpin(self, address: int) -> None:
        del self.pinned[address]


def test_ranges_that_stay_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = Cuda(monkeypatch)
    ranges = PinnedRanges()
    ranges.change([(4096, 4096), (16384, 8192), (65536, 4096)])
    ranges.change([(16384, 8192), (65536, 8192)])
    assert cuda.pinned == {16384: 8192, 65536: 8192}
    assert cuda.asked == [4096, 16384, 65536, 65536]
    ranges.close()
    ranges.close()
    assert cuda.pinned == {}


def test_nothing_stays_pinned_where_not_all_can_be(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = Cuda(monkeypatch, most=12288)
    ranges = PinnedRanges()
    ranges.change([(4096, 4096)])
    with pytest.raises(SystemFailure, match=r"8192 of 16384 bytes .*out of memory.*max_tokens"):
        ranges.change([(4096, 4096), (16384, 4096), (65536, 8192)])
    assert cuda.pinned == {}


def test_a_lost_cuda_unpins_nothing_and_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    Cuda(monkeypatch)
    ranges = PinnedRanges()
    ranges.change([(4096, 4096)])

    def lost(address: int) -> None:
        raise RuntimeError(f"no context for {address}")

    monkeypatch.setattr(pinning, "_unpin", lost)
    ranges.close()
