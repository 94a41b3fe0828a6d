"""The high-throughput mode when something is wrong: bad input on one rank, ranks that disagree,
ranks that are killed or stopped in any phase, and going on without a rank."""

from __future__ import annotations

import dataclasses
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import fanfold
from fanfold.backends.high_throughput import Dispatched, HostHighThroughput, Plan
from fanfold.config import Config
from fanfold.group import as_group
from fanfold.launch import RankFailure, RankPool
from fanfold.memory.host import SymmetricMemory
from tests.distributed.layers import caught
from tests.distributed.routings import Case, Round
from tests.distributed.stopped_ranks import await_files, collect_with_one_stopped, reporting
from tests.distributed.test_high_throughput import Pools, opened, run_case, same_bits

RANKS = 3
CULPRIT = 1
CASE = Case(tokens=(9, 4, 30), experts_per_rank=4, top_k=3, hidden=64)


@dataclasses.dataclass
class Arguments:
    """Arguments of one dispatch, before a test spoils them."""

    x: Any
    topk_idx: Any
    topk_weights: Any
    num_experts: Any = CASE.experts
    layout: Any = "expert_major"
    expert_alignment: Any = 1
    capacity: Any = None

    def dispatch(self, mode: HostHighThroughput) -> Dispatched:
        return mode.dispatch(
            self.x,
            self.topk_idx,
            self.topk_weights,
            num_experts=self.num_experts,
            layout=self.layout,
            expert_alignment=self.expert_alignment,
            capacity=self.capacity,
        )


def _arguments(rank: int) -> Arguments:
    given = Round(CASE, rank).own
    return Arguments(given.x, given.topk_idx, given.topk_weights)


def _set(name: str, make: Callable[[Any], Any]) -> Callable[[Any], None]:
    return lambda arguments: setattr(arguments, name, make(getattr(arguments, name)))


def _with_entry(topk_idx: torch.Tensor, value: int) -> torch.Tensor:
    changed = topk_idx.clone()
    changed[2, 1] = value
    return changed


def _fp8(x: torch.Tensor) -> torch.Tensor:
    return x.float().to(torch.float8_e4m3fn)


BAD_DISPATCHES: dict[str, tuple[str, Callable[[Any], None]]] = {
    "x no tensor": ("x", _set("x", lambda x: x.tolist())),
    "x 1-d": ("x.shape", _set("x", lambda x: x[0])),
    "x strided": ("x.stride()", _set("x", lambda x: x.T.contiguous().T)),
    "x narrow": ("x.shape[1]", _set("x", lambda x: x[:, :8].contiguous())),
    "x odd": ("x.shape[1]", _set("x", lambda x: x[:, :60].contiguous())),
    "x more tokens": ("topk_idx.shape", _set("x", lambda x: torch.cat([x, x]))),
    "x on meta": ("x.device", _set("x", lambda x: x.to("meta"))),
    "x triple": ("x", _set("x", lambda x: (x, x, x))),
    "scales of bf16": ("x[0].dtype", _set("x", lambda x: (x, torch.ones(x.shape[0], 1)))),
    "scales dtype": ("x[1].dtype", _set("x", lambda x: (_fp8(x), x))),
    "scales short": ("x[1].shape", _set("x", lambda x: (_fp8(x), torch.ones(1, 1)))),
    "scales none": ("x[1].shape[1]", _set("x", lambda x: (_fp8(x), torch.ones(x.shape[0], 0)))),
    "idx dtype": ("topk_idx.dtype", _set("topk_idx", lambda i: i.int())),
    "idx too large": ("topk_idx[2, 1]", _set("topk_idx", lambda i: _with_entry(i, 12))),
    "idx too small": ("topk_idx[2, 1]", _set("topk_idx", lambda i: _with_entry(i, -2))),
    "idx too wide": ("topk_idx.shape[1]", _set("topk_idx", lambda i: i.repeat(1, 11))),
    "weights dtype": ("topk_weights.dtype", _set("topk_weights", lambda w: w.double())),
    "weights shape": ("topk_weights.shape", _set("topk_weights", lambda w: w[:, 1:].contiguous())),
    "experts not divisible": ("num_experts", _set("num_experts", lambda _: 11)),
    "experts too many": ("num_experts", _set("num_experts", lambda _: 33000)),
    "layout": ("layout", _set("layout", lambda _: "sideways")),
    "alignment": ("expert_alignment", _set("expert_alignment", lambda _: 0)),
    "capacity negative": ("capacity", _set("capacity", lambda _: -1)),
    "capacity too small": ("capacity", _set("capacity", lambda _: 1)),
    "scales beyond staging": (
        "staging_bytes",
        _set("x", lambda x: (torch.zeros(x.shape[0], 65536, dtype=torch.uint8),
                             torch.ones(x.shape[0], 8192))),
    ),
}  # fmt: skip


