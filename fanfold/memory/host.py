"""Symmetric memory: who maps whose memory.

Every rank owns one region of the same size and layout and has the regions of all its peers mapped.
On a host without GPUs that is anonymous shared memory (``csrc/memory``): it has no name in any file
system, so nothing is left behind however a rank dies.
"""

from __future__ import annotations

import os
from pathlib import Path
from types import TracebackType

import torch

from fanfold import _core
from fanfold.config import Config
from fanfold.copying import not_copied
from fanfold.descriptors import advice, check_descriptors, for_memory
from fanfold.errors import FanfoldError, SystemFailure, UnavailableError
from fanfold.group import Group, agree
from fanfold.late_peers import LatePeer, LatePeers
from fanfold.representation import described

__all__ = ["SymmetricMemory", "host_identity"]


def host_identity() -> str:
    """A name for this running kernel, PID namespace and user: who share it can share memory.

    Raises:
        SystemFailure: there is no /proc to read it from, or no file descriptor to do so.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        namespace = Path("/proc/self/ns/pid").readlink()
    except OSError as error:
        why = f"{error}{advice(error)}"
        raise SystemFailure(f"nothing says which host and namespace this is: {why}") from error
    return f"{boot} {namespace} uid:{os.getuid()}"


@not_copied(
    why="it maps the memory of other processes",
    instead="Make one in each process; construction is collective.",
)
class SymmetricMemory:
    """The host's :class:`fanfold.memory.PeerMemory`. Construction is collective.

    Args:
        group: the ranks.
        bytes_per_rank: what the modes may place in each region.
        config: time bound, spinning, and what happens to late peers.

    Attributes:
        group: as given.
        rank, ranks: of the group.
        device: the CPU.
        core: what the modes of the core work on.

    Raises:
        UnavailableError: if the ranks are not on one host, or not of one user.
        ArgumentError: if they ask for different sizes.
        FanfoldError: if any rank could not create or map memory; raised by all ranks alike.
    """

    def __init__(self, group: Group, bytes_per_rank: int, config: Config) -> None:
        self.group, self.rank, self.ranks = group, group.rank, group.size
        self.device, self._usable_bytes = torch.device("cpu"), bytes_per_rank
        self._late, self._known_late = LatePeers(group.rank), 0
        error: Exception | None = None
        host = ""
        try:
            check_descriptors(for_memory(group.size), f"the memory of {group.size} ranks")
            host = host_identity()
        except FanfoldError as failure:
            error = failure
        agree(group, {"bytes_per_rank": bytes_per_rank}, error)
        agree(group, {}, _other_host(group.all_gather(host)))
        try:
            self.core = _core.SymmetricMemory(
                rank=group.rank,
                ranks=group.size,
                bytes=bytes_per_rank,
                timeout_seconds=config.timeout_s,
                spin_seconds=config.spin_seconds(group.size),
                mask_late_peers=config.late_peers == "mask",
            )
            address = self.core.address()
        except FanfoldError as failure:
            error, address = failure, None
        addresses = group.all_gather(address)
        agree(group, {}, error)
        try:
            self.core.map(addresses)
        except FanfoldError as failure:
            error = failure
        # Until every rank has mapped every region, the descriptors must stay open.
        try:
            agree(group, {}, error)
        except FanfoldError:
            self.core.close()
            raise
        self.core.seal()

    @property
    def usable_bytes(self) -> int:
        """Bytes of a region that modes may use, as asked for."""
        return self._usable_bytes

    @property
    def bytes_per_rank(self) -> int:
        """Bytes that each rank holds in shared memory, the control block included."""
        return int(self.core.mapped_bytes)

    def base(self, peer: int) -> int:
        """Address in this process of what modes may use of ``peer``'s region."""
        return self.core.window(peer, 0, self._usable_bytes)

    def check(self) -> None:
        """Raises UsageError if the memory is closed or an earlier call has failed, and a
        LatePeerWarning of an earlier call that a filter has turned into an error."""
        self.core.check_usable()
        self._late.raise_held()

    def warn_of_late(self) -> None:
        """Warns of peers that waits have masked since it was last called. Never raises, so that a
        call that has gone out can end."""
        while self._known_late < self.core.late:
            self._known_late += 1
            self._late.warn(LatePeer(*self.core.late_peer(self._known_late - 1)))

    def masked(self) -> list[bool]:
        """Whether each rank is masked."""
        return [self.core.masked(peer) for peer in range(self.ranks)]

    def close(self) -> None:
        """Unmaps everything. Not collective; harmless when repeated."""
        self.core.close()

    def __repr__(self) -> str:
        return described(self, rank="rank", ranks="ranks", bytes_per_rank="usable_bytes")

    def __enter__(self) -> SymmetricMemory:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def _other_host(hosts: list[str]) -> UnavailableError | None:
    for peer, host in enumerate(hosts):
        if host != hosts[0]:
            return UnavailableError(
                f"rank {peer} and rank 0 do not share memory ({host} against {hosts[0]}): the host "
                "backend connects the processes of one user in one PID namespace of one host; in "
                "containers, start all ranks in one container or with --pid=host"
            )
    return None
