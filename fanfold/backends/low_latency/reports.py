"""What the low-latency kernels find wrong, as exceptions."""

from __future__ import annotations

from fanfold import _core
from fanfold.errors import (
    ArgumentError,
    FanfoldError,
    PeerRefused,
    PeerTimeout,
    SignalTimeout,
    different_calls,
)
from fanfold.geometry import Geometry
from fanfold.kernel_reports import KernelReports
from fanfold.memory import BetweenHosts

__all__ = ["Reports"]

_PHASES = ("low_latency dispatch", "low_latency combine")
_SIGNAL_WORD = 4 * _core.CUDA_SIGNAL_REPORT


class Reports(KernelReports):
    """What the low-latency kernels report.

    Args:
        between: what is between hosts, if ranks are on several.
    """

    _TIMEOUT, _INDEX, _REFUSED, _DISAGREEMENT, _OTHER_CALL = range(5)
    _SIGNAL = _core.CUDA_SIGNAL_REPORT  # the next one has the value that it was to reach

    def __init__(self, between: BetweenHosts | None = None) -> None:
        super().__init__(_core.CUDA_REPORT_BYTES, None if between is None else between.explain)
        self._known_late: list[int] = []  # the words of all ranks, as last seen

    def fatal(self) -> bool:
        """Whether a report ends the mode: a peer or a signal was late, or ranks disagree."""
        words = self._words
        return words[0] != 0 or words[12] != 0 or words[16] != 0 or words[_SIGNAL_WORD] != 0

    def new_late(self, ranks: int) -> list[tuple[int, str]]:
        """The ranks that kernels have masked because they were late, each once, and in which calls:
        ``low_latency dispatch 3``."""
        first = 4 * _core.CUDA_REPORT_KINDS
        words = self._words[first : first + ranks]
        if words == self._known_late:
            return []
        known, self._known_late = self._known_late, words
        return [
            (rank, self._call_of(word))
            for rank, word in enumerate(words)
            if word and not (rank < len(known) and known[rank])
        ]

    @staticmethod
    def _call_of(word: int) -> str:
        """The call that ``call_id`` (layout/low_latency_device.h) tells."""
        epoch = (word & 0xFFFFFFFF) >> 2
        return f"{_PHASES[word >> 1 & 1]} {epoch - _core.CUDA_FIRST_EPOCH + 1}"

    def passing(self) -> bool:
        """Whether there is a new report of something that concerns one call only."""
        words = self._words
        return (words[4] != 0 or words[8] != 0) and (self._is_new(1) or self._is_new(2))

    def clear(self) -> None:
        """Forgets everything. No kernel may run."""
        for place in range(len(self._words)):
            self._words[place] = 0
        self._raised.clear()
        self._known_late = []

    def take(self, rank: int, geometry: Geometry | None, timeout_s: float) -> FanfoldError:
        """The gravest report as an exception; those of one call are new once only.

        Raises:
            PeerTimeout, TransportError: what the network knows of a peer that was late.
        """
        return self._explained(self._gravest(rank, geometry, timeout_s))

    def _gravest(self, rank: int, geometry: Geometry | None, timeout_s: float) -> FanfoldError:
        words = self._words
        # Other calls, a disagreement and a late signal are the cause of timeouts that follow them.
        kinds = (
            self._OTHER_CALL, self._DISAGREEMENT, self._SIGNAL, self._TIMEOUT, self._REFUSED,
            self._INDEX,
        )  # fmt: skip
        kind = next(kind for kind in kinds if self._is_new(kind))
        call, epoch, first, second = words[4 * kind : 4 * kind + 4]
        peer, phase = call >> 8, _PHASES[(call & 0xFF) - 1]
        number = (epoch & 0xFFFFFFFF) - _core.CUDA_FIRST_EPOCH + 1
        if kind == self._SIGNAL:
            bound = words[_SIGNAL_WORD + 6]
            return SignalTimeout(rank, phase, peer, first, second, bound, timeout_s)
        if kind == self._TIMEOUT:
            if second != 0:  # before it sends, a call awaits acknowledgements of all but the last
                phase = f"{phase} (acknowledgements of earlier calls)"
                expected, actual = number - 2, first
            else:  # whoever waits for a call of the peer has had all of the call before it
                expected, actual = number, number - 1
            return PeerTimeout(rank, peer, phase, expected, actual, timeout_s, False)
        if kind == self._OTHER_CALL:
            return different_calls(
                f"{phase} {number}", rank, f"{_PHASES[first - 1]} {second}", peer
            )
        if kind == self._DISAGREEMENT:
            return ArgumentError(
                f"call {number} of {phase}",
                f"another on rank {rank} than on rank {peer}: geometry, row format, LogFMT or "
                "whether weights come along differ",
                "the same on all ranks; close this object",
            )
        self._raised[kind] = (call & 0xFF, epoch)
        if kind == self._REFUSED:
            reason = f"call {number}; its own exception says why"
            return PeerRefused(rank, peer, phase, reason)
        place, value = self._choice(second)
        most = "num_experts - 1" if geometry is None else str(geometry.num_experts - 1)
        return ArgumentError(
            f"topk_idx[{first}, {place}] of call {number} of {phase}",
            value,
            f"from -1 (none) to {most}; it was taken for none",
        )
