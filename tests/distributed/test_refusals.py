"""Bad input on one rank: refused before anything is sent, on every rank, and nothing breaks."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

import fanfold
from fanfold.group import as_group
from fanfold.launch import RankPool
from tests.distributed.layers import Call, Shape, caught, good_call, works

pytestmark = pytest.mark.placements("threads")

RANKS = 3
BAD_RANK = 1
MODES = ("low_latency", "high_throughput")

Spoil = Callable[[Call], None]


def _narrow_x(call: Call) -> None:
    call.x = call.x[:, :16].contiguous()


def _float_x(call: Call) -> None:
    call.x = call.x.float()


def _strided_x(call: Call) -> None:
    call.x = call.x.T.contiguous().T


def _flat_x(call: Call) -> None:
    call.x = call.x.flatten()


def _meta_x(call: Call) -> None:
    call.x = call.x.to("meta")


def _no_tensor(call: Call) -> None:
    call.x = call.x.tolist()


def _one_too_many(call: Call) -> None:
    call.x = torch.cat([call.x, call.x[:1]])
    call.topk_idx = torch.cat([call.topk_idx, call.topk_idx[:1]])
    call.topk_weights = torch.cat([call.topk_weights, call.topk_weights[:1]])


def _expert_too_high(call: Call) -> None:
    call.topk_idx[5, 2] = 12


def _expert_too_low(call: Call) -> None:
    call.topk_idx[0, 1] = -2


def _int32_idx(call: Call) -> None:
    call.topk_idx = call.topk_idx.int()


def _wrong_top_k(call: Call) -> None:
    call.topk_idx = call.topk_idx[:, :2].contiguous()


def _fewer_idx(call: Call) -> None:
    call.topk_idx = call.topk_idx[:-1].contiguous()


def _strided_idx(call: Call) -> None:
    call.topk_idx = call.topk_idx.T.contiguous().T


def _wrong_weights(call: Call) -> None:
    call.topk_weights = call.topk_weights[:, :1].contiguous()


def _double_weights(call: Call) -> None:
    call.topk_weights = call.topk_weights.double()


# What is spoilt, and the argument, value and bound that the message must name.
DISPATCH_CASES: list[tuple[Spoil, str, str, str]] = [
    (_narrow_x, "x.shape", "(8, 16)", "32"),
    (_float_x, "x.dtype", "torch.float32", "torch.bfloat16"),
    (_strided_x, "x.stride()", "(1, 8)", "contiguous"),
    (_flat_x, "x.shape", "(256,)", "32"),
    (_meta_x, "x.device", "meta", "cpu"),
    (_no_tensor, "x", "list", "torch.Tensor"),
    (_one_too_many, "x.shape[0]", "9", "max_tokens = 8"),
    (_expert_too_high, "topk_idx[5, 2]", "12", "11"),
    (_expert_too_low, "topk_idx[0, 1]", "-2", "-1"),
    (_int32_idx, "topk_idx.dtype", "torch.int32", "torch.int64"),
    (_wrong_top_k, "topk_idx.shape", "(8, 2)", "(8, 3)"),
    (_fewer_idx, "topk_idx.shape", "(7, 3)", "(8, 3)"),
    (_strided_idx, "topk_idx.stride()", "(1, 8)", "contiguous"),
    (_wrong_weights, "topk_weights.shape", "(8, 1)", "(8, 3)"),
    (_double_weights, "topk_weights.dtype", "torch.float64", "torch.float32"),
]


def _spoilt_dispatch(group: dist.ProcessGroup, mode: str, spoil: Spoil) -> tuple[object, bool]:
    shape = Shape(mode=mode)
    with shape.open(group) as ep:
        call = good_call(shape, ep.rank)
        if ep.rank == BAD_RANK:
            spoil(call)
        error = caught(lambda: ep.dispatch(call.x, call.topk_idx, call.topk_weights))
        return error, works(ep, shape)


def _check(outcomes: list[tuple[object, bool]], argument: str, value: str, bound: str) -> None:
    for rank, (error, works_after) in enumerate(outcomes):
        assert works_after, rank
        if rank == BAD_RANK:
            assert isinstance(error, fanfold.ArgumentError), error
            assert error.argument == argument
            assert value in error.value
            assert bound in error.bound
        else:
            assert isinstance(error, fanfold.PeerRefused), error
            assert error.peer == BAD_RANK
            assert error.rank == rank
            assert argument in error.reason
            assert value in error.reason


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("case", DISPATCH_CASES, ids=lambda case: case[0].__name__)
def test_dispatch(
    pools: Callable[[int], RankPool], mode: str, case: tuple[Spoil, str, str, str]
) -> None:
    spoil, argument, value, bound = case
    _check(pools(RANKS).run(_spoilt_dispatch, mode, spoil), argument, value, bound)


def _spoilt_reuse(group: dist.ProcessGroup, name: str) -> tuple[object, bool]:
    shape = Shape(mode="high_throughput")
    with shape.open(group) as ep:
        call = good_call(shape, ep.rank)
        received = ep.dispatch(call.x, call.topk_idx, call.topk_weights)
        given = {"topk_idx": call.topk_idx, "topk_weights": call.topk_weights, "capacity": 99}
        extra: dict[str, Any] = {name: given[name]} if ep.rank == BAD_RANK else {}
        error = caught(lambda: ep.dispatch(call.x, previous=received, **extra))
        return error, works(ep, shape)


@pytest.mark.parametrize("name", ["topk_idx", "topk_weights", "capacity"])
def test_a_routing_that_is_used_again_has_its_own(
    pools: Callable[[int], RankPool], name: str
) -> None:
    _check(pools(RANKS).run(_spoilt_reuse, name), name, "given", "None where previous is")


def _spoilt_combine(group: dist.ProcessGroup, mode: str, what: str) -> tuple[object, bool]:
    shape = Shape(mode=mode)
    with shape.open(group) as ep:
        call = good_call(shape, ep.rank)
        received = ep.dispatch(call.x, call.topk_idx, call.topk_weights)
        y, out = received.tokens, None
        if ep.rank == BAD_RANK:
            if what == "dtype":
                y = y.float()
            elif what == "shape":
                y = y[..., :-16].contiguous()
            elif what == "rows":
                y = y.flatten(0, -2)[:-1].contiguous()
            elif what == "strides":
                y = y.mT.contiguous().mT
            else:
                out = torch.empty((3, shape.hidden), dtype=torch.bfloat16)
        error = caught(lambda: ep.combine(y, received, out=out))
        return error, works(ep, shape)


@pytest.mark.placements("processes", "threads")
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("what", "argument", "value", "bound"),
    [
        ("dtype", "y.dtype", "torch.float32", "torch.bfloat16"),
        ("shape", "y.shape", "16", "32"),
        ("rows", "y.shape", "(", "("),
        ("strides", "y.stride()", "(", "contiguous"),
        ("out", "out.shape", "(3, 32)", "(8, 32)"),
    ],
)
def test_combine(
    pools: Callable[[int], RankPool], mode: str, what: str, argument: str, value: str, bound: str
) -> None:
    _check(pools(RANKS).run(_spoilt_combine, mode, what), argument, value, bound)


class _Exhausted:
    """Stands for the pool of a mode that can allocate nothing any more."""

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        raise MemoryError(f"no memory for {dtype} of {shape}")


def _no_memory(group: dist.ProcessGroup, mode: str, phase: str) -> tuple[str, bool]:
    shape = Shape(mode=mode)
    with shape.open(group) as ep:
        owner = ep._backend if mode == "low_latency" else ep._backend._host
        call = good_call(shape, ep.rank)
        received = ep.dispatch(call.x, call.topk_idx, call.topk_weights)
        calls = {
            "dispatch": lambda: ep.dispatch(call.x, call.topk_idx, call.topk_weights),
            "combine": lambda: ep.combine(received.tokens, received),
        }
        pool = owner._pool
        if ep.rank == BAD_RANK:
            owner._pool = _Exhausted()  # type: ignore[assignment]
        with pytest.raises((MemoryError, fanfold.PeerRefused)) as raised:
            calls[phase]()
        owner._pool = pool
        return f"{raised.type.__name__}: {raised.value}", works(ep, shape)


@pytest.mark.parametrize(
    ("mode", "phase"),
    [("low_latency", "dispatch"), ("high_throughput", "dispatch"), ("high_throughput", "combine")],
)
def test_want_of_memory(pools: Callable[[int], RankPool], mode: str, phase: str) -> None:
    for rank, (error, works_after) in enumerate(pools(RANKS).run(_no_memory, mode, phase)):
        assert works_after, rank
        assert error.startswith("MemoryError" if rank == BAD_RANK else "PeerRefused")
        assert "no memory for" in error


def _foreign_handle(group: dist.ProcessGroup, mode: str) -> tuple[object, bool]:
    shape = Shape(mode=mode)
    with shape.open(group) as ep, shape.open(group) as other:
        call = good_call(shape, ep.rank)
        received = ep.dispatch(call.x, call.topk_idx, call.topk_weights)
        foreign = other.dispatch(call.x, call.topk_idx, call.topk_weights)
        used = foreign if ep.rank == BAD_RANK else received
        error = caught(lambda: ep.combine(used.tokens, used))
        return error, works(ep, shape) and works(other, shape)


@pytest.mark.parametrize("mode", MODES)
def test_combine_with_the_handle_of_another_object(
    pools: Callable[[int], RankPool], mode: str
) -> None:
    for rank, (error, works_after) in enumerate(pools(RANKS).run(_foreign_handle, mode)):
        assert works_after
        expected = fanfold.UsageError if rank == BAD_RANK else fanfold.PeerRefused
        assert isinstance(error, expected), error
        assert "another LowLatency" in str(error) or "another HighThroughput" in str(error)


def _disagreeing_call(group: dist.ProcessGroup, mode: str, phase: str) -> tuple[object, bool]:
    shape = Shape(mode=mode)
    with shape.open(group) as ep:
        assert works(ep, shape)
        call = good_call(shape, ep.rank)
        odd = ep.rank == BAD_RANK
        if phase == "dispatch":
            weights = None if odd else call.topk_weights
            error = caught(lambda: ep.dispatch(call.x, call.topk_idx, weights))
        else:
            received = ep.dispatch(call.x, call.topk_idx, call.topk_weights)
            error = caught(lambda: ep.combine(received.tokens, received, weighted=not odd))
        return error, works(ep, shape)


# Combine of high throughput needs no agreement: weights are applied where the rows are.
@pytest.mark.parametrize(
    ("mode", "phase"),
    [("low_latency", "dispatch"), ("low_latency", "combine"), ("high_throughput", "dispatch")],
)
def test_weights_on_some_ranks_only(
    pools: Callable[[int], RankPool], mode: str, phase: str
) -> None:
    for error, works_after in pools(RANKS).run(_disagreeing_call, mode, phase):
        assert works_after
        assert isinstance(error, fanfold.ArgumentError | fanfold.PeerRefused), error
        assert "weights" in str(error)
        assert f"rank {BAD_RANK}" in str(error)
        assert mode != "low_latency" or isinstance(error, fanfold.ArgumentError)


def _misuse(group: dist.ProcessGroup) -> list[str]:
    shape = Shape()
    found = []
    with shape.open(group) as ep:
        call = good_call(shape, ep.rank)
        args = (call.x, call.topk_idx, call.topk_weights)
        received, hook = ep.dispatch(*args, return_hook=True)
        found.append(str(caught(lambda: ep.combine(received.tokens, received))))
        hook()
        found.append(str(caught(hook)))
        hooks = [ep.dispatch(*args, return_hook=True)[1] for _ in range(2)]
        found.append(str(caught(lambda: ep.dispatch(*args))))
        for each in hooks:
            each()
        assert works(ep, shape)
    found.append(str(caught(lambda: ep.dispatch(*args))))
    return found


def test_calls_out_of_order(pools: Callable[[int], RankPool]) -> None:
    for incomplete, twice, third, closed in pools(RANKS).run(_misuse):
        assert "not complete" in incomplete or "refused" in incomplete
        assert "called already" in twice
        assert "in flight" in third
        assert "closed" in closed


def _lost_hooks(group: dist.ProcessGroup) -> list[str]:
    """Hooks that nobody can call any more, on some ranks in dispatch and on others in combine."""
    shape, found = Shape(), []
    with shape.open(group) as ep:
        call = good_call(shape, ep.rank)
        args = (call.x, call.topk_idx, call.topk_weights)
        for round_ in range(4):
            received, hook = ep.dispatch(*args, return_hook=True)
            if round_ % 2 or ep.rank == 0:
                hook()
            if round_ % 2:
                late = ep.combine(received.tokens, received, return_hook=True)[1]
                if ep.rank == 1:
                    late()
            _, kept = ep.dispatch(*args, return_hook=True)
            if round_ == 0 and ep.rank:  # rank 0 has called one of the two
                found.append(str(caught(lambda: ep.dispatch(*args))))
            ep.reset()
            found.append(str(caught(kept)))
            assert works(ep, shape)
            assert works(ep, shape)
        ep.reset()  # with nothing in flight
        assert works(ep, shape)
    return found


def test_lost_hooks(pools: Callable[[int], RankPool]) -> None:
    for rank, found in enumerate(pools(RANKS).run(_lost_hooks)):
        if rank:
            assert "reset() of a LowLatency" in found.pop(0)
        assert len(found) == 4
        assert all("its hook receives nothing" in text for text in found), found


def _construct(group: dist.ProcessGroup, changes: list[dict[str, object]]) -> Exception | None:
    shape = Shape()
    rank = as_group(group).rank
    options = dict(changes[rank])
    # What only one of the modes takes decides the mode of all ranks.
    aligned = any("expert_alignment" in change for change in changes)
    mode = options.pop("mode", "high_throughput" if aligned else "low_latency")
    asked = dataclasses.replace(shape, mode=mode)
    error = caught(lambda: asked.open(group, **options).close())
    with shape.open(group) as ep:
        assert works(ep, shape)
    return error


@pytest.mark.parametrize(
    ("changes", "argument", "value"),
    [
        ({"num_experts": 13}, "num_experts", "13"),
        ({"num_experts": 0}, "num_experts", "0"),
        ({"top_k": 0}, "top_k", "0"),
        ({"top_k": 33}, "top_k", "33"),
        ({"hidden": 17}, "hidden", "17"),
        ({"hidden": 8}, "hidden", "8"),
        ({"hidden": 24, "dispatch_dtype": "fp8"}, "hidden", "24"),
        ({"max_tokens": -1}, "max_tokens", "-1"),
        ({"dispatch_dtype": "int4"}, "dispatch_dtype", "'int4'"),
        ({"scale_format": "none"}, "scale_format", "'none'"),
        ({"expert_alignment": 0}, "expert_alignment", "0"),
        ({"expert_alignment": True}, "expert_alignment", "True (type bool)"),
        ({"expert_alignment": 1 << 21}, "expert_alignment", str(1 << 21)),
    ],
)
def test_construction(
    pools: Callable[[int], RankPool], changes: dict[str, object], argument: str, value: str
) -> None:
    alike = pools(RANKS).run(_construct, [changes] * RANKS)
    for error in alike:
        assert isinstance(error, fanfold.ArgumentError)
        assert (error.argument, error.value) == (argument, value)
    alone = pools(RANKS).run(_construct, [changes if r == BAD_RANK else {} for r in range(RANKS)])
    for rank, error in enumerate(alone):
        assert isinstance(error, fanfold.FanfoldError)
        assert argument in str(error)
        assert value in str(error)
        assert rank == BAD_RANK or f"rank {BAD_RANK}" in str(error)


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("hidden", (32, 48)),
        ("top_k", (3, 4)),
        ("num_experts", (12, 24)),
        ("max_tokens", (8, 9)),
        ("mode", ("low_latency", "high_throughput")),
    ],
)
def test_ranks_that_disagree(
    pools: Callable[[int], RankPool], name: str, values: tuple[object, object]
) -> None:
    changes = [{name: values[rank == 2]} for rank in range(RANKS)]
    for error in pools(RANKS).run(_construct, changes):
        assert isinstance(error, fanfold.ArgumentError)
        assert error.argument == name
        assert repr(values[0]) in error.value
        assert repr(values[1]) in error.value
        assert "rank 2" in error.value
