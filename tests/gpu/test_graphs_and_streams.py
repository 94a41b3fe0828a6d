"""Low latency in CUDA graphs, on several streams, and with memory that is given back early."""

from __future__ import annotations

import gc
import random
import weakref

import pytest
import torch
import torch.distributed as dist

import fanfold
from fanfold.backends.low_latency.protocol import CudaRouting
from fanfold.formats import dequantize
from fanfold.results import LowLatencySource
from tests.gpu.conftest import GpuPools
from tests.gpu.support import (
    Answer,
    Case,
    Tokens,
    answers,
    assert_combined,
    assert_received,
    case_of,
    open_layer,
    overwrite_free_memory,
    own_device,
    tokens_of,
)

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

INPUTS = 7


def _batches(case: Case) -> list[Case]:
    """Inputs of the same sizes, as a graph has them, with other routings."""
    routings = ("spread", "holes", "one_rank", "duplicates", "none", "one_expert", "spread")
    return [case.but(routing=routing, seed=n) for n, routing in enumerate(routings)]


class _Static:
    """The tensors that a captured call reads and leaves."""

    def __init__(self, ep: fanfold.LowLatency, first: Tokens, answer: Answer) -> None:
        self.ep = ep
        self.x, self.topk_idx = first.x.clone(), first.topk_idx.clone()
        assert first.topk_weights is not None
        self.topk_weights = first.topk_weights.clone()
        self.y: torch.Tensor | None = None
        self.received: fanfold.LowLatencyResult | None = None
        self.out: torch.Tensor | None = None
        self._answer = answer

    def load(self, tokens: Tokens, answer: Answer) -> None:
        """Puts the input of the next replay in place."""
        self.x.copy_(tokens.x)
        self.topk_idx.copy_(tokens.topk_idx)
        assert tokens.topk_weights is not None
        self.topk_weights.copy_(tokens.topk_weights)
        self._answer = answer
        if self.y is not None:
            self.y.copy_(answer.spread(self.y, self.y.device))
        if self.out is not None:
            self.out.fill_(torch.nan)

    def dispatch(self) -> None:
        self.received = self.ep.dispatch(self.x, self.topk_idx, self.topk_weights)

    def round(self, hooks: bool = False) -> None:
        """A dispatch, and the combine of ``y``."""
        if not hooks:
            self.dispatch()
            assert self.received is not None
            assert self.y is not None
            self.out = self.ep.combine(self.y, self.received)
            return
        self.received, receive = self.ep.dispatch(
            self.x, self.topk_idx, self.topk_weights, return_hook=True
        )
        receive()
        assert self.y is not None
        self.out, receive = self.ep.combine(self.y, self.received, return_hook=True)
        receive()

    def check(self) -> None:
        assert self.received is not None
        assert_received(self.received, self._answer)
        if self.out is not None:
            assert_combined(self.out, self._answer)


def _captured_rounds(group: dist.ProcessGroup, case: Case, calls: int, hooks: bool) -> None:
    """A graph of ``calls`` rounds, replayed with other inputs, and calls without it in between."""
    device, rank = own_device(), dist.get_rank(group)
    cases = _batches(case)
    answered = answers(group, cases)
    inputs = [tokens_of(each, rank).to(device) for each in cases]
    with open_layer(group, case) as ep:
        statics = [_Static(ep, inputs[0], answered[0]) for _ in range(calls)]
        eager = _Static(ep, inputs[0], answered[0])
        eager.dispatch()
        assert eager.received is not None
        for static in (*statics, eager):
            static.y = answered[0].spread(eager.received.tokens, device)
        eager.round(hooks)  # compiles what capture may not
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for static in statics:
                static.round(hooks)
        for replay in range(8):
            for number, static in enumerate(statics):
                place = (replay * 3 + number) % INPUTS
                static.load(inputs[place], answered[place])
            if replay % 3 == rank % 3:
                torch.cuda._sleep(1_000_000)
            graph.replay()
            if replay % 2:
                eager.load(inputs[replay % INPUTS], answered[replay % INPUTS])
                eager.round(hooks)
                eager.check()
            ep.synchronize()
            for static in statics:
                static.check()
        for _ in range(50):  # nothing changes, nothing waits
            graph.replay()
        ep.synchronize()
        for static in statics:
            static.check()
        del graph


