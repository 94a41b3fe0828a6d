"""The fused MoE layer on GPUs: one kernel, compiled for the sizes at hand."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch

from fanfold import _core, jit
from fanfold.backends.opening import memory_of_gpus
from fanfold.config import Config
from fanfold.deferred_free import free_when_idle
from fanfold.errors import ArgumentError, FanfoldError, PeerRefused, PeerTimeout, UsageError, logged
from fanfold.fused_moe.call import FusedCall
from fanfold.fused_moe.tuning import FusedMoeTuning, TunedLayer, tuning_for
from fanfold.fused_moe.weights import ExpertWeights
from fanfold.geometry import Geometry
from fanfold.group import Group, agree
from fanfold.jit import KernelSource
from fanfold.kernel_reports import KernelReports
from fanfold.lending import address_of
from fanfold.memory.cuda import are_threads, wait_for_kernels
from fanfold.refusal import Refusing
from fanfold.stream_order import StreamOrder

__all__ = [
    "MOST_COLUMNS",
    "MOST_EXPERTS",
    "MOST_RANKS",
    "MOST_ROWS",
    "CudaLayer",
    "kernel_source",
    "most_rows",
]

MOST_COLUMNS = 16384
"""Of ``hidden`` and ``intermediate``: a lane of a warp holds the scales of every 32nd block."""

MOST_EXPERTS = 6144
"""Of all ranks: a CTA counts their rows in its shared memory."""

MOST_RANKS = _core.CUDA_FEW_RANKS
"""A kernel has the addresses of their memory in its arguments."""

MOST_ROWS = _core.CUDA_FUSED_MOE_MOST_ROWS
"""That may come to one rank: a task has 18 bits for its block of rows."""

_THREADS = 384
_SHARED_BYTES = 232448
_CLUSTER = 2


def kernel_source(
    geometry: Geometry,
    intermediate: int,
    *,
    clamps: bool,
    fast_accumulation: bool = False,
    swap_ab: bool = False,
) -> KernelSource:
    """The kernel for a layer of these sizes; the number of tokens is free.

    Args:
        geometry, intermediate: of the layer.
        clamps: whether the activation is limited; the limit is free.
        fast_accumulation: whether sums stay in the tensor cores (kernels/gemm/sum.cuh).
        swap_ab: whether tokens are columns of the products (kernels/gemm/swapped_sum.cuh), whose
            sums do not stay there.
    """
    constants = {
        "kRanks": geometry.ranks,
        "kExperts": geometry.num_experts,
        "kTopK": geometry.top_k,
        "kHidden": geometry.hidden,
        "kIntermediate": intermediate,
        "kMostDepth": max(geometry.hidden, intermediate),
        "kClamps": int(clamps),
        "kSwapsAb": int(swap_ab),
        "kTwoLevels": int(swap_ab or not fast_accumulation),
        "kTileRows": 128,
        "kSharedBytes": _SHARED_BYTES,
    }
    entry = "fanfold::fused_moe::layer"
    return KernelSource("fused_moe/layer.cu", entry, constants, _THREADS, yields=not swap_ab)


class CudaLayer:
    """Calls of a layer on the ranks' GPUs. Construction is collective.

    All CTAs of the kernels of all ranks must run at the same time, so calls of all layers of the
    process on one GPU follow each other, whatever streams they are made on. Ranks that are threads
    have shares of the SMs.

    Args:
        group: of the ranks.
        geometry, intermediate: of the layer.
        clamps: whether calls may limit the activation.
        config: the time bound, how sums are kept, and when the kernel changes its form.

    Attributes:
        rank: of the group.
        tuning: when the kernel changes its form, on all ranks.
    """

    def __init__(
        self,
        group: Group,
        geometry: Geometry,
        intermediate: int,
        clamps: bool,
        config: Config,
    ) -> None:
        self.rank = group.rank
        self._group, self._geometry, self._clamps, self._config = group, geometry, clamps, config
        self._threads = are_threads(group)
        sizes = _sizes(geometry, intermediate)
        self._memory = memory_of_gpus(group, sizes.bytes, config)
        self._device = self._memory.device
        own = tuning_for(self._layer_of(intermediate), config) if group.rank == 0 else None
        self.tuning: FusedMoeTuning = group.all_gather(own)[0]
        self._reports = _Reports(group.rank)
        # Kernels of ranks that are threads wait for each other, so each has an order of its own.
        self._launches = (
            _LaunchOrder(self._device) if self._threads else _launch_order_of(self._device)
        )
        self._shared: dict[int, _SharedExpert] = {}
        error: Exception | None = None
        try:
            bases = [self._memory.base(rank) for rank in range(group.size)]
            self._main = self._kernel(geometry, intermediate, sizes, bases)
            self._memory.tensor[: sizes.zeroed].zero_()
            wait_for_kernels(self._memory)
        except Exception as failure:  # for want of memory, too
            error = failure
        # Kernels in flight may outlive this object, and write there.
        weakref.finalize(self, free_when_idle, self._device, self._reports).atexit = False
        try:
            # When all have come here, everybody's counters are zero.
            agree(group, {}, error)
        except BaseException:
            self._memory.close()
            raise

    def _layer_of(self, intermediate: int) -> TunedLayer:
        geometry = self._geometry
        return TunedLayer(
            gpu=torch.cuda.get_device_name(self._device),
            ranks=geometry.ranks,
            experts=geometry.num_experts,
            top_k=geometry.top_k,
            hidden=geometry.hidden,
            intermediate=intermediate,
            fast_accumulation=self._config.fast_accumulation,
        )

    def _kernel(
        self,
        geometry: Geometry,
        intermediate: int,
        sizes: _core.CudaFusedMoeSizes,
        bases: Sequence[int],
    ) -> _Kernel:
        swapped_tokens = self.tuning.swapped_tokens(geometry)
        fewest_and_most = (1, max(geometry.max_tokens, 1))
        forms = sorted({tokens <= swapped_tokens for tokens in fewest_and_most})
        sources = [
            kernel_source(
                geometry,
                intermediate,
                clamps=self._clamps,
                fast_accumulation=self._config.fast_accumulation,
                swap_ab=swap_ab,
            )
            for swap_ab in forms
        ]
        for source in sources:
            jit.refuse_in_capture(source)
        kernels = jit.load_all(sources, self._device.index, self._config)
        for kernel in kernels:
            kernel.allow_shared_bytes(_SHARED_BYTES)
        with torch.cuda.device(self._device):
            # A CTA counts calls, so it must take part in each.
            clusters = min(
                kernel.most_clusters(_THREADS, _SHARED_BYTES, _CLUSTER) for kernel in kernels
            )
        clusters //= self._group.size if self._threads else 1
        rank = self.rank if geometry.ranks > 1 else 0
        core = _core.CudaFusedMoe(sizes, rank, bases, self._reports.address)
        core.timeout_ns = int(self._config.timeout_s * 1e9)
        core.set_rows_for_groups(self.tuning.group_rows)
        ctas = min(_CLUSTER * clusters, _core.CUDA_FUSED_MOE_MOST_CTAS)
        return _Kernel(dict(zip(forms, kernels, strict=True)), swapped_tokens, core, ctas)

    def refuse(self, error: BaseException) -> None:
        """Aborts this call on all ranks because of ``error``."""
        del error  # the peers learn who refused, and look there
        alone = self._group.size == 1
        if alone or self._reports.fatal() or torch.cuda.is_current_stream_capturing():
            return
        with self._launches.next() as stream:
            self._main.refuse(stream)

    def run(self, call: FusedCall) -> torch.Tensor:
        """See :meth:`fanfold.FusedMoE.forward`; the call is checked."""
        self._check_usable()
        device = self._device
        shape = (call.tokens, self._geometry.hidden)
        with Refusing(self.refuse):
            out = call.out
            if out is None:
                out = torch.empty(shape, dtype=torch.bfloat16, device=device)
            addend = shared = None
            if call.shared_expert is not None and call.tokens > 0:
                shared = self._known_shared_expert(call.shared_expert.intermediate)
                addend = torch.empty(shape, dtype=torch.bfloat16, device=device)
            tokens = call.quantized()
        with self._launches.next() as stream:
            if shared is not None and call.shared_expert is not None and addend is not None:
                with Refusing(self.refuse):
                    shared.run(tokens, call.shared_expert, addend, stream, call.clamp)
            self._main.run(
                tokens,
                (call.topk_idx, call.topk_weights),
                call.weights,
                out,
                stream,
                addend=addend,
                statistics=call.statistics,
                clamp=call.clamp,
            )
        self.check()
        return out

    def prepare_shared_expert(self, intermediate: int) -> None:
        """See :meth:`fanfold.FusedMoE.prepare_shared_expert`."""
        self._check_usable()
        error: Exception | None = None
        try:
            if self._threads:
                wait_for_kernels(self._memory)
                self._group.all_gather(None)  # no kernel of any rank runs
            self._shared_expert(intermediate)
        except Exception as failure:
            error = failure
        agree(self._group, {"intermediate": intermediate}, error)

    def check(self) -> None:
        """Raises what earlier calls have found wrong since; does not wait for them."""
        self._check_usable()
        if self._reports.passing():
            raise self._reports.take(self._config.timeout_s)

    def spans(self) -> torch.Tensor:
        """From here on every call writes when its CTAs began, knew their rows, had stored their
        last tile of each GEMM, and ended, nanoseconds of the GPU's clock; then the cycles of its
        SM in between: ``[CTAs, 6]`` int64."""
        return self._main.spans(self._device)

    def close(self) -> None:
        """Releases the memory, when the calls so far have ended."""
        self._memory.close()
        self._shared.clear()

    def _check_usable(self) -> None:
        if self._reports.fatal():
            raise self._reports.take(self._config.timeout_s)
        self._memory.base(self.rank)  # raises if it is closed

    def _known_shared_expert(self, intermediate: int) -> _SharedExpert:
        if intermediate not in self._shared and self._threads:
            # The driver may wait for all kernels of the GPU before it loads one.
            raise UsageError(
                f"the kernel for a shared expert of {intermediate} columns is not loaded yet, and "
                "ranks are threads, whose kernels may wait for this one: call "
                f"prepare_shared_expert({intermediate}) on all of them first"
            )
        return self._shared_expert(intermediate)

    def _shared_expert(self, intermediate: int) -> _SharedExpert:
        known = self._shared.get(intermediate)
        if known is None:
            most = self._geometry.max_tokens
            geometry = Geometry(1, 1, 1, self._geometry.hidden, most)
            sizes = _sizes(geometry, intermediate)
            memory = torch.empty(sizes.bytes, dtype=torch.uint8, device=self._device)
            memory[: sizes.zeroed].zero_()
            kernel = self._kernel(geometry, intermediate, sizes, [memory.data_ptr()])
            known = _SharedExpert(kernel, memory, self._reports, most)
            self._shared[intermediate] = known
        return known


def most_rows(geometry: Geometry, intermediate: int) -> int:
    """Rows for which each rank has room: all that may come, each expert's in blocks of 128."""
    return _sizes(geometry, intermediate).rows


