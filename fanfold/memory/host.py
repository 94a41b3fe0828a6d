"""Symmetric memory: who maps whose memory.

Every rank owns one region of the same size and layout and has the regions of its peers on this host
mapped. On a host without GPUs that is anonymous shared memory (``csrc/memory``): it has no name in
any file system, so nothing is left behind however a rank dies. Of a peer on another host it has a
copy of what it writes there, which proxies (``csrc/proxy``) carry over.
"""

from __future__ import annotations

import logging
import os
from types import TracebackType

import torch

from fanfold import _core
from fanfold.config import NCCL_GIN, Config
from fanfold.copying import not_copied
from fanfold.descriptors import check_descriptors, for_memory
from fanfold.errors import FanfoldError, UnavailableError
from fanfold.group import Group, agree
from fanfold.late_peers import LatePeer, LatePeers
from fanfold.memory.closing import close_in_a_thread, wait_at_exit
from fanfold.memory.hosts import Hosts, find_hosts
from fanfold.memory.rows import NetworkRows
from fanfold.representation import described

__all__ = ["SymmetricMemory"]

KERNEL_RING_SLOTS = 1024
"""Commands that a GPU's kernels can have pushed for a proxy thread which it has not taken yet. A
call of low latency pushes one for each run of rows to a peer."""

_LOG = logging.getLogger(__name__)


@not_copied(
    why="it maps the memory of other processes",
    instead="Make one in each process; construction is collective.",
)
class SymmetricMemory:
    """The host's :class:`fanfold.memory.PeerMemory`. Construction is collective.

    Args:
        group: the ranks.
        bytes_per_rank: what the modes may place in each region.
        config: time bound, spinning, what happens to late peers, and how ranks reach other hosts.
        hosts: what :func:`fanfold.memory.hosts.find_hosts` has found, if it has been called.
        for_kernels_of: the GPU whose kernels send through it, too, to ranks on other hosts.

    Attributes:
        group: as given.
        rank, ranks: of the group.
        device: the CPU.
        hosts: where the ranks are.
        network: what carries between hosts, such as ``"libfabric:tcp"``; "" on one host.
        rows: where the rows of those kernels lie.
        core: what the modes of the core work on.

    Raises:
        UnavailableError: if there are several hosts and no network between them.
        ArgumentError: if they ask for different sizes, or their settings differ.
        FanfoldError: if any rank could not create or map memory; raised by all ranks alike.
    """

    def __init__(
        self,
        group: Group,
        bytes_per_rank: int,
        config: Config,
        hosts: Hosts | None = None,
        *,
        for_kernels_of: torch.device | None = None,
    ) -> None:
        self.group, self.rank, self.ranks = group, group.rank, group.size
        self.device, self._usable_bytes = torch.device("cpu"), bytes_per_rank
        self._late, self._known_late = LatePeers(group.rank), 0
        self._watched: list[int] = []  # masked peers of which it is not known that they are lost
        error: Exception | None = None
        try:
            check_descriptors(for_memory(group.size), f"the memory of {group.size} ranks")
        except FanfoldError as failure:
            error = failure
        agree(group, {"bytes_per_rank": bytes_per_rank}, error)
        self.hosts = hosts = hosts or find_hosts(group, config)
        self.network, self.rows = "", NetworkRows()
        carrier: _core.Carrier | None = None
        address = network_address = None
        try:
            self.core = _open_core(group, bytes_per_rank, hosts, config)
            address = self.core.address()
            if hosts.several:
                carrier = _open_carrier(self.core, hosts, config, for_kernels_of is not None)
                self.network = carrier.network
        except FanfoldError as failure:
            error = failure
        if for_kernels_of is not None:
            self.rows.offer(group, getattr(self, "core", None), carrier, for_kernels_of, config)
        if carrier is not None and error is None:
            try:
                network_address = carrier.address()
            except FanfoldError as failure:
                error = failure
        gathered = group.all_gather((address, network_address))
        try:
            agree(group, {"network": self.network}, error)
            try:
                self.core.map([own for own, _ in gathered])
                if carrier is not None:
                    carrier.start([theirs for _, theirs in gathered])
                    self.rows.choose(carrier)
            except FanfoldError as failure:
                error = failure
            # Until every rank has mapped every region, the descriptors must stay open.
            agree(group, {}, error)
        except Exception:
            for part in (carrier, getattr(self, "core", None), self.rows):
                if part is not None:
                    part.close()
            raise
        if carrier is not None:
            wait_at_exit()
            carrier.give_to(self.core)
            self._log_network()
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
            late = LatePeer(*self.core.late_peer(self._known_late - 1))
            self._late.warn(late)
            if self.hosts.host[late.peer] != self.hosts.host[self.rank]:
                self._watched.append(late.peer)
        if self._watched:
            self._log_lost()

    def _log_lost(self) -> None:
        """Logs which masked peers on other hosts the network has lost or given up since."""
        for peer in tuple(self._watched):
            reason = self.core.why_lost(peer)
            if reason == "":
                continue
            self._watched.remove(peer)
            _LOG.warning(
                "rank %d sends rank %d nothing any more: %s",
                self.rank,
                peer,
                reason,
                extra={
                    "rank": self.rank,
                    "peer": peer,
                    "network": self.network,
                    "reason": reason,
                },
            )

    def _log_network(self) -> None:
        hosts = self.hosts
        extra = {
            "rank": self.rank,
            "hosts": hosts.count,
            "network": self.network,
            "proxy_threads": hosts.proxy_threads,
        }
        _LOG.info(
            "rank %d reaches the ranks of %d hosts over %s, with %d proxy threads, because %s",
            self.rank,
            hosts.count,
            self.network,
            hosts.proxy_threads,
            hosts.reason,
            extra=extra,
        )
        if self.rows.memory is None and not self.rows.why_none:
            return  # no kernels send any
        where = "its GPU" if self.rows.memory is not None else f"the CPU: {self.rows.why_none}"
        _LOG.info(
            "rows that rank %d exchanges with other hosts lie in memory of %s",
            self.rank,
            where,
            extra=extra,
        )

    def masked(self) -> list[bool]:
        """Whether each rank is masked."""
        return [self.core.masked(peer) for peer in range(self.ranks)]

    def close(self) -> None:
        """Unmaps everything. Not collective; harmless when repeated."""
        if self._watched:
            self._log_lost()
        self.core.close()
        self.rows.close()

    def __del__(self) -> None:
        """Between hosts, has peers get what this rank has signalled, as :meth:`close` does: they
        may still wait for it when a program drops its last reference."""
        if getattr(self, "network", ""):
            close_in_a_thread(self.core, self.rows)

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


