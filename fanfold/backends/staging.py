"""Calls of the host backend on tensors of other devices: in through host memory, and out again.

Every tensor is copied twice, and the CPU waits for the device each time: slow, but right on every
device that PyTorch knows.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, TypeVar

import torch

from fanfold.errors import ArgumentError

__all__ = ["Staging", "named_tensors"]

_T = TypeVar("_T")

_HOST_KINDS = ("cpu", "meta")  # of which the second has nothing to copy; the calls refuse it


class Staging:
    """The way of one call's tensors to the host and back.

    Args:
        tensors: the call's arguments by name: tensors, tuples of tensors, or anything else, which
            is passed over.

    Attributes:
        device: of the tensors; the CPU if there are none.
        needed: whether they must be copied.

    Raises:
        ArgumentError: the tensors are on different devices.
    """

    def __init__(self, **tensors: object) -> None:
        self.device = torch.device("cpu")
        self.needed = False
        first: str | None = None
        for name, value in tensors.items():
            for place, tensor in named_tensors(name, value):
                if first is None:
                    first, self.device = place, tensor.device
                    self.needed = not _is_host(tensor.device)
                elif tensor.device != self.device and not (
                    _is_host(tensor.device) and _is_host(self.device)
                ):
                    raise ArgumentError(
                        f"{place}.device", tensor.device, f"{self.device}, as {first} is"
                    )

    def host(self, value: _T) -> _T:
        """``value`` with every tensor in it on the CPU; the CPU waits for its device."""
        return _move(value, torch.device("cpu")) if self.needed else value

    def back(self, value: _T) -> _T:
        """``value`` with every tensor in it on :attr:`device`."""
        return _move(value, self.device) if self.needed else value

    def result(self, value: torch.Tensor, out: torch.Tensor | None) -> torch.Tensor:
        """A result as the caller wants it: in ``out`` if that is given, else as :meth:`back`."""
        if out is None or out is value:
            return self.back(value)
        return out.copy_(value)


def _is_host(device: torch.device) -> bool:
    return device.type in _HOST_KINDS


def named_tensors(name: str, value: object) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors in an argument: itself, or those in a tuple; each with its place in it."""
    if isinstance(value, torch.Tensor):
        yield name, value
    elif isinstance(value, tuple):
        for place, part in enumerate(value):
            yield from named_tensors(f"{name}[{place}]", part)


def _move(value: Any, device: torch.device) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().to(device)
    if isinstance(value, tuple):
        return tuple(_move(part, device) for part in value)
    return value
