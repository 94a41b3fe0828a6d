"""The fused MoE layer on a GPU: one kernel, compiled for the sizes at hand."""

from __future__ import annotations

import threading
import weakref

import torch

from fanfold import _core, jit
from fanfold.config import Config
from fanfold.deferred_free import free_when_idle
from fanfold.errors import ArgumentError, FanfoldError, UsageError
from fanfold.fused_moe.call import FusedCall
from fanfold.fused_moe.weights import ExpertWeights
from fanfold.geometry import Geometry
from fanfold.jit import KernelSource
from fanfold.kernel_reports import KernelReports
from fanfold.lending import address_of
from fanfold.stream_order import StreamOrder

__all__ = ["MOST_COLUMNS", "MOST_EXPERTS", "CudaLayer", "kernel_source"]

MOST_COLUMNS = 16384
"""Of ``hidden`` and ``intermediate``: a lane of a warp holds the scales of every 32nd block."""

MOST_EXPERTS = 8192
"""Of one rank: a CTA counts their rows in its shared memory."""

_THREADS = 384
_SHARED_BYTES = 232448
_CLUSTER = 2
# On an H200, tokens are summed while columns are computed from about 2048 tokens of top-8 on.
_BLOCKS_FOR_GROUPS = 144
_ALIGNMENT = 1024


def kernel_source(
    *,
    experts: int,
    top_k: int,
    hidden: int,
    intermediate: int,
    clamps: bool,
    fast_accumulation: bool = False,
) -> KernelSource:
    """The kernel for a rank of these sizes; the number of tokens is free.

    Args:
        experts: of the rank.
        top_k, hidden, intermediate: of the layer.
        clamps: whether the activation is limited; the limit is free.
        fast_accumulation: whether sums stay in the tensor cores (kernels/gemm/sum.cuh).
    """
    constants = {
        "kExperts": experts,
        "kTopK": top_k,
        "kHidden": hidden,
        "kIntermediate": intermediate,
        "kMostDepth": max(hidden, intermediate),
        "kTwoLevels": int(not fast_accumulation),
        "kClamps": int(clamps),
        "kTileRows": 128,
        "kSharedBytes": _SHARED_BYTES,
    }
    entry = "fanfold::fused_moe::layer"
    return KernelSource("fused_moe/layer.cu", entry, constants, _THREADS, yields=True)


class CudaLayer:
    """Calls of a layer with one rank on its GPU.

    All CTAs of the kernel must run at the same time, so calls of all layers of the process on one
    GPU follow each other, whatever streams they are made on.

    Args:
        device: with an index.
        geometry, intermediate: of the layer.
        clamp: of the activation, or None.
        config: the time bound, and how sums are kept.
    """

    rank = 0

    def __init__(
        self,
        device: torch.device,
        geometry: Geometry,
        intermediate: int,
        clamp: float | None,
        config: Config,
    ) -> None:
        self._device, self._geometry, self._clamp = device, geometry, clamp
        self._config = config
        self._reports = _Reports()
        experts, top_k = geometry.experts_per_rank, geometry.top_k
        self._main: _Kernel | None = self._kernel(experts, top_k, intermediate)
        self._shared: dict[int, _SharedExpert] = {}

    def _kernel(self, experts: int, top_k: int, intermediate: int) -> _Kernel:
        source = kernel_source(
            experts=experts,
            top_k=top_k,
            hidden=self._geometry.hidden,
            intermediate=intermediate,
            clamps=self._clamp is not None,
            fast_accumulation=self._config.fast_accumulation,
        )
        jit.refuse_in_capture(source)
        kernel = jit.load(source, self._device.index, self._config)
        kernel.allow_shared_bytes(_SHARED_BYTES)
        with torch.cuda.device(self._device):
            clusters = kernel.most_clusters(_THREADS, _SHARED_BYTES, _CLUSTER)
        sizes = _core.CudaFusedMoeSizes(
            experts=experts,
            top_k=top_k,
            hidden=self._geometry.hidden,
            intermediate=intermediate,
            tokens=self._geometry.max_tokens,
            ctas=min(_CLUSTER * clusters, _core.CUDA_FUSED_MOE_MOST_CTAS),
        )
        return _Kernel(kernel, sizes, self._device, self._reports, self._config, self._clamp)

    def refuse(self, error: BaseException) -> None:
        """There is no other rank to tell."""

    def run(self, call: FusedCall) -> torch.Tensor:
        """See :meth:`fanfold.FusedMoE.forward`; the call is checked."""
        self._check_usable()
        assert self._main is not None
        device = self._device
        shape = (call.tokens, self._geometry.hidden)
        out = call.out
        if out is None:
            out = torch.empty(shape, dtype=torch.bfloat16, device=device)
        if call.tokens == 0:
            return out
        shared = None
        if call.shared_expert is not None:
            shared = self._shared_expert(call.shared_expert.intermediate)
        stream = _order_of(device).follow()
        tokens = call.quantized()
        addend = None
        if shared is not None and call.shared_expert is not None:
            addend = torch.empty(shape, dtype=torch.bfloat16, device=device)
            shared.run(tokens, call.shared_expert, addend, stream)
        self._main.run(
            tokens,
            (call.topk_idx, call.topk_weights),
            call.weights,
            out,
            stream,
            addend=addend,
            statistics=call.statistics,
        )
        self.check()
        return out

    def check(self) -> None:
        """Raises what earlier calls have found wrong since; does not wait for them."""
        self._check_usable()
        if self._reports.passing():
            raise self._reports.take(self._config.timeout_s)

    def spans(self) -> torch.Tensor:
        """From here on every call writes when its CTAs began, knew their rows, had stored their
        last tile of each GEMM, and ended: ``[CTAs, 5]`` int64, nanoseconds of the GPU's clock."""
        assert self._main is not None
        return self._main.spans()

    def close(self) -> None:
        """Releases the memory, when the calls so far have ended."""
        self._main = None
        self._shared.clear()

    def _check_usable(self) -> None:
        if self._reports.fatal():
            raise self._reports.take(self._config.timeout_s)

    def _shared_expert(self, intermediate: int) -> _SharedExpert:
        known = self._shared.get(intermediate)
        if known is None:
            kernel = self._kernel(1, 1, intermediate)
            known = _SharedExpert(kernel, self._geometry.max_tokens, self._device)
            self._shared[intermediate] = known
        return known


