"""The fused MoE layer beside the same layer call by call: checked against the reference, then
timed."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from fanfold.bench.check import CheckFailed, same_bits
from fanfold.bench.cuda_run import device_properties
from fanfold.bench.cuda_timing import GpuBarrier, empty_kernel
from fanfold.bench.fused_moe_rivals import NotTimed, TorchGemms, TorchWeights, Unfused
from fanfold.bench.fused_moe_timing import Call, Clock, GpuClock, HostClock, Spans, in_turns
from fanfold.bench.nvml import open_nvml
from fanfold.bench.settings import BACKENDS, check_bounds, check_choices
from fanfold.bench.workload import ROUTINGS, Batch, Workload
from fanfold.config import Backend, Config, Overrides
from fanfold.errors import ArgumentError
from fanfold.formats import quantize
from fanfold.fused_moe import ExpertWeights, FusedMoE, FusedMoeTuning, difference, reference
from fanfold.fused_moe.cuda import CudaLayer
from fanfold.fused_moe.weights import check_columns
from fanfold.geometry import MAX_HIDDEN, MAX_TOKENS, Geometry
from fanfold.group import agree, as_group
from fanfold.grouped_gemm import MOST_DEPTH
from fanfold.high_throughput import HighThroughput
from fanfold.launch import MAX_RANKS, launch

__all__ = [
    "MOST_DIFFERENCE",
    "FusedMoeSettings",
    "RankPoint",
    "bench_ranks",
    "check_ranks",
    "expert_weights",
    "sweep",
]

MOST_DIFFERENCE = 1e-3
"""Of the layers' results from the reference."""
MOST_TORCH_DIFFERENCE = 1e-2
"""Of PyTorch's products, whose scales are coarser."""

_ALIGNMENT = 128
_MOST_INTERMEDIATE = 1 << 20
_MOST_PAUSE_MS = 10_000
_SAMPLED_TOKENS = 32
_LOADS = 5  # calls during which clock and power are sampled
_LONGEST_S = 7200.0
_SEED_STRIDE = 1_000_003

# The library's argument names, as the command line calls them.
_OPTIONS = {"num_experts": "experts", "max_tokens": "tokens"}


@dataclass(frozen=True)
class FusedMoeSettings:
    """Every argument of ``fanfold bench fused-moe``.

    Attributes:
        tokens: of each rank; each number is measured by itself.
        ranks: size of the group.
        hidden, intermediate, top_k, experts: the geometry; experts of all ranks.
        backend: one of ``settings.BACKENDS``.
        distribution: which experts tokens choose, one of ``workload.ROUTINGS``.
        seed: of tokens, routing and weights.
        iterations: timed calls of each contender.
        warmup: calls before them.
        pause_ms: milliseconds before each call.
        fast_accumulation: whether the tensor cores keep sums; None for the setting.
        baseline: time the unfused layer and PyTorch's grouped products, too.
        tuning: of the layer; None for the settings.
    """

    tokens: Sequence[int] = (8, 64, 512)
    ranks: int = 1
    hidden: int = 1024
    intermediate: int = 512
    top_k: int = 8
    experts: int = 64
    backend: Backend = "auto"
    distribution: str = "uniform"
    seed: int = 0
    iterations: int = 15
    warmup: int = 3
    pause_ms: float = 10.0
    fast_accumulation: bool | None = None
    baseline: bool = True
    tuning: FusedMoeTuning | None = None

    def __post_init__(self) -> None:
        """Raises ArgumentError for the first argument that is out of its bound."""
        check_choices(self, (("backend", BACKENDS), ("distribution", ROUTINGS)))
        check_bounds(
            self,
            (
                ("ranks", 1, MAX_RANKS),
                ("iterations", 1, 1_000_000),
                ("warmup", 0, 1_000_000),
                ("seed", 0, 2**40),
                ("pause_ms", 0, _MOST_PAUSE_MS),
            ),
        )
        if not self.tokens:
            raise ArgumentError("tokens", "empty", "at least one number")
        check_columns("hidden", self.hidden, MAX_HIDDEN)
        check_columns("intermediate", self.intermediate, _MOST_INTERMEDIATE)
        try:
            Geometry(self.ranks, self.experts, self.top_k, self.hidden, max(self.tokens))
        except ArgumentError as error:
            name = _OPTIONS.get(error.argument, error.argument)
            raise ArgumentError(name, error.value, error.bound) from None
        most = MAX_TOKENS // self.top_k
        for tokens in self.tokens:
            if not 1 <= tokens <= most:
                raise ArgumentError("tokens", tokens, f"from 1 to {most}")
            self.workload(tokens)
        for name in ("hidden", "intermediate"):
            if self.baseline and getattr(self, name) > MOST_DEPTH:
                bound = f"at most {MOST_DEPTH} for the unfused layer; leave it out: --no-baseline"
                raise ArgumentError(name, getattr(self, name), bound)

    def workload(self, tokens: int) -> Workload:
        """The input with so many tokens."""
        return Workload(
            ranks=self.ranks,
            tokens=tokens,
            hidden=self.hidden,
            top_k=self.top_k,
            experts=self.experts,
            routing=self.distribution,
            seed=self.seed,
        )

    def config(self) -> Config:
        """The settings of the library, those of the environment where nothing is asked for."""
        asked: Overrides = {"backend": self.backend}
        if self.fast_accumulation is not None:
            asked["fast_accumulation"] = self.fast_accumulation
        if self.tuning is not None:
            asked["swap_ab_rows"] = self.tuning.swap_ab_rows
            asked["group_rows"] = self.tuning.group_rows
        return Config.resolve(**asked)


