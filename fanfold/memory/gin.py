"""Between the GPUs of several hosts by NCCL's GIN: kernels put and signal themselves.

All ranks have one window of NCCL's, on their GPUs. ``kernels/layout/gin.h`` says what it is for,
and ``docs/decisions/nccl.md`` why words travel as they do.
"""

from __future__ import annotations

import contextlib
import dataclasses
import weakref
from typing import NamedTuple

import torch

from fanfold import _core, jit
from fanfold.config import NCCL_GIN, Config
from fanfold.errors import (
    ArgumentError,
    FanfoldError,
    PeerTimeout,
    TransportError,
    UnavailableError,
)
from fanfold.group import Group, agree
from fanfold.jit import ForeignHeaders, KernelSource
from fanfold.memory.between_hosts import BytesBetweenHosts
from fanfold.memory.hosts import Hosts
from fanfold.memory.nccl import Window, agreed, library_for, tensor_over
from fanfold.nccl import headers
from fanfold.nccl.library import NcclLibrary, version_text

__all__ = ["GinBetweenHosts", "by_gin"]

_LINE = 128
_THREADS = 32
_MOST_WARPS = 16  # of a kernel with GIN, which takes more registers
_CLOSING = (1 << 63) - 1  # number of each rank's last fence
_CLOSING_S = 3.0
_LOW_LATENCY_SLOTS = 64
"""Words of a queue. A rank is two calls ahead of a peer at most, with three words each, and says of
either kind what it has received."""
_HIGH_THROUGHPUT_SLOTS = 8192
"""A rank that waits for a peer has taken all words of earlier calls; of one call there are at most
2048 of batches and as many acknowledgements (``kRingWords``), and as many of the next."""


def by_gin(source: KernelSource, gin: ForeignHeaders | None) -> KernelSource:
    """A kernel that reaches other hosts, by GIN if there is ``gin``."""
    if gin is None:
        return source
    constants = dict(source.pairs)
    warps = constants["kWarps"] = min(constants["kWarps"], _MOST_WARPS)
    return dataclasses.replace(source, constants=constants, threads=32 * warps, foreign=gin)


