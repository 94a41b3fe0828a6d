"""What a bench calls, whichever interface and order of rows it times."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from fanfold.bench.check import Expectation
from fanfold.bench.oracle import quantize_fp8
from fanfold.memory import PeerMemory
from fanfold.memory.cuda_hosts import CudaMemoryAcrossHosts

__all__ = [
    "Calls",
    "Given",
    "HighThroughputCalls",
    "LowLatencyCalls",
    "await_sent",
    "spoil",
    "wait_for",
]

_EVERY_BIT = 0xFF  # NaN in bfloat16, in e4m3 and in float32


@dataclass(frozen=True)
class Given:
    """What a dispatch is given; where the calls work.

    Attributes:
        x: ``[T, hidden]`` bfloat16, or fp8 values and their float32 scales.
        topk_idx: ``[T, K]`` int64.
        topk_weights: ``[T, K]`` float32.
    """

    x: torch.Tensor | tuple[torch.Tensor, torch.Tensor]
    topk_idx: torch.Tensor
    topk_weights: torch.Tensor

    @classmethod
    def of(cls, expectation: Expectation, device: torch.device, *, quantized: bool) -> Given:
        """This rank's batch on ``device``; ``quantized``: as fp8 rows, if they are to travel so."""
        own = expectation.own
        x: torch.Tensor | tuple[torch.Tensor, torch.Tensor] = own.x.to(device)
        if quantized and expectation.fp8:
            rows = quantize_fp8(own.x)
            x = (rows.values.to(device), rows.scales.to(device))
        return cls(x, own.topk_idx.to(device), own.topk_weights.to(device))


class Calls(Protocol):
    """The calls of one rank. What a dispatch returns only they look into, except for high
    throughput's ``tokens`` and ``scales``.

    Attributes:
        device: where tensors must be.
        memory_bytes: symmetric memory of this rank.
        network: what carries between hosts, such as ``"libfabric:tcp"``; "" on one host.
    """

    device: torch.device
    memory_bytes: int
    network: str

    def dispatch(self, given: Given, capacity: int | None = None) -> Any:
        """Sends ``given``, by a new routing."""

    def combine(
        self, y: torch.Tensor, brought: Any, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Brings ``y`` back, summed for each token; expert-major, weighted too. The sums are in
        ``out`` where the interface takes one."""

    def check(self, brought: Any, expectation: Expectation, capacity: int | None = None) -> None:
        """Raises CheckFailed unless a dispatch brought what it must."""

    def outputs(self, brought: Any, expectation: Expectation) -> torch.Tensor:
        """What the experts make of ``brought``."""

    def check_combined(self, out: torch.Tensor, expectation: Expectation) -> None:
        """Raises CheckFailed unless ``out``, in host memory, is the combine of these outputs."""

    def synchronize(self) -> None:
        """Waits for what is enqueued, and raises what it found wrong."""

    def metrics(self) -> dict[str, Any]:
        """Of what it calls, as :meth:`fanfold.LowLatency.metrics`."""

    def close(self) -> None:
        """Lets the memory go."""


class HighThroughputCalls(Calls, Protocol):
    """Those of high throughput, which can follow an earlier routing."""

    def dispatch_again(self, given: Given, previous: Any) -> Any:
        """Sends the rows of ``given`` by the routing of ``previous``."""


class LowLatencyCalls(Calls, Protocol):
    """Those of low latency, which come in halves too."""

    def send_dispatch(self, given: Given) -> Callable[[], None]:
        """The send half of a dispatch; the hook receives."""

    def send_combine(
        self, y: torch.Tensor, brought: Any, out: torch.Tensor | None = None
    ) -> Callable[[], None]:
        """The send half of a combine; the hook receives."""

    def await_sent(self) -> None:
        """Waits until peers on other hosts have what calls that have ended have sent."""


def wait_for(device: torch.device) -> None:
    """Waits for what the current stream of a GPU was given."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


def await_sent(*memories: PeerMemory) -> None:
    """Waits until peers on other hosts have what kernels have sent them; there are no others in
    flight."""
    for memory in memories:
        if isinstance(memory, CudaMemoryAcrossHosts):
            memory.between.fence()


def spoil(brought: Any) -> None:
    """Sets every bit of the rows and scales that a dispatch brought. The next one is likely to get
    the same memory (in place it does), and then shows what it has not written."""
    for tensor in (brought.tokens, brought.scales):
        if tensor is not None:
            tensor.view(torch.uint8).fill_(_EVERY_BIT)
