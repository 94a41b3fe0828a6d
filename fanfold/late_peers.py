"""Warns once of each peer that was late and is masked (``late_peers="mask"``)."""

from __future__ import annotations

import logging
import sys
import warnings
from typing import NamedTuple

from fanfold.errors import LatePeerWarning

__all__ = ["LatePeer", "LatePeers"]

_LOG = logging.getLogger(__name__)


class LatePeer(NamedTuple):
    """A peer that a wait of this rank has masked.

    Attributes:
        peer: its rank.
        call: where it was waited for: ``low_latency dispatch 3``, the third one.
        seconds: that the wait lasted.
        gone: whether its process has ended.
    """

    peer: int
    call: str
    seconds: float
    gone: bool = False


class LatePeers:
    """Issues the warnings of one object.

    The calls that learn of a late peer are under way on other ranks too, so a warning that a filter
    turns into an error must not end them. It is held, for a call that has sent nothing yet.

    Args:
        rank: this rank.
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._held: list[LatePeerWarning] = []

    def warn(self, late: LatePeer) -> None:
        """Logs ``late`` and issues its warning; holds it if it is an error."""
        _LOG.warning(
            "rank %d masks rank %d, for which it waited %.3g s in %s",
            self._rank,
            late.peer,
            late.seconds,
            late.call,
            extra={
                "rank": self._rank,
                "peer": late.peer,
                "phase": late.call,
                "seconds": late.seconds,
                "peer_gone": late.gone,
            },
        )
        try:
            warnings.warn(self._message(late), LatePeerWarning, _caller())
        except LatePeerWarning as error:
            self._held.append(error)

    def raise_held(self) -> None:
        """Raises the first error that is held, and forgets it."""
        if self._held:
            raise self._held.pop(0)

    def _message(self, late: LatePeer) -> str:
        reason = "its process has ended" if late.gone else "it was late"
        return (
            f"rank {self._rank} waited {late.seconds:.3g} s for rank {late.peer} in {late.call}; "
            f"{reason}, so it is masked (late_peers='mask'). From that call on the tokens of rank "
            f"{late.peer} are missing, and tokens for its experts get no contribution from them: "
            "sums are too small unless the program allows for it. Of the LowLatency or "
            "HighThroughput, missing(topk_idx) returns which top-k entries get none and "
            "live_ranks() which ranks are left. If the rank is only "
            "slow, raise timeout_s (FANFOLD_TIMEOUT_S); late_peers='raise' ends the call instead"
        )


def _caller() -> int:
    """The ``stacklevel``, seen from whoever asks, of the first frame outside of this library."""
    package = __name__.partition(".")[0]
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None:
        if frame.f_globals.get("__name__", "").partition(".")[0] != package:
            break
        level, frame = level + 1, frame.f_back
    return level
