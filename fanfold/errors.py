"""The exceptions of Fanfold and how they are worded.

Some are named for what happened, as TimeoutError's kin are, rather than with an Error suffix.
Every message says what failed with its values, where, the likely cause, and what to try.
"""

from __future__ import annotations

import contextlib
import logging
import math
from typing import TypeVar

__all__ = [
    "ArgumentError",
    "CompileError",
    "ConfigError",
    "CopyError",
    "DriverFailure",
    "FanfoldError",
    "LatePeerWarning",
    "PeerRefused",
    "PeerTimeout",
    "RingFull",
    "SignalTimeout",
    "SystemFailure",
    "TransportError",
    "UnavailableError",
    "UsageError",
    "different_calls",
    "logged",
]

_LOG = logging.getLogger(__name__)


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


def different_calls(ours: str, rank: int, theirs: str, peer: int) -> ArgumentError:
    """The error of both ranks if ``rank`` is in the call ``ours`` and ``peer`` in ``theirs``, and
    each waits for the other. The host backend words it alike (``csrc/base/error.cpp``)."""
    return ArgumentError(
        "call",
        f"{ours} on rank {rank} and {theirs} on rank {peer}",
        "the same on all ranks: they wait for each other, and neither can go on; make the same "
        "calls in the same order on all ranks. Close this object on all of them and make a new one",
    )


class LatePeerWarning(RuntimeWarning):
    """A peer was late and is masked (``late_peers="mask"``): from now on results lack its tokens
    and what its experts would give. Issued once for each object and rank."""


class ConfigError(FanfoldError, ValueError):
    """A setting is malformed; the message names the setting and where its value came from."""


class UsageError(FanfoldError, RuntimeError):
    """An object was used in an order or at a time that it does not allow."""


class CopyError(UsageError, TypeError):
    """An object that holds other processes' memory cannot be copied or pickled.

    ``copy`` and ``pickle`` raise a TypeError for an object that they cannot take, so this is one.
    """


class UnavailableError(FanfoldError, RuntimeError):
    """Something this machine lacks was asked for; the message says what to install or change."""


class SystemFailure(FanfoldError, OSError):
    """The operating system refused something that Fanfold needs."""


class RingFull(FanfoldError, RuntimeError):
    """A ring of commands stayed full for all the time that a push may wait. The push changed
    nothing.

    Attributes:
        slots: how many commands the ring holds.
        pushed: commands that producers have pushed so far.
        consumed: commands that the consumer has finished so far.
        seconds: how long the push has waited.
    """

    def __init__(self, slots: int, pushed: int, consumed: int, seconds: float) -> None:
        super().__init__(
            f"a ring of {slots} commands stayed full for {seconds:.3g} s with {pushed} pushed and "
            f"{consumed} consumed: its consumer has stopped, or gets no time to run; look whether "
            "the thread that pops the commands is alive, and whether it has a core of its own"
        )
        self.slots = slots
        self.pushed = pushed
        self.consumed = consumed
        self.seconds = seconds

    def __reduce__(self) -> tuple[object, ...]:
        """Made again from its fields, so that it can travel between processes."""
        return type(self), (self.slots, self.pushed, self.consumed, self.seconds)


# What to try, by the driver's name of the error.
_DRIVER_HINTS = {
    "CUDA_ERROR_INVALID_VALUE": "a size is outside what this GPU allows: compare the values above "
    "with its limits (1024 threads, and the shared memory that allow_shared_bytes allowed)",
    "CUDA_ERROR_OUT_OF_MEMORY": "free GPU memory, or use smaller sizes (nvidia-smi shows who holds "
    "it)",
    "CUDA_ERROR_NOT_INITIALIZED": "initialise CUDA in this process first: torch.cuda.init(); a "
    "process forked from one that uses CUDA cannot use it",
    "CUDA_ERROR_DEINITIALIZED": "the process is ending; call nothing on GPUs any more",
    "CUDA_ERROR_INVALID_IMAGE": "the compiled kernel is damaged or made by a newer CUDA than the "
    "driver serves: `fanfold jit clear`, compare `fanfold jit where` with `fanfold doctor`",
    "CUDA_ERROR_NO_BINARY_FOR_GPU": "the kernel is compiled for another architecture than this GPU "
    "has: is the right device current (torch.cuda.set_device)?",
    "CUDA_ERROR_INVALID_CONTEXT": "another GPU than the kernel's is current, or none: "
    "torch.cuda.set_device(local_rank)",
    "CUDA_ERROR_INVALID_HANDLE": "the stream belongs to another GPU than the kernel: make the "
    "kernel's GPU current (torch.cuda.set_device) before the call",
    "CUDA_ERROR_NOT_FOUND": "the compiled kernel lacks that function: `fanfold jit clear`",
    "CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES": "the kernel needs more registers or shared memory than a "
    "CTA of that size can have: fewer threads",
    "CUDA_ERROR_ILLEGAL_ADDRESS": "an earlier kernel wrote or read outside its memory, and CUDA is "
    "unusable in this process from now on: run it under compute-sanitizer to find which",
    "CUDA_ERROR_LAUNCH_FAILED": "an earlier kernel failed, and CUDA is unusable in this process "
    "from now on: run it under compute-sanitizer to find which",
    "CUDA_ERROR_STREAM_CAPTURE_INVALIDATED": "an earlier call already broke the capture of this "
    "CUDA graph: run the same calls once without capturing",
    "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED": "call it once before the capture of a CUDA graph, so "
    "that what it sets up is there",
}


