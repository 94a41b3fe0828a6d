"""Which kernels high-throughput calls need on GPUs, and their shapes: warps, rings, slices.

The numbers come from measurements on H200 (docs/decisions/high-throughput-kernels.md,
dispatch-in-place.md, combine.md and sms-and-grids.md there).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fanfold import _core
from fanfold.backends.high_throughput.protocol import RowOrder
from fanfold.errors import ArgumentError
from fanfold.jit import KernelSource

__all__ = [
    "DEFAULT_MOST_CTAS",
    "LAYOUT_CTAS",
    "MOST_SHARED_BYTES",
    "WEIGHTS_ALONE_ROW_BYTES",
    "CombineKind",
    "DispatchKind",
    "Kernel",
    "Sizes",
    "combine_kernel",
    "dispatch_kernel",
    "lags",
    "layout_kernel",
    "most_batches",
    "plan_kernel",
]

MOST_SHARED_BYTES = 227 << 10
"""Dynamic shared memory that a CTA may have on compute capabilities 9.0 and 10.0."""

WEIGHTS_ALONE_ROW_BYTES = 16
"""Of the rows beside which weights return where no outputs do."""

DEFAULT_MOST_CTAS = 24
"""Of a kernel, if nobody asks for more: SMs belong to what runs beside, and long rows hardly need
more (docs/decisions/sms-and-grids.md)."""

LAYOUT_CTAS = 8
"""Of the kernel that counts a layout: the largest cluster that every GPU with clusters has."""

_LAYOUT_WARPS = 16
_PLAN_WARPS = 16
_MOST_TILES = 8
_TILE_BYTES = 64 << 10

# Warps of a dispatch and the rows in the ring of each. A row costs a warp much the same time
# whatever its length, so many warps are best, if that leaves each enough rows on their way. Four
# with long rings fill an SM's share of the link; expert-major and in place more is to be done for
# what comes.
_MANY_WARPS, _FEW_WARPS = 8, 4
_MOST_RING_ROWS = 7
_LEAST_MANY_ROWS, _LEAST_FOR_MORE = 7, 4
_RING_BYTES = 54 << 10  # of one of few warps, where more is not needed

# The last tokens of each source, in batches of two: a sender's last whole batch takes it a
# twentieth of the call, and begins and ends at any time.
_SHORT_TOKENS = 256

# Of 16 bytes, in a slice. Where long rows are added, longer ones have fewer instructions beside.
_SLICE_UNITS, _ADDED_SLICE_UNITS = 128, 224
_LONG_ROW_BYTES = 12 << 10
# Warps of a combine, beside the one that tells of what they have done: with 16 in all each thread
# has 128 registers, with 12 it has 168, which long slices need to be added up, those of which some
# lanes have no part (where there are more than a few rows to look up), and many ranks. Token-major
# more warps keep fewer SMs busy; many SMs fill the link with either, and end later with more.
_MANY_WORKERS, _FEW_WORKERS = 15, 11
_MANY_MOST_RANKS, _MANY_MOST_CTAS, _UNEVEN_MOST_TERMS = 16, 18, 8
# Of a slice each, in the ring of a warp, token-major of one of many; with too little memory there
# are fewer warps first.
_MOST_PIECES, _MANY_PIECES, _FEW_PIECES, _LEAST_PIECES = 5, 4, 3, 2
# Batches between sending and folding: some for each CTA, and several times what the warps of a
# grid work on at once. Where sending ends, fewer, as the link waits for what is then left to fold,
# and each fold is of half a batch: a warp in the middle of one keeps the send that it has drawn
# waiting.
_LAG_OF_CTA, _LAG_WAVES, _LAST_LAG_WAVES = 2, 4, 2
_PART_TOKENS = 4
# Of such parts for each warp at the end, where sums are results: a warp draws two jobs ahead.
_LAST_PARTS = 3

_LINE = 128


def _align(value: int, step: int) -> int:
    return -(-value // step) * step


def most_batches(tokens: int) -> int:
    """The most batches into which a dispatch cuts ``tokens`` tokens or fewer."""
    # Where one more whole batch fits there are fewer than with a token less.
    last = range(max(0, tokens - _core.CUDA_BATCH_TOKENS + 1), tokens + 1)
    return max(_core.cuda_dispatch_batches(count, _SHORT_TOKENS) for count in last)


@dataclass(frozen=True)
class Kernel:
    """A kernel to be compiled and how it is launched.

    Attributes:
        source: the kernel.
        shared_bytes: dynamic, of a CTA.
    """

    source: KernelSource
    shared_bytes: int


@dataclass(frozen=True)
class Sizes:
    """What all kernels of a layer are compiled for.

    Attributes:
        ranks: R.
        experts: E.
        top_k: K.
        across_hosts: whether ranks are on several hosts.
    """

    ranks: int
    experts: int
    top_k: int
    across_hosts: bool = False

    def constants(self) -> dict[str, int]:
        """Those of every kernel."""
        return {
            "kRanks": self.ranks,
            "kExperts": self.experts,
            "kTopK": self.top_k,
            "kMirror": 0,
            "kAcrossHosts": int(self.across_hosts),
        }


@dataclass(frozen=True)
class DispatchKind:
    """One kind of dispatch.

    Attributes:
        sizes: of the layer.
        row_bytes: of a row's values.
        scale_words: of a row's scales, 4 bytes each.
        expert_major: the order of the rows; else token-major.
        new_routing: whether the plan is new: the kernel stores what describes the rows.
        weighted: whether weights travel.
        in_place: rows go straight to their place, expert-major to one of them, not through a ring.
        pulls: readers load each row from the memory of its source, which stores it there once,
            instead of into a ring of each reader, if they are on one host. Not in place.
    """

    sizes: Sizes
    row_bytes: int
    scale_words: int
    expert_major: bool
    new_routing: bool
    weighted: bool
    in_place: bool = False
    pulls: bool = False

    @classmethod
    def of(
        cls, sizes: Sizes, values: torch.Tensor, scales: torch.Tensor | None, layout: RowOrder, *,
        new_routing: bool = True, weighted: bool = False, in_place: bool = False,
    ) -> DispatchKind:  # fmt: skip
        """That of rows of ``values`` and ``scales``."""
        return cls(
            sizes,
            row_bytes=values.shape[1] * values.itemsize,
            scale_words=0 if scales is None else scales.shape[1],
            expert_major=layout == "expert_major",
            new_routing=new_routing,
            weighted=weighted,
            in_place=in_place,
        )

    @property
    def layout(self) -> RowOrder:
        """The order of the rows."""
        return "expert_major" if self.expert_major else "token_major"

    @property
    def slot_bytes(self) -> int:
        """Of a row in a ring, with all that travels beside it, or of that alone: whole lines."""
        through = (0 if self.in_place else self.row_bytes) + self.bytes_beside
        return _align(max(through, 1), _LINE)  # in place there may be nothing

    @property
    def held_bytes(self) -> int:
        """Of a row in shared memory, with all that travels beside it."""
        return _align((self.row_bytes if self.in_place else 0) + self.slot_bytes, _LINE)

    @property
    def bytes_beside(self) -> int:
        """What travels beside a row: scales, a word for each choice, weights."""
        words = int(self.expert_major or self.new_routing) + int(self.weighted)
        return 4 * (self.scale_words + words * self.sizes.top_k)


@dataclass(frozen=True)
class CombineKind:
    """One kind of combine.

    Attributes:
        sizes: of the layer.
        row_bytes: of a row.
        expert_major: the order of the outputs; else token-major.
        weighted: whether outputs are multiplied.
        returns_weights: whether the top-k weights return with the rows.
        biased: whether sums begin with biases; ranks need not agree.
    """

    sizes: Sizes
    row_bytes: int
    expert_major: bool
    weighted: bool
    returns_weights: bool
    biased: bool = False

    @property
    def slot_bytes(self) -> int:
        """Of a row in a ring: whole lines."""
        return _align(self.row_bytes + (4 * self.sizes.top_k if self.returns_weights else 0), _LINE)

    @property
    def sums_are_results(self) -> bool:
        """Whether a token's sum over its experts is its result: nothing is folded."""
        return self.expert_major and self.sizes.ranks == 1 and not self.biased

    @property
    def slices(self) -> int:
        """Of columns, in which a row travels."""
        return self.cut()[0]

    def cut(self) -> tuple[int, int]:
        """The slices of a row, and the units of 16 bytes in each but the last."""
        # With more choices, or ranks, the places of a batch take the registers.
        adds = self.expert_major and max(self.sizes.top_k, self.sizes.ranks) <= 16
        long = adds and self.row_bytes >= _LONG_ROW_BYTES
        return _slices(self.row_bytes, _ADDED_SLICE_UNITS if long else _SLICE_UNITS)