@dataclass(frozen=True)
class RankPoint:
    """What one rank found with one number of tokens.

    Attributes:
        tokens: of each rank.
        slots: that this rank's experts multiply.
        experts_hit: of this rank's experts those that get a slot.
        differences: from the reference of ``"fused"`` and ``"unfused"``, and of PyTorch's products
            from Fanfold's, ``"torch_gemms"``.
        microseconds: for each contender ``[iterations]``: between the events around a call, on the
            CPU wall time.
        backend: where the layer ran.
        fast_accumulation: whether the tensor cores kept sums.
        tuning: when the kernel changed its form; on GPUs only.
        torch_gemms: of ``fused_moe_rivals.KINDS`` what PyTorch multiplied, or why it did not; None
            without the baseline.
        spans: of the fused kernel in the timed calls; on GPUs only.
        watts: samples of the power, None without NVML; on GPUs only.
        late_share: see :class:`fanfold.bench.fused_moe_timing.GpuClock`.
        device: of a GPU its properties.
    """

    tokens: int
    slots: int
    experts_hit: int
    differences: dict[str, float]
    microseconds: dict[str, torch.Tensor]
    backend: str
    fast_accumulation: bool
    tuning: FusedMoeTuning | None = None
    torch_gemms: str | NotTimed | None = None
    spans: Spans | None = None
    watts: list[float | None] = field(default_factory=list)
    late_share: float = 0.0
    device: dict[str, Any] | None = None