class DriverFailure(FanfoldError, RuntimeError):
    """A GPU's driver refused something that Fanfold asked of it.

    Attributes:
        call: the driver's function.
        what: what was asked of it, with its values.
        name: the driver's name of the error, such as ``CUDA_ERROR_INVALID_VALUE``.
        text: the driver's words for it.
    """

    def __init__(self, call: str, what: str, name: str, text: str) -> None:
        hint = _DRIVER_HINTS.get(
            name, "look at dmesg and nvidia-smi, and run it under compute-sanitizer"
        )
        super().__init__(f"{call} fails with {name} ({text}) for {what}; {hint}")
        self.call = call
        self.what = what
        self.name = name
        self.text = text

    def __reduce__(self) -> tuple[object, ...]:
        """Made again from its fields, so that it can travel between processes."""
        return type(self), (self.call, self.what, self.name, self.text)


class CompileError(FanfoldError, RuntimeError):
    """A kernel does not compile. The message has the compiler's own, with the source line.

    Attributes:
        file: the kernel's file, relative to the folder of kernels.
        arch: the architecture it was compiled for.
        reason: what is wrong in one line, with file and line of the source where there is one.
        context: the values it was compiled for, the compiler, and the lines of source.
        log: everything that the compiler said.
    """

    def __init__(self, file: str, arch: str, reason: str, context: str, log: str) -> None:
        super().__init__(
            f"{file} does not compile for {arch}: {reason}\n{context}\n"
            "If the sources are as installed, this is a mistake in Fanfold for these sizes: please "
            "report it with this message; FANFOLD_BACKEND=host works meanwhile.\n"
            f"The compiler's log:\n{log.strip() or '(empty)'}"
        )
        self.file = file
        self.arch = arch
        self.reason = reason
        self.context = context
        self.log = log

    def __reduce__(self) -> tuple[object, ...]:
        """Made again from its fields, so that it can travel between processes."""
        return type(self), (self.file, self.arch, self.reason, self.context, self.log)


class PeerRefused(FanfoldError, ValueError):
    """Another rank refused its own input, so this call is aborted on every rank.

    All ranks stay in step: the next call works.

    Attributes:
        rank: this rank.
        peer: the rank that refused.
        phase: the call it refused, such as ``"low_latency dispatch"``.
        reason: the message of the exception raised on that rank.
    """

    def __init__(self, rank: int, peer: int, phase: str, reason: str) -> None:
        super().__init__(
            f"rank {peer} refused its input to {phase}, so the call is aborted on all ranks "
            f"(seen by rank {rank}): {reason}"
        )
        self.rank = rank
        self.peer = peer
        self.phase = phase
        self.reason = reason

    def __reduce__(self) -> tuple[object, ...]:
        """Made again from its fields, so that it can travel between processes."""
        return type(self), (self.rank, self.peer, self.phase, self.reason)


def _over(path: str) -> str:
    """The part of a message that names the path to a peer on another host."""
    if not path:
        return ""
    return f" over {path} (FANFOLD_NETWORK=libfabric:tcp:NAME names another interface)"