def _refused(
    group: dist.ProcessGroup, name: str, bad: str, call: Callable[..., object], after: object
) -> None:
    """``call`` raised ArgumentError on the culprit and PeerRefused with its words elsewhere."""
    del after
    rank = dist.get_rank(group)
    error = caught(call)
    if rank == CULPRIT:
        assert isinstance(error, fanfold.ArgumentError), (bad, error)
        assert error.argument == name, (bad, error)
    else:
        assert isinstance(error, fanfold.PeerRefused), (bad, error)
        assert (error.rank, error.peer) == (rank, CULPRIT)
        assert error.phase.startswith("high_throughput")
        assert name in error.reason, (bad, error)


def _bad_dispatches(group: dist.ProcessGroup) -> int:
    rank = dist.get_rank(group)
    with opened(group) as mode:
        for bad, (name, spoil) in BAD_DISPATCHES.items():
            arguments = _arguments(rank)
            if rank == CULPRIT:
                spoil(arguments)
            _refused(group, name, bad, lambda a=arguments: a.dispatch(mode), None)
            if bad in ("x 1-d", "capacity too small", "scales beyond staging"):
                run_case(mode, CASE, rank, "expert_major")
        run_case(mode, CASE, rank, "token_major")
    return len(BAD_DISPATCHES)


def test_bad_dispatches_are_void_everywhere(pools: Pools) -> None:
    assert pools(RANKS).run(_bad_dispatches) == [len(BAD_DISPATCHES)] * RANKS


def _bad_plan(plan: Plan, **changes: Any) -> object:
    return dataclasses.replace(plan, **changes)


BAD_COMBINES: dict[str, tuple[str, Callable[[HostHighThroughput, Dispatched], object]]] = {
    "y dtype": (
        "y.dtype",
        lambda m, d: m.combine(d.tokens.float(), d.plan, layout="expert_major"),
    ),
    "y rows": (
        "y.shape[0]",
        lambda m, d: m.combine(d.tokens[1:], d.plan, layout="expert_major"),
    ),
    "y of the other order": (
        "y.shape[0]",
        lambda m, d: m.combine(d.tokens, d.plan, layout="token_major"),
    ),
    "y strided": (
        "y.stride()",
        lambda m, d: m.combine(d.tokens.T.contiguous().T, d.plan, layout="expert_major"),
    ),
    "y odd": (
        "y.shape[1]",
        lambda m, d: m.combine(d.tokens[:, :60].contiguous(), d.plan, layout="expert_major"),
    ),
    "no plan": ("plan", lambda m, d: m.combine(d.tokens, d, layout="expert_major")),  # type: ignore[arg-type]
    "layout": ("layout", lambda m, d: m.combine(d.tokens, d.plan, layout="")),  # type: ignore[arg-type]
    "row weights": (
        "row_weights.shape",
        lambda m, d: m.combine(d.tokens, d.plan, layout="expert_major", row_weights=torch.ones(1)),
    ),
    "lane weights": (
        "topk_weights.shape",
        lambda m, d: m.combine(d.tokens, d.plan, layout="expert_major", topk_weights=torch.ones(1)),
    ),
    "bias shape": (
        "bias.shape",
        lambda m, d: m.combine(d.tokens, d.plan, layout="expert_major", bias=d.tokens[:1]),
    ),
    "three biases": (
        "bias",
        lambda m, d: m.combine(d.tokens, d.plan, layout="expert_major", bias=(d.tokens,) * 3),
    ),
    "out": (
        "out.shape",
        lambda m, d: m.combine(d.tokens, d.plan, layout="expert_major", out=d.tokens[:1]),
    ),
    "weights alone": (
        "topk_weights.dtype",
        lambda m, d: m.combine_weights(d.tokens[:, 0], d.plan, layout="expert_major"),
    ),
}

