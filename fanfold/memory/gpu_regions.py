"""What the regions of the GPUs of one host have in common, however they are made."""

from __future__ import annotations

import weakref
from types import TracebackType
from typing import TYPE_CHECKING, TypeVar

import torch

from fanfold.deferred_free import drain_deferred_frees, free_when_idle
from fanfold.errors import UsageError
from fanfold.forks import Owner
from fanfold.group import Group
from fanfold.representation import described

if TYPE_CHECKING:
    from fanfold.memory import BetweenHosts

__all__ = ["GpuRegions"]

_Own = TypeVar("_Own", bound="GpuRegions")


class GpuRegions:
    """The :class:`fanfold.memory.GpuPeerMemory` of the ranks' current CUDA devices, without its
    making: a subclass sets ``_tensor`` and ``_bases``, and then calls :meth:`_keep`.

    Args:
        group: the ranks.
        bytes_per_rank: size of each region.

    Attributes:
        device: of the own region.
        rank, ranks, group: as given.
        bytes_per_rank: as given.
    """

    between: BetweenHosts | None = None

    def __init__(self, group: Group, bytes_per_rank: int) -> None:
        self._what = f"this {type(self).__name__}"
        self._owner = Owner(self._what)
        self.group = group
        self.rank, self.ranks = group.rank, group.size
        self.bytes_per_rank = bytes_per_rank
        self.device = torch.device("cuda", torch.cuda.current_device())
        self._tensor: torch.Tensor | None = None
        self._bases: list[int] = []
        drain_deferred_frees()

    def _keep(self, memory: object) -> None:
        """Keeps ``memory`` until this object is closed or gone and the device is idle: kernels in
        flight may outlive it, and write there."""
        self._end = weakref.finalize(self, free_when_idle, self.device, memory)
        self._end.atexit = False

    @property
    def usable_bytes(self) -> int:
        """All of it."""
        return self.bytes_per_rank

    @property
    def tensor(self) -> torch.Tensor:
        """The own region: ``[bytes_per_rank]`` uint8.

        Raises:
            UsageError: closed, or in a forked child.
        """
        if self._tensor is None:
            raise UsageError(f"{self._what} is closed")
        self._owner.check()
        return self._tensor

    def base(self, peer: int) -> int:
        """Address in this process of ``peer``'s region; with the own rank, that of the own.

        Raises:
            UsageError: closed, or in a forked child.
        """
        if self._tensor is None:
            raise UsageError(f"{self._what} is closed")
        self._owner.check()
        return self._bases[peer]

    def close(self) -> None:
        """Lets go of all regions once this device is idle. Not collective; harmless when repeated.

        What a peer has mapped stays as long as it keeps it, so a late write of its kernels hits
        memory that nobody reads.
        """
        if self._tensor is None:
            return
        self._tensor = None
        self._bases = []
        self._end()

    def __repr__(self) -> str:
        state = "closed" if getattr(self, "_tensor", 0) is None else ""
        names = ("rank", "ranks", "bytes_per_rank", "device")
        return described(self, state, **{name: name for name in names})

    def __enter__(self: _Own) -> _Own:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
