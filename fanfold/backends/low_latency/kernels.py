"""Which kernels a geometry needs, and their shapes: warps, CTAs, roles.

The numbers come from measurements on H200 (``docs/decisions/low-latency-kernels.md``): few
SMs fill the links, and what an SM receives waits behind what it sends, so in dispatch a few CTAs
push rows and the others receive; in combine there is little to do beside the link, so all do both.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from fanfold import _core
from fanfold.backends.low_latency.sizes import check_cuda_geometry
from fanfold.errors import ArgumentError
from fanfold.formats import RowFormat, ScaleFormat
from fanfold.geometry import Geometry
from fanfold.jit import KernelSource

__all__ = [
    "Grid", "combine_kernel", "dispatch_kernel", "kernel_sources", "token_major_kernel",
]  # fmt: skip

TOKEN_MAJOR_BF16, TOKEN_MAJOR_FP8 = 0, 4
"""The core's numbers of the encodings of token-major rows."""

# As many as leave each thread the registers that it needs; more warps were not faster.
_DISPATCH_WARPS = 16
_COMBINE_WARPS = 20
_COMBINE_WARPS_OF_SHORT_ROWS = 16
_SHORT_ROW_BYTES = 4096
_SEGMENT_BYTES = 512
_LONG_ROW_SEGMENTS = 8
_FEW_RANKS = 8
# Whether acknowledgements are read with acquire; 0 is for a bench that measures what that costs.
_ACQUIRE_ACKS = 1
# 20 of 132 SMs of an H200 fill its links; from 12 to 32 the time changes by a tenth at most.
_SENDING_SHARE = 20 / 132


@dataclass(frozen=True)
class Grid:
    """CTAs of every low-latency kernel.

    Attributes:
        ctas: in all; one for each SM.
        senders: of them push rows in a dispatch.
    """

    ctas: int
    senders: int

    @classmethod
    def of(
        cls, sms: int, ranks: int, *, ctas: int | None = None, senders: int | None = None
    ) -> Grid:
        """The grid for a GPU with ``sms`` SMs, where nothing else is asked for.

        Raises:
            ArgumentError: too few CTAs for so many ranks, or too many for the GPU; or so many
                senders that too few are left.
        """
        if ctas is None:
            ctas = min(max(sms, 2), _core.CUDA_MOST_CTAS)
        receivers = _core.cuda_least_receivers(ranks)
        if not receivers < ctas <= sms:
            each = "for each rank that it receives from" if receivers == ranks else "that receives"
            bound = f"from {receivers + 1}, one that sends and one {each}"
            raise ArgumentError("ctas", ctas, f"{bound}, to {sms}, the SMs of this GPU")
        if senders is None:
            senders = min(max(round(ctas * _SENDING_SHARE), 1), ctas - receivers)
        if not 1 <= senders <= ctas - receivers:
            each = " for each rank" if receivers == ranks else ""
            bound = f"from 1 to {ctas - receivers}: of {ctas} CTAs one{each} must receive"
            raise ArgumentError("senders", senders, bound)
        return cls(ctas, senders)


def _sizes(geometry: Geometry, across_hosts: bool) -> dict[str, int]:
    return {
        "kRanks": geometry.ranks,
        "kExperts": geometry.num_experts,
        "kTopK": geometry.top_k,
        "kHidden": geometry.hidden,
        "kMirror": 0,
        "kAcrossHosts": int(across_hosts),
        "kAcquireAcks": _ACQUIRE_ACKS,
        "kTokenMajor": 0,
    }


def encoding(row_format: RowFormat, scale_format: ScaleFormat) -> int:
    """The core's number of a row's encoding."""
    if row_format is RowFormat.BF16:
        return 0
    if row_format is RowFormat.NVFP4:
        return 3
    return 1 if scale_format is ScaleFormat.FLOAT32 else 2