class PeerTimeout(FanfoldError, TimeoutError):
    """A peer did not arrive in time, or its process has ended.

    Attributes:
        rank: this rank.
        peer: the rank waited for.
        phase: the call and what in it was waited for.
        expected: the number waited for: the call's, or a count of rows.
        actual: the number seen last.
        seconds: how long this rank waited; NaN if nobody knows, as a wait may end before its time.
        peer_gone: whether the peer's process was seen to have ended.
        path: how a peer on another host is reached: interface and addresses; else empty.
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
        path: str = "",
    ) -> None:
        if peer_gone:
            cause = f"rank {peer} has ended: look for its error above or in its own log"
        else:
            cause = (
                f"rank {peer} is stopped, slow or in another call than this rank: look at what it "
                "is doing (py-spy dump --pid), or raise timeout_s (FANFOLD_TIMEOUT_S)"
            )
        time = "" if math.isnan(seconds) else f"{seconds:.3g} s "
        super().__init__(
            f"rank {rank} waited {time}for rank {peer} in {phase}{_over(path)}: "
            f"expected {expected}, have {actual}; {cause}"
        )
        self.rank = rank
        self.peer = peer
        self.phase = phase
        self.expected = expected
        self.actual = actual
        self.seconds = seconds
        self.peer_gone = peer_gone
        self.path = path

    def __reduce__(self) -> tuple[object, ...]:
        """Made again from its fields, so that it can travel between processes."""
        fields = (self.rank, self.peer, self.phase, self.expected, self.actual, self.seconds)
        return type(self), (*fields, self.peer_gone, self.path)


class SignalTimeout(FanfoldError, TimeoutError):
    """A combine waited in vain for the signal that an expert's outputs are written: what computes
    them on this rank is late, has failed, or cannot run beside the combine.

    The object makes no further calls, and its peers raise PeerTimeout.

    Attributes:
        rank: this rank.
        phase: the call, such as ``"low_latency combine"``.
        expert: which of this rank's experts, from 0 on.
        block: which block of the expert's rows.
        value: the signal's value, seen last.
        expected: the value that it was to reach.
        seconds: how long no row could be sent.
    """

    def __init__(
        self,
        rank: int,
        phase: str,
        expert: int,
        block: int,
        value: int,
        expected: int,
        seconds: float,
    ) -> None:
        super().__init__(
            f"rank {rank} waited {seconds:.3g} s in {phase} for the signal of block {block} of its "
            f"local expert {expert}: expected {expected} or more, have {value}; what computes the "
            "rows of that expert is late, has failed, adds to other signals, or has no SM beside "
            "the combine: check that it runs on another stream or thread and leaves num_sms SMs, "
            "and that the signals are zeros when it begins"
        )
        self.rank = rank
        self.phase = phase
        self.expert = expert
        self.block = block
        self.value = value
        self.expected = expected
        self.seconds = seconds

    def __reduce__(self) -> tuple[object, ...]:
        """Made again from its fields, so that it can travel between processes."""
        where = (self.rank, self.phase, self.expert, self.block)
        return type(self), (*where, self.value, self.expected, self.seconds)


class TransportError(FanfoldError, ConnectionError):
    """The network between hosts has failed, or has lost a peer.

    The object that used it makes no further calls: close it on all ranks, and make a new one.

    Attributes:
        rank: this rank.
        peer: the rank at the other end, or -1 if no single peer is concerned.
        transport: the transport's name, such as ``"libfabric:tcp"``.
        what: what happened, in the transport's or the proxy's words.
        outstanding_messages: messages and commands that were not finished.
        outstanding_bytes: bytes that were on their way.
        seconds: for how long nothing had moved.
        path: how the peer is reached: interface and addresses; empty if that is not known.
    """

    def __init__(
        self,
        rank: int,
        peer: int,
        transport: str,
        what: str,
        outstanding_messages: int,
        outstanding_bytes: int,
        seconds: float,
        path: str = "",
    ) -> None:
        if peer >= 0:
            ends = f"between rank {rank} and rank {peer}"
            cause = (
                f"rank {peer} has ended or cannot be reached: look for its error above or in its "
                "own log, then check the network between the two hosts"
            )
        else:
            ends = f"of rank {rank}"
            cause = (
                "the network, its driver or Fanfold's settings for it are at fault: run fanfold "
                "doctor on this host, then make the object anew on all ranks"
            )
        super().__init__(
            f"transport {transport} {ends}{_over(path)}: {what}; {outstanding_messages} messages "
            f"({outstanding_bytes} bytes) were outstanding, and nothing had moved for "
            f"{seconds:.3g} s; {cause}"
        )
        self.rank = rank
        self.peer = peer
        self.transport = transport
        self.what = what
        self.outstanding_messages = outstanding_messages
        self.outstanding_bytes = outstanding_bytes
        self.seconds = seconds
        self.path = path

    def __reduce__(self) -> tuple[object, ...]:
        """Made again from its fields, so that it can travel between processes."""
        outstanding = (self.outstanding_messages, self.outstanding_bytes)
        where = (self.rank, self.peer, self.transport, self.what)
        return type(self), (*where, *outstanding, self.seconds, self.path)


_Failure = TypeVar("_Failure", bound=FanfoldError)


def logged(error: _Failure) -> _Failure:
    """``error`` after it was logged, with its attributes as fields of the record. For those who
    find it out, which are the core (``csrc/bindings/errors.cpp``) and what reads kernels' reports:
    a copy that comes from another process is no new failure."""
    with contextlib.suppress(Exception):  # a filter of the program must not hide the error
        _LOG.error("%s", error, extra=dict(vars(error)))
    return error
