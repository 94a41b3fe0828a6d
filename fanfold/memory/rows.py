"""Memory for the rows that a GPU's kernels exchange with ranks on other hosts, apart from the words
beside them: the GPU's own, where a NIC reaches that without the CPU."""

from __future__ import annotations

import os

import torch

from fanfold import _core
from fanfold.config import Config
from fanfold.errors import FanfoldError
from fanfold.group import Group

__all__ = ["GpuRows", "NetworkRows", "why_no_rows_on"]

_ALIGNMENT = 2**21
"""Of the first byte: what CUDA maps at once, so that a NIC maps whole pages."""


def why_no_rows_on(device: torch.device, carrier: _core.Carrier, config: Config) -> str:
    """Why the rows of a GPU have no memory of their own there; empty if they may have it."""
    if config.network_memory == "cpu":
        return f"network_memory is 'cpu' (from {config.source_of('network_memory')})"
    if reason := carrier.why_no_gpu_memory:
        return f"of {carrier.network}: {reason}"
    try:
        return _core.cuda_why_no_network_memory(torch.device(device).index)
    except FanfoldError as failure:
        return str(failure)


class GpuRows:
    """Memory of a GPU. No NIC has it registered any more when it is closed.

    Args:
        nbytes: of it.
        device: the GPU.

    Attributes:
        address: of its first byte.
        nbytes: from there on; rounded up to whole pages.
        device: CUDA's number of the GPU.
        dmabuf: a descriptor of its pages; -1 if the driver makes none.

    Raises:
        RuntimeError: the GPU has not so much memory.
    """

    def __init__(self, nbytes: int, device: torch.device) -> None:
        self.nbytes = -(-nbytes // _ALIGNMENT) * _ALIGNMENT
        self._memory: torch.Tensor | None = torch.empty(
            self.nbytes + _ALIGNMENT, dtype=torch.uint8, device=device
        )
        self.address = -(-self._memory.data_ptr() // _ALIGNMENT) * _ALIGNMENT
        self.device = self._memory.device.index
        self.dmabuf = _core.cuda_make_dmabuf(self.address, self.nbytes)

    def close(self) -> None:
        """Gives the memory back. Harmless when repeated."""
        if self.dmabuf >= 0:
            os.close(self.dmabuf)
            self.dmabuf = -1
        self._memory = None


class NetworkRows:
    """Where the rows lie that a rank's kernels exchange with other hosts: in memory of their own,
    if every rank can have some.

    Attributes:
        memory: of their own; None if they lie beside the words, in memory of the CPU.
        why_none: why they do; empty if no kernels send any.
    """

    def __init__(self) -> None:
        self.memory: GpuRows | None = None
        self.why_none = ""
        self._registered: GpuRows | None = None

    def offer(
        self,
        group: Group,
        core: _core.SymmetricMemory | None,
        carrier: _core.Carrier | None,
        device: torch.device,
        config: Config,
    ) -> None:
        """Registers memory with the network, if every rank may. Collective, and raises nothing.

        Args:
            group, config: of the rank.
            core, carrier: None if they could not be made.
            device: whose kernels they are.
        """
        reason = "there is no network"
        if carrier is not None and core is not None:
            reason = why_no_rows_on(device, carrier, config)
            if not (reason or core.may_have_rows_apart):
                reason = f"{core.mapped_bytes} bytes of a rank are more than the 16 GiB that fit"
        reasons = group.all_gather(reason)
        others = (f"rank {rank}: {why}" for rank, why in enumerate(reasons) if why)
        self.why_none = reason or next(others, "")
        if core is None or carrier is None or self.why_none:
            return
        try:
            self._registered = rows = GpuRows(core.rows_bytes, device)
            carrier.register_rows(rows.address, rows.nbytes, rows.device, rows.dmabuf)
        except (FanfoldError, RuntimeError) as failure:
            self.why_none = str(failure)
            if not carrier.holds_rows:
                self.close()

    def choose(self, carrier: _core.Carrier) -> None:
        """Takes the memory, if all ranks have registered some. The carrier has started."""
        if carrier.has_rows_apart:
            self.memory = self._registered
        elif self._registered is not None:
            self.why_none = self.why_none or "another rank could not register such memory"

    @property
    def nbytes(self) -> int:
        """Of the memory, or of what the network holds because only other ranks could not register
        theirs."""
        return 0 if self._registered is None else self._registered.nbytes

    def close(self) -> None:
        """Gives the memory back. The carrier has ended, or holds none. Harmless when repeated."""
        if self._registered is not None:
            self._registered.close()
            self._registered = None
