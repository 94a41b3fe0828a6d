"""Memory that the ranks of a group share: on one host, or between its GPUs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, runtime_checkable

if TYPE_CHECKING:
    import torch

    from fanfold.group import Group
    from fanfold.memory.between_hosts import BetweenHosts

__all__ = ["GpuPeerMemory", "PeerMemory"]


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
