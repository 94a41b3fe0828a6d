"""DeepEP's second interface against plain torch, bit for bit."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from fanfold.deep_ep import ElasticBuffer, EPHandle, EventHandle, EventOverlap
from fanfold.errors import ArgumentError, CopyError, FanfoldError, UsageError
from fanfold.group import as_group
from fanfold.launch import RankPool
from tests.conformance import deep_ep_reference as reference
from tests.conformance.deep_ep_reference import Case, arrivals, inputs
from tests.conformance.test_deep_ep_high_throughput import cases, check_received, lanes, outputs
from tests.distributed.routings import host_of_ranks
from tests.environment import environment

pytestmark = pytest.mark.placements("threads")

Pools = Callable[[int], RankPool]

CASE = Case(experts=8, top_k=3, hidden=256, tokens=(7, 0, 20, 9))
DUPLICATES = Case(experts=8, top_k=4, hidden=64, tokens=(5, 11, 0, 6), duplicates=True)
MOST = 24  # tokens of a rank


def open_buffer(group: dist.ProcessGroup, **changes: Any) -> ElasticBuffer:
    options: dict[str, Any] = {"num_max_tokens_per_rank": MOST, "explicitly_destroy": True}
    with environment(FANFOLD_TIMEOUT_S="20"):
        return ElasticBuffer(group, **{**options, **changes})


def arguments(case: Case, rank: int) -> dict[str, Any]:
    mine = inputs(case, rank)
    return {
        "x": mine.x,
        "topk_idx": mine.topk_idx,
        "topk_weights": mine.topk_weights,
        "num_experts": case.experts,
        "do_zero_padding": True,
    }


# ---- what must come -----------------------------------------------------------------------------


class Expanded:
    """The expanded rows of one rank, counted one by one."""

    def __init__(self, case: Case, rank: int, alignment: int) -> None:
        self.case, self.rank = case, rank
        packs = reference.packed(case, rank)
        self.counts = [len(pack.source_rank) for pack in packs]
        self.begins, at = [], 0
        for count in self.counts:
            self.begins.append(at)
            at += -(-count // alignment) * alignment
        self.rows = at
        self.row_of: dict[tuple[int, int, int], int] = {}  # of local expert, source rank and token
        for expert, pack in enumerate(packs):
            for nth, place in enumerate(zip(pack.source_rank, pack.source_token, strict=True)):
                self.row_of[(expert, *place)] = self.begins[expert] + nth

    def gather(self, of_ranks: list[torch.Tensor]) -> torch.Tensor:
        """The rows of these tokens, each rank's tensor given, zero in between."""
        first = of_ranks[0]
        rows = first.new_zeros((self.rows, *first.shape[1:]))
        for (_, source, token), row in self.row_of.items():
            rows[row] = of_ranks[source][token]
        return rows

    def weights(self, of_ranks: list[torch.Tensor]) -> torch.Tensor:
        """The sum, in top-k order, of what each row's token gives the row's expert."""
        out = torch.zeros(self.rows, dtype=torch.float32, device="cpu")
        everybody = reference.everybody(self.case)
        for (expert, source, token), row in self.row_of.items():
            chosen = everybody[source].topk_idx[token].tolist()
            for k, named in enumerate(chosen):
                if named == self.rank * self.case.local + expert:
                    out[row] += of_ranks[source][token, k]
        return out

    def slots(self, source: int, token: int) -> list[int]:
        """The row of each top-k entry of a token, -1 for none here."""
        chosen = reference.everybody(self.case)[source].topk_idx[token].tolist()
        local = [named - self.rank * self.case.local for named in chosen]
        return [self.row_of.get((expert, source, token), -1) for expert in local]

    def sums(self, y: torch.Tensor) -> torch.Tensor:
        """What this rank sends back of the rows ``y``, one sum for each received token."""
        found = arrivals(self.case, self.rank)
        out = torch.zeros((len(found.source_rank), y.shape[1]), dtype=torch.float32, device="cpu")
        for n, place in enumerate(zip(found.source_rank, found.source_token, strict=True)):
            for row in dict.fromkeys(row for row in self.slots(*place) if row >= 0):
                out[n] += y[row].float()
        return out.to(torch.bfloat16)


def expanded_outputs(case: Case, rank: int, alignment: int) -> torch.Tensor:
    """What ``rank`` makes of its expanded rows."""
    rows = Expanded(case, rank, alignment).gather([each.x for each in reference.everybody(case)])
    factor = torch.arange(len(rows), dtype=torch.float32, device="cpu").remainder(5) - 1.5 + rank
    return (rows.float() * factor.unsqueeze(1)).to(torch.bfloat16)


