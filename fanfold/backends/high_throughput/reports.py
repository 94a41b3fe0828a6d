"""What the high-throughput kernels find wrong, as exceptions."""

from __future__ import annotations

from fanfold import _core
from fanfold.errors import ArgumentError, FanfoldError, PeerRefused, PeerTimeout
from fanfold.kernel_reports import KernelReports
from fanfold.memory import BetweenHosts

__all__ = ["Reports"]

_PHASES = ("high_throughput counts", "high_throughput dispatch", "high_throughput combine")


class Reports(KernelReports):
    """What the high-throughput kernels report.

    Args:
        between: what is between hosts, if ranks are on several.
    """

    _TIMEOUT, _INDEX, _REFUSED, _DISAGREEMENT, _CAPACITY = range(5)
    # Gravest first; a disagreement tells more than a refusal.
    _PASSING = (_DISAGREEMENT, _REFUSED, _CAPACITY, _INDEX)

    def __init__(self, between: BetweenHosts | None = None) -> None:
        super().__init__(
            _core.CUDA_HIGH_THROUGHPUT_REPORT_BYTES, None if between is None else between.explain
        )

    def fatal(self) -> bool:
        """Whether a peer was late, after which no call can be trusted."""
        return self._words[0] != 0

    def passing(self) -> bool:
        """Whether there is a new report of something that concerns one call only."""
        words = self._words
        if not (words[4] or words[8] or words[12] or words[16]):
            return False
        return any(self._is_new(kind) for kind in self._PASSING)

    def take(self, rank: int, timeout_s: float) -> FanfoldError:
        """The gravest report as an exception; those of one call are new once only.

        Raises:
            PeerTimeout, TransportError: what the network knows of a peer that was late.
        """
        return self._explained(self._gravest(rank, timeout_s))

    def _gravest(self, rank: int, timeout_s: float) -> FanfoldError:
        kinds = (self._TIMEOUT, *self._PASSING)
        kind = next(kind for kind in kinds if self._is_new(kind))
        call, epoch, first, second = self._words[4 * kind : 4 * kind + 4]
        peer, phase = call >> 8, _PHASES[(call & 0xFF) - 1]
        number = epoch & 0xFFFFFFFF
        if kind == self._TIMEOUT:
            return PeerTimeout(rank, peer, phase, number & 0xFFFFFF, first, timeout_s, False)
        self._raised[kind] = (call & 0xFF, epoch)
        if kind == self._REFUSED:
            return PeerRefused(rank, peer, phase, f"call {number}; its own exception says why")
        if kind == self._DISAGREEMENT:
            return ArgumentError(
                f"call {number}, {phase}",
                f"another on rank {rank} than on rank {peer}: the kind of call, experts, top_k, "
                "bytes of a row, scales, order of rows, alignment, max_tokens, or whether weights "
                "travel, rows are in place, or rows are pulled (dispatch_transfer) differ",
                "the same on all ranks; the call was aborted on all of them",
            )
        if kind == self._CAPACITY:
            return ArgumentError(
                f"capacity of call {number}, {phase}",
                second,
                f"at least {first + 1}, as there is a row of that number; it was dropped",
            )
        place, value = self._choice(second)
        return ArgumentError(
            f"topk_idx[{first}, {place}] of call {number}, {phase}",
            value,
            "from -1 (none) to num_experts - 1; it was taken for none",
        )
