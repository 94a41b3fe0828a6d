"""What a ``Buffer`` holds: symmetric memory with a part for each mode.

On the host all is one region of each rank:

    exchange | signals of low latency | num_rdma_bytes | signals of high throughput | num_nvl_bytes

A mode that runs on the GPUs has a region there, and no part of the host's.

Callers get none of it: some write over what ``get_local_buffer_tensor`` gives them at any time,
also while a call is in flight. Scratch is memory of its own, made when a caller first asks for it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fanfold import _core
from fanfold.backends.choose import choose
from fanfold.backends.high_throughput import HostHighThroughput
from fanfold.backends.high_throughput.cuda import CudaHighThroughput
from fanfold.backends.low_latency import HostLowLatency, LowLatencyBackend, open_low_latency
from fanfold.backends.opening import open_gpu_memory
from fanfold.backends.ranges import ranged
from fanfold.config import Config as Settings
from fanfold.copying import not_copied
from fanfold.deep_ep.exchange import Exchange
from fanfold.deep_ep.sizes import (
    align,
    cuda_memory_between_hosts_bytes,
    cuda_memory_bytes,
    cuda_stream_bytes,
    signal_bytes,
)
from fanfold.deep_ep.streams import HostStreams, Streams
from fanfold.errors import ArgumentError, PeerTimeout, UsageError, logged
from fanfold.forks import Owner
from fanfold.group import Group
from fanfold.memory import GpuPeerMemory, PeerMemory
from fanfold.memory.between_hosts import BytesBetweenHosts
from fanfold.memory.host import SymmetricMemory
from fanfold.memory.hosts import find_hosts
from fanfold.representation import described

__all__ = ["Runtime", "Sizes"]


@dataclass(frozen=True)
class Sizes:
    """Bytes that a Buffer was made with.

    Attributes:
        nvl: ``num_nvl_bytes``, for high throughput.
        rdma: ``num_rdma_bytes``, for low latency.
    """

    nvl: int
    rdma: int


@not_copied(
    why="it holds memory that the ranks of its group share",
    instead="Make a Buffer in each process with the same arguments.",
)
class Runtime:
    """The memory and the modes of one Buffer. Construction is collective.

    Args:
        group: the ranks.
        sizes: bytes for each mode; 0 for a mode that is not used.
        settings: time bounds, what happens to late peers, and where the modes run.

    Attributes:
        owner: the process that made it.
        rank, ranks: of the group.
        choice: the backend of low latency; and of high throughput, if it supports that.
        streams: in which order calls run.
        memory: on the host.
        exchange: between the hosts' processes.
    """

    def __init__(self, group: Group, sizes: Sizes, settings: Settings) -> None:
        self.owner = Owner("this Buffer")
        self.rank, self.ranks = group.rank, group.size
        self._sizes = sizes
        self._timeout_s = settings.timeout_s
        self._masks = settings.late_peers == "mask"
        self.choice = choose(group, settings, may_cross_hosts=True)
        on_gpu = self.choice.backend == "cuda"
        self.streams = Streams(self.choice.device) if on_gpu else HostStreams()
        streams_on_gpu = self.choice.supports("high_throughput")
        host_rdma = 0 if on_gpu else sizes.rdma
        host_nvl = 0 if streams_on_gpu else sizes.nvl
        rdma_signals = signal_bytes(group.size)
        nvl_signals = _core.HighThroughput.required_bytes(group.size, 0)
        hosts = find_hosts(group, settings)
        rdma_part = align(Exchange.required_bytes(group.size, hosts.count))
        nvl_part = rdma_part + rdma_signals + align(host_rdma)
        total = nvl_part + nvl_signals + align(host_nvl)
        self.memory = SymmetricMemory(group, total, settings, hosts)
        self.exchange = Exchange(self.memory, group.rank, group.size, 0)
        self._gpu_memory: GpuPeerMemory | None = None
        self._gpu_streams: GpuPeerMemory | None = None
        self._scratch: dict[bool, torch.Tensor] = {}  # by use_rdma_buffer
        self._low_latency: LowLatencyBackend | None = None
        self._high_throughput: HostHighThroughput | CudaHighThroughput | None = None
        try:
            if sizes.rdma and on_gpu:
                self._open_low_latency(group, settings)
            elif sizes.rdma:
                nbytes = rdma_signals + sizes.rdma
                self._low_latency = HostLowLatency(self.memory, rdma_part, nbytes)
            if sizes.nvl and streams_on_gpu:
                self._open_high_throughput(group, settings)
            elif sizes.nvl:
                # A ring that stays in cache is faster than one that uses all there is.
                nbytes = nvl_signals + min(sizes.nvl, settings.staging_bytes)
                self._high_throughput = HostHighThroughput(self.memory, nvl_part, nbytes)
        except BaseException:
            self.close()
            raise
        self._low_latency = ranged(self._low_latency, "low_latency", settings)
        self._high_throughput = ranged(self._high_throughput, "high_throughput", settings)

    def _open_low_latency(self, group: Group, settings: Settings) -> None:
        """On the GPUs."""
        nbytes = cuda_memory_bytes(self._sizes.rdma)
        between = BytesBetweenHosts(cuda_memory_between_hosts_bytes(self._sizes.rdma, group.size))
        self._gpu_memory = open_gpu_memory(group, self.choice, nbytes, between, settings)
        self._low_latency = open_low_latency(
            self._gpu_memory,
            settings,
            late_weights=True,
            check_devices=self.choice.check_devices,
        )

    def _open_high_throughput(self, group: Group, settings: Settings) -> None:
        """On the GPUs."""
        nbytes = cuda_stream_bytes(self._sizes.nvl, group.size, settings)
        between = BytesBetweenHosts.of_high_throughput(group.size, nbytes)
        self._gpu_streams = open_gpu_memory(group, self.choice, nbytes, between, settings)
        self._high_throughput = CudaHighThroughput(
            self._gpu_streams, settings, check_devices=self.choice.check_devices
        )

    def __repr__(self) -> str:
        paths = {"nvl_bytes": "_sizes.nvl", "rdma_bytes": "_sizes.rdma"}
        return described(self, rank="rank", ranks="ranks", **paths, choice="choice")

    @property
    def counting(self) -> tuple[PeerMemory, ...]:
        """What counts waits, rows and messages of its calls."""
        on_gpus = (self._gpu_memory, self._gpu_streams) if self.choice.across_hosts else ()
        return (self.memory, *(memory for memory in on_gpus if memory is not None))

    @property
    def low_latency(self) -> LowLatencyBackend:
        """The low-latency mode.

        Raises:
            UsageError: the Buffer has no memory for it.
        """
        if self._low_latency is None:
            raise UsageError(
                "this Buffer has num_rdma_bytes=0, so no memory for low-latency calls; pass "
                "num_rdma_bytes=Buffer.get_low_latency_rdma_size_hint("
                "num_max_dispatch_tokens_per_rank, hidden, num_ranks, num_experts)"
            )
        return self._low_latency

    @property
    def high_throughput(self) -> HostHighThroughput | CudaHighThroughput:
        """The high-throughput mode.

        Raises:
            UsageError: the Buffer has no memory for it, or a rank is masked.
        """
        if self._high_throughput is None:
            raise UsageError(
                "this Buffer has num_nvl_bytes=0, so no memory for dispatch and combine; pass "
                "num_nvl_bytes=config.get_nvl_buffer_size_hint(hidden_bytes, num_ranks)"
            )
        masked = self._masked()
        if masked:
            raise UsageError(
                f"rank {masked[0]} is masked; only low-latency calls go on without a rank: call "
                "low_latency_clean_mask_buffer() once it is back, or make a Buffer without it"
            )
        return self._high_throughput

    def check_complete(self, phase: str) -> None:
        """Raises PeerTimeout if a rank was masked, because it was late, in a high-throughput call:
        what it owed is missing from the result."""
        for peer in range(self.ranks):
            if self.memory.core.masked(peer):
                raise logged(
                    PeerTimeout(self.rank, peer, phase, 1, 0, self._timeout_s, peer_gone=False)
                )

    def set_masked(self, rank: int, masked: bool) -> None:
        """Masks or unmasks a rank, on every backend that the Buffer uses."""
        self.memory.core.set_masked(rank, masked)
        if self._gpu_memory is not None:
            self.low_latency.set_masked(rank, masked)

    def _masked(self) -> list[int]:
        masked = {peer for peer in range(self.ranks) if self.memory.core.masked(peer)}
        # Reading those of the GPU waits for it, which a capture cannot.
        on_gpu = self._gpu_memory is not None and self._masks
        if on_gpu and not torch.cuda.is_current_stream_capturing():
            masked.update(self.low_latency.masked().nonzero().flatten().tolist())
        return sorted(masked)

    def local_tensor(self, dtype: torch.dtype, offset: int, use_rdma_buffer: bool) -> torch.Tensor:
        """Scratch as large as one mode's memory, from element ``offset`` on, as a flat tensor. Made
        at the first call and kept."""
        nbytes = self._sizes.rdma if use_rdma_buffer else self._sizes.nvl
        elements = nbytes // dtype.itemsize
        if not 0 <= offset <= elements:
            raise ArgumentError("offset", offset, f"from 0 to the {elements} elements there are")
        scratch = self._scratch.get(use_rdma_buffer)
        if scratch is None:
            on_gpu = self._gpu_memory if use_rdma_buffer else self._gpu_streams
            device = torch.device("cpu") if on_gpu is None else self.choice.device
            scratch = torch.empty(nbytes, dtype=torch.uint8, device=device)
            self._scratch[use_rdma_buffer] = scratch
        return scratch[: elements * dtype.itemsize].view(dtype)[offset:]

    def clear_scratch(self) -> None:
        """Zeros in the scratch of low latency, if there is any."""
        scratch = self._scratch.get(True)
        if scratch is not None:
            scratch.zero_()

    def close(self) -> None:
        """Releases the memory. Not collective; peers keep what they have mapped."""
        for memory in (self._gpu_memory, self._gpu_streams, self.memory):
            if memory is not None:
                memory.close()
        self._scratch.clear()

    # What programs ask DeepEP's runtime object.

    def is_available(self) -> bool:
        """Whether the ranks are connected: always, once constructed."""
        return True

    def is_internode_available(self) -> bool:
        """Whether DeepEP's internode calls are needed: no, the same calls reach ranks of other
        hosts."""
        return False

    def get_num_rdma_ranks(self) -> int:
        """Number of groups of ranks that DeepEP's internode calls distinguish: 1."""
        return 1

    def get_rdma_rank(self) -> int:
        """Index of this rank's group among them: 0."""
        return 0

    def get_root_rdma_rank(self, global_: bool) -> int:
        """The rank that represents this host: rank 0 globally, index 0 among hosts."""
        del global_
        return 0

    def get_local_device_id(self) -> int:
        """Index of the device; the CPU has one."""
        return self.choice.device.index or 0