def other_weights(case: Case, rank: int) -> torch.Tensor:
    return inputs(case, rank).topk_weights * 3 - 1


def check_handle(case: Case, rank: int, handle: EPHandle, alignment: int, synced: bool) -> None:
    found, expanded = arrivals(case, rank), Expanded(case, rank, alignment)
    received, most = len(found.source_rank), handle.num_max_tokens_per_rank
    padded = [-(-count // alignment) * alignment for count in expanded.counts]
    assert torch.equal(handle.topk_idx, inputs(case, rank).topk_idx)
    if synced:
        assert handle.num_recv_tokens == received
        assert handle.num_expanded_tokens == expanded.rows
        assert handle.num_recv_tokens_per_expert_list == padded
    else:
        assert handle.num_recv_tokens == case.ranks * most
        rows = case.ranks * most * min(case.top_k, case.local) + (alignment - 1) * case.local
        assert handle.num_expanded_tokens == -(-rows // alignment) * alignment
        assert handle.num_recv_tokens_per_expert_list == []
    prefix = [found.source_rank[:].count(0)]
    for source in range(1, case.ranks):
        prefix.append(prefix[-1] + found.source_rank.count(source))
    assert handle.psum_num_recv_tokens_per_scaleup_rank.tolist() == prefix
    assert handle.num_unaligned_recv_tokens_per_expert.tolist() == expanded.counts
    ends = [
        begin + (count if handle.do_expand else more)
        for begin, count, more in zip(expanded.begins, expanded.counts, padded, strict=True)
    ]
    assert handle.psum_num_recv_tokens_per_expert.tolist() == ends
    metadata = handle.recv_src_metadata
    assert metadata.shape == (handle.num_recv_tokens, 2 + case.top_k)
    for name in ("psum_num_recv_tokens_per_scaleup_rank", "psum_num_recv_tokens_per_expert",
                 "num_unaligned_recv_tokens_per_expert", "recv_src_metadata"):  # fmt: skip
        assert getattr(handle, name).dtype == torch.int32
    places = list(zip(found.source_rank, found.source_token, strict=True))
    assert metadata[:received, 0].tolist() == [most * source + token for source, token in places]
    assert metadata[:received, 1].tolist() == list(range(received))
    none = [-1] * case.top_k
    slots = [expanded.slots(*place) if handle.do_expand else none for place in places]
    assert metadata[:received, 2:].tolist() == slots
    assert bool((metadata[received:] == -1).all())


# ---- round trips --------------------------------------------------------------------------------


def _plain(group: dist.ProcessGroup, case: Case, sync: bool | None, alignment: int) -> None:
    rank = as_group(group).rank
    buffer = open_buffer(group)
    stats = torch.full((case.local,), 7, dtype=torch.int32, device="cpu")
    result = buffer.dispatch(
        **arguments(case, rank),
        do_cpu_sync=sync,
        expert_alignment=alignment,
        cumulative_local_expert_recv_stats=stats,
    )
    handle, received = result[3], len(arrivals(case, rank).source_rank)
    again = buffer.dispatch(
        inputs(case, rank).x, handle=handle, topk_weights=other_weights(case, rank)
    )
    bare = buffer.dispatch(inputs(case, rank).x, handle=handle)
    y = result[0].new_zeros(result[0].shape)
    y[:received] = outputs(case, rank)
    numbers = torch.zeros((len(y), case.top_k), dtype=torch.float32, device="cpu")
    numbers[:received] = lanes(case, rank)
    combined = buffer.combine(y, handle, topk_weights=numbers)
    buffer.destroy()
    # Nobody waits any more for a rank that finds something wrong.
    worst = case.ranks * MOST if sync is False else 0
    check_received(case, rank, result, worst)
    check_handle(case, rank, handle, alignment, sync is not False)
    assert (stats - 7).tolist() == Expanded(case, rank, 1).counts
    assert again[3] is bare[3] is handle
    assert bare[2] is None
    for each in (again, bare):
        assert torch.equal(each[0][:received], result[0][:received])
        assert torch.equal(each[1][:received], result[1][:received])
    others = arrivals(case, rank).gather([other_weights(case, peer) for peer in range(case.ranks)])
    wanted = torch.where(result[1][:received] >= 0, others, 0.0)
    assert torch.equal(again[2][:received], wanted)
    assert not again[2][received:].any()
    everybody = range(case.ranks)
    sums = reference.combined(case, rank, [outputs(case, peer) for peer in everybody])
    assert torch.equal(combined[0], sums)
    summed = reference.combined_lanes(case, rank, [lanes(case, peer) for peer in everybody])
    assert torch.equal(combined[1], summed)
    assert result[4].event is combined[2].event is again[4].event is None


def _expanded(group: dist.ProcessGroup, case: Case, sync: bool | None, alignment: int) -> None:
    rank = as_group(group).rank
    wanted, everybody = Expanded(case, rank, alignment), reference.everybody(case)
    buffer = open_buffer(group)
    result = buffer.dispatch(
        **arguments(case, rank), do_expand=True, do_cpu_sync=sync, expert_alignment=alignment
    )
    handle = result[3]
    again = buffer.dispatch(
        inputs(case, rank).x,
        handle=handle,
        topk_weights=other_weights(case, rank),
        do_expand=True,
        do_zero_padding=True,
    )
    y = result[0].new_zeros(result[0].shape)
    y[: wanted.rows] = expanded_outputs(case, rank, alignment)
    numbers = torch.arange(len(y), dtype=torch.float32, device="cpu") + 1000 * rank
    combined = buffer.combine(y, handle, topk_weights=numbers)
    buffer.destroy()
    check_handle(case, rank, handle, alignment, sync is not False)
    for rows, topk_idx, weights, of_ranks in (
        (*result[:3], [each.topk_weights for each in everybody]),
        (*again[:3], [other_weights(case, peer) for peer in range(case.ranks)]),
    ):
        assert rows.shape == (handle.num_expanded_tokens, case.hidden)
        assert torch.equal(rows[: wanted.rows], wanted.gather([each.x for each in everybody]))
        assert topk_idx is None
        assert weights.shape == (len(rows),)
        assert torch.equal(weights[: wanted.rows], wanted.weights(of_ranks))
    of_peers = [Expanded(case, peer, alignment) for peer in range(case.ranks)]
    sums = [
        each.sums(expanded_outputs(case, peer, alignment)) for peer, each in enumerate(of_peers)
    ]
    assert torch.equal(combined[0], reference.combined(case, rank, sums))
    back = torch.zeros((case.tokens[rank], case.top_k), dtype=torch.float32, device="cpu")
    for token in range(case.tokens[rank]):
        for peer, each in enumerate(of_peers):
            for k, row in enumerate(each.slots(rank, token)):
                back[token, k] += row + 1000 * peer if row >= 0 else 0
    assert torch.equal(combined[1], back)


@pytest.mark.parametrize("sync", [True, None, False])
@pytest.mark.parametrize("case", [CASE, DUPLICATES], ids=["distinct", "duplicates"])
def test_plain(pools: Pools, case: Case, sync: bool | None) -> None:
    pools(case.ranks).run(_plain, case, sync, 8)


@pytest.mark.parametrize("sync", [True, None, False])
@pytest.mark.parametrize("case", [CASE, DUPLICATES], ids=["distinct", "duplicates"])
def test_expanded(pools: Pools, case: Case, sync: bool | None) -> None:
    pools(case.ranks).run(_expanded, case, sync, 16)


@given(
    case=cases(),
    expands=st.booleans(),
    sync=st.sampled_from([True, False]),
    alignment=st.sampled_from([1, 3, 128]),
)
def test_random_cases(pools: Pools, case: Case, expands: bool, sync: bool, alignment: int) -> None:
    program = _expanded if expands else _plain
    pools(case.ranks).run(program, case, sync, alignment)


def _fp8(group: dist.ProcessGroup, expands: bool, sync: bool) -> None:
    case, rank = CASE, as_group(group).rank
    pairs = [reference.fp8(each.x, True) for each in reference.everybody(case)]
    buffer = open_buffer(group)
    given_here = {**arguments(case, rank), "x": pairs[rank]}
    options = {"do_expand": expands, "do_cpu_sync": sync}
    rows = buffer.dispatch(**given_here, **options)
    by_columns = buffer.dispatch(
        pairs[rank],
        handle=rows[3],
        do_expand=expands,
        do_zero_padding=True,
        use_tma_aligned_col_major_sf=True,
    )
    buffer.destroy()
    of = Expanded(case, rank, 1) if expands else arrivals(case, rank)
    values = of.gather([each[0].view(torch.uint8) for each in pairs])
    scales = of.gather([each[1] for each in pairs])
    for (found, found_scales), *_ in (rows, by_columns):
        assert found.dtype == torch.float8_e4m3fn
        assert torch.equal(found[: len(values)].view(torch.uint8), values)
        assert torch.equal(found_scales[: len(scales)], scales)
    stride = -(-len(by_columns[0][0]) // 4) * 4
    assert by_columns[0][1].stride() == (1, stride)
    assert rows[0][1].stride() == (scales.shape[1], 1)


@pytest.mark.parametrize("expands", [False, True])
@pytest.mark.parametrize("sync", [False, True])
def test_fp8(pools: Pools, expands: bool, sync: bool) -> None:
    pools(4).run(_fp8, expands, sync)


def _biases(group: dist.ProcessGroup) -> None:
    case, rank = CASE, as_group(group).rank
    buffer = open_buffer(group)
    event = ElasticBuffer.capture()
    assert isinstance(event, EventHandle)
    handle = buffer.dispatch(
        **arguments(case, rank),
        previous_event=event,
        previous_event_before_epilogue=EventOverlap(event),
        async_with_compute_stream=True,
        allocate_on_comm_stream=True,
    )[3]
    ones = inputs(case, rank).x.new_ones(inputs(case, rank).x.shape)
    biases = (ones, ones * 3)
    found = []
    for bias in (None, ones, biases):
        out, numbers, done = buffer.combine(
            outputs(case, rank), handle, bias=bias, previous_event_before_epilogue=event,
            async_with_compute_stream=True,
        )  # fmt: skip
        assert done.event is not None
        done.current_stream_wait()
        assert numbers is None
        found.append(out)
    buffer.destroy()
    rows = [outputs(case, peer) for peer in range(case.ranks)]
    for out, given_biases in zip(found, ((), (ones,), biases), strict=True):
        assert torch.equal(out, reference.combined(case, rank, rows, given_biases))


def test_biases_and_events(pools: Pools) -> None:
    pools(4).run(_biases)


def _overwrites(group: dist.ProcessGroup, expands: bool) -> list[bool]:
    """Whether results stay the same where a caller writes over all that it was given."""
    case, rank = CASE, as_group(group).rank
    buffer = open_buffer(group)
    given_here = arguments(case, rank)
    first = buffer.dispatch(**given_here, do_expand=expands)
    handle, rows = first[3], first[0].clone()
    weights = None if first[2] is None else first[2].clone()
    out = buffer.combine(rows, handle)[0]
    metadata = handle.recv_src_metadata
    counts = (
        handle.psum_num_recv_tokens_per_scaleup_rank,
        handle.psum_num_recv_tokens_per_expert,
        handle.num_unaligned_recv_tokens_per_expert,
    )
    for tensor in (*first[:3], metadata, handle.topk_idx, given_here["topk_idx"], *counts):
        if tensor is not None:
            tensor.fill_(77)
    again = buffer.dispatch(
        given_here["x"],
        handle=handle,
        topk_weights=given_here["topk_weights"],
        do_expand=expands,
        do_zero_padding=True,
    )
    same = [torch.equal(again[0], rows), torch.equal(again[2], weights)]
    same.append(torch.equal(buffer.combine(rows, handle)[0], out))
    buffer.destroy()
    return same


@pytest.mark.parametrize("expands", [False, True])
def test_what_a_caller_overwrites_changes_nothing(pools: Pools, expands: bool) -> None:
    assert pools(4).run(_overwrites, expands) == [[True] * 3] * 4


# ---- making one ---------------------------------------------------------------------------------


def _made(group: dist.ProcessGroup, options: list[dict[str, Any]]) -> str:
    rank = as_group(group).rank
    try:
        buffer = open_buffer(group, **options[rank])
    except FanfoldError as error:
        return f"{type(error).__name__}: {error}"
    buffer.destroy()
    return ""


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        ({"num_bytes": 5}, "num_bytes is 5, but must be a multiple of 2097152"),
        ({"num_bytes": -1}, "num_bytes is -1"),
        ({"num_cpu_bytes": 1 << 21}, "num_cpu_bytes is 2097152, but must be 0"),
        ({"num_max_tokens_per_rank": -1}, "num_max_tokens_per_rank is -1"),
        ({"num_max_tokens_per_rank": None}, "num_max_tokens_per_rank is None"),
        ({"sl_idx": 16}, "sl_idx is 16"),
        ({"num_allocated_qps": -1}, "num_allocated_qps is -1"),
        ({"num_gpu_timeout_secs": 0}, "num_gpu_timeout_secs is 0"),
        ({"num_cpu_timeout_secs": 0}, "num_cpu_timeout_secs is 0"),
    ],
)
def test_bad_options_end_it_on_all_ranks(
    pools: Pools, options: dict[str, Any], wanted: str
) -> None:
    first, second = pools(2).run(_made, [options, {}])
    assert first.startswith(f"{ArgumentError.__name__}: {wanted}")
    assert "rank 0" in second
    assert wanted in second


def test_ranks_agree_about_tokens(pools: Pools) -> None:
    for said in pools(2).run(
        _made, [{"num_max_tokens_per_rank": 4}, {"num_max_tokens_per_rank": 5}]
    ):
        assert "num_max_tokens_per_rank is" in said
        assert "must be the same on all ranks" in said


def _attributes(group: dist.ProcessGroup) -> None:
    ranks = as_group(group)
    hint = ElasticBuffer.get_buffer_size_hint(group, 128, 1024, 8)
    assert hint > 0
    assert hint % (1 << 21) == 0
    buffer = open_buffer(group, num_bytes=4 << 21, num_allocated_qps=11)
    assert (buffer.rank_idx, buffer.num_ranks) == (ranks.rank, ranks.size)
    assert buffer.group is group
    assert buffer.num_bytes == 4 << 21
    assert buffer.num_max_tokens_per_rank == MOST
    assert buffer.get_logical_domain_size() == (
        buffer.num_scaleout_ranks, buffer.num_scaleup_ranks
    )  # fmt: skip
    assert buffer.get_physical_domain_size() == (buffer.num_rdma_ranks, buffer.num_nvlink_ranks)
    assert buffer.num_rdma_ranks * buffer.num_nvlink_ranks == ranks.size
    assert buffer.num_rdma_ranks == len(set(host_of_ranks(ranks.size)))
    assert (
        buffer.scaleout_rank_idx * buffer.num_scaleup_ranks + buffer.scaleup_rank_idx == ranks.rank
    )
    assert (buffer.get_theoretical_num_sms(64, 8), buffer.get_theoretical_num_qps(4)) == (24, 11)
    assert buffer.get_comm_stream() is not None
    for name in ("engram_write", "engram_fetch", "pp_send", "agrs_new_session", "all_gather"):
        assert not hasattr(buffer, name)
        with pytest.raises(AttributeError, match=f"are not in Fanfold, {name} among them"):
            getattr(buffer, name)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = buffer.nothing
    for copies in (copy.copy, copy.deepcopy):
        with pytest.raises(CopyError):
            copies(buffer)
    good = arguments(CASE, ranks.rank)
    handle = buffer.dispatch(**good, num_sms=6)[3]
    assert handle.num_sms == 6
    assert handle.topk_idx is not good["topk_idx"]
    assert buffer.dispatch(**good, do_handle_copy=False)[3].topk_idx is good["topk_idx"]
    assert handle.dst_buffer_slot_idx is handle.token_metadata_at_forward is None
    assert handle.channel_linked_list is None
    assert "num_recv_tokens" in repr(handle)
    buffer.barrier()
    buffer.barrier(use_comm_stream=False, with_cpu_sync=True, sequential=False)
    assert f"rank_idx={ranks.rank}" in repr(buffer)
    buffer.destroy()
    assert "destroyed" in repr(buffer)
    buffer.destroy()
    for call in (buffer.barrier, buffer.get_comm_stream):
        with pytest.raises(UsageError, match="this ElasticBuffer was destroyed"):
            call()
    with pytest.raises(UsageError, match="destroyed"):
        buffer.dispatch(**arguments(CASE, ranks.rank))
    alone = open_buffer(group, allow_hybrid_mode=False, explicitly_destroy=False,
                        prefer_overlap_with_compute=False)  # fmt: skip
    assert alone.get_logical_domain_size() == (1, ranks.size)
    assert alone.get_theoretical_num_sms(64, 8) == 64
    assert alone.num_bytes == hint
    with pytest.raises(UsageError, match="needs an ElasticBuffer made with explicitly_destroy"):
        alone.destroy()


def _of_uneven_hosts(group: dist.ProcessGroup) -> tuple[int, int]:
    buffer = open_buffer(group)
    buffer.destroy()
    return buffer.get_physical_domain_size()


def test_hosts_of_different_sizes_are_one_domain(
    pools: Pools, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FANFOLD_HOSTS", "2")
    monkeypatch.setenv("FANFOLD_NETWORK", "libfabric:tcp")
    assert pools(3).run(_of_uneven_hosts) == [(1, 3)] * 3


def test_attributes(pools: Pools) -> None:
    pools(4).run(_attributes)