def _sizes(geometry: Geometry, intermediate: int) -> _core.CudaFusedMoeSizes:
    return _core.CudaFusedMoeSizes(
        ranks=geometry.ranks,
        experts=geometry.num_experts,
        top_k=geometry.top_k,
        hidden=geometry.hidden,
        intermediate=intermediate,
        tokens=geometry.max_tokens,
    )


class _Kernel:
    """A kernel in its forms with its arguments, and the CTAs that run it.

    Args:
        forms: the kernel by whether a and b are swapped, one or both.
        swapped_tokens: up to how many tokens they are, where there is a choice.
        core: makes arguments.
        ctas: of a launch.
    """

    def __init__(
        self,
        forms: Mapping[bool, _core.CudaKernel],
        swapped_tokens: int,
        core: _core.CudaFusedMoe,
        ctas: int,
    ) -> None:
        self._forms, self._swapped_tokens, self._core = forms, swapped_tokens, core
        self._shape = (ctas, _THREADS, _SHARED_BYTES)
        self._spans: torch.Tensor | None = None

    def spans(self, device: torch.device) -> torch.Tensor:
        if self._spans is None:
            shape = (self._shape[0], _core.CUDA_FUSED_MOE_SPAN_WORDS)
            self._spans = torch.zeros(shape, dtype=torch.int64, device=device)
            weakref.finalize(self, free_when_idle, device, self._spans).atexit = False
        return self._spans

    def refuse(self, stream: int) -> None:
        """Enqueues a call in which this rank takes no part."""
        self._core.refuse(self._form(0), *self._shape, stream)

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
        clamp: float | None = None,
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
        if clamp is not None:
            call.clamp = clamp
        self._core.launch(call, self._form(call.tokens), *self._shape, stream)

    def _form(self, tokens: int) -> _core.CudaKernel:
        if len(self._forms) == 1:
            return next(iter(self._forms.values()))
        return self._forms[tokens <= self._swapped_tokens]


