"""High-throughput calls that look like an earlier one bring what a first call brings; those that do
not are checked as a first call is."""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any
from unittest import mock

import pytest
import torch

import fanfold
from fanfold import _core
from fanfold.backends.high_throughput.cuda import CudaHighThroughput
from fanfold.backends.high_throughput.in_place import Kinds, Results
from fanfold.backends.high_throughput.plan import CudaDispatched, CudaPlan
from fanfold.config import Config
from fanfold.errors import ArgumentError
from fanfold.formats import ScaleFormat
from tests.emulation.high_throughput import CTAS, ROOMY_RING, World, emulated
from tests.emulation.world import Builder

TOKENS, HIDDEN, TOP_K, EXPERTS = 21, 32, 3, 6
LAYOUTS = ("expert_major", "token_major")
FP8 = torch.float8_e4m3fn


@pytest.fixture(autouse=True)
def gpu(builder: Builder) -> Iterator[None]:
    if not hasattr(torch.Tensor, "__dlpack_c_exchange_api__"):
        pytest.skip(f"PyTorch {torch.__version__} does not let tensors be read from C++")
    with emulated(builder, CTAS):
        yield


@pytest.fixture
def mode(gpu: None) -> CudaHighThroughput:
    return World(1, ROOMY_RING).modes[0]


def rows(seed: int, *, tokens: int = TOKENS, hidden: int = HIDDEN) -> torch.Tensor:
    generator = torch.Generator("cpu").manual_seed(seed)
    made = torch.randn((tokens, hidden), generator=generator, dtype=torch.float32, device="cpu")
    return made.to(torch.bfloat16)


