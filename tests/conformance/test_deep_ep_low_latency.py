"""Low-latency calls of the DeepEP face against plain torch, bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from fanfold.deep_ep import Buffer
from fanfold.errors import ArgumentError, UsageError
from fanfold.group import as_group
from fanfold.launch import RankPool
from tests import nvfp4
from tests.conformance import deep_ep_reference as reference
from tests.conformance.deep_ep_reference import Case, inputs, packed
from tests.environment import environment

pytestmark = pytest.mark.placements("threads")

Pools = Callable[[int], RankPool]

GLOBAL_SCALE = 448 * 6 / 5.0

# Arguments of dispatch by the name of the format.
FORMATS: dict[str, dict[str, Any]] = {
    "bf16": {"use_fp8": False},
    "fp8": {},
    "rounded": {"round_scale": True},
    "ue8m0": {"round_scale": True, "use_ue8m0": True},
    "nvfp4": {
        "use_fp8": False,
        "use_nvfp4": True,
        "x_global_scale": torch.tensor(GLOBAL_SCALE, dtype=torch.float32, device="cpu"),
    },
}


def open_buffer(
    group: dist.ProcessGroup, case: Case, timeout_s: str = "20", **changes: Any
) -> Buffer:
    """A Buffer with exactly the memory that the hint names."""
    nbytes = Buffer.get_low_latency_rdma_size_hint(
        case.max_tokens, case.hidden, case.ranks, case.experts
    )
    arguments = {"num_rdma_bytes": nbytes, "low_latency_mode": True, "explicitly_destroy": True}
    # A test that fails on one rank should not keep the others for the default of 100 s.
    with environment(FANFOLD_TIMEOUT_S=timeout_s):
        return Buffer(group, **{**arguments, **changes})


def finish(mode: str, event: Any, hook: Any) -> None:
    """What a caller does before it uses a result, for each way to call."""
    if mode == "hook":
        assert event.event is None
        hook()
    elif mode == "async":
        assert hook is None
        event.current_stream_wait()
    else:
        assert hook is None
        assert event.event is None


def arguments_of(mode: str) -> dict[str, bool]:
    return {"async_finish": mode == "async", "return_recv_hook": mode == "hook"}


def expected_rows(case: Case, peer: int, form: str) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Values and scales of the rows of each local expert of ``peer``."""
    everybody = reference.everybody(case)
    found = []
    for pack in packed(case, peer):
        places = list(zip(pack.source_rank, pack.source_token, strict=True))
        x = torch.stack([everybody[rank].x[token] for rank, token in places]) if places else (
            torch.empty((0, case.hidden), dtype=torch.bfloat16, device="cpu"))  # fmt: skip
        if form == "bf16":
            found.append((x, torch.empty((len(places), 0), dtype=torch.float32, device="cpu")))
            continue
        if form == "nvfp4":
            found.append(nvfp4.quantized(x, GLOBAL_SCALE))
        else:
            found.append(reference.fp8(x, power_of_two=form != "fp8"))
    return found


def outputs(case: Case, peer: int, form: str) -> torch.Tensor:
    """What the experts of ``peer`` make of their rows; nothing but NaN elsewhere."""
    y = torch.full(
        (case.local, case.ranks * case.max_tokens, case.hidden),
        torch.nan,
        dtype=torch.float32,
        device="cpu",
    )
    for e, (values, scales) in enumerate(expected_rows(case, peer, form)):
        if form == "nvfp4":
            rows = nvfp4.dequantized(values, scales, GLOBAL_SCALE)
        else:
            rows = values.float() if form == "bf16" else reference.dequantized(values, scales)
        y[e, : len(rows)] = rows * (0.5 + 0.25 * (peer * case.local + e))
    return y.to(torch.bfloat16)


