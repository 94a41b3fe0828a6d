"""Results of ``fanfold bench fused-moe``: tables, notes and JSON lines (docs/bench.md)."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from rich.table import Table

from fanfold.bench.fused_moe import FusedMoeSettings, RankPoint
from fanfold.bench.fused_moe_rivals import KINDS, NotTimed
from fanfold.bench.fused_moe_timing import PHASES, Spread
from fanfold.bench.report import origin

__all__ = [
    "BENCH",
    "TIMELINE",
    "FusedMoePoint",
    "notes",
    "phases_table",
    "record",
    "table",
    "timeline_lines",
]

SCHEMA = 1
BENCH = "fused_moe"
TIMELINE = "fused_moe_timeline"
"""The field ``bench`` of the lines of ``--timeline``."""

_MATRICES = 3  # gate, up and down
_FLOPS = 2  # a product and a sum
_SCALE_BYTES = 4
_BLOCK = 128


@dataclass(frozen=True)
class _Limits:
    """What a GPU can do at most, as measured."""

    bytes_per_s: float
    flops: float


# An H200 reads 2.82 GB by bulk copies at 4.52 TB/s, and multiplies dense FP8 matrices of 8192^3 at
# 1225 TFLOP/s under its power cap of 700 W. The share is printed only for GPUs that stand here.
_LIMITS = {"NVIDIA H200": _Limits(4.52e12, 1225e12)}


@dataclass(frozen=True)
class FusedMoePoint:
    """What all ranks found with one number of tokens."""

    settings: FusedMoeSettings
    ranks: list[RankPoint]

    @property
    def on_gpu(self) -> bool:
        """Whether the layer was one kernel."""
        return self.ranks[0].spans is not None

    @cached_property
    def total_us(self) -> Spread:
        """From the beginning of the first CTA to the end of the last, on the CPU wall time; of the
        slowest rank of each call."""
        if not self.on_gpu:
            return self.times_us("fused")
        return _slowest([r.spans.total_us() for r in self.ranks if r.spans is not None])

    def times_us(self, name: str) -> Spread:
        """Of one contender between the events around a call, on the CPU wall time; of the slowest
        rank of each call."""
        return _slowest([rank.microseconds[name] for rank in self.ranks])

    def has(self, name: str) -> bool:
        """Whether a contender was timed."""
        return name in self.ranks[0].microseconds

    @property
    def flops(self) -> float:
        """Of one rank, a mean over ranks."""
        slots = statistics.mean(rank.slots for rank in self.ranks)
        return _FLOPS * _MATRICES * slots * self.settings.hidden * self.settings.intermediate

    @property
    def tflops(self) -> float:
        """TFLOP/s of one rank in :attr:`total_us`."""
        return self.flops / self.total_us.median / 1e6

    @property
    def experts_hit(self) -> int:
        """Experts that get a slot, of the rank that has the most of them."""
        return max(rank.experts_hit for rank in self.ranks)

    @property
    def weight_bytes(self) -> int:
        """Of the weights and scales of the experts hit."""
        weights = _MATRICES * self.settings.hidden * self.settings.intermediate
        return self.experts_hit * (weights + weights // _BLOCK**2 * _SCALE_BYTES)

    @property
    def weight_gbps(self) -> float:
        """GB/s at which the weights of the experts hit are read in :attr:`total_us`."""
        return self.weight_bytes / self.total_us.median / 1e3

    @property
    def roof_us(self) -> float | None:
        """The least time that the layer can take on this GPU: the longer of moving the bytes and of
        the products. None where its limits are not known.

        A slot's row and its activations are written and read once in e4m3, its result once in
        bfloat16.
        """
        limits = _LIMITS.get((self.ranks[0].device or {}).get("name", ""))
        if limits is None:
            return None
        slots = statistics.mean(rank.slots for rank in self.ranks)
        moved = slots * (6 * self.settings.hidden + 2 * self.settings.intermediate)
        seconds = max((self.weight_bytes + moved) / limits.bytes_per_s, self.flops / limits.flops)
        return seconds * 1e6

    @property
    def roof_share(self) -> float | None:
        """:attr:`roof_us` over :attr:`total_us`: 1 is as fast as can be."""
        return None if self.roof_us is None else self.roof_us / self.total_us.median

    @property
    def ratio(self) -> float | None:
        """How many times as long the unfused layer takes, both between events."""
        if not self.has("unfused"):
            return None
        return self.times_us("unfused").median / self.times_us("fused").median

    def difference(self, name: str) -> float:
        """The largest of the ranks."""
        return max(rank.differences[name] for rank in self.ranks)

    @property
    def phases(self) -> dict[str, dict[str, float] | None]:
        """Of rank 0: when the first and when the last CTA had ended each phase."""
        spans = self.ranks[0].spans
        if spans is None:
            return {}
        found = {phase: spans.phase_us(phase) for phase in PHASES}
        return {
            phase: None if both is None else {"least_us": both[0], "most_us": both[1]}
            for phase, both in found.items()
        }

    @property
    def clock_mhz(self) -> Spread | None:
        """Of the SMs while they ran the kernel, of all ranks; None on the CPU."""
        found = [rank.spans.clock_mhz() for rank in self.ranks if rank.spans is not None]
        return Spread.of(torch.cat(found)) if found else None

    @property
    def watts(self) -> Spread | None:
        """Of all ranks' samples; None without any."""
        known = [value for rank in self.ranks for value in rank.watts if value is not None]
        return Spread.of(torch.tensor(known, dtype=torch.float64, device="cpu")) if known else None