def _dispatch_tasks(row_format: RowFormat, geometry: Geometry) -> int:
    """Segments that a receiving warp has in flight: as many as registers allow, as all rows that a
    CTA places together are asked for together."""
    if row_format is RowFormat.BF16:  # eight spill on some sizes of long rows; seven hold 4 of 7168
        return 7 if geometry.hidden * 2 > _LONG_ROW_SEGMENTS * _SEGMENT_BYTES else 8
    if row_format is RowFormat.NVFP4:
        return 4
    hidden = geometry.hidden
    long = hidden > _LONG_ROW_SEGMENTS * _SEGMENT_BYTES and hidden % _SEGMENT_BYTES == 0
    return 5 if long and geometry.ranks <= _FEW_RANKS else 4


def dispatch_kernel(
    geometry: Geometry,
    row_format: RowFormat,
    scale_format: ScaleFormat,
    *,
    across_hosts: bool = False,
) -> KernelSource:
    """The kernel that dispatches rows of these formats, perhaps of ranks on several hosts; the
    number of tokens is free.

    Raises:
        ArgumentError: such rows are no multiple of 16 bytes.
    """
    row_format.check_hidden(geometry.hidden)
    fp8 = row_format is RowFormat.FP8
    constants = {
        **_sizes(geometry, across_hosts),
        "kEncoding": encoding(row_format, scale_format),
        "kPackScales": int(fp8 and scale_format is ScaleFormat.UE8M0),
        "kWarps": _DISPATCH_WARPS,
        "kTasks": _dispatch_tasks(row_format, geometry),
    }
    return KernelSource(
        "low_latency/dispatch.cu", "fanfold::low_latency::dispatch", constants, _DISPATCH_WARPS * 32
    )


def token_major_kernel(geometry: Geometry, *, scaled: bool) -> KernelSource:
    """The kernel of a dispatch that brings each token to a rank once, of ranks on one host: rows of
    bfloat16, or ``scaled``: of fp8 that comes with its scales.

    Raises:
        ArgumentError: such rows are no multiple of 16 bytes.
    """
    row_format = RowFormat.FP8 if scaled else RowFormat.BF16
    source = dispatch_kernel(geometry, row_format, ScaleFormat.FLOAT32)
    number = TOKEN_MAJOR_FP8 if scaled else TOKEN_MAJOR_BF16
    constants = {**dict(source.constants), "kTokenMajor": 1, "kEncoding": number}
    return dataclasses.replace(source, constants=constants)


def combine_kernel(
    geometry: Geometry,
    *,
    late: bool,
    logfmt: bool,
    awaits_signals: bool = False,
    across_hosts: bool = False,
    biased: bool = False,
) -> KernelSource:
    """The kernel that combines, with weights that come late or not, as LogFMT or not, perhaps of
    ranks on several hosts. With ``awaits_signals`` it is a send half that waits for outputs
    (:class:`ReadyRows`), with weights that come late. With ``biased`` sums begin with biases;
    ranks need not agree about that."""
    short = geometry.hidden * 2 <= _SHORT_ROW_BYTES
    warps = _COMBINE_WARPS_OF_SHORT_ROWS if short else _COMBINE_WARPS
    constants = {
        **_sizes(geometry, across_hosts),
        "kLate": int(late),
        "kLogFmt": int(logfmt),
        "kAwaitsSignals": int(awaits_signals),
        "kBiased": int(biased),
        "kWarps": warps,
    }
    return KernelSource(
        "low_latency/combine.cu", "fanfold::low_latency::combine", constants, warps * 32
    )


def kernel_sources(
    geometry: Geometry,
    row_format: RowFormat = RowFormat.FP8,
    scale_format: ScaleFormat = ScaleFormat.FLOAT32,
    *,
    late_weights: bool = False,
    logfmt: bool = False,
    across_hosts: bool = False,
) -> list[KernelSource]:
    """The kernels of a geometry's low-latency calls: dispatch, combine.

    Raises:
        ArgumentError: the kernels do not take this geometry, or rows of this format.
    """
    check_cuda_geometry(geometry)
    return [
        dispatch_kernel(geometry, row_format, scale_format, across_hosts=across_hosts),
        combine_kernel(geometry, late=late_weights, logfmt=logfmt, across_hosts=across_hosts),
    ]
