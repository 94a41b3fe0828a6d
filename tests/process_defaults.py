"""Defaults that programs of this field set before anything else, and that must change nothing."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from fanfold.launch import RankPool

__all__ = ["ProcessDefaults", "UnderDefaults", "under"]


@dataclass(frozen=True)
class ProcessDefaults:
    """What ``torch.set_default_dtype`` and ``torch.set_default_device`` are given."""

    dtype: torch.dtype
    device: str

    @contextlib.contextmanager
    def set_dtype(self) -> Iterator[None]:
        """Sets the dtype for the body, in all threads of this process."""
        dtype = torch.get_default_dtype()
        torch.set_default_dtype(self.dtype)
        try:
            yield
        finally:
            torch.set_default_dtype(dtype)

    @contextlib.contextmanager
    def set(self) -> Iterator[None]:
        """Sets them for the body: the dtype in all threads, the device in this one."""
        device = torch.get_default_device()
        with self.set_dtype():
            torch.set_default_device(self.device)
            try:
                # A test that runs without its defaults would test nothing.
                made = torch.empty(())
                assert (made.dtype, made.device.type) == (self.dtype, self.device)
                yield
            finally:
                torch.set_default_device(None if device.type == "cpu" else device)


class UnderDefaults:
    """A pool whose ranks run every function under other defaults. Ranks that are threads share the
    default dtype, so it is set before they start and as long as one runs.

    Args:
        pool: of the ranks.
        defaults: that each rank sets.
    """

    def __init__(self, pool: RankPool, defaults: ProcessDefaults) -> None:
        self._pool, self._defaults = pool, defaults

    def __getattr__(self, name: str) -> Any:
        return getattr(self._pool, name)

    def run(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """As the pool's."""
        with self._defaults.set_dtype():
            return self._pool.run(under, self._defaults, function, *args)

    def outcomes(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """As the pool's."""
        with self._defaults.set_dtype():
            return self._pool.outcomes(under, self._defaults, function, *args)


def under(
    group: dist.ProcessGroup, defaults: ProcessDefaults, function: Callable[..., Any], *args: Any
) -> Any:
    """``function(group, *args)`` under ``defaults``, for a rank to run."""
    with defaults.set():
        return function(group, *args)
