"""High throughput of the DeepEP face on GPUs, its kernels run on the CPU: the programs and the
oracle of the conformance tests, and what is different from the host there."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch

from fanfold import _core
from fanfold.backends.high_throughput.cuda import CudaHighThroughput
from fanfold.backends.high_throughput.layout import layout_there
from fanfold.deep_ep import Buffer, Config
from fanfold.deep_ep.handles import GpuHandle
from fanfold.errors import ArgumentError, PeerRefused, PeerTimeout, UsageError
from tests.conformance import deep_ep_reference as reference
from tests.conformance import test_deep_ep_high_throughput as conformance
from tests.conformance.deep_ep_reference import Case, arrivals, inputs
from tests.conformance.test_deep_ep_high_throughput import (
    CASE,
    check_handle,
    check_received,
    good_dispatch,
    lanes,
    outputs,
)
from tests.emulation.deep_ep import emulated_buffers, open_buffer, run
from tests.emulation.world import Builder

CTAS = 3
DUPLICATES = Case(experts=8, top_k=3, hidden=256, tokens=(7, 0, 20, 9), duplicates=True)


@pytest.fixture(autouse=True)
def gpu(builder: Builder, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("FANFOLD_TIMEOUT_S", "10")
    monkeypatch.setattr(conformance, "open_buffer", open_buffer)
    with emulated_buffers(builder, CTAS):
        yield


def mode_of(buffer: Buffer) -> CudaHighThroughput:
    assert buffer.runtime is not None
    mode = buffer.runtime.high_throughput
    assert isinstance(mode, CudaHighThroughput)
    return mode


# ---- the programs of the conformance tests ------------------------------------------------------


@pytest.mark.parametrize("case", [CASE, DUPLICATES], ids=["distinct", "duplicates"])
def test_round_trip(case: Case) -> None:
    run(case.ranks, conformance._round_trip, case, 1 << 20, 3, 8)


def test_dispatch_without_top_k() -> None:
    run(CASE.ranks, conformance._without_top_k)


@pytest.mark.parametrize("scales", [torch.float32, torch.int32])
def test_fp8(scales: torch.dtype) -> None:
    run(CASE.ranks, conformance._fp8, scales, torch.float8_e4m3fn)


def test_bias() -> None:
    run(CASE.ranks, conformance._bias)


def test_events_and_internode() -> None:
    run(CASE.ranks, conformance._asynchronous)


def _sms(group: Any) -> None:
    buffer = open_buffer(group)
    arguments = good_dispatch(buffer, CASE, group.rank)
    taken = []
    for config, sms in ((Config(2), 2), (None, CTAS)):  # the default is more than there are
        rows, _, _, _, handle, _ = buffer.dispatch(**arguments, config=config)
        again = partial(buffer.dispatch, arguments["x"], handle=handle)
        for call in (again, partial(buffer.combine, rows, handle)):
            mode_of(buffer).use_sms(CTAS + 2 - sms)
            call(config=config)
            taken.append(mode_of(buffer)._launches._grid.ctas)
    assert taken == [2, 2, CTAS, CTAS]


def test_as_many_sms_as_the_configuration_says() -> None:
    run(CASE.ranks, _sms)


def test_counts_where_the_tensor_is() -> None:
    for case in (CASE, DUPLICATES):
        for rank in range(case.ranks):
            mine = inputs(case, rank)
            wanted = reference.layout(case, mine)
            topk_idx = mine.topk_idx.clone()
            found = layout_there(topk_idx, case.experts, case.ranks)
            assert found.tokens_per_rank.tolist() == wanted.per_rank
            assert found.tokens_per_expert.tolist() == wanted.per_expert
            assert torch.equal(found.is_token_in_rank, wanted.in_rank)
            dtypes = [each.dtype for each in vars(found).values()]
            assert dtypes == [torch.int32, torch.int32, torch.bool]
            topk_idx[topk_idx < 0] = case.experts  # counts as none
            again = layout_there(topk_idx, case.experts, case.ranks)
            assert torch.equal(again.tokens_per_expert, found.tokens_per_expert)
            assert torch.equal(again.is_token_in_rank, found.is_token_in_rank)


# ---- a fixed number of rows ---------------------------------------------------------------------


def _worst(group: Any, case: Case) -> None:
    rank, worst = group.rank, sum(case.tokens) + 3
    buffer = open_buffer(group)
    arguments = good_dispatch(buffer, case, rank)
    assert buffer.runtime is not None
    with mock.patch.object(buffer.runtime.exchange, "gather", side_effect=AssertionError):
        result = buffer.dispatch(**arguments, num_worst_tokens=worst)
    handle = result[4]
    assert isinstance(handle, GpuHandle)
    count = len(arrivals(case, rank).source_rank)
    y = torch.full((worst, case.hidden), torch.nan, dtype=torch.bfloat16)
    y[:count] = outputs(case, rank)
    weights = torch.full((worst, case.top_k), torch.nan)
    weights[:count] = lanes(case, rank)
    combined = buffer.combine(y, handle, topk_weights=weights)
    again = buffer.dispatch(inputs(case, rank).x, handle=handle, num_worst_tokens=worst)
    with pytest.raises(ArgumentError, match=rf"num_worst_tokens is 7, .* 0 or {worst}"):
        buffer.dispatch(inputs(case, rank).x, handle=handle, num_worst_tokens=7)
    buffer.destroy()
    check_received(case, rank, result, worst)
    assert result[3] == []
    wanted = [*reference.handle(case, rank, Buffer.num_sms // 2)]
    wanted[0][:, [peer for peer in range(case.ranks) if peer != rank]] = -1
    wanted[2].fill_(-1)
    wanted[3] = torch.nn.functional.pad(wanted[3], (0, worst - count), value=-1)
    for place, tensor in enumerate(wanted):
        assert torch.equal(handle[place], tensor), place
    assert torch.equal(again[0][:count], result[0][:count])
    everybody = range(case.ranks)
    y_of, lanes_of = [outputs(case, p) for p in everybody], [lanes(case, p) for p in everybody]
    assert torch.equal(combined[0], reference.combined(case, rank, y_of))
    assert torch.equal(combined[1], reference.combined_lanes(case, rank, lanes_of))


@pytest.mark.parametrize("case", [CASE, DUPLICATES], ids=["distinct", "duplicates"])
def test_num_worst_tokens(case: Case) -> None:
    run(case.ranks, _worst, case)


def _too_few(group: Any) -> None:
    """More rows than room for them: reported by a combine that comes after."""
    buffer = open_buffer(group)
    result = buffer.dispatch(**good_dispatch(buffer, CASE, group.rank), num_worst_tokens=1)
    if len(arrivals(CASE, group.rank).source_rank) > 1:
        with pytest.raises(ArgumentError, match=r"num_worst_tokens of call .* is 1,"):
            buffer.combine(result[0], result[4], result[2])
    else:
        buffer.combine(result[0], result[4], result[2])
    _works(buffer, group.rank)


def test_too_few_worst_tokens() -> None:
    run(CASE.ranks, _too_few)


# ---- refusals -----------------------------------------------------------------------------------


def _works(buffer: Buffer, rank: int) -> None:
    """Everything is as it should be; closes the Buffer."""
    result = buffer.dispatch(**good_dispatch(buffer, CASE, rank))
    combined, _, _ = buffer.combine(outputs(CASE, rank), result[4], lanes(CASE, rank))
    buffer.destroy()
    check_received(CASE, rank, result)
    check_handle(CASE, rank, result[4], Buffer.num_sms // 2)
    y_of = [outputs(CASE, peer) for peer in range(CASE.ranks)]
    assert torch.equal(combined, reference.combined(CASE, rank, y_of))


BAD_DISPATCHES: dict[str, dict[str, Any]] = {
    "x": {"x": [1.0]},
    "is_token_in_rank": {"is_token_in_rank": None},
    "num_tokens_per_rank.dtype": {"num_tokens_per_rank": torch.zeros(4)},
    "num_tokens_per_expert.shape": {"num_tokens_per_expert": torch.zeros(7, dtype=torch.int32)},
    "topk_weights": {"topk_weights": None},
    "topk_idx.device": {"topk_idx": torch.empty((4, 3), dtype=torch.int64, device="meta")},
    "expert_alignment": {"expert_alignment": 0},
    "config.num_sms": {"config": Config(21)},
    "previous_event": {"previous_event": 3},
}


def _refused_dispatches(group: Any) -> None:
    rank, buffer = group.rank, open_buffer(group)
    for name, changes in BAD_DISPATCHES.items():
        arguments = good_dispatch(buffer, CASE, rank)
        if rank == 1:
            with pytest.raises(ArgumentError) as caught:
                buffer.dispatch(**{**arguments, **changes})
            assert name.split(".")[0] in caught.value.argument
        else:
            with pytest.raises(PeerRefused, match="rank 1"):
                buffer.dispatch(**arguments)
    _works(buffer, rank)


def test_a_refused_dispatch_is_aborted_on_all_ranks() -> None:
    run(CASE.ranks, _refused_dispatches)


Spoil = Callable[[Any, GpuHandle], dict[str, Any]]
BAD_REUSES: tuple[Spoil, ...] = (
    lambda x, handle: {"x": x[:-1].contiguous()},
    lambda x, handle: {"handle": tuple(handle)},
    lambda x, handle: {"config": Config(24)},
)


def _refused_later(group: Any, kind: str) -> None:
    """A cached dispatch or a combine that rank 1 refuses: its peers learn it from a combine."""
    rank, buffer = group.rank, open_buffer(group)
    handle = buffer.dispatch(**good_dispatch(buffer, CASE, rank))[4]
    assert isinstance(handle, GpuHandle)
    y = outputs(CASE, rank)
    x, call = (y, buffer.combine) if kind == "combine" else (inputs(CASE, rank).x, buffer.dispatch)
    for spoil in BAD_REUSES:
        arguments = {"x": x, "handle": handle}
        if rank == 1:
            with pytest.raises(ArgumentError):
                call(**{**arguments, **spoil(x, handle)})
            buffer.combine(y, handle)
        elif kind == "combine":
            with pytest.raises(PeerRefused, match="rank 1"):
                call(**arguments)
            buffer.combine(y, handle)
        else:
            call(**arguments)
            with pytest.raises(PeerRefused, match="rank 1"):
                buffer.combine(y, handle)
    _works(buffer, rank)


@pytest.mark.parametrize("kind", ["cached", "combine"])
def test_a_call_with_a_handle_that_is_refused(kind: str) -> None:
    run(CASE.ranks, _refused_later, kind)


def test_a_handle_without_its_plan() -> None:
    def program(group: Any) -> None:
        buffer = open_buffer(group)
        handle = buffer.dispatch(**good_dispatch(buffer, CASE, group.rank))[4]
        assert isinstance(handle, tuple)
        assert len(handle) == 6
        first, *_, last = handle
        assert first is handle[0]
        assert last is handle[5]
        mapped = type(handle)(each.clone() for each in handle)
        for rebuilt in (tuple(handle), [*handle], mapped, copy.copy(handle), None):
            assert rebuilt is None or all(map(torch.equal, rebuilt, handle))
            with pytest.raises(ArgumentError, match="the very object that dispatch returned"):
                buffer.combine(outputs(CASE, group.rank), rebuilt)  # type: ignore[arg-type]
        # All ranks have refused, which is no call that a peer would have to hear of.
        buffer.destroy()

    run(CASE.ranks, program)


def _without_memory(group: Any) -> None:
    """Rank 1 finds when the counts are known that it has no room for its rows."""
    rank, buffer = group.rank, open_buffer(group)
    arguments = good_dispatch(buffer, CASE, rank)
    if rank == 1:
        broken = mock.patch.object(
            mode_of(buffer)._room, "dispatched", side_effect=MemoryError("no room")
        )
        with broken, pytest.raises(MemoryError):
            buffer.dispatch(**arguments)
    else:
        with pytest.raises(PeerRefused, match="no room"):
            buffer.dispatch(**arguments)
    _works(buffer, rank)


def test_a_dispatch_refused_after_its_plan() -> None:
    run(CASE.ranks, _without_memory)


def _disagreeing(group: Any) -> None:
    rank, buffer = group.rank, open_buffer(group)
    arguments = good_dispatch(buffer, CASE, rank)
    with pytest.raises(ArgumentError, match="the same on all ranks"):
        buffer.dispatch(**arguments, config=Config(24 if rank == 2 else 20))
    _works(buffer, rank)


def test_ranks_that_disagree_about_channels() -> None:
    run(CASE.ranks, _disagreeing)


# ---- memory, masks ------------------------------------------------------------------------------


def test_scratch_is_the_callers_own() -> None:
    def program(group: Any) -> None:
        buffer = open_buffer(group)
        scratch = buffer.get_local_buffer_tensor(torch.bfloat16)
        assert scratch.numel() == buffer.num_nvl_bytes // 2
        scratch.fill_(7.0)
        assert buffer.get_local_buffer_tensor(torch.bfloat16, offset=3)[0] == 7.0
        assert buffer.runtime is not None
        memory = buffer.runtime._gpu_streams
        _works(buffer, group.rank)
        assert memory is not None
        assert memory.closed  # type: ignore[attr-defined]

    run(CASE.ranks, program)


def test_rings_are_no_longer_than_asked_for() -> None:
    def program(group: Any) -> list[int]:
        sizes = []
        for nbytes in (1 << 20, 1 << 30):
            buffer = open_buffer(group, nbytes)
            assert buffer.runtime is not None
            assert buffer.runtime._gpu_streams is not None
            sizes.append(buffer.runtime._gpu_streams.bytes_per_rank)
            buffer.destroy()
        with pytest.raises(ArgumentError, match=r"num_nvl_bytes is 65536, .* get_nvl_buffer"):
            open_buffer(group, 1 << 16)
        buffer = open_buffer(group, _core.cuda_high_throughput_bytes(4, 1 << 13)[1])
        with pytest.raises(ArgumentError, match="num_nvl_bytes / num_ranks"):
            buffer.dispatch(**good_dispatch(buffer, CASE, group.rank))
        return sizes

    with mock.patch.dict("os.environ", {"FANFOLD_RING_BYTES": str(1 << 20)}):
        [small, large] = run(4, program)[0]
    assert small == 1 << 20
    assert 4 << 20 < large < 5 << 20


def test_masked_ranks_are_no_part_of_high_throughput() -> None:
    def program(group: Any) -> None:
        buffer = open_buffer(group)
        arguments = good_dispatch(buffer, CASE, group.rank)
        assert buffer.runtime is not None
        buffer.runtime.set_masked(2, True)
        with pytest.raises(UsageError, match="rank 2 is masked"):
            buffer.dispatch(**arguments)
        buffer.runtime.set_masked(2, False)
        _works(buffer, group.rank)

    run(CASE.ranks, program)


def test_a_rank_that_does_not_come(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FANFOLD_TIMEOUT_S", "1")

    def program(group: Any) -> None:
        buffer = open_buffer(group)
        arguments = good_dispatch(buffer, CASE, group.rank)
        if group.rank != 3:
            for _ in range(2):
                with pytest.raises(PeerTimeout, match="rank 3"):
                    buffer.dispatch(**arguments)

    run(CASE.ranks, program)
