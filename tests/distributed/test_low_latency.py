"""Low latency against what its arithmetic says, bit for bit, over the whole space of geometries."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

import fanfold
from fanfold.errors import ArgumentError
from fanfold.formats import dequantize, quantize
from fanfold.group import as_group
from fanfold.launch import RankPool
from tests import nvfp4
from tests.distributed.layers import caught

pytestmark = pytest.mark.placements("threads")


@dataclasses.dataclass(frozen=True)
class Case:
    """One drawn layer and how its tokens are routed."""

    ranks: int
    experts_per_rank: int
    top_k: int
    hidden: int
    tokens: tuple[int, ...]  # of each rank
    max_tokens: int
    dispatch_dtype: str
    scale_format: str
    routing: str
    weighted: bool
    logfmt: bool
    seed: int


ROUTINGS = ("spread", "one_expert", "one_rank", "none", "holes", "duplicates")


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Any geometry of small size; the extremes of each size have tests of their own."""
    ranks = draw(st.sampled_from([1, 2, 3, 4, 5]))
    dispatch_dtype = draw(st.sampled_from(["bf16", "fp8", "nvfp4"]))
    step = {"bf16": 8, "fp8": 16, "nvfp4": 32}[dispatch_dtype]
    scale_formats = ["float32", "power_of_two", "ue8m0"]
    hidden = draw(st.integers(2, 40)) * step
    max_tokens = draw(st.integers(0, 24))
    tokens = st.one_of(st.integers(0, max_tokens), st.sampled_from([0, max_tokens]))
    return Case(
        ranks=ranks,
        experts_per_rank=draw(st.integers(1, 40)),
        top_k=draw(st.integers(1, 32)),
        hidden=hidden,
        tokens=tuple(draw(st.lists(tokens, min_size=ranks, max_size=ranks))),
        max_tokens=max_tokens,
        dispatch_dtype=dispatch_dtype,
        scale_format=draw(st.sampled_from(scale_formats if step != 32 else ["float32"])),
        routing=draw(st.sampled_from(ROUTINGS)),
        weighted=draw(st.booleans()),
        logfmt=draw(st.booleans()),
        seed=draw(st.integers(0, 2**31)),
    )


@dataclasses.dataclass
class Tokens:
    """What one rank passes to dispatch, known to all ranks."""

    x: torch.Tensor
    topk_idx: torch.Tensor
    topk_weights: torch.Tensor
    experts: int

    @functools.cached_property
    def pairs(self) -> tuple[torch.Tensor, torch.Tensor]:
        """``[experts, T]`` each: which tokens go to an expert, and with what weight: of all places
        that name it, in order."""
        named = torch.zeros((self.experts, len(self.x)), dtype=torch.bool)
        weights = torch.zeros((self.experts, len(self.x)))
        for k in range(self.topk_idx.shape[1]):
            (token,) = torch.where(self.topk_idx[:, k] >= 0)
            place = self.topk_idx[token, k], token
            named[place] = True
            weights[place] += self.topk_weights[token, k]
        return named, weights


def _tokens(case: Case, rank: int) -> Tokens:
    random = torch.Generator().manual_seed(case.seed * 64 + rank)
    count, experts = case.tokens[rank], case.ranks * case.experts_per_rank
    x = torch.randn((count, case.hidden), generator=random).bfloat16()
    topk_idx = torch.full((count, case.top_k), -1)
    wanted = min(case.top_k, experts)
    if case.routing == "one_expert":
        topk_idx[:, 0] = experts - 1
    elif case.routing == "one_rank":
        topk_idx = torch.randint(0, case.experts_per_rank, topk_idx.shape, generator=random)
    elif case.routing == "duplicates":
        topk_idx = torch.randint(0, experts, topk_idx.shape, generator=random)
    elif case.routing != "none":
        scores = torch.rand((count, experts), generator=random)
        topk_idx[:, :wanted] = scores.topk(wanted, dim=1).indices
    if case.routing == "holes":
        topk_idx[torch.rand(topk_idx.shape, generator=random) < 0.4] = -1
    return Tokens(x, topk_idx, torch.rand(topk_idx.shape, generator=random) - 0.3, experts)