class _Parts(NamedTuple):
    """Offsets in the window, behind what is received there."""

    words: list[int]
    rows: list[int]
    received_queues: int
    sent_queues: int
    end: int

    @classmethod
    def of(cls, ranks: int, nbytes: BytesBetweenHosts, slots: int) -> _Parts:
        """The area of rows for the next rank begins a rank's share behind that for the last one. A
        mode uses of each the places that are its own at that rank, in all of them the same ones and
        no more than that share, so that areas may overlap."""
        begin = _up(nbytes.received)
        share = _up(-(-nbytes.received // ranks))
        rows = [begin + rank * share for rank in range(ranks)]
        words, end = rows, rows[-1] + _up(nbytes.received)
        if nbytes.words:
            words = [end + rank * _up(nbytes.words) for rank in range(ranks)]
            end = words[-1] + _up(nbytes.words)
        queues = ranks * slots * _core.GIN_WORD_BYTES
        return cls(words, rows, end, end + queues, end + 2 * queues)


def _up(nbytes: int) -> int:
    return -(-nbytes // _LINE) * _LINE


class _Fences:
    """Fences between the ranks of one window, by the kernels of ``kernels/gin``. It outlives the
    owner of the window, whose end is the last fence.

    Args:
        group: the ranks.
        block: what kernels know of the window, on the GPU.
        communicator: of which the block has the address.
        config: the bound of waits, and where compiled kernels are kept.
        gin: the headers of NCCL.
    """

    def __init__(
        self,
        group: Group,
        block: torch.Tensor,
        communicator: torch.Tensor,
        config: Config,
        gin: ForeignHeaders,
    ) -> None:
        self._group, self._block, self._kept = group, block, communicator
        self._timeout_s = config.timeout_s
        self._numbers = [0] * group.size  # of the ranks' last fences
        self._late = torch.empty(1, dtype=torch.int32, device=block.device)
        sources = [_between_calls(entry, group.size, gin) for entry in ("fence", "await_fences")]
        jit.load_all(sources, block.device.index, config)
        self._send, self._await = (jit.load(each, block.device.index, config) for each in sources)

    def send(self) -> None:
        """Sends one to every rank on another host, and waits until all that was put is there.

        Raises:
            PeerTimeout: it is not in time.
        """
        self._numbers[self._group.rank] += 1
        self._run(self._send, self._timeout_s)

    def meet(self) -> None:
        """Learns of the last fences of the others. Collective."""
        self._numbers = self._group.all_gather(self._numbers[self._group.rank])

    def await_all(self) -> None:
        """Waits for the fences that :meth:`meet` has learnt of.

        Raises:
            PeerTimeout: one does not come.
        """
        self._run(self._await, self._timeout_s)

    def end(self, *, awaits: bool) -> None:
        """Sends the last one, and with ``awaits`` waits for those of the others; some seconds at
        most, and whatever fails."""
        self._numbers = [_CLOSING] * self._group.size
        for kernel in (self._send, self._await) if awaits else (self._send,):
            with contextlib.suppress(FanfoldError, RuntimeError):  # a peer is gone, or CUDA
                self._run(kernel, min(self._timeout_s, _CLOSING_S))

    def _run(self, kernel: _core.CudaKernel, most_s: float) -> None:
        """A kernel, to its end, which waits ``most_s`` at most."""
        device, rank = self._block.device, self._group.rank
        self._late.fill_(-1)
        numbers = torch.tensor(self._numbers, dtype=torch.int64, device=device)
        args = _core.GinBetweenCallsArgs(
            self._block.data_ptr(), numbers.data_ptr(), int(most_s * 1e9), self._late.data_ptr()
        )
        stream = torch._C._cuda_getCurrentRawStream(device.index)
        args.launch(kernel, 1, _THREADS, stream, False)
        torch.cuda.synchronize(device)
        if (peer := int(self._late.item())) >= 0:
            raise PeerTimeout(rank, peer, "a fence between hosts", 1, 0, most_s, False)


def _let_go(window: Window, opened: list[_Fences]) -> None:
    """Ends the window once what kernels have put is there, or some seconds are over. Of an object
    that was not closed: it waits for no peer."""
    for fences in opened:
        fences.end(awaits=False)
    window.close()


class GinBetweenHosts:
    """The :class:`fanfold.memory.BetweenHosts` of kernels that put by GIN. Construction is
    collective.

    Args:
        group: the ranks, each with a GPU of its own to NCCL.
        hosts: where they are.
        device: this rank's.
        nbytes: of what is received.
        config: the bound of waits, and where compiled kernels are kept.

    Attributes:
        group, hosts: as given.
        gin: the headers of NCCL of which kernels are compiled.

    Raises:
        UnavailableError: this process has no NCCL with GIN, or that finds no network for it; or its
            headers are missing; on all ranks.
        ArgumentError: the ranks ask for different sizes, or have different versions of NCCL.
        SystemFailure: the GPU has not that much memory.
        FanfoldError: another rank failed in one of these ways.
    """

    network = NCCL_GIN
    gin: ForeignHeaders | None
    core: _core.SymmetricMemory | None = None

    def __init__(
        self,
        group: Group,
        hosts: Hosts,
        device: torch.device,
        nbytes: BytesBetweenHosts,
        config: Config,
    ) -> None:
        self.group, self.hosts = group, hosts
        self._nbytes, self._config = nbytes, config
        slots = _HIGH_THROUGHPUT_SLOTS if nbytes.words else _LOW_LATENCY_SLOTS
        self._parts = _Parts.of(group.size, nbytes, slots)
        library, found = agreed(group, lambda: _library_with_gin(group))
        self.gin = found
        agree(group, {"bytes": str(nbytes), "NCCL's version": version_text(library.version)})
        self._window = window = Window(group, in_reach=False)
        self._opened: list[_Fences] = []  # those of the window, once it is open
        self._end = weakref.finalize(self, _let_go, window, self._opened)
        self._end.atexit = False
        try:
            window.open(library, self._parts.end, config.timeout_s)
            numbers = group.size + 1  # number 0 is none to NCCL's proxy
            made = agreed(group, lambda: window.communicator.device_communicator(numbers, numbers))
            fences = agreed(group, lambda: self._take(device, made, slots, found))
            self._fences = fences
            self._opened.append(fences)
        except BaseException:
            self.close()
            raise

    def _take(
        self, device: torch.device, communicator: bytes, slots: int, gin: ForeignHeaders
    ) -> _Fences:
        address, parts = self._window.address, self._parts
        self._received = tensor_over(address, self._nbytes.received, device, None)
        on_gpu = _on(device, communicator)
        window = _core.GinWindow(
            rank=self.group.rank,
            hosts=list(self.hosts.host),
            communicator=on_gpu.data_ptr(),
            handle=self._window.handle,
            memory=address,
            received=parts.received_queues,
            sent=parts.sent_queues,
        )
        window.slots, window.words, window.rows = slots, parts.words, parts.rows
        self._block = torch.empty(len(window.block(0)), dtype=torch.uint8, device=device)
        self._block.copy_(_on(torch.device("cpu"), window.block(self.address)))
        return _Fences(self.group, self._block, on_gpu, self._config, gin)

    @property
    def address(self) -> int:
        """On the GPU, of what kernels know of it (``LowLatencyHosts``)."""
        return self._block.data_ptr()

    @property
    def usable_bytes(self) -> int:
        """Of what is received."""
        return self._nbytes.received

    @property
    def bytes_per_rank(self) -> int:
        """Of the window."""
        return self._parts.end

    def base(self, peer: int) -> int:
        """In this rank's window."""
        return self._window.address + self._parts.words[peer]

    def check_bytes(self, needed: int) -> None:
        """Raises ArgumentError if it has fewer bytes than ``needed``."""
        if needed > self.usable_bytes:
            raise ArgumentError(
                "memory between hosts",
                f"{self.usable_bytes} bytes",
                f"at least {needed} for this geometry",
            )

    def prepare(self, geometry: _core.LowLatencyGeometry) -> None:
        """See :meth:`fanfold.memory.BetweenHosts.prepare`.

        Raises:
            PeerTimeout: the fence of a peer does not come.
        """
        self._fences.await_all()
        self._received[: _core.cuda_low_latency_hosts_bytes(geometry)].zero_()
        # What kernels have seen of the words that were there.
        at = _core.CUDA_LOW_LATENCY_HOSTS_SEEN_AT
        self._block[at : at + _core.CUDA_LOW_LATENCY_HOSTS_SEEN_BYTES].zero_()

    def prepare_high_throughput(self, ring_bytes: int) -> None:
        """See :meth:`fanfold.memory.BetweenHosts.prepare_high_throughput`.

        Raises:
            ArgumentError: it has too few bytes.
        """
        zeroed, needed = _core.cuda_high_throughput_bytes(self.group.size, ring_bytes)
        self.check_bytes(needed)
        self._received[:zeroed].zero_()

    def fence(self) -> None:
        """See :meth:`fanfold.memory.BetweenHosts.fence`.

        Raises:
            PeerTimeout: puts to a peer are not done in time.
        """
        self._fences.send()

    def meet(self) -> None:
        """See :meth:`fanfold.memory.BetweenHosts.meet`. Numbers of fences differ where a rank has
        refused a change that others had begun."""
        self._fences.meet()

    def check(self, peer: int = -1) -> None:
        """Raises what has ended NCCL's communicator, of which it names no peer.

        Raises:
            TransportError: that.
        """
        if not self._end.alive:
            return
        try:
            self._window.communicator.check()
        except UnavailableError as error:
            rank = self.group.rank
            raise TransportError(rank, peer, self.network, str(error), 0, 0, 0.0) from error

    def explain(self, late: FanfoldError) -> None:
        """Raises what has ended the network if ``late`` says that a peer on another host was late.

        Raises:
            TransportError: that.
        """
        host = self.hosts.host
        if isinstance(late, PeerTimeout) and host[late.peer] != host[self.group.rank]:
            self.check(late.peer)

    def close(self) -> None:
        """Lets go of the window, once the peers have closed theirs or some seconds are over: what
        kernels have put may still be on its way, in both directions. Harmless when repeated."""
        if self._end.alive and self._opened:
            self._opened.pop().end(awaits=True)
        self._end()


def _between_calls(entry: str, ranks: int, gin: ForeignHeaders) -> KernelSource:
    constants = {
        "kRanks": ranks, "kExperts": ranks, "kTopK": 1, "kWarps": 1, "kMirror": 0,
        "kAcrossHosts": 1,
    }  # fmt: skip
    return KernelSource(
        f"gin/{entry}.cu", f"fanfold::gin::{entry}", constants, _THREADS, foreign=gin
    )


def _library_with_gin(group: Group) -> tuple[NcclLibrary, ForeignHeaders]:
    library = library_for(group)
    library.require_gin()
    return library, headers.of(library)


def _on(device: torch.device, data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).to(device)