def _slowest(microseconds: Sequence[torch.Tensor]) -> Spread:
    return Spread.of(torch.stack(list(microseconds)).amax(0))


# ---- JSON ---------------------------------------------------------------------------------------


def record(point: FusedMoePoint) -> dict[str, Any]:
    """One number of tokens as one JSON object; docs/bench.md says what each field means."""
    s, own = point.settings, point.ranks[0]
    fields: dict[str, Any] = {"schema": SCHEMA, "bench": BENCH, **_sizes(point)}
    fields |= {
        "backend": own.backend, "fast_accumulation": own.fast_accumulation,
        "tuning": None if own.tuning is None else dataclasses.asdict(own.tuning),
        "distribution": s.distribution, "seed": s.seed, "iterations": s.iterations,
        "warmup": s.warmup, "pause_ms": s.pause_ms,
        "slots": sum(rank.slots for rank in point.ranks),
        "experts_hit": point.experts_hit, "weight_bytes": point.weight_bytes,
    }  # fmt: skip
    fields |= _spread("total_us", point.total_us)
    fields |= _spread("event_us", point.times_us("fused") if point.on_gpu else None)
    roof, share = point.roof_us, point.roof_share
    fields |= {
        "tflops": round(point.tflops, 6),
        "weight_gbps": round(point.weight_gbps, 6),
        "roof_us": None if roof is None else round(roof, 1),
        "roof_share": None if share is None else round(share, 4),
        "phases": {
            phase: None if both is None else {name: round(us, 2) for name, us in both.items()}
            for phase, both in point.phases.items()
        },
    }
    fields |= _spread("kernel_clock_mhz", point.clock_mhz)
    fields |= _spread("power_w", point.watts)
    fields["difference"] = point.difference("fused")
    fields |= _rivals(point)
    return fields | {
        "late_share": round(max(rank.late_share for rank in point.ranks), 4),
        "device": own.device,
        **origin(),
    }


def _sizes(point: FusedMoePoint) -> dict[str, Any]:
    s = point.settings
    return {
        "tokens": point.ranks[0].tokens, "ranks": len(point.ranks), "hidden": s.hidden,
        "intermediate": s.intermediate, "top_k": s.top_k, "experts": s.experts,
    }  # fmt: skip


def _spread(name: str, spread: Spread | None) -> dict[str, float | None]:
    if spread is None:
        return {name: None}
    return {
        name: round(spread.median, 2),
        f"{name}_least": round(spread.least, 2),
        f"{name}_most": round(spread.most, 2),
    }


def _rivals(point: FusedMoePoint) -> dict[str, Any]:
    """Fields of the unfused layer and of PyTorch's products, if they were asked for."""
    if point.ratio is None:
        return {}
    fields: dict[str, Any] = {}
    for name in ("unfused", "unfused_gemms"):
        fields |= _spread(f"{name}_us", point.times_us(name))
    fields["unfused_difference"] = point.difference("unfused")
    fields["ratio"] = round(point.ratio, 3)
    kind = point.ranks[0].torch_gemms
    if isinstance(kind, NotTimed):
        return fields | {"torch_gemms": None, "torch_gemms_reason": kind.reason}
    fields["torch_gemms"] = kind
    fields |= _spread("torch_gemms_us", point.times_us("torch_gemms"))
    return fields | {"torch_gemms_difference": point.difference("torch_gemms")}


def timeline_lines(point: FusedMoePoint) -> list[dict[str, Any]]:
    """The last timed call as one JSON object for each CTA of each rank.

    Times are nanoseconds from the beginning of the rank's first CTA, as clocks of GPUs differ; null
    where a CTA did not have a phase.
    """
    lines = []
    for rank, found in enumerate(point.ranks):
        if found.spans is None:
            continue
        ns = found.spans.ns[-1]
        begin = int(ns[:, 0].min())
        for cta, times in enumerate(ns.tolist()):
            line = {"schema": SCHEMA, "bench": TIMELINE, **_sizes(point), "rank": rank, "cta": cta}
            for name, time in zip(("begin", *PHASES), times, strict=True):
                line[f"{name}_ns"] = time - begin if time else None
            line["device"] = (found.device or {}).get("name")
            lines.append(line)
    return lines