BAD_CACHED: dict[str, tuple[str, Callable[[HostHighThroughput, Dispatched], object]]] = {
    "tokens": (
        "x.shape[0]",
        lambda m, d: m.dispatch_cached(torch.zeros(1, 64), d.plan, layout="expert_major"),
    ),
    "no plan": (
        "plan",
        lambda m, d: m.dispatch_cached(d.tokens, None, layout="expert_major"),  # type: ignore[arg-type]
    ),
}


def _bad_others(group: dist.ProcessGroup) -> None:
    rank = dist.get_rank(group)
    given = Round(CASE, rank).own
    with opened(group) as mode:
        got = _arguments(rank).dispatch(mode)

        def good_combine() -> object:
            return mode.combine(got.tokens, got.plan, layout="expert_major")

        def good_cached() -> object:
            return mode.dispatch_cached(given.x, got.plan, layout="expert_major")

        before, _ = mode.combine(got.tokens, got.plan, layout="expert_major")
        for calls, good in ((BAD_COMBINES, good_combine), (BAD_CACHED, good_cached)):
            for bad, (name, call) in calls.items():
                wrong = (lambda c=call: c(mode, got)) if rank == CULPRIT else good
                _refused(group, name, bad, wrong, None)
        after, _ = mode.combine(got.tokens, got.plan, layout="expert_major")
        assert same_bits(before, after)
        run_case(mode, CASE, rank, "expert_major")


def test_bad_combines_are_void_everywhere(pools: Pools) -> None:
    pools(RANKS).run(_bad_others)


def _disagreements(group: dist.ProcessGroup) -> None:
    """Each rank's call is good by itself, but the culprit's is another than that of the rest."""
    rank = dist.get_rank(group)
    odd = rank == CULPRIT
    with opened(group) as mode:
        got = _arguments(rank).dispatch(mode)
        other_idx = (_arguments(rank).topk_idx + 1) % CASE.experts
        other = dataclasses.replace(_arguments(rank), topk_idx=other_idx).dispatch(mode)
        x = _arguments(rank).x
        for words, call in (
            ("num_experts", lambda: dataclasses.replace(
                _arguments(rank), num_experts=24 if odd else 12).dispatch(mode)),
            ("bytes of a row", lambda: dataclasses.replace(
                _arguments(rank), x=x[:, :32].contiguous() if odd else x).dispatch(mode)),
            ("scales of a row", lambda: dataclasses.replace(
                _arguments(rank), x=(_fp8(x), torch.ones(len(x), 2 if odd else 1))).dispatch(mode)),
            ("weights given", lambda: dataclasses.replace(
                _arguments(rank), topk_weights=None if odd else torch.ones(len(x), 3)
            ).dispatch(mode)),
            ("top_k", lambda: Arguments(
                x, torch.zeros(len(x), 2 if odd else 3, dtype=torch.int64), None).dispatch(mode)),
            ("call", lambda: (
                mode.dispatch_cached(x, got.plan, layout="expert_major") if odd
                else mode.combine(got.tokens, got.plan, layout="expert_major"))),
            ("of the plan", lambda: mode.combine(
                (other if odd else got).tokens, (other if odd else got).plan,
                layout="expert_major")),
        ):  # fmt: skip
            error = caught(call)
            assert isinstance(error, (fanfold.ArgumentError, fanfold.PeerRefused)), (words, error)
            assert words in str(error), (words, error)
            assert f"rank {CULPRIT}" in str(error) or odd
        run_case(mode, CASE, rank, "token_major")


def test_ranks_that_disagree_all_find_out(pools: Pools) -> None:
    pools(RANKS).run(_disagreements)


# ---- killed and stopped ranks -------------------------------------------------------------------

PHASES = ("counts", "rows", "cached", "combine", "weights")
BIG = Case(tokens=(300, 200, 250), experts_per_rank=2, top_k=4, hidden=1024)


