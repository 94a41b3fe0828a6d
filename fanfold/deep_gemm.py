"""Grouped FP8 products and fused MoE layers under DeepGEMM's names, for its layouts of Hopper
(SM90).

The arguments, layouts and results are those of DeepGEMM's functions of the same names, and of its
pull requests that bring MegaMoE to SM90. Nothing is compiled when the package is installed: a
kernel is compiled when it is first needed, for the sizes at hand. On CPU tensors PyTorch computes
the same, so that programs run anywhere.
"""

from __future__ import annotations

import torch
from torch.compiler import is_dynamo_compiling

from fanfold.errors import ArgumentError
from fanfold.formats import BLOCK
from fanfold.geometry import check_aligned, check_tensor
from fanfold.grouped_gemm import (
    MOST_DEPTH,
    Operands,
    Pair,
    multiply,
    pair_of,
    scales_for_kernel,
)
from fanfold.mega_moe import (
    SymmBuffer,
    fp8_mega_moe,
    get_symm_buffer_for_mega_moe,
    get_symm_buffer_for_sm90_mega_moe,
    transform_weights_for_mega_moe_sm90,
)
from fanfold.operators.define import NAMESPACE
from fanfold.representation import worded

__all__ = [
    "SymmBuffer",
    "fp8_mega_moe",
    "get_m_alignment_for_contiguous_layout",
    "get_mn_major_tma_aligned_tensor",
    "get_symm_buffer_for_mega_moe",
    "get_symm_buffer_for_sm90_mega_moe",
    "get_tma_aligned_size",
    "m_grouped_fp8_gemm_nt_contiguous",
    "m_grouped_fp8_gemm_nt_masked",
    "transform_weights_for_mega_moe_sm90",
]

_RECIPES = (None, (1, 128, 128))
_TMA_BYTES = 16