def _by_expert(case: Case, rows: torch.Tensor, scales: torch.Tensor) -> list[torch.Tensor]:
    """nvfp4 rows and scales, experts first, as they are stored; after a look at their shapes."""
    capacity = case.ranks * case.max_tokens
    assert rows.shape == (capacity, case.hidden // 2, case.local)
    assert scales.shape == (32, 4, -(-capacity // 128), 4, -(-case.hidden // 64), case.local)
    assert (rows.dtype, scales.dtype) == (torch.uint8, torch.float8_e4m3fn)
    stored = [rows.permute(2, 0, 1), scales.permute(5, 2, 4, 0, 1, 3)]
    assert all(tensor.is_contiguous() for tensor in stored)
    return stored


def check_dispatched(case: Case, rank: int, form: str, result: tuple[Any, ...]) -> None:
    received, counts, handle = result[:3]
    source_info, ranges, max_tokens, hidden, experts = handle
    assert (max_tokens, hidden, experts) == (case.max_tokens, case.hidden, case.experts)
    assert counts.dtype == source_info.dtype == torch.int32
    assert ranges.dtype == torch.int64
    capacity = case.ranks * case.max_tokens
    rows, scales = received if isinstance(received, tuple) else (received, None)
    if form == "nvfp4":
        rows, scales = _by_expert(case, rows, scales)
    else:
        assert rows.shape == (case.local, capacity, case.hidden)
    blocks = -(-case.hidden // 128)
    if form == "bf16":
        assert scales is None
    elif form == "ue8m0":
        assert scales.shape == (case.local, capacity, -(-blocks // 4))
        assert scales.dtype == torch.int32
    elif form != "nvfp4":
        assert scales.shape == (case.local, capacity, blocks)
        assert scales.dtype == torch.float32
    if scales is not None and form != "nvfp4":
        assert scales.stride(1) == 1  # as grouped matrix products read them
    wanted = expected_rows(case, rank, form)
    for e, pack in enumerate(packed(case, rank)):
        count = len(pack.source_rank)
        assert counts[e] == count
        assert source_info[e, :count].tolist() == pack.source_token
        assert ranges[e].tolist() == [pack.range_of(source) for source in range(case.ranks)]
        values, scale = wanted[e]
        assert torch.equal(rows[e, :count].view(torch.uint8), values.view(torch.uint8))
        if scales is None:
            continue
        if form == "nvfp4":
            tiles = nvfp4.by_row(scales, e, count, 4 * scales.shape[2]).float()
            assert torch.equal(tiles[:, : case.hidden // 16], scale.float())
            assert not tiles[:, case.hidden // 16 :].any()
            continue
        packed_scale = reference.ue8m0(scale) if form == "ue8m0" else scale
        assert torch.equal(scales[e, :count], packed_scale)


def _round_trip(group: dist.ProcessGroup, case: Case, form: str, mode: str) -> None:
    rank = as_group(group).rank
    mine = inputs(case, rank)
    buffer = open_buffer(group, case)
    result = buffer.low_latency_dispatch(
        mine.x, mine.topk_idx, case.max_tokens, case.experts, **FORMATS[form], **arguments_of(mode)
    )
    finish(mode, *result[3:])
    combined, *rest = buffer.low_latency_combine(
        outputs(case, rank, form),
        mine.topk_idx,
        mine.topk_weights,
        result[2],
        **arguments_of(mode),
    )
    finish(mode, *rest)
    buffer.destroy()
    # Nobody waits any more for a rank that finds something wrong.
    check_dispatched(case, rank, form, result)
    y_of = [outputs(case, peer, form) for peer in range(case.ranks)]
    assert torch.equal(combined, reference.weighted_sum(case, rank, y_of))


@st.composite
def cases(draw: st.DrawFn) -> Case:
    ranks = draw(st.sampled_from([1, 2, 3, 4]))
    top_k = draw(st.sampled_from([1, 2, 5, 8, 11]))
    experts = ranks * draw(st.integers(1, 6))
    return Case(
        experts=experts,
        # More lanes than experts would be fine, but the size hint is not for them.
        top_k=min(top_k, experts),
        hidden=16 * draw(st.sampled_from([1, 2, 8, 9, 33, 65])),
        tokens=tuple(draw(st.lists(st.integers(0, 9), min_size=ranks, max_size=ranks))),
        seed=draw(st.integers(0, 1000)),
        duplicates=draw(st.booleans()),
        unrouted=draw(st.sampled_from([0.0, 0.2, 1.0])),
    )


@given(
    case=cases(), form=st.sampled_from(list(FORMATS)), mode=st.sampled_from(["", "async", "hook"])
)
def test_against_torch(pools: Pools, case: Case, form: str, mode: str) -> None:
    if form == "nvfp4":  # an nvfp4 row is half as long
        case = Case(**{**vars(case), "hidden": 2 * case.hidden})
    pools(case.ranks).run(_round_trip, case, form, mode)


def test_top_k_of_32_in_the_memory_of_the_hint(pools: Pools) -> None:
    case = Case(experts=64, top_k=32, hidden=256, tokens=(5, 8), seed=1)
    pools(2).run(_round_trip, case, "fp8", "hook")


def test_tiles_of_nvfp4_scales(pools: Pools) -> None:
    """More rows than a tile has, and a tile that is not full in either direction."""
    case = Case(experts=2, top_k=1, hidden=160, tokens=(150, 90), seed=1, unrouted=0.0)
    pools(2).run(_round_trip, case, "nvfp4", "")


def _one_scale_for_each_expert(group: dist.ProcessGroup) -> None:
    """vLLM and SGLang pass a scale for each expert, which are all the same, and read the rows as
    ``[E_l, C, hidden / 2]``; the branch's own test passes the scale with bf16 rows, too."""
    rank, case = as_group(group).rank, CASE
    mine = inputs(case, rank)
    scale = FORMATS["nvfp4"]["x_global_scale"].expand(case.local)
    buffer = open_buffer(group, case)
    call = (mine.x, mine.topk_idx, case.max_tokens, case.experts)
    plain = buffer.low_latency_dispatch(*call, use_fp8=False, x_global_scale=scale)
    check_dispatched(case, rank, "bf16", plain)
    result = buffer.low_latency_dispatch(
        *call, use_fp8=False, use_nvfp4=True, x_global_scale=scale, return_recv_hook=True
    )
    result[4]()
    check_dispatched(case, rank, "nvfp4", result)
    rows = result[0][0].permute(2, 0, 1)
    assert rows.shape == (case.local, case.ranks * case.max_tokens, case.hidden // 2)
    buffer.destroy()


def test_one_scale_for_each_expert(pools: Pools) -> None:
    pools(4).run(_one_scale_for_each_expert)


# ---- every argument -----------------------------------------------------------------------------

CASE = Case(experts=8, top_k=3, hidden=256, tokens=(6, 4, 0, 5), seed=3)


def _statistics(group: dist.ProcessGroup) -> tuple[int, int]:
    rank, case = as_group(group).rank, CASE
    mine = inputs(case, rank)
    buffer = open_buffer(group, case)
    totals = torch.full((case.local,), 100, dtype=torch.int32, device="cpu")
    waits = [torch.zeros(case.ranks, dtype=torch.int64, device="cpu") for _ in range(2)]
    for _ in range(2):
        received, counts, handle, _, _ = buffer.low_latency_dispatch(
            mine.x, mine.topk_idx, case.max_tokens, case.experts, totals, waits[0], use_fp8=False
        )
        buffer.low_latency_combine(
            received, mine.topk_idx, mine.topk_weights, handle,
            combine_wait_recv_cost_stats=waits[1],
        )  # fmt: skip
    assert torch.equal(totals, 100 + 2 * counts)
    assert all(int(wait.min()) >= 0 for wait in waits)
    buffer.destroy()
    return int(waits[0].sum()), int(waits[1].sum())


@pytest.mark.placements("processes", "threads")
def test_statistics_are_added_to(pools: Pools) -> None:
    outcomes = pools(4).run(_statistics)
    # Whether a rank had to wait depends on who came first; that all never did cannot be.
    assert sum(dispatched for dispatched, _ in outcomes) > 0
    assert sum(combined for _, combined in outcomes) > 0


def _zero_copy(group: dist.ProcessGroup) -> None:
    rank, case = as_group(group).rank, CASE
    mine = inputs(case, rank)
    buffer = open_buffer(group, case)
    wanted = reference.weighted_sum(
        case, rank, [outputs(case, peer, "fp8") for peer in range(case.ranks)]
    )
    for round_ in range(3):
        handle = buffer.low_latency_dispatch(
            mine.x, mine.topk_idx, case.max_tokens, case.experts
        )[2]  # fmt: skip
        room = buffer.get_next_low_latency_combine_buffer(handle)
        assert room.shape == (case.local, case.ranks * case.max_tokens, case.hidden)
        assert room.dtype == torch.bfloat16
        room[:, :, :] = outputs(case, rank, "fp8")
        out = torch.full(
            (case.tokens[rank], case.hidden), torch.nan, dtype=torch.bfloat16, device="cpu"
        )
        # The content of x does not matter now, as in DeepEP.
        combined, _, hook = buffer.low_latency_combine(
            torch.zeros_like(room), mine.topk_idx, mine.topk_weights, handle,
            zero_copy=True, out=out, return_recv_hook=round_ == 1,
        )  # fmt: skip
        if hook is not None:
            room.fill_(torch.nan)  # the send half has read it
            hook()
        assert combined is out
        assert torch.equal(out, wanted)
    buffer.destroy()


def test_zero_copy_and_out(pools: Pools) -> None:
    pools(4).run(_zero_copy)


def _logfmt(group: dist.ProcessGroup) -> None:
    rank, case = as_group(group).rank, CASE
    mine = inputs(case, rank)
    buffer = open_buffer(group, case)
    handle = buffer.low_latency_dispatch(mine.x, mine.topk_idx, case.max_tokens, case.experts)[2]
    results = [
        buffer.low_latency_combine(
            outputs(case, rank, "fp8"), mine.topk_idx, mine.topk_weights, handle, use_logfmt=logfmt
        )[0].float()
        for logfmt in (False, True)
    ]
    size = reference.weighted_sum(
        case, rank, [outputs(case, peer, "fp8").abs() for peer in range(case.ranks)]
    ).float()
    assert bool(((results[0] - results[1]).abs() <= 0.03 * size + 1e-6).all())
    assert case.tokens[rank] == 0 or not torch.equal(*results)
    buffer.destroy()


@pytest.mark.placements("processes", "threads")
def test_logfmt(pools: Pools) -> None:
    pools(4).run(_logfmt)


def _two_open_calls(group: dist.ProcessGroup) -> None:
    """Two batches overlapped, as SGLang does: the second is sent before the first is received."""
    rank = as_group(group).rank
    batches = [CASE, Case(**{**vars(CASE), "seed": 9})]
    buffer = open_buffer(group, CASE)
    for _ in range(3):
        sent = []
        for case in batches:
            mine = inputs(case, rank)
            sent.append(buffer.low_latency_dispatch(
                mine.x, mine.topk_idx, case.max_tokens, case.experts, return_recv_hook=True
            ))  # fmt: skip
        mine = inputs(CASE, rank)
        with pytest.raises(UsageError):
            buffer.low_latency_dispatch(mine.x, mine.topk_idx, CASE.max_tokens, CASE.experts)
        results = []
        for case, result in zip(batches, sent, strict=True):
            result[4]()
            with pytest.raises(UsageError):
                result[4]()
            check_dispatched(case, rank, "fp8", result)
            mine = inputs(case, rank)
            results.append(buffer.low_latency_combine(
                outputs(case, rank, "fp8"), mine.topk_idx, mine.topk_weights, result[2],
                return_recv_hook=True,
            ))  # fmt: skip
        for case, (combined, _, hook) in zip(batches, results, strict=True):
            hook()
            y_of = [outputs(case, peer, "fp8") for peer in range(case.ranks)]
            assert torch.equal(combined, reference.weighted_sum(case, rank, y_of))
    buffer.destroy()


def test_two_open_calls(pools: Pools) -> None:
    pools(4).run(_two_open_calls)


def _rebuilt_handle(group: dist.ProcessGroup) -> None:
    """Narrow rows out, wide rows back: the caller packs them and writes handle[3], as TensorRT-LLM
    does for 4-bit rows."""
    rank, case = as_group(group).rank, CASE
    mine = inputs(case, rank)
    narrow = Case(**{**vars(case), "hidden": 64})
    buffer = open_buffer(group, case)
    for _ in range(2):
        _, _, handle, _, _ = buffer.low_latency_dispatch(
            inputs(narrow, rank).x, mine.topk_idx, case.max_tokens, case.experts, use_fp8=False
        )
        rebuilt = list(handle)
        rebuilt[0], rebuilt[1] = rebuilt[0].clone(), rebuilt[1].clone()
        rebuilt[3] = case.hidden
        wide = outputs(case, rank, "bf16")
        combined, _, _ = buffer.low_latency_combine(wide, mine.topk_idx, mine.topk_weights, rebuilt)
        y_of = [outputs(case, peer, "bf16") for peer in range(case.ranks)]
        assert torch.equal(combined, reference.weighted_sum(case, rank, y_of))
    buffer.destroy()


def test_combine_works_from_the_tuple_alone(pools: Pools) -> None:
    # Same seed, tokens and experts, so the routing of both widths would be the same only by luck:
    # random numbers are drawn for x first. The test passes the wide case's routing to both.
    pools(4).run(_rebuilt_handle)


def _scratch(group: dist.ProcessGroup) -> None:
    """Scratch is no call's memory: callers write over it at any time, and call nothing then."""
    rank = as_group(group).rank
    buffer = open_buffer(group, CASE, num_nvl_bytes=1 << 20)
    mine = inputs(CASE, rank)

    def overwrite(value: int) -> None:
        for use_rdma_buffer, nbytes in ((True, buffer.num_rdma_bytes), (False, 1 << 20)):
            scratch = buffer.get_local_buffer_tensor(torch.uint8, use_rdma_buffer=use_rdma_buffer)
            assert scratch.numel() == nbytes
            scratch.fill_(value)

    for value in (0, 0xFF, 0xA5):
        overwrite(value)
        dispatched = buffer.low_latency_dispatch(
            mine.x, mine.topk_idx, CASE.max_tokens, CASE.experts, return_recv_hook=True
        )
        overwrite(value)  # peers have sent, or are about to
        dispatched[4]()
        check_dispatched(CASE, rank, "fp8", dispatched)
        y = outputs(CASE, rank, "fp8")
        out, _, hook = buffer.low_latency_combine(
            y, mine.topk_idx, mine.topk_weights, dispatched[2], return_recv_hook=True
        )
        overwrite(value)
        hook()
        y_of = [outputs(CASE, peer, "fp8") for peer in range(CASE.ranks)]
        assert torch.equal(out, reference.weighted_sum(CASE, rank, y_of))
        overwrite(value)
        routing = buffer.get_dispatch_layout(mine.topk_idx, CASE.experts)
        arrived = buffer.dispatch(
            mine.x,
            topk_idx=mine.topk_idx,
            topk_weights=mine.topk_weights,
            num_tokens_per_rank=routing[0],
            num_tokens_per_expert=routing[2],
            is_token_in_rank=routing[3],
        )
        overwrite(value)
        x_of = [theirs.x for theirs in reference.everybody(CASE)]
        rows_of = [reference.arrivals(CASE, peer).gather(x_of) for peer in range(CASE.ranks)]
        combined = buffer.combine(arrived[0], arrived[4])[0]
        assert torch.equal(combined, reference.combined(CASE, rank, rows_of))
    words = buffer.get_local_buffer_tensor(torch.int32, torch.Size([3, 5]), 7, True)
    words.copy_(torch.arange(15, dtype=torch.int64, device="cpu").view(3, 5))
    flat = buffer.get_local_buffer_tensor(torch.int32, use_rdma_buffer=True)
    assert flat[7:22].tolist() == list(range(15))
    assert buffer.get_local_buffer_tensor(torch.int64).numel() == 1 << 17
    with pytest.raises(ArgumentError, match="size"):
        buffer.get_local_buffer_tensor(torch.int64, torch.Size([(1 << 17) + 1]))
    with pytest.raises(ArgumentError, match="offset"):
        buffer.get_local_buffer_tensor(torch.int64, offset=(1 << 17) + 1)
    with pytest.raises(ArgumentError, match="num_rdma_bytes"):
        buffer.clean_low_latency_buffer(CASE.max_tokens, 4 * CASE.hidden, CASE.experts)
    buffer.destroy()


def test_memory_as_scratch(pools: Pools) -> None:
    pools(4).run(_scratch)


# ---- masks --------------------------------------------------------------------------------------


def _without(case: Case, masked: int) -> list[reference.Inputs]:
    """The inputs of all ranks as they count where nobody talks to ``masked``."""
    everybody = reference.everybody(case)
    for each in everybody:
        there = (each.topk_idx >= 0) & (each.topk_idx // case.local == masked)
        each.topk_idx[there] = -1
    return everybody


def _masked(group: dist.ProcessGroup, masked: int) -> None:
    rank, case = as_group(group).rank, CASE
    buffer = open_buffer(group, case, enable_shrink=True)
    status = torch.full((case.ranks,), 7, dtype=torch.int32, device="cpu")
    buffer.low_latency_query_mask_buffer(status)
    assert status.tolist() == [0] * case.ranks
    mine = inputs(case, rank)

    def dispatch() -> tuple[Any, ...]:
        return buffer.low_latency_dispatch(
            mine.x, mine.topk_idx, case.max_tokens, case.experts, use_fp8=False
        )

    dispatch()
    if rank == masked:  # it knows nobody any more either, and so stays in step
        for peer in range(case.ranks):
            buffer.low_latency_update_mask_buffer(peer, True)
    else:
        buffer.low_latency_update_mask_buffer(masked, mask=True)
        buffer.low_latency_query_mask_buffer(status)
        assert status.tolist() == [int(peer == masked) for peer in range(case.ranks)]
    received, counts, handle, _, _ = dispatch()
    combined, _, _ = buffer.low_latency_combine(received, mine.topk_idx, mine.topk_weights, handle)
    if rank != masked:
        for e, pack in enumerate(packed(case, rank)):
            present = [r for r in pack.source_rank if r != masked]
            assert counts[e] == len(present)
            assert handle[1][e, masked] & 0xFFFFFFFF == 0
        for token, chosen in enumerate(_without(case, masked)[rank].topk_idx.tolist()):
            if max(chosen) < 0:
                assert not combined[token].any()
    buffer.low_latency_clean_mask_buffer()
    buffer.low_latency_query_mask_buffer(status)
    assert not status.any()
    as_group(group).all_gather(None)
    check_dispatched(case, rank, "bf16", dispatch())
    buffer.destroy()


def test_masked_rank_and_back(pools: Pools) -> None:
    pools(4).run(_masked, 1)


def _shrink(group: dist.ProcessGroup) -> list[int]:
    """A rank that never comes is masked after the time bound, and the others go on."""
    rank, case = as_group(group).rank, CASE
    buffer = open_buffer(group, case, "0.5", enable_shrink=True)
    mine = inputs(case, rank)
    status = torch.zeros(case.ranks, dtype=torch.int32, device="cpu")
    if rank != 1:
        for _ in range(2):
            received, _, handle, _, _ = buffer.low_latency_dispatch(
                mine.x, mine.topk_idx, case.max_tokens, case.experts, use_fp8=False
            )
            buffer.low_latency_combine(received, mine.topk_idx, mine.topk_weights, handle)
        buffer.low_latency_query_mask_buffer(status)
        with pytest.raises(UsageError, match="num_nvl_bytes"):
            buffer.combine(received, handle)
    as_group(group).all_gather(None)
    buffer.destroy()
    return status.tolist()


@pytest.mark.placements("processes")  # its warnings are the ranks' own
def test_late_rank_is_masked(pools: Pools) -> None:
    assert pools(4).run(_shrink) == [[0, 1, 0, 0], [0, 0, 0, 0], [0, 1, 0, 0], [0, 1, 0, 0]]


def _mask_calls_refused(group: dist.ProcessGroup) -> None:
    for changes in ({}, {"enable_shrink": True, "low_latency_mode": False}):
        buffer = open_buffer(group, CASE, **changes)
        with pytest.raises(UsageError, match="enable_shrink"):
            buffer.low_latency_update_mask_buffer(0)
        with pytest.raises(UsageError, match="enable_shrink"):
            buffer.low_latency_query_mask_buffer(torch.zeros(4, dtype=torch.int32, device="cpu"))
        with pytest.raises(UsageError, match="enable_shrink"):
            buffer.low_latency_clean_mask_buffer()
        buffer.destroy()
    buffer = open_buffer(group, CASE, enable_shrink=True)
    with pytest.raises(ArgumentError, match="rank_to_mask"):
        buffer.low_latency_update_mask_buffer(4, True)
    with pytest.raises(ArgumentError, match="mask_status"):
        buffer.low_latency_query_mask_buffer(torch.zeros(4, dtype=torch.float32, device="cpu"))
    buffer.destroy()


def test_mask_calls_need_enable_shrink(pools: Pools) -> None:
    pools(4).run(_mask_calls_refused)