class _SharedExpert:
    """A layer of one rank and one expert, which gets every token with weight 1."""

    def __init__(self, kernel: _Kernel, memory: torch.Tensor, reports: _Reports, most: int) -> None:
        self._kernel, device = kernel, memory.device
        self._idx = torch.zeros((most, 1), dtype=torch.int64, device=device)
        self._ones = torch.ones((most, 1), dtype=torch.float32, device=device)
        torch.cuda.current_stream(device).synchronize()  # calls may come on other streams
        # Kernels in flight may outlive this object, and use all of it.
        kept = (memory, self._idx, self._ones, reports)
        weakref.finalize(self, free_when_idle, device, kept).atexit = False

    def run(
        self,
        tokens: tuple[torch.Tensor, torch.Tensor],
        weights: ExpertWeights,
        out: torch.Tensor,
        stream: int,
        clamp: float | None,
    ) -> None:
        self._kernel.run(tokens, (self._idx, self._ones), weights, out, stream, clamp=clamp)


class _LaunchOrder:
    """Serializes launches on one GPU, whatever streams and threads they are made on.

    Args:
        device: with an index.
    """

    def __init__(self, device: torch.device) -> None:
        self._order = StreamOrder(device)
        self._lock = threading.RLock()  # a call that fails refuses inside of its block

    @contextmanager
    def next(self) -> Iterator[int]:
        """The current stream, which waits for all earlier launches; until the block ends,
        launches included, no other thread can launch."""
        with self._lock:
            yield self._order.follow()


