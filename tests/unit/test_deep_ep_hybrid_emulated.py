"""``HybridEPBuffer`` on GPUs, its kernels run on the CPU: the programs and the oracle of the
conformance tests."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch

from fanfold.backends.high_throughput.cuda import CudaHighThroughput
from fanfold.backends.high_throughput.room import Room
from fanfold.deep_ep import HybridEPBuffer
from fanfold.errors import ArgumentError, PeerRefused, UsageError
from tests.conformance import test_deep_ep_hybrid as conformance
from tests.conformance.test_deep_ep_hybrid import LAYER, WIDE, Layer, own_of, routing_of
from tests.emulation.deep_ep import emulated_buffers, poisoned, run
from tests.emulation.world import Builder

CTAS = 3


def open_buffer(group: Any, layer: Layer, **options: Any) -> HybridEPBuffer:
    buffer = HybridEPBuffer(group, layer.hidden, max(layer.tokens), layer.local, **options)
    assert isinstance(buffer._backend, CudaHighThroughput)
    return buffer


@pytest.fixture(autouse=True)
def gpu(builder: Builder, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("FANFOLD_TIMEOUT_S", "10")
    monkeypatch.setattr(conformance, "open_buffer", open_buffer)
    # What kernels do not write holds anything.
    monkeypatch.setattr(Room, "empty", poisoned)
    with emulated_buffers(builder, CTAS):
        yield


@pytest.mark.parametrize(
    "layer",
    [
        LAYER,
        replace(LAYER, by="indices", pad=16),
        replace(LAYER, by="indices and map of probs", pad=8, room=400),
        replace(LAYER, room=300),
        WIDE,
    ],
    ids=["map", "indices, padded", "padded, room", "room", "more experts than a token may have"],
)
def test_round(layer: Layer) -> None:
    run(layer.ranks, conformance._round, layer)


def test_fp8() -> None:
    run(LAYER.ranks, conformance._fp8)


def test_what_a_caller_overwrites_changes_nothing() -> None:
    run(LAYER.ranks, conformance._overwrites, "indices and map of probs")


def _too_many(group: Any) -> str:
    """A token of too many experts, whose count no CPU has looked at."""
    buffer, own = open_buffer(group, WIDE), own_of(WIDE, group.rank)
    if group.rank == 0:
        own.routing_map[2] = True
    try:
        with mock.patch("fanfold.deep_ep.routing_maps._looks_at", return_value=False):
            rows, *_, handle = buffer.dispatch_with_permute(
                hidden=own.x, routing_map=own.routing_map, num_permuted_tokens=400,
                non_blocking=True,
            )  # fmt: skip
            buffer.combine_with_unpermute(hidden=rows, handle=handle)
    except (ArgumentError, PeerRefused) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def test_a_token_of_too_many_experts_is_found_by_the_kernels() -> None:
    said = run(WIDE.ranks, _too_many)
    assert said[0].startswith("ArgumentError: topk_idx[2, 31] is 80, but must be from -1"), said


def _refused(group: Any, changes: dict[str, Any]) -> str:
    """What a bad call of rank 0 is found to be, by it or a later one; after that calls work."""
    buffer, own, said = open_buffer(group, LAYER), own_of(LAYER, group.rank), ""
    good = {"hidden": own.x, **routing_of(LAYER, group.rank)}
    rows, *_, handle = buffer.dispatch_with_permute(**good)
    try:
        bad = buffer.dispatch_with_permute(**{**good, **(changes if group.rank == 0 else {})})
        buffer.combine_with_unpermute(hidden=bad[0], handle=bad[4])
    except (ArgumentError, PeerRefused) as error:
        said = f"{type(error).__name__}: {error}"
    assert torch.equal(buffer.dispatch_with_permute(hidden=own.x, handle=handle)[0], rows)
    return said


@pytest.mark.parametrize("bad", ["pad", "map"])
def test_a_refusal_reaches_all_ranks(bad: str) -> None:
    changes, wanted = conformance.BAD_DISPATCHES[bad]
    said = run(LAYER.ranks, _refused, changes)
    assert said[0].startswith(f"ArgumentError: {wanted}")
    assert all(PeerRefused.__name__ in other for other in said[1:])


def _captured(group: Any) -> None:
    layer = replace(LAYER, tokens=(7,))
    buffer, own = open_buffer(group, layer), own_of(layer, 0)
    with (
        mock.patch.object(torch.cuda, "is_current_stream_capturing", return_value=True),
        mock.patch.object(torch.Tensor, "is_cuda", True),
        pytest.raises(UsageError, match="a dispatch in a CUDA graph needs non_blocking=True"),
    ):
        buffer.dispatch_with_permute(hidden=own.x, routing_map=own.routing_map)


def test_a_capture_cannot_wait_for_counts() -> None:
    run(1, _captured)


def _sms(group: Any) -> list[int]:
    buffer = open_buffer(group, LAYER, num_sms_dispatch_api=2, num_sms_combine_api=CTAS)
    own, taken = own_of(LAYER, group.rank), []
    rows, *_, handle = buffer.dispatch_with_permute(hidden=own.x, routing_map=own.routing_map)
    taken.append(buffer._backend._launches._grid.ctas)  # type: ignore[attr-defined]
    buffer.combine_with_unpermute(hidden=rows, handle=handle)
    taken.append(buffer._backend._launches._grid.ctas)  # type: ignore[attr-defined]
    return taken


def test_as_many_sms_as_asked_for() -> None:
    assert run(LAYER.ranks, _sms) == [[2, CTAS]] * LAYER.ranks
