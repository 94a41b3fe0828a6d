"""The exceptions of Fanfold and how they are worded.

Some are named for what happened, as TimeoutError's kin are, rather than with an Error suffix.
Every message says what failed with its values, where, the likely cause, and what to try.
"""

from __future__ import annotations

__all__ = [
    "ArgumentError",
    "ConfigError",
    "FanfoldError",
    "PeerRefused",
    "PeerTimeout",
    "SystemFailure",
    "UnavailableError",
    "UsageError",
]


class FanfoldError(Exception):
    """Base of everything Fanfold raises on purpose."""


class ArgumentError(FanfoldError, ValueError):
    """An argument is outside its bound. Nothing has been sent; the object stays usable.

    Attributes:
        argument: name of the argument, with the position inside it where that helps.
        value: the offending value, as text.
        bound: what it must be, as text.
    """

    def __init__(self, argument: str, value: object, bound: str) -> None:
        super().__init__(f"{argument} is {value}, but must be {bound}")
        self.argument = argument
        self.value = str(value)
        self.bound = bound

    def __reduce__(self) -> tuple[object, ...]:
        """Made again from its fields, so that it can travel between processes."""
        return type(self), (self.argument, self.value, self.bound)


class ConfigError(FanfoldError, ValueError):
    """A setting is malformed; the message names the setting and where its value came from."""


class UsageError(FanfoldError, RuntimeError):
    """An object was used in an order or at a time that it does not allow."""


class UnavailableError(FanfoldError, RuntimeError):
    """Something this machine lacks was asked for; the message says what to install or change."""


class SystemFailure(FanfoldError, OSError):
    """The operating system refused something that Fanfold needs."""


class PeerRefused(FanfoldError, ValueError):
    """Another rank refused its own input, so this call is void on every rank.

    All ranks stay in step: the next call works.

    Attributes:
        rank: this rank.
        peer: the rank that refused.
        phase: the call it refused, such as ``"low_latency dispatch"``.
        reason: the message of the exception raised on that rank.
    """

    def __init__(self, rank: int, peer: int, phase: str, reason: str) -> None:
        super().__init__(
            f"rank {peer} refused its input to {phase}, so the call is void on all ranks "
            f"(seen by rank {rank}): {reason}"
        )
        self.rank = rank
        self.peer = peer
        self.phase = phase
        self.reason = reason

    def __reduce__(self) -> tuple[object, ...]:
        """Made again from its fields, so that it can travel between processes."""
        return type(self), (self.rank, self.peer, self.phase, self.reason)


class PeerTimeout(FanfoldError, TimeoutError):
    """A peer did not arrive in time, or its process has ended.

    Attributes:
        rank: this rank.
        peer: the rank waited for.
        phase: the call and what in it was waited for.
        expected: the number waited for: the call's epoch, or a count of rows.
        actual: the number seen last.
        seconds: how long this rank waited.
        peer_gone: whether the peer's process was seen to have ended.
    """

    def __init__(
        self,
        rank: int,
        peer: int,
        phase: str,
        expected: int,
        actual: int,
        seconds: float,
        peer_gone: bool,
    ) -> None:
        if peer_gone:
            cause = (
                f"the process of rank {peer} has ended: look for its error above or in its own log"
            )
        else:
            cause = (
                f"rank {peer} is stopped, slow or in another call than this rank: look at what it "
                "is doing (py-spy dump --pid), or raise timeout_s (FANFOLD_TIMEOUT_S)"
            )
        super().__init__(
            f"rank {rank} waited {seconds:.3g} s for rank {peer} in {phase}: "
            f"expected {expected}, have {actual}; {cause}"
        )
        self.rank = rank
        self.peer = peer
        self.phase = phase
        self.expected = expected
        self.actual = actual
        self.seconds = seconds
        self.peer_gone = peer_gone

    def __reduce__(self) -> tuple[object, ...]:
        """Made again from its fields, so that it can travel between processes."""
        fields = (self.rank, self.peer, self.phase, self.expected, self.actual, self.seconds)
        return type(self), (*fields, self.peer_gone)
