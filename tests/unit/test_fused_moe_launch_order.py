"""Launches of fused layers on one GPU are serialized, also across threads; needs no GPU."""

from __future__ import annotations

import threading

import pytest
import torch

from fanfold.fused_moe import cuda

DEVICE = torch.device("cuda:0")


class Order:
    """In place of StreamOrder; counts launches."""

    def __init__(self, device: torch.device) -> None:
        self.launches = 0

    def follow(self) -> int:
        self.launches += 1
        return self.launches


@pytest.fixture(autouse=True)
def no_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "StreamOrder", Order)
    monkeypatch.setattr(cuda, "_launch_orders", {})


def test_a_thread_waits_until_the_launches_before_are_enqueued() -> None:
    order = cuda._launch_order_of(DEVICE)
    seen: list[str] = []

    def other() -> None:
        with order.next():
            seen.append("other")

    thread = threading.Thread(target=other)
    with order.next():
        thread.start()
        thread.join(0.2)
        assert thread.is_alive()
        seen.append("first")
    thread.join(20.0)
    assert seen == ["first", "other"]


def test_a_call_that_fails_refuses_inside_of_its_block() -> None:
    order = cuda._launch_order_of(DEVICE)
    with order.next() as outer, order.next() as inner:
        assert (outer, inner) == (1, 2)


def test_an_error_lets_others_launch() -> None:
    order = cuda._launch_order_of(DEVICE)

    def fails() -> None:
        with order.next():
            raise MemoryError

    with pytest.raises(MemoryError):
        fails()
    seen: list[int] = []

    def takes() -> None:
        with order.next() as stream:
            seen.append(stream)

    thread = threading.Thread(target=takes)
    thread.start()
    thread.join(20.0)
    assert seen == [2]


def test_all_layers_of_a_gpu_share_one_order() -> None:
    assert cuda._launch_order_of(DEVICE) is cuda._launch_order_of(torch.device("cuda:0"))
    assert cuda._launch_order_of(DEVICE) is not cuda._launch_order_of(torch.device("cuda:1"))
