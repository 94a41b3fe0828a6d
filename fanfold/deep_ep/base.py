"""What the two modes' halves of ``Buffer`` share."""

from __future__ import annotations

from typing import Any

import torch

from fanfold.deep_ep.runtime import Runtime
from fanfold.deep_ep.sizes import Config
from fanfold.errors import UsageError
from fanfold.forks import Owner
from fanfold.memory import PeerMemory
from fanfold.memory.cuda_hosts import counting_cores
from fanfold.metrics import collect

__all__ = ["BufferBase", "Counted"]


class Counted:
    """Has ``metrics()``. Whoever makes it sets the two attributes, and counts its calls."""

    _calls: dict[str, int]
    _measured: tuple[Owner, tuple[PeerMemory, ...]]  # stays after the end of the runtime

    def metrics(self) -> dict[str, Any]:
        """What this rank has done so far, as :meth:`fanfold.LowLatency.metrics`; DeepEP has no such
        call. After ``destroy`` the last values are returned.

        Raises:
            UsageError: in a forked child.
        """
        owner, memories = self._measured
        owner.check()
        return collect(self._calls, *counting_cores(*memories))


class BufferBase(Counted):
    """State of a Buffer; see :class:`fanfold.deep_ep.buffer.Buffer`."""

    rank: int
    group: Any
    group_size: int
    num_nvl_bytes: int
    num_rdma_bytes: int
    low_latency_mode: bool
    explicitly_destroy: bool
    enable_shrink: bool
    device: torch.device
    runtime: Runtime | None

    def _open(self) -> Runtime:
        """The runtime, unless it has been destroyed."""
        if self.runtime is None:
            raise UsageError("this Buffer was destroyed; make a new one")
        self.runtime.owner.check()
        return self.runtime

    @staticmethod
    def get_dispatch_config(num_ranks: int) -> Config:
        """The configuration that dispatch uses when it is given none."""
        raise NotImplementedError

    @staticmethod
    def get_combine_config(num_ranks: int) -> Config:
        """The configuration that combine uses when it is given none."""
        raise NotImplementedError
