"""What operators name by strings and numbers: the objects that move rows, and what their dispatches
leave.

Both are held weakly. An object is gone when its user drops it, and what a dispatch left is gone
with the last tensor over the memory of its handle, whether or not a combine or a backward pass ever
ran.
"""

from __future__ import annotations

import ctypes
import itertools
import weakref
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from fanfold.errors import UsageError
from fanfold.formats import RowFormat, ScaleFormat, scale_columns
from fanfold.geometry import Geometry, Mode
from fanfold.results import DispatchResult

__all__ = [
    "Dispatcher",
    "Opened",
    "Registration",
    "Shapes",
    "TrainableDispatcher",
    "find",
    "handle_of",
    "opened",
    "register",
]


class Dispatcher(Protocol):
    """What functions and layers use of a LowLatency or a HighThroughput, so that a user can wrap
    one, to measure it for example. ``options`` are those of the wrapped object, such as
    ``capacity``. Backward passes pass on what :meth:`HighThroughputResult.without_rows` returns."""

    @property
    def mode(self) -> Mode:
        """``"low_latency"`` or ``"high_throughput"``."""

    def dispatch(self, *args: Any, **options: Any) -> Any:
        """``dispatch(x, topk_idx, topk_weights, **options)`` returns a DispatchResult; see
        :meth:`fanfold.HighThroughput.dispatch`."""

    def combine(self, *args: Any, **options: Any) -> Any:
        """``combine(y, received, weighted=..., **options)`` returns the summed tokens; see
        :meth:`fanfold.HighThroughput.combine`."""


class TrainableDispatcher(Dispatcher, Protocol):
    """A Dispatcher whose calls have backward passes."""

    def combine_weights(self, *args: Any) -> Any:
        """``combine_weights(row_values, received)``; see
        :meth:`fanfold.HighThroughput.combine_weights`."""


