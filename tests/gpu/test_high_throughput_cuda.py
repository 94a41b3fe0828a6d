"""The high-throughput mode on GPUs: what it brings and sums, bit for bit, for any sizes and however
skewed the routing; without the CPU waiting; in graphs; with delayed streams; and ranks that stop.
"""

from __future__ import annotations

import dataclasses
import random
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import fanfold
from fanfold.backends.high_throughput import HostHighThroughput, Plan
from fanfold.backends.high_throughput.cuda import CudaHighThroughput
from fanfold.backends.high_throughput.in_place import bytes_for_results
from fanfold.backends.high_throughput.plan import CudaDispatched
from fanfold.backends.opening import memory_across_hosts, memory_of_gpus
from fanfold.config import Config
from fanfold.errors import ArgumentError, PeerRefused, PeerTimeout
from fanfold.group import Group, as_group
from fanfold.memory import GpuPeerMemory
from fanfold.memory.between_hosts import BytesBetweenHosts
from fanfold.memory.host import SymmetricMemory
from tests.distributed import routings
from tests.distributed.cuda_rounds import (
    check_brought,
    check_combine,
    check_plan,
    check_rows_of,
    dispatch,
    dispatch_kinds,
    on_cpu,
    run_case,
    sent,
)
from tests.distributed.routings import Case, Round, make_input, random_case, results_of
from tests.gpu.conftest import GpuPools
from tests.gpu.support import assert_same

pytestmark = [pytest.mark.gpu, pytest.mark.gpu_each, pytest.mark.timeout(300)]

LAYOUTS = ("expert_major", "token_major")
DTYPES = (torch.bfloat16, torch.float8_e4m3fn)

FEW_SLOTS = 4 * 8 * 1152
"""Bytes of rings with a few slots of the small rows here."""


@contextmanager
def opened(
    group: dist.ProcessGroup | Group,
    *,
    ring_bytes: int = 1 << 22,
    timeout_s: float = 30.0,
    result_bytes: int = 0,
    transfer: str = "auto",
    **rest: Any,
) -> Iterator[CudaHighThroughput]:
    """The mode over its own memory. Collective."""
    config = Config.resolve(ring_bytes=ring_bytes, timeout_s=timeout_s, dispatch_transfer=transfer)
    ranks = as_group(group)
    nbytes = CudaHighThroughput.required_bytes(ranks.size, config, result_bytes)
    memory: GpuPeerMemory
    if (config.hosts or 1) > 1:
        between = BytesBetweenHosts.of_high_throughput(ranks.size, nbytes)
        memory = memory_across_hosts(ranks, nbytes, between, config)
    else:
        memory = memory_of_gpus(ranks, nbytes, config)
    with closing(memory):
        yield CudaHighThroughput(memory, config, result_bytes=result_bytes, **rest)


def case_of(ranks: int, **changes: Any) -> Case:
    """Other numbers of tokens on each rank, none on one of several."""
    tokens = tuple((130, 77, 0, 201)[rank % 4] for rank in range(ranks))
    case = Case(tokens=tokens, experts_per_rank=8, top_k=4, hidden=512, alignment=16)
    return dataclasses.replace(case, **changes)


# ---- small cases, every bit against loops over plain tensors ------------------------------------


def _rounds(
    group: dist.ProcessGroup,
    cases: list[Case],
    ring_bytes: int,
    in_place: bool = False,
    transfer: str = "auto",
) -> None:
    rank = dist.get_rank(group)
    result_bytes = max(map(results_of, cases)) if in_place else 0
    options: dict[str, Any] = {"result_bytes": result_bytes, "transfer": transfer}
    with dispatch_kinds() as kinds, opened(group, ring_bytes=ring_bytes, **options) as mode:
        for number, case in enumerate(cases):
            run_case(mode, case, rank, LAYOUTS[number % 2], in_place)
    assert {kind.pulls for kind in kinds} == {transfer == "pull"}


@pytest.mark.parametrize("style", ["spread", "one_rank", "one_expert", "none", "holes"])
def test_every_style_of_routing(gpus: GpuPools, ranks: int, style: str) -> None:
    case = case_of(ranks, style=style, biases=1)
    gpus.run(ranks, _rounds, [case, case], FEW_SLOTS)


