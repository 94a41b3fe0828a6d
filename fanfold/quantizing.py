"""Quantising rows on GPUs: the kernel, which rows it takes, launching it.

It needs NVRTC and compute capability 9.0; where these are not, :mod:`fanfold.formats` has another
way to the same bits.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fanfold import _core
from fanfold.gpus import threads_share_gpu
from fanfold.jit import KernelSource
from fanfold.jit.optional import load_where_possible

__all__ = ["Quantizer", "kernel_source", "quantizer_of"]

_WARPS = 8
# As many as leave each thread the registers that it needs; they keep 40 KiB of loads in flight on
# an SM, more than its share of an H200's memory bandwidth asks for.
_CTAS_OF_AN_SM = 5
_SEGMENT_COLUMNS = 512  # that a warp takes at a time
_ALIGNMENT = 16  # of a load
_UNIT_COLUMNS = 8  # of one


def kernel_source(hidden: int, *, power_of_two: bool, packed: bool) -> KernelSource:
    """The kernel for rows of ``hidden`` columns, a multiple of 8; the number of rows is free."""
    constants = {
        "kHidden": hidden,
        "kPowerOfTwo": int(power_of_two),
        "kPackScales": int(packed),
        "kWarps": _WARPS,
        "kCtasOfAnSm": _CTAS_OF_AN_SM,
    }
    return KernelSource("formats/quantize.cu", "fanfold::formats::quantize", constants, _WARPS * 32)


@dataclass(frozen=True)
class Quantizer:
    """The kernel of one hidden size, on one GPU.

    Attributes:
        kernel: loaded.
        ctas: most that are launched.
        hidden: columns of a row.
    """

    kernel: _core.CudaKernel
    ctas: int
    hidden: int

    def run(self, x: torch.Tensor, values: torch.Tensor, scales: torch.Tensor) -> None:
        """Fills ``values`` and ``scales``, contiguous, from the rows of ``x``, on the current
        stream."""
        if len(x) == 0:
            return
        args = _core.CudaQuantizeArgs()
        args.tokens = len(x)
        args.x, args.values, args.scales = x.data_ptr(), values.data_ptr(), scales.data_ptr()
        warps = len(x) * -(-self.hidden // _SEGMENT_COLUMNS)
        ctas = min(self.ctas, -(-warps // _WARPS))
        with torch.cuda.device(x.device):
            stream = torch._C._cuda_getCurrentRawStream(x.device.index)
            args.launch(self.kernel, ctas, _WARPS * 32, stream, early=not threads_share_gpu())


def quantizer_of(x: torch.Tensor, *, power_of_two: bool, packed: bool) -> Quantizer | None:
    """What quantises the rows ``x``, by float32 scales or packed ones; None if no kernel does.

    Raises:
        UsageError: the kernel is not loaded yet, and a CUDA graph is being captured.
    """
    if not (x.is_cuda and x.dtype is torch.bfloat16 and x.is_contiguous()):
        return None
    hidden = x.shape[1]
    if hidden == 0 or hidden % _UNIT_COLUMNS != 0 or x.data_ptr() % _ALIGNMENT != 0:
        return None
    key = (x.device.index, hidden, power_of_two, packed)
    if key not in _loaded:
        _loaded[key] = _load(*key)
    return _loaded[key]


_loaded: dict[tuple[int, int, bool, bool], Quantizer | None] = {}


def _load(index: int, hidden: int, power_of_two: bool, packed: bool) -> Quantizer | None:
    source = kernel_source(hidden, power_of_two=power_of_two, packed=packed)
    kernel = load_where_possible(source, index)
    if kernel is None:
        return None
    sms = torch.cuda.get_device_properties(index).multi_processor_count
    return Quantizer(kernel, sms * _CTAS_OF_AN_SM, hidden)
