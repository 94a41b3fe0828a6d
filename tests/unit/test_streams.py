"""DeepEP's rules about streams and events, on streams that only write down what they are told."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from fanfold.deep_ep import streams as module
from fanfold.deep_ep.events import EventHandle, EventOverlap, check_ordering
from fanfold.deep_ep.streams import HostStreams, Streams
from fanfold.deep_ep.zero_copy import ZeroCopy


@dataclass
class Device:
    """Stands for ``torch.cuda``; ``log`` is what happened, in order."""

    log: list[str] = field(default_factory=list)
    current: Any = None
    initialized: bool = True
    captured: tuple[str, ...] = ()


@dataclass(eq=False)
class FakeStream:
    name: str
    device: Device

    def wait_stream(self, other: FakeStream) -> None:
        self.device.log.append(f"{self.name} waits for {other.name}")

    def record_event(self) -> str:
        self.device.log.append(f"event on {self.name}")
        return f"event of {self.name}"

    def wait_event(self, event: str) -> None:
        self.device.log.append(f"{self.name} waits for {event}")


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Device:
    """A GPU whose current stream is called main."""
    device = Device()
    device.current = FakeStream("main", device)

    @contextlib.contextmanager
    def entered(stream: FakeStream) -> Iterator[None]:
        before, device.current = device.current, stream
        yield
        device.current = before

    def record(tensors: tuple[torch.Tensor, ...], stream: FakeStream) -> None:
        device.log.append(f"{len(tensors)} tensors on {stream.name}")

    for name, value in {
        "Stream": lambda device_, priority: FakeStream("comm", device),
        "current_stream": lambda device_=None: device.current,
        "is_initialized": lambda: device.initialized,
        "is_current_stream_capturing": lambda: device.current.name in device.captured,
        "stream": entered,
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(module, "record", record)
    return device


X, OUT = torch.ones(1), torch.zeros(1)


def run(
    cuda: Device, *, async_finish: bool = False, hook: Any = None, previous: Any = None
) -> tuple[Any, ...]:
    def call() -> tuple[torch.Tensor, Any]:
        cuda.log.append(f"call on {cuda.current.name}")
        return OUT, hook

    streams = Streams(torch.device("cuda:0"))
    return streams.run(call, async_finish=async_finish, inputs=(X, None), previous=previous)


def test_a_plain_call_runs_on_the_current_stream(cuda: Device) -> None:
    result, hook, event = run(cuda)
    assert (result is OUT, hook, event.event) == (True, None, None)
    assert cuda.log == ["call on main"]


def test_a_call_with_a_hook_does_too(cuda: Device) -> None:
    receive = object()
    _, hook, event = run(cuda, hook=receive)
    assert (hook is receive, event.event) == (True, None)
    assert cuda.log == ["call on main"]


def test_an_asynchronous_call_runs_beside(cuda: Device) -> None:
    _, _, event = run(cuda, async_finish=True)
    assert cuda.log == [
        "comm waits for main",
        "call on comm",
        "1 tensors on comm",
        "1 tensors on comm",
        "2 tensors on main",
        "event on comm",
    ]
    assert event.extra_tensors == (X, OUT)
    cuda.log.clear()
    event.current_stream_wait()
    assert cuda.log == ["main waits for event of comm"]


def test_a_call_that_raises_may_have_been_enqueued(cuda: Device) -> None:
    def call() -> tuple[torch.Tensor, Any]:
        raise ValueError("of an earlier call")

    with pytest.raises(ValueError, match="earlier"):
        Streams(torch.device("cuda:0")).run(call, async_finish=True, inputs=(X, None))
    assert cuda.log == ["comm waits for main", "main waits for comm", "1 tensors on comm"]


def test_an_event_of_the_current_stream(cuda: Device) -> None:
    with EventOverlap(EventHandle()) as event:
        cuda.log.append("other work")
    assert event.event is not None
    assert cuda.log == ["event on main", "other work", "main waits for event of main"]


def test_a_call_after_a_previous_event(cuda: Device) -> None:
    previous = EventHandle()
    cuda.log.clear()
    run(cuda, previous=previous)
    assert cuda.log == ["main waits for event of main", "call on main"]
    cuda.log.clear()
    run(cuda, previous=previous, async_finish=True)
    # What the current stream has been given since the event may run beside the call.
    assert cuda.log[:2] == ["comm waits for event of main", "call on comm"]


def test_the_event_of_an_ordering(cuda: Device) -> None:
    event = EventHandle()
    cuda.log.clear()
    for previous, wanted in (
        (EventOverlap(event), event),
        (event, event),
        (EventOverlap(), None),
        (None, None),
    ):
        assert check_ordering(previous, False, False) is wanted
    assert check_ordering(event, True, True) is event
    assert cuda.log == []


def test_tensors_of_a_result_are_recorded_wherever_they_are(cuda: Device) -> None:
    @dataclass
    class Result:
        pair: tuple[torch.Tensor, torch.Tensor]
        absent: None
        counts: list[int]

    result = Result((X, OUT), None, [3])
    streams = Streams(torch.device("cuda:0"))
    _, _, event = streams.run(
        lambda: (result, None), async_finish=True, inputs=((X, X), "no tensor", (OUT, None))
    )
    assert event.extra_tensors == (X, X, OUT, X, OUT)


def test_events_do_not_start_cuda(cuda: Device) -> None:
    cuda.initialized = False
    EventHandle().current_stream_wait()
    assert cuda.log == []


def test_on_the_host_a_call_is_over_when_it_returns() -> None:
    streams = HostStreams()
    result, hook, event = streams.run(lambda: (OUT, None), async_finish=False, inputs=(X,))
    assert (result is OUT, hook, event.event) == (True, None, None)
    _, _, event = streams.run(lambda: (OUT, None), async_finish=True, inputs=(X,))
    assert event.event is not None
    assert event.extra_tensors is not None
    assert event.extra_tensors[0] is X
    event.current_stream_wait()
    assert streams.comm is not None


def test_staged_calls_wait_on_the_current_stream(cuda: Device) -> None:
    previous = EventHandle()
    cuda.log.clear()
    HostStreams().run(lambda: (OUT, None), async_finish=False, inputs=X, previous=previous)
    assert cuda.log == ["main waits for event of main"]


@pytest.mark.parametrize("async_finish", [False, True])
def test_who_writes_zero_copy_outputs_waits_for_their_last_reader(
    cuda: Device, async_finish: bool
) -> None:
    streams, outputs = Streams(torch.device("cuda:0")), ZeroCopy(torch.device("cuda:0"))
    outputs.tensor = torch.zeros(2, 3)
    assert outputs.take((2, 3), streams) is outputs.tensor
    assert cuda.log == []
    _, _, event = streams.run(lambda: (OUT, None), async_finish=async_finish, inputs=X)
    outputs.was_given(event)
    cuda.log.clear()
    cuda.current = FakeStream("other", cuda)
    outputs.take((2, 3), streams)
    assert cuda.log == [f"other waits for event of {'comm' if async_finish else 'main'}"]


def test_a_capture_waits_for_readers_within_it_only(cuda: Device) -> None:
    streams, outputs = Streams(torch.device("cuda:0")), ZeroCopy(torch.device("cuda:0"))
    outputs.tensor = torch.zeros(2, 3)
    _, _, event = streams.run(lambda: (OUT, None), async_finish=True, inputs=X)
    outputs.was_given(event)
    cuda.log.clear()
    cuda.captured = ("main",)
    outputs.take((2, 3), streams)
    assert cuda.log == []
    cuda.captured = ("main", "comm")
    outputs.was_given(EventOverlap(EventHandle()))
    cuda.log.clear()
    outputs.take((2, 3), streams)
    assert cuda.log == ["main waits for comm"]
    cuda.log.clear()
    cuda.captured = ()
    outputs.take((2, 3), streams)
    assert cuda.log == ["main waits for event of comm"]  # of before the capture


def test_on_the_host_zero_copy_outputs_wait_for_nothing(cuda: Device) -> None:
    outputs = ZeroCopy(torch.device("cpu"))
    first = outputs.take((2, 3), HostStreams())
    outputs.was_given(EventOverlap())
    assert outputs.take((2, 3), HostStreams()) is first
    assert outputs.take((2, 4), HostStreams()).shape == (2, 4)
    assert cuda.log == []
