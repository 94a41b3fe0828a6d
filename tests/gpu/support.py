"""What the GPU tests run on their ranks: inputs, the host backend's answer to them, comparisons.

The host backend is the specification; its own tests hold it against the arithmetic.
"""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import torch
import torch.distributed as dist

import fanfold
from fanfold.bench.workload import expert_output
from fanfold.deep_ep import ElasticBuffer
from fanfold.formats import dequantize
from fanfold.group import Group, as_group
from tests.distributed.cuda_rounds import on_cpu, settle

ROUTINGS = ("spread", "one_expert", "one_rank", "none", "holes", "duplicates")
FORMATS = (
    ("bf16", "float32"),
    ("fp8", "float32"),
    ("fp8", "power_of_two"),
    ("fp8", "ue8m0"),
)


@dataclasses.dataclass(frozen=True)
class Case:
    """One layer and how its tokens are routed; the same on all ranks."""

    tokens: tuple[int, ...]  # of each rank
    max_tokens: int = 16
    experts_per_rank: int = 4
    top_k: int = 3
    hidden: int = 512
    dtype: str = "bf16"
    scale_format: str = "float32"
    routing: str = "spread"
    weighted: bool = True
    logfmt: bool = False
    specials: bool = False  # rows with NaN, infinities, zeros and extremes
    seed: int = 0

    @property
    def ranks(self) -> int:
        return len(self.tokens)

    @property
    def experts(self) -> int:
        return self.ranks * self.experts_per_rank

    def but(self, **changes: Any) -> Case:
        return dataclasses.replace(self, **changes)


def case_of(ranks: int, **changes: Any) -> Case:
    """A small case with another number of tokens on each rank, none on one of several."""
    tokens = tuple((16, 5, 0, 11)[rank % 4] for rank in range(ranks))
    return Case(tokens=tokens).but(**changes)