@pytest.fixture
def own_pool() -> Iterator[RankPool]:
    """Ranks that this test may kill."""
    with RankPool(RANKS, timeout_s=60.0) as pool:
        yield pool


class _Falling:
    """Stands before the core's calls: ``begins`` is called at the beginning of one of them."""

    def __init__(self, core: Any, name: str, begins: Callable[[], None]) -> None:
        self._core, self._name, self._begins = core, name, begins

    def __getattr__(self, name: str) -> Any:
        if name == self._name:
            self._begins()
        return getattr(self._core, name)


def _fall_in(
    group: dist.ProcessGroup, folder: Path, phase: str, number: int, timeout_s: float
) -> tuple[fanfold.PeerTimeout, float, bool]:
    rank = dist.get_rank(group)
    given = Round(BIG, rank).own
    name = {"counts": "exchange_counts", "rows": "dispatch_rows", "cached": "dispatch_cached"}.get(
        phase, "combine"
    )

    def begins() -> None:
        (folder / f"begins {rank}").touch()
        if rank == CULPRIT:
            # Between hosts, what a killed rank has sent may not have left it; these have got it.
            await_files(folder, "begins *", RANKS)
            os.kill(os.getpid(), number)

    with opened(group, timeout_s=timeout_s) as mode:
        got = mode.dispatch(given.x, given.topk_idx, given.topk_weights, num_experts=BIG.experts)
        lanes = torch.ones(got.tokens.shape[0])
        mode._core = _Falling(mode._core, name, begins)  # type: ignore[assignment]
        start = time.monotonic()
        try:
            if phase in ("counts", "rows"):
                mode.dispatch(given.x, given.topk_idx, given.topk_weights, num_experts=BIG.experts)
            elif phase == "cached":
                mode.dispatch_cached(given.x, got.plan, layout="expert_major")
            elif phase == "combine":
                mode.combine(got.tokens, got.plan, layout="expert_major")
            else:
                mode.combine_weights(lanes, got.plan, layout="expert_major")
        except fanfold.PeerTimeout as error:
            seconds = time.monotonic() - start
            again = caught(lambda: mode.combine(got.tokens, got.plan, layout="expert_major"))
            return error, seconds, isinstance(again, fanfold.UsageError)
    raise AssertionError("nobody noticed")


def _check_fall(outcome: Any, rank: int, phase: str) -> fanfold.PeerTimeout:
    error, _, unusable = outcome
    assert isinstance(error, fanfold.PeerTimeout)
    assert (error.rank, error.peer) == (rank, CULPRIT)
    words = {"counts": "counts", "rows": "dispatch", "cached": "dispatch"}.get(phase, "combine")
    assert error.phase == f"high_throughput {words}"
    assert error.expected > error.actual
    assert unusable
    return error


@pytest.mark.parametrize("phase", PHASES)
def test_killed_rank(own_pool: RankPool, tmp_path: Path, phase: str) -> None:
    outcomes = own_pool.outcomes(_fall_in, tmp_path, phase, signal.SIGKILL, 50.0)
    assert isinstance(outcomes[CULPRIT], RankFailure)
    for rank in (0, 2):
        error = _check_fall(outcomes[rank], rank, phase)
        assert error.peer_gone
        # Long before the bound: the process is known to have ended.
        assert outcomes[rank][1] < 25.0


@pytest.mark.parametrize("phase", PHASES)
def test_stopped_rank(own_pool: RankPool, tmp_path: Path, phase: str) -> None:
    own_pool.submit(reporting, [(tmp_path, _fall_in, tmp_path, phase, signal.SIGSTOP, 0.7)] * RANKS)
    outcomes = collect_with_one_stopped(own_pool, tmp_path, CULPRIT)
    for rank in (0, 2):
        error = _check_fall(outcomes[rank], rank, phase)
        assert not error.peer_gone