@dataclass(frozen=True)
class Shapes:
    """What the shapes of a dispatcher's results follow from.

    Attributes:
        mode: ``"low_latency"`` or ``"high_throughput"``.
        experts: local experts.
        rows: low latency: room of each local expert. High throughput: most rows that can arrive.
        hidden, top_k: columns of a row, experts of a token.
        dtype: of the rows that arrive, as ``torch`` names it.
        scale_columns, scale_dtype: of their scales; 0 columns where there are none.
    """

    mode: Mode
    experts: int
    rows: int
    hidden: int
    top_k: int
    dtype: str
    scale_columns: int
    scale_dtype: str

    @classmethod
    def of(
        cls,
        geometry: Geometry,
        mode: Mode,
        formats: tuple[RowFormat, ScaleFormat],
        alignment: int,
    ) -> Shapes:
        """Those of a dispatcher with these options."""
        row_format, scale_format = formats
        scaled = row_format is RowFormat.FP8
        experts, rows = geometry.experts_per_rank, geometry.expert_capacity
        if mode == "high_throughput":
            rows = experts * -(-rows // alignment) * alignment
        return cls(
            mode=mode,
            experts=experts,
            rows=rows,
            hidden=geometry.hidden,
            top_k=geometry.top_k,
            dtype=str(row_format.dtype).removeprefix("torch."),
            scale_columns=scale_columns(geometry.hidden, scale_format) if scaled else 0,
            scale_dtype=str(scale_format.dtype).removeprefix("torch."),
        )

    @property
    def trainable(self) -> bool:
        """Whether there are gradients."""
        return self.mode == "high_throughput" and self.scale_columns == 0


class Registration:
    """A dispatcher under a name. The dispatcher holds it.

    Attributes:
        name: the same for no other dispatcher of this process. It holds the shapes: compiled
            graphs are cached on disk by what they are made of, and another process may give a
            dispatcher of other sizes the same number.
        native_name: names the calls of ``base`` instead of the dispatcher's own.
        kind: the class of the objects that functions are called with.
    """

    _numbers = itertools.count()

    def __init__(self, dispatcher: Any, shapes: Shapes, base: type | None, kind: type) -> None:
        self.name = f"{next(self._numbers)} {shapes}"
        self.native_name = f"{self.name} native"
        self.shapes, self.base, self.kind = shapes, base, kind
        self.dispatcher = weakref.ref(dispatcher)


class _Native:
    """The calls of a base class, which a derived class's own calls have led to."""

    def __init__(self, dispatcher: Any, base: Any) -> None:
        self._dispatcher, self._base = dispatcher, base
        self.mode = dispatcher.mode

    def dispatch(self, *args: Any, **options: Any) -> Any:
        """Of the base class."""
        return self._base.dispatch(self._dispatcher, *args, **options)

    def combine(self, *args: Any, **options: Any) -> Any:
        """Of the base class."""
        return self._base.combine(self._dispatcher, *args, **options)

    def combine_weights(self, *args: Any) -> Any:
        """Of the base class."""
        return self._base.combine_weights(self._dispatcher, *args)


_registrations: weakref.WeakValueDictionary[str, Registration] = weakref.WeakValueDictionary()


def register(
    dispatcher: object, shapes: Shapes, *, base: type | None = None, kind: type | None = None
) -> Registration:
    """Makes a dispatcher known to operators, for as long as it lives.

    Args:
        dispatcher: has an attribute ``registration``, to which the result is assigned; and maybe a
            method ``for_routing(topk_idx)``, which returns the dispatcher for one dispatch and the
            calls that belong to it.
        shapes: of its results.
        base: whose calls ``native_name`` names.
        kind: the class of what ``for_routing`` returns, if there is that.
    """
    made = Registration(dispatcher, shapes, base, type(dispatcher) if kind is None else kind)
    _registrations[made.name] = _registrations[made.native_name] = made
    return made


def shapes_of(name: str) -> Shapes:
    """The shapes of a registered dispatcher."""
    return _registered(name).shapes


def find(name: str) -> Any:
    """The dispatcher that is registered as ``name``.

    Raises:
        UsageError: it is gone.
    """
    registration = _registered(name)
    dispatcher = registration.dispatcher()
    if dispatcher is None:
        raise UsageError(_GONE)
    return dispatcher if name == registration.name else _Native(dispatcher, registration.base)


_GONE = (
    "a compiled function called a dispatcher that no longer exists in this process; keep it "
    "as long as the function, and compile the function again for another one"
)


def _registered(name: str) -> Registration:
    registration = _registrations.get(name)
    if registration is None:
        raise UsageError(_GONE)
    return registration


@dataclass(frozen=True)
class Opened:
    """What a dispatch left: the dispatcher that did it, and what that one needs for later calls."""

    dispatcher: Any
    received: DispatchResult


class _Number(ctypes.Array):  # type: ignore[type-arg]
    """The memory of a handle: its number, and what it stands for."""

    _type_ = ctypes.c_int64
    _length_ = 1
    opened: Opened


_handles: weakref.WeakValueDictionary[int, _Number] = weakref.WeakValueDictionary()
_numbers = itertools.count(1)


def handle_of(dispatcher: Any, received: DispatchResult) -> torch.Tensor:
    """A tensor ``[1]`` int64 on the CPU that stands for what a dispatch left, and keeps it alive:
    the tensor's storage holds the memory, which holds the rest."""
    number = next(_numbers)
    memory = _Number(number)
    memory.opened = Opened(dispatcher, received)
    _handles[number] = memory
    return torch.frombuffer(memory, dtype=torch.int64)


def opened(handle: torch.Tensor) -> Opened:
    """What ``handle`` stands for.

    Raises:
        UsageError: its memory is gone: the tensor is a copy.
    """
    memory = _handles.get(int(handle))
    if memory is None:
        raise UsageError(
            f"handle {int(handle)} of a dispatch stands for nothing in this process: keep the "
            "tensor that the dispatch returned; a copy of it, also one that was stored and loaded, "
            "keeps nothing alive"
        )
    return memory.opened
