"""ElasticBuffer's dispatches of few tokens, which go by the low-latency protocol, and what calls do
with their handles: the kernels run on the CPU, with the oracle of the conformance tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch

from fanfold.backends.allocator import Allocator
from fanfold.backends.high_throughput import protocol
from fanfold.backends.high_throughput.room import Room
from fanfold.backends.low_latency.token_major import CudaTokenMajor
from fanfold.deep_ep import ElasticBuffer, few_tokens
from fanfold.deep_ep.few_tokens import FewTokens, RoutedFew
from fanfold.errors import ArgumentError, FanfoldError, PeerRefused, PeerTimeout
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

CTAS = 7


def _poisoned(shape: Any, strides: Any, dtype: torch.dtype) -> torch.Tensor:
    made = torch.empty_strided(shape, strides, dtype=dtype, device="cpu")
    made.untyped_storage().fill_(0x33)
    return made


def open_buffer(group: Any, **changes: Any) -> ElasticBuffer:
    options: dict[str, Any] = {"num_max_tokens_per_rank": MOST, "explicitly_destroy": True}
    buffer = ElasticBuffer(group, **{**options, **changes})
    assert isinstance(buffer._few, FewTokens)
    return buffer


USES_HIGH_THROUGHPUT_ALONE = (
    "test_which_calls_go_by_it[more]",
    "test_which_calls_go_by_it[expanded]",
    "test_without_memory_all_calls_go_by_high_throughput",
    "test_a_graph_does_not_make_the_memory",
)


@pytest.fixture(autouse=True)
def gpu(
    builder: Builder, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> Iterator[None]:
    monkeypatch.setenv("FANFOLD_TIMEOUT_S", "10")
    monkeypatch.setenv("FANFOLD_FEW_TOKENS", str(MOST))
    monkeypatch.setattr(conformance, "open_buffer", open_buffer)
    # What kernels do not write holds anything.
    monkeypatch.setattr(Room, "empty", poisoned)
    monkeypatch.setattr(Allocator, "empty", lambda self: _poisoned)
    sent = mock.Mock(side_effect=CudaTokenMajor.dispatch_rows)
    monkeypatch.setattr(
        CudaTokenMajor, "dispatch_rows", lambda *args, **options: sent(*args, **options)
    )
    with emulated_buffers(builder, CTAS):
        yield
    name = request.node.name
    assert sent.called is not name.startswith(USES_HIGH_THROUGHPUT_ALONE)


@pytest.mark.parametrize("sync", [True, False])
@pytest.mark.parametrize("case", [CASE, DUPLICATES], ids=["distinct", "duplicates"])
def test_plain(case: Any, sync: bool) -> None:
    """With weights, by the handle again, and back with numbers, which high throughput does."""
    run(case.ranks, conformance._plain, case, sync, 8)


def test_fp8() -> None:
    run(CASE.ranks, conformance._fp8, False, False)


def test_biases_and_events() -> None:
    run(CASE.ranks, conformance._biases)


def test_what_a_caller_overwrites_changes_nothing() -> None:
    assert run(CASE.ranks, conformance._overwrites, False) == [[True] * 3] * CASE.ranks


def _which_of(buffer: ElasticBuffer, given: dict[str, Any]) -> bool:
    """Whether a dispatch goes by the protocol."""
    return isinstance(buffer.dispatch(**given)[3]._plan, RoutedFew)


def _which(group: Any, changes: dict[str, Any], options: dict[str, Any]) -> bool:
    """Whether a dispatch goes by the protocol; its rows and their sums are right."""
    buffer = open_buffer(group, **options)
    given = {**arguments(CASE, group.rank), "do_cpu_sync": False, **changes}
    result = buffer.dispatch(**given)
    handle, x = result[3], given["x"]
    rows = result[0] if isinstance(result[0], torch.Tensor) else result[0][0]
    if not given.get("do_expand", False) and not isinstance(x, tuple):
        count = int(handle.psum_num_recv_tokens_per_scaleup_rank[-1])
        out = buffer.combine(rows, handle)[0]
        assert count == len(reference.arrivals(CASE, group.rank).source_rank)
        ranks = (given["topk_idx"] // CASE.local).where(given["topk_idx"] >= 0, -1)
        times = [len(set(row) - {-1}) for row in ranks.tolist()]
        wanted = x.float() * torch.tensor(times, dtype=torch.float32, device="cpu").unsqueeze(1)
        assert torch.equal(out.float(), wanted.bfloat16().float())
    buffer.destroy()
    return isinstance(handle._plan, RoutedFew)


GOES: dict[str, tuple[dict[str, Any], bool]] = {
    "plain": ({}, True),
    "waits": ({"do_cpu_sync": True}, True),
    "fewer": ({"num_max_tokens_per_rank": 20}, True),
    "more": ({"num_max_tokens_per_rank": MOST + 1}, False),
    "expanded": ({"do_expand": True}, False),
}


@pytest.mark.parametrize("what", GOES)
def test_which_calls_go_by_it(what: str) -> None:
    changes, goes = GOES[what]
    assert run(CASE.ranks, _which, changes, {}) == [goes] * CASE.ranks


def _formats(group: Any) -> list[bool]:
    buffer = open_buffer(group)
    good = {**arguments(CASE, group.rank), "do_cpu_sync": False}
    x = good["x"]
    values, scales = (
        x.to(torch.float8_e4m3fn),
        torch.ones((len(x), 2), dtype=torch.float32, device="cpu"),
    )
    found = []
    for given in (
        (values, scales),
        (values, scales.to(torch.int32)),
        (values, torch.ones((len(x), 3), dtype=torch.float32, device="cpu")),
        (values.view(torch.int8), scales),
        x.view(torch.int16),
        x,
    ):
        handle = buffer.dispatch(**{**good, "x": given})[3]
        found.append(isinstance(handle._plan, RoutedFew))
    buffer.destroy()
    return found


def test_rows_whose_bits_may_be_anything_go_by_high_throughput() -> None:
    assert run(CASE.ranks, _formats) == [[True, *[False] * 4, True]] * CASE.ranks


def _geometries(group: Any) -> list[bool]:
    buffer = open_buffer(group)
    found = []
    for case in (CASE, DUPLICATES, CASE):
        given = {**arguments(case, group.rank), "do_cpu_sync": False}
        found.append(isinstance(buffer.dispatch(**given)[3]._plan, RoutedFew))
    buffer.destroy()
    return found


def test_the_first_such_call_fixes_the_geometry() -> None:
    assert run(CASE.ranks, _geometries) == [[True, False, True]] * CASE.ranks


def _said(call: Callable[[], object]) -> str:
    """The error that a call raises; "" if it raises none."""
    try:
        call()
    except FanfoldError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def _round(buffer: ElasticBuffer, given: dict[str, Any]) -> torch.Tensor:
    rows, _, _, handle, _ = buffer.dispatch(**given)
    return buffer.combine(rows, handle)[0]


def _refused(group: Any, changes: dict[str, Any]) -> str:
    buffer = open_buffer(group)
    good = {**arguments(CASE, group.rank), "do_cpu_sync": False}
    handle = buffer.dispatch(**good)[3]
    bad = {**good, **(changes if group.rank == 0 else {})}
    said = _said(lambda: _round(buffer, bad))
    assert isinstance(handle._plan, RoutedFew)
    result = buffer.dispatch(**good)
    sums = buffer.combine(result[0], result[3])[0]
    again = buffer.dispatch(good["x"], handle=handle)
    assert torch.equal(sums, buffer.combine(again[0], handle)[0])
    buffer.destroy()
    return said


BAD_WEIGHTS: tuple[dict[str, Any], str] = (
    {"topk_weights": torch.ones((1, 1), dtype=torch.float32, device="cpu")}, "topk_weights.shape"
)  # fmt: skip


@pytest.mark.parametrize("bad", [*BAD_DISPATCHES, "weights"])
def test_a_refusal_is_reported(bad: str) -> None:
    changes, wanted = BAD_DISPATCHES.get(bad, BAD_WEIGHTS)
    first, *others = run(CASE.ranks, _refused, changes)
    assert first.startswith(f"{ArgumentError.__name__}: {wanted}"), first
    assert all(other.startswith(PeerRefused.__name__) for other in others), others


def _refused_first(group: Any, changes: dict[str, Any]) -> str:
    """What the first such call is found to be, that is to make the memory."""
    buffer = open_buffer(group)
    good = {**arguments(CASE, group.rank), "do_cpu_sync": False}
    bad = {**good, **(changes if group.rank == 0 else {})}
    said = _said(lambda: _round(buffer, bad))
    assert isinstance(buffer.dispatch(**good)[3]._plan, RoutedFew)
    buffer.destroy()
    return said


@pytest.mark.parametrize(
    "bad", ["num_experts", "topk_idx", "no tokens", "do_expand", "x", "weights"]
)
def test_a_refusal_of_the_first_call_is_reported(bad: str) -> None:
    changes, wanted = BAD_DISPATCHES.get(bad, BAD_WEIGHTS)
    first, *others = run(CASE.ranks, _refused_first, changes)
    assert first.startswith(f"{ArgumentError.__name__}: {wanted}"), first
    assert all(other.startswith(PeerRefused.__name__) for other in others), others


def _other_kind_first(group: Any, changes: dict[str, Any]) -> list[str]:
    """What ranks find of which one alone makes a call of high throughput, where the others' makes
    the memory; this one may find it in the call after that."""
    buffer = open_buffer(group)
    good = arguments(CASE, group.rank)
    bad = {**good, **(changes if group.rank == 0 else {})}
    said = [_said(lambda given=given: buffer.dispatch(**given)) for given in (bad, good)]
    assert isinstance(buffer.dispatch(**good)[3]._plan, RoutedFew)
    buffer.destroy()
    return said


@pytest.mark.parametrize("changes", [{"num_max_tokens_per_rank": MOST + 1}, {"do_expand": True}])
def test_a_first_call_of_another_kind_is_reported(changes: dict[str, Any]) -> None:
    first, *others = run(CASE.ranks, _other_kind_first, changes)
    assert first[0] == ""
    assert "another on rank 0 than on rank" in first[1]
    for disagrees, refused in others:
        assert "than on rank 0" in disagrees
        assert refused.startswith(PeerRefused.__name__)


def _refused_by_the_other(group: Any, expands: bool) -> list[str]:
    """What a combine by one protocol raises after a dispatch by the other that rank 0 refuses; and
    the combine after it."""
    buffer = open_buffer(group)
    good = {**arguments(CASE, group.rank), "do_cpu_sync": False}
    rows, _, _, handle, _ = buffer.dispatch(**good, do_expand=not expands)
    buffer.dispatch(**good, do_expand=expands)
    bad = {**good, **({"expert_alignment": 0} if group.rank == 0 else {})}
    _said(lambda: buffer.dispatch(**bad, do_expand=expands))
    said = [_said(lambda: buffer.combine(rows, handle)) for _ in range(2)]
    buffer.destroy()
    return said


@pytest.mark.parametrize("expands", [False, True])
def test_a_combine_raises_what_either_protocol_found(expands: bool) -> None:
    first, *others = run(CASE.ranks, _refused_by_the_other, expands)
    assert first == ["", ""]
    for refused, later in others:
        assert refused.startswith(PeerRefused.__name__)
        assert later == ""


@pytest.mark.parametrize("nearly", NEARLY)
def test_a_call_that_is_nearly_like_the_one_before(nearly: str) -> None:
    changes, wanted = NEARLY[nearly]
    check_refusals(run(CASE.ranks, known_then_bad, changes), wanted)


def _without_memory(group: Any) -> list[bool]:
    buffer = open_buffer(group)
    goes = []
    for _ in range(3):
        assert _which_of(buffer, arguments(CASE, group.rank)) is False
        goes.append(buffer._few is not None and buffer._few.mode is None)
    buffer.destroy()
    return goes


@pytest.mark.parametrize("failing", [range(CASE.ranks), [1]])
@pytest.mark.parametrize("what", ["memory_of_gpus", "CudaTokenMajor"])
def test_without_memory_all_calls_go_by_high_throughput(
    what: str, failing: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """Whatever fails, also on one rank alone."""
    real = getattr(few_tokens, what)

    def fails(first: Any, *others: Any) -> Any:
        if first.rank in failing:
            raise torch.OutOfMemoryError("no memory is left")
        return real(first, *others)

    with mock.patch.object(few_tokens, what, fails):
        assert run(CASE.ranks, _without_memory) == [[True] * 3] * CASE.ranks
    warned = [record.getMessage() for record in caplog.records]
    assert len(warned) == CASE.ranks
    assert all("no memory is left" in each for each in warned)


def _hidden_sizes(group: Any) -> list[str]:
    """What the first call is found to be where ranks disagree about the hidden size."""
    buffer = open_buffer(group)
    good = arguments(CASE, group.rank)
    bad = {**good, "x": good["x"][:, :128].contiguous()} if group.rank == 0 else good
    said = [_said(lambda given=given: buffer.dispatch(**given)) for given in (bad, good)]
    buffer.destroy()
    return said


def test_the_first_calls_hidden_sizes_are_compared() -> None:
    for first, second in run(CASE.ranks, _hidden_sizes):
        assert first.startswith(f"{ArgumentError.__name__}: x.shape[1]"), first
        assert second == ""


def _by_default(group: Any) -> list[bool]:
    """Which calls use it where nothing was set, neither by the buffer nor by the variable."""
    buffer = open_buffer(group, num_max_tokens_per_rank=0)
    good = {**arguments(CASE, group.rank), "do_cpu_sync": False}
    found = []
    for most, expands in ((MOST, False), (256, False), (257, False), (MOST, True), (MOST, False)):
        given = {**good, "num_max_tokens_per_rank": most, "do_expand": expands}
        found.append(_which_of(buffer, given))
    buffer.destroy()
    return found


def test_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FANFOLD_FEW_TOKENS")
    assert run(CASE.ranks, _by_default) == [[True, True, False, False, True]] * CASE.ranks


def _captured_first(group: Any) -> list[bool]:
    """Whether a call could go by it, in a CUDA graph and outside."""
    buffer = open_buffer(group)
    given, few = arguments(CASE, group.rank), buffer._few
    assert few is not None
    sizes = given["x"], given["topk_idx"], CASE.experts, MOST
    with mock.patch.object(torch.cuda, "is_current_stream_capturing", return_value=True):
        captured = few.geometry_of(*sizes) is not None
    found = [captured, few.geometry_of(*sizes) is not None]
    buffer.destroy()
    return found


def test_a_graph_does_not_make_the_memory() -> None:
    assert run(1, _captured_first) == [[False, True]]


def _late(group: Any) -> str:
    buffer = open_buffer(group, num_gpu_timeout_secs=1)
    good = arguments(CASE, group.rank)
    buffer.dispatch(**good)
    said = ""
    if group.rank != 0:
        try:
            buffer.dispatch(**good)
        except FanfoldError as error:
            said = f"{type(error).__name__}: {error}"
    group.all_gather(None)
    return said


def test_a_dispatch_that_waits_raises_that_a_rank_is_late() -> None:
    _, *others = run(CASE.ranks, _late)
    for said in others:
        assert said.startswith(PeerTimeout.__name__), said
        assert "rank 0 " in said


def _refused_while_waiting(group: Any) -> str:
    """What a dispatch raises whose counts the CPU waits for, where rank 0's is bad."""
    buffer = open_buffer(group)
    good = arguments(CASE, group.rank)
    buffer.dispatch(**good)
    said = ""
    try:
        buffer.dispatch(**{**good, **(BAD_WEIGHTS[0] if group.rank == 0 else {})})
    except FanfoldError as error:
        said = f"{type(error).__name__}: {error}"
    rows, _, _, handle, _ = buffer.dispatch(**good)
    count = len(reference.arrivals(CASE, group.rank).source_rank)
    assert handle.num_recv_tokens == len(rows) == count
    buffer.destroy()
    return said


