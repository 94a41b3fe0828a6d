"""A whole FP8 MoE layer under the names of DeepGEMM's MegaMoE for Hopper (SM90), over
:class:`fanfold.FusedMoE`."""

from __future__ import annotations

import math

import torch

from fanfold.base_dispatcher import GroupLike
from fanfold.config import Config, Overrides
from fanfold.copying import not_copied
from fanfold.errors import ArgumentError, UsageError
from fanfold.formats import BLOCK
from fanfold.fused_moe import ExpertWeights, FusedMoE
from fanfold.fused_moe.call import checked_clamp
from fanfold.geometry import check_aligned, check_tensor
from fanfold.group import as_group, together
from fanfold.grouped_gemm import Pair, pair_of
from fanfold.refusal import Refusing
from fanfold.renaming import Renaming
from fanfold.representation import described, worded

__all__ = [
    "SymmBuffer",
    "fp8_mega_moe",
    "get_symm_buffer_for_mega_moe",
    "get_symm_buffer_for_sm90_mega_moe",
    "transform_weights_for_mega_moe_sm90",
]

_RECIPE = (BLOCK, BLOCK, BLOCK)

_SIZES = Renaming(
    {
        "max_tokens": "num_max_tokens_per_rank",
        "top_k": "num_topk",
        "intermediate": "intermediate_hidden",
    }
)
"""What FusedMoE's sizes are called here."""

_WEIGHTS = {
    "l1": "l1_weights[0]",
    "l1_scales": "l1_weights[1]",
    "l2": "l2_weights[0]",
    "l2_scales": "l2_weights[1]",
}
_TRANSFORMED = Renaming(_WEIGHTS)
_CALL = Renaming(
    {
        **_WEIGHTS,
        "weights.l1": "l1_weights[0]",
        "weights.l2": "l2_weights[0]",
        "x[0]": "sym_buffer.x",
        "x[1]": "sym_buffer.x_sf",
        "topk_idx": "sym_buffer.topk_idx",
        "topk_weights": "sym_buffer.topk_weights",
        "statistics": "cumulative_local_expert_recv_stats",
    }
)
"""What the tensors of a FusedMoE's call are called here."""


