"""The routed experts of a layer through a FusedMoE: FP8 copies of their weights, and the calls.

A copy must hold what its parameter holds. It is made again when the parameter has other memory,
when PyTorch has counted a write to it (``Tensor._version``), when an optimizer that has the
parameter has made a step (of DTensors its foreach kernels are not counted), and when the layer
says so (:meth:`FusedExperts.forget`).
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Iterable

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.optim.optimizer import register_optimizer_step_post_hook

from fanfold.errors import UsageError
from fanfold.formats import BLOCK
from fanfold.fused_moe import ExpertWeights, FusedMoE, quantize_weights
from fanfold.nn.sharding import ShardedExperts
from fanfold.nn.statistics import MoEStatistics
from fanfold.refusal import Refusing
from fanfold.renaming import Renaming

__all__ = ["FusedExperts"]

_SCALE_BYTES = 4
_QUANTIZABLE = (torch.bfloat16, torch.float32)


class FusedExperts:
    """Calls of one layer to a FusedMoE, with FP8 copies of its experts' weights.

    The copies stay in the same memory when they are made again, so that CUDA graphs read the new
    values, and they are kept until this object is freed, as graphs may hold them.

    Args:
        statistics: of the layer, to count in.
    """

    def __init__(self, statistics: MoEStatistics) -> None:
        self._statistics = statistics
        self._weights: ExpertWeights | None = None
        self._copied: tuple[tuple[object, ...], ...] = ()
        self._first_expert = 0
        self._last_call: torch.cuda.Event | None = None

    def attach(self, fused: FusedMoE) -> None:
        """Prepares calls of ``fused``."""
        self.forget()
        self._first_expert = fused.rank * fused.experts_per_rank
        _optimizers.watch(self)
        if fused.backend == "cuda":
            self._statistics.prepare_replays(fused.device)

    def forget(self) -> None:
        """Makes the next call copy the weights again, whatever is known of them."""
        self._copied = ()

    def forget_if_of(self, changed: set[int]) -> None:
        """:meth:`forget`, if one of the ids in ``changed`` is that of a parameter."""
        if any(state[0] in changed for state in self._copied):
            self.forget()

    def run(
        self,
        fused: FusedMoE,
        layer: ShardedExperts,
        rows: torch.Tensor,
        routing: tuple[torch.Tensor, torch.Tensor],
    ) -> torch.Tensor:
        """What ``fused`` makes of this rank's tokens. Collective.

        Args:
            fused: of the layer's sizes.
            layer: has the parameters.
            rows: ``[T, width]`` bfloat16, contiguous.
            routing: topk_idx and topk_weights.

        Raises:
            UsageError: a gradient is wanted, or the copies are out of date while a CUDA graph is
                captured, or FSDP manages the experts.
            ArgumentError: weights are not finite.
            PeerRefused, PeerTimeout: as :meth:`fanfold.FusedMoE.forward`.
        """
        with Refusing(fused.refuse):
            _check_no_gradient((rows, *routing, *layer.expert_parameters()))
            with torch.no_grad():
                weights = self._current(layer)
                counts = torch.zeros(weights.experts, dtype=torch.int32, device=fused.device)
        begin = time.perf_counter()
        out = fused.forward(rows, *routing, weights, statistics=counts)
        self._statistics.fused_seconds += time.perf_counter() - begin
        self._mark_call(fused.device)
        self._statistics.count_rows(rows.shape[0], counts)
        remote, width = _remote_entries(fused, routing[0]), rows.shape[1]
        self._statistics.count_bytes("bytes_sent", remote, width + width // BLOCK * _SCALE_BYTES)
        self._statistics.count_bytes("bytes_returned", remote, width * out.element_size())
        return out

    @torch.no_grad()
    def copy(self, layer: ShardedExperts) -> None:
        """Copies the weights of ``layer`` now. Not collective; waits for the GPU.

        Raises:
            ArgumentError: weights are not finite; calls will raise it until they are.
            UsageError: FSDP manages the experts, or a CUDA graph is being captured.
        """
        self.forget()
        self._current(layer)

    def _current(self, layer: ShardedExperts) -> ExpertWeights:
        _check_not_fsdp(layer)
        parameters = tuple(layer.expert_parameters())
        local = layer.local_weights()
        state = tuple(map(_state, layer.expert_names(), parameters, local))
        if self._weights is not None and state == self._copied:
            return self._weights
        device = local[0].device
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise UsageError(
                "a CUDA graph is being captured, and the layer has no FP8 copy of its experts' "
                "weights as they are now; call layer.quantize_experts() before the capture"
            )
        self.forget()  # if copying fails half-way, nothing is up to date
        weights = self._weights
        if weights is None or weights.l1.device != device or weights.l1.shape != local[0].shape:
            weights = _empty_copies(*local)
        elif self._last_call is not None:
            torch.cuda.current_stream(device).wait_event(self._last_call)
        self._copy_all("w_in", local[0], weights.l1, weights.l1_scales)
        self._copy_all("w_out", local[1], weights.l2, weights.l2_scales)
        if device.type == "cuda":  # the next call may be on another stream
            torch.cuda.current_stream(device).synchronize()
        self._weights, self._copied = weights, state
        return weights

    def _copy_all(
        self, name: str, source: torch.Tensor, values: torch.Tensor, scales: torch.Tensor
    ) -> None:
        """Quantises ``source``, one expert at a time to need less memory."""
        for expert, matrix in enumerate(source):
            with Renaming({"weights": f"{name}[{self._first_expert + expert}]"}):
                known = matrix if matrix.dtype in _QUANTIZABLE else matrix.float()
                fresh_values, fresh_scales = quantize_weights(known)
            values[expert].copy_(fresh_values)
            scales[expert].copy_(fresh_scales)

    def _mark_call(self, device: torch.device) -> None:
        """Notes where the copies were read last; replays of graphs follow their stream instead."""
        if device.type != "cuda" or torch.cuda.is_current_stream_capturing():
            return
        if self._last_call is None:
            self._last_call = torch.cuda.Event()
        self._last_call.record(torch.cuda.current_stream(device))


def _empty_copies(w_in: torch.Tensor, w_out: torch.Tensor) -> ExpertWeights:
    """Copies without values, in memory that calls of any mode of autograd may write."""
    tensors = []
    with torch.inference_mode(False):
        for source in (w_in, w_out):
            experts, rows, columns = source.shape
            blocks = (experts, rows // BLOCK, columns // BLOCK)
            device = source.device
            tensors.append(torch.empty(source.shape, dtype=torch.float8_e4m3fn, device=device))
            tensors.append(torch.ones(blocks, dtype=torch.float32, device=device))
        return ExpertWeights(*tensors)


def _remote_entries(fused: FusedMoE, topk_idx: torch.Tensor) -> torch.Tensor:
    """Top-k entries whose experts are on other ranks, a scalar where ``topk_idx`` is."""
    ranks = topk_idx // fused.experts_per_rank
    return ((topk_idx >= 0) & (ranks != fused.rank)).sum()


# ---- checks -------------------------------------------------------------------------------------


def _check_no_gradient(tensors: Iterable[torch.Tensor]) -> None:
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
        raise UsageError(
            "nn.MoE over a FusedMoE has no backward pass, but an input or a parameter requires a "
            "gradient; infer under torch.no_grad(), or train with a fanfold.HighThroughput as "
            "layer.dispatcher"
        )


def _check_not_fsdp(layer: ShardedExperts) -> None:
    """FSDP fills the memory of parameters before each pass, which nobody counts. Parameters that
    it makes have no attributes of the layer's, other than those that it was told to ignore."""
    if not getattr(layer, "_is_fsdp_managed_module", False):
        return
    if all(getattr(each, "expert_parallel", False) for each in layer.expert_parameters()):
        return
    raise UsageError(
        "FSDP manages the experts of this nn.MoE, so it cannot keep the FP8 copies that a FusedMoE "
        "needs; spread the experts over several ranks and pass what "
        "fanfold.nn.prepare_data_parallel returns as ignored_params, or infer with a "
        "fanfold.LowLatency as layer.dispatcher"
    )


