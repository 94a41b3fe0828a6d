"""What callers get as scratch memory: how much of it there is, and when."""

from __future__ import annotations

import contextlib
import gc
import weakref
from pathlib import Path
from unittest import mock

import pytest
import torch

from fanfold.deep_ep.scratch import Scratch
from fanfold.deep_ep.streams import HostStreams
from fanfold.deep_ep.zero_copy import ZeroCopy
from fanfold.errors import UsageError

CPU, META = torch.device("cpu"), torch.device("meta")


def _resident_bytes() -> int:
    pages = Path("/proc/self/statm").read_text().split()[1]
    return int(pages) * 4096


def test_pages_that_nobody_touches_cost_nothing() -> None:
    scratch = Scratch(4 << 30, CPU)
    before = _resident_bytes()
    everything = scratch.bytes(0, 4 << 30)
    everything[3 << 30] = 1
    assert _resident_bytes() - before < 64 << 20
    assert scratch.bytes((3 << 30) - 1, (3 << 30) + 2).tolist() == [0, 1, 0]


def test_it_is_the_same_memory_each_time() -> None:
    scratch = Scratch(4096, CPU)
    small = scratch.bytes(8, 12)
    scratch.bytes(0, 4096).fill_(7)
    assert small.tolist() == [7] * 4
    assert Scratch(0, CPU).bytes(0, 0).numel() == 0


def test_elsewhere_it_grows_as_far_as_asked_for() -> None:
    scratch = Scratch(1 << 40, META)
    assert scratch.bytes(0, 0).untyped_storage().nbytes() == 0
    first = scratch.bytes(100, 200)
    assert (first.numel(), first.untyped_storage().nbytes()) == (100, 200)
    again = scratch.bytes(0, 50)
    assert again.untyped_storage()._cdata == first.untyped_storage()._cdata
    copied: list[int] = []
    with mock.patch.object(torch.Tensor, "copy_", lambda to, source: copied.append(source.numel())):
        assert scratch.bytes(0, 300).untyped_storage().nbytes() == 300
    assert copied == [200]
    assert first.untyped_storage().nbytes() == 200


def test_a_capture_may_use_it_but_not_make_it_grow() -> None:
    scratch = Scratch(4096, torch.device("cuda", 0))
    with (
        mock.patch.object(torch.cuda, "is_current_stream_capturing", return_value=True),
        pytest.raises(UsageError, match="allocate 5 bytes"),
    ):
        scratch.bytes(0, 5)


def test_release_leaves_the_memory_to_those_who_have_tensors() -> None:
    scratch = Scratch(4096, CPU)
    view = scratch.bytes(0, 4096)
    pages = weakref.ref(scratch)
    scratch.release()
    del scratch
    gc.collect()
    assert pages() is None
    view.fill_(3)
    assert view.sum().item() == 3 * 4096


def test_what_a_captured_graph_uses_is_kept() -> None:
    zero_copy = ZeroCopy(META)
    zero_copy._has_streams = True
    with mock.patch.object(torch.cuda, "is_current_stream_capturing", return_value=False):
        outside = weakref.ref(zero_copy.take((2, 3), HostStreams()))
    with (
        mock.patch.object(torch.cuda, "is_current_stream_capturing", return_value=True),
        mock.patch.object(torch.cuda, "stream", return_value=contextlib.nullcontext()),
        mock.patch.object(torch.cuda, "current_stream"),
    ):
        captured = weakref.ref(zero_copy.take((4, 3), HostStreams()))
        assert zero_copy.take((4, 3), HostStreams()) is captured()
    assert outside() is None
    with mock.patch.object(torch.cuda, "is_current_stream_capturing", return_value=False):
        zero_copy.take((2, 3), HostStreams())
    assert captured() is not None