class _Kernel:
    """A kernel with the memory that it works in."""

    def __init__(
        self,
        kernel: _core.CudaKernel,
        sizes: _core.CudaFusedMoeSizes,
        device: torch.device,
        reports: _Reports,
        config: Config,
        clamp: float | None,
    ) -> None:
        self._kernel, self._ctas, self._device = kernel, sizes.ctas, device
        room = sizes.bytes + _ALIGNMENT
        self._memory = torch.empty(room, dtype=torch.uint8, device=device)
        begin = -self._memory.data_ptr() % _ALIGNMENT
        self._memory[begin : begin + sizes.zeroed].zero_()
        torch.cuda.current_stream(device).synchronize()  # calls may come on other streams
        at = self._memory.data_ptr() + begin
        self._core = _core.CudaFusedMoe(sizes, at, reports.address)
        self._core.timeout_ns = int(config.timeout_s * 1e9)
        self._core.set_blocks_for_groups(_BLOCKS_FOR_GROUPS)
        self._core.set_clamp(0.0 if clamp is None else clamp)
        self._spans: torch.Tensor | None = None
        # Kernels in flight may outlive this object, and write there.
        weakref.finalize(self, free_when_idle, device, (self._memory, reports)).atexit = False

    def spans(self) -> torch.Tensor:
        if self._spans is None:
            shape = (self._ctas, _core.CUDA_FUSED_MOE_SPAN_WORDS)
            self._spans = torch.zeros(shape, dtype=torch.int64, device=self._device)
        return self._spans

    def run(
        self,
        tokens: tuple[torch.Tensor, torch.Tensor],
        routing: tuple[torch.Tensor, torch.Tensor],
        weights: ExpertWeights,
        out: torch.Tensor,
        stream: int,
        *,
        addend: torch.Tensor | None = None,
        statistics: torch.Tensor | None = None,
    ) -> None:
        """Enqueues the kernel. ``routing``: experts of the entries, and their weights."""
        values, scales = tokens
        call = _core.CudaFusedMoeCall()
        call.tokens = values.shape[0]
        call.x, call.x_scales = values.data_ptr(), scales.data_ptr()
        call.set_scale_strides(*scales.stride())
        call.topk_idx, call.topk_weights = (each.data_ptr() for each in routing)
        call.l1, call.l1_scales = weights.l1.data_ptr(), weights.l1_scales.data_ptr()
        call.l2, call.l2_scales = weights.l2.data_ptr(), weights.l2_scales.data_ptr()
        call.addend, call.y = address_of(addend), out.data_ptr()
        call.statistics, call.spans = address_of(statistics), address_of(self._spans)
        self._core.launch(call, self._kernel, self._ctas, _THREADS, _SHARED_BYTES, stream)


class _SharedExpert:
    """A layer of one expert that gets every token with weight 1."""

    def __init__(self, kernel: _Kernel, most: int, device: torch.device) -> None:
        self._kernel = kernel
        self._idx = torch.zeros((most, 1), dtype=torch.int64, device=device)
        self._ones = torch.ones((most, 1), dtype=torch.float32, device=device)
        torch.cuda.current_stream(device).synchronize()

    def run(
        self,
        tokens: tuple[torch.Tensor, torch.Tensor],
        weights: ExpertWeights,
        out: torch.Tensor,
        stream: int,
    ) -> None:
        self._kernel.run(tokens, (self._idx, self._ones), weights, out, stream)


_orders: dict[int, StreamOrder] = {}
_making = threading.Lock()


def _order_of(device: torch.device) -> StreamOrder:
    """Of all fused layers of the process on one GPU."""
    with _making:
        return _orders.setdefault(device.index, StreamOrder(device))


class _Reports(KernelReports):
    """What the kernel reports."""

    _TIMEOUT, _INDEX = range(2)

    def __init__(self) -> None:
        super().__init__(_core.CUDA_FUSED_MOE_REPORT_BYTES)

    def fatal(self) -> bool:
        """Whether a call has not come to its end."""
        return self._words[4 * self._TIMEOUT] != 0

    def passing(self) -> bool:
        """Whether there is a new report of something that concerns one call only."""
        return self._words[4 * self._INDEX] != 0 and self._is_new(self._INDEX)

    def take(self, timeout_s: float) -> FanfoldError:
        """The gravest report as an exception."""
        if self.fatal():
            number, cta = self._words[1], self._words[2]
            return UsageError(
                f"call {number} of this FusedMoE was given up: CTA {cta} has waited for another "
                f"for {timeout_s:.3g} s (timeout_s, FANFOLD_TIMEOUT_S). All its CTAs must "
                "run at the same time: something else holds SMs of this GPU, such as another fused "
                "layer's graph or another process. Its result is wrong; make a new FusedMoE"
            )
        call, number, first, second = self._words[4:8]
        self._raised[self._INDEX] = (call & 0xFF, number)
        place, value = self._choice(second)
        return ArgumentError(
            f"topk_idx[{first}, {place}] of call {number}",
            value,
            "from -1 (none) to num_experts - 1; it was taken for none",
        )