def test_a_dispatch_that_waits_raises_a_refusal() -> None:
    first, *others = run(CASE.ranks, _refused_while_waiting)
    assert first.startswith(f"{ArgumentError.__name__}: {BAD_WEIGHTS[1]}")
    assert all(other.startswith(PeerRefused.__name__) for other in others), others


def _refused_later(group: Any, changes: dict[str, Any], combines: bool) -> str:
    """What a bad call of rank 0 by a handle is found to be, that by the handle is the first; calls
    by it work after that."""
    buffer = open_buffer(group)
    good = {**arguments(CASE, group.rank), "do_cpu_sync": False}
    rows, _, _, handle, _ = buffer.dispatch(**good)
    wanted = buffer.combine(rows, handle)[0]
    method = buffer.combine if combines else buffer.dispatch
    given = {"x": rows if combines else good["x"], "handle": handle}
    said = ""
    try:
        method(**{**given, **(changes if group.rank == 0 else {})})
        for found_by in (buffer._backend, buffer._few):
            assert found_by is not None
            found_by.check()
    except FanfoldError as error:
        said = f"{type(error).__name__}: {error}"
    again = buffer.dispatch(good["x"], handle=handle)[0]
    assert torch.equal(buffer.combine(again, handle)[0], wanted)
    buffer.destroy()
    return said