def random_case(number: int, most_ranks: int) -> Case:
    """Any geometry that a test has memory for."""
    numbers = random.Random(number)
    ranks = numbers.randint(1, most_ranks)
    wide, narrow = 16 * numbers.randint(8, 1024), 16 * numbers.randint(8, 160)
    hidden = numbers.choice([128, 2880, wide, narrow])
    local = numbers.choice([1, 2, 7, 32, numbers.randint(1, 1024 // ranks)])
    dtype, scale_format = numbers.choice(FORMATS)
    rows = min((1 << 27) // (local * ranks * hidden), (1 << 22) // hidden)
    max_tokens = max(1, min(numbers.choice([1, 8, 128, 1024, numbers.randint(1, 1024)]), rows))
    logfmt = numbers.random() < 0.2
    return Case(
        tokens=tuple(
            numbers.choice([0, max_tokens, numbers.randint(0, max_tokens)]) for _ in range(ranks)
        ),
        max_tokens=max_tokens,
        experts_per_rank=local,
        top_k=numbers.choice([1, 2, 8, 22, 32, numbers.randint(1, 32)]),
        hidden=hidden,
        dtype=dtype,
        scale_format=scale_format,
        routing=numbers.choice(ROUTINGS),
        weighted=numbers.random() < 0.7,
        logfmt=logfmt,
        specials=not logfmt and numbers.random() < 0.3,
        seed=number,
    )


# ---- inputs -------------------------------------------------------------------------------------


@dataclasses.dataclass
class Tokens:
    """What one rank passes to dispatch."""

    x: torch.Tensor
    topk_idx: torch.Tensor
    topk_weights: torch.Tensor | None

    def to(self, device: torch.device) -> Tokens:
        weights = None if self.topk_weights is None else self.topk_weights.to(device)
        return Tokens(self.x.to(device), self.topk_idx.to(device), weights)


def tokens_of(case: Case, rank: int) -> Tokens:
    """The input of ``rank``, on the host."""
    generator = torch.Generator().manual_seed(case.seed * 64 + rank)
    count, experts = case.tokens[rank], case.experts
    x = torch.randn((count, case.hidden), generator=generator).bfloat16()
    if case.specials:
        _put_specials(x)
    topk_idx = torch.full((count, case.top_k), -1)
    if case.routing == "one_expert":
        topk_idx[:, 0] = experts - 1
    elif case.routing == "one_rank":
        topk_idx = torch.randint(0, case.experts_per_rank, topk_idx.shape, generator=generator)
    elif case.routing == "duplicates":
        topk_idx = torch.randint(0, min(experts, 5), topk_idx.shape, generator=generator)
    elif case.routing != "none":
        wanted = min(case.top_k, experts)
        scores = torch.rand((count, experts), generator=generator)
        topk_idx[:, :wanted] = scores.topk(wanted, dim=1).indices
    if case.routing == "holes":
        topk_idx[torch.rand(topk_idx.shape, generator=generator) < 0.4] = -1
    weights = torch.rand(topk_idx.shape, generator=generator)
    if not case.logfmt:  # whose error is bounded by the sum of magnitudes
        weights -= 0.3
    return Tokens(x, topk_idx, weights if case.weighted else None)


def _put_specials(x: torch.Tensor) -> None:
    """Rows of bits that a protocol might mistake for something of its own."""
    bits = x.view(torch.int16)
    for row in range(len(x)):
        match row % 9:
            case 0:
                x[row] = torch.nan
            case 1:
                bits[row] = -1  # NaN, and all ones
            case 2:
                x[row, :512] = torch.inf
            case 3:
                x[row, ::5] = -torch.inf
            case 4:
                x[row] = 0.0
            case 5:
                x[row] *= 1e-30
            case 6:
                x[row] *= 1e37
            case 7:
                bits[row, :2] = -1


# ---- layers -------------------------------------------------------------------------------------


_TIMES_OVERWRITTEN = 32


def own_device() -> torch.device:
    """This rank's GPU: launch has made it the current one."""
    return torch.device("cuda", torch.cuda.current_device())


def overwrite_free_memory(sizes: list[int], device: torch.device) -> None:
    """Enqueues on the current stream what writes zeros over the memory that PyTorch would give
    tensors of so many bytes there. Blocks given back lie between others and are joined with them,
    so a size is asked for more than once, and nothing is given back before the end."""
    taken = [
        torch.zeros(nbytes, dtype=torch.uint8, device=device)
        for nbytes in sorted(sizes)
        for _ in range(_TIMES_OVERWRITTEN)
    ]
    del taken


def open_layer(
    group: dist.ProcessGroup | Group, case: Case, backend: str = "cuda", **settings: Any
) -> fanfold.LowLatency:
    """A LowLatency for ``case``. Collective."""
    # A test that fails on one rank should not keep the others for the default of 100 s.
    config = fanfold.Config.resolve(**{"backend": backend, "timeout_s": 20.0, **settings})
    return fanfold.LowLatency(
        group,
        num_experts=case.experts,
        top_k=case.top_k,
        hidden=case.hidden,
        max_tokens=case.max_tokens,
        dispatch_dtype=case.dtype,
        scale_format=case.scale_format,
        config=config,
    )


@dataclasses.dataclass
class Answer:
    """What the host backend says to one rank's call. n rows are valid.

    Attributes:
        places: ``[n]`` where they are in the flattened tokens.
        rows: ``[n, hidden * itemsize]`` uint8.
        scales: ``[n, columns]``, or None.
        weights: ``[n]``, or None.
        outputs: ``[n, hidden]`` bfloat16: what the experts make of them.
        out: ``[T, hidden]`` bfloat16: what combine makes of these.
        magnitude: ``[T, hidden]``: the same of absolute values, for LogFMT; else None.
    """

    counts: torch.Tensor
    places: torch.Tensor
    rows: torch.Tensor
    scales: torch.Tensor | None
    weights: torch.Tensor | None
    source_rank: torch.Tensor
    source_token: torch.Tensor
    outputs: torch.Tensor
    out: torch.Tensor
    magnitude: torch.Tensor | None

    def spread(self, like: torch.Tensor, device: torch.device) -> torch.Tensor:
        """The outputs in their places of a tensor that is NaN elsewhere: ``[E_l, C, hidden]``."""
        settle(device)
        y = torch.full(like.shape, torch.nan, dtype=torch.bfloat16, device=device)
        y.flatten(0, 1)[self.places.to(device)] = self.outputs.to(device)
        return y


def answers(group: dist.ProcessGroup | Group, cases: list[Case]) -> list[Answer]:
    """What the host backend makes of ``cases``, of one geometry, on this rank. Collective."""
    rank = as_group(group).rank
    with open_layer(group, cases[0], "host") as ep:
        return [_answer(ep, case, rank) for case in cases]


def _answer(ep: fanfold.LowLatency, case: Case, rank: int) -> Answer:
    mine = tokens_of(case, rank)
    received = ep.dispatch(mine.x, mine.topk_idx, mine.topk_weights)
    counts = received.tokens_per_expert.clone()
    places = valid_places(counts, received.tokens.shape[1])
    rows = received.tokens.view(torch.uint8).flatten(0, 1)[places]
    scales = None if received.scales is None else received.scales.flatten(0, 1)[places]
    values = rows.view(received.tokens.dtype)
    values = values.float() if scales is None else dequantize(values, scales)
    experts = rank * case.experts_per_rank + places // received.tokens.shape[1]
    outputs = expert_output(values, experts)
    y = torch.empty(received.tokens.shape, dtype=torch.bfloat16)
    y.flatten(0, 1)[places] = outputs
    out = ep.combine(y, received, logfmt=case.logfmt)
    magnitude = None
    if case.logfmt:
        y.flatten(0, 1)[places] = outputs.abs()
        magnitude = ep.combine(y, received).float()
    return Answer(
        counts=counts,
        places=places,
        rows=rows,
        scales=scales,
        weights=None if received.weights is None else received.weights.flatten()[places],
        source_rank=received.source_rank.clone(),
        source_token=received.source_token.clone(),
        outputs=outputs,
        out=out,
        magnitude=magnitude,
    )


def valid_places(counts: torch.Tensor, capacity: int) -> torch.Tensor:
    """``[n]``: the first ``counts[e]`` places of each expert e, in the flattened tokens."""
    valid = torch.arange(capacity) < on_cpu(counts).unsqueeze(1)
    return valid.flatten().nonzero().flatten()


# ---- comparisons --------------------------------------------------------------------------------


def check_kernels(buffer: ElasticBuffer) -> None:
    """Raises what the kernels of either mode have found."""
    buffer._backend.check()
    if buffer._few is not None:
        buffer._few.check()


_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def assert_same(what: str, actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Asserts equal bits, where any NaN equals any other: its bits mean nothing, and the kernels
    do not send those of all ones."""
    actual = on_cpu(actual).contiguous()
    assert actual.shape == expected.shape, f"{what}: {actual.shape} instead of {expected.shape}"
    assert actual.dtype == expected.dtype, f"{what}: {actual.dtype} instead of {expected.dtype}"
    if not actual.numel():
        return
    integer = _INTEGERS[actual.element_size()]
    differs = actual.view(integer) != expected.contiguous().view(integer)
    if actual.dtype.is_floating_point and differs.any():
        differs &= ~(actual.float().isnan() & expected.float().isnan())
    if differs.any():
        place = tuple(differs.nonzero()[0].tolist())
        raise AssertionError(
            f"{what}: {int(differs.sum())} of {differs.numel()} are wrong, the first at {place}: "
            f"{actual[place].item()} instead of {expected[place].item()}"
        )


def assert_received(received: fanfold.LowLatencyResult, answer: Answer) -> None:
    """Asserts that a dispatch brought what the host backend's brought."""
    tokens = received.tokens
    settle(tokens.device)
    places = answer.places.to(tokens.device)
    assert_same("tokens_per_expert", received.tokens_per_expert, answer.counts)
    rows = tokens.view(torch.uint8).flatten(0, 1)[places]
    assert_same("tokens", rows.view(tokens.dtype), answer.rows.view(tokens.dtype))
    if answer.scales is None:
        assert received.scales is None
    else:
        assert received.scales is not None
        assert received.scales.stride(1) == 1, "grouped matrix products read scales by column"
        assert_same("scales", received.scales.flatten(0, 1)[places], answer.scales)
    if answer.weights is None:
        assert received.weights is None
    else:
        assert received.weights is not None
        assert_same("weights", received.weights.flatten()[places], answer.weights)
    assert_same("source_rank", received.source_rank, answer.source_rank)
    assert_same("source_token", received.source_token, answer.source_token)


def assert_combined(out: torch.Tensor, answer: Answer) -> None:
    """Asserts that a combine gave what the host backend's gave.

    Sums are taken in the same order from products rounded alike, so bits are equal. LogFMT takes
    logarithms, which a GPU rounds otherwise: near the middle between two codes the next one may be
    chosen, in each rank's row, and a code is a factor of 2 ** (32 / 510).
    """
    if answer.magnitude is None:
        assert_same("combined tokens", out, answer.out)
        return
    error = (on_cpu(out).float() - answer.out.float()).abs()
    bound = answer.magnitude * (2.0 ** (32 / 510) - 1 + 2.0**-7) + 1e-6
    assert bool((error <= bound).all()), f"off by {float((error - bound).max())} beyond the bound"
