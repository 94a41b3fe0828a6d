"""What the low-latency calls of one geometry on a GPU share, and which of them are in flight."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from fanfold import _core
from fanfold.backends.low_latency.outputs import Outputs
from fanfold.backends.low_latency.protocol import RoutingLayout
from fanfold.errors import UsageError
from fanfold.formats import Formats
from fanfold.geometry import Geometry

__all__ = ["Arguments", "CombineCall", "DispatchCall", "Flight", "Launch", "Plan"]

MOST_IN_FLIGHT = 2

Arguments = _core.CudaDispatchArgs | _core.CudaCombineArgs
Launch = Callable[[Arguments, int], None]  # of arguments, on a stream


@dataclass(slots=True)
class DispatchCall:
    """What all dispatches of one kind share; every call fills in the rest of ``args``, which say
    where to add statistics if ``adds``."""

    formats: Formats
    weighted: bool
    launch: Launch
    args: _core.CudaDispatchArgs
    outputs: Outputs
    adds: bool = False


@dataclass(slots=True)
class CombineCall:
    """What all combines of one kind share; every call fills in the rest of ``args``, which say
    where to add nanoseconds if ``adds``."""

    weighted: bool
    logfmt: bool
    launch: Launch
    args: _core.CudaCombineArgs
    adds: bool = False


class Plan:
    """What the calls of one geometry share.

    Attributes:
        dispatch, combine: of the last call, as the next is most often alike; of all: ``dispatches``
            and ``combines``.
        ready_sends: launches of kernels that wait for outputs, by whether they send LogFMT and
            their CTAs.
        layout: of :attr:`CudaRouting.block`.
        fast_path: validates each of them.
    """

    def __init__(
        self,
        geometry: Geometry,
        core: _core.CudaLowLatency,
        layout: RoutingLayout,
        fast_path: _core.CudaFastPath,
    ) -> None:
        self.geometry = geometry
        self.core = core
        self.layout = layout
        self.fast_path = fast_path
        self.dispatch: DispatchCall | None = None
        self.combine: CombineCall | None = None
        self.dispatches: dict[object, DispatchCall] = {}
        self.combines: dict[object, CombineCall] = {}
        self.ready_sends: dict[tuple[bool, int], Launch] = {}


@dataclass(eq=False)
class Flight:
    """Calls of one kind that were sent and not yet received.

    Attributes:
        sent, received: how many there were so far.
        refused: of the calls in flight those that this rank refused: their number and what takes
            away what the peers sent, to be launched when the calls before have been received.
    """

    sent: int = 0
    received: int = 0
    refused: list[tuple[int, Callable[[int], None]]] = field(default_factory=list)

    def arrived(self, stream: int) -> None:
        """Counts a call as received, and with it the refused ones behind it."""
        self.received += 1
        while self.refused and self.refused[0][0] == self.received + 1:
            self.refused.pop(0)[1](stream)
            self.received += 1

    def check(self, what: str, return_hook: bool) -> None:
        """Raises UsageError if one more call, with a hook or without, must not begin."""
        if not return_hook and self.sent != self.received:
            raise UsageError(
                "a call without a hook cannot overtake one in flight; call its hook first"
            )
        if self.sent - self.received >= MOST_IN_FLIGHT:
            raise UsageError(
                f"two {what} calls are in flight already; call the hook of the older one first. If "
                "that is lost, all ranks must give the call up: reset() of a LowLatency, or "
                "clean_low_latency_buffer() of a Buffer"
            )
