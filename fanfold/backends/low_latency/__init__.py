"""The low-latency mode: dispatch and combine for decoding, one row per token and rank.

Each call has a send half and a receive half. Without a hook both run at once; with one, the caller
overlaps its own work with the rows in flight and calls the hook before it touches the result.
Protocol, layout and arithmetic: ``docs/low_latency.md``.
"""

from __future__ import annotations

from fanfold.backends.low_latency.host import HostLowLatency
from fanfold.backends.low_latency.protocol import (
    NO_STATISTICS,
    AnyRouting,
    CudaRouting,
    DeviceCheck,
    Dispatched,
    Hook,
    LateRouting,
    LowLatencyBackend,
    ReadyRows,
    Routing,
    RoutingLayout,
    Statistics,
    anywhere,
    check_tokens,
)
from fanfold.backends.low_latency.sizes import (
    check_cuda_geometry,
    cuda_bytes_between_hosts,
    cuda_required_bytes,
)
from fanfold.config import Config
from fanfold.errors import FanfoldError
from fanfold.group import agree
from fanfold.memory import GpuPeerMemory
from fanfold.memory.host import SymmetricMemory

__all__ = [
    "NO_STATISTICS",
    "AnyRouting",
    "CudaRouting",
    "Dispatched",
    "Hook",
    "HostLowLatency",
    "LateRouting",
    "LowLatencyBackend",
    "ReadyRows",
    "Routing",
    "RoutingLayout",
    "Statistics",
    "check_cuda_geometry",
    "check_tokens",
    "cuda_bytes_between_hosts",
    "cuda_required_bytes",
    "open_low_latency",
]


def open_low_latency(
    memory: SymmetricMemory | GpuPeerMemory,
    config: Config,
    *,
    late_weights: bool = False,
    check_devices: DeviceCheck = anywhere,
) -> LowLatencyBackend:
    """The mode over all of ``memory``, on the backend that this kind of memory belongs to.

    Collective on a GPU. The memory must stay open as long as the mode is used.

    Args:
        memory: the ranks' symmetric memory, of one kind on all ranks.
        config: time bound and what happens to late peers.
        late_weights: whether the routing weights come with combine; on a GPU the memory must have
            been sized for it (:func:`cuda_required_bytes`).
        check_devices: on a GPU, raises for tensors that are elsewhere and says why.

    Raises:
        UnavailableError: the kernels cannot be compiled or loaded; on all ranks alike.
    """
    if isinstance(memory, SymmetricMemory):
        return HostLowLatency(memory, 0, memory.usable_bytes)
    mode: LowLatencyBackend | None = None
    error: Exception | None = None
    try:
        # Only a machine with a GPU pays for the import.
        from fanfold.backends.low_latency.cuda import CudaLowLatency

        mode = CudaLowLatency(memory, config, late_weights, check_devices)
    except FanfoldError as failure:
        error = failure
    agree(memory.group, {}, error)
    assert mode is not None
    return mode