def m_grouped_fp8_gemm_nt_contiguous(
    a: Pair,
    b: Pair,
    d: torch.Tensor,
    m_indices: torch.Tensor,
    recipe: tuple[int, int, int] | None = None,
    compiled_dims: str = "nk",
    disable_ue8m0_cast: bool = False,
    *,
    fast_accumulation: bool = False,
) -> None:
    """``d[i] = a[i] @ b[m_indices[i]].T`` for all rows ``i``, whose groups follow each other.

    Args:
        a: ``[M, K]`` e4m3, contiguous, and ``[M, K / 128]`` float32 scales, with any strides;
            with those of :func:`get_mn_major_tma_aligned_tensor` nothing is copied.
        b: ``[G, N, K]`` e4m3, contiguous, and ``[G, N / 128, K / 128]`` float32 scales, contiguous.
        d: ``[M, N]`` bfloat16, contiguous; written, but for rows of no group.
        m_indices: ``[M]`` int32: the group of each row, or -1. Each group begins at a multiple of
            128 (:func:`get_m_alignment_for_contiguous_layout`), and -1 stands from a group's end
            to the next multiple; what is written to rows between is undefined.
        recipe: of the scales, None or ``(1, 128, 128)``.
        compiled_dims, disable_ue8m0_cast: change nothing here.
        fast_accumulation: the tensor cores keep the sums, about 5% faster with thousands of rows.
            They keep about 14 bits: a sum of thousands of terms of one sign comes out several
            percent too small. Scales must be positive then, or 0. DeepGEMM, which has no such
            argument, adds each 128 terms in FP32, as is done here without it.

    ``K`` is a multiple of 128, at most 16384; ``N`` a multiple of 64.

    Raises:
        ArgumentError: for the first argument that is not so.
        UnavailableError: on a GPU that is not of compute capability 9.0, or without NVRTC.
        UsageError: a CUDA graph is being captured, and these sizes have not been called before.

    >>> import torch
    >>> from fanfold import deep_gemm
    >>> ones = torch.ones(256, 128).to(torch.float8_e4m3fn), torch.ones(256, 1)
    >>> scales = torch.tensor([1.0, 3.0]).view(2, 1, 1)
    >>> weights = torch.ones(2, 64, 128).to(torch.float8_e4m3fn), scales
    >>> d = torch.empty(256, 64, dtype=torch.bfloat16)
    >>> groups = torch.tensor([0, 1], dtype=torch.int32).repeat_interleave(128)
    >>> deep_gemm.m_grouped_fp8_gemm_nt_contiguous(ones, weights, d, groups)
    >>> d[0, 0].item(), d[255, 63].item()
    (128.0, 384.0)
    """
    _check_options(recipe, compiled_dims, disable_ue8m0_cast)
    if is_dynamo_compiling():
        _operator(*pair_of("a", a), *pair_of("b", b), d, m_indices, None, fast_accumulation)
        return
    device, groups, columns, depth = _check_weights(b)
    rows, scales = _check_rows(a, ("M", depth), d, columns, device)
    count = rows.shape[0]
    check_tensor("m_indices", m_indices, (count,), (torch.int32,), device=device)
    operands = Operands(rows[None], scales[None], *b, m_indices, masked=False)
    multiply(operands, d[None], count // groups, fast_accumulation)


def m_grouped_fp8_gemm_nt_masked(
    a: Pair,
    b: Pair,
    d: torch.Tensor,
    masked_m: torch.Tensor,
    expected_m: int,
    recipe: tuple[int, int, int] | None = None,
    compiled_dims: str = "nk",
    disable_ue8m0_cast: bool = False,
    *,
    fast_accumulation: bool = False,
) -> None:
    """``d[g, :n] = a[g, :n] @ b[g].T`` for all groups ``g``, with ``n = masked_m[g]``.

    The number of rows stays on the GPU, so a CUDA graph may hold the call.

    Args:
        a: ``[G, M, K]`` e4m3, contiguous, and ``[G, M, K / 128]`` float32 scales, with any strides;
            with those of :func:`get_mn_major_tma_aligned_tensor` nothing is copied.
        b: ``[G, N, K]`` e4m3, contiguous, and ``[G, N / 128, K / 128]`` float32 scales, contiguous.
        d: ``[G, M, N]`` bfloat16, contiguous; what is written behind a group's rows is undefined.
        masked_m: ``[G]`` int32, the rows of each group, 0 to M.
        expected_m: the rows that a group most likely has; decides how fast it is, not the
            result.
        recipe: of the scales, None or ``(1, 128, 128)``.
        compiled_dims, disable_ue8m0_cast: change nothing here.
        fast_accumulation: as there; changes nothing where ``expected_m`` is at most 64.

    Sizes and errors are those of :func:`m_grouped_fp8_gemm_nt_contiguous`.

    >>> import torch
    >>> from fanfold import deep_gemm
    >>> ones = torch.ones(2, 4, 128).to(torch.float8_e4m3fn), torch.ones(2, 4, 1)
    >>> weights = torch.ones(2, 64, 128).to(torch.float8_e4m3fn), torch.ones(2, 1, 1)
    >>> d = torch.zeros(2, 4, 64, dtype=torch.bfloat16)
    >>> rows = torch.tensor([4, 1], dtype=torch.int32)
    >>> deep_gemm.m_grouped_fp8_gemm_nt_masked(ones, weights, d, rows, expected_m=2)
    >>> d[0, 3, 0].item(), d[1, 0, 0].item()
    (128.0, 128.0)
    """
    _check_options(recipe, compiled_dims, disable_ue8m0_cast)
    if is_dynamo_compiling():
        _operator(*pair_of("a", a), *pair_of("b", b), d, masked_m, expected_m, fast_accumulation)
        return
    device, groups, columns, depth = _check_weights(b)
    rows, scales = _check_rows(a, (groups, "M", depth), d, columns, device)
    check_tensor("masked_m", masked_m, (groups,), (torch.int32,), device=device)
    if type(expected_m) is not int or expected_m < 0:
        raise ArgumentError("expected_m", worded(expected_m), "an int, 0 or more")
    operands = Operands(rows, scales, *b, masked_m, masked=True)
    multiply(operands, d, expected_m, fast_accumulation)


def _run(
    a: torch.Tensor,
    a_scales: torch.Tensor,
    b: torch.Tensor,
    b_scales: torch.Tensor,
    d: torch.Tensor,
    groups: torch.Tensor,
    expected_m: int | None,
    fast_accumulation: bool,
) -> None:
    pairs = (a, a_scales), (b, b_scales)
    if expected_m is None:
        m_grouped_fp8_gemm_nt_contiguous(*pairs, d, groups, fast_accumulation=fast_accumulation)
    else:
        m_grouped_fp8_gemm_nt_masked(
            *pairs, d, groups, expected_m, fast_accumulation=fast_accumulation
        )


_operator = torch.library.custom_op(
    f"{NAMESPACE}::grouped_gemm",
    _run,
    mutates_args=("d",),
    schema="(Tensor a, Tensor a_scales, Tensor b, Tensor b_scales, Tensor(a!) d, Tensor groups, "
    "int? expected_m, bool fast_accumulation) -> ()",
)
"""Either call as ``torch.compile`` traces it; it looks at the tensors when it runs."""
_operator.register_fake(lambda *_: None)


def get_m_alignment_for_contiguous_layout() -> int:
    """Rows at whose multiples the groups of :func:`m_grouped_fp8_gemm_nt_contiguous` begin: 128.

    >>> from fanfold import deep_gemm
    >>> deep_gemm.get_m_alignment_for_contiguous_layout()
    128
    """
    return BLOCK


def get_tma_aligned_size(x: int, element_size: int) -> int:
    """``x`` elements, rounded up to a multiple of 16 bytes.

    >>> from fanfold import deep_gemm
    >>> deep_gemm.get_tma_aligned_size(5, 4)
    8
    """
    if element_size <= 0 or _TMA_BYTES % element_size:
        raise ArgumentError("element_size", element_size, "1, 2, 4, 8 or 16")
    elements = _TMA_BYTES // element_size
    return -(-x // elements) * elements


def get_mn_major_tma_aligned_tensor(x: torch.Tensor) -> torch.Tensor:
    """Scales ``[M, K / 128]`` or ``[G, M, K / 128]`` float32 as kernels read them: rows innermost,
    each column on a multiple of 16 bytes; ``x`` itself where it is so already.

    >>> import torch
    >>> from fanfold import deep_gemm
    >>> deep_gemm.get_mn_major_tma_aligned_tensor(torch.ones(6, 2)).stride()
    (1, 8)
    """
    if x.dim() not in (2, 3) or x.dtype != torch.float32:
        bound = "float32 scales of shape (M, K / 128) or (G, M, K / 128)"
        raise ArgumentError("x", f"{x.dtype} of shape {tuple(x.shape)}", bound)
    return scales_for_kernel(x) if x.dim() == 3 else scales_for_kernel(x[None])[0]


def _check_options(recipe: object, compiled_dims: object, disable_ue8m0_cast: object) -> None:
    if recipe not in _RECIPES:
        raise ArgumentError("recipe", recipe, "None or (1, 128, 128)")
    if type(compiled_dims) is not str or set(compiled_dims) - set("mnk"):
        raise ArgumentError("compiled_dims", worded(compiled_dims), "of the letters m, n, k")
    if type(disable_ue8m0_cast) is not bool:
        raise ArgumentError("disable_ue8m0_cast", worded(disable_ue8m0_cast), "a bool")


def _check_rows(
    a: object, shape: tuple[int | str, ...], d: object, columns: int, device: torch.device
) -> Pair:
    """The rows and their scales, of which ``d`` takes the results."""
    values, scales = pair_of("a", a)
    check_tensor("a[0]", values, shape, (torch.float8_e4m3fn,), device=device)
    check_aligned("a[0]", values)
    *leading, depth = values.shape
    shape = (*leading, depth // BLOCK)
    check_tensor("a[1]", scales, shape, (torch.float32,), device=device, contiguous=False)
    check_aligned("d", check_tensor("d", d, (*leading, columns), (torch.bfloat16,), device=device))
    return values, scales


def _check_weights(b: object) -> tuple[torch.device, int, int, int]:
    """The device, groups, columns and depth of the weights."""
    values, scales = pair_of("b", b)
    check_tensor("b[0]", values, ("G", "N", "K"), (torch.float8_e4m3fn,))
    groups, columns, depth = values.shape
    if groups == 0:
        raise ArgumentError("b[0].shape[0]", groups, "at least 1 group")
    if columns == 0 or columns % 64:
        raise ArgumentError("b[0].shape[1]", columns, "a multiple of 64, and not 0")
    if depth == 0 or depth % BLOCK or depth > MOST_DEPTH:
        raise ArgumentError("b[0].shape[2]", depth, f"a multiple of {BLOCK} up to {MOST_DEPTH}")
    check_aligned("b[0]", values)
    shape = (groups, -(-columns // BLOCK), depth // BLOCK)
    check_tensor("b[1]", scales, shape, (torch.float32,), device=values.device)
    return values.device, groups, columns, depth
