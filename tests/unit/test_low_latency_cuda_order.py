"""In which order low latency on GPUs launches the halves of its calls and their refusals, on which
streams, and what it says of reports, with kernels that only write down their arguments."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fanfold import _core
from fanfold.backends.low_latency import CudaRouting, ReadyRows, cuda
from fanfold.errors import ArgumentError, PeerTimeout, UsageError
from tests.emulation.launches import (
    CAPACITY,
    GEOMETRY,
    LOCAL,
    RECEIVE,
    SEND,
    WHOLE,
    Gpu,
    open_mode,
    outputs,
    stand_in,
    tokens,
)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    return stand_in(monkeypatch)


# ---- hooks --------------------------------------------------------------------------------------


def test_a_hook_called_too_early_can_be_called_again(gpu: Gpu) -> None:
    mode = open_mode()
    sent = [mode.dispatch(GEOMETRY, *tokens(), return_hook=True) for _ in range(2)]
    assert [args.phases for args, _ in gpu.launches] == [SEND, SEND]
    first, second = (hook for _, hook in sent)
    assert first is not None
    assert second is not None
    with pytest.raises(UsageError, match="two dispatch calls are in flight"):
        mode.dispatch(GEOMETRY, *tokens(), return_hook=True)
    with pytest.raises(UsageError, match="in the order of their sends"):
        second()
    assert len(gpu.launches) == 2
    first()
    second()
    received = [args for args, _ in gpu.launches[2:]]
    assert [args.phases for args in received] == [RECEIVE, RECEIVE]
    assert [args.rows for args in received] == [got.tokens.data_ptr() for got, _ in sent]
    for hook in (first, second):
        with pytest.raises(UsageError, match="called already"):
            hook()
    mode.dispatch(GEOMETRY, *tokens())
    assert gpu.last.phases == WHOLE


def test_a_bad_index_is_raised_by_combine_once_it_is_enqueued(gpu: Gpu) -> None:
    mode = open_mode()
    got, hook = mode.dispatch(GEOMETRY, *tokens(), return_hook=True)
    assert hook is not None
    mode._reports._words[4:6] = [1, 2]  # in some earlier call
    hook()  # so that this rank stays in step with the others
    assert gpu.last.phases == RECEIVE
    mode.dispatch(GEOMETRY, *tokens())
    count = len(gpu.launches)
    with pytest.raises(ArgumentError, match="topk_idx"):
        mode.combine(GEOMETRY, outputs(), got.routing, None)
    assert len(gpu.launches) == count + 1
    mode.combine(GEOMETRY, outputs(), got.routing, None)  # raised once only
    mode._reports._words[5] = 3
    with pytest.raises(ArgumentError, match="topk_idx"):
        mode.check()


def test_nothing_is_enqueued_after_a_timeout(gpu: Gpu) -> None:
    mode = open_mode()
    got, hook = mode.dispatch(GEOMETRY, *tokens(), return_hook=True)
    assert hook is not None
    mode._reports._words[0:3] = [1 | 1 << 8, 7, 5]  # rank 1, in the sixth dispatch
    count = len(gpu.launches)
    calls = (
        lambda: mode.dispatch(GEOMETRY, *tokens()),
        lambda: mode.combine(GEOMETRY, outputs(), got.routing, None),
        hook,
        mode.check,
    )
    for call in calls:
        with pytest.raises(PeerTimeout, match="rank 1 in low_latency dispatch: expected 6, have 5"):
            call()
    assert len(gpu.launches) == count


def test_a_hook_after_the_memory_is_closed_launches_nothing(gpu: Gpu) -> None:
    mode = open_mode()
    _, hook = mode.dispatch(GEOMETRY, *tokens(), return_hook=True)
    assert hook is not None

    def base(peer: int) -> int:
        raise UsageError("this CudaSymmetricMemory is closed")

    mode._memory.base = base  # type: ignore[method-assign]
    with pytest.raises(UsageError, match="closed"):
        hook()
    assert [args.phases for args, _ in gpu.launches] == [SEND]


def test_a_refusal_behind_a_call_in_flight_takes_what_comes_after_it(gpu: Gpu) -> None:
    mode = open_mode()
    got, hook = mode.dispatch(GEOMETRY, *tokens(), return_hook=True)
    assert hook is not None
    mode.refuse_dispatch(ValueError())
    assert (gpu.last.phases, gpu.last.refused) == (SEND, True)
    hook()
    first, second = (args for args, _ in gpu.launches[-2:])
    assert (first.phases, first.refused, first.rows) == (RECEIVE, False, got.tokens.data_ptr())
    assert (second.phases, second.refused, second.rows) == (RECEIVE, True, 0)
    mode.dispatch(GEOMETRY, *tokens())
    assert (gpu.last.phases, gpu.last.refused) == (WHOLE, False)


def test_a_whole_call_waits_for_hooks(gpu: Gpu) -> None:
    mode = open_mode()
    got, _ = mode.dispatch(GEOMETRY, *tokens())
    _, hook = mode.combine(GEOMETRY, outputs(), got.routing, None, return_hook=True)
    assert hook is not None
    with pytest.raises(UsageError, match="cannot overtake"):
        mode.combine(GEOMETRY, outputs(), got.routing, None)
    hook()
    mode.combine(GEOMETRY, outputs(), got.routing, None)
    assert gpu.last.phases == WHOLE


def test_calls_are_launched_on_the_current_stream(
    gpu: Gpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    mode, ordered = open_mode(), []
    order = mode._follow.__self__  # type: ignore[attr-defined]
    monkeypatch.setattr(order, "_change_to", ordered.append)
    for gpu.stream in (0, 7, 7):
        mode.dispatch(GEOMETRY, *tokens())
    assert [stream for _, stream in gpu.launches] == [0, 7, 7]
    assert ordered == [7, 7]


def test_a_routing_is_kept_for_the_stream_that_combines_it(
    gpu: Gpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    mode, kept = open_mode(), list[tuple[int, int]]()
    monkeypatch.setattr(mode, "_follow", lambda: gpu.stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: gpu.stream)
    monkeypatch.setattr(
        torch.Tensor, "record_stream", lambda tensor, on: kept.append((tensor.data_ptr(), on))
    )
    gpu.stream = 7
    got, _ = mode.dispatch(GEOMETRY, *tokens())
    mode.dispatch(GEOMETRY, *tokens())  # else this is the last routing, which stays
    routing = got.routing
    assert isinstance(routing, CudaRouting)
    mode.combine(GEOMETRY, outputs(), routing, None)
    assert kept == []
    block = routing.block.data_ptr()
    gpu.stream = 9
    mode.combine(GEOMETRY, outputs(), routing.unweighted(), None)
    assert kept == [(block, 9)]
    _, hook = mode.combine(GEOMETRY, outputs(), routing, None, return_hook=True)
    assert hook is not None
    gpu.stream = 7
    hook()
    assert kept[:2] == [(block, 9), (block, 9)]
    gpu.stream, kept[:] = 11, []
    with pytest.raises(ArgumentError):
        mode.combine(GEOMETRY, outputs().float(), routing, None)
    assert kept == [(block, 11)]


def test_a_refusal_that_fails_leaves_the_mistake_as_it_is(
    gpu: Gpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    mode = open_mode()
    mode.dispatch(GEOMETRY, *tokens())
    count, mistake = len(gpu.launches), UsageError("of a layer above")
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    mode.refuse_combine(mistake)
    assert "not loaded yet" in str(mistake.__context__)
    assert len(gpu.launches) == count


def test_a_refusal_has_the_format_of_its_call(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its kernel is there already, so that peers do not wait for a compiler."""
    mode = open_mode()
    got, _ = mode.dispatch(GEOMETRY, *tokens())
    mode.combine(GEOMETRY, outputs(), got.routing, None)
    loaded: list[Any] = []
    monkeypatch.setattr(cuda.jit, "load", lambda source, *_: loaded.append(source))
    with pytest.raises(ArgumentError):
        mode.combine(GEOMETRY, outputs().float(), got.routing, None)
    assert loaded == []
    with pytest.raises(ArgumentError):
        mode.combine(GEOMETRY, outputs().float(), got.routing, None, logfmt=True)
    assert [dict(source.constants)["kLogFmt"] for source in loaded] == [1]


