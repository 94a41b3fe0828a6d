"""Calls of a mode on several streams, on streams that only write down what they are told."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch

from fanfold.stream_order import StreamOrder

DEVICE = torch.device("cuda", 0)


class FakeStream:
    def __init__(self, address: int, log: list[tuple[int, int]]) -> None:
        self.address, self._log = address, log

    def wait_stream(self, other: FakeStream) -> None:
        self._log.append((self.address, other.address))

    def wait_event(self, event: FakeEvent) -> None:
        assert event.on is not None
        self._log.append((self.address, -event.on))  # not after all of that stream


class FakeEvent:
    on: int | None = None

    def record(self, stream: FakeStream) -> None:
        self.on = stream.address


class FakeCuda:
    """Stands for ``torch.cuda``; ``log`` has who waits for whom, by address."""

    def __init__(self) -> None:
        self.current, self.capturing = 0, set[int]()
        self.log: list[tuple[int, int]] = []

    Event = FakeEvent

    def ExternalStream(self, address: int, device: torch.device) -> FakeStream:  # noqa: N802
        assert device == DEVICE
        assert address != 0, "PyTorch makes a new stream for no address"
        return FakeStream(address, self.log)

    def default_stream(self, device: torch.device) -> FakeStream:
        assert device == DEVICE
        return FakeStream(0, self.log)

    @contextlib.contextmanager
    def stream(self, stream: FakeStream) -> Iterator[None]:
        before, self.current = self.current, stream.address
        yield
        self.current = before

    def is_current_stream_capturing(self) -> bool:
        return self.current in self.capturing


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    fake = FakeCuda()
    native = SimpleNamespace(_cuda_getCurrentRawStream=lambda index: fake.current)
    stands_in = SimpleNamespace(cuda=fake, _C=native, device=torch.device)
    monkeypatch.setattr("fanfold.stream_order.torch", stands_in)
    return fake


def test_calls_follow_each_other_from_the_default_stream_and_back(cuda: FakeCuda) -> None:
    order = StreamOrder(DEVICE)
    for stream in (0, 0, 64, 64, 128, 0):
        cuda.current = stream
        assert order.follow() == stream
    assert cuda.log == [(64, 0), (128, 64), (0, 128)]


def test_a_capture_stands_apart(cuda: FakeCuda) -> None:
    order = StreamOrder(DEVICE)
    cuda.capturing = {64}
    cuda.current = 64
    assert order.follow() == 64
    cuda.current = 128
    order.follow()
    assert cuda.log == [(128, 0)]
    # The stream of the last call is being captured: nothing outside can wait for it.
    cuda.capturing = {128}
    cuda.current = 0
    order.follow()
    assert cuda.log == [(128, 0)]


def test_calls_of_one_capture_follow_each_other(cuda: FakeCuda) -> None:
    order = StreamOrder(DEVICE)
    cuda.current = 64
    order.follow()
    assert cuda.log == [(64, 0)]
    # It begins on the stream of the last call, and comes back to it.
    cuda.capturing = {64, 128}
    for stream in (64, 128, 128, 64):
        cuda.current = stream
        assert order.follow() == stream
    assert cuda.log[1:] == [(128, 64), (64, 128)]
    # Outside again, calls follow the last that was not captured, on its stream or on another.
    cuda.capturing = set()
    for stream in (64, 192):
        cuda.current = stream
        order.follow()
    assert cuda.log[3:] == [(192, 64)]


def test_a_stream_that_was_captured_last_follows_the_calls_outside(cuda: FakeCuda) -> None:
    order = StreamOrder(DEVICE)
    cuda.current, cuda.capturing = 64, {64}
    order.follow()
    cuda.capturing = set()
    order.follow()
    assert cuda.log == [(64, 0)]


def test_a_call_outside_of_a_capture_under_way(cuda: FakeCuda) -> None:
    order = StreamOrder(DEVICE)
    cuda.capturing = {64, 128}
    for stream in (64, 192, 128):
        cuda.current = stream
        order.follow()
    assert cuda.log == [(192, 0), (128, 64)]


def test_the_default_stream_is_never_asked_whether_it_is_captured(cuda: FakeCuda) -> None:
    order = StreamOrder(DEVICE)
    asked: list[int] = []
    capturing = cuda.is_current_stream_capturing

    def ask() -> bool:
        asked.append(cuda.current)
        return capturing()

    cuda.is_current_stream_capturing = ask  # type: ignore[method-assign]
    cuda.current, cuda.capturing = 64, {64}
    order.follow()
    assert asked == [64]


def test_captures_do_not_wait_for_each_other(cuda: FakeCuda) -> None:
    order = StreamOrder(DEVICE)
    for stream in (64, 128):
        cuda.current, cuda.capturing = stream, {stream}
        order.follow()
    assert cuda.log == []
    # A later one that has the stream of an earlier one, after a call outside.
    cuda.current, cuda.capturing = 192, set()
    order.follow()
    cuda.capturing = {192, 128}
    order.follow()
    cuda.current = 128
    order.follow()
    assert cuda.log == [(192, 0), (128, 192)]


def test_a_call_may_follow_a_marked_call_alone(cuda: FakeCuda) -> None:
    order = StreamOrder(DEVICE)
    cuda.current = 64
    order.mark(order.follow())
    cuda.current = 128
    assert order.follow_calls() == 128
    assert order.follow_calls() == 128
    assert cuda.log == [(64, 0), (128, -64)]
    # That one was not marked.
    cuda.current = 192
    order.follow_calls()
    assert cuda.log[2:] == [(192, 128)]
    # Marks are only for those who ask for them.
    order.mark(192)
    cuda.current = 64
    order.follow()
    assert cuda.log[3:] == [(64, 192)]


def test_a_mark_is_of_its_capture(cuda: FakeCuda) -> None:
    order = StreamOrder(DEVICE)
    cuda.current = 64
    order.mark(order.follow())
    cuda.capturing = {64, 128}
    order.follow()  # a call that was not marked
    cuda.current = 128
    order.follow_calls()
    assert cuda.log == [(64, 0), (128, 64)]
    cuda.current = 64
    order.mark(order.follow())
    cuda.current = 128
    order.follow_calls()
    assert cuda.log[2:] == [(64, 128), (128, -64)]
    # Outside of it nothing waits for what was captured.
    cuda.current, cuda.capturing = 192, set()
    order.follow_calls()
    assert cuda.log[4:] == [(192, 64)]