@pytest.mark.parametrize("calls", [1, 2, 3])
@pytest.mark.parametrize(("dtype", "hooks"), [("bf16", False), ("fp8", False), ("fp8", True)])
def test_captured_rounds(gpus: GpuPools, ranks: int, calls: int, dtype: str, hooks: bool) -> None:
    gpus.run(ranks, _captured_rounds, case_of(ranks, dtype=dtype), calls, hooks)


def _captured_dispatches(group: dist.ProcessGroup, case: Case, calls: int) -> None:
    device, rank = own_device(), dist.get_rank(group)
    cases = _batches(case)
    answered = answers(group, cases)
    inputs = [tokens_of(each, rank).to(device) for each in cases]
    with open_layer(group, case) as ep:
        statics = [_Static(ep, inputs[0], answered[0]) for _ in range(calls)]
        statics[0].dispatch()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for static in statics:
                static.dispatch()
        for replay in range(6):
            for number, static in enumerate(statics):
                place = (replay + 2 * number) % INPUTS
                static.load(inputs[place], answered[place])
            graph.replay()
            ep.synchronize()
            for static in statics:
                static.check()
            # What a replay brought can be combined without the graph.
            received = statics[-1].received
            assert received is not None
            answer = answered[(replay + 2 * (calls - 1)) % INPUTS]
            out = ep.combine(answer.spread(received.tokens, device), received)
            ep.synchronize()
            assert_combined(out, answer)
        del graph


@pytest.mark.parametrize("calls", [1, 2, 3])
def test_captured_dispatches(gpus: GpuPools, ranks: int, calls: int) -> None:
    gpus.run(ranks, _captured_dispatches, case_of(ranks, dtype="fp8"), calls)


def _dropped_in_capture(group: dist.ProcessGroup, case: Case) -> None:
    """What the garbage collector finds while a graph is captured does not break the capture."""
    device = own_device()
    case_inputs = tokens_of(case, dist.get_rank(group)).to(device)
    dropped = open_layer(group, case)
    dropped.dispatch(case_inputs.x, case_inputs.topk_idx, case_inputs.topk_weights)
    gone = weakref.ref(dropped)
    cycle: list[object] = [dropped]
    cycle.append(cycle)
    answer = answers(group, [case])[0]
    with open_layer(group, case) as ep:
        static = _Static(ep, case_inputs, answer)
        static.dispatch()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            del dropped, cycle
            gc.collect()
            assert gone() is None
            static.dispatch()
        graph.replay()
        ep.synchronize()
        static.check()
        del graph


def test_a_layer_dropped_in_a_capture(gpus: GpuPools, ranks: int) -> None:
    gpus.run(ranks, _dropped_in_capture, case_of(ranks, dtype="fp8"))


# ---- streams ------------------------------------------------------------------------------------


def _two_streams(group: dist.ProcessGroup, case: Case, ordered: bool) -> None:
    """Rounds on two streams in turn, none waited for. That calls follow each other is the
    library's care; the caller orders its own tensors, here one that all calls read, or none."""
    device, rank = own_device(), dist.get_rank(group)
    cases = _batches(case)
    answered = answers(group, cases)
    inputs = [tokens_of(each, rank).to(device) for each in cases]
    streams = [torch.cuda.Stream(device), torch.cuda.Stream(device)]
    numbers = random.Random(rank)
    results = []
    with open_layer(group, case) as ep:
        received = ep.dispatch(inputs[0].x, inputs[0].topk_idx, inputs[0].topk_weights)
        ys = [answer.spread(received.tokens, device) for answer in answered]
        for stream in streams:
            stream.wait_stream(torch.cuda.current_stream(device))
        shared = torch.empty_like(inputs[0].x)
        for number in range(40):
            here, other = streams[number % 2], streams[1 - number % 2]
            if ordered:
                here.wait_stream(other)
            mine = inputs[number % INPUTS]
            with torch.cuda.stream(here):
                torch.cuda._sleep(numbers.choice([0, 10_000, 400_000]))
                x = shared if ordered else torch.empty_like(shared)
                x.copy_(mine.x)
                received = ep.dispatch(x, mine.topk_idx, mine.topk_weights)
                x.fill_(torch.nan)
                results.append(ep.combine(ys[number % INPUTS], received))
                del received
        torch.cuda.synchronize(device)
        ep.synchronize()
    for number, out in enumerate(results):
        assert_combined(out, answered[number % INPUTS])


