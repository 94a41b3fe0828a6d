"""What one bench is asked to do, checked before a rank is started."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fanfold.bench.workload import Workload
from fanfold.errors import ArgumentError, UnavailableError
from fanfold.formats import RowFormat
from fanfold.geometry import Geometry, check_hidden
from fanfold.launch import MAX_RANKS

__all__ = ["BACKENDS", "DTYPES", "MODES", "BenchSettings"]

MODES = ("low_latency", "high_throughput")
DTYPES = ("bf16", "fp8")
BACKENDS = ("auto", "host", "cuda")

# The library's argument names, as the command line calls them.
_OPTIONS = {"num_experts": "experts", "max_tokens": "tokens"}


@dataclass(frozen=True)
class BenchSettings:
    """Every argument of ``fanfold bench``.

    Attributes:
        mode: one of :data:`MODES`.
        ranks: size of the group.
        tokens: of each rank.
        hidden: columns of a row.
        top_k: experts per token.
        experts: of all ranks.
        dtype: how rows travel to the experts, one of :data:`DTYPES`.
        backend: one of :data:`BACKENDS`.
        routing: one of ``workload.ROUTINGS``.
        seed: of tokens and routing.
        iterations: timed rounds.
        warmup: rounds before them.
        check: compare with the oracle first.
        baseline: time the rival too.
        calls: calls that one CUDA graph holds.
        overlap: time a matrix product beside a waiting hook; on GPUs only.
    """

    mode: str
    ranks: int = 4
    tokens: int = 128
    hidden: int = 1024
    top_k: int = 8
    experts: int = 64
    dtype: str = "bf16"
    backend: str = "auto"
    routing: str = "uniform"
    seed: int = 0
    iterations: int = 100
    warmup: int = 10
    check: bool = True
    baseline: bool = False
    calls: int = 20
    overlap: bool = False

    def __post_init__(self) -> None:
        """Checks everything that can be checked without a group.

        Raises:
            ArgumentError: the first argument that is out of its bound.
            UnavailableError: a backend that this mode does not have.
        """
        for name, known in (("mode", MODES), ("dtype", DTYPES), ("backend", BACKENDS)):
            if getattr(self, name) not in known:
                raise ArgumentError(name, repr(getattr(self, name)), f"one of {', '.join(known)}")
        if self.backend == "cuda" and self.mode != "low_latency":
            raise UnavailableError(
                f"backend is cuda, but {self.mode.replace('_', ' ')} has only the host backend in "
                "this version of Fanfold: use --backend host, or auto"
            )
        if self.overlap and (self.backend == "host" or self.mode != "low_latency"):
            raise UnavailableError(
                "overlap is timed on GPUs, in low latency: use --backend cuda, or leave it out"
            )
        for name, low, high in (
            ("ranks", 1, MAX_RANKS),
            ("iterations", 1, 10_000_000),
            ("warmup", 0, 10_000_000),
            ("seed", 0, 2**40),
            ("calls", 1, 1000),
        ):
            if not low <= getattr(self, name) <= high:
                raise ArgumentError(name, getattr(self, name), f"from {low} to {high}")
        try:
            Geometry(self.ranks, self.experts, self.top_k, self.hidden, self.tokens)
            check_hidden(self.hidden, RowFormat.of(self.dtype).dtype.itemsize)
        except ArgumentError as error:
            name = _OPTIONS.get(error.argument, error.argument)
            raise ArgumentError(name, error.value, error.bound) from None
        self.workload()

    def backend_here(self) -> str:
        """The backend that ``auto`` means on this machine, or the one asked for.

        Raises:
            UnavailableError: ``cuda``, or ``overlap``, with fewer GPUs than ranks.
        """
        if self.backend == "host" or self.mode != "low_latency":
            return "host"
        gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if gpus >= self.ranks:
            return "cuda"
        if self.backend == "auto" and not self.overlap:
            return "host"
        asked = "overlap is asked for" if self.backend == "auto" else "backend is cuda"
        raise UnavailableError(
            f"{asked} with {self.ranks} ranks, each on a GPU of its own, but PyTorch sees {gpus} "
            "here: lower --ranks, check CUDA_VISIBLE_DEVICES, or use --backend host"
        )

    def workload(self) -> Workload:
        """The input it runs on."""
        return Workload(
            ranks=self.ranks,
            tokens=self.tokens,
            hidden=self.hidden,
            top_k=self.top_k,
            experts=self.experts,
            routing=self.routing,
            seed=self.seed,
        )