@pytest.mark.parametrize("hooks", [False, True])
def test_a_combine_that_waits_for_outputs_sends_by_a_kernel_of_its_own(
    gpu: Gpu, monkeypatch: pytest.MonkeyPatch, hooks: bool
) -> None:
    mode, grids, marked = open_mode(late=True), list[int](), list[int]()
    launch = _core.CudaCombineArgs.launch

    def on_grid(args: Any, kernel: object, ctas: int, *rest: Any) -> None:
        grids.append(ctas)
        launch(args, kernel, ctas, *rest)

    monkeypatch.setattr(_core.CudaCombineArgs, "launch", on_grid)
    monkeypatch.setattr(mode._order, "mark", marked.append)
    x, topk_idx, weights = tokens()
    signals = torch.zeros(LOCAL * 3, dtype=torch.int32)
    for sms in (2, 99):
        got, _ = mode.dispatch(GEOMETRY, x, topk_idx)
        ready = ReadyRows(outputs(), signals, 8, 1, sms)
        _, hook = mode.combine(
            GEOMETRY, ready, got.routing, topk_idx, late_weights=weights, return_hook=hooks
        )
        assert (hook is not None) == hooks
        if hook is not None:
            assert gpu.last.phases == SEND
            hook()
        assert [args.phases for args, _ in gpu.launches[-2:]] == [SEND, RECEIVE]
    mode.combine(GEOMETRY, outputs(), got.routing, topk_idx, late_weights=weights)
    assert gpu.last.phases == WHOLE
    assert grids == [2, 8, 8, 8, 8]  # of the eight SMs
    # From the first such call on, so that the next one follows the call before it alone.
    assert marked == [0] * 6


def test_only_a_combine_with_weights_of_its_own_waits_for_outputs(gpu: Gpu) -> None:
    mode = open_mode()
    got, _ = mode.dispatch(GEOMETRY, *tokens())
    ready = ReadyRows(outputs(), torch.zeros(LOCAL, dtype=torch.int32), CAPACITY, 1, 2)
    with pytest.raises(UsageError, match="weights of its own"):
        mode.combine(GEOMETRY, ready, got.routing, None)
    assert gpu.last.refused
    mode.combine(GEOMETRY, outputs(), got.routing, None)
    assert (gpu.last.phases, gpu.last.refused) == (WHOLE, False)