def _fall_in_the_middle(
    group: dist.ProcessGroup, folder: Path, timeout_s: float
) -> fanfold.PeerTimeout:
    """Round after round, until the parent's signal arrives at the culprit at some moment."""
    given = Round(BIG, dist.get_rank(group)).own
    with opened(group, timeout_s=timeout_s) as mode:
        try:
            for _ in range(100_000):
                got = mode.dispatch(
                    given.x, given.topk_idx, given.topk_weights, num_experts=BIG.experts
                )
                mode.combine(got.tokens, got.plan, layout="expert_major")
                (folder / f"running {dist.get_rank(group)}").touch()
        except fanfold.PeerTimeout as error:
            return error
    raise AssertionError("nobody noticed")


def _check_middle(outcomes: list[Any]) -> None:
    for rank in (0, 2):
        error = outcomes[rank]
        assert isinstance(error, fanfold.PeerTimeout)
        assert (error.rank, error.peer) == (rank, CULPRIT)
        assert error.expected > error.actual


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize(
    "delay_s", [0.0, 0.0271, *(pytest.param(s, marks=pytest.mark.long) for s in (0.0137, 0.0419))]
)
def test_signal_at_any_moment(
    own_pool: RankPool, tmp_path: Path, number: int, delay_s: float
) -> None:
    timeout_s = 0.7 if number == signal.SIGSTOP else 50.0
    call = (tmp_path, _fall_in_the_middle, tmp_path, timeout_s)
    own_pool.submit(reporting, [call] * RANKS)
    await_files(tmp_path, "running *", RANKS)
    time.sleep(delay_s)
    own_pool.kill(CULPRIT, number)
    _check_middle(collect_with_one_stopped(own_pool, tmp_path, CULPRIT))


# ---- going on without a rank --------------------------------------------------------------------


def _go_on_without(group: dist.ProcessGroup, phase: str) -> tuple[Any, ...]:
    """One dispatch in which the culprit ends, and two rounds of the others."""
    rank = dist.get_rank(group)
    expect = Round(BIG, rank)
    given = expect.own
    config = Config.resolve(late_peers="mask", timeout_s=30.0, staging_bytes=1 << 16)
    ranks = as_group(group)
    nbytes = HostHighThroughput.staging_bytes(ranks.size, config)
    with SymmetricMemory(ranks, nbytes, config) as memory:
        mode = HostHighThroughput(memory, 0, nbytes)
        if rank == CULPRIT:
            name = {"counts": "exchange_counts", "rows": "dispatch_rows"}[phase]
            mode._core = _Falling(  # type: ignore[assignment]
                mode._core, name, lambda: os.kill(os.getpid(), signal.SIGKILL)
            )
        got = mode.dispatch(given.x, given.topk_idx, given.topk_weights, num_experts=BIG.experts)
        assert memory.core.masked(CULPRIT)
        for place in range(got.tokens.shape[0]):
            source = int(got.row_source_rank[place])
            assert source != CULPRIT
            if source < 0:
                assert not got.tokens[place].view(torch.int16).any()
                continue
            row = expect.inputs[source].x[int(got.row_source_token[place])]
            assert same_bits(got.tokens[place], row)
        first, _ = mode.combine(got.tokens, got.plan, layout="expert_major")
        again = mode.dispatch_cached(given.x, got.plan, layout="expert_major")
        assert same_bits(again.tokens, got.tokens)
        second, _ = mode.combine(again.tokens, again.plan, layout="expert_major")
        assert same_bits(first, second)
        # Each of the token's experts on a living rank has returned the row.
        owner = given.topk_idx // BIG.experts_per_rank
        copies = torch.tensor(
            [len({int(e) for e in row if e // BIG.experts_per_rank != CULPRIT})
             for row in given.topk_idx.tolist()]
        )  # fmt: skip
        finite = given.x.float().isfinite().all(1) & (owner.min(1).values == owner.max(1).values)
        assert torch.equal(
            first.float()[finite],
            (given.x.float() * copies.unsqueeze(1)).bfloat16().float()[finite],
        )
        return ("survived",)


@pytest.mark.parametrize("phase", ["counts", "rows"])
def test_masked_rank(own_pool: RankPool, phase: str) -> None:
    outcomes = own_pool.outcomes(_go_on_without, phase)
    assert isinstance(outcomes[CULPRIT], RankFailure)
    assert outcomes[0] == outcomes[2] == ("survived",)
