"""What a Buffer's high-throughput calls need of a backend: the host, to which tensors of other
devices are staged (:mod:`fanfold.deep_ep.staged_backend`), or the GPUs
(:mod:`fanfold.deep_ep.cuda_backend`)."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import torch

from fanfold.backends.high_throughput import Dispatched
from fanfold.backends.high_throughput.plan import CudaDispatched, CudaPlan
from fanfold.backends.staging import Staging
from fanfold.deep_ep.handles import GpuHandle, Handle
from fanfold.deep_ep.routes import Bias, Route, Rows
from fanfold.deep_ep.runtime import Runtime
from fanfold.deep_ep.streams import HostStreams, Streams
from fanfold.representation import show_fields

__all__ = ["CallsBackend", "Counts", "ReceivedTensors", "gather_counts", "received_rows"]


@dataclass(frozen=True)
class ReceivedTensors:
    """The tensors that a dispatch returns, before they have DeepEP's order.

    Attributes:
        rows: in order of source rank and token.
        topk_idx, topk_weights: None where the receivers need not know.
        named: rows for each local expert, as often as named; [] where the CPU does not know.
        handle: None if the caller passed one.
        plan: of a new routing on GPUs; its tensors are used on both streams.
    """

    rows: Rows
    topk_idx: torch.Tensor | None = None
    topk_weights: torch.Tensor | None = None
    named: list[int] = dataclasses.field(default_factory=list)
    handle: Handle | GpuHandle | None = None
    plan: CudaPlan | None = None

    __repr__ = show_fields

    def back(self, staging: Staging) -> ReceivedTensors:
        """The same with its tensors where the caller's are."""
        return dataclasses.replace(
            self,
            rows=staging.back(self.rows),
            topk_idx=staging.back(self.topk_idx),
            topk_weights=staging.back(self.topk_weights),
            handle=staging.back(self.handle),
        )


def received_rows(dispatched: Dispatched | CudaDispatched) -> Rows:
    """The rows as DeepEP has them: with their scales, if there are any."""
    if dispatched.scales is None:
        return dispatched.tokens
    return dispatched.tokens, dispatched.scales


class _Validated(Protocol):
    """What is checked of a caller's handle.

    Attributes:
        rows: of the received tensors.
        top_k: slots of which weights may come back; None for any number of them.
    """

    @property
    def rows(self) -> int: ...

    @property
    def top_k(self) -> int | None: ...


ValidatedHandle = TypeVar("ValidatedHandle", bound=_Validated)


class CallsBackend(ABC, Generic[ValidatedHandle]):
    """Carries out a Buffer's high-throughput calls.

    Args:
        runtime: of the Buffer.

    Attributes:
        device: where the backend works.
        looks: whether the CPU may read tensors there.
        streams: that the calls run on.
    """

    device: torch.device
    looks: bool
    streams: Streams | HostStreams

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime

    @abstractmethod
    def refuse_dispatch(self, error: BaseException, handle: object) -> None:
        """Aborts this dispatch on all ranks; with the caller's handle, if it has one."""

    @abstractmethod
    def refuse_combine(self, error: BaseException, handle: object) -> None:
        """Aborts this combine on all ranks."""

    @abstractmethod
    def staging(self, **tensors: object) -> Staging:
        """Stages a call's tensors, by name, to :attr:`device` and back.

        Raises:
            ArgumentError: they are where they cannot be taken from.
        """

    @abstractmethod
    def validate_handle(self, handle: object, channels: int) -> ValidatedHandle:
        """Checks the caller's handle.

        Raises:
            ArgumentError: it is none, one of another group, or one of other channels.
        """

    @abstractmethod
    def send(self, x: Rows, route: Route, num_worst_tokens: int, channels: int) -> ReceivedTensors:
        """A dispatch with a new routing."""

    @abstractmethod
    def send_again(self, x: Rows, handle: ValidatedHandle) -> Rows:
        """A dispatch with a handle's routing."""

    @abstractmethod
    def combine(
        self, y: torch.Tensor, handle: ValidatedHandle, weights: torch.Tensor | None, bias: Bias
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The sums, and those of the weights for each top-k slot."""


@dataclass(frozen=True)
class Counts:
    """What ranks tell each other about a new routing, on the CPU.

    Attributes:
        num_tokens: ``[R]`` int32: of each rank.
        rank_prefix: ``[R, R]`` int32: rows that ranks 0 to i send to rank j.
        named: rows for each expert of this rank, as often as named.
    """

    num_tokens: torch.Tensor
    rank_prefix: torch.Tensor
    named: list[int]

    __repr__ = show_fields


def gather_counts(
    runtime: Runtime,
    tokens: int,
    numbers: torch.Tensor,
    channels: int,
    error: BaseException | None = None,
) -> Counts:
    """Exchanges them. Collective.

    Args:
        runtime: of the Buffer.
        tokens: of this rank.
        numbers: ``[R + E]`` int32 on the CPU: tokens for each rank, then for each expert.
        channels: of the call.
        error: why this rank refuses, if it does.

    Raises:
        BaseException: ``error``.
        ArgumentError, PeerRefused, PeerTimeout: the ranks disagree, another refuses, or is late.
    """
    ranks = runtime.ranks
    experts = len(numbers) - ranks
    signature = {"config.num_sms": 2 * channels, "num_experts": experts}
    own = torch.cat([torch.tensor([tokens], dtype=torch.int32, device="cpu"), numbers])
    gathered = runtime.exchange.gather("dispatch", signature, own, error)
    runtime.check_complete("exchange of handles")
    num_tokens, per_rank, per_expert = gathered.split([1, ranks, experts], dim=1)
    local = experts // ranks
    named = per_expert[:, runtime.rank * local : (runtime.rank + 1) * local].sum(0)
    prefix = per_rank.cumsum(0, dtype=torch.int32)
    return Counts(num_tokens.flatten(), prefix, named.tolist())
