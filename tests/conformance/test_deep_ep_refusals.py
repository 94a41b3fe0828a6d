"""Bad input to the DeepEP face: refused on all ranks alike, by the name of DeepEP's argument, with
the Buffer usable afterwards. And what else goes wrong: too little memory, ranks that disagree or do
not come."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from fanfold.deep_ep import Buffer, Config
from fanfold.errors import ArgumentError, PeerRefused, PeerTimeout, UsageError
from fanfold.group import as_group
from fanfold.launch import RankPool
from tests.conformance import deep_ep_reference as reference
from tests.conformance import test_deep_ep_high_throughput as high_throughput
from tests.conformance import test_deep_ep_low_latency as low_latency
from tests.conformance.deep_ep_reference import Case, inputs

pytestmark = pytest.mark.placements("threads")

Pools = Callable[[int], RankPool]
Arguments = dict[str, Any]
Spoil = Callable[[Arguments], None]

BAD_RANK = 1


def _zeros(shape: int | tuple[int, ...], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype, device="cpu")


def _set(**changes: Any) -> Spoil:
    return lambda arguments: arguments.update(changes)


def _change(name: str, change: Callable[[Any], Any]) -> Spoil:
    return lambda arguments: arguments.update({name: change(arguments[name])})


def _put(name: str, place: tuple[int, ...], change: Callable[[Any], Any]) -> Spoil:
    def spoil(arguments: Arguments) -> None:
        arguments[name] = arguments[name].clone()
        arguments[name][place] = change(arguments[name][place])

    return spoil


def refused(call: Callable[..., object], arguments: Arguments) -> Exception:
    with pytest.raises((ArgumentError, PeerRefused)) as caught:
        call(**arguments)
    return caught.value


def check_refusals(
    outcomes: list[dict[str, Exception]], cases: dict[str, tuple[Spoil, str]]
) -> None:
    for rank, errors in enumerate(outcomes):
        assert list(errors) == list(cases)
        for name, error in errors.items():
            if rank == BAD_RANK:
                assert isinstance(error, ArgumentError), (name, error)
                assert cases[name][1] in error.argument, (name, error)
            else:
                assert isinstance(error, PeerRefused), (name, error)
                assert error.peer == BAD_RANK
                assert cases[name][1] in error.reason, (name, error)


# ---- low latency ---

LOW = low_latency.CASE


def _low_latency_dispatch(case: Case, rank: int) -> Arguments:
    mine = inputs(case, rank)
    return {
        "x": mine.x,
        "topk_idx": mine.topk_idx,
        "num_max_dispatch_tokens_per_rank": case.max_tokens,
        "num_experts": case.experts,
    }


def _nvfp4(x_global_scale: Any) -> Spoil:
    return _set(use_fp8=False, use_nvfp4=True, x_global_scale=x_global_scale)


# What is spoilt, and what the message must name. x stays [T, hidden] and the geometry the same,
# because ranks that disagree about it are another matter.
LOW_LATENCY_DISPATCHES: dict[str, tuple[Spoil, str]] = {
    "float32": (_change("x", torch.Tensor.float), "x.dtype"),
    "strided": (_change("x", lambda x: x.T.contiguous().T), "x.stride()"),
    "flat": (_change("x", torch.Tensor.flatten), "x.shape"),
    "no tensor": (_set(x=None), "x"),
    "meta": (_change("x", lambda x: x.to("meta")), "x.device"),
    "too many": (lambda a: a.update(x=a["x"].repeat(9, 1), topk_idx=a["topk_idx"].repeat(9, 1)),
                 "x.shape[0]"),
    "int32 routing": (_change("topk_idx", torch.Tensor.int), "topk_idx.dtype"),
    "flat routing": (_change("topk_idx", torch.Tensor.flatten), "topk_idx.shape"),
    "short routing": (_change("topk_idx", lambda t: t[:-1].contiguous()), "topk_idx.shape"),
    "expert too high": (_put("topk_idx", (2, 1), lambda _: 8), "topk_idx[2, 1]"),
    "expert too low": (_put("topk_idx", (0, 0), lambda _: -2), "topk_idx[0, 0]"),
    "async and hook": (_set(async_finish=True, return_recv_hook=True), "async_finish"),
    "ue8m0 without rounding": (_set(use_ue8m0=True), "use_ue8m0"),
    "nvfp4 and fp8": (_set(use_nvfp4=True, x_global_scale=_zeros(1)), "use_nvfp4"),
    "nvfp4 without scale": (_set(use_fp8=False, use_nvfp4=True), "x_global_scale"),
    "double scale": (_nvfp4(_zeros(1, torch.float64)), "x_global_scale.dtype"),
    "empty scale": (_nvfp4(_zeros(0)), "x_global_scale.shape"),
    "scale elsewhere": (_nvfp4(_zeros(1).to("meta")), "x_global_scale.device"),
    "scale that is a number": (_nvfp4(2.5), "x_global_scale"),
    "statistics": (
        _set(cumulative_local_expert_recv_stats=_zeros(3)),
        "cumulative_local_expert_recv_stats",
    ),
    "wait statistics": (
        _set(dispatch_wait_recv_cost_stats=_zeros((4, 4), torch.int64)),
        "dispatch_wait_recv_cost_stats.shape",
    ),
}  # fmt: skip

LOW_LATENCY_COMBINES: dict[str, tuple[Spoil, str]] = {
    "float32": (_change("x", torch.Tensor.float), "x.dtype"),
    "shape": (_change("x", lambda x: x[:, :-1].contiguous()), "x.shape"),
    "strided": (_change("x", lambda x: x.mT.contiguous().mT), "x.stride()"),
    "no tensor": (_set(x=None), "x"),
    "no weights": (_set(topk_weights=None), "topk_weights"),
    "double weights": (_change("topk_weights", torch.Tensor.double), "topk_weights.dtype"),
    "weights of others": (_change("topk_weights", lambda w: w[:-1].contiguous()), "topk_weights"),
    "expert too high": (_put("topk_idx", (2, 1), lambda _: 8), "topk_idx[2, 1]"),
    "no handle": (_set(handle=None), "handle"),
    "short handle": (_change("handle", lambda h: h[:4]), "handle"),
    "high-throughput handle": (_change("handle", lambda h: (h[0],) * 6), "handle"),
    "handle of no size": (_change("handle", lambda h: (*h[:2], "4", *h[3:])), "handle[2]"),
    "ranges of another": (_change("handle", lambda h: (h[0], h[1][:, :-1], *h[2:])), "handle[1]"),
    "ranges that point away": (
        _change("handle", lambda h: (h[0], h[1] + (1 << 40), *h[2:])), "handle[1]",
    ),
    "source info": (_change("handle", lambda h: (h[0].long(), *h[1:])), "handle[0]"),
    "logfmt and zero copy": (_set(use_logfmt=True, zero_copy=True), "zero_copy"),
    "zero copy unasked": (_set(zero_copy=True), "zero_copy"),
    "async and hook": (_set(async_finish=True, return_recv_hook=True), "async_finish"),
    "out": (_set(out=torch.empty((3, 256), dtype=torch.bfloat16, device="cpu")), "out.shape"),
    "wait statistics": (_set(combine_wait_recv_cost_stats=_zeros(4)), "combine_wait_recv"),
}  # fmt: skip


def _low_latency_works(buffer: Buffer, rank: int) -> None:
    mine = inputs(LOW, rank)
    result = buffer.low_latency_dispatch(**_low_latency_dispatch(LOW, rank))
    low_latency.check_dispatched(LOW, rank, "fp8", result)
    combined, _, _ = buffer.low_latency_combine(
        low_latency.outputs(LOW, rank, "fp8"), mine.topk_idx, mine.topk_weights, result[2]
    )
    y_of = [low_latency.outputs(LOW, peer, "fp8") for peer in range(LOW.ranks)]
    assert torch.equal(combined, reference.weighted_sum(LOW, rank, y_of))


def _refused_dispatches(group: dist.ProcessGroup, fresh: bool) -> dict[str, Exception]:
    """Each case on one Buffer that goes on working; or, fresh, as the first call of a Buffer."""
    rank, errors = as_group(group).rank, {}
    buffer = low_latency.open_buffer(group, LOW)
    _low_latency_works(buffer, rank)
    for name, (spoil, _) in LOW_LATENCY_DISPATCHES.items():
        if fresh:
            buffer.destroy()
            buffer = low_latency.open_buffer(group, LOW)
        arguments = _low_latency_dispatch(LOW, rank)
        if rank == BAD_RANK:
            spoil(arguments)
        errors[name] = refused(buffer.low_latency_dispatch, arguments)
    _low_latency_works(buffer, rank)
    buffer.destroy()
    return errors


def _refused_combines(group: dist.ProcessGroup) -> dict[str, Exception]:
    rank, errors = as_group(group).rank, {}
    buffer = low_latency.open_buffer(group, LOW)
    mine = inputs(LOW, rank)
    handle = buffer.low_latency_dispatch(**_low_latency_dispatch(LOW, rank))[2]
    for name, (spoil, _) in LOW_LATENCY_COMBINES.items():
        arguments = {
            "x": low_latency.outputs(LOW, rank, "fp8"),
            "topk_idx": mine.topk_idx,
            "topk_weights": mine.topk_weights,
            "handle": handle,
        }
        if rank == BAD_RANK:
            spoil(arguments)
        errors[name] = refused(buffer.low_latency_combine, arguments)
    _low_latency_works(buffer, rank)
    buffer.destroy()
    return errors


@pytest.mark.parametrize("fresh", [False, True])
def test_refused_low_latency_dispatch(pools: Pools, fresh: bool) -> None:
    check_refusals(pools(4).run(_refused_dispatches, fresh), LOW_LATENCY_DISPATCHES)


def test_refused_low_latency_combine(pools: Pools) -> None:
    check_refusals(pools(4).run(_refused_combines), LOW_LATENCY_COMBINES)


def _low_latency_disagreement(
    group: dist.ProcessGroup, changes: Arguments, fresh: bool
) -> Exception:
    rank = as_group(group).rank
    wide = Case(**{**vars(LOW), "hidden": 512, "tokens": (8,) * 4})
    buffer = low_latency.open_buffer(group, wide)
    arguments = _low_latency_dispatch(LOW, rank) | (changes if rank == 2 else {})
    if "hidden" in changes:
        arguments["x"] = arguments["x"].repeat(1, 2) if rank == 2 else arguments["x"]
        arguments.pop("hidden", None)
    if not fresh:
        _low_latency_works(buffer, rank)
    with pytest.raises(ArgumentError) as caught:
        buffer.low_latency_dispatch(**arguments)
    _low_latency_works(buffer, rank)
    buffer.destroy()
    return caught.value


@pytest.mark.parametrize(
    ("changes", "name", "values"),
    [
        ({"num_max_dispatch_tokens_per_rank": 7}, "num_max_dispatch_tokens_per_rank", "6 7"),
        ({"num_experts": 12}, "num_experts", "8 12"),
        ({"hidden": 512}, "x.shape[1]", "256 512"),
        ({"use_fp8": False}, "encoding of rows", "0 1"),
        (low_latency.FORMATS["nvfp4"], "encoding of rows", "1 3"),
    ],
)
@pytest.mark.parametrize("fresh", [False, True])
def test_ranks_that_disagree_in_low_latency(
    pools: Pools, changes: Arguments, name: str, values: str, fresh: bool
) -> None:
    for rank, error in enumerate(pools(4).run(_low_latency_disagreement, changes, fresh)):
        assert name in error.argument
        assert all(value in error.value for value in values.split())
        assert "rank 2" in error.value
        assert f"rank {rank}" in error.value


def _too_small(group: dist.ProcessGroup) -> list[str]:
    rank, found = as_group(group).rank, []
    nbytes = Buffer.get_low_latency_rdma_size_hint(6, 256, 4, 8)
    buffer = low_latency.open_buffer(group, LOW, num_rdma_bytes=nbytes)
    mine = inputs(LOW, rank)
    _low_latency_works(buffer, rank)
    for tokens, columns in ((12, 1), (6, 2)):
        arguments = _low_latency_dispatch(LOW, rank)
        arguments["x"] = mine.x.repeat(1, columns)
        arguments["num_max_dispatch_tokens_per_rank"] = tokens
        error = refused(buffer.low_latency_dispatch, arguments)
        found.append(str(error))
    _low_latency_works(buffer, rank)
    buffer.destroy()
    buffer = low_latency.open_buffer(group, LOW, num_rdma_bytes=0)
    with pytest.raises(UsageError, match="get_low_latency_rdma_size_hint"):
        buffer.low_latency_dispatch(**_low_latency_dispatch(LOW, rank))
    buffer.destroy()
    buffer = low_latency.open_buffer(group, LOW, low_latency_mode=False)
    with pytest.raises(UsageError, match="low_latency_mode"):
        buffer.low_latency_dispatch(**_low_latency_dispatch(LOW, rank))
    buffer.destroy()
    with pytest.raises(UsageError, match="destroyed"):
        buffer.low_latency_dispatch(**_low_latency_dispatch(LOW, rank))
    return found


def test_memory_that_is_too_small(pools: Pools) -> None:
    for messages in pools(4).run(_too_small):
        for message, hint in zip(messages, ("(12, 256, 4, 8)", "(6, 512, 4, 8)"), strict=True):
            assert "num_rdma_bytes" in message
            assert f"get_low_latency_rdma_size_hint{hint}" in message


def _low_latency_absent_peer(group: dist.ProcessGroup) -> Exception | None:
    rank = as_group(group).rank
    buffer, error = low_latency.open_buffer(group, LOW, "0.5"), None
    if rank != 3:
        with pytest.raises(PeerTimeout) as caught:
            buffer.low_latency_dispatch(**_low_latency_dispatch(LOW, rank))
        error = caught.value
        with pytest.raises(UsageError):
            buffer.low_latency_dispatch(**_low_latency_dispatch(LOW, rank))
    as_group(group).all_gather(None)
    buffer.destroy()
    return error


def test_peer_that_does_not_come_to_low_latency(pools: Pools) -> None:
    *errors, nothing = pools(4).run(_low_latency_absent_peer)
    assert nothing is None
    assert all(error.peer == 3 for error in errors)


# ---- high throughput ---

HIGH = high_throughput.CASE

# What is spoilt on one rank, and what the message must name.
NEW_DISPATCHES: dict[str, tuple[Spoil, str]] = {
    "strided": (_change("x", lambda x: x.T.contiguous().T), "x.stride()"),
    "flat": (_change("x", torch.Tensor.flatten), "x.shape"),
    "odd row": (_change("x", lambda x: x[:, :252].contiguous()), "x.shape[1]"),
    "no tensor": (_set(x=[1.0]), "x"),
    "meta": (_change("x", lambda x: x.to("meta")), "x.device"),
    "scales of wide values": (_change("x", lambda x: (x, x[:, :2].float())), "x[0].dtype"),
    "fewer scales": (
        _change("x", lambda x: (x.view(torch.uint8), _zeros((1, 2)))), "x[1].shape"),
    "double scales": (
        _change("x", lambda x: (x.view(torch.uint8), x[:, :2].double())), "x[1].dtype"),
    "no layout": (_set(num_tokens_per_rank=None), "num_tokens_per_rank"),
    "no experts": (_set(num_tokens_per_expert=None), "num_tokens_per_expert"),
    "no ranks": (_set(is_token_in_rank=None), "is_token_in_rank"),
    "long counts": (_change("num_tokens_per_rank", torch.Tensor.long), "num_tokens_per_rank.dtype"),
    "other counts": (_put("num_tokens_per_rank", (2,), lambda n: n + 1), "num_tokens_per_rank[2]"),
    "other experts": (
        _put("num_tokens_per_expert", (3,), lambda n: n + 1), "num_tokens_per_expert[3]"),
    "other hosts": (
        _set(num_tokens_per_rdma_rank=torch.tensor([99], dtype=torch.int32, device="cpu")),
        "num_tokens_per_rdma_rank[0]"),
    "expert count": (_change("num_tokens_per_expert", lambda n: n[:7]), "num_tokens_per_expert"),
    "other tokens": (_put("topk_idx", (0, 0), lambda e: (e + 4) % 8), ""),
    "expert too high": (_put("topk_idx", (2, 1), lambda _: 8), "topk_idx[2, 1]"),
    "int32 routing": (_change("topk_idx", torch.Tensor.int), "topk_idx.dtype"),
    "no weights": (_set(topk_weights=None), "topk_weights"),
    "no routing": (_set(topk_idx=None), "topk_idx"),
    "other weights": (_change("topk_weights", lambda w: w[:, :2].contiguous()), "topk_weights"),
    "alignment": (_set(expert_alignment=0), "expert_alignment"),
    "negative worst": (_set(num_worst_tokens=-1), "num_worst_tokens"),
    "worst without routing": (
        _set(num_worst_tokens=99, topk_idx=None, topk_weights=None), "num_worst_tokens"),
    "no config": (_set(config=20), "config"),
    "odd config": (_set(config=Config(21)), "config.num_sms"),
    "no channel": (_set(config=Config(0)), "config.num_sms"),
    "event": (_set(previous_event=3), "previous_event"),
    "comm stream": (_set(allocate_on_comm_stream=True), "allocate_on_comm_stream"),
    "comm stream without async": (
        _set(allocate_on_comm_stream=True, previous_event=Buffer.capture()),
        "allocate_on_comm_stream"),
}  # fmt: skip

CACHED_DISPATCHES: dict[str, tuple[Spoil, str]] = {
    "other tokens": (_change("x", lambda x: x[:-1].contiguous()), "x.shape[0]"),
    "no handle": (_set(handle=1), "handle"),
    "short handle": (_change("handle", lambda h: h[:5]), "handle"),
    "dtype": (_change("handle", lambda h: (h[0].long(), *h[1:])), "handle[0]"),
    "shape": (_change("handle", lambda h: (*h[:4], h[4][:, :2].contiguous(), h[5])), "handle[4]"),
    "fewer rows": (_change("handle", lambda h: (*h[:3], h[3][:-1], *h[4:])), "handle[0]"),
    "falling": (_change("handle", lambda h: (h[0].flip(0), *h[1:])), "handle[0]"),
    "own tokens": (_change("handle", lambda h: (*h[:4], ~h[4], h[5])), "handle[4]"),
    "channels": (_change("handle", lambda h: (*h[:2], h[2][:, :1].contiguous(), *h[3:])),
                 "handle[2]"),
    "other config": (_set(config=Config(24)), "config.num_sms"),
    "routing too": (_set(topk_idx=_zeros((4, 3), torch.int64)), "topk_idx"),
    "weights too": (_set(topk_weights=_zeros((4, 3))), "topk_weights"),
    "counts too": (_set(num_tokens_per_rank=_zeros(4, torch.int32)),
                   "num_tokens_per_rank"),
    "worst": (_set(num_worst_tokens=1000), "num_worst_tokens"),
}  # fmt: skip

COMBINES: dict[str, tuple[Spoil, str]] = {
    "float32": (_change("x", torch.Tensor.float), "x.dtype"),
    "rows": (_change("x", lambda x: x[:-1].contiguous()), "x.shape"),
    "strided": (_change("x", lambda x: x.T.contiguous().T), "x.stride()"),
    "no handle": (_set(handle=None), "handle"),
    "low-latency handle": (_change("handle", lambda h: (h[0], h[1], 4, 256, 8)), "handle"),
    "weights dtype": (_set(topk_weights=_zeros((1, 3), torch.float64)),
                      "topk_weights.dtype"),
    "weights rows": (_set(topk_weights=_zeros((1, 3))), "topk_weights.shape"),
    "bias dtype": (_set(bias=_zeros((4, 256))), "bias.dtype"),
    "bias shape": (_set(bias=_zeros((3, 256), torch.bfloat16)), "bias.shape"),
    "three biases": (_set(bias=(_zeros(1),) * 3), "bias"),
    "second bias": (
        _set(bias=(_zeros((4, 256), torch.bfloat16), _zeros(1))), "bias[1].dtype"),
    "other config": (_set(config=Config(24)), "config.num_sms"),
    "comm stream": (_set(allocate_on_comm_stream=True), "allocate_on_comm_stream"),
}  # fmt: skip


def _high_throughput_works(buffer: Buffer, rank: int) -> None:
    result = buffer.dispatch(**high_throughput.good_dispatch(buffer, HIGH, rank))
    high_throughput.check_received(HIGH, rank, result)
    high_throughput.check_handle(HIGH, rank, result[4], Buffer.num_sms // 2)
    combined, _, _ = buffer.combine(high_throughput.outputs(HIGH, rank), result[4])
    y_of = [high_throughput.outputs(HIGH, peer) for peer in range(HIGH.ranks)]
    assert torch.equal(combined, reference.combined(HIGH, rank, y_of))


def _spoilt(group: dist.ProcessGroup, which: str) -> dict[str, Exception]:
    rank, errors = as_group(group).rank, {}
    buffer = high_throughput.open_buffer(group)
    good = high_throughput.good_dispatch(buffer, HIGH, rank)
    handle = buffer.dispatch(**good)[4]
    call, cases = buffer.dispatch, NEW_DISPATCHES
    if which == "cached":
        good, cases = {"x": good["x"], "handle": handle}, CACHED_DISPATCHES
    elif which == "combine":
        good, cases = {"x": high_throughput.outputs(HIGH, rank), "handle": handle}, COMBINES
        call = buffer.combine
    for name, (spoil, _) in cases.items():
        arguments = dict(good)
        if rank == BAD_RANK:
            spoil(arguments)
        errors[name] = refused(call, arguments)
    _high_throughput_works(buffer, rank)
    buffer.destroy()
    return errors


@pytest.mark.parametrize(
    ("which", "cases"),
    [("new", NEW_DISPATCHES), ("cached", CACHED_DISPATCHES), ("combine", COMBINES)],
)
def test_refused_high_throughput(
    pools: Pools, which: str, cases: dict[str, tuple[Spoil, str]]
) -> None:
    check_refusals(pools(4).run(_spoilt, which), cases)


def _disagreeing(group: dist.ProcessGroup, case_of_two: Case, config: int) -> Exception:
    rank = as_group(group).rank
    buffer = high_throughput.open_buffer(group)
    case = case_of_two if rank == 2 else HIGH
    arguments = high_throughput.good_dispatch(buffer, case, rank)
    if config and rank == 2:
        arguments["config"] = Config(config)
    error = refused(buffer.dispatch, arguments)
    _high_throughput_works(buffer, rank)
    buffer.destroy()
    return error


@pytest.mark.parametrize(
    ("changes", "config", "name"),
    [
        ({"experts": 12}, 0, "num_experts"),
        ({"top_k": 2}, 0, "top_k"),
        ({"hidden": 128}, 0, "bytes of a row"),
        ({}, 24, "config.num_sms"),
    ],
)
def test_ranks_that_disagree_in_high_throughput(
    pools: Pools, changes: Arguments, config: int, name: str
) -> None:
    case = Case(**{**vars(HIGH), **changes})
    for error in pools(4).run(_disagreeing, case, config):
        assert name in str(error)
        assert "rank 2" in str(error)


def _no_memory(group: dist.ProcessGroup) -> None:
    rank = as_group(group).rank
    buffer = high_throughput.open_buffer(group, 0)
    mine = inputs(HIGH, rank)
    for call in (
        lambda: buffer.dispatch(mine.x, topk_idx=mine.topk_idx, topk_weights=mine.topk_weights),
        lambda: buffer.combine(mine.x, ()),
    ):
        with pytest.raises(UsageError, match="get_nvl_buffer_size_hint"):
            call()
    buffer.get_dispatch_layout(mine.topk_idx, HIGH.experts)  # needs none
    buffer.destroy()
    with pytest.raises(UsageError, match="destroyed"):
        buffer.get_dispatch_layout(mine.topk_idx, HIGH.experts)


def test_no_memory_for_the_mode(pools: Pools) -> None:
    pools(4).run(_no_memory)


def _absent_peer(group: dist.ProcessGroup, enable_shrink: bool) -> Exception | None:
    rank, error = as_group(group).rank, None
    buffer = high_throughput.open_buffer(
        group, timeout_s="0.5", low_latency_mode=True, enable_shrink=enable_shrink
    )
    if rank != 3:
        with pytest.raises(PeerTimeout) as caught:
            buffer.dispatch(**high_throughput.good_dispatch(buffer, HIGH, rank))
        error = caught.value
        with pytest.raises(UsageError):
            buffer.dispatch(**high_throughput.good_dispatch(buffer, HIGH, rank))
    as_group(group).all_gather(None)
    buffer.destroy()
    return error


# Where late ranks are masked, high throughput must not return what lacks their rows.
@pytest.mark.placements("processes")  # its warnings are the ranks' own
@pytest.mark.parametrize("enable_shrink", [False, True])
def test_peer_that_does_not_come_to_high_throughput(pools: Pools, enable_shrink: bool) -> None:
    *errors, nothing = pools(4).run(_absent_peer, enable_shrink)
    assert nothing is None
    assert all(error.peer == 3 for error in errors)
