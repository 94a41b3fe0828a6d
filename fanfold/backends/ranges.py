"""Ranges around the calls of a backend and around their hooks (the setting ``ranges``): NVTX's,
which Nsight Systems shows, and record functions of ``torch.profiler``, while a profiler runs.

They stand above the kernels and beside the program's own ranges.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, TypeVar, cast

import torch
from torch.compiler import is_dynamo_compiling

from fanfold.config import Config
from fanfold.geometry import Mode

__all__ = ["RangedBackend", "available", "ranged", "ranged_call"]

_CALLS = ("dispatch", "dispatch_cached", "combine", "combine_weights")

_Backend = TypeVar("_Backend")
_Call = TypeVar("_Call", bound=Callable[..., Any])


def available() -> bool:
    """Whether this PyTorch has NVTX: builds for CPUs do not."""
    try:
        torch.cuda.nvtx.mark("fanfold")
    except RuntimeError:
        return False
    return True


def ranged(backend: _Backend, mode: Mode, config: Config) -> _Backend:
    """``backend`` itself; with ranges around its calls if ``config.ranges`` asks for them."""
    if backend is None or not config.ranges:
        return backend
    return cast(_Backend, RangedBackend(backend, f"fanfold::{mode}"))


def ranged_call(call: _Call, name: str, config: Config) -> _Call:
    """``call`` itself; in a range of this name if ``config.ranges`` asks for it."""
    return cast(_Call, _in_range(name, call, available())) if config.ranges else call


class RangedBackend:
    """A backend whose calls are ranges, named as their kernels are: ``fanfold::low_latency::
    dispatch``; that of a hook ends with ``hook``. In all else it is the backend, also for
    ``isinstance``.

    Args:
        backend: makes the calls.
        prefix: of the names.
    """

    def __init__(self, backend: object, prefix: str) -> None:
        self._backend = backend
        nvtx = available()
        for name in _CALLS:
            if hasattr(backend, name):
                setattr(self, name, _in_range(f"{prefix}::{name}", getattr(backend, name), nvtx))

    def __getattr__(self, name: str) -> Any:
        if name == "_backend":  # a copy that is not filled yet
            raise AttributeError(name)
        return getattr(self._backend, name)

    @property  # type: ignore[misc]  # object's may be set
    def __class__(self) -> type:
        return type(self._backend)


def _in_range(name: str, call: Callable[..., Any], nvtx: bool) -> Callable[..., Any]:
    def in_range(*args: Any, **options: Any) -> Any:
        if is_dynamo_compiling():  # a hook; as without ranges, it leaves the graph here
            return torch.compiler.disable(in_range)(*args, **options)
        with _range(name, nvtx):
            result = call(*args, **options)
        if isinstance(result, tuple) and callable(result[-1]):
            return (*result[:-1], _in_range(f"{name} hook", result[-1], nvtx))
        return result

    return in_range


@contextlib.contextmanager
def _range(name: str, nvtx: bool) -> Iterator[None]:
    # A record function takes some microseconds, also while nothing records it.
    profiled = torch.autograd._profiler_enabled()  # type: ignore[attr-defined]
    if nvtx:
        torch.cuda.nvtx.range_push(name)
    try:
        with torch.profiler.record_function(name) if profiled else contextlib.nullcontext():
            yield
    finally:
        if nvtx:
            torch.cuda.nvtx.range_pop()
