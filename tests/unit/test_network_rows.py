"""Which memory rows have that GPUs exchange with other hosts: all ranks decide, for reasons that
they name."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from fanfold import _core
from fanfold.config import Config
from fanfold.errors import FanfoldError
from fanfold.memory import rows
from fanfold.memory.rows import NetworkRows, why_no_rows_on

GPU = torch.device("cuda", 1)


class Given:
    """In the place of memory on a GPU.

    Args:
        nbytes, device: as of :class:`fanfold.memory.rows.GpuRows`.
    """

    address, dmabuf, closed = 1 << 21, 9, 0

    def __init__(self, nbytes: int, device: torch.device) -> None:
        self.nbytes, self.device = nbytes, device.index

    def close(self) -> None:
        self.closed += 1


class Carrier:
    """What a carrier has for rows.

    Args:
        why: its network reaches no GPU's memory.
        failure: of each registration.
        all_have: whether all ranks have registered memory.
        holds: whether the network has it, although registration has failed.
    """

    network = "libfabric:efa"

    def __init__(
        self,
        why: str = "",
        failure: Exception | None = None,
        all_have: bool = True,
        holds: bool = False,
    ) -> None:
        self.why_no_gpu_memory, self.has_rows_apart = why, all_have
        self._failure, self.holds_rows = failure, holds
        self.registered: list[tuple[int, ...]] = []

    def register_rows(self, *memory: int) -> None:
        if self._failure is not None:
            raise self._failure
        self.registered.append(memory)


class Ranks:
    """A group of two, of which this is rank 0.

    Args:
        reason: of the other rank.
    """

    def __init__(self, reason: str = "") -> None:
        self._reason = reason

    def all_gather(self, reason: str) -> list[str]:
        return [reason, self._reason]


@pytest.fixture(autouse=True)
def gpu(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Asks of which GPU whether NICs may write it; they may."""
    asked: list[int] = []

    def why(device: int) -> str:
        asked.append(device)
        return ""

    monkeypatch.setattr(_core, "cuda_why_no_network_memory", why)
    monkeypatch.setattr(rows, "GpuRows", Given)
    return asked


def offered(
    carrier: Any, ranks: Ranks | None = None, fits: bool = True, **settings: Any
) -> NetworkRows:
    made = NetworkRows()
    core: Any = SimpleNamespace(rows_bytes=3000, mapped_bytes=2**35, may_have_rows_apart=fits)
    group: Any = ranks or Ranks()
    made.offer(group, core, carrier, GPU, Config.resolve(**settings))
    return made


def test_rows_lie_on_the_gpu(gpu: list[int]) -> None:
    carrier: Any = Carrier()
    made = offered(carrier)
    assert carrier.registered == [(1 << 21, 3000, 1, 9)]
    assert made.memory is None  # all ranks decide
    made.choose(carrier)
    memory: Any = made.memory
    assert (memory.nbytes, made.why_none, gpu) == (3000, "", [1])
    made.close()
    assert memory.closed == 1


def test_why_they_do_not() -> None:
    assert "network_memory is 'cpu'" in offered(Carrier(), network_memory="cpu").why_none
    reason = offered(Carrier(why="tcp moves bytes by the CPU")).why_none
    assert reason == "of libfabric:efa: tcp moves bytes by the CPU"
    with mock.patch.object(_core, "cuda_why_no_network_memory", return_value="no order"):
        assert offered(Carrier()).why_none == "no order"
    with mock.patch.object(_core, "cuda_why_no_network_memory", side_effect=FanfoldError("none")):
        assert offered(Carrier()).why_none == "none"
    assert offered(None).why_none == "there is no network"
    assert "more than the 16 GiB" in offered(Carrier(), fits=False).why_none


def test_another_rank_may_not(gpu: list[int]) -> None:
    carrier = Carrier()
    made = offered(carrier, Ranks("no order"))
    assert made.why_none == "rank 1: no order"
    assert carrier.registered == []


@pytest.mark.parametrize("failure", [FanfoldError("no dmabuf"), RuntimeError("out of memory")])
def test_what_cannot_be_registered(failure: Exception) -> None:
    carrier: Any = Carrier(failure=failure, all_have=False)
    made = offered(carrier)
    made.choose(carrier)
    assert made.memory is None
    assert str(failure) in made.why_none
    assert made.nbytes == 0


def test_what_one_thread_could_not_register() -> None:
    """Another has, so the memory stays until the network has ended."""
    made = offered(Carrier(failure=FanfoldError("no more"), all_have=False, holds=True))
    assert (made.memory, made.nbytes) == (None, 3000)


def test_another_rank_cannot_register_it() -> None:
    """The network has it all the same, until it has ended."""
    carrier: Any = Carrier(all_have=False)
    made = offered(carrier)
    made.choose(carrier)
    assert made.memory is None
    assert made.why_none == "another rank could not register such memory"
    registered: Any = made._registered
    made.close()
    assert registered.closed == 1


def test_the_setting_needs_no_other_answer(gpu: list[int]) -> None:
    config = Config.resolve(network_memory="cpu")
    carrier: Any = Carrier(why="never asked")
    assert "network_memory" in why_no_rows_on(GPU, carrier, config)
    assert gpu == []
