"""The layout of a routing on GPUs: its kernel, which routings it takes, launching it.

It needs NVRTC and compute capability 9.0; where these are not,
:func:`fanfold.backends.high_throughput.layout.layout_there` gives the same counts.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fanfold import _core
from fanfold.backends.high_throughput.kernels import LAYOUT_CTAS, Sizes, layout_kernel
from fanfold.jit.optional import load_where_possible

__all__ = ["LayoutCounter", "counter_of"]


@dataclass(frozen=True)
class LayoutCounter:
    """The kernel of one layer's sizes, on one GPU.

    Attributes:
        kernel: loaded.
        shape: of every launch, whatever the number of tokens.
    """

    kernel: _core.CudaKernel
    shape: _core.CudaLaunch

    def run(
        self,
        topk_idx: torch.Tensor,
        tokens_per_rank: torch.Tensor,
        tokens_per_expert: torch.Tensor,
        is_token_in_rank: torch.Tensor,
    ) -> None:
        """Fills the last three, whatever is in them, on the current stream; all are contiguous."""
        args = _core.CudaDispatchLayoutArgs()
        args.tokens = topk_idx.shape[0]
        args.topk_idx = topk_idx.data_ptr()
        args.tokens_per_rank = tokens_per_rank.data_ptr()
        args.tokens_per_expert = tokens_per_expert.data_ptr()
        args.is_token_in_rank = is_token_in_rank.data_ptr()
        stream = torch._C._cuda_getCurrentRawStream(topk_idx.device.index)
        args.launch(self.kernel, self.shape, stream)


def counter_of(topk_idx: torch.Tensor, num_experts: int, ranks: int) -> LayoutCounter | None:
    """What counts a routing that has been checked; None if no kernel does.

    Raises:
        UsageError: the kernel is not loaded yet, and a CUDA graph is being captured.
    """
    if not topk_idx.is_cuda:
        return None
    key = (topk_idx.device.index, ranks, num_experts, topk_idx.shape[1])
    if key not in _loaded:
        _loaded[key] = _load(*key)
    return _loaded[key]


_loaded: dict[tuple[int, int, int, int], LayoutCounter | None] = {}


def _load(index: int, ranks: int, experts: int, top_k: int) -> LayoutCounter | None:
    most = _core.CUDA_HIGH_THROUGHPUT_MOST_EXPERTS
    if ranks > _core.CUDA_HIGH_THROUGHPUT_MOST_RANKS or experts > most:
        return None
    kernel = layout_kernel(Sizes(ranks, experts, top_k))
    loaded = load_where_possible(kernel.source, index)
    if loaded is None:
        return None
    threads = kernel.source.threads
    return LayoutCounter(
        loaded, _core.CudaLaunch(LAYOUT_CTAS, threads, kernel.shared_bytes, early=True)
    )
