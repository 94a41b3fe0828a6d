"""The high-throughput kernels, run on the CPU, against loops over plain tensors: any number of
ranks, and rings so short that credits matter, without a GPU. What only hardware shows is for
``tests/gpu``, what goes wrong for ``test_high_throughput_emulated_faults.py``.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any
from unittest import mock

import pytest
import torch

from fanfold import Config, HighThroughput, _core
from fanfold.backends.high_throughput import grid, kernels, launches
from fanfold.backends.high_throughput.cuda import CudaHighThroughput
from fanfold.backends.high_throughput.kernels import CombineKind, DispatchKind
from fanfold.backends.high_throughput.plan import CudaDispatched
from fanfold.errors import ArgumentError, PeerRefused, UsageError
from tests.distributed.cuda_rounds import (
    check_brought,
    check_combine,
    check_plan,
    check_rows_of,
    dispatch,
    run_case,
    sent,
    soak,
    soak_results,
)
from tests.distributed.routings import Case, Round, results_of
from tests.emulation.high_throughput import (
    ARGUMENTS,
    CTAS,
    ROOMY_RING,
    SMALL,
    World,
    emulated,
)
from tests.emulation.world import Builder

LAYOUTS = ("expert_major", "token_major")
LONG_RINGS = {"_MOST_PIECES": kernels._MOST_PIECES, "_MANY_PIECES": kernels._MANY_PIECES}


def tiny_ring(case: Case) -> int:
    """Bytes of four slots of 8 rows, so that every slot is used again and again."""
    used = 2 * case.hidden + 8 * case.top_k + 4 * case.scales
    return 4 * 8 * (-(-used // 128) * 128)


@pytest.fixture(autouse=True)
def gpu(builder: Builder) -> Iterator[None]:
    with emulated(builder, CTAS):
        yield


CASES = [
    Case(tokens=(230, 0, 45), experts_per_rank=3, top_k=4, hidden=32, alignment=4, biases=2),
    Case(tokens=(50, 61), experts_per_rank=4, top_k=3, hidden=80, style="holes", weighted=False,
         dtype=torch.float8_e4m3fn, scales=7, slack=3, alignment=128, biases=1),
    Case(tokens=(9, 40, 0, 66), experts_per_rank=2, top_k=2, hidden=16, style="duplicates",
         slack=0),
    Case(tokens=(37,), experts_per_rank=5, top_k=6, hidden=48, dtype=torch.float8_e4m3fn,
         scales=8),
]  # fmt: skip
# More scales than lanes take at once.
WIDE = Case(tokens=(21, 40), experts_per_rank=2, top_k=2, hidden=80, dtype=torch.float8_e4m3fn,
            scales=67, slack=2)  # fmt: skip


def in_both_layouts(cases: list[Case]) -> list[Any]:
    """Values of ``layout`` and ``case``. One rank and many scales are long tests in token-major
    order: they have kernels of their own, whose compilation takes the time."""
    in_one = (CASES[3], WIDE)
    return [
        pytest.param(
            layout,
            case,
            id=f"{layout}-{case}",
            marks=[pytest.mark.long] if layout == "token_major" and case in in_one else [],
        )
        for layout, case in itertools.product(LAYOUTS, cases)
    ]


@pytest.mark.parametrize(("layout", "case"), in_both_layouts(CASES))
def test_rounds(case: Case, layout: str) -> None:
    world = World(case.ranks, tiny_ring(case))
    fewer = tuple(tokens // 4 for tokens in case.tokens[::-1])
    turns = [case, dataclasses.replace(case, tokens=fewer, seed=1)]

    def program(rank: int, mode: CudaHighThroughput) -> None:
        for turn in turns:
            run_case(mode, turn, rank, layout)

    world.run(program)


@pytest.mark.parametrize(("layout", "case"), in_both_layouts([*CASES, WIDE]))
def test_rounds_in_place(case: Case, layout: str) -> None:
    """Rows that peers write where they stay, in memory that holds just those of the rank that gets
    most."""
    turns = [case, dataclasses.replace(case, seed=1), dataclasses.replace(case, style="one_rank")]
    result_bytes = max(results_of(turn, layout) for turn in turns)
    world = World(case.ranks, tiny_ring(case), result_bytes=result_bytes)

    def program(rank: int, mode: CudaHighThroughput) -> None:
        for turn in turns:
            run_case(mode, turn, rank, layout, in_place=True)

    world.run(program)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_rings_as_long_as_on_a_gpu(layout: str) -> None:
    """Of a combine's warps, where emulated ones are shorter."""
    case = CASES[0]
    world = World(case.ranks, tiny_ring(case))
    with mock.patch.multiple(kernels, **LONG_RINGS):
        world.run(lambda rank, mode: run_case(mode, case, rank, layout))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_each_rank_combines_in_its_own_way(layout: str) -> None:
    """With as many SMs and warps as it has, and folding as far behind as suits them."""
    case = Case(
        tokens=(150, 0, 45, 97), experts_per_rank=2, top_k=2, hidden=16, style="holes", biases=1
    )

    def lags(kind: CombineKind, ctas: int, slots: int) -> tuple[int, int]:
        return (1, 1) if ctas == 2 else (slots // 2, 1)

    with mock.patch.multiple(kernels, lags=lags, _MANY_MOST_CTAS=2):
        world = World(case.ranks, tiny_ring(case))

        def program(rank: int, mode: CudaHighThroughput) -> None:
            mode.use_sms(2 + rank % 2)
            run_case(mode, case, rank, layout)

        world.run(program)


def test_in_place_needs_memory() -> None:
    """What one rank alone finds makes the call aborted on all; it stays in step."""
    world = World(SMALL.ranks, ROOMY_RING, result_bytes=results_of(SMALL))

    def program(rank: int, mode: CudaHighThroughput) -> None:
        there = mode._results.memory[256:1280]
        rows = there.view(torch.bfloat16).view(16, 32)
        scales = there.view(torch.float32).view(16, 16)[:, ::3]
        for x in (rows, (torch.zeros((16, 32), dtype=torch.float8_e4m3fn), scales)):
            with pytest.raises(ArgumentError, match="x is in the memory of results in place"):
                mode.dispatch(x, torch.zeros((16, 4), dtype=torch.int64), num_experts=9,
                              in_place=True)  # fmt: skip
        # All tokens go to rank 0, whose memory does not hold them.
        case = dataclasses.replace(SMALL, style="one_rank", tokens=(90, 80, 45))
        expect = Round(case, rank)
        raised = ArgumentError if rank == 0 else PeerRefused
        told = r"at most \d+ of 64 .*in_place_rows" if rank == 0 else "rank 0"
        with pytest.raises(raised, match=told):
            (dispatch(mode, expect, "expert_major", None, in_place=True), mode.check())
        with pytest.raises(ArgumentError, match="in place"):
            dispatch(mode, expect, "expert_major", 1000, in_place=True)
        run_case(mode, SMALL, rank, "expert_major", in_place=True)
        # Some in place and others not.
        expect = Round(SMALL, rank)
        got = dispatch(mode, expect, "expert_major", None)
        mode.dispatch_cached(
            sent(expect, mode.device), got.plan, layout="expert_major", in_place=rank == 1
        )
        with pytest.raises(ArgumentError, match="the same on all ranks"):
            mode.check()
        run_case(mode, SMALL, rank, "expert_major", in_place=True)

    world.run(program)
    [alone] = World(1, ROOMY_RING).modes
    expect = Round(dataclasses.replace(SMALL, tokens=(4,)), 0)
    with pytest.raises(UsageError, match="result_bytes"):
        dispatch(alone, expect, "expert_major", 99, in_place=True)


@pytest.mark.parametrize(
    ("ranks", "layout", "in_place"),
    [
        (5, "expert_major", False),
        (8, "token_major", True),
        pytest.param(6, "token_major", False, marks=pytest.mark.long),
        pytest.param(7, "expert_major", True, marks=pytest.mark.long),
    ],
)
def test_more_ranks(ranks: int, layout: str, in_place: bool) -> None:
    tokens = tuple((19, 0, 33)[rank % 3] for rank in range(ranks))
    case = dataclasses.replace(SMALL, tokens=tokens, experts_per_rank=2)
    world = World(ranks, tiny_ring(case), result_bytes=results_of(case, layout))
    world.run(lambda rank, mode: run_case(mode, case, rank, layout, in_place))


@pytest.mark.parametrize("style", ["one_rank", "one_expert", "none"])
def test_skewed_routing(style: str) -> None:
    case = dataclasses.replace(CASES[0], tokens=(90, 0, 45), style=style, biases=0)
    world = World(case.ranks, tiny_ring(case))
    world.run(lambda rank, mode: run_case(mode, case, rank, "expert_major"))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_sums_of_negative_zeros_are_positive(layout: str) -> None:
    """As on the host, whose sums begin with zero; also of one row alone."""
    world = World(SMALL.ranks, ROOMY_RING)

    def program(rank: int, mode: CudaHighThroughput) -> None:
        got = dispatch(mode, Round(SMALL, rank), layout, None)
        sums, _ = mode.combine(
            torch.full_like(got.tokens, -0.0),
            got.plan,
            layout=layout,  # type: ignore[arg-type]
            row_weights=got.row_weights,
        )
        assert not sums.view(torch.int16).any()

    world.run(program)


# One rank: tokens without experts, entries that name one expert, one batch, and none.
ALONE = [
    Case(tokens=(230,), experts_per_rank=6, top_k=4, hidden=80, style="holes", slack=0),
    Case(tokens=(61,), experts_per_rank=3, top_k=4, hidden=32, style="duplicates", alignment=4),
    Case(tokens=(5,), experts_per_rank=3, top_k=2, hidden=16, weighted=False),
    Case(tokens=(0,), experts_per_rank=3, top_k=2, hidden=16),
]


@pytest.mark.parametrize("case", ALONE, ids=str)
@pytest.mark.parametrize("last", [0, 1, 3, 1000])
def test_one_rank_sums_without_folds(case: Case, last: int) -> None:
    """Of the batches the last are done in parts, or all of them, or none."""
    world = World(1, tiny_ring(case))
    with mock.patch.object(kernels, "lags", return_value=(last, last)):
        world.run(lambda rank, mode: run_case(mode, case, rank, "expert_major"))


def test_a_sum_of_one_rank_that_rounds_to_negative_zero_is_positive() -> None:
    """As if it came from one of several ranks: that is added to zero."""
    case = dataclasses.replace(SMALL, tokens=(30,))
    world = World(1, ROOMY_RING)

    def program(rank: int, mode: CudaHighThroughput) -> None:
        got = dispatch(mode, Round(case, rank), "expert_major", None)
        weights = torch.full_like(got.row_weights, 2.0**-10)
        sums, _ = mode.combine(
            torch.full_like(got.tokens, -(2.0**-130)),
            got.plan,
            layout="expert_major",
            row_weights=weights,
        )
        assert not sums.view(torch.int16).any()

    world.run(program)


@pytest.mark.parametrize("case", [CASES[1], SMALL], ids=str)
@pytest.mark.parametrize("in_place", [False, True])
def test_padding_without_zeros(case: Case, in_place: bool) -> None:
    """Padding rows hold what they held; everything else, and what describes them, is the same."""
    world = World(case.ranks, ROOMY_RING, result_bytes=1 << 17)

    def program(rank: int, mode: CudaHighThroughput) -> list[dict[str, Any]]:
        expect = Round(case, rank)
        room, found = expect.capacity("expert_major"), []
        for zero_padding in (True, False):
            mode.use_zero_padding(zero_padding)
            mode._results.memory.fill_(7)
            got = dispatch(mode, expect, "expert_major", room, in_place)
            found.append(_kept(got))
            for _ in range(2):  # the first and a repeated one
                mode.quiesce()
                mode._results.memory.fill_(7)
                x = sent(expect, mode.device)
                got = mode.dispatch_cached(x, got.plan, layout="expert_major", in_place=in_place)
                found.append(_kept(got))
        mode.quiesce()
        return found

    for found in world.run(program):
        for wanted, got in zip(found[:3], found[3:], strict=True):
            _assert_only_padding_differs(wanted, got, 7 if in_place else None)


def _kept(got: CudaDispatched) -> dict[str, Any]:
    names = ("tokens", "scales", "row_weights", "row_source_rank", "row_source_token")
    kept = {name: getattr(got, name) for name in names}
    assert got.offsets is not None
    kept["padding"] = got.row_source_rank[: int(got.offsets[-1])] < 0
    return {name: each if each is None else each.clone() for name, each in kept.items()}


def _assert_only_padding_differs(
    wanted: dict[str, Any], got: dict[str, Any], in_place: int | None
) -> None:
    padding = wanted["padding"]
    assert padding.any()
    for name in ("row_weights", "row_source_rank", "row_source_token"):
        assert wanted[name] is got[name] is None or torch.equal(wanted[name], got[name])
    for name in ("tokens", "scales"):
        if wanted[name] is None:
            continue
        held = torch.full_like(got[name], 7.0).view(torch.uint8)[0]
        zeroed, kept = (each[name].view(torch.uint8)[: len(padding)] for each in (wanted, got))
        assert not zeroed[padding].any()
        assert (kept[padding] == (held if in_place is None else in_place)).all(), "written to"
        assert torch.equal(zeroed[~padding], kept[~padding])


def test_turns_without_a_wait() -> None:
    cases = [
        dataclasses.replace(SMALL, style=style, seed=n)
        for n, style in enumerate(("spread", "one_rank", "holes"))
    ]
    world = World(SMALL.ranks, tiny_ring(SMALL), result_bytes=soak_results(cases))
    world.run(lambda rank, mode: soak(mode, cases, rank, 40))


@pytest.mark.parametrize("grid", [(2, 1), (3, 2)])
@pytest.mark.parametrize(("layout", "in_place"), [("expert_major", False), ("token_major", True)])
def test_other_grids(grid: tuple[int, int], layout: str, in_place: bool) -> None:
    ctas, senders = grid
    results = results_of(SMALL, layout)
    world = World(SMALL.ranks, tiny_ring(SMALL), ctas=ctas, senders=senders, result_bytes=results)
    world.run(lambda rank, mode: run_case(mode, SMALL, rank, layout, in_place))


@pytest.mark.parametrize(("sends", "combines"), [(2, CTAS), (CTAS, 2)])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_each_kernel_has_ctas_of_its_own(layout: str, sends: int, combines: int) -> None:
    """As many as the model says, and a plan all."""
    taken = set()

    def chosen(kind: DispatchKind | CombineKind) -> int:
        return sends if isinstance(kind, DispatchKind) else combines

    def spied(arguments: type) -> Any:
        launch = arguments.launch  # type: ignore[attr-defined]

        def spy(args: Any, loaded: Any, shape: Any, stream: int) -> None:
            taken.add((arguments, shape.ctas))
            launch(args, loaded, shape, stream)

        return mock.patch.object(arguments, "launch", spy)

    with ExitStack() as stack:
        for arguments in ARGUMENTS:
            stack.enter_context(spied(arguments))
        stack.enter_context(mock.patch.object(grid, "sms_for", chosen))
        world = World(SMALL.ranks, tiny_ring(SMALL))
        world.run(lambda rank, mode: run_case(mode, SMALL, rank, layout))
    assert taken == {
        (_core.CudaPlanArgs, CTAS),
        (_core.CudaHighThroughputDispatchArgs, sends),
        (_core.CudaHighThroughputCombineArgs, combines),
    }


def test_sms_change_between_calls() -> None:
    """Also by a plan of other CTAs, and on each rank otherwise."""
    world = World(SMALL.ranks, tiny_ring(SMALL))

    def program(rank: int, mode: CudaHighThroughput) -> None:
        launched = []
        ctas_of = {2: 2, 1: 2, 1000: CTAS, None: CTAS}
        with pytest.raises(ArgumentError, match="sms"):
            mode.use_sms(0)
        for turn, sms in enumerate([*ctas_of, 2]):
            mode.use_sms(sms if rank else None)
            launched.append(mode._launches._grid.of_plan()[0])
            run_case(mode, dataclasses.replace(SMALL, seed=turn), rank, LAYOUTS[turn % 2])
        assert launched == [ctas_of[sms] if rank else CTAS for sms in [*ctas_of, 2]]

    world.run(program)


def test_the_face_says_how_many_sms() -> None:
    sizes = {"num_experts": 4, "top_k": 2, "hidden": 32, "max_tokens": 8}
    config = Config.resolve(backend="host")
    with HighThroughput(None, **sizes, config=config) as ep:
        ep.use_sms(8)
        ep.use_sms(None)
        with pytest.raises(ArgumentError, match="sms"):
            ep.use_sms(0)
        on_gpu = mock.create_autospec(CudaHighThroughput, instance=True)
        with mock.patch.object(ep, "_backend", on_gpu):
            ep.use_sms(12)
        on_gpu.use_sms.assert_called_once_with(12)


def test_the_face_says_whether_padding_is_zero() -> None:
    sizes = {"num_experts": 4, "top_k": 2, "hidden": 32, "max_tokens": 8}
    with HighThroughput(None, **sizes, config=Config.resolve(backend="host")) as ep:
        on_gpu = mock.create_autospec(CudaHighThroughput, instance=True)
        with mock.patch.object(ep, "_backend", on_gpu):
            ep.use_zero_padding(False)
            with pytest.raises(ArgumentError, match="zeros"):
                ep.use_zero_padding(None)  # type: ignore[arg-type]
        on_gpu.use_zero_padding.assert_called_once_with(False)
    with pytest.raises(UsageError, match="closed"):
        ep.use_zero_padding(True)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("capacity", [False, True])
def test_a_plan_serves_both_layouts(capacity: bool, weighted: bool) -> None:
    world = World(SMALL.ranks, ROOMY_RING, result_bytes=1 << 15)

    def program(rank: int, mode: CudaHighThroughput) -> None:
        style = "duplicates" if weighted else SMALL.style
        expect = Round(dataclasses.replace(SMALL, weighted=weighted, style=style), rank)
        room = 400 if capacity else None
        got = dispatch(mode, expect, "token_major", room)
        check_plan(expect, got.plan, "token_major")
        y = torch.zeros((got.plan.row_count("expert_major"), 32), dtype=torch.bfloat16)
        if capacity:
            expect.case = dataclasses.replace(expect.case, slack=0)
            expect.capacity = lambda layout: 400  # type: ignore[method-assign]
        again = mode.dispatch_cached(sent(expect, mode.device), got.plan, layout="expert_major")
        check_brought(expect, again, "expert_major")
        check_rows_of(expect, got.plan)
        check_combine(mode, expect, again, "expert_major")
        assert len(y) == len(again.tokens)
        back = mode.dispatch_cached(sent(expect, mode.device), got.plan, layout="token_major")
        check_brought(expect, back, "token_major")
        for layout in LAYOUTS:
            there = mode.dispatch_cached(
                sent(expect, mode.device), got.plan, layout=layout, in_place=True
            )
            check_brought(expect, there, layout)
        mode.quiesce()

    world.run(program)


def test_a_plan_is_kept_for_all_streams_that_use_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its memory goes back to the stream that it was made on, also what came to it on another."""
    (mode,) = World(1, ROOMY_RING).modes
    expect = Round(dataclasses.replace(SMALL, tokens=(30,), weighted=False), 0)
    current, kept = [5], set[tuple[int, int]]()
    monkeypatch.setattr(mode, "_follow", lambda: current[0])
    monkeypatch.setattr(
        "fanfold.backends.high_throughput.plan.stream_at", lambda address, device: address
    )
    monkeypatch.setattr(
        torch.Tensor, "record_stream", lambda tensor, stream: kept.add((tensor.data_ptr(), stream))
    )
    # Not by monkeypatch, which ends after the emulation and would bring its answers back.
    with mock.patch.object(torch.cuda, "current_stream", side_effect=lambda device: current[0]):
        plan = dispatch(mode, expect, "token_major", 100).plan
        assert not kept
        current[0] = 7
        mode.dispatch_cached(sent(expect, mode.device), plan, layout="expert_major")
        assert plan.rows_of is not None
        used = {(tensor.data_ptr(), 7) for tensor in plan.tensors()}
        assert kept == used | {(plan.rows_of.data_ptr(), 5)}
        current[0] = 9
        mode.refuse_dispatch(ValueError("of a layer above"), plan)
        assert (plan.block.data_ptr(), 9) in kept
        # Within a capture, too: what it gives back it gives to its other streams.
        current[0] = 11
        with mock.patch.object(torch.cuda, "is_current_stream_capturing", return_value=True):
            mode.dispatch_cached(sent(expect, mode.device), plan, layout="expert_major")
        assert {(tensor.data_ptr(), 11) for tensor in plan.tensors()} <= kept


def test_a_new_routing_has_its_kernels_compiled_together() -> None:
    (mode,) = World(1, ROOMY_RING).modes
    expect = Round(dataclasses.replace(SMALL, tokens=(5,)), 0)
    with mock.patch.object(launches.jit, "load_all") as together:
        for _ in range(2):
            dispatch(mode, expect, "token_major", None)
    together.assert_called_once()
    entries = [source.entry for source in together.call_args.args[0]]
    assert entries == ["fanfold::high_throughput::plan", "fanfold::high_throughput::dispatch"]


def test_expert_major_combine_needs_expert_major_rows() -> None:
    world = World(SMALL.ranks, ROOMY_RING)
    case = dataclasses.replace(SMALL, tokens=(5, 0, 9))

    def program(rank: int, mode: CudaHighThroughput) -> None:
        got = dispatch(mode, Round(case, rank), "token_major", None)
        y = torch.zeros((got.plan.row_count("expert_major"), 32), dtype=torch.bfloat16)
        with pytest.raises(UsageError, match="expert-major"):
            mode.combine(y, got.plan, layout="expert_major")
        run_case(mode, case, rank, "expert_major")

    world.run(program)


# ---- sizes that cannot be -----------------------------------------------------------------------


def test_bounds() -> None:
    world = World(1, 1 << 20)
    [mode] = world.modes

    def call(hidden: int = 32, experts: int = 4, tokens: int = 2, alignment: int = 1) -> None:
        x = torch.zeros((tokens, hidden), dtype=torch.bfloat16)
        idx = torch.zeros((tokens, 1), dtype=torch.int64)
        mode.dispatch(x, idx, num_experts=experts, expert_alignment=alignment)

    for bad, word in (
        ({"hidden": 65536}, "two rows must fit its shared memory"),
        ({"hidden": 40000}, "ring_bytes"),
        ({"experts": 2049}, "num_experts"),
        ({"tokens": 257}, "max_tokens"),
        ({"alignment": 1 << 20, "experts": 2048}, "rows that one rank may receive"),
    ):
        with pytest.raises(ArgumentError, match=word):
            call(**bad)
    call()
    with pytest.raises(ArgumentError, match="senders"):
        World(2, ROOMY_RING, ctas=2, senders=2)
    with pytest.raises(ArgumentError, match="from 1 to 1024 for high throughput"):
        _core.cuda_high_throughput_bytes(1025, 1 << 12)


def test_long_rows_take_fewer_warps() -> None:
    case = Case(tokens=(9, 14), experts_per_rank=2, top_k=2, hidden=24576)
    world = World(2, 4 * 8 * 49408)
    world.run(lambda rank, mode: check_one_dispatch(mode, case, rank))


def check_one_dispatch(mode: CudaHighThroughput, case: Case, rank: int) -> None:
    expect = Round(case, rank)
    check_brought(expect, dispatch(mode, expect, "expert_major", None), "expert_major")