LATER: dict[str, tuple[dict[str, Any], bool, str]] = {
    "dispatch": ({"num_experts": 16}, False, "num_experts is 16"),
    "combine": ({"num_sms": -3}, True, "num_sms is -3"),
    "combine without a handle": ({"handle": None}, True, "handle is None"),
    "combine of few rows": (
        {"x": torch.zeros((3, 256), dtype=torch.bfloat16, device="cpu")},
        True,
        "x.shape",
    ),
}


@pytest.mark.parametrize("bad", LATER)
def test_a_refusal_by_a_handle_is_reported(bad: str) -> None:
    changes, combines, wanted = LATER[bad]
    first, *others = run(CASE.ranks, _refused_later, changes, combines)
    assert first.startswith(f"{ArgumentError.__name__}: {wanted}"), first
    assert all(other.startswith(PeerRefused.__name__) for other in others), others


def _bias_of_one(group: Any) -> None:
    """Biases are a rank's own affair."""
    buffer = open_buffer(group)
    good = {**arguments(CASE, group.rank), "do_cpu_sync": False}
    rows, _, _, handle, _ = buffer.dispatch(**good)
    bare = buffer.combine(rows, handle)[0].float()
    bias = torch.full(good["x"].shape, 2.0, dtype=torch.bfloat16, device="cpu")
    given: Any = [None, bias, (bias, bias), None][group.rank]
    out = buffer.combine(rows, handle, bias=given)[0]
    wanted = bare + [0.0, 2.0, 4.0, 0.0][group.rank]
    # Rounded once, where `bare` has been rounded before.
    assert torch.allclose(out.float(), wanted, rtol=2**-7, atol=2**-6)
    buffer.destroy()


