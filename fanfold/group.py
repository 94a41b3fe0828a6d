"""A group of ranks: its size, this rank's place, and small exchanges of Python objects.

Any ``torch.distributed`` group of any backend will do, an mpi4py communicator too, and no group at
all for a single rank. Only set-up goes through it; tokens never do.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch.distributed as dist

from fanfold.errors import ArgumentError, FanfoldError
from fanfold.representation import worded

__all__ = [
    "Group", "agree", "as_group", "in_one_process", "part_of", "process_group", "together",
]  # fmt: skip


class Group(Protocol):
    """What Fanfold needs of a group."""

    @property
    def rank(self) -> int:
        """This process's place, from 0."""

    @property
    def size(self) -> int:
        """Number of ranks."""

    def all_gather(self, value: Any) -> list[Any]:
        """The picklable ``value`` of every rank, in rank order. Collective."""


class _Alone:
    """A group of this process alone."""

    rank = 0
    size = 1

    def all_gather(self, value: Any) -> list[Any]:
        return [value]


class _TorchGroup:
    """A torch.distributed process group."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.process_group = group
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)

    def all_gather(self, value: Any) -> list[Any]:
        gathered: list[Any] = [None] * self.size
        dist.all_gather_object(gathered, value, group=self.process_group)
        return gathered


class _MpiGroup:
    """An mpi4py communicator."""

    def __init__(self, comm: Any) -> None:
        self._comm = comm
        self.rank = int(comm.Get_rank())
        self.size = int(comm.Get_size())

    def all_gather(self, value: Any) -> list[Any]:
        return list(self._comm.allgather(value))


class _Part:
    """Some ranks of a group."""

    def __init__(self, whole: Group, ranks: list[int]) -> None:
        self.whole, self.ranks = whole, ranks
        self.rank, self.size = ranks.index(whole.rank), len(ranks)
        self._own: _TorchGroup | None = None

    def all_gather(self, value: Any) -> list[Any]:
        if (own := self._torch_group()) is not None:
            return [value] if self.size == 1 else own.all_gather(value)
        gathered = self.whole.all_gather(value)
        return [gathered[rank] for rank in self.ranks]

    def process_group(self) -> dist.ProcessGroup | None:
        own = self._torch_group()
        return None if own is None else own.process_group

    def _torch_group(self) -> _TorchGroup | None:
        """Of these ranks alone, which make it at first use; None unless the whole is such a one."""
        whole = process_group(self.whole)
        if self._own is None and whole is not None:
            ranks = [dist.get_global_rank(whole, rank) for rank in self.ranks]
            self._own = _TorchGroup(dist.new_group(ranks, use_local_synchronization=True))
        return self._own


def part_of(group: Group, ranks: list[int]) -> Group:
    """The part of ``group`` that ``ranks``, ascending and this one among them, are.

    Its exchanges are those of its ranks alone only where ``group`` is one of torch.distributed.
    Elsewhere they are exchanges of the whole group, so every rank must be in some part and come to
    as many.
    """
    return _Part(group, ranks)


def process_group(group: Group) -> dist.ProcessGroup | None:
    """The torch.distributed group behind ``group``, if there is one."""
    inner = group.inner if isinstance(group, _Together) else group
    if isinstance(inner, _Part):
        return inner.process_group()
    return inner.process_group if isinstance(inner, _TorchGroup) else None


def in_one_process(group: Group) -> bool:
    """Whether all ranks are this process: one rank, or threads (:mod:`fanfold.thread_ranks`)."""
    inner = group.inner if isinstance(group, _Together) else group
    if isinstance(inner, _Part):
        return group.size == 1 or in_one_process(inner.whole)
    return group.size == 1 or getattr(inner, "one_process", False)


def as_group(group: Any = None, comm: Any = None) -> Group:
    """The group behind ``group`` (torch.distributed) or ``comm`` (mpi4py).

    With neither: the default torch.distributed group if there is one, else this process alone.

    Raises:
        ArgumentError: if ``group`` is nothing that can be used, or this process is not in it.
    """
    if comm is not None:
        return _MpiGroup(comm)
    if group is None:
        if not dist.is_initialized():
            return _Alone()
        group = dist.group.WORLD
    if isinstance(group, dist.ProcessGroup):
        if dist.get_rank(group) < 0:
            raise ArgumentError("group", "a group without this process", "one that contains it")
        return _TorchGroup(group)
    if all(hasattr(group, name) for name in ("rank", "size", "all_gather")):
        return group  # type: ignore[no-any-return]
    raise ArgumentError("group", worded(group), "a torch.distributed.ProcessGroup, or None")


def agree(group: Group, values: dict[str, object], error: Exception | None = None) -> None:
    """Returns only if no rank brings an ``error`` and all ranks bring the same ``values``.

    Collective. What one rank refuses is refused by all, so none is left waiting.

    Raises:
        Exception: this rank's own ``error``.
        FanfoldError: another rank's error, naming it.
        ArgumentError: for the first value that differs, naming both and their ranks.
    """
    gathered = group.all_gather((values, None if error is None else f"{error}"))
    if error is not None:
        raise _shared(error)
    for peer, (_, message) in enumerate(gathered):
        if message is not None:
            raise _shared(FanfoldError(f"rank {peer} failed: {message}"))
    for peer, (theirs, _) in enumerate(gathered):
        for name, value in values.items():
            if theirs.get(name) != value:
                raise _shared(
                    ArgumentError(
                        name,
                        f"{value!r} on rank {group.rank} and {theirs.get(name)!r} on rank {peer}",
                        "the same on all ranks",
                    )
                )


# ---- what all ranks do together -----------------------------------------------------------------


@dataclass(frozen=True)
class _Failure:
    """What a rank passes to a gather instead of a value when it has failed."""

    text: str


_E = TypeVar("_E", bound=Exception)


def _shared(error: _E) -> _E:
    """``error``, marked as one that all ranks know of."""
    error.__dict__["fanfold_shared"] = True
    return error


class _Together:
    """A group whose gathers find out that another rank has failed."""

    def __init__(self, inner: Group) -> None:
        self.inner = inner
        self.rank, self.size = inner.rank, inner.size

    def all_gather(self, value: Any) -> list[Any]:
        try:
            gathered = self.inner.all_gather(value)
        except Exception as failure:  # a rank did not come, which no further gather would change
            raise _shared(failure) from None
        for peer, theirs in enumerate(gathered):
            if isinstance(theirs, _Failure) and peer != self.rank:
                raise _shared(FanfoldError(f"rank {peer} failed: {theirs.text}"))
        return gathered


@contextlib.contextmanager
def together(group: Group) -> Iterator[Group]:
    """For something that all ranks must have done when any goes on, such as making an object.

    Within the block all exchanges go through the group that it is given. If the block raises on one
    rank, whatever that is, the others raise a FanfoldError that names the rank and its error, at
    their next exchange or at the block's end; none waits for the group's timeout. KeyboardInterrupt
    and the like are no such errors.

    Args:
        group: the ranks, all of which enter the block.
    """
    ranks = _Together(group)
    try:
        yield ranks
        ranks.all_gather(None)
    except Exception as error:
        if not error.__dict__.get("fanfold_shared", False):
            with contextlib.suppress(Exception):
                group.all_gather(_Failure(f"{type(error).__name__}: {error}"))
        raise