# ---- for people ---------------------------------------------------------------------------------

_CONTENDERS = {
    "unfused": "unfused µs",
    "unfused_gemms": "its GEMMs",
    "torch_gemms": "torch GEMMs",
}


def table(points: Sequence[FusedMoePoint]) -> Table:
    """A row for each number of tokens."""
    first = points[0]
    s, gpu = first.settings, first.on_gpu
    out = Table(
        title=f"fused-moe: {len(first.ranks)} rank{'s' * (len(first.ranks) != 1)}, hidden "
        f"{s.hidden}, intermediate {s.intermediate}, top-{s.top_k} of {s.experts} experts, "
        f"{first.ranks[0].backend}"
    )
    headings = ["tokens", "hit", "kernel µs" if gpu else "wall µs", "least", "most"]
    headings += ["events"] * gpu + ["TFLOP/s", "weights GB/s"]
    headings += ["roof"] * (first.roof_us is not None) + ["MHz", "W"] * gpu
    timed = [name for name in _CONTENDERS if first.has(name)]
    for heading in (*headings, *(_CONTENDERS[name] for name in timed), "difference"):
        out.add_column(heading, justify="right")
    for point in points:
        total = point.total_us
        cells = [str(point.ranks[0].tokens), str(point.experts_hit)]
        cells += [f"{value:,.1f}" for value in (total.median, total.least, total.most)]
        cells += [f"{point.times_us('fused').median:,.1f}"] * gpu
        cells += [f"{point.tflops:,.1f}", f"{point.weight_gbps:,.0f}"]
        if first.roof_us is not None:
            cells.append(f"{point.roof_share or 0:.0%}")
        if gpu:
            known = (point.clock_mhz, point.watts)
            cells += ["–" if each is None else f"{each.median:,.0f}" for each in known]
        cells += [f"{point.times_us(name).median:,.1f}" for name in timed]
        out.add_row(*cells, f"{point.difference('fused'):.1e}")
    return out


def phases_table(points: Sequence[FusedMoePoint]) -> Table:
    """When the first and the last CTA of rank 0 had ended each phase; of results on GPUs."""
    out = Table(title="µs from the beginning of the first CTA: the first, and the last CTA")
    headings = ("rows known", "first GEMM stored", "second GEMM stored", "end")
    for heading in ("tokens", *headings):
        out.add_column(heading, justify="right")
    for point in points:
        cells = [
            "–" if both is None else f"{both['least_us']:,.1f} – {both['most_us']:,.1f}"
            for both in point.phases.values()
        ]
        out.add_row(str(point.ranks[0].tokens), *cells)
    return out


def notes(points: Sequence[FusedMoePoint]) -> list[str]:
    """Lines to print below the tables."""
    first = points[0]
    way = "kernel: from the first CTA's beginning to the last CTA's end" if first.on_gpu else "wall"
    lines = [
        f"Medians over calls of the slowest rank; {way}.",
        "Compared with the reference on a sample of tokens before anything was timed.",
    ]
    if first.on_gpu:
        lines.append(
            f"Before each call a pause of {first.settings.pause_ms:g} ms and a flush of the L2 "
            "cache. Clock and power: NVML, during further calls; the power may be a mean of the "
            "last second, pauses included."
        )
        if first.roof_us is None:
            name = (first.ranks[0].device or {}).get("name")
            lines.append(f"No share of a roof: the limits of {name} are not known here.")
        late = max(rank.late_share for point in points for rank in point.ranks)
        if late:
            lines.append(
                f"The host was late for {100 * late:.1f}% of the calls: where that is many, times "
                "between events hold the host's, too. Those of the kernel do not."
            )
    if first.ratio is not None:
        lines += _rival_notes(points)
    return lines


def _rival_notes(points: Sequence[FusedMoePoint]) -> list[str]:
    ratios = [point.ratio for point in points if point.ratio is not None]
    least, most = f"{min(ratios):.2f}", f"{max(ratios):.2f}"
    span = least if least == most else f"{least} to {most}"
    clock = "both between events" if points[0].on_gpu else "both by wall time"
    unfused = "dispatch with cached routing, grouped GEMM, SwiGLU and quantisation, grouped GEMM"
    lines = [f"Unfused: {unfused}, combine. It takes {span} times as long, {clock}."]
    kind = points[0].ranks[0].torch_gemms
    if isinstance(kind, NotTimed):
        lines.append(f"PyTorch's grouped GEMMs are not timed: {kind.reason}.")
    elif kind is not None:
        lines.append(f"PyTorch's GEMMs: {KINDS[kind]}; both products, nothing else.")
    return lines