def expert_weights(
    settings: FusedMoeSettings, experts: Sequence[int], device: torch.device
) -> ExpertWeights:
    """Random weights of ``experts``, each from a seed of its own. They are quantised expert by
    expert, so that memory holds the unquantised weights of one at a time."""
    h, i, count = settings.hidden, settings.intermediate, len(experts)
    shapes = ((count, 2 * i, h), (count, h, i))
    l1, l2 = (torch.empty(s, dtype=torch.float8_e4m3fn, device=device) for s in shapes)
    l1_scales, l2_scales = (
        torch.empty((e, rows // 128, columns // 128), dtype=torch.float32, device=device)
        for e, rows, columns in shapes
    )
    for place, expert in enumerate(experts):
        generator = torch.Generator(device).manual_seed(settings.seed * _SEED_STRIDE + expert)
        gate_up, down = (
            torch.randn((1, *s[1:]), generator=generator, dtype=torch.float32, device=device)
            / s[2] ** 0.5
            for s in shapes
        )
        one = ExpertWeights.quantize(gate_up, down)
        l1[place], l1_scales[place] = one.l1[0], one.l1_scales[0]
        l2[place], l2_scales[place] = one.l2[0], one.l2_scales[0]
    return ExpertWeights(l1, l1_scales, l2, l2_scales)


def sweep(settings: FusedMoeSettings, group: Any = None) -> list[list[RankPoint]] | None:
    """Runs ``settings`` in this process if there is one rank, else on fresh ranks of this host or
    on the ranks of ``group``.

    Returns:
        For each number of tokens what each rank found; None on every rank but rank 0 of a joined
        group.

    Raises:
        CheckFailed: a result differs too much from the reference.
        LaunchError: a started rank failed.
        UnavailableError: ``settings.backend`` is ``"cuda"``, and the kernel does not serve this.
    """
    if group is not None:
        of_ranks = as_group(group).all_gather(bench_ranks(group, settings))
        if dist.get_rank(group) != 0:
            return None
    elif settings.ranks == 1:
        of_ranks = [bench_ranks(None, settings)]
    else:
        of_ranks = launch(bench_ranks, settings.ranks, (settings,), timeout_s=_LONGEST_S)
    return [list(points) for points in zip(*of_ranks, strict=True)]


def check_ranks(settings: FusedMoeSettings, group: Any) -> None:
    """Raises ArgumentError unless a joined group has as many ranks as the settings ask for."""
    if group is not None and dist.get_world_size(group) != settings.ranks:
        started = f"{dist.get_world_size(group)}, the ranks that were started"
        raise ArgumentError("ranks", settings.ranks, started)


def bench_ranks(group: Any, settings: FusedMoeSettings) -> list[RankPoint]:
    """One rank's part: a point for each number of tokens. Collective."""
    config, ranks = settings.config(), as_group(group)
    sizes: dict[str, Any] = {
        "num_experts": settings.experts,
        "top_k": settings.top_k,
        "hidden": settings.hidden,
        "max_tokens": max(settings.tokens),
    }
    with FusedMoE(group, **sizes, intermediate=settings.intermediate, config=config) as moe:
        share = moe.experts_per_rank
        first = ranks.rank * share
        weights = expert_weights(settings, range(first, first + share), moe.device)
        clock = _clock(group, moe.device, settings.pause_ms / 1000)
        with _rivals(group, moe, weights, settings, sizes) as rivals:
            layer = _Layer(moe, weights, rivals, settings)
            return [_measure(layer, clock, ranks, tokens) for tokens in settings.tokens]


def _clock(group: Any, device: torch.device, pause_s: float) -> Clock:
    ranks = as_group(group)

    def meet() -> None:
        ranks.all_gather(None)

    if device.type == "cpu":
        return HostClock(meet, pause_s)
    barrier = empty_kernel if ranks.size == 1 else GpuBarrier(group, device)
    return GpuClock(barrier, meet, device, pause_s)


@dataclass(frozen=True)
class _Rivals:
    """What the unfused layer needs of all numbers of tokens."""

    dispatcher: HighThroughput
    torch_weights: TorchWeights | NotTimed


@contextmanager
def _rivals(
    group: Any,
    moe: FusedMoE,
    weights: ExpertWeights,
    settings: FusedMoeSettings,
    sizes: dict[str, Any],
) -> Iterator[_Rivals | None]:
    if not settings.baseline:
        yield None
        return
    config = dataclasses.replace(moe.config, backend=moe.backend)
    fast = moe.config.fast_accumulation
    dispatcher = HighThroughput(
        group, **sizes, dispatch_dtype="fp8", expert_alignment=_ALIGNMENT, config=config
    )
    with closing(dispatcher):
        yield _Rivals(dispatcher, TorchWeights.of(weights, fast=fast))


@dataclass(frozen=True)
class _Layer:
    """One rank's layer with all it is compared with."""

    moe: FusedMoE
    weights: ExpertWeights
    rivals: _Rivals | None
    settings: FusedMoeSettings

    def spans(self) -> torch.Tensor | None:
        """Where the kernel writes its spans; None on the CPU."""
        layer = self.moe._layer
        return layer.spans() if isinstance(layer, CudaLayer) else None


def _measure(layer: _Layer, clock: Clock, ranks: Any, tokens: int) -> RankPoint:
    """Checks, then times, one number of tokens. Collective."""
    settings, moe = layer.settings, layer.moe
    batch = settings.workload(tokens).batch(ranks.rank)
    received = _received(ranks.all_gather(batch.topk_idx), layer, ranks.rank)
    work = _Work(layer, batch)
    differences: dict[str, float] = {}
    error: Exception | None = None
    try:
        differences = work.check()
    except CheckFailed as failure:
        error = failure
    agree(ranks, {}, error)
    times = in_turns(
        clock,
        work.contenders(),
        warmup=settings.warmup,
        iterations=settings.iterations,
        after=work.after,
    )
    watts: list[float | None] = []
    if moe.device.type == "cuda":
        nvml = open_nvml(moe.device)
        for _ in range(_LOADS):
            clock.time(work.fused, lambda: watts.append(nvml.watts()))
    work.check_last()
    kind = None if layer.rivals is None else layer.rivals.torch_weights
    return RankPoint(
        tokens=tokens,
        slots=int(received.sum()),
        experts_hit=int((received > 0).sum()),
        differences=differences,
        microseconds=times,
        backend=moe.backend,
        fast_accumulation=moe.config.fast_accumulation,
        tuning=moe.tuning,
        torch_gemms=kind.kind if isinstance(kind, TorchWeights) else kind,
        spans=work.spans(),
        watts=watts,
        late_share=getattr(clock, "late_share", 0.0),
        device=device_properties(moe.device) if moe.device.type == "cuda" else None,
    )


def _received(topk_idx: Sequence[torch.Tensor], layer: _Layer, rank: int) -> torch.Tensor:
    """How many slots each expert of ``rank`` gets."""
    chosen = torch.cat([each.flatten() for each in topk_idx])
    counts = chosen[chosen >= 0].bincount(minlength=layer.settings.experts)
    share = layer.moe.experts_per_rank
    return counts[rank * share : (rank + 1) * share]


class _Work:
    """What is timed: one rank's layer over one batch.

    Args:
        layer: with its rivals.
        batch: of this rank, on the CPU.
    """

    def __init__(self, layer: _Layer, batch: Batch) -> None:
        self._layer, device = layer, layer.moe.device
        self._tokens = quantize(batch.x.to(device))
        self._routing = (batch.topk_idx.to(device), batch.topk_weights.to(device))
        self._out = torch.full(batch.x.shape, torch.nan, dtype=torch.bfloat16, device=device)
        self._written = layer.spans()
        self._kept: list[torch.Tensor] = []
        self._unfused: Unfused | None = None
        self._torch_gemms: TorchGemms | None = None
        if layer.rivals is not None:
            self._open_rivals(layer.rivals)

    def _open_rivals(self, rivals: _Rivals) -> None:
        fast = self._layer.moe.config.fast_accumulation
        self._unfused = Unfused(
            rivals.dispatcher, self._layer.weights, self._tokens, self._routing, fast=fast
        )
        if isinstance(rivals.torch_weights, TorchWeights):
            self._torch_gemms = TorchGemms(rivals.torch_weights, self._unfused)

    def fused(self) -> torch.Tensor:
        """One call of the fused layer."""
        return self._layer.moe.forward(
            self._tokens, *self._routing, self._layer.weights, out=self._out
        )

    def contenders(self) -> dict[str, Call]:
        """All that is timed, by name."""
        calls: dict[str, Call] = {"fused": self.fused}
        if self._unfused is not None:
            calls |= {"unfused": self._unfused.layer, "unfused_gemms": self._unfused.gemms}
        if self._torch_gemms is not None:
            calls["torch_gemms"] = self._torch_gemms
        return calls

    def after(self, name: str, kept: bool) -> None:
        """Takes what the kernel has written in a call, and clears it: a CTA without a tile of a
        GEMM leaves its time as it is."""
        if name != "fused" or self._written is None:
            return
        if kept:
            self._kept.append(self._written.cpu())
        self._written.zero_()

    def spans(self) -> Spans | None:
        """Of all kept calls."""
        return Spans.of(torch.stack(self._kept)) if self._kept else None

    def check(self) -> dict[str, float]:
        """The differences of all contenders. Collective.

        Raises:
            CheckFailed: one is too large.
        """
        results: dict[str, Callable[[], torch.Tensor]] = {"fused": self.fused}
        if self._unfused is not None:
            results["unfused"] = self._unfused.layer
        places = _sample(self._out.shape[0], self._out.device)
        some = {name: call()[places].clone() for name, call in results.items()}
        self._first = self._out.clone()
        wanted = self._reference(places)
        found = {name: difference(result, wanted) for name, result in some.items()}
        if self._torch_gemms is not None:
            found["torch_gemms"] = self._torch_gemms.difference()
        if self._written is not None:
            self._written.zero_()
        for name, value in found.items():
            most = MOST_TORCH_DIFFERENCE if name == "torch_gemms" else MOST_DIFFERENCE
            if not value <= most:  # NaN, too
                raise CheckFailed(
                    f"{name} with {self._out.shape[0]} tokens: the difference from the reference "
                    f"is {value:.3g}, but must be at most {most:g}"
                )
        return found

    def check_last(self) -> None:
        """Raises CheckFailed unless the last call gave the bits of the checked one."""
        same_bits("the fused result of the last timed call", self._out, self._first)

    def _reference(self, places: torch.Tensor) -> torch.Tensor:
        """The exact result of some tokens, with weights that are made for it again."""
        topk_idx, topk_weights = (each[places] for each in self._routing)
        experts = topk_idx[topk_idx >= 0].unique()
        weights = expert_weights(self._layer.settings, experts.tolist(), self._out.device)
        numbered = torch.searchsorted(experts, topk_idx).masked_fill(topk_idx < 0, -1)
        values, scales = self._tokens
        chosen = (values.view(torch.uint8)[places].view(values.dtype), scales[places])
        return reference(chosen, numbered, topk_weights, weights)


def _sample(tokens: int, device: torch.device) -> torch.Tensor:
    """Some tokens, the first and the last among them."""
    count = min(tokens, _SAMPLED_TOKENS)
    spread = torch.linspace(0, tokens - 1, count, dtype=torch.float64, device="cpu")
    return spread.round().long().to(device)
