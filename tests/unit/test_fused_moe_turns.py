"""Calls of fused layers on one GPU take turns, also when threads make them; no GPU is needed."""

from __future__ import annotations

import threading

import pytest
import torch

from fanfold.fused_moe import cuda

DEVICE = torch.device("cuda:0")


class Order:
    """Stands for the order of streams; counts the turns."""

    def __init__(self, device: torch.device) -> None:
        self.turns = 0

    def follow(self) -> int:
        self.turns += 1
        return self.turns


@pytest.fixture(autouse=True)
def no_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "StreamOrder", Order)
    monkeypatch.setattr(cuda, "_turns", {})


def test_a_thread_waits_until_the_turn_before_has_enqueued_all() -> None:
    turns = cuda._turns_of(DEVICE)
    seen: list[str] = []

    def other() -> None:
        with turns.next():
            seen.append("other")

    thread = threading.Thread(target=other)
    with turns.next():
        thread.start()
        thread.join(0.2)
        assert thread.is_alive()
        seen.append("first")
    thread.join(20.0)
    assert seen == ["first", "other"]


def test_a_call_that_fails_refuses_inside_of_its_turn() -> None:
    turns = cuda._turns_of(DEVICE)
    with turns.next() as outer, turns.next() as inner:
        assert (outer, inner) == (1, 2)


def test_an_error_ends_a_turn() -> None:
    turns = cuda._turns_of(DEVICE)

    def fails() -> None:
        with turns.next():
            raise MemoryError

    with pytest.raises(MemoryError):
        fails()
    seen: list[int] = []

    def takes() -> None:
        with turns.next() as stream:
            seen.append(stream)

    thread = threading.Thread(target=takes)
    thread.start()
    thread.join(20.0)
    assert seen == [2]


def test_all_layers_of_a_gpu_share_their_turns() -> None:
    assert cuda._turns_of(DEVICE) is cuda._turns_of(torch.device("cuda:0"))
    assert cuda._turns_of(DEVICE) is not cuda._turns_of(torch.device("cuda:1"))
