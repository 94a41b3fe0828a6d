"""The high-throughput kernels, run on the CPU, when something goes wrong: refusals, ranks that
disagree or come late, and what only the kernels find.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from unittest import mock

import pytest
import torch

from fanfold.backends.high_throughput import cuda as cuda_module
from fanfold.backends.high_throughput.cuda import CudaHighThroughput
from fanfold.backends.high_throughput.plan import CudaDispatched, CudaPlan
from fanfold.errors import ArgumentError, FanfoldError, PeerRefused, PeerTimeout
from tests.distributed import routings
from tests.distributed.cuda_rounds import (
    check_brought,
    check_combine,
    check_plan,
    check_rows_of,
    dispatch,
    run_case,
    sent,
)
from tests.distributed.routings import Round, results_of
from tests.emulation.high_throughput import CTAS, ROOMY_RING, SMALL, World, emulated
from tests.emulation.world import Builder

LAYOUTS = ("expert_major", "token_major")
FAILED = 6  # word of HighThroughputState


@pytest.fixture(autouse=True)
def gpu(builder: Builder) -> Iterator[None]:
    with emulated(builder, CTAS):
        yield


# ---- refusals -----------------------------------------------------------------------------------


def refuse(mode: CudaHighThroughput, how: str, got: CudaDispatched) -> None:
    """Makes a mistake in a call."""
    x = torch.zeros((5, 32))
    idx = torch.zeros((5, 4), dtype=torch.int64)
    calls: dict[str, Callable[[], object]] = {
        "dispatch": lambda: mode.dispatch(x, idx.int(), num_experts=9),
        "cached": lambda: mode.dispatch_cached(x[:1], got.plan, layout="expert_major"),
        "combine": lambda: mode.combine(x, got.plan, layout="expert_major"),
        "weights": lambda: mode.combine_weights(x, got.plan, layout="expert_major"),
    }
    with pytest.raises(ArgumentError):
        calls[how]()


@pytest.mark.parametrize("how", ["dispatch", "cached", "combine", "weights"])
@pytest.mark.parametrize("capacity", [None, 500])
def test_a_refused_call_is_aborted_on_all_ranks(how: str, capacity: int | None) -> None:
    world = World(SMALL.ranks, ROOMY_RING)

    def program(rank: int, mode: CudaHighThroughput) -> None:
        expect = Round(SMALL, rank)
        got = dispatch(mode, expect, "expert_major", None)
        if rank == 1:
            refuse(mode, how, got)
        else:
            aborted_call(mode, how, expect, got, capacity)
        # The plan of before is as good as before, and so is the memory.
        check_combine(mode, expect, got, "expert_major")
        run_case(mode, SMALL, rank, "token_major")

    world.run(program)


def aborted_call(
    mode: CudaHighThroughput, how: str, expect: Round, got: CudaDispatched, capacity: int | None
) -> None:
    plan = got.plan
    y = torch.zeros((plan.row_count("expert_major"), 32), dtype=torch.bfloat16)
    if how == "dispatch" and capacity is None:
        with pytest.raises(PeerRefused, match="rank 1 refused its input to high_throughput counts"):
            dispatch(mode, expect, "expert_major", capacity)
        return
    if how == "dispatch":
        aborted = dispatch(mode, expect, "expert_major", capacity)
        assert int(aborted.plan.source_prefix[0]) == -1
        # Who reads these on the GPU, before anything is raised, finds no rows.
        assert not aborted.plan.offsets.any()
        assert not aborted.plan.tokens_per_expert.any()
        assert_no_rows(aborted)
        # What is done with its plan is no call: rank 1 does not take part.
        mode.dispatch_cached(sent(expect, mode.device), aborted.plan, layout="expert_major")
        y = torch.zeros((500, 32), dtype=torch.bfloat16)
        with pytest.raises(PeerRefused):
            mode.combine(y, aborted.plan, layout="expert_major")
        mode.combine(y, aborted.plan, layout="expert_major")
        with pytest.raises(ArgumentError, match="y"):
            mode.combine(y.float(), aborted.plan, layout="expert_major")
        return
    if how == "cached":
        mode.dispatch_cached(sent(expect, mode.device), plan, layout="expert_major")
        with pytest.raises(PeerRefused, match="high_throughput dispatch"):
            mode.check()
        return
    lanes = torch.zeros(len(y))
    with pytest.raises(PeerRefused, match="high_throughput combine"):
        (
            mode.combine(y, plan, layout="expert_major")
            if how == "combine"
            else mode.combine_weights(lanes, plan, layout="expert_major")
        )


def assert_no_rows(got: CudaDispatched) -> None:
    """What is told of the rows of a dispatch says of all of them that there is none."""
    absent = [got.row_source_rank, got.row_source_token, got.plan.source_token]
    absent += [each for each in (got.plan.rows_of, got.plan.topk_idx) if each is not None]
    for told in absent:
        assert bool((told == -1).all())
    for weights in (got.row_weights, got.plan.topk_weights):
        assert weights is None or not weights.any()


def test_the_rows_of_a_plan_after_a_void_dispatch_by_it() -> None:
    """A cached dispatch that was to compute them may be void; the next one then does."""
    world = World(SMALL.ranks, ROOMY_RING)

    def program(rank: int, mode: CudaHighThroughput) -> None:
        expect = Round(dataclasses.replace(SMALL, weighted=False), rank)
        got = dispatch(mode, expect, "token_major", None)
        if rank == 1:
            refuse(mode, "cached", got)
        else:
            mode.dispatch_cached(sent(expect, mode.device), got.plan, layout="expert_major")
            with pytest.raises(PeerRefused):
                mode.check()
        again = mode.dispatch_cached(sent(expect, mode.device), got.plan, layout="expert_major")
        check_brought(expect, again, "expert_major")
        check_rows_of(expect, got.plan)

    world.run(program)


def test_a_dispatch_refused_after_its_plan() -> None:
    """Rank 1 finds after the counts that it has no memory for the rows."""
    world = World(SMALL.ranks, ROOMY_RING)

    def program(rank: int, mode: CudaHighThroughput) -> None:
        expect = Round(SMALL, rank)
        room = 500 if rank == 0 else None
        if rank == 1:
            broken = mock.patch.object(mode._room, "dispatched", side_effect=MemoryError)
            with broken, pytest.raises(MemoryError):
                dispatch(mode, expect, "expert_major", None)
        else:
            aborted = dispatch(mode, expect, "expert_major", room)
            assert int(aborted.plan.source_prefix[0]) == -1
            if room is not None:
                assert_no_rows(aborted)
            y = torch.zeros_like(aborted.tokens)
            with pytest.raises(PeerRefused, match=r"rank 1 .* high_throughput dispatch"):
                mode.combine(y, aborted.plan, layout="expert_major")
        run_case(mode, SMALL, rank, "expert_major")

    world.run(program)


def test_ranks_that_disagree_are_told_and_stay_in_step() -> None:
    world = World(SMALL.ranks, ROOMY_RING)

    def program(rank: int, mode: CudaHighThroughput) -> None:
        case = dataclasses.replace(SMALL, alignment=8 if rank == 2 else 4)
        with pytest.raises(ArgumentError, match="the same on all ranks"):
            dispatch(mode, Round(case, rank), "expert_major", None)
        expect = Round(SMALL, rank)
        layout = LAYOUTS[rank % 2]
        got = dispatch(mode, expect, layout, 500)
        assert int(got.plan.source_prefix[0]) == -1
        assert_no_rows(got)
        with pytest.raises(ArgumentError, match="high_throughput dispatch"):
            mode.combine(got.tokens, got.plan, layout=layout)  # type: ignore[arg-type]
        run_case(mode, SMALL, rank, "expert_major")

    world.run(program)


# ---- what only the kernels find -----------------------------------------------------------------


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("in_place", [False, True])
def test_rows_that_never_came_are_no_indices(layout: str, in_place: bool) -> None:
    """A rank announces its rows and sends none: who waited must not find indices in their place."""
    world = World(SMALL.ranks, ROOMY_RING, timeout_s=0.5, result_bytes=1 << 16)

    def program(rank: int, mode: CudaHighThroughput) -> None:
        expect = Round(SMALL, rank)
        if rank == 2:

            def fail(plan: CudaPlan) -> None:
                mode._state.view(torch.int32)[FAILED] = 1

            own = expect.own
            mode.dispatch(
                sent(expect, mode.device),
                own.topk_idx,
                own.topk_weights,
                num_experts=SMALL.experts,
                layout=layout,  # type: ignore[arg-type]
                expert_alignment=SMALL.alignment,
                planned=fail,
                in_place=in_place,
            )
            return
        got = dispatch(mode, expect, layout, 500, in_place)
        with pytest.raises(PeerTimeout, match="rank 2 in high_throughput dispatch"):
            mode.check()
        assert_no_rows(got)

    world.run(program)


@pytest.mark.parametrize("call", ["plan", "dispatch", "combine"])
def test_a_late_rank_is_named(call: str) -> None:
    world = World(SMALL.ranks, ROOMY_RING, timeout_s=0.5)

    def program(rank: int, mode: CudaHighThroughput) -> None:
        expect = Round(SMALL, rank)
        got = dispatch(mode, expect, "expert_major", 500)
        mode.quiesce()
        if rank == 2:
            return
        phase = {"plan": "counts"}.get(call, call)
        room = None if rank == 0 else 500
        calls: dict[str, Callable[[], object]] = {
            "plan": lambda: dispatch(mode, expect, "expert_major", room),
            "dispatch": lambda: mode.dispatch_cached(
                sent(expect, mode.device), got.plan, layout="expert_major"
            ),
            "combine": lambda: mode.combine(got.tokens, got.plan, layout="expert_major"),
        }
        with pytest.raises(PeerTimeout, match=f"rank 2 in high_throughput {phase}"):
            (calls[call](), mode.check())
        with pytest.raises(PeerTimeout):
            mode.dispatch_cached(sent(expect, mode.device), got.plan, layout="expert_major")

    world.run(program)


@pytest.mark.parametrize("style", ["spread", "none"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("call", ["dispatch", "in_place", "combine"])
def test_a_rank_that_has_not_come_is_only_announced_to(call: str, layout: str, style: str) -> None:
    """Its memory is that of the call before, which it may still read; also where no row goes to
    anybody, as batches are told of all the same."""
    case = dataclasses.replace(SMALL, style=style)
    world = World(case.ranks, ROOMY_RING, timeout_s=0.5, result_bytes=1 << 16)

    def begin(rank: int, mode: CudaHighThroughput) -> CudaDispatched:
        got = dispatch(mode, Round(case, rank), layout, 500)
        mode.quiesce()
        return got

    given = world.run(begin)
    late = world.modes[2]._memory.tensor[2 * 8 * case.ranks :]  # behind the announcements
    before = late.clone()

    def program(rank: int, mode: CudaHighThroughput) -> None:
        if rank == 2:
            return
        x, got = sent(Round(case, rank), mode.device), given[rank]
        calls: dict[str, Callable[[], object]] = {
            "dispatch": lambda: mode.dispatch_cached(x, got.plan, layout=layout),
            "in_place": lambda: mode.dispatch_cached(x, got.plan, layout=layout, in_place=True),
            "combine": lambda: mode.combine(got.tokens, got.plan, layout=layout),
        }
        with pytest.raises(PeerTimeout, match="rank 2"):
            (calls[call](), mode.check())

    world.run(program)
    assert torch.equal(late, before)


@pytest.mark.parametrize(
    ("layout", "in_place"), [(layout, in_place) for layout in LAYOUTS for in_place in (False, True)]
)
@pytest.mark.parametrize(("short", "missing"), [(2, 1), (0, 1), (2, 5), (2, 10000)])
def test_more_rows_than_the_capacity_are_reported(
    layout: str, in_place: bool, short: int, missing: int
) -> None:
    """Also if what does not fit is padding, or last the rank's own (of rank 2) or a peer's."""
    # In place there is no memory behind the rows of the rank that gets most.
    world = World(SMALL.ranks, ROOMY_RING, result_bytes=results_of(SMALL, layout))

    def program(rank: int, mode: CudaHighThroughput) -> None:
        expect = Round(SMALL, rank)
        # What rings hold is not to be taken for rows of a later call.
        whole = dispatch(mode, expect, layout, None)
        mode.combine(torch.full_like(whole.tokens, torch.nan), whole.plan, layout=layout)
        needed = len(expect.rows) if layout == "token_major" else expect.offsets[-1]
        room = max(0, needed - missing) if rank == short else needed
        got = dispatch(mode, expect, layout, room, in_place)
        assert len(got.tokens) == room
        if rank == short:
            with pytest.raises(ArgumentError, match=f"capacity of .* is {room}"):
                mode.check()
            if layout == "expert_major":
                check_fitting(expect, got.plan, room)
        else:
            check_brought(expect, got, layout)
        # Rows behind the capacity are nowhere, so nothing is read where they would be.
        y = torch.full((room + 64, SMALL.hidden), torch.nan, dtype=torch.bfloat16)
        y[:room] = 1.0
        lanes = None if layout == "expert_major" else torch.ones((room, SMALL.top_k))
        sums, _ = mode.combine(y[:room], got.plan, layout=layout, topk_weights=lanes)
        assert not sums.isnan().any()
        run_case(mode, SMALL, rank, layout)

    world.run(program)


def check_fitting(expect: Round, plan: CudaPlan, room: int) -> None:
    """What is told on the GPU is of the rows that fit, so that nothing reads behind them."""
    offsets = [min(offset, room) for offset in expect.offsets]
    assert plan.offsets.tolist() == offsets
    assert plan.tokens_per_expert.tolist() == [
        min(begin + count, room) - min(begin, room)
        for begin, count in zip(expect.offsets[:-1], expect.counts, strict=True)
    ]


def test_a_plan_whose_ctas_do_not_meet_tells_of_no_rows() -> None:
    """What reads its counts on the GPU would take what stood there before for rows."""
    (mode,) = World(1, ROOMY_RING, timeout_s=0.5).modes
    mode._state.view(torch.int32)[5] = 1000  # HighThroughputState.gathered
    case = dataclasses.replace(SMALL, tokens=(9,))
    plan = dispatch(mode, Round(case, 0), "expert_major", 100).plan
    with pytest.raises(PeerTimeout):
        mode.check()
    assert not plan.offsets.any()
    assert not plan.tokens_per_expert.any()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_dropped_rows_count_as_zeros(layout: str) -> None:
    """Which is not the same as nothing: added to a bias of -0.0 they make 0.0."""
    case = dataclasses.replace(SMALL, style="one_rank")
    world = World(case.ranks, ROOMY_RING)

    def program(rank: int, mode: CudaHighThroughput) -> None:
        expect = Round(case, rank)
        got = dispatch(mode, expect, layout, 2)
        if rank == 0:  # to whom all go
            with pytest.raises(ArgumentError, match=r"capacity of .* is 2"):
                mode.check()
        bias = torch.full((case.tokens[rank], case.hidden), -0.0, dtype=torch.bfloat16)
        sums, _ = mode.combine(torch.ones_like(got.tokens), got.plan, layout=layout, bias=bias)
        assert not sums.signbit().any()
        # Of the first tokens some rows had room.
        assert not sums[2:].any()

    world.run(program)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_rows_that_do_not_fit_their_memory_are_not_sent(layout: str) -> None:
    """With as much room as there is on every rank, and more that comes."""
    rows, few = 40, dataclasses.replace(SMALL, tokens=(9, 0, 3))
    result_bytes = rows * 2 * SMALL.hidden + 128
    world = World(SMALL.ranks, ROOMY_RING, result_bytes=result_bytes)

    def program(rank: int, mode: CudaHighThroughput) -> None:
        dispatch(mode, Round(SMALL, rank), layout, rows, in_place=True)
        with pytest.raises(ArgumentError, match=f"capacity of .* is {rows}"):
            mode.check()
        run_case(mode, few, rank, layout, in_place=True)

    world.run(program)


def test_calls_whose_low_bits_begin_anew() -> None:
    """No word that was never written, or is wiped, is taken for a batch."""
    world = World(SMALL.ranks, ROOMY_RING)

    def program(rank: int, mode: CudaHighThroughput) -> None:
        mode._state[:4].view(torch.int32)[0] = (1 << 18) - 2  # the last call's number
        for _ in range(2):
            run_case(mode, SMALL, rank, "token_major")

    world.run(program)


@pytest.mark.parametrize(
    ("index", "told"),
    [
        (9, "9"),
        (-2, "-2"),
        (1 << 32, "8388607 or more"),  # whose low word is an expert's number
        (-1 << 40, "-8388608 or less"),
    ],
)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_index_out_of_range_is_none(layout: str, index: int, told: str) -> None:
    world = World(SMALL.ranks, ROOMY_RING)

    inputs = Round(SMALL, 0).inputs
    inputs[0].topk_idx[7, 1] = -1
    with mock.patch.object(routings, "make_input", lambda case, peer: inputs[peer]):
        rounds = [Round(SMALL, rank) for rank in range(SMALL.ranks)]

    def program(rank: int, mode: CudaHighThroughput) -> None:
        expect = rounds[rank]
        good = expect.own.topk_idx
        if rank == 0:
            expect.own = dataclasses.replace(expect.own, topk_idx=good.clone())
            expect.own.topk_idx[7, 1] = index
        got = dispatch(mode, expect, layout, None)
        check_plan(expect, got.plan, layout)
        check_brought(expect, got, layout)
        if rank == 0:
            with pytest.raises(ArgumentError, match=rf"topk_idx\[7, 1\].* is {told}, "):
                mode.check()
        check_combine(mode, expect, got, layout)

    with mock.patch.object(cuda_module, "check_routing"):  # which looks at entries on a CPU
        world.run(program)


def test_a_rank_that_cannot_open_the_mode_is_told_of_on_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also where it is not Fanfold that says so: else its peers wait for it in the group."""
    opened = CudaHighThroughput._open

    def without_memory(mode: CudaHighThroughput, result_bytes: int) -> None:
        if mode._memory.rank == 1:
            raise MemoryError("no room for counts")
        opened(mode, result_bytes)

    monkeypatch.setattr(CudaHighThroughput, "_open", without_memory)
    with pytest.raises((MemoryError, FanfoldError), match="no room for counts"):
        World(3, ROOMY_RING)