@pytest.mark.parametrize("ordered", [True, False], ids=["ordered", "unordered"])
@pytest.mark.parametrize("dtype", ["bf16", "fp8"])
def test_two_streams_in_turn(gpus: GpuPools, ranks: int, dtype: str, ordered: bool) -> None:
    gpus.run(ranks, _two_streams, case_of(ranks, dtype=dtype), ordered)


def _default_stream_and_back(group: dist.ProcessGroup, case: Case) -> None:
    """A dispatch on the default stream and its combine on another, or the other way round. Only the
    library orders them: nothing else that they read is made meanwhile."""
    device, rank = own_device(), dist.get_rank(group)
    cases = _batches(case)
    answered = answers(group, cases)
    inputs = [tokens_of(each, rank).to(device) for each in cases]
    streams = [torch.cuda.default_stream(device), torch.cuda.Stream(device)]
    kept, outs = [], []
    with open_layer(group, case) as ep:
        first = ep.dispatch(inputs[0].x, inputs[0].topk_idx, inputs[0].topk_weights)
        ys = [answer.spread(first.tokens, device) for answer in answered]
        ep.combine(ys[0], first)  # all kernels are loaded now
        torch.cuda.synchronize(device)
        for number in range(2 * INPUTS):
            here, other = streams[number % 2], streams[1 - number % 2]
            mine = inputs[number % INPUTS]
            with torch.cuda.stream(here):
                if number % 3 != rank % 3:
                    torch.cuda._sleep(10_000_000)
                kept.append(ep.dispatch(mine.x, mine.topk_idx, mine.topk_weights))
            with torch.cuda.stream(other):
                outs.append(ep.combine(ys[number % INPUTS], kept[-1]))
        torch.cuda.synchronize(device)
        ep.synchronize()
    for number, out in enumerate(outs):
        assert_received(kept[number], answered[number % INPUTS])
        assert_combined(out, answered[number % INPUTS])


@pytest.mark.parametrize("dtype", ["bf16", "fp8"])
def test_the_default_stream_and_back(gpus: GpuPools, ranks: int, dtype: str) -> None:
    gpus.run(ranks, _default_stream_and_back, case_of(ranks, dtype=dtype))


def _memory_given_back(group: dist.ProcessGroup, case: Case) -> None:
    """Inputs and results are dropped right after the call that reads them, and their memory is
    taken and overwritten by work that follows on the stream."""
    device, rank = own_device(), dist.get_rank(group)
    cases = _batches(case)
    answered = answers(group, cases)
    inputs = [tokens_of(each, rank).to(device) for each in cases]
    outs = []
    with open_layer(group, case) as ep:
        for number in range(3 * INPUTS):
            mine, answer = inputs[number % INPUTS], answered[number % INPUTS]
            assert mine.topk_weights is not None
            x, topk_idx = mine.x.clone(), mine.topk_idx.clone()
            weights = mine.topk_weights.clone()
            torch.cuda._sleep(100_000)
            received = ep.dispatch(x, topk_idx, weights)
            del x, topk_idx, weights
            torch.full_like(mine.x, torch.nan)
            torch.full_like(mine.topk_idx, 2**40)
            torch.full_like(mine.topk_weights, torch.nan)
            y = answer.spread(received.tokens, device)
            outs.append(ep.combine(y, received))
            shape = y.shape
            del y, received
            torch.full(shape, torch.nan, device=device)
        ep.synchronize()
    for number, out in enumerate(outs):
        assert_combined(out, answered[number % INPUTS])


@pytest.mark.parametrize("dtype", ["bf16", "fp8"])
def test_memory_is_free_after_a_call(gpus: GpuPools, ranks: int, dtype: str) -> None:
    gpus.run(ranks, _memory_given_back, case_of(ranks, dtype=dtype))


