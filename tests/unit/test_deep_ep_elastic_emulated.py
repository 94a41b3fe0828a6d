"""DeepEP's second interface on GPUs, its kernels run on the CPU: the programs and the oracle of the
conformance tests."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch

from fanfold.backends.high_throughput.cuda import CudaHighThroughput
from fanfold.backends.high_throughput.room import Room
from fanfold.deep_ep import ElasticBuffer, EventOverlap
from fanfold.deep_ep.streams import HostStreams
from fanfold.errors import ArgumentError, PeerRefused, UsageError
from tests.conformance import deep_ep_reference as reference
from tests.conformance import test_deep_ep_elastic as conformance
from tests.conformance.test_deep_ep_elastic import CASE, DUPLICATES, MOST, arguments
from tests.conformance.test_deep_ep_elastic_refusals import (
    BAD_DISPATCHES,
    NEARLY,
    check_refusals,
    known_then_bad,
)
from tests.emulation.deep_ep import emulated_buffers, poisoned, run
from tests.emulation.world import Builder

CTAS = 3


def open_buffer(group: Any, **changes: Any) -> ElasticBuffer:
    options: dict[str, Any] = {"num_max_tokens_per_rank": MOST, "explicitly_destroy": True}
    buffer = ElasticBuffer(group, **{**options, **changes})
    assert isinstance(buffer._backend, CudaHighThroughput)
    return buffer


@pytest.fixture(autouse=True)
def gpu(builder: Builder, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("FANFOLD_TIMEOUT_S", "10")
    monkeypatch.setenv("FANFOLD_FEW_TOKENS", "0")  # all calls by high throughput
    monkeypatch.setattr(conformance, "open_buffer", open_buffer)
    # What kernels do not write holds anything.
    monkeypatch.setattr(Room, "empty", poisoned)
    with emulated_buffers(builder, CTAS):
        yield


@pytest.mark.parametrize("sync", [True, False])
@pytest.mark.parametrize("case", [CASE, DUPLICATES], ids=["distinct", "duplicates"])
def test_plain(case: Any, sync: bool) -> None:
    run(case.ranks, conformance._plain, case, sync, 8)


@pytest.mark.parametrize("sync", [True, False])
@pytest.mark.parametrize("case", [CASE, DUPLICATES], ids=["distinct", "duplicates"])
def test_expanded(case: Any, sync: bool) -> None:
    run(case.ranks, conformance._expanded, case, sync, 16)


@pytest.mark.parametrize("expands", [False, True])
def test_fp8(expands: bool) -> None:
    run(CASE.ranks, conformance._fp8, expands, False)


def test_biases_and_events() -> None:
    run(CASE.ranks, conformance._biases)


@pytest.mark.parametrize("expands", [False, True])
def test_what_a_caller_overwrites_changes_nothing(expands: bool) -> None:
    assert run(CASE.ranks, conformance._overwrites, expands) == [[True] * 3] * CASE.ranks


def test_a_refusal_is_told() -> None:
    changes, wanted = BAD_DISPATCHES["expert_alignment"]
    said = run(CASE.ranks, _refused, changes)
    assert said[0].startswith(f"ArgumentError: {wanted}")
    assert all(PeerRefused.__name__ in other for other in said[1:])


@pytest.mark.parametrize("nearly", NEARLY)
def test_a_call_that_is_nearly_like_the_one_before(nearly: str) -> None:
    changes, wanted = NEARLY[nearly]
    check_refusals(run(CASE.ranks, known_then_bad, changes), wanted)


def _refused(group: Any, changes: dict[str, Any]) -> str:
    """What a bad call of rank 0 is found to be, by it or a later one; after that calls work."""
    buffer = open_buffer(group)
    good = arguments(CASE, group.rank)
    handle = buffer.dispatch(**good)[3]
    said = ""
    try:
        result = buffer.dispatch(**{**good, **(changes if group.rank == 0 else {})})
        buffer.combine(result[0], result[3])
    except (ArgumentError, PeerRefused) as error:
        said = f"{type(error).__name__}: {error}"
    rows = buffer.dispatch(good["x"], handle=handle)[0]
    assert torch.equal(rows, buffer.dispatch(good["x"], handle=handle)[0])
    buffer.destroy()
    return said


def _counts_of_a_refusal(group: Any, expands: bool) -> list[int]:
    """What a rank finds in the handle of a call that another has refused, which the CPU learns only
    by the combine."""
    buffer = open_buffer(group)
    good = arguments(CASE, group.rank)
    changes = {"expert_alignment": 0} if group.rank == 0 else {}
    try:
        handle = buffer.dispatch(**{**good, **changes}, do_expand=expands, do_cpu_sync=False)[3]
    except ArgumentError:
        return []
    finally:
        buffer.destroy()
    assert bool((handle.recv_src_metadata == -1).all())
    per_expert = handle.psum_num_recv_tokens_per_expert
    return [*handle.psum_num_recv_tokens_per_scaleup_rank.tolist(), *per_expert.tolist()]


@pytest.mark.parametrize("expands", [False, True])
def test_a_refused_call_has_brought_no_rows(expands: bool) -> None:
    first, *others = run(CASE.ranks, _counts_of_a_refusal, expands)
    assert first == []
    for counts in others:
        assert counts == [0] * (CASE.ranks + CASE.local)


class _Watched(HostStreams):
    """Keeps what calls have returned, and which events were waited for."""

    def __init__(self) -> None:
        self.results: list[Any] = []
        self.waited: list[EventOverlap] = []

    def run(self, call: Any, **options: Any) -> Any:
        result, hook, event = super().run(call, **options)
        self.results.append(result)
        wait = event.current_stream_wait
        event.current_stream_wait = lambda: (self.waited.append(event), wait())[1]
        return result, hook, event


def _on_streams(group: Any) -> None:
    buffer = open_buffer(group)
    buffer._streams = watched = _Watched()
    good = arguments(CASE, group.rank)
    pair = reference.fp8(good["x"], True)
    found, *_ = buffer.dispatch(
        **{**good, "x": pair}, use_tma_aligned_col_major_sf=True, async_with_compute_stream=True
    )
    # What is returned is what the stream of the call has made: nothing is copied behind its event.
    assert found[1] is watched.results[-1].scales
    assert found[1].stride(0) == 1
    assert watched.waited == []
    buffer.barrier()
    assert len(watched.waited) == 1
    buffer.destroy()


def test_what_other_streams_wait_for() -> None:
    run(CASE.ranks, _on_streams)


def _index_out_of_range(group: Any, sync: bool) -> str:
    buffer = open_buffer(group)
    bad = arguments(CASE, group.rank)
    if group.rank == 2:
        bad["topk_idx"] = bad["topk_idx"].clone()
        bad["topk_idx"][3, 1] = CASE.experts
    try:
        rows, _, _, handle, _ = buffer.dispatch(**bad, do_cpu_sync=sync)
        buffer.combine(rows, handle)
    except (ArgumentError, PeerRefused) as error:
        return f"{type(error).__name__}: {error}"
    finally:
        buffer.destroy()
    return ""


@pytest.mark.parametrize("sync", [True, False])
def test_an_index_out_of_range_is_found_by_the_kernels(sync: bool) -> None:
    said = run(CASE.ranks, _index_out_of_range, sync)
    assert said[2].startswith("ArgumentError: topk_idx[3, 1] is 8"), said


def _captured(group: Any) -> None:
    buffer = open_buffer(group)
    good = arguments(CASE, group.rank)
    # As on a GPU: the tensors say that they are there.
    with (
        mock.patch.object(torch.cuda, "is_current_stream_capturing", return_value=True),
        mock.patch.object(torch.Tensor, "is_cuda", True),
        pytest.raises(UsageError, match="a dispatch in a CUDA graph needs do_cpu_sync=False"),
    ):
        buffer.dispatch(**good)
    buffer.destroy()


def test_a_capture_cannot_wait_for_counts() -> None:
    run(1, _captured)


def _barriers(group: Any) -> None:
    buffer = open_buffer(group)
    buffer.barrier()
    buffer.barrier(use_comm_stream=False)
    buffer.destroy()


def test_barriers() -> None:
    run(3, _barriers)


def _sms(group: Any) -> list[int]:
    buffer = open_buffer(group)
    backend, good = buffer._backend, arguments(CASE, group.rank)
    taken = []

    def note() -> None:
        taken.append(backend._launches._grid.ctas)

    rows, _, _, handle, _ = buffer.dispatch(**good, num_sms=2)
    note()
    backend.use_sms(3)
    buffer.combine(rows, handle)  # those of the handle
    note()
    buffer.dispatch(good["x"], handle=handle, num_sms=3)
    note()
    buffer.destroy()
    return taken


def test_as_many_sms_as_asked_for() -> None:
    assert run(CASE.ranks, _sms) == [[2, 2, 3]] * CASE.ranks