_launch_orders: dict[int, _LaunchOrder] = {}
_making = threading.Lock()


def _launch_order_of(device: torch.device) -> _LaunchOrder:
    """Of all fused layers of the process on one GPU."""
    with _making:
        if device.index not in _launch_orders:
            _launch_orders[device.index] = _LaunchOrder(device)
        return _launch_orders[device.index]


class _Reports(KernelReports):
    """What the kernel reports."""

    _TIMEOUT, _INDEX, _REFUSED = range(3)
    _PASSING = (_REFUSED, _INDEX)

    def __init__(self, rank: int) -> None:
        super().__init__(_core.CUDA_FUSED_MOE_REPORT_BYTES)
        self._rank = rank

    def fatal(self) -> bool:
        """Whether a call has not come to its end."""
        return self._words[4 * self._TIMEOUT] != 0

    def passing(self) -> bool:
        """Whether there is a new report of something that concerns one call only."""
        return any(self._words[4 * kind] and self._is_new(kind) for kind in self._PASSING)

    def take(self, timeout_s: float) -> FanfoldError:
        """The gravest report as an exception; those of one call are new once only."""
        if self.fatal():
            return self._timeout(timeout_s)
        kind = next(kind for kind in self._PASSING if self._is_new(kind))
        call, number, first, second = self._words[4 * kind : 4 * kind + 4]
        self._raised[kind] = (call & 0xFF, number)
        if kind == self._REFUSED:
            reason = f"call {number}; its own exception says why"
            return PeerRefused(self._rank, call >> 8, "fused_moe", reason)
        place, value = self._choice(second)
        return ArgumentError(
            f"topk_idx[{first}, {place}] of call {number}",
            value,
            "from -1 (none) to num_experts - 1; it was taken for none",
        )

    def _timeout(self, timeout_s: float) -> FanfoldError:
        call, number, cta = self._words[:3]
        peer = call >> 8
        if peer != self._rank:
            phase = "fused_moe"
            return logged(
                PeerTimeout(self._rank, peer, phase, number, number - 1, timeout_s, False)
            )
        return UsageError(
            f"call {number} of this FusedMoE was given up: CTA {cta} of rank {peer} has waited for "
            f"another for {timeout_s:.3g} s (timeout_s, FANFOLD_TIMEOUT_S). All CTAs of all ranks "
            "must run at the same time: something else holds SMs of a GPU, such as another fused "
            "layer's graph or another process. Its result is wrong; make a new FusedMoE"
        )
