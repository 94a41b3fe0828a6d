"""Random grouped products, what must come of them, and how far a result is from that."""

from __future__ import annotations

import dataclasses
import random

import torch

from fanfold import deep_gemm

ALIGNMENT = deep_gemm.get_m_alignment_for_contiguous_layout()


@dataclasses.dataclass(frozen=True)
class Case:
    """Sizes of one call.

    Attributes:
        rows: of each group.
        columns, depth: of each group's weights.
        masked: form; each group has memory for ``most`` rows.
        fast: whether the tensor cores may keep sums.
    """

    rows: tuple[int, ...]
    columns: int = 256
    depth: int = 256
    masked: bool = False
    most: int = 0
    seed: int = 0
    fast: bool = False


def random_case(number: int) -> Case:
    numbers = random.Random(number)
    masked = numbers.random() < 0.5
    most = numbers.choice([1, 7, 64, 128, 200, 384])
    few = [0, 1, 63, 64, 65, 127, 128, 129, numbers.randint(0, 300)]
    groups = numbers.choice([1, 2, 3, 8, numbers.randint(1, 40)])
    rows = tuple(min(numbers.choice(few), most if masked else 1 << 20) for _ in range(groups))
    return Case(
        rows if numbers.random() < 0.9 else (0,) * groups,
        columns=64 * numbers.randint(1, 20),
        depth=128 * numbers.choice([1, 2, 3, 4, 5, 8, 31, 33, 56, 64]),
        masked=masked,
        most=most,
        seed=number,
        fast=number % 3 == 0,
    )


def _e4m3(shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    device = generator.device
    values = torch.randn(shape, generator=generator, dtype=torch.float32, device=device)
    return (64 * values).clamp(-448, 448).to(torch.float8_e4m3fn)


def _scales(shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    device = generator.device
    powers = torch.rand(shape, generator=generator, dtype=torch.float32, device=device)
    return torch.exp2(-6 - 6 * powers)


@dataclasses.dataclass
class Call:
    """The tensors of one call, and the products in FP64."""

    a: tuple[torch.Tensor, torch.Tensor]
    b: tuple[torch.Tensor, torch.Tensor]
    groups: torch.Tensor
    used: torch.Tensor  # rows of d that some group has
    undefined: torch.Tensor  # rows between a group's end and the next block
    exact: torch.Tensor  # of the used rows


def call_of(case: Case, device: torch.device) -> Call:
    generator = torch.Generator(device=device).manual_seed(case.seed)
    count, blocks = len(case.rows), case.depth // 128
    weights = _e4m3((count, case.columns, case.depth), generator)
    weight_scales = _scales((count, -(-case.columns // 128), blocks), generator)
    group_of = _groups_of_rows(case).to(device)
    shape = group_of.shape
    rows, scales = _e4m3((*shape, case.depth), generator), _scales((*shape, blocks), generator)
    used = group_of >= 0
    left = rows[used].double() * scales[used].double().repeat_interleave(128, dim=-1)
    exact = torch.empty((len(left), case.columns), dtype=torch.float64, device=device)
    for group in range(count):
        here = group_of[used] == group
        spread = weight_scales[group].double().repeat_interleave(128, dim=0)[: case.columns]
        right = weights[group].double() * spread.repeat_interleave(128, dim=1)
        exact[here] = left[here] @ right.T
    given, undefined = _given(case, group_of)
    return Call((rows, scales), (weights, weight_scales), given, used, undefined, exact)


def _groups_of_rows(case: Case) -> torch.Tensor:
    """The group of each row of ``a``, -1 for none."""
    if case.masked:
        places = torch.arange(case.most, device="cpu")
        rows = torch.tensor(case.rows, dtype=torch.int64, device="cpu")
        groups = torch.arange(len(case.rows), device="cpu")
        return torch.where(places < rows[:, None], groups[:, None], -1)
    parts = []
    for group, rows in enumerate(case.rows):
        part = torch.full((-(-rows // ALIGNMENT) * ALIGNMENT,), -1, dtype=torch.int64, device="cpu")
        part[:rows] = group
        parts.append(part)
        if (case.seed + group) % 5 == 0:  # a block of nobody
            parts.append(torch.full((ALIGNMENT,), -1, dtype=torch.int64, device="cpu"))
    return torch.cat(parts)


def _given(case: Case, group_of: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """What tells the groups, and the rows of d that may get anything."""
    if case.masked:
        device = group_of.device
        return torch.tensor(case.rows, dtype=torch.int32, device=device), group_of < 0
    first = group_of.view(-1, ALIGNMENT)[:, :1].expand(-1, ALIGNMENT).flatten()
    return group_of.int(), (group_of < 0) & (first >= 0)


def run(case: Case, call: Call, d: torch.Tensor) -> None:
    """The call, whose results come to ``d``."""
    operands = (call.a, call.b, d, call.groups)
    if case.masked:
        usual = sum(case.rows) // len(case.rows)
        deep_gemm.m_grouped_fp8_gemm_nt_masked(*operands, usual, fast_accumulation=case.fast)
    else:
        deep_gemm.m_grouped_fp8_gemm_nt_contiguous(*operands, fast_accumulation=case.fast)


def check(case: Case, device: torch.device) -> float:
    """Asserts that the results are right; the difference of them all."""
    call = call_of(case, device)
    poison = torch.full((*call.used.shape, case.columns), -7.0, dtype=torch.bfloat16, device=device)
    d, again = poison.clone(), poison.clone()
    run(case, call, d)
    run(case, call, again)
    assert torch.equal(d[call.used], again[call.used]), "equal input, other bits"
    untouched = ~call.used & ~call.undefined
    assert bool((d[untouched] == -7.0).all()), "rows of no group were written"
    return difference(d[call.used].double(), call.exact)


def difference(x: torch.Tensor, y: torch.Tensor) -> float:
    """``1 - 2<x, y> / (<x, x> + <y, y>)``; 0 for nothing."""
    both = float((x * x).sum() + (y * y).sum())
    return 1 - 2 * float((x * y).sum()) / both if both else 0.0