def rounds_with_few_slots(ranks: int, style: str, scales: int) -> list[Case]:
    """Rounds for rings of ``FEW_SLOTS`` bytes, in which each slot of a source is used again."""
    dtype = torch.float8_e4m3fn if scales else torch.bfloat16
    case = case_of(ranks, style=style, dtype=dtype, scales=scales)
    fewer = dataclasses.replace(case, tokens=case.tokens[::-1], slack=5)
    return [case, fewer, fewer, case]


@pytest.mark.parametrize("scales", [0, 7, 8])
@pytest.mark.parametrize("style", ["spread", "one_rank", "duplicates"])
def test_pulled_rounds(gpus: GpuPools, most_ranks: int, style: str, scales: int) -> None:
    rounds = rounds_with_few_slots(most_ranks, style, scales)
    gpus.run(most_ranks, _rounds, rounds, FEW_SLOTS, False, "pull")


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("style", ["spread", "one_rank"])
def test_every_number_of_ranks(
    gpus: GpuPools, every_ranks: int, style: str, in_place: bool
) -> None:
    cases = [case_of(every_ranks, style=style, biases=1, seed=n) for n, _ in enumerate(LAYOUTS)]
    gpus.run(every_ranks, _rounds, cases, FEW_SLOTS, in_place)


@pytest.mark.parametrize("style", ["spread", "one_rank", "one_expert", "duplicates"])
@pytest.mark.parametrize("scales", [0, 7, 8])
def test_rounds_in_place(gpus: GpuPools, ranks: int, style: str, scales: int) -> None:
    dtype = torch.float8_e4m3fn if scales else torch.bfloat16
    case = case_of(ranks, style=style, dtype=dtype, scales=scales)
    fewer = dataclasses.replace(case, tokens=case.tokens[::-1], slack=5)
    gpus.run(ranks, _rounds, [case, fewer, fewer, case], FEW_SLOTS, True)


@pytest.mark.parametrize("scales", [1, 4, 7, 56])
def test_scales_of_any_number_and_strides(gpus: GpuPools, ranks: int, scales: int) -> None:
    case = case_of(ranks, dtype=torch.float8_e4m3fn, scales=scales, slack=9)
    gpus.run(ranks, _rounds, [case, case], 1 << 20)


@pytest.mark.parametrize("seed", range(6))
def test_random_geometries(gpus: GpuPools, ranks: int, seed: int) -> None:
    numbers = random.Random(seed)
    cases = [random_case(numbers, ranks) for _ in range(4)]
    gpus.run(ranks, _rounds, cases, 1 << 17)