def test_biases_of_some_ranks() -> None:
    run(CASE.ranks, _bias_of_one)


def _aborted_then_used(group: Any) -> str:
    """What a rank finds that uses the handle of a call which another has refused."""
    buffer = open_buffer(group)
    good = {**arguments(CASE, group.rank), "do_cpu_sync": False}
    buffer.dispatch(**good)
    said = ""
    try:
        handle = buffer.dispatch(**{**good, **(BAD_WEIGHTS[0] if group.rank == 0 else {})})[3]
        buffer.dispatch(good["x"], handle=handle)
    except FanfoldError as error:
        said = f"{type(error).__name__}: {error}"
    rows, _, _, handle, _ = buffer.dispatch(**good)
    again = buffer.dispatch(good["x"], handle=handle)[0]
    count = int(handle.psum_num_recv_tokens_per_scaleup_rank[-1])
    assert torch.equal(again[:count], rows[:count])
    buffer.destroy()
    return said


def test_a_handle_of_an_aborted_call() -> None:
    first, *others = run(CASE.ranks, _aborted_then_used)
    assert first.startswith(f"{ArgumentError.__name__}: {BAD_WEIGHTS[1]}")
    assert all("another rank has refused the dispatch" in other for other in others), others


def _bad_index(group: Any, sync: bool) -> list[bool]:
    """Whether a dispatch, and its combine, raise where rank 0 names an expert that is none."""
    buffer = open_buffer(group)
    good = {**arguments(CASE, group.rank), "do_cpu_sync": sync}
    topk_idx = good["topk_idx"].clone()
    if group.rank == 0:
        topk_idx[0, 0] = 99
    raised = [False, False]
    result = buffer.dispatch(**{**good, "topk_idx": topk_idx})
    try:
        buffer.combine(result[0], result[3])
    except ArgumentError:
        raised[1] = True
    buffer.combine(result[0], result[3])
    buffer.destroy()
    return raised