def fp8_rows(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    scales = torch.full((TOKENS, 2), float(seed), dtype=torch.float32, device="cpu")
    return rows(seed).to(FP8), scales


def routing(seed: int = 0) -> torch.Tensor:
    generator = torch.Generator("cpu").manual_seed(seed)
    scores = torch.rand((TOKENS, EXPERTS), generator=generator, dtype=torch.float32, device="cpu")
    return scores.topk(TOP_K, dim=1).indices


def weights(seed: int) -> torch.Tensor:
    generator = torch.Generator("cpu").manual_seed(seed)
    return torch.rand((TOKENS, TOP_K), generator=generator, dtype=torch.float32, device="cpu")


def begin(mode: CudaHighThroughput, layout: Any, **options: Any) -> CudaDispatched:
    return mode.dispatch(rows(0), routing(), num_experts=EXPERTS, layout=layout, **options)


def begin_with(x: Any, mode: CudaHighThroughput) -> CudaDispatched:
    """In place, token-major."""
    return mode.dispatch(x, routing(), num_experts=EXPERTS, layout="token_major", in_place=True)


def assert_brought(got: CudaDispatched, x: torch.Tensor) -> None:
    """Each row is that of the token which it is said to be."""
    there = got.row_source_token >= 0
    assert int(there.sum()) >= TOKENS
    assert torch.equal(got.tokens[there], x[got.row_source_token[there].long()])
    assert bool((got.row_source_rank[there] == 0).all())


def assert_same(got: CudaDispatched, want: CudaDispatched) -> None:
    for name in ("tokens", "scales", "row_weights", "row_source_rank", "row_source_token",
                 "offsets", "tokens_per_expert"):  # fmt: skip
        one, other = getattr(got, name), getattr(want, name)
        assert (one is None) == (other is None), name
        assert one is None or torch.equal(one, other), name


def memory_of(got: CudaDispatched) -> set[int]:
    tensors = (got.tokens, got.scales, got.sources, got.counts)
    return {tensor.data_ptr() for tensor in tensors if tensor is not None}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("make", [rows, fp8_rows])
def test_cached_dispatches(
    mode: CudaHighThroughput, layout: Any, make: Callable[[int], Any]
) -> None:
    plan = begin(mode, layout).plan
    first = mode.dispatch_cached(make(1), plan, layout=layout)
    assert plan.repeated_dispatches
    seen = memory_of(first)
    for seed in (2, 3):
        x = make(seed)
        got = mode.dispatch_cached(x, plan, layout=layout)
        assert_brought(got, x[0] if isinstance(x, tuple) else x)
        assert not seen & memory_of(got)  # a result is the caller's to keep
        plan.repeated_dispatches.clear()
        assert_same(got, mode.dispatch_cached(x, plan, layout=layout))


def test_other_scales_are_another_dispatch(mode: CudaHighThroughput) -> None:
    plan = begin(mode, "token_major").plan
    values, scales = fp8_rows(1)
    for x in ((values, scales), (values, scales[:, :1].contiguous()), (values, scales)):
        got = mode.dispatch_cached(x, plan, layout="token_major")
        assert got.scales is not None
        assert torch.equal(got.scales, x[1][got.row_source_token.long()])


def roomy() -> CudaHighThroughput:
    """A mode with memory for results in place."""
    return World(1, ROOMY_RING, result_bytes=1 << 16).modes[0]


def kept(got: CudaDispatched) -> CudaDispatched:
    """What the next dispatch in place leaves as it is."""
    scales = None if got.scales is None else got.scales.clone()
    return dataclasses.replace(got, tokens=got.tokens.clone(), scales=scales)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("make", [rows, fp8_rows])
def test_cached_dispatches_in_place(gpu: None, layout: Any, make: Callable[[int], Any]) -> None:
    """Also by turns with others by the same plan."""
    mode = roomy()
    plan = begin(mode, layout).plan
    for seed, in_place in enumerate((True, True, True, False, False, True, True)):
        x, options = make(seed), {"layout": layout, "in_place": in_place}
        with mock.patch.object(mode, "_dispatch_again", wraps=mode._dispatch_again) as again:
            got = kept(mode.dispatch_cached(x, plan, **options))
        assert again.called == (seed not in (0, 3, 5))
        assert_brought(got, x[0] if isinstance(x, tuple) else x)
        repeated = plan.repeated_dispatches.pop(layout)
        assert_same(got, mode.dispatch_cached(x, plan, **options))
        plan.repeated_dispatches[layout] = repeated
    where = mode.dispatch_cached(make(1), plan, layout=layout, in_place=True)
    assert where.tokens.data_ptr() == mode._results.memory.data_ptr()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_new_routings_in_place(gpu: None, layout: Any) -> None:
    """Also by turns with others."""
    mode = roomy()
    options: dict[str, Any] = {"num_experts": EXPERTS, "layout": layout}
    for seed, in_place in enumerate((True, True, False, False, True)):
        with mock.patch.object(mode, "_check_new", wraps=mode._check_new) as checked:
            got = mode.dispatch(rows(seed), routing(seed), in_place=in_place, **options)
        assert checked.called == (seed not in (1, 3))
        assert_brought(got, rows(seed))
        assert (got.tokens.data_ptr() == mode._results.memory.data_ptr()) == in_place


@pytest.mark.parametrize("cached", [True, False])
@pytest.mark.parametrize("inside", ["values", "scales", "bf16"])
def test_rows_among_the_results_are_refused_each_time(gpu: None, inside: str, cached: bool) -> None:
    mode = roomy()
    make: Callable[[int], Any] = rows if inside == "bf16" else fp8_rows
    got = begin_with(make(0), mode)
    values, scales = fp8_rows(1)
    bad = {"values": (got.tokens, scales), "scales": (values, got.scales), "bf16": got.tokens}
    for turn in range(3):
        for x, fails in ((make(turn), False), (bad[inside], True), (make(turn), False)):
            with pytest.raises(ArgumentError, match="results in place") if fails else nullcontext():
                if cached:
                    mode.dispatch_cached(x, got.plan, layout="token_major", in_place=True)
                else:
                    begin_with(x, mode)


@pytest.mark.parametrize(
    ("begin", "count", "step", "apart"),
    [
        (0, 100, 1, True), (1, 100, 1, False), (120, 8, 1, False), (0, 300, 1, False),
        (199, 8, 1, False), (200, 8, 1, True), (0, 0, 1, True), (150, 0, 1, True),
        (60, 2, 39, True), (60, 2, 40, False), (40, 2, 170, False), (199, 2, 50, False),
    ],
)  # fmt: skip
def test_rows_beside_the_results(begin: int, count: int, step: int, apart: bool) -> None:
    """Of a rank's bytes the results are those from 100 to before 200."""
    whole = torch.zeros(400, dtype=torch.uint8, device="cpu")
    memory: Any = types.SimpleNamespace(rank=3, base=lambda _: whole.data_ptr(), tensor=whole)
    x = whole[begin:].as_strided((count, 1), (step, 1))
    for given in (x, (rows(0), x)):
        with nullcontext() if apart else pytest.raises(ArgumentError, match="results in place"):
            Results(memory, 100, 100).check(given)


@pytest.mark.parametrize("in_place", [False, True])
def test_rows_that_become_fp8(gpu: None, in_place: bool) -> None:
    mode = roomy()
    mode._quantize_to = ScaleFormat.FLOAT32
    plan = begin(mode, "expert_major").plan
    for seed in range(4):
        options = {"layout": "expert_major", "in_place": in_place}
        with mock.patch.object(mode, "_dispatch_again", wraps=mode._dispatch_again) as again:
            got = kept(mode.dispatch_cached(rows(seed), plan, **options))
        assert again.called == (seed > 0)
        assert got.tokens.dtype == FP8
        plan.repeated_dispatches.clear()
        assert_same(got, mode.dispatch_cached(rows(seed), plan, **options))
    with pytest.raises(ArgumentError):
        mode.dispatch_cached(rows(1, tokens=TOKENS + 1), plan, layout="expert_major")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_combines(mode: CudaHighThroughput, layout: Any) -> None:
    got = begin(mode, layout)
    plan, count = got.plan, got.tokens.shape[0]
    factors = [None]
    if layout == "expert_major":
        factors += [rows(seed, tokens=count, hidden=1)[:, 0].float() for seed in (5, 6)]
    for seed, factor in enumerate(factors * 3):
        y = rows(seed, tokens=count)
        out, _ = mode.combine(y, plan, layout=layout, row_weights=factor)
        plan.repeated_combines.clear()
        again, _ = mode.combine(y, plan, layout=layout, row_weights=factor)
        assert torch.equal(out, again)
        repeated, _ = mode.combine(y, plan, layout=layout, row_weights=factor)
        assert torch.equal(out, repeated)
        assert repeated.data_ptr() != again.data_ptr()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("returns", [False, True])
def test_combines_into_given_memory(mode: CudaHighThroughput, layout: Any, returns: bool) -> None:
    """Also by turns with others by the same plan; with weights that return and without."""
    got = begin(mode, layout)
    plan, count = got.plan, got.tokens.shape[0]
    for seed, given in enumerate((True, True, False, False, True)):
        y, out = rows(seed, tokens=count), rows(9) if given else None
        columns = TOP_K if layout == "token_major" else 1
        returned = rows(seed + 9, tokens=count, hidden=columns).float()
        returned = returned if layout == "token_major" else returned[:, 0]
        options = {"layout": layout, "topk_weights": returned if returns else None}
        with mock.patch.object(mode, "_combine_again", wraps=mode._combine_again) as again:
            sums, weight_sums = mode.combine(y, plan, out=out, **options)
        assert again.called == (seed > 0)
        assert (sums is out) == given
        repeated = plan.repeated_combines.pop(layout)
        want, want_weights = mode.combine(y, plan, **options)
        assert torch.equal(sums, want)
        assert (weight_sums is not None) == returns
        if weight_sums is not None and want_weights is not None:
            assert torch.equal(weight_sums, want_weights)
            assert weight_sums.data_ptr() != want_weights.data_ptr()
        plan.repeated_combines[layout] = repeated


@pytest.mark.parametrize("layout", LAYOUTS)
def test_weights_that_return_by_turns(mode: CudaHighThroughput, layout: Any) -> None:
    got = begin(mode, layout)
    plan, count = got.plan, got.tokens.shape[0]
    shape = (count, TOP_K) if layout == "token_major" else (count,)
    returned = torch.ones(shape, dtype=torch.float32, device="cpu")
    for weights_given in (True, False, True, True, False, False):
        options = {"layout": layout, "topk_weights": returned if weights_given else None}
        assert (mode.combine(rows(1, tokens=count), plan, **options)[1] is None) != weights_given
    with pytest.raises(ArgumentError, match="topk_weights"):
        mode.combine(rows(1, tokens=count), plan, layout=layout, topk_weights=returned[1:])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_biases_by_turns(mode: CudaHighThroughput, layout: Any) -> None:
    got = begin(mode, layout)
    y, bias = rows(1, tokens=got.tokens.shape[0]), rows(2)
    plain, _ = mode.combine(y, got.plan, layout=layout)
    biased, _ = mode.combine(y, got.plan, layout=layout, bias=bias)
    assert not torch.equal(plain, biased)
    for given, want in ((None, plain), (bias, biased), (None, plain), (bias, biased)):
        assert torch.equal(mode.combine(y, got.plan, layout=layout, bias=given)[0], want)


def test_sums_among_the_outputs_are_refused_each_time(mode: CudaHighThroughput) -> None:
    plan = begin(mode, "token_major").plan
    whole = rows(1, tokens=3 * TOKENS)
    y = whole[TOKENS:][:TOKENS]
    mode.combine(y, plan, layout="token_major")
    for first in (0, 1, TOKENS, 2 * TOKENS - 1, 2 * TOKENS):
        apart = first in (0, 2 * TOKENS)
        with (
            mock.patch.object(mode, "_combine_again", wraps=mode._combine_again) as again,
            nullcontext() if apart else pytest.raises(ArgumentError, match="memory of y"),
        ):
            mode.combine(y, plan, layout="token_major", out=whole[first:][:TOKENS])
        assert again.called == apart


@pytest.mark.parametrize(
    "bad",
    [
        rows(1, tokens=TOKENS + 1),
        rows(1).float(),
        rows(1).to("meta"),
        rows(1, tokens=HIDDEN, hidden=TOKENS).t(),
        rows(1, tokens=TOKENS + 1).view(-1)[4:][: TOKENS * HIDDEN].view(TOKENS, HIDDEN),
    ],
    ids=range(5),
)
def test_sums_that_do_not_fit_are_refused(mode: CudaHighThroughput, bad: torch.Tensor) -> None:
    plan = begin(mode, "token_major").plan
    for _ in range(2):
        mode.combine(rows(1), plan, layout="token_major", out=rows(2))
        with pytest.raises(ArgumentError, match=r"^out"):
            mode.combine(rows(1), plan, layout="token_major", out=bad)


def test_more_rows_than_there_is_memory_for() -> None:
    whole = torch.zeros(4096 + 64, dtype=torch.uint8, device="cpu")
    memory: Any = types.SimpleNamespace(tensor=whole[64:])
    results = Results(memory, 128, 128 + 40 * 68)

    def kinds(count: int) -> Kinds:
        return ((count, 64), FP8), ((count, 1), torch.float32)

    values, scales = results.rows(kinds(40))
    assert (values.shape, scales.shape) == ((40, 64), (40, 1))
    assert values.data_ptr() == memory.tensor.data_ptr() + 128
    assert scales.data_ptr() >= values.data_ptr() + values.nbytes
    assert scales.data_ptr() + scales.nbytes <= memory.tensor.data_ptr() + 256 + 40 * 68
    with pytest.raises(ArgumentError, match="at most 40 of 68 bytes"):
        results.rows(kinds(41))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("capacity", [None, 80])
def test_new_routings(mode: CudaHighThroughput, layout: Any, capacity: int | None) -> None:
    for seed, weighted in enumerate((True, True, False, True, False, False)):
        x, topk_idx = rows(seed), routing(seed)
        options: dict[str, Any] = {"num_experts": EXPERTS, "layout": layout, "capacity": capacity}
        topk_weights = weights(seed) if weighted else None
        got = mode.dispatch(x, topk_idx, topk_weights, **options)
        assert_brought(got, x)
        mode._last_routing = None
        want = mode.dispatch(x, topk_idx, topk_weights, **options)
        assert_same(got, want)
        assert torch.equal(got.plan.places, want.plan.places)


BAD: dict[str, Callable[[], Any]] = {
    "a row more": lambda: rows(1, tokens=TOKENS + 1),
    "columns first": lambda: rows(1, tokens=HIDDEN, hidden=TOKENS).t(),
    "between units": lambda: rows(1, tokens=TOKENS + 1).view(-1)[4:][: TOKENS * HIDDEN].view(
        TOKENS, HIDDEN
    ),
    "elsewhere": lambda: rows(1).to("meta"),
    "no tensor": lambda: rows(1).tolist(),
}  # fmt: skip


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("bad", BAD)
def test_what_differs_is_checked(mode: CudaHighThroughput, layout: Any, bad: str) -> None:
    got = begin(mode, layout)
    plan, options = got.plan, {"num_experts": EXPERTS, "layout": layout}
    calls: list[Callable[[Any], Any]] = [
        lambda x: mode.dispatch_cached(x, plan, layout=layout),
        lambda x: mode.dispatch(x, routing(), **options),
    ]
    if layout == "token_major":  # where a call's outputs have as many rows
        calls.append(lambda x: mode.combine(x, plan, layout=layout))
    for call in calls:
        call(rows(1))
        call(rows(2))
        with pytest.raises(ArgumentError):
            call(BAD[bad]())
        call(rows(3))


UNLIKE: dict[str, Callable[[], Any]] = {
    "more columns": lambda: rows(1, hidden=HIDDEN + 16),
    "another dtype": lambda: rows(1).float(),
    "columns first": lambda: rows(1, tokens=HIDDEN, hidden=TOKENS).t(),
    "a pair": lambda: (rows(1), fp8_rows(1)[1]),
    "a pair of one": lambda: (rows(1), None),
    "no tensor": lambda: rows(1).tolist(),
}


@pytest.mark.parametrize("unlike", UNLIKE)
@pytest.mark.parametrize("known", [True, False])
def test_a_layer_checks_what_looks_different(unlike: str, known: bool) -> None:
    sizes = {"num_experts": EXPERTS, "top_k": TOP_K, "hidden": HIDDEN, "max_tokens": 64}
    with fanfold.HighThroughput(None, **sizes, config=Config.resolve(backend="host")) as ep:
        got = ep.dispatch(rows(0), routing(), weights(0))

        def dispatch(x: Any, seed: int) -> Any:
            if known:
                return ep.dispatch(x, previous=got)
            return ep.dispatch(x, routing(seed), weights(seed))

        ep.dispatch(rows(0), previous=got)
        with mock.patch.object(ep, "_check_rows", wraps=ep._check_rows) as check:
            for _ in range(2):
                for seed in (1, 2):
                    there = dispatch(rows(seed), seed).source_token >= 0
                    assert int(there.sum()) == TOKENS * TOP_K
                with pytest.raises(ArgumentError, match=r"^x"):
                    dispatch(UNLIKE[unlike](), 1)
        # What was refused is not taken for checked.
        assert check.call_count == 2


def test_what_the_backend_refuses_is_not_taken_for_checked() -> None:
    sizes = {"num_experts": EXPERTS, "top_k": TOP_K, "hidden": HIDDEN, "max_tokens": 64}
    options = {"dispatch_dtype": "fp8", "config": Config.resolve(backend="host")}
    with fanfold.HighThroughput(None, **sizes, **options) as ep:
        got = ep.dispatch(rows(0), routing())
        values, scales = fp8_rows(1)
        good = (values, scales)
        for x in (good, (values, None), values, (values, scales[1:]), values, (*good, 1), good):
            with nullcontext() if x is good else pytest.raises(ArgumentError, match=r"^x"):
                ep.dispatch(x, previous=got)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_other_routings_are_checked(mode: CudaHighThroughput, layout: Any) -> None:
    bad = routing().int(), routing()[1:], routing()[:, :, None], routing().to("meta"), None
    for topk_idx in bad:
        for _ in range(2):
            begin(mode, layout)
        with pytest.raises(ArgumentError, match=r"^topk_idx"):
            mode.dispatch(rows(0), topk_idx, num_experts=EXPERTS, layout=layout)  # type: ignore[arg-type]


@pytest.mark.parametrize("cached", [True, False])
@pytest.mark.parametrize(
    ("make", "more"), [(rows, lambda x: (x, None)), (fp8_rows, lambda x: (*x, None))]
)
def test_other_tuples_are_no_repetitions(
    mode: CudaHighThroughput, make: Callable[[int], Any], more: Callable[[Any], Any], cached: bool
) -> None:
    got = begin(mode, "token_major")
    for turn in range(3):
        for x, good in ((make(turn), True), (more(make(turn)), False)):
            with nullcontext() if good else pytest.raises(ArgumentError, match=r"^x"):
                if cached:
                    mode.dispatch_cached(x, got.plan, layout="token_major")
                else:
                    mode.dispatch(x, routing(), num_experts=EXPERTS, layout="token_major")


@pytest.mark.parametrize(
    "change",
    [
        {"topk_idx": routing().int()},
        {"topk_idx": routing()[1:]},
        {"topk_idx": routing()[:, 1:]},
        {"topk_weights": weights(1).double()},
        {"topk_weights": weights(1)[1:]},
    ],
    ids=range(5),
)
def test_a_layer_checks_routings_that_look_different(change: dict[str, torch.Tensor]) -> None:
    sizes = {"num_experts": EXPERTS, "top_k": TOP_K, "hidden": HIDDEN, "max_tokens": 64}
    with fanfold.HighThroughput(None, **sizes, config=Config.resolve(backend="host")) as ep:
        for seed in range(3):
            good = {"x": rows(seed), "topk_idx": routing(seed), "topk_weights": weights(seed)}
            ep.dispatch(**good)
            with pytest.raises(ArgumentError, match=rf"^{next(iter(change))}"):
                ep.dispatch(**good | change)
            ep.dispatch(good["x"], good["topk_idx"])


def test_another_number_of_sms(mode: CudaHighThroughput) -> None:
    plan = begin(mode, "expert_major").plan
    for turn, sms in enumerate((None, 1, 2, 1, None)):
        mode.use_sms(sms)
        x = rows(turn)
        assert_brought(mode.dispatch_cached(x, plan, layout="expert_major"), x)
        assert plan.repeated_dispatches["expert_major"].launches is mode._launches


def test_padding_of_each_call(mode: CudaHighThroughput) -> None:
    plan = begin(mode, "expert_major", expert_alignment=16).plan
    for zeros in (True, False, False, True):
        mode.use_zero_padding(zeros)
        got = mode.dispatch_cached(rows(1), plan, layout="expert_major")
        padding = got.tokens[got.row_source_token < 0]
        assert len(padding) > 0
        assert bool((padding == 0).all()) == zeros


def test_the_plan_of_another_mode(mode: CudaHighThroughput) -> None:
    """A group may have several, whose kernels use other memory."""
    plan = begin(mode, "token_major").plan
    mode.dispatch_cached(rows(1), plan, layout="token_major")
    other = World(1, ROOMY_RING).modes[0]
    for turn, each in enumerate((other, mode, other)):
        x = rows(turn)
        assert_brought(each.dispatch_cached(x, plan, layout="token_major"), x)
        assert plan.repeated_dispatches["token_major"].launches is each._launches


def test_want_of_memory_is_refused(
    mode: CudaHighThroughput, monkeypatch: pytest.MonkeyPatch
) -> None:
    got = begin(mode, "token_major")
    calls: list[Callable[[CudaPlan], Any]] = [
        lambda plan: mode.dispatch_cached(rows(1), plan, layout="token_major"),
        lambda plan: mode.combine(rows(1), plan, layout="token_major"),
    ]
    refused: list[BaseException] = []
    for call in calls:
        call(got.plan)
        with monkeypatch.context() as patch:
            patch.setattr(mode, "refuse_dispatch", lambda error, plan=None: refused.append(error))
            patch.setattr(mode._room, "empty", _no_memory)
            with pytest.raises(torch.cuda.OutOfMemoryError):
                call(got.plan)
    assert len(refused) == len(calls)


def _no_memory(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    raise torch.cuda.OutOfMemoryError(f"{shape} {dtype}")


PLAIN = torch.zeros((4, 6), dtype=torch.int32, device="cpu")


@pytest.mark.parametrize(
    "other",
    [
        PLAIN[:3],
        PLAIN[:, :5],
        PLAIN.view(2, 2, 6),
        PLAIN.t().contiguous().t(),
        PLAIN.float(),
        PLAIN.view(torch.int32).to("meta"),
        torch.nn.Parameter(PLAIN, requires_grad=False),
        PLAIN.view(-1)[1:],
        PLAIN.tolist(),
        None,
    ],
    ids=range(10),
)
def test_a_pattern_is_of_one_kind(other: Any) -> None:
    pattern = _core.TensorPattern(PLAIN, 4)
    assert pattern.address(PLAIN) == PLAIN.data_ptr()
    same = torch.ones_like(PLAIN)
    assert pattern.address(same) == same.data_ptr()
    assert pattern.address(other) == 0


def test_a_pattern_asks_for_alignment() -> None:
    long = torch.zeros(64, dtype=torch.int32, device="cpu")
    begins = -long.data_ptr() // 4 % 4
    aligned, between = long[begins:][:24].view(4, 6), long[begins + 1 :][:24].view(4, 6)
    assert _core.TensorPattern(between, 16).address(aligned) == aligned.data_ptr()
    assert _core.TensorPattern(between, 16).address(between) == 0
    assert _core.TensorPattern(between, 4).address(between) == between.data_ptr()


def test_what_cannot_be_read_has_no_pattern() -> None:
    for like in (None, PLAIN.tolist(), PLAIN.view(2, 2, 2, 3, 1)):
        assert _core.TensorPattern(like, 4).address(like) == 0


@pytest.mark.parametrize(
    ("like", "nbytes"),
    [
        (PLAIN, 96),
        (PLAIN.t(), 96),
        (PLAIN[:, :2], 80),
        (PLAIN[::2].to(torch.float8_e4m3fn), 12),
        (PLAIN[:0], 0),
        (PLAIN[0, 0], 4),
    ],
    ids=range(6),
)
def test_bytes_of_a_pattern(like: torch.Tensor, nbytes: int) -> None:
    assert _core.TensorPattern(like, 4).bytes == nbytes
