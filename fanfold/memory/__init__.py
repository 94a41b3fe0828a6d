"""Memory that the ranks of a group share: on one host, or between its GPUs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, runtime_checkable

if TYPE_CHECKING:
    import torch

    from fanfold import _core
    from fanfold.errors import FanfoldError
    from fanfold.group import Group
    from fanfold.jit import ForeignHeaders
    from fanfold.memory.hosts import Hosts

__all__ = ["BetweenHosts", "GpuPeerMemory", "PeerMemory"]


@runtime_checkable
class PeerMemory(Protocol):
    """One region for each rank, of one size, mapped by all ranks. Both modes work on it, and know
    of it what stands here; :class:`fanfold.memory.host.SymmetricMemory` and
    :class:`fanfold.memory.cuda.CudaSymmetricMemory` implement it,
    :class:`fanfold.memory.nccl.NcclSymmetricMemory` over NCCL, and between the GPUs of several
    hosts :class:`fanfold.memory.cuda_hosts.CudaMemoryAcrossHosts`.

    - A region begins on a line of 128 bytes. What lies at an offset is the affair of the mode,
      which lays all regions out alike.
    - What a rank stores into a peer's region gets there without the peer's doing, and loads of
      memory that nobody writes any more give what was stored.
    - Aligned words of 4 and 8 bytes, between GPUs of 16 too, are stored whole: whoever reads sees
      the old or the new one.
    - A release of a word, at the scope of the system, comes after all stores before it: who has
      acquired the word sees them. Nothing else is in order.
    - There is no collective operation but construction. The content is not initialised; modes agree
      when theirs is.
    - A peer that has ended takes nothing away: what this rank has mapped stays until it closes it,
      so that a late store harms nobody.

    Attributes:
        group: the ranks.
        rank, ranks: of the group.
        device: whose memory it is.
    """

    group: Group
    rank: int
    ranks: int
    device: torch.device

    @property
    def usable_bytes(self) -> int:
        """Bytes of a region that modes may use."""

    @property
    def bytes_per_rank(self) -> int:
        """Bytes that each rank holds for it in all."""

    def base(self, peer: int) -> int:
        """Address in this process of ``peer``'s region; with the own rank, that of the own.

        Raises:
            UsageError: closed, or in a forked child.
        """

    def close(self) -> None:
        """Lets go of all regions. Not collective; harmless when repeated."""


class GpuPeerMemory(PeerMemory, Protocol):
    """The memory of GPUs, on whose own region PyTorch's operations work too."""

    @property
    def between(self) -> BetweenHosts | None:
        """What carries to ranks on other hosts; None if there are none."""

    @property
    def tensor(self) -> torch.Tensor:
        """The own region: ``[usable_bytes]`` uint8.

        Raises:
            UsageError: closed, or in a forked child.
        """


class BetweenHosts(Protocol):
    """What carries the rows and words of a GPU's kernels to ranks on other hosts:
    :class:`fanfold.memory.between_hosts.ProxiesBetweenHosts` has proxies of the CPU do it, and by
    :class:`fanfold.memory.gin.GinBetweenHosts` kernels do it themselves.

    Attributes:
        group, hosts: the ranks, and where they are.
        network: what carries, such as ``"libfabric:tcp"``.
        gin: NCCL's headers, of which kernels are compiled then; None where proxies carry.
        core: what counts for the proxies, if there are any.
    """

    group: Group
    hosts: Hosts
    network: str
    gin: ForeignHeaders | None
    core: _core.SymmetricMemory | None

    @property
    def address(self) -> int:
        """On the GPU, of what kernels know of it (``LowLatencyHosts``)."""

    @property
    def usable_bytes(self) -> int:
        """Of a rank, that the modes may use."""

    @property
    def bytes_per_rank(self) -> int:
        """That each rank holds for it in all."""

    def base(self, peer: int) -> int:
        """Where this rank's kernels store what goes to ``peer``, on another host."""

    def check_bytes(self, needed: int) -> None:
        """Raises ArgumentError if it has fewer bytes than ``needed``."""

    def prepare(self, geometry: _core.LowLatencyGeometry) -> None:
        """Prepares it for calls of a geometry. No kernel runs, and nothing is under way to this
        rank: all ranks have come back from :meth:`fence` since their last kernel has ended.

        Raises:
            FanfoldError: it cannot, or in time.
        """

    def prepare_high_throughput(self, ring_bytes: int) -> None:
        """As :meth:`prepare`, for high-throughput calls with rings of ``ring_bytes``; once, before
        all calls."""

    def fence(self) -> None:
        """Returns once the peers have all that kernels of this rank which have ended have sent.

        Raises:
            PeerTimeout, TransportError: they may never have it.
        """

    def meet(self) -> None:
        """Comes between :meth:`fence` and :meth:`prepare`, once no rank has failed. Collective."""

    def check(self, peer: int = -1) -> None:
        """Raises what has ended the network, or with a ``peer`` on another host the way to it.

        Raises:
            PeerTimeout, TransportError: that.
        """

    def explain(self, late: FanfoldError) -> None:
        """Raises what the network knows if ``late`` says that a peer on another host was late.

        Raises:
            PeerTimeout, TransportError: that; of a way that has ended the cause says what this rank
                waited for.
        """

    def close(self) -> None:
        """No kernel uses it any more. May wait a while for peers; harmless when repeated."""