def layout_kernel(sizes: Sizes) -> Kernel:
    """The kernel that says where a rank's tokens go; the number of tokens is free."""
    constants = {**sizes.constants(), "kWarps": _LAYOUT_WARPS, "kClusterCtas": LAYOUT_CTAS}
    source = KernelSource(
        "high_throughput/layout.cu",
        "fanfold::high_throughput::layout",
        constants,
        _LAYOUT_WARPS * 32,
    )
    return Kernel(source, _align(4 * (sizes.experts + sizes.ranks), _LINE))


def plan_kernel(sizes: Sizes) -> Kernel:
    """The kernel that plans a new routing; the number of tokens is free."""
    columns = sizes.experts + sizes.ranks
    tiles = max(1, min(_MOST_TILES, _TILE_BYTES // (8 * columns)))
    constants = {**sizes.constants(), "kWarps": _PLAN_WARPS, "kGroupTiles": tiles}
    participants = 4 * sizes.ranks + 4
    shared = 8 * tiles * columns + 8 * columns + 4 * sizes.experts + participants + 4
    source = KernelSource(
        "high_throughput/plan.cu", "fanfold::high_throughput::plan", constants, _PLAN_WARPS * 32
    )
    return Kernel(source, _align(shared, _LINE))


@dataclass(frozen=True)
class _RingShape:
    """The rings of a dispatch's CTA: of how many warps, and how many rows each holds."""

    warps: int
    rows: int
    shared_bytes: int

    @classmethod
    def of(cls, kind: DispatchKind, warps: int, rows: int) -> _RingShape:
        ranks, local = kind.sizes.ranks, kind.sizes.experts // kind.sizes.ranks
        ring = _align(rows * (kind.held_bytes + 8), _LINE)
        # Of many ranks a row's descriptor says where the plan has what belongs to each.
        notes = rows * (16 + 8 * (ranks if ranks <= _core.CUDA_FEW_RANKS else 1))
        shared = warps * (ring + notes) + 4 * ranks + 4 + 4 * ranks + 4 * (local + 2)
        return cls(warps, rows, _align(shared, _LINE))


def _ring_shape(kind: DispatchKind, most_shared_bytes: int) -> _RingShape:
    """Rings that fit: of many warps, or of few where rows are long."""
    least = _LEAST_FOR_MORE if kind.expert_major or kind.in_place else _LEAST_MANY_ROWS
    many = [(_MANY_WARPS, rows) for rows in range(_MOST_RING_ROWS, least - 1, -1)]
    wanted = max(2, min(_MOST_RING_ROWS, _RING_BYTES // kind.held_bytes))
    few = [(_FEW_WARPS, wanted), (4, 2), (2, 3), (2, 2), (1, 3), (1, 2)]
    for warps, rows in (*many, (_MANY_WARPS - 1, least), *few):
        if warps == 1 and kind.sizes.across_hosts:
            continue  # one warp of a CTA does something else there
        shape = _RingShape.of(kind, warps, rows)
        if shape.shared_bytes <= most_shared_bytes:
            return shape
    fixed = _RingShape.of(kind, 1, 2).shared_bytes - 2 * kind.held_bytes
    beside = kind.slot_bytes if kind.in_place else kind.bytes_beside
    most = (most_shared_bytes - fixed) // 2 // _LINE * _LINE - beside
    raise ArgumentError(
        "bytes of a row",
        kind.row_bytes,
        f"at most {most} for high throughput on this GPU, as two rows must fit its shared memory",
    )


def dispatch_kernel(kind: DispatchKind, most_shared_bytes: int = MOST_SHARED_BYTES) -> Kernel:
    """The kernel of one kind of dispatch.

    Raises:
        ArgumentError: two rows do not fit the shared memory.
    """
    ring = _ring_shape(kind, most_shared_bytes)
    behind = ring.rows * 4 // 7 if ring.rows > 3 else 1
    constants = {
        **kind.sizes.constants(),
        "kWarps": ring.warps,
        "kRowBytes": kind.row_bytes,
        "kScaleWords": kind.scale_words,
        "kExpertMajor": int(kind.expert_major),
        "kInPlace": int(kind.in_place),
        "kPulls": int(kind.pulls),
        "kNewRouting": int(kind.new_routing),
        "kWeighted": int(kind.weighted),
        "kRingRowBytes": kind.slot_bytes,
        "kShortTokens": _SHORT_TOKENS,
        "kSlotBytes": kind.held_bytes,
        "kAhead": ring.rows - behind,
        "kBehind": behind,
    }
    source = KernelSource(
        "high_throughput/dispatch.cu",
        "fanfold::high_throughput::dispatch",
        constants,
        ring.warps * 32,
    )
    return Kernel(source, ring.shared_bytes)


def _slices(row_bytes: int, most_units: int) -> tuple[int, int]:
    """Into how many slices a row is cut, and the units of each but the last: whole lines, and so
    that few lanes have nothing to do."""
    units, line = row_bytes // 16, min(most_units, _LINE // 16)
    least = min(_core.CUDA_MOST_SLICES, -(-units // most_units))

    def units_of(slices: int) -> int:
        return _align(-(-units // slices), line)

    candidates = range(least, min(_core.CUDA_MOST_SLICES, least + 2) + 1)
    best = min(candidates, key=lambda slices: slices * -(-units_of(slices) // 32))
    return -(-units // units_of(best)), units_of(best)


def _has_many_workers(kind: CombineKind, ctas: int) -> bool:
    units = kind.cut()[1]
    if units > _SLICE_UNITS or kind.sizes.ranks > _MANY_MOST_RANKS:
        return False
    if not kind.expert_major:
        return ctas <= _MANY_MOST_CTAS
    even = units % 32 == 0 and kind.row_bytes % (16 * units) == 0
    return even or max(kind.sizes.top_k, kind.sizes.ranks) <= _UNEVEN_MOST_TERMS


def lags(kind: CombineKind, ctas: int, slots: int) -> tuple[int, int]:
    """Batches between sending and folding, and where sending ends, in a combine of ``ctas`` CTAs
    with rings of ``slots``. The first is no more than half a ring: behind its last use of a slot a
    combine gives none back. Where sums are results, both are the last batches, done in parts."""
    workers = _MANY_WORKERS if _has_many_workers(kind, ctas) else _FEW_WORKERS
    if kind.sums_are_results:
        parts = kind.slices * (_core.CUDA_BATCH_TOKENS // _PART_TOKENS)
        last = -(-_LAST_PARTS * workers * ctas // parts)
        return last, last
    jobs = (kind.sizes.ranks + int(kind.expert_major)) * kind.slices  # for a batch of each source
    at_once = -(-workers * ctas // jobs)
    lag = min(max(_LAG_OF_CTA * ctas, _LAG_WAVES * at_once), slots // 2)
    return lag, min(_LAST_LAG_WAVES * at_once, lag)


def combine_kernel(
    kind: CombineKind, ctas: int, most_shared_bytes: int = MOST_SHARED_BYTES
) -> Kernel:
    """The kernel of one kind of combine: of many warps or, on some numbers of CTAs, of few.

    Raises:
        ArgumentError: two pieces of a row do not fit the shared memory.
    """
    sizes = kind.sizes
    slices, slice_units = kind.cut()
    # A token has rows of so many ranks at most; of few ranks there is room for all.
    few = sizes.ranks <= _core.CUDA_FEW_RANKS
    ranks = sizes.ranks if few else min(sizes.ranks, sizes.top_k)
    terms = max(sizes.top_k if kind.expert_major else 0, ranks + (2 if kind.biased else 0))
    entries = 2 * 8 * (_core.CUDA_BATCH_TOKENS * terms + _MOST_PIECES)
    piece = 16 * _align(slice_units, 32)
    done = 56 + 8 * sizes.across_hosts  # a job, and what tells of it
    rest = _align(8 * sizes.ranks + 16, _LINE)

    def shared_bytes(workers: int, pieces: int) -> int:
        return workers * _align(pieces * piece + entries + done, _LINE) + rest

    workers, pieces = _FEW_WORKERS, _MOST_PIECES
    if _has_many_workers(kind, ctas):
        workers, pieces = _MANY_WORKERS, _MOST_PIECES if kind.expert_major else _MANY_PIECES
    while workers > 1 and shared_bytes(workers, _FEW_PIECES) > most_shared_bytes:
        workers -= 1
    while pieces > _LEAST_PIECES and shared_bytes(workers, pieces) > most_shared_bytes:
        pieces -= 1
    if shared_bytes(workers, pieces) > most_shared_bytes:
        bound = f"fewer, as two slices of {16 * slice_units} must fit this GPU's shared memory"
        raise ArgumentError("bytes of a row", kind.row_bytes, bound)
    constants = {
        **sizes.constants(),
        "kWarps": workers + 1,
        "kRowBytes": kind.row_bytes,
        "kSlotBytes": kind.slot_bytes,
        "kExpertMajor": int(kind.expert_major),
        "kWeighted": int(kind.weighted),
        "kTopKWeights": int(kind.returns_weights),
        "kBiased": int(kind.biased),
        "kSlices": slices,
        "kSliceUnits": slice_units,
        "kPieces": pieces,
        "kShortTokens": _SHORT_TOKENS,
        "kPartTokens": _PART_TOKENS,
        "kSharedBytes": shared_bytes(workers, pieces),
    }
    source = KernelSource(
        "high_throughput/combine.cu",
        "fanfold::high_throughput::combine",
        constants,
        (workers + 1) * 32,
    )
    return Kernel(source, shared_bytes(workers, pieces))


def core_shape(kind: DispatchKind | CombineKind) -> _core.CudaHighThroughputShape:
    """What ranks must agree about in a call of this kind, as the core takes it."""
    dispatches = isinstance(kind, DispatchKind)
    phases = _core.CudaHighThroughputPhase
    shape = _core.CudaHighThroughputShape(
        phases.DISPATCH if dispatches else phases.COMBINE, kind.sizes.experts, kind.sizes.top_k
    )
    shape.row_bytes, shape.slot_bytes = kind.row_bytes, kind.slot_bytes
    shape.expert_major = int(kind.expert_major)
    if isinstance(kind, DispatchKind):
        shape.scale_words = kind.scale_words
        shape.in_place = int(kind.in_place)
        if kind.pulls:  # across hosts slots are those of rings elsewhere, too
            shape.kept_rings = 1 if kind.sizes.across_hosts else kind.sizes.ranks
        shape.variant = int(kind.new_routing) | int(kind.weighted) << 1
    else:
        shape.slices, shape.variant = kind.slices, int(kind.returns_weights)
    return shape