def _routing_given_back(group: dist.ProcessGroup, case: Case) -> None:
    """What a dispatch brought is dropped on its stream while its combine is still to begin on
    another one, and its memory overwritten. The caller sees nothing of the routing in it, so that
    is the library's to keep; the experts' outputs are the caller's, and stay."""
    device, rank = own_device(), dist.get_rank(group)
    cases = _batches(case)
    answered = answers(group, cases)
    inputs = [tokens_of(each, rank).to(device) for each in cases]
    behind = torch.cuda.Stream(device)
    torch.cuda.empty_cache()  # what is given back below is then what is taken next
    kept, outs = [], []
    with open_layer(group, case) as ep:
        for number in range(INPUTS):
            mine, later = inputs[number], inputs[(number + 1) % INPUTS]
            received = ep.dispatch(mine.x, mine.topk_idx, mine.topk_weights)
            # The layer itself keeps the routing of the last dispatch only.
            ep.dispatch(later.x, later.topk_idx, later.topk_weights)
            kept.append(answered[number].spread(received.tokens, device))
            blocks = [like for like in vars(received).values() if isinstance(like, torch.Tensor)]
            assert isinstance(received.source, LowLatencySource)
            assert isinstance(received.source.dispatched.routing, CudaRouting)
            blocks.append(received.source.dispatched.routing.block)
            sizes = [like.untyped_storage().nbytes() for like in blocks]
            behind.wait_stream(torch.cuda.current_stream(device))
            with torch.cuda.stream(behind):
                torch.cuda._sleep(100_000_000)
                outs.append(ep.combine(kept[-1], received))
            del received, blocks
            overwrite_free_memory(sizes, device)
        torch.cuda.synchronize(device)
        ep.synchronize()
    for number, out in enumerate(outs):
        assert_combined(out, answered[number])


@pytest.mark.parametrize("dtype", ["bf16", "fp8"])
def test_a_routing_dropped_before_its_combine(gpus: GpuPools, ranks: int, dtype: str) -> None:
    gpus.run(ranks, _routing_given_back, case_of(ranks, dtype=dtype))


def _kept_results(group: dist.ProcessGroup, case: Case) -> None:
    """Results of earlier calls stay as they are while later calls run."""
    device, rank = own_device(), dist.get_rank(group)
    cases = _batches(case)
    answered = answers(group, cases)
    inputs = [tokens_of(each, rank).to(device) for each in cases]
    with open_layer(group, case) as ep:
        kept = [ep.dispatch(mine.x, mine.topk_idx, mine.topk_weights) for mine in inputs]
        values = []
        for received in kept:
            rows = received.tokens
            if received.scales is not None:
                values.append(dequantize(rows, received.scales))
        ep.synchronize()
    for received, answer in zip(kept, answered, strict=True):
        assert_received(received, answer)
    assert len(values) in (0, len(kept))


def test_results_are_the_callers(gpus: GpuPools, ranks: int) -> None:
    gpus.run(ranks, _kept_results, case_of(ranks, dtype="fp8"))


def _no_waiting(group: dist.ProcessGroup, case: Case) -> bool:
    """Whether calls return while the GPU still works on something that came before them."""
    device, rank = own_device(), dist.get_rank(group)
    (answer,) = answers(group, [case])
    mine = tokens_of(case, rank).to(device)
    with open_layer(group, case) as ep:
        received = ep.dispatch(mine.x, mine.topk_idx, mine.topk_weights)
        y = answer.spread(received.tokens, device)
        ep.combine(y, received)
        ep.synchronize()
        before = torch.cuda.Event()
        torch.cuda._sleep(1_000_000_000)  # half a second
        before.record()
        for _ in range(5):
            received = ep.dispatch(mine.x, mine.topk_idx, mine.topk_weights)
            out = ep.combine(y, received)
        ahead = not before.query()
        ep.synchronize()
    assert_combined(out, answer)
    return ahead


def test_calls_do_not_wait_for_the_gpu(gpus: GpuPools, ranks: int) -> None:
    assert gpus.run(ranks, _no_waiting, case_of(ranks, dtype="fp8")) == [True] * ranks
