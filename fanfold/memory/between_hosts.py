"""Proxies of the CPU that carry the rows of a GPU's kernels to other hosts.

For ranks on other hosts a kernel stores into memory of its own host and pushes commands, which the
proxies of that memory carry: pinned memory of the CPU, of which
:class:`fanfold.memory.host.SymmetricMemory` has one region for what this rank receives and one for
what it sends to each peer. ``docs/decisions/across-hosts.md`` has the protocol.
"""

from __future__ import annotations

import math
import sys
from typing import NamedTuple

import torch

from fanfold import _core
from fanfold.errors import ArgumentError, FanfoldError, PeerTimeout, logged
from fanfold.jit import ForeignHeaders
from fanfold.memory.host import SymmetricMemory
from fanfold.memory.pinning import PinnedRanges

__all__ = ["BytesBetweenHosts", "ProxiesBetweenHosts"]


class BytesBetweenHosts(NamedTuple):
    """Bytes of a rank's memory between hosts.

    Attributes:
        received: that it receives in, by the mode's layout.
        words: of those the first ones, which have the words that kernels send apart from rows; 0
            where these lie among the rows.
    """

    received: int
    words: int = 0

    @classmethod
    def of_high_throughput(cls, ranks: int, received: int) -> BytesBetweenHosts:
        """In the layout of that mode."""
        return cls(received, _core.cuda_high_throughput_words_bytes(ranks))


class ProxiesBetweenHosts:
    """The :class:`fanfold.memory.BetweenHosts` that is memory of this host and its proxies.

    Args:
        memory: of the CPU, of all ranks, made ``for_kernels_of`` the device. It is closed with this
            object.
        device: whose kernels they are.

    Attributes:
        memory: as given.
        group, hosts, network, core: of ``memory``.
    """

    gin: ForeignHeaders | None = None
    core: _core.SymmetricMemory | None

    def __init__(self, memory: SymmetricMemory, device: torch.device) -> None:
        self.memory, self.core = memory, memory.core
        self.group, self.hosts, self.network = memory.group, memory.hosts, memory.network
        self._pinned = PinnedRanges()
        rows = 0 if memory.rows.memory is None else memory.rows.memory.address
        nbytes = len(_core.cuda_low_latency_hosts_block(memory.core, 0, rows))
        self._block = torch.empty(nbytes, dtype=torch.uint8, device=device)
        block = _core.cuda_low_latency_hosts_block(memory.core, self.address, rows)
        host_block = torch.frombuffer(bytearray(block), dtype=torch.uint8)
        self._block.copy_(host_block)

    @property
    def address(self) -> int:
        """On the GPU, of what kernels know of it (``LowLatencyHosts``)."""
        return self._block.data_ptr()

    @property
    def usable_bytes(self) -> int:
        """Of a region on the CPU."""
        return self.memory.usable_bytes

    @property
    def bytes_per_rank(self) -> int:
        """Of the region on the CPU, and of memory of the GPU for rows that the network writes; not
        of the copies of other ranks' regions, of which the system provides what is used."""
        return self.memory.rows.nbytes + self.memory.bytes_per_rank

    def base(self, peer: int) -> int:
        """In memory of this host."""
        return self.memory.base(peer)

    @property
    def has_rows_apart(self) -> bool:
        """Whether rows have memory of their own, on the GPU."""
        return self.memory.rows.memory is not None

    def check_bytes(self, needed: int) -> None:
        """Raises ArgumentError if it has fewer bytes than ``needed``."""
        if (usable := self.memory.usable_bytes) < needed:
            raise ArgumentError(
                "memory between hosts", f"{usable} bytes", f"at least {needed} for this geometry"
            )

    def prepare(self, geometry: _core.LowLatencyGeometry) -> None:
        """Prepares it for calls of a geometry. No kernel runs, and nothing is under way to this
        rank: all ranks have come back from :meth:`fence` since their last kernel has ended.

        Raises:
            ArgumentError: commands cannot name so much memory.
            SystemFailure: CUDA does not pin so much.
        """
        self._pinned.change(
            _core.cuda_low_latency_hosts_pinned(self.memory.core, geometry, self.has_rows_apart)
        )
        _core.cuda_low_latency_hosts_clear(self.memory.core, geometry)
        # What kernels have seen of the words that were there.
        at = _core.CUDA_LOW_LATENCY_HOSTS_SEEN_AT
        self._block[at : at + _core.CUDA_LOW_LATENCY_HOSTS_SEEN_BYTES].zero_()

    def prepare_high_throughput(self, ring_bytes: int) -> None:
        """As :meth:`prepare`, for high-throughput calls with rings of ``ring_bytes``; once.

        Raises:
            ArgumentError: it has too few bytes, or commands cannot name so many.
            SystemFailure: CUDA does not pin so much.
        """
        self.check_bytes(_core.cuda_high_throughput_bytes(self.memory.ranks, ring_bytes)[1])
        self._pinned.change(
            _core.cuda_high_throughput_hosts_pinned(
                self.memory.core, ring_bytes, self.has_rows_apart
            )
        )
        _core.cuda_high_throughput_hosts_clear(self.memory.core, ring_bytes)

    def fence(self) -> None:
        """Returns once the peers have all that kernels of this rank which have ended have sent.

        Raises:
            PeerTimeout, TransportError: they may never have it.
        """
        self.memory.core.fence()

    def meet(self) -> None:
        """Nothing: behind a fence nothing is under way."""

    def check(self, peer: int = -1) -> None:
        """Raises what has ended the network, or with a ``peer`` on another host the way to it.

        Raises:
            PeerTimeout, TransportError: that.
        """
        self.memory.core.check_network(peer)

    def explain(self, late: FanfoldError) -> None:
        """Raises what the network knows if ``late`` says that a peer on another host was late: what
        has ended the way to it, or at least what that way is. Then that is what is logged.

        Raises:
            PeerTimeout, TransportError: that; of a way that has ended the cause says what this rank
                waited for.
        """
        host = self.memory.hosts.host
        if not isinstance(late, PeerTimeout) or host[late.peer] == host[self.memory.rank]:
            return
        try:
            self.check(late.peer)
        except FanfoldError as error:
            # A wait for a peer that the network has lost ends before its time.
            early = (late.expected, late.actual, math.nan, late.peer_gone)
            raise error from PeerTimeout(late.rank, late.peer, late.phase, *early)
        path = self.memory.core.path(late.peer)
        waited = (late.expected, late.actual, late.seconds)
        where = (late.rank, late.peer, late.phase)
        raise logged(PeerTimeout(*where, *waited, late.peer_gone, path))

    def close(self) -> None:
        """No kernel uses it any more. Waits a while for peers; harmless when repeated."""
        self._pinned.close()
        self.memory.close()

    def __del__(self) -> None:
        """Unpins what the memory is about to unmap, unless CUDA is about to end, too."""
        if not sys.is_finalizing():
            self._pinned.close()