# ---- large cases, against the host backend ------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Large:
    """A layer of real size; the same on all ranks."""

    tokens: tuple[int, ...]
    experts_per_rank: int
    top_k: int
    hidden: int
    style: str
    fp8: bool
    seed: int

    @property
    def experts(self) -> int:
        return self.experts_per_rank * len(self.tokens)

    @property
    def result_bytes(self) -> int:
        """Of all rows that any rank may get, with padding to 128."""
        rows = sum(self.tokens) * min(self.top_k, self.experts_per_rank)
        scales = -(-self.hidden // 128) if self.fp8 else 0
        rows += 128 * self.experts_per_rank
        return bytes_for_results(rows, self.hidden, 1 if self.fp8 else 2, scales)

    def make(self, rank: int) -> tuple[Any, torch.Tensor, torch.Tensor]:
        """Rows, routing and weights of ``rank``, on the host."""
        numbers = torch.Generator().manual_seed(self.seed * 64 + rank)
        count = self.tokens[rank]
        x = torch.randn((count, self.hidden), generator=numbers).bfloat16()
        idx = torch.randint(0, self.experts, (count, self.top_k), generator=numbers)
        if self.style == "one_rank":
            idx %= self.experts_per_rank
        if self.style == "holes":
            idx[torch.rand(idx.shape, generator=numbers) < 0.5] = -1
        weights = torch.rand(idx.shape, generator=numbers)
        if not self.fp8:
            return x, idx, weights
        scales = torch.rand((-(-self.hidden // 128), count), generator=numbers).t()
        return (x.to(torch.float8_e4m3fn), scales), idx, weights


def random_large(seed: int, ranks: int) -> Large:
    """Any layer of which no rank sends more than 4096 rows of 7168 take."""
    numbers = random.Random(seed)
    most = numbers.choice([64, 1000, 4096, 16384])
    hidden = numbers.choice([1024, 2048, 2880, 7168, 16384, 16 * numbers.randint(8, 1024)])
    return Large(
        tokens=tuple(numbers.choice([0, most, numbers.randint(0, most)]) for _ in range(ranks)),
        experts_per_rank=numbers.choice([1, 7, 32, 64]),
        top_k=numbers.choice([1, 2, 8, 22, 32]),
        hidden=min(hidden, 4096 * 7168 // most // 16 * 16),
        style=numbers.choice(["spread", "one_rank", "holes"]),
        fp8=numbers.random() < 0.5,
        seed=seed,
    )


def _on_gpu(x: Any, device: torch.device) -> Any:
    if not isinstance(x, tuple):
        return x.to(device)
    scales = torch.empty_strided(x[1].shape, x[1].stride(), device=device)
    return x[0].to(device), scales.copy_(x[1])


def _against_the_host(
    group: dist.ProcessGroup, large: Large, layout: Any, in_place: bool = False
) -> None:
    rank, ranks = dist.get_rank(group), as_group(group)
    x, idx, weights = large.make(rank)
    config = Config.resolve(timeout_s=60.0)
    nbytes = HostHighThroughput.staging_bytes(ranks.size, config)
    result_bytes = large.result_bytes if in_place else 0
    with (
        SymmetricMemory(ranks, nbytes, config) as memory,
        opened(group, result_bytes=result_bytes) as mode,
    ):
        host = HostHighThroughput(memory, 0, nbytes)
        rest = {"num_experts": large.experts, "layout": layout, "expert_alignment": 128}
        want = host.dispatch(x, idx, weights, **rest)
        device = mode.device
        sends = (_on_gpu(x, device), idx.to(device), weights.to(device))
        got = mode.dispatch(*sends, **rest, in_place=in_place)
        _assert_brought(got, want)
        _assert_plan(got, want.plan, layout)
        mode._results.memory.fill_(0xA5)
        again = mode.dispatch_cached(sends[0], got.plan, layout=layout, in_place=in_place)
        _assert_brought(again, want)
        rows = want.tokens.shape[0]
        numbers = torch.Generator().manual_seed(rank)
        y = torch.randn((rows, large.hidden), generator=numbers).bfloat16()
        lanes_shape = (rows,) if layout == "expert_major" else (rows, large.top_k)
        lanes = torch.rand(lanes_shape, generator=numbers)
        bias = torch.randn((large.tokens[rank], large.hidden), generator=numbers).bfloat16()
        wanted, wanted_lanes = host.combine(
            y, want.plan, layout=layout, row_weights=want.row_weights, topk_weights=lanes,
            bias=bias,
        )  # fmt: skip
        out, out_lanes = mode.combine(
            y.to(device), got.plan, layout=layout, row_weights=got.row_weights,
            topk_weights=lanes.to(device), bias=bias.to(device),
        )  # fmt: skip
        mode.quiesce()
        assert_same("combined", out, wanted)
        assert out_lanes is not None
        assert wanted_lanes is not None
        assert_same("lanes", out_lanes, wanted_lanes)


def _assert_brought(got: CudaDispatched, want: Any) -> None:
    assert_same("tokens", got.tokens.view(torch.uint8), want.tokens.view(torch.uint8))
    for name in ("scales", "row_weights", "row_source_rank", "row_source_token"):
        actual, expected = getattr(got, name), getattr(want, name)
        assert (actual is None) == (expected is None), name
        if expected is not None:
            assert_same(name, actual, expected)


def _assert_plan(got: CudaDispatched, want: Plan, layout: str) -> None:
    names = ["source_prefix", "source_token", "tokens_per_expert", "offsets", "is_token_in_rank"]
    names += ["rows_of"] if layout == "expert_major" else ["topk_idx", "topk_weights"]
    for name in names:
        assert_same(name, getattr(got.plan, name), getattr(want, name))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("seed", range(6))
def test_random_layers_against_the_host(gpus: GpuPools, ranks: int, seed: int, layout: str) -> None:
    gpus.run(ranks, _against_the_host, random_large(seed, ranks), layout)


@pytest.mark.long
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("seed", range(6, 60))
def test_many_layers_against_the_host(gpus: GpuPools, ranks: int, seed: int, layout: str) -> None:
    gpus.run(ranks, _against_the_host, random_large(seed, ranks), layout, seed % 2 == 1)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("seed", range(6))
def test_random_layers_in_place_against_the_host(
    gpus: GpuPools, ranks: int, seed: int, layout: str
) -> None:
    gpus.run(ranks, _against_the_host, random_large(seed, ranks), layout, True)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("style", ["spread", "one_rank"])
@pytest.mark.parametrize(("top_k", "fp8", "in_place"), [(4, False, False), (22, True, True)])
def test_many_tokens_against_the_host(
    gpus: GpuPools, most_ranks: int, style: str, layout: str, top_k: int, fp8: bool, in_place: bool
) -> None:
    tokens = (16384, 0, 5000, 16384)[:most_ranks]
    large = Large(tokens, 8, top_k, 256, style, fp8, 3)
    gpus.run(most_ranks, _against_the_host, large, layout, in_place)


# ---- plans, capacities, refusals ----------------------------------------------------------------


def _one_plan_for_both(group: dist.ProcessGroup, case: Case) -> None:
    with opened(group) as mode:
        expect = Round(case, dist.get_rank(group))
        got = dispatch(mode, expect, "token_major", None)
        check_plan(expect, got.plan, "token_major")
        rows = sent(expect, mode.device)
        for _ in range(3):
            again = mode.dispatch_cached(rows, got.plan, layout="expert_major")
            check_brought(expect, again, "expert_major")
            check_rows_of(expect, got.plan)
            check_combine(mode, expect, again, "expert_major")
            check_brought(
                expect, mode.dispatch_cached(rows, got.plan, layout="token_major"), "token_major"
            )


@pytest.mark.parametrize("weighted", [False, True])
def test_one_plan_for_both_layouts(gpus: GpuPools, ranks: int, weighted: bool) -> None:
    gpus.run(ranks, _one_plan_for_both, case_of(ranks, weighted=weighted))


def _too_small(
    group: dist.ProcessGroup, case: Case, layout: str, in_place: bool, missing: int
) -> None:
    rank = dist.get_rank(group)
    with opened(group, result_bytes=results_of(case, layout)) as mode:
        expect = Round(case, rank)
        needed = len(expect.rows) if layout == "token_major" else expect.offsets[-1]
        room = max(0, needed - missing) if rank == 0 else needed
        got = dispatch(mode, expect, layout, room, in_place)
        if rank == 0:
            with pytest.raises(ArgumentError, match=f"capacity of .* is {room}"):
                mode.quiesce()
        else:
            check_brought(expect, got, layout)
        run_case(mode, case, rank, layout)


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("missing", [3, 10000])
def test_too_small_a_capacity_is_reported(
    gpus: GpuPools, ranks: int, layout: str, in_place: bool, missing: int
) -> None:
    gpus.run(ranks, _too_small, case_of(ranks), layout, in_place, missing)


def _refused(group: dist.ProcessGroup, case: Case, capacity: int | None) -> None:
    rank = dist.get_rank(group)
    with opened(group) as mode:
        expect = Round(case, rank)
        for _ in range(3):
            if rank == 0:
                wrong = torch.zeros((4, 4), dtype=torch.int32, device=mode.device)
                with pytest.raises(ArgumentError, match="topk_idx"):
                    mode.dispatch(sent(expect, mode.device), wrong, num_experts=case.experts)
            elif capacity is None:
                with pytest.raises(PeerRefused, match="rank 0"):
                    dispatch(mode, expect, "expert_major", None)
            else:
                got = dispatch(mode, expect, "expert_major", capacity)
                with pytest.raises(PeerRefused, match="rank 0"):  # by the first that can know
                    (mode.combine(got.tokens, got.plan, layout="expert_major"), mode.quiesce())
            run_case(mode, case, rank, "token_major")


@pytest.mark.parametrize("capacity", [None, 3000])
def test_refusals(gpus: GpuPools, most_ranks: int, capacity: int | None) -> None:
    gpus.run(most_ranks, _refused, case_of(most_ranks), capacity)


def _bad_index(group: dist.ProcessGroup, case: Case) -> None:
    with opened(group) as mode:
        device = mode.device
        x = torch.ones((9, case.hidden), dtype=torch.bfloat16, device=device)
        idx = torch.zeros((9, 2), dtype=torch.int64, device=device)
        idx[5, 1] = case.experts
        mode.dispatch(x, idx, num_experts=case.experts)
        with pytest.raises(ArgumentError, match=rf"topk_idx\[5, 1\].* is {case.experts}"):
            mode.quiesce()


def test_an_index_out_of_range_is_reported(gpus: GpuPools, ranks: int) -> None:
    gpus.run(ranks, _bad_index, case_of(ranks))


def _index_taken_for_none(
    group: dist.ProcessGroup, case: Case, layout: str, index: int, told: str
) -> None:
    """All goes as if it were none, on all ranks, and its own rank is told."""
    inputs = [make_input(case, rank) for rank in range(case.ranks)]
    inputs[0].topk_idx[7, 1] = -1
    with mock.patch.object(routings, "make_input", lambda case, rank: inputs[rank]):
        expect = Round(case, dist.get_rank(group))
    if expect.rank == 0:
        expect.own = dataclasses.replace(expect.own, topk_idx=expect.own.topk_idx.clone())
        expect.own.topk_idx[7, 1] = index
    with opened(group) as mode:
        got = dispatch(mode, expect, layout, None)
        torch.cuda.synchronize(mode.device)
        check_plan(expect, got.plan, layout)
        check_brought(expect, got, layout)
        if expect.rank == 0:
            with pytest.raises(ArgumentError, match=rf"topk_idx\[7, 1\].* is {told}, "):
                mode.check()
        check_combine(mode, expect, got, layout)
        mode.quiesce()


@pytest.mark.parametrize(
    ("index", "told"),
    [
        (-2, "-2"),
        (1 << 32, "8388607 or more"),  # whose low word is an expert's number
        (-1 << 40, "-8388608 or less"),
    ],
)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_index_out_of_range_is_none(
    gpus: GpuPools, ranks: int, layout: str, index: int, told: str
) -> None:
    gpus.run(ranks, _index_taken_for_none, case_of(ranks, biases=1), layout, index, told)


def _dropped_rows(group: dist.ProcessGroup, case: Case, layout: Any) -> None:
    """They count as zeros, which is not the same as nothing: added to a bias of -0.0 they make
    0.0."""
    rank = dist.get_rank(group)
    with opened(group) as mode:
        got = dispatch(mode, Round(case, rank), layout, 2)
        if rank == 0:  # to whom all go
            with pytest.raises(ArgumentError, match=r"capacity of .* is 2"):
                mode.quiesce()
        shape = (case.tokens[rank], case.hidden)
        bias = torch.full(shape, -0.0, dtype=torch.bfloat16, device=mode.device)
        sums, _ = mode.combine(torch.ones_like(got.tokens), got.plan, layout=layout, bias=bias)
        mode.quiesce()
        assert not sums.signbit().any()
        # Of the first tokens some rows had room.
        assert not sums[2:].any()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_dropped_rows_count_as_zeros(gpus: GpuPools, ranks: int, layout: str) -> None:
    gpus.run(ranks, _dropped_rows, case_of(ranks, style="one_rank"), layout)


# ---- faults -------------------------------------------------------------------------------------


def _stalled(group: dist.ProcessGroup, case: Case, call: str) -> None:
    rank = dist.get_rank(group)
    with opened(group) as mode:  # compiles, which may take longer than the bound below
        run_case(mode, case, rank, "expert_major")
        run_case(mode, dataclasses.replace(case, weighted=False), rank, "expert_major")
    with opened(group, timeout_s=2.0) as mode:
        expect = Round(case, rank)
        rows = sent(expect, mode.device)
        got = dispatch(mode, expect, "expert_major", 4096)
        mode.combine(got.tokens, got.plan, layout="expert_major")
        mode.dispatch_cached(rows, got.plan, layout="expert_major")
        mode.quiesce()
        dist.barrier(group)
        if rank != 1:
            calls: dict[str, Callable[[], object]] = {
                "counts": lambda: dispatch(mode, expect, "expert_major", 4096),
                "dispatch": lambda: mode.dispatch_cached(rows, got.plan, layout="expert_major"),
                "combine": lambda: mode.combine(got.tokens, got.plan, layout="expert_major"),
            }
            start = time.monotonic()
            calls[call]()
            with pytest.raises(PeerTimeout, match=f"rank 1 in high_throughput {call}"):
                mode.quiesce()
            assert time.monotonic() - start < 10.0
            with pytest.raises(PeerTimeout):
                dispatch(mode, expect, "expert_major", None)
        dist.barrier(group)


@pytest.mark.parametrize("call", ["counts", "dispatch", "combine"])
def test_a_stalled_rank_is_named(gpus: GpuPools, most_ranks: int, call: str) -> None:
    gpus.run(most_ranks, _stalled, case_of(most_ranks), call)


# ---- the native face ----------------------------------------------------------------------------


def _by_the_face(
    group: dist.ProcessGroup, dtype: str
) -> tuple[list[fanfold.HighThroughput], tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """A layer on the host and one on the GPU, and tokens, experts and weights of this rank."""
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    numbers = torch.Generator("cpu").manual_seed(rank)
    x = torch.randn((90, 512), generator=numbers, dtype=torch.float32, device="cpu").bfloat16()
    idx = torch.randint(0, 4 * ranks, (90, 3), generator=numbers, dtype=torch.int64, device="cpu")
    weights = torch.rand((90, 3), generator=numbers, dtype=torch.float32, device="cpu")
    sizes = {
        "num_experts": 4 * ranks, "top_k": 3, "hidden": 512, "max_tokens": 128,
        "dispatch_dtype": dtype, "expert_alignment": 16, "in_place_rows": 90 * 3 * ranks + 64,
    }  # fmt: skip
    layers = [
        fanfold.HighThroughput(group, **sizes, config=Config.resolve(backend=backend))
        for backend in ("host", "cuda")
    ]
    return layers, (x, idx, weights)


def _in_place_by_the_face(group: dist.ProcessGroup, dtype: str) -> None:
    """What arrives in place is what the host brings, for a new routing and a known one."""
    (host_layer, gpu_layer), (x, idx, weights) = _by_the_face(group, dtype)
    with host_layer as host, gpu_layer as ep:
        given = [tensor.to(ep.device) for tensor in (x, idx, weights)]
        want = host.dispatch(x, idx, weights, in_place=True)
        got = ep.dispatch(*given, in_place=True)
        ep.use_sms(6)
        again = ep.dispatch(given[0], previous=got, in_place=True)
        begin = ep.memory.base(dist.get_rank(group))
        end = begin + ep.memory.bytes_per_rank
        for each in (got, again):
            assert begin <= each.tokens.data_ptr() < end
            assert_same("tokens", each.tokens.view(torch.uint8), want.tokens.view(torch.uint8))
            assert (each.scales is None) == (dtype == "bf16")
            if each.scales is not None:
                assert want.scales is not None
                assert_same("scales", each.scales, want.scales)
        y = torch.ones((len(want.tokens), 512), dtype=torch.bfloat16, device="cpu")
        assert_same("out", ep.combine(y.to(ep.device), got), host.combine(y, want))
        ep.check()


def _padding_by_the_face(group: dist.ProcessGroup, dtype: str, in_place: bool) -> None:
    """Padding that is not written: everything but it, and what marks it, is what the host has."""
    (host_layer, gpu_layer), (x, idx, weights) = _by_the_face(group, dtype)
    with host_layer as host, gpu_layer as ep:
        given = [tensor.to(ep.device) for tensor in (x, idx, weights)]
        want = host.dispatch(x, idx, weights)
        kept = want.source_rank >= 0
        assert not kept.all()
        got = ep.dispatch(*given, in_place=in_place)
        ep.use_zero_padding(False)
        for again in (False, True):
            # Where the next one's rows will be, or likely are.
            got.tokens.view(torch.uint8).fill_(7)
            tensors = (given[0],) if again else given
            got = ep.dispatch(*tensors, previous=got if again else None, in_place=in_place)
            assert_same("source_rank", got.source_rank, want.source_rank)
            assert_same("source_token", got.source_token, want.source_token)
            rows = [on_cpu(each.tokens).view(torch.uint8) for each in (got, want)]
            assert_same("tokens", rows[0][kept], rows[1][kept])
            if in_place:
                assert bool((rows[0][~kept] == 7).all()), "padding was written"
        assert want.weights is not None
        assert_same("weights", got.weights, want.weights)
        y = torch.ones((len(want.tokens), 512), dtype=torch.bfloat16, device="cpu")
        assert_same("out", ep.combine(y.to(ep.device), got), host.combine(y, want))
        ep.check()


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("dtype", ["bf16", "fp8"])
def test_padding_by_the_face(gpus: GpuPools, ranks: int, dtype: str, in_place: bool) -> None:
    gpus.run(ranks, _padding_by_the_face, dtype, in_place)


@pytest.mark.parametrize("dtype", ["bf16", "fp8"])
def test_in_place_by_the_face(gpus: GpuPools, ranks: int, dtype: str) -> None:
    gpus.run(ranks, _in_place_by_the_face, dtype)
