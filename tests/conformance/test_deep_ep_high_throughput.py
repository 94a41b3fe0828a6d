"""High-throughput calls of the DeepEP face against plain torch, bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from fanfold.deep_ep import Buffer, Config, EventHandle, EventOverlap
from fanfold.errors import ArgumentError, PeerRefused
from fanfold.group import as_group
from fanfold.launch import RankPool
from tests.conformance import deep_ep_reference as reference
from tests.conformance.deep_ep_reference import Case, arrivals, inputs
from tests.environment import environment

pytestmark = pytest.mark.placements("threads")

Pools = Callable[[int], RankPool]
Arguments = dict[str, Any]


def open_buffer(
    group: dist.ProcessGroup, nvl_bytes: int = 1 << 20, timeout_s: str = "20", **changes: Any
) -> Buffer:
    with environment(FANFOLD_TIMEOUT_S=timeout_s):
        return Buffer(group, nvl_bytes, explicitly_destroy=True, **changes)


def routing_of(buffer: Buffer, topk_idx: torch.Tensor, experts: int) -> Arguments:
    """What get_dispatch_layout says, as arguments of dispatch."""
    per_rank, per_host, per_expert, in_rank, event = buffer.get_dispatch_layout(topk_idx, experts)
    assert event.event is None
    return {
        "num_tokens_per_rank": per_rank,
        "num_tokens_per_rdma_rank": per_host,
        "is_token_in_rank": in_rank,
        "num_tokens_per_expert": per_expert,
    }


def good_dispatch(buffer: Buffer, case: Case, rank: int) -> Arguments:
    mine = inputs(case, rank)
    return {
        "x": mine.x,
        "topk_idx": mine.topk_idx,
        "topk_weights": mine.topk_weights,
        **routing_of(buffer, mine.topk_idx, case.experts),
    }


def listed(case: Case, rank: int, alignment: int) -> list[int]:
    """Rows for each local expert of ``rank``, as often as named, rounded up."""
    totals = [0] * case.experts
    for theirs in reference.everybody(case):
        named = reference.layout(case, theirs).per_expert
        totals = [total + count for total, count in zip(totals, named, strict=True)]
    mine = totals[rank * case.local : (rank + 1) * case.local]
    return [-(-count // alignment) * alignment for count in mine]


def outputs(case: Case, peer: int) -> torch.Tensor:
    """What ``peer`` makes of its rows."""
    rows = arrivals(case, peer).gather([theirs.x for theirs in reference.everybody(case)])
    return (rows.float() * (0.5 + 0.25 * peer)).to(torch.bfloat16)


def lanes(case: Case, peer: int) -> torch.Tensor:
    """Numbers that ``peer`` sends back to the lanes."""
    weights = torch.tensor(
        arrivals(case, peer).topk_weights, dtype=torch.float32, device="cpu"
    ).reshape(-1, case.top_k)
    return weights * (1 + peer)


def check_received(case: Case, rank: int, result: tuple[Any, ...], worst: int = 0) -> None:
    """recv_x, recv_topk_idx and recv_topk_weights; rows beyond those that arrived are empty."""
    received, topk_idx, topk_weights = result[:3]
    wanted = arrivals(case, rank)
    rows = wanted.gather([theirs.x for theirs in reference.everybody(case)])
    count = len(rows)
    assert received.shape == (worst or count, case.hidden)
    assert torch.equal(received[:count], rows)
    assert topk_idx.dtype == torch.int64
    assert topk_idx[:count].tolist() == wanted.topk_idx
    assert bool((topk_idx[count:] == -1).all())
    assert torch.equal(
        topk_weights[:count],
        torch.tensor(wanted.topk_weights, dtype=torch.float32, device="cpu").reshape(
            count, case.top_k
        ),
    )
    assert not topk_weights[count:].any()


def check_handle(case: Case, rank: int, handle: tuple[torch.Tensor, ...], channels: int) -> None:
    for place, (tensor, wanted) in enumerate(
        zip(handle, reference.handle(case, rank, channels), strict=True)
    ):
        assert tensor.dtype == wanted.dtype, place
        assert torch.equal(tensor, wanted), place


# ---- layout -------------------------------------------------------------------------------------


def _layout(group: dist.ProcessGroup, case: Case) -> None:
    buffer = open_buffer(group)
    mine = inputs(case, as_group(group).rank)
    per_rank, per_host, per_expert, in_rank, event = buffer.get_dispatch_layout(
        mine.topk_idx, case.experts, Buffer.capture(), True, True
    )
    wanted = reference.layout(case, mine)
    assert per_host is None
    assert event.event is not None
    assert (per_rank.dtype, per_expert.dtype, in_rank.dtype) == (
        torch.int32, torch.int32, torch.bool,
    )  # fmt: skip
    assert per_rank.tolist() == wanted.per_rank
    assert per_expert.tolist() == wanted.per_expert
    assert torch.equal(in_rank, wanted.in_rank)
    for arguments, name in (
        ((mine.topk_idx, case.experts + 1), "num_experts"),
        ((mine.topk_idx.int(), case.experts), "topk_idx.dtype"),
        ((mine.topk_idx, case.experts, None, True, True), "allocate_on_comm_stream"),
        ((mine.topk_idx, case.experts, EventOverlap(), True, True), "allocate_on_comm_stream"),
        ((mine.topk_idx, case.experts, "soon"), "previous_event"),
    ):
        with pytest.raises(ArgumentError) as caught:
            buffer.get_dispatch_layout(*arguments)
        assert caught.value.argument == name
    buffer.destroy()


def test_layout(pools: Pools) -> None:
    pools(4).run(
        _layout, Case(experts=12, top_k=4, hidden=16, tokens=(9, 0, 5, 3), duplicates=True)
    )


# ---- round trips --------------------------------------------------------------------------------


def _round_trip(
    group: dist.ProcessGroup, case: Case, nvl_bytes: int, channels: int, alignment: int
) -> None:
    rank = as_group(group).rank
    buffer = open_buffer(group, nvl_bytes)
    config = Config(2 * channels)
    result = buffer.dispatch(
        **good_dispatch(buffer, case, rank), expert_alignment=alignment, config=config
    )
    handle = result[4]
    y = outputs(case, rank)
    combined = buffer.combine(y, handle, topk_weights=lanes(case, rank), config=config)
    again = buffer.dispatch(inputs(case, rank).x, handle=handle, config=config)
    buffer.destroy()
    # Nobody waits any more for a rank that finds something wrong.
    check_received(case, rank, result)
    assert result[3] == listed(case, rank, alignment)
    assert all(type(count) is int for count in result[3])
    check_handle(case, rank, handle, channels)
    assert torch.equal(again[0], result[0])
    assert again[1:5] == (None, None, None, None)
    everybody = range(case.ranks)
    assert torch.equal(
        combined[0], reference.combined(case, rank, [outputs(case, peer) for peer in everybody])
    )
    assert torch.equal(
        combined[1], reference.combined_lanes(case, rank, [lanes(case, peer) for peer in everybody])
    )
    assert result[5].event is combined[2].event is again[5].event is None


@st.composite
def cases(draw: st.DrawFn) -> Case:
    ranks = draw(st.sampled_from([1, 2, 3, 4, 5]))
    experts = ranks * draw(st.integers(1, 6))
    duplicates = draw(st.booleans())
    top_k = draw(st.integers(1, 32 if duplicates else min(experts, 32)))
    return Case(
        experts=experts,
        top_k=top_k,
        hidden=8 * draw(st.sampled_from([2, 3, 16, 17, 130])),
        tokens=tuple(draw(st.lists(st.integers(0, 12), min_size=ranks, max_size=ranks))),
        seed=draw(st.integers(0, 1000)),
        duplicates=duplicates,
        unrouted=draw(st.sampled_from([0.0, 0.3, 1.0])),
    )


@given(
    case=cases(),
    nvl_bytes=st.sampled_from([16 << 10, 1 << 20]),
    channels=st.sampled_from([1, 3, 10]),
    alignment=st.sampled_from([1, 8, 128]),
)
def test_against_torch(
    pools: Pools, case: Case, nvl_bytes: int, channels: int, alignment: int
) -> None:
    pools(case.ranks).run(_round_trip, case, nvl_bytes, channels, alignment)


CASE = Case(experts=8, top_k=3, hidden=256, tokens=(7, 4, 0, 9), seed=5)


def _large(group: dist.ProcessGroup) -> None:
    """Much more than the staging memory holds."""
    rank = as_group(group).rank
    case = Case(experts=8, top_k=2, hidden=1024, tokens=(300, 0, 150, 217), seed=2)
    buffer = open_buffer(group, 64 << 10)
    result = buffer.dispatch(**good_dispatch(buffer, case, rank))
    combined, _, _ = buffer.combine(outputs(case, rank), result[4])
    check_received(case, rank, result)
    y_of = [outputs(case, peer) for peer in range(case.ranks)]
    assert torch.equal(combined, reference.combined(case, rank, y_of))
    buffer.destroy()


def test_tensors_larger_than_the_staging_memory(pools: Pools) -> None:
    pools(4).run(_large)


def _without_top_k(group: dist.ProcessGroup) -> None:
    """Rows whose receivers need not know the experts, as DeepEP's own tests send them."""
    rank, case = as_group(group).rank, CASE
    mine = inputs(case, rank)
    buffer = open_buffer(group)
    routing = routing_of(buffer, mine.topk_idx, case.experts)
    result = buffer.dispatch(mine.x, **routing, expert_alignment=4)
    combined, weights, _ = buffer.combine(outputs(case, rank), result[4])
    again = buffer.dispatch(mine.x, handle=result[4])
    buffer.destroy()
    assert torch.equal(
        result[0], arrivals(case, rank).gather([i.x for i in reference.everybody(case)])
    )
    assert torch.equal(again[0], result[0])
    assert result[1] is None
    assert result[2] is None
    assert weights is None
    assert result[3] == listed(case, rank, 4)
    check_handle(case, rank, result[4], Buffer.num_sms // 2)
    y_of = [outputs(case, peer) for peer in range(case.ranks)]
    assert torch.equal(combined, reference.combined(case, rank, y_of))


def test_dispatch_without_top_k(pools: Pools) -> None:
    pools(4).run(_without_top_k)


def _fp8(group: dist.ProcessGroup, scales_dtype: torch.dtype, one_byte: torch.dtype) -> None:
    """Values and scales pass as they are, scales of any strides."""
    rank, case = as_group(group).rank, CASE
    values, scales = [], []
    for theirs in reference.everybody(case):
        value, scale = reference.fp8(theirs.x, power_of_two=True)
        values.append(value.view(one_byte))
        scales.append(reference.ue8m0(scale) if scales_dtype == torch.int32 else scale)
    column_major = scales[rank].T.contiguous().T
    buffer = open_buffer(group)
    arguments = good_dispatch(buffer, case, rank) | {"x": (values[rank], column_major)}
    (rows, row_scales), _, _, _, handle, _ = buffer.dispatch(**arguments)
    (again, scales_again), *_ = buffer.dispatch((values[rank], scales[rank]), handle)
    buffer.destroy()
    raw = [value.view(torch.uint8) for value in values]
    assert rows.dtype == one_byte
    assert torch.equal(rows.view(torch.uint8), arrivals(case, rank).gather(raw))
    assert torch.equal(row_scales, arrivals(case, rank).gather(scales))
    assert row_scales.is_contiguous()
    assert torch.equal(again.view(torch.uint8), rows.view(torch.uint8))
    assert torch.equal(scales_again, row_scales)


@pytest.mark.placements("processes", "threads")
@pytest.mark.parametrize("scales_dtype", [torch.float32, torch.int32])
@pytest.mark.parametrize("one_byte", [torch.float8_e4m3fn, torch.uint8])
def test_fp8(pools: Pools, scales_dtype: torch.dtype, one_byte: torch.dtype) -> None:
    pools(4).run(_fp8, scales_dtype, one_byte)


def _worst(group: dist.ProcessGroup) -> None:
    """A fixed number of rows, whatever arrives."""
    rank, case = as_group(group).rank, CASE
    buffer = open_buffer(group)
    worst = sum(case.tokens)
    result = buffer.dispatch(**good_dispatch(buffer, case, rank), num_worst_tokens=worst)
    count = len(arrivals(case, rank).source_rank)
    y = torch.full((worst, case.hidden), torch.nan, dtype=torch.bfloat16, device="cpu")
    y[:count] = outputs(case, rank)
    weights = torch.full((worst, case.top_k), torch.nan, dtype=torch.float32, device="cpu")
    weights[:count] = lanes(case, rank)
    combined = buffer.combine(y, result[4], topk_weights=weights)
    again = buffer.dispatch(inputs(case, rank).x, handle=result[4], num_worst_tokens=worst)
    with pytest.raises((ArgumentError, PeerRefused)) as caught:
        buffer.dispatch(**good_dispatch(buffer, case, rank), num_worst_tokens=1)
    buffer.destroy()
    check_received(case, rank, result, worst)
    assert result[3] == []
    assert result[4][3].tolist() == arrivals(case, rank).source_token + [-1] * (worst - count)
    assert again[0].shape == (worst, case.hidden)
    assert torch.equal(again[0][:count], result[0][:count])
    everybody = range(case.ranks)
    y_of, lanes_of = [outputs(case, p) for p in everybody], [lanes(case, p) for p in everybody]
    assert torch.equal(combined[0], reference.combined(case, rank, y_of))
    assert torch.equal(combined[1], reference.combined_lanes(case, rank, lanes_of))
    assert "rows that arrive" in str(caught.value)
    assert isinstance(caught.value, PeerRefused) or caught.value.argument == "num_worst_tokens"


def test_num_worst_tokens(pools: Pools) -> None:
    pools(4).run(_worst)


def _bias(group: dist.ProcessGroup) -> None:
    rank, case = as_group(group).rank, CASE
    buffer = open_buffer(group)
    handle = buffer.dispatch(**good_dispatch(buffer, case, rank))[4]
    shape = (case.tokens[rank], case.hidden)
    generator = torch.Generator().manual_seed(rank)
    first, second = (
        torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu").bfloat16()
        for _ in range(2)
    )
    results = {}
    for name, bias, parts in (
        ("one", first, (first,)),
        ("two", (first, second), (first, second)),
        ("none", None, ()),
    ):
        results[name] = buffer.combine(outputs(case, rank), handle, bias=bias)[0], parts
    buffer.destroy()
    y_of = [outputs(case, peer) for peer in range(case.ranks)]
    for name, (combined, parts) in results.items():
        assert torch.equal(combined, reference.combined(case, rank, y_of, parts)), name


@pytest.mark.placements("processes", "threads")
def test_bias(pools: Pools) -> None:
    pools(4).run(_bias)


def _asynchronous(group: dist.ProcessGroup) -> None:
    """Events chained as Megatron-LM chains them; positional arguments as DeepEP orders them."""
    rank, case = as_group(group).rank, CASE
    mine = inputs(case, rank)
    buffer = open_buffer(group)
    previous = EventOverlap(EventHandle())
    *layout, event = buffer.get_dispatch_layout(mine.topk_idx, case.experts, previous, True, True)
    result = buffer.dispatch(
        mine.x, None, layout[0], layout[1], layout[3], layout[2], mine.topk_idx, mine.topk_weights,
        1, 0, None, event, True, True,
    )  # fmt: skip
    result[5].current_stream_wait()
    combined, _, done = buffer.combine(
        outputs(case, rank), result[4], None, None, None, result[5], True, True
    )
    with done:
        pass
    across, _, _ = buffer.internode_combine(
        outputs(case, rank), result[4], config=Buffer.get_combine_config(case.ranks)
    )
    again = buffer.internode_dispatch(**good_dispatch(buffer, case, rank), num_worst_tokens=0)
    buffer.destroy()
    check_received(case, rank, result)
    check_received(case, rank, again)
    y_of = [outputs(case, peer) for peer in range(case.ranks)]
    assert torch.equal(combined, reference.combined(case, rank, y_of))
    assert torch.equal(across, combined)


def test_events_and_internode(pools: Pools) -> None:
    pools(4).run(_asynchronous)


def _rebuilt_handle(group: dist.ProcessGroup) -> None:
    """A handle that went through autograd or a pickle is as good as the first."""
    rank, case = as_group(group).rank, CASE
    buffer = open_buffer(group)
    result = buffer.dispatch(**good_dispatch(buffer, case, rank))
    rebuilt = [tensor.clone() for tensor in result[4]]
    rebuilt[0][:, (rank + 1) % case.ranks] = -7  # the other ranks' columns matter to nobody
    rebuilt[1].zero_()
    rebuilt[2].zero_()
    rebuilt[5].zero_()
    # DeepEP's handles may outlive their buffer; so may these.
    buffer.destroy()
    buffer = open_buffer(group)
    combined, weights, _ = buffer.combine(outputs(case, rank), rebuilt, lanes(case, rank))
    again = buffer.dispatch(inputs(case, rank).x, tuple(rebuilt))
    # A gradient of another width and dtype.
    wide, *_ = buffer.dispatch(inputs(case, rank).x.float(), tuple(rebuilt))
    buffer.destroy()
    everybody = range(case.ranks)
    y_of, lanes_of = [outputs(case, p) for p in everybody], [lanes(case, p) for p in everybody]
    assert torch.equal(combined, reference.combined(case, rank, y_of))
    assert torch.equal(weights, reference.combined_lanes(case, rank, lanes_of))
    assert torch.equal(again[0], result[0])
    assert torch.equal(wide, result[0].float())


def test_combine_works_from_the_tuple_alone(pools: Pools) -> None:
    pools(4).run(_rebuilt_handle)
