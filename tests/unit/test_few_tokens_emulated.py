"""ElasticBuffer's dispatches of few tokens, which go by the low-latency protocol, and what calls do
with their handles: the kernels run on the CPU, with the oracle of the conformance tests."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from fanfold.backends.high_throughput.room import Room
from fanfold.deep_ep import ElasticBuffer
from fanfold.deep_ep.few_tokens import FewTokens, RoutedFew
from fanfold.errors import ArgumentError, FanfoldError, PeerRefused
from tests.conformance import deep_ep_reference as reference
from tests.conformance import test_deep_ep_elastic as conformance
from tests.conformance.test_deep_ep_elastic import CASE, DUPLICATES, MOST, arguments
from tests.emulation.deep_ep import emulated_buffers, poisoned, run
from tests.emulation.world import Builder

CTAS = 7


def open_buffer(group: Any, **changes: Any) -> ElasticBuffer:
    options: dict[str, Any] = {
        "num_max_tokens_per_rank": MOST,
        "hidden": 256,
        "num_topk": 4,
        "explicitly_destroy": True,
    }
    buffer = ElasticBuffer(group, **{**options, **changes})
    assert isinstance(buffer._few, FewTokens)
    return buffer


@pytest.fixture(autouse=True)
def gpu(builder: Builder, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("FANFOLD_TIMEOUT_S", "10")
    monkeypatch.setenv("FANFOLD_FEW_TOKENS", str(MOST))
    monkeypatch.setattr(conformance, "open_buffer", open_buffer)
    monkeypatch.setattr(Room, "empty", poisoned)
    with emulated_buffers(builder, CTAS):
        yield


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
        wanted = x.float() * torch.tensor(times).unsqueeze(1)
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
    values, scales = x.to(torch.float8_e4m3fn), torch.ones((len(x), 2), dtype=torch.float32)
    found = []
    for given in (
        (values, scales),
        (values, scales.to(torch.int32)),
        (values, torch.ones((len(x), 3), dtype=torch.float32)),
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


def test_the_first_such_call_settles_the_geometry() -> None:
    assert run(CASE.ranks, _geometries) == [[True, False, True]] * CASE.ranks


def _refused(group: Any, changes: dict[str, Any]) -> str:
    buffer = open_buffer(group)
    good = {**arguments(CASE, group.rank), "do_cpu_sync": False}
    handle = buffer.dispatch(**good)[3]
    said = ""
    try:
        result = buffer.dispatch(**{**good, **(changes if group.rank == 0 else {})})
        buffer.combine(result[0], result[3])
    except FanfoldError as error:
        said = f"{type(error).__name__}: {error}"
    assert isinstance(handle._plan, RoutedFew)
    result = buffer.dispatch(**good)
    sums = buffer.combine(result[0], result[3])[0]
    again = buffer.dispatch(good["x"], handle=handle)
    assert torch.equal(sums, buffer.combine(again[0], handle)[0])
    buffer.destroy()
    return said


@pytest.mark.parametrize(
    "changes",
    [{"expert_alignment": 0}, {"topk_weights": torch.ones((1, 1), dtype=torch.float32)}],
    ids=["by ElasticBuffer", "by the protocol"],
)
def test_a_refusal_is_told(changes: dict[str, Any]) -> None:
    first, *others = run(CASE.ranks, _refused, changes)
    assert first.startswith(f"{ArgumentError.__name__}: {next(iter(changes))}")
    assert all(other.startswith(PeerRefused.__name__) for other in others)


def _refused_combine(group: Any) -> str:
    buffer = open_buffer(group)
    good = {**arguments(CASE, group.rank), "do_cpu_sync": False}
    result = buffer.dispatch(**good)
    said = ""
    try:
        buffer.combine(result[0][:, :-16] if group.rank == 1 else result[0], result[3])
        buffer.combine(result[0], result[3])
    except FanfoldError as error:
        said = f"{type(error).__name__}: {error}"
        if group.rank != 1:
            buffer.combine(result[0], result[3])
    else:
        raise AssertionError("nothing was found")
    if group.rank == 1:
        buffer.combine(result[0], result[3])
    buffer.destroy()
    return said


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