@not_copied(
    why="it holds memory that the ranks of its group share",
    instead="Make one in each process with the same arguments; several layers may use one.",
)
class SymmBuffer:
    """Where the tokens of a call are written, and the memory that the ranks share.

    Made by :func:`get_symm_buffer_for_mega_moe`, whose docstring says what the sizes are. Layers of
    equal sizes can use one buffer in turn.

        >>> from fanfold import deep_gemm
        >>> buffer = deep_gemm.get_symm_buffer_for_mega_moe(group, 4, 16, 2, 256, 128)
        >>> buffer.x.dtype, buffer.x_sf.shape, buffer.topk_idx.shape
        (torch.float8_e4m3fn, torch.Size([16, 2]), torch.Size([16, 2]))
        >>> buffer.destroy()

    Attributes:
        x: ``[num_max_tokens_per_rank, hidden]`` float8_e4m3fn.
        x_sf: ``[num_max_tokens_per_rank, hidden / 128]`` float32, the scales of ``x``.
        topk_idx: ``[num_max_tokens_per_rank, num_topk]`` int64, -1 for none.
        topk_weights: ``[num_max_tokens_per_rank, num_topk]`` float32.

    The tensors are 0 at first, and no call writes to them. ``group`` and the sizes are attributes,
    too, as given; DeepGEMM rounds ``num_max_tokens_per_rank`` up. Attributes that only DeepGEMM's
    kernels use do not exist here. A buffer cannot be copied or pickled (CopyError).
    """

    def __init__(
        self,
        group: GroupLike,
        num_experts: int,
        num_max_tokens_per_rank: int,
        num_topk: int,
        hidden: int,
        intermediate_hidden: int,
        config: Config,
    ) -> None:
        self.group = group
        self.num_experts, self.num_topk = num_experts, num_topk
        self.num_max_tokens_per_rank = num_max_tokens_per_rank
        self.hidden, self.intermediate_hidden = hidden, intermediate_hidden
        self._destroyed = False
        with _SIZES:
            self._layer = FusedMoE(
                group,
                num_experts=num_experts,
                top_k=num_topk,
                hidden=hidden,
                intermediate=intermediate_hidden,
                max_tokens=num_max_tokens_per_rank,
                activation_clamp=math.inf,
                config=config,
            )
        device = self._layer.device
        most = num_max_tokens_per_rank
        shape, blocks, entries = (most, hidden), (most, hidden // BLOCK), (most, num_topk)
        self.x = torch.zeros(shape, dtype=torch.uint8, device=device).view(torch.float8_e4m3fn)
        self.x_sf = torch.zeros(blocks, dtype=torch.float32, device=device)
        self.topk_idx = torch.zeros(entries, dtype=torch.int64, device=device)
        self.topk_weights = torch.zeros(entries, dtype=torch.float32, device=device)

    def destroy(self) -> None:
        """Releases the memory that the ranks share. Not collective; harmless when repeated."""
        self._destroyed = True
        self._layer.close()

    def __repr__(self) -> str:
        names = (
            "num_experts", "num_max_tokens_per_rank", "num_topk", "hidden", "intermediate_hidden"
        )  # fmt: skip
        state = "destroyed" if getattr(self, "_destroyed", False) else ""
        return described(self, state, **{name: name for name in names})


def get_symm_buffer_for_mega_moe(
    group: GroupLike,
    num_experts: int,
    num_max_tokens_per_rank: int,
    num_topk: int,
    hidden: int,
    intermediate_hidden: int,
    use_fp8_dispatch: bool = True,
    activation: str = "swiglu",
    *,
    num_experts_per_wave: int | None = None,
    l2_act_sf_gran_k: int | None = None,
    fast_accumulation: bool | None = None,
) -> SymmBuffer:
    """Makes the buffer that :func:`fp8_mega_moe` takes. Collective.

        >>> from fanfold import deep_gemm
        >>> deep_gemm.get_symm_buffer_for_mega_moe(group, 4, 16, 2, 256, 128).x.shape
        torch.Size([16, 256])

    Args:
        group: a ``torch.distributed`` group of any backend.
        num_experts: experts of all ranks, a multiple of the ranks.
        num_max_tokens_per_rank: most tokens that a rank passes to one call.
        num_topk: experts per token, 1 to 32.
        hidden: columns of a token, a multiple of 128.
        intermediate_hidden: columns between the GEMMs, a multiple of 128.
        use_fp8_dispatch: True.
        activation: ``"swiglu"``.
        num_experts_per_wave: an argument of a later pull request; changes nothing here.
        l2_act_sf_gran_k: of the same; None or 128, the columns between the GEMMs that have a scale.
        fast_accumulation: not DeepGEMM's: whether the tensor cores may keep the sums of calls over
            this buffer, as in :func:`m_grouped_fp8_gemm_nt_contiguous`; on GPUs alone. None for the
            setting ``FANFOLD_FAST_ACCUMULATION``.

    Sizes and backends are those of :class:`fanfold.FusedMoE`, with the settings of the environment.

    Raises:
        ArgumentError: an argument that is not so, or ranks that disagree about a size; on all ranks
            alike.
        UnavailableError: the ranks cannot share memory, or ``FANFOLD_BACKEND`` is ``cuda`` and the
            kernel does not serve this layer.
    """
    with together(as_group(group)):
        if use_fp8_dispatch is not True:
            raise ArgumentError("use_fp8_dispatch", worded(use_fp8_dispatch), "True")
        _check_activation(activation)
        _check_or_none("num_experts_per_wave", num_experts_per_wave, int)
        if l2_act_sf_gran_k not in (None, BLOCK):
            raise ArgumentError("l2_act_sf_gran_k", worded(l2_act_sf_gran_k), f"{BLOCK} or None")
        _check_or_none("fast_accumulation", fast_accumulation, bool)
        settings: Overrides = {}
        if fast_accumulation is not None:
            settings["fast_accumulation"] = fast_accumulation
        config = Config.resolve(**settings)
    return SymmBuffer(
        group, num_experts, num_max_tokens_per_rank, num_topk, hidden, intermediate_hidden, config
    )


get_symm_buffer_for_sm90_mega_moe = get_symm_buffer_for_mega_moe


def transform_weights_for_mega_moe_sm90(l1_weights: Pair, l2_weights: Pair) -> tuple[Pair, Pair]:
    """Checks the weights of this rank's experts, and returns what :func:`fp8_mega_moe` takes.

    What is returned holds the same tensors: nothing is copied. DeepGEMM's function interleaves the
    rows of the gate with those of the up projection. Callers are to pass on what this function
    returns, whatever its layout; weights that DeepGEMM has transformed give wrong results here.

        >>> from fanfold import deep_gemm
        >>> l1 = torch.ones(4, 2 * 128, 256).to(torch.float8_e4m3fn), torch.ones(4, 2, 2)
        >>> l2 = torch.ones(4, 256, 128).to(torch.float8_e4m3fn), torch.ones(4, 2, 1)
        >>> (values, scales), _ = deep_gemm.transform_weights_for_mega_moe_sm90(l1, l2)
        >>> values.shape, scales.shape
        (torch.Size([4, 256, 256]), torch.Size([4, 2, 2]))

    Args:
        l1_weights: ``[E, 2 * intermediate_hidden, hidden]`` float8_e4m3fn, the gate's rows before
            the up projection's, and their scales ``[E, 2 * intermediate_hidden / 128,
            hidden / 128]`` float32.
        l2_weights: ``[E, hidden, intermediate_hidden]`` float8_e4m3fn, and their scales
            ``[E, hidden / 128, intermediate_hidden / 128]`` float32.

    Raises:
        ArgumentError: a tensor has another shape, dtype, device or memory layout, or a scale on the
            CPU is not finite.
    """
    with _TRANSFORMED:
        weights = _weights(l1_weights, l2_weights)
    return (weights.l1, weights.l1_scales), (weights.l2, weights.l2_scales)


def fp8_mega_moe(
    y: torch.Tensor,
    l1_weights: Pair,
    l2_weights: Pair,
    sym_buffer: SymmBuffer,
    cumulative_local_expert_recv_stats: torch.Tensor | None = None,
    recipe: tuple[int, int, int] = _RECIPE,
    activation: str = "swiglu",
    activation_clamp: float | None = None,
    fast_math: bool = True,
    *,
    num_tokens_bound: int | None = None,
) -> None:
    """Sends the tokens in ``sym_buffer`` to their experts and writes the sums of the results to
    ``y``. Collective.

    For each slot, a top-k entry that is not -1, an expert computes
    ``silu(min(gate, c)) * clamp(up, -c, c) * weight`` with ``c = activation_clamp``, quantises it
    with a scale for each 128 columns, and multiplies it with its second weights. A token's slots
    are summed in FP32. ``docs/fused_moe.md`` has the arithmetic.

        >>> from fanfold import deep_gemm
        >>> buffer = deep_gemm.get_symm_buffer_for_mega_moe(group, 1, 16, 1, 256, 128)
        >>> ones = lambda *shape: torch.ones(shape, device=buffer.x.device)
        >>> l1 = ones(1, 2 * 128, 256).to(torch.float8_e4m3fn), ones(1, 2, 2) / 256
        >>> l2 = ones(1, 256, 128).to(torch.float8_e4m3fn), ones(1, 2, 1) / 128
        >>> l1, l2 = deep_gemm.transform_weights_for_mega_moe_sm90(l1, l2)
        >>> y = ones(3, 256).bfloat16()
        >>> buffer.x[:3].copy_(y).shape
        torch.Size([3, 256])
        >>> buffer.x_sf[:3], buffer.topk_idx[:3], buffer.topk_weights[:3] = 1.0, 0, 2.0
        >>> deep_gemm.fp8_mega_moe(y, l1, l2, buffer)
        >>> y[2, 255].item()  # 2 * silu(1) * 1
        1.4609375
        >>> buffer.destroy()

    Args:
        y: ``[num_tokens, hidden]`` bfloat16, contiguous, 0 <= num_tokens <=
            num_max_tokens_per_rank; written. The first ``num_tokens`` rows of the buffer's tensors
            are the tokens; the number may differ between ranks.
        l1_weights, l2_weights: what :func:`transform_weights_for_mega_moe_sm90` returned.
        sym_buffer: what :func:`get_symm_buffer_for_mega_moe` returned.
        cumulative_local_expert_recv_stats: ``[num_experts / ranks]`` int32, to which the number of
            received slots of each local expert is added; or None.
        recipe: ``(128, 128, 128)``.
        activation: ``"swiglu"``.
        activation_clamp: a positive number, or None for no limit.
        fast_math: changes nothing here.
        num_tokens_bound: an argument of a later pull request, at least num_tokens if given (0 and
            None: not given); changes nothing here.

    Options (from ``recipe`` on) must be the same on all ranks; calls on a GPU, CUDA graphs and late
    errors are as those of :meth:`fanfold.FusedMoE.forward`.

    Raises:
        ArgumentError: bad input. For tensors the call is aborted on all ranks (the others raise
            PeerRefused), and the buffer stays usable.
        PeerRefused: another rank refused its input; the buffer stays usable.
        PeerTimeout: a peer did not arrive in time; destroy the buffer.
        UsageError: the buffer is destroyed, or it failed earlier.
    """
    _check_options(sym_buffer, recipe, activation, fast_math)
    clamp = checked_clamp(activation_clamp)
    if sym_buffer._destroyed:
        raise UsageError("this SymmBuffer is destroyed; make a new one")
    layer = sym_buffer._layer
    with _CALL:
        with Refusing(layer.refuse):
            tokens = _check_output(y, layer, num_tokens_bound)
            weights = _weights(l1_weights, l2_weights)
        layer.forward(
            (sym_buffer.x[:tokens], sym_buffer.x_sf[:tokens]),
            sym_buffer.topk_idx[:tokens],
            sym_buffer.topk_weights[:tokens],
            weights,
            statistics=cumulative_local_expert_recv_stats,
            out=y,
            activation_clamp=math.inf if clamp is None else clamp,
        )


def _check_or_none(name: str, value: object, kind: type) -> None:
    if value is not None and type(value) is not kind:
        article = "an" if kind is int else "a"
        raise ArgumentError(name, worded(value), f"{article} {kind.__name__} or None")


def _check_activation(activation: object) -> None:
    if activation != "swiglu":
        raise ArgumentError("activation", worded(activation), "'swiglu'")


def _check_options(
    sym_buffer: object, recipe: object, activation: object, fast_math: object
) -> None:
    if not isinstance(sym_buffer, SymmBuffer):
        bound = "what get_symm_buffer_for_mega_moe returned"
        raise ArgumentError("sym_buffer", worded(sym_buffer), bound)
    if recipe != _RECIPE:
        raise ArgumentError("recipe", recipe, str(_RECIPE))
    _check_activation(activation)
    if type(fast_math) is not bool:
        raise ArgumentError("fast_math", worded(fast_math), "a bool")


def _check_output(y: object, layer: FusedMoE, bound: object) -> int:
    """How many tokens ``y`` has rows for, of which ``bound`` is num_tokens_bound."""
    shape = ("num_tokens", layer.hidden)
    checked = check_tensor("y", y, shape, (torch.bfloat16,), device=layer.device)
    if layer.backend == "cuda":
        check_aligned("y", checked)
    tokens, most = checked.shape[0], layer.max_tokens
    if tokens > most:
        raise ArgumentError("y.shape[0]", tokens, f"at most num_max_tokens_per_rank = {most}")
    if bound is not None and (type(bound) is not int or 0 != bound < tokens):
        least = f"at least the {tokens} tokens of y, or 0 or None"
        raise ArgumentError("num_tokens_bound", worded(bound), least)
    return tokens


def _weights(l1_weights: object, l2_weights: object) -> ExpertWeights:
    return ExpertWeights(*pair_of("l1_weights", l1_weights), *pair_of("l2_weights", l2_weights))
