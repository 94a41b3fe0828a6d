"""NVTX ranges around the calls of a backend and around their hooks (the setting ``nvtx``).

Profilers show them above the kernels and beside the program's own ranges.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch
from torch.compiler import is_dynamo_compiling

from fanfold.config import Config
from fanfold.geometry import Mode

__all__ = ["RangedBackend", "available", "ranged"]

_LOG = logging.getLogger(__name__)
_CALLS = ("dispatch", "dispatch_cached", "combine", "combine_weights")

_Backend = TypeVar("_Backend")


def available() -> bool:
    """Whether this PyTorch has NVTX: builds for CPUs do not."""
    try:
        torch.cuda.nvtx.mark("fanfold")
    except RuntimeError:
        return False
    return True


def ranged(backend: _Backend, mode: Mode, config: Config) -> _Backend:
    """``backend`` itself; with ranges around its calls if ``config.nvtx`` asks for them and there
    is NVTX."""
    if backend is None or not config.nvtx:
        return backend
    if not available():
        _LOG.warning(
            "no NVTX ranges: the setting nvtx is True (from %s), but PyTorch %s has no NVTX",
            config.source_of("nvtx"),
            torch.__version__,
        )
        return backend
    return cast(_Backend, RangedBackend(backend, f"fanfold::{mode}"))


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
        for name in _CALLS:
            if hasattr(backend, name):
                setattr(self, name, _in_range(f"{prefix}::{name}", getattr(backend, name)))

    def __getattr__(self, name: str) -> Any:
        if name == "_backend":  # a copy that is not filled yet
            raise AttributeError(name)
        return getattr(self._backend, name)

    @property  # type: ignore[misc]  # object's may be set
    def __class__(self) -> type:
        return type(self._backend)


def _in_range(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
    def in_range(*args: Any, **options: Any) -> Any:
        if is_dynamo_compiling():  # a hook; as without ranges, it leaves the graph here
            return torch.compiler.disable(in_range)(*args, **options)
        torch.cuda.nvtx.range_push(name)
        try:
            result = call(*args, **options)
        finally:
            torch.cuda.nvtx.range_pop()
        if isinstance(result, tuple) and callable(result[-1]):
            return (*result[:-1], _in_range(f"{name} hook", result[-1]))
        return result

    return in_range