def _pair_weights(tokens: Tokens, expert: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Which tokens go to ``expert``, and with what weight."""
    named, weights = tokens.pairs
    return named[expert], weights[expert]


def _experts_output(rows: torch.Tensor, expert: int) -> torch.Tensor:
    """What the experts of these tests compute."""
    return (rows.float() * (1.0 + expert % 7) - 0.5).bfloat16()


GLOBAL_SCALE = 448 * 6 / 5.0


def _global_scale(case: Case) -> torch.Tensor | None:
    if case.dispatch_dtype != "nvfp4":
        return None
    return torch.tensor(GLOBAL_SCALE, dtype=torch.float32, device="cpu")


def _quantized(case: Case, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Rows as they must arrive, and their scales."""
    if case.dispatch_dtype == "nvfp4":
        return nvfp4.quantized(x, GLOBAL_SCALE)
    if case.dispatch_dtype == "fp8":
        return quantize(x, fanfold.formats.ScaleFormat(case.scale_format))
    return x, None


def _values(case: Case, rows: torch.Tensor, scales: torch.Tensor | None) -> torch.Tensor:
    """What experts read from rows as they arrive."""
    if case.dispatch_dtype == "nvfp4":
        assert scales is not None
        return nvfp4.dequantized(rows, scales, GLOBAL_SCALE).bfloat16()
    return rows if scales is None else dequantize(rows, scales).bfloat16()


def _scales(case: Case, received: fanfold.LowLatencyResult, expert: int) -> torch.Tensor | None:
    """The scales of an expert's valid rows."""
    if received.scales is None:
        return None
    if case.dispatch_dtype == "nvfp4":
        count = int(received.tokens_per_expert[expert])
        return nvfp4.by_row(received.scales, expert, count, case.hidden // 16)
    return received.expert(expert, of=received.scales)


def _run(group: dist.ProcessGroup, case: Case) -> dict[str, Any]:
    """Dispatch and combine on one rank; everything a check needs."""
    rank = as_group(group).rank
    with fanfold.LowLatency(
        group,
        num_experts=case.ranks * case.experts_per_rank,
        top_k=case.top_k,
        hidden=case.hidden,
        max_tokens=case.max_tokens,
        dispatch_dtype=case.dispatch_dtype,
        scale_format=case.scale_format,
        config=fanfold.Config.resolve(timeout_s=60.0),
    ) as ep:
        mine = _tokens(case, rank)
        weights = mine.topk_weights if case.weighted else None
        scale = _global_scale(case)
        received, hook = ep.dispatch(
            mine.x, mine.topk_idx, weights, global_scale=scale, return_hook=True
        )
        if scale is not None:
            scale.fill_(float("nan"))
        mine.x.fill_(float("nan"))  # the caller may reuse its tensors when send has returned
        mine.topk_idx.fill_(-7)
        hook()
        shape = (*received.tokens.shape[:2], case.hidden)
        y = torch.full(shape, float("nan"), dtype=torch.bfloat16, device="cpu")
        found: dict[str, Any] = {"experts": [], "offsets": received.offsets}
        source_rank, source_token = received.source_rank, received.source_token
        for e in range(ep.experts_per_rank):
            rows = received.expert(e)
            scales = _scales(case, received, e)
            received.expert(e, of=y).copy_(
                _experts_output(_values(case, rows, scales), ep.rank * ep.experts_per_rank + e)
            )
            found["experts"].append(
                {
                    "rows": rows.clone(),
                    "scales": None if scales is None else scales.clone(),
                    "source_rank": source_rank[e],
                    "source_token": source_token[e],
                    "weights": None if received.weights is None else received.weights[e].clone(),
                }
            )
        out, hook = ep.combine(y, received, logfmt=case.logfmt, return_hook=True)
        y.fill_(float("nan"))
        hook()
        found["out"] = out
        return found


def _check_dispatch(case: Case, sources: list[Tokens], found: dict[str, Any], rank: int) -> None:
    for e, seen in enumerate(found["experts"]):
        expert = rank * case.experts_per_rank + e
        hits = [_pair_weights(tokens, expert) for tokens in sources]
        x = torch.cat([t.x[hit] for t, (hit, _) in zip(sources, hits, strict=True)])
        values, scales = _quantized(case, x)
        if scales is not None:
            both = seen["scales"], scales
            if case.dispatch_dtype == "nvfp4":  # e4m3, which PyTorch does not compare
                both = both[0].float(), both[1].float()
            assert torch.equal(*both)
        assert torch.equal(seen["rows"].view(torch.uint8), values.view(torch.uint8))
        count = len(x)
        ranks = torch.cat([torch.full((int(h.sum()),), r) for r, (h, _) in enumerate(hits)])
        tokens = torch.cat([hit.nonzero().flatten() for hit, _ in hits])
        assert torch.equal(seen["source_rank"][:count], ranks.int())
        assert torch.equal(seen["source_token"][:count], tokens.int())
        assert bool((seen["source_rank"][count:] == -1).all())
        assert bool((seen["source_token"][count:] == -1).all())
        if case.weighted:
            weights = torch.cat([weight[hit] for hit, weight in hits])
            assert torch.equal(seen["weights"][:count], weights)
        else:
            assert seen["weights"] is None


def _expected_out(case: Case, tokens: Tokens) -> tuple[torch.Tensor, torch.Tensor]:
    """The result of combine, and how far LogFMT may take it from that."""
    x = tokens.x
    if len(x):
        x = _values(case, *_quantized(case, x))
    total, slack = torch.zeros(x.shape), torch.zeros(x.shape)
    for rank in range(case.ranks):
        part, any_hit = torch.zeros(x.shape), torch.zeros(len(x), dtype=torch.bool)
        first = rank * case.experts_per_rank
        added = torch.full((len(x), case.experts_per_rank), False)
        for k in range(case.top_k):
            for token in range(len(x)):
                local = int(tokens.topk_idx[token, k]) - first
                if not 0 <= local < case.experts_per_rank or added[token, local]:
                    continue
                added[token, local] = True
                any_hit[token] = True
                weight = torch.tensor(1.0)
                if case.weighted:
                    weight = _pair_weights(tokens, first + local)[1][token]
                part[token] += weight * _experts_output(x[token], first + local).float()
        rounded = part if case.logfmt else part.bfloat16().float()
        total += torch.where(any_hit.unsqueeze(1), rounded, 0.0)
        # 32 octaves in 510 steps, half a step off, and what lies below them moves up to them.
        blocks = [b.abs().amax(1, keepdim=True).expand(b.shape) for b in part.split(128, dim=1)]
        slack += part.abs() * (2.0 ** (32 / 1020) - 1) + torch.cat(blocks, dim=1) * 2.0**-31
    return total, slack + total.abs() * 2.0**-8


def _check(case: Case, pools: Callable[[int], RankPool]) -> None:
    found = pools(case.ranks).run(_run, case)
    again = pools(case.ranks).run(_run, case)
    sources = [_tokens(case, rank) for rank in range(case.ranks)]
    for rank in range(case.ranks):
        _check_dispatch(case, sources, found[rank], rank)
        expected, slack = _expected_out(case, sources[rank])
        out = found[rank]["out"]
        if case.logfmt:
            assert bool(((out.float() - expected).abs() <= slack).all())
        else:
            assert torch.equal(out.view(torch.int16), expected.bfloat16().view(torch.int16))
        assert torch.equal(out.view(torch.int16), again[rank]["out"].view(torch.int16))


@given(case=cases())
def test_any_geometry(pools: Callable[[int], RankPool], case: Case) -> None:
    _check(case, pools)


PLAIN = Case(
    ranks=4,
    experts_per_rank=2,
    top_k=2,
    hidden=64,
    tokens=(3, 0, 5, 8),
    max_tokens=8,
    dispatch_dtype="bf16",
    scale_format="float32",
    routing="spread",
    weighted=True,
    logfmt=False,
    seed=1,
)


@pytest.mark.parametrize(
    "changes",
    [
        {"hidden": 16},
        {"hidden": 16384},
        {"hidden": 2880, "dispatch_dtype": "fp8"},
        {"hidden": 7168, "dispatch_dtype": "fp8", "scale_format": "ue8m0", "top_k": 8},
        {"hidden": 32, "dispatch_dtype": "nvfp4"},
        {"hidden": 7168, "dispatch_dtype": "nvfp4", "top_k": 8},
        {"hidden": 96, "dispatch_dtype": "nvfp4", "max_tokens": 130, "tokens": (130, 0, 9, 120)},
        {"hidden": 1024, "experts_per_rank": 128, "top_k": 22},
        {"hidden": 32, "experts_per_rank": 1024, "top_k": 32},
        {"ranks": 8, "tokens": (1, 2, 3, 4, 5, 6, 7, 8), "top_k": 8},
        {"ranks": 1, "tokens": (8,), "experts_per_rank": 1, "top_k": 1},
        {"ranks": 8, "tokens": (0,) * 8, "max_tokens": 0},
        {"max_tokens": 512, "tokens": (512, 1, 0, 300), "routing": "one_expert", "hidden": 16},
    ],
    ids=str,
)
def test_extremes(pools: Callable[[int], RankPool], changes: dict[str, Any]) -> None:
    _check(dataclasses.replace(PLAIN, **changes), pools)


@pytest.mark.placements("processes", "threads")
@pytest.mark.parametrize("dispatch_dtype", ["bf16", "fp8", "nvfp4"])
def test_both_placements(pools: Callable[[int], RankPool], dispatch_dtype: str) -> None:
    _check(dataclasses.replace(PLAIN, dispatch_dtype=dispatch_dtype), pools)


def _global_scales(count: int, scale: float) -> torch.Tensor:
    return torch.full((count,), scale, dtype=torch.float32, device="cpu")


def _nvfp4_of_any_values(group: dist.ProcessGroup) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Values and scales of unusual rows and global scales, as they arrive here."""
    found = []
    with fanfold.LowLatency(
        group, num_experts=2, top_k=2, hidden=96, max_tokens=22, dispatch_dtype="nvfp4"
    ) as ep:
        topk_idx = torch.arange(2, dtype=torch.int64, device="cpu").expand(22, 2).contiguous()
        for scale in GLOBAL_SCALES:
            x = nvfp4.awkward_rows(22, 96, ep.rank)
            # A global scale for each expert, as frameworks keep it, is too much here.
            with pytest.raises(ArgumentError, match="global_scale"):
                fanfold.LowLatency.dispatch(ep, x, topk_idx, global_scale=_global_scales(2, scale))
            received = ep.dispatch(x, topk_idx, global_scale=_global_scales(1, scale))
            count = int(received.tokens_per_expert[0])
            scales = fanfold.formats.nvfp4_scales_by_row(received.scales, 44, 96)
            tiles = nvfp4.by_row(received.scales, 0, count, 6)
            assert torch.equal(scales[0, :count].view(torch.uint8), tiles.view(torch.uint8))
            found.append((received.expert(0).clone(), scales[0, :count]))
    return found


GLOBAL_SCALES = (0.75, 300.0, 2.0**-20, 1e38, torch.inf, 0.0, -1.0, torch.nan)


def test_nvfp4_of_any_values(pools: Callable[[int], RankPool]) -> None:
    for found in pools(2).run(_nvfp4_of_any_values):
        for scale, (values, scales) in zip(GLOBAL_SCALES, found, strict=True):
            rows = [nvfp4.quantized(nvfp4.awkward_rows(22, 96, rank), scale) for rank in range(2)]
            assert torch.equal(values, torch.cat([row[0] for row in rows]))
            wanted = torch.cat([row[1].view(torch.uint8) for row in rows])
            assert torch.equal(scales.view(torch.uint8), wanted)
            assert bool(scales.float().isnan().any()) == (not scale > 0 or scale == torch.inf)


WAITED_NS = 10**15  # before the first dispatch


def _statistics(group: dist.ProcessGroup) -> tuple[torch.Tensor, torch.Tensor]:
    """Totals over three dispatches, read through the mode, which takes statistics."""
    from fanfold.backends.low_latency import HostLowLatency, Statistics
    from fanfold.geometry import Geometry
    from fanfold.memory.host import SymmetricMemory

    members = as_group(group)
    geometry = Geometry(members.size, PLAIN.ranks * PLAIN.experts_per_rank, 2, 64, 8)
    nbytes = HostLowLatency.required_bytes(geometry)
    totals = torch.full((PLAIN.experts_per_rank,), 100, dtype=torch.int32)
    wait_ns = torch.full((members.size,), WAITED_NS)
    with SymmetricMemory(members, nbytes, fanfold.Config.resolve(timeout_s=60.0)) as memory:
        mode = HostLowLatency(memory, 0, nbytes)
        mine = _tokens(PLAIN, members.rank)
        for _ in range(3):
            _, hook = mode.dispatch(
                geometry,
                mine.x,
                mine.topk_idx,
                statistics=Statistics(expert_totals=totals, wait_ns=wait_ns),
            )
            assert hook is None
    return totals, wait_ns


def test_statistics(pools: Callable[[int], RankPool]) -> None:
    sources = [_tokens(PLAIN, rank) for rank in range(PLAIN.ranks)]
    for rank, (totals, wait_ns) in enumerate(pools(PLAIN.ranks).run(_statistics)):
        for e in range(PLAIN.experts_per_rank):
            expert = rank * PLAIN.experts_per_rank + e
            rows = sum(int(_pair_weights(tokens, expert)[0].sum()) for tokens in sources)
            assert int(totals[e]) == 100 + 3 * rows
        assert bool((wait_ns >= WAITED_NS).all())
        assert bool((wait_ns > WAITED_NS).any())


def _bad_statistics(group: dist.ProcessGroup) -> list[str]:
    """What each rank is told where rank 1 gives tensors of a wrong shape or dtype; and then, what
    is no bool but taken for one."""
    from fanfold.backends.low_latency import HostLowLatency, Statistics
    from fanfold.geometry import Geometry
    from fanfold.memory.host import SymmetricMemory

    members = as_group(group)
    geometry = Geometry(members.size, PLAIN.ranks * PLAIN.experts_per_rank, 2, 64, 8)
    nbytes = HostLowLatency.required_bytes(geometry)
    odd = members.rank == 1
    few = torch.zeros(1, dtype=torch.int32) if odd else None
    narrow = torch.zeros(members.size, dtype=torch.int32) if odd else None
    with SymmetricMemory(members, nbytes, fanfold.Config.resolve(timeout_s=60.0)) as memory:
        mode = HostLowLatency(memory, 0, nbytes)
        mine = _tokens(PLAIN, members.rank)
        args = (geometry, mine.x, mine.topk_idx)
        got, hook = mode.dispatch(*args, return_hook=True)
        assert hook is not None
        hook()
        back = (geometry, got.tokens, got.routing, mine.topk_idx)
        calls = (
            lambda: mode.dispatch(*args, statistics=Statistics(expert_totals=few)),
            lambda: mode.dispatch(*args, statistics=Statistics(wait_ns=narrow)),
            lambda: mode.combine(*back, wait_ns=narrow),
            lambda: mode.combine(*back, logfmt="yes" if odd else True),  # type: ignore[arg-type]
        )
        return [str(caught(call)) for call in calls]


def test_bad_statistics(pools: Callable[[int], RankPool]) -> None:
    for totals, wait, combine_wait, logfmt in pools(PLAIN.ranks).run(_bad_statistics):
        assert "expert_totals.shape" in totals
        assert "wait_ns.dtype" in wait
        assert "wait_ns.dtype" in combine_wait
        assert logfmt == "None"


def test_bytes_of_memory() -> None:
    """The formula of docs/low_latency.md, and DeepEP's own for comparison."""
    from fanfold.backends.low_latency import HostLowLatency
    from fanfold.geometry import Geometry

    for ranks, experts, top_k, hidden, tokens in [
        (4, 256, 8, 7168, 128),
        (8, 64, 11, 2048, 64),
        (64, 256, 8, 7168, 128),
        (16, 16, 11, 2560, 128),
        (4, 512, 22, 1024, 128),
    ]:
        needed = HostLowLatency.required_bytes(Geometry(ranks, experts, top_k, hidden, tokens))
        slot = -(-2 * hidden // 16) * 16
        rows = ranks * tokens
        formula = 224 * ranks + 4 * rows * slot + 16 * rows * top_k + 2 * rows
        assert formula <= needed <= formula + 7 * 128
        deep_ep = 4 * experts * tokens * (2 * hidden + hidden // 32)
        assert needed <= deep_ep, (ranks, experts, hidden)