def _state(name: str, parameter: torch.Tensor, local: torch.Tensor) -> tuple[object, ...]:
    """The parameter's id, and more that differs if PyTorch knows of a change since.

    It holds the storage weakly, so that other memory at the same address is not taken for it."""
    if parameter.is_inference() or local.is_inference():
        raise UsageError(
            f"{name} was made under torch.inference_mode(), where PyTorch does not count changes; "
            "make the layer, or what was assigned to it, outside of it"
        )
    place = (StorageWeakRef(local.untyped_storage()), local.storage_offset(), local.stride())
    versions = (parameter._version, local._version)
    return (id(parameter), *place, local.dtype, local.shape, *versions)


# ---- optimizers ---------------------------------------------------------------------------------


class _Optimizers:
    """Has copies made again when an optimizer has made a step with one of their parameters.

    It knows parameters by their id, as PyTorch cannot move a DTensor that has weak references."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._hook: object = None
        self._copies: weakref.WeakSet[FusedExperts] = weakref.WeakSet()

    def watch(self, copies: FusedExperts) -> None:
        with self._lock:
            self._copies.add(copies)
            if self._hook is None:
                self._hook = register_optimizer_step_post_hook(self._stepped)

    def _stepped(self, optimizer: torch.optim.Optimizer, *unused: object) -> None:
        del unused
        with self._lock:
            copies = list(self._copies)
        if not copies:
            return
        changed = {id(each) for group in optimizer.param_groups for each in group["params"]}
        for each in copies:
            each.forget_if_of(changed)


_optimizers = _Optimizers()