@pytest.mark.parametrize("sync", [False, True])
def test_an_index_out_of_range_is_raised_by_combine(sync: bool) -> None:
    with mock.patch.object(protocol, "check_topk"):  # as on a GPU, where nobody waits for it
        raised = run(CASE.ranks, _bad_index, sync)
    assert raised == [[False, True], *[[False, False]] * (CASE.ranks - 1)]


def _planned(group: Any) -> None:
    """A plan of high throughput is made when the first call asks, and once."""
    buffer = open_buffer(group)
    good = {**arguments(CASE, group.rank), "do_cpu_sync": False}
    routed = buffer.dispatch(**good)[3]
    assert isinstance(routed._plan, RoutedFew)
    assert routed._plan.made is None
    buffer.dispatch(good["x"], handle=routed)
    made = routed._plan.made
    assert made is not None
    buffer.dispatch(good["x"], handle=routed)
    assert routed._plan.made is made
    buffer.destroy()


def test_a_plan_is_made_once() -> None:
    run(CASE.ranks, _planned)


def _other_buffers(group: Any) -> None:
    """A handle of another ElasticBuffer of the group, with the protocol and without."""
    first, second = open_buffer(group), open_buffer(group)
    good = {**arguments(CASE, group.rank), "do_cpu_sync": False}
    result = first.dispatch(**good)
    wanted = first.combine(result[0], result[3])[0]
    assert torch.equal(second.combine(result[0], result[3])[0], wanted)
    first.destroy()
    assert torch.equal(second.combine(result[0], result[3])[0], wanted)
    second.destroy()


def test_handles_of_other_buffers() -> None:
    run(CASE.ranks, _other_buffers)