def _open_core(group: Group, nbytes: int, hosts: Hosts, config: Config) -> _core.SymmetricMemory:
    return _core.SymmetricMemory(
        rank=group.rank,
        ranks=group.size,
        bytes=nbytes,
        timeout_seconds=config.timeout_s,
        spin_seconds=config.spin_seconds(hosts.machine_ranks * hosts.spinning_threads),
        mask_late_peers=config.late_peers == "mask",
        hosts=hosts.host,
    )


def _open_carrier(
    core: _core.SymmetricMemory, hosts: Hosts, config: Config, for_kernels: bool
) -> _core.Carrier:
    """What carries to other hosts. Raises UnavailableError if there is no network for it."""
    if config.network.startswith("loopback") and int(hosts.world.split()[0]) != os.getpid():
        raise UnavailableError(
            f"the setting network is {config.network!r} (from {config.source_of('network')}), "
            "which reaches ranks of one process only (fanfold.thread_ranks); these are several"
        )
    # By GIN only kernels reach other hosts.
    network = "libfabric" if config.network == NCCL_GIN else config.network
    gpu_memory = for_kernels and config.network_memory == "auto"
    try:
        return _core.Carrier(
            core,
            network=(network, hosts.interface, gpu_memory),
            world=hosts.world,
            one_host=hosts.one_machine,
            threads=(hosts.proxy_threads, KERNEL_RING_SLOTS if for_kernels else 0),
            timeout_seconds=config.timeout_s,
            give_up_peers=config.late_peers == "mask",
        )
    except UnavailableError as error:
        raise UnavailableError(f"{error}. A network is needed because {hosts.reason}") from None
