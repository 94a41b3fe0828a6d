"""Functions under torch.compile against the same functions without it, bit for bit."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from fanfold import functional
from fanfold.bench.dispatchers import AnyDispatcher, open_dispatcher
from fanfold.config import Config
from fanfold.errors import ArgumentError, PeerRefused
from fanfold.high_throughput import HighThroughput
from fanfold.nn import MoE, MoEOptions, average_gradients
from fanfold.operators import dispatchers
from fanfold.results import HighThroughputResult

EXPERTS, TOP_K, HIDDEN, MOST = 8, 3, 32, 32
# "aot_eager" does what "eager" does, and traces the backward pass.
BACKENDS = [
    "aot_eager",
    *(pytest.param(name, marks=pytest.mark.long) for name in ("eager", "inductor")),
]
# Of up to four ranks, in three steps. 0 and 1 are sizes of which PyTorch makes graphs of their own.
TOKENS = ((6, 0, 1, 9), (0, 5, 32, 9), (8, 7, 1, 0))

Layer = Callable[..., torch.Tensor]


def open_ep(group: object, mode: Any, kind: type | None = None, **options: object) -> Any:
    # While one rank compiles the others wait.
    config = Config.resolve(timeout_s=100.0)
    sizes = {"num_experts": EXPERTS, "top_k": TOP_K, "hidden": HIDDEN, "max_tokens": MOST}
    settings = sizes | {"config": config} | options
    return open_dispatcher(mode, group, **settings) if kind is None else kind(group, **settings)


def inputs_of(step: int, ep: AnyDispatcher) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """x, topk_idx and topk_weights of this rank, where ``ep`` takes them."""
    tokens = TOKENS[step][ep.rank]
    generator = torch.Generator().manual_seed(10 * step + ep.rank)
    x = torch.randn((tokens, HIDDEN), generator=generator).bfloat16()
    idx = torch.randint(-1, EXPERTS, (tokens, TOP_K), generator=generator)
    weights = torch.randn((tokens, TOP_K), generator=generator)
    return x.to(ep.device), idx.to(ep.device), weights.to(ep.device)


def layer_of(ep: AnyDispatcher, capacity: int | None = None, biased: bool = False) -> Layer:
    """Dispatch, experts that look at each row's source and at no number of rows, combine."""

    def layer(x: torch.Tensor, idx: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        tokens, row_weights, received = functional.dispatch(ep, x, idx, weights, capacity=capacity)
        y = tokens * (received.source_rank + 2).bfloat16().unsqueeze(-1)
        bias = x if biased else None
        return functional.combine(ep, y, received, row_weights, bias=bias)

    return layer


def gradients(layer: Layer, step: int, ep: AnyDispatcher) -> list[torch.Tensor]:
    """Output and gradients."""
    x, idx, weights = inputs_of(step, ep)
    x.requires_grad_()
    weights.requires_grad_()
    out = layer(x, idx, weights)
    (out * 3).sum().backward()
    assert x.grad is not None
    assert weights.grad is not None
    return [out.detach(), x.grad, weights.grad]


def assert_equal(got: list[torch.Tensor], want: list[torch.Tensor]) -> None:
    assert len(got) == len(want)
    for ours, theirs in zip(got, want, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0, equal_nan=True)


def train(group: object, backend: str, dynamic: bool | None, capacity: int | None) -> int:
    """Compares both passes of every step; returns what is left of the dispatches."""
    torch._dynamo.reset()
    with open_ep(group, "high_throughput", expert_alignment=4) as ep:
        layer = layer_of(ep, capacity, biased=True)
        compiled = torch.compile(layer, backend=backend, dynamic=dynamic, fullgraph=True)
        for step in range(len(TOKENS)):
            want = gradients(layer, step, ep)
            assert any(tensor.any() for tensor in want) or TOKENS[step][ep.rank] == 0
            assert_equal(gradients(compiled, step, ep), want)
            with torch.no_grad():
                assert_equal([compiled(*inputs_of(step, ep))], want[:1])
    return len(dispatchers._handles)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("ranks", "capacity"),
    [(1, None), (2, None), (2, 300), pytest.param(4, None, marks=pytest.mark.long)],
)
def test_training_is_the_same_bit_for_bit(pools, ranks, backend, capacity):
    assert pools(ranks).run(train, backend, None, capacity) == [0] * ranks


@pytest.mark.parametrize("dynamic", [True, pytest.param(False, marks=pytest.mark.long)])
def test_with_sizes_in_the_graph_or_not(pools, dynamic):
    assert pools(2).run(train, "aot_eager", dynamic, None) == [0, 0]


@pytest.mark.long
@pytest.mark.parametrize("dynamic", [True, False])
def test_with_sizes_in_inductors_graph_or_not(pools, dynamic):
    assert pools(2).run(train, "inductor", dynamic, None) == [0, 0]


def infer(group: object, backend: str, options: dict[str, object]) -> None:
    torch._dynamo.reset()
    with open_ep(group, **options) as ep:

        def layer(x: torch.Tensor, idx: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
            tokens, row_weights, received = functional.dispatch(ep, x, idx, weights)
            y = tokens.bfloat16() * 2
            if received.scales is not None:
                # Exact whatever a compiler rounds: it may leave casts out.
                y = torch.where(received.scales.amax(-1, keepdim=True) > 0.01, y, -y)
            if ep.mode == "low_latency":  # where nobody writes rows without a token
                y = torch.where((received.source_rank < 0).unsqueeze(-1), 0, y)
            return functional.combine(ep, y, received, row_weights)

        compiled = torch.compile(layer, backend=backend, fullgraph=True)
        for step in range(len(TOKENS)):
            given = inputs_of(step, ep)
            for context in (torch.no_grad, torch.inference_mode):
                with context():
                    assert_equal([compiled(*given)], [layer(*given)])


# Each rank compiles everything for itself, which takes the time of these tests.
@pytest.mark.parametrize("ranks", [1, 2, pytest.param(4, marks=pytest.mark.long)])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "options",
    [
        {"mode": "low_latency"},
        pytest.param({"mode": "low_latency", "dispatch_dtype": "fp8"}, marks=pytest.mark.long),
        {"mode": "high_throughput", "dispatch_dtype": "fp8"},
    ],
    ids=lambda options: "-".join(options.values()),
)
def test_inference_is_the_same_bit_for_bit(pools, backend, options, ranks):
    pools(ranks).run(infer, backend, options)


def native(group: object, mode: str) -> None:
    torch._dynamo.reset()
    with open_ep(group, mode) as ep:

        def calls(x: torch.Tensor, idx: torch.Tensor, weights: torch.Tensor) -> list[torch.Tensor]:
            received = ep.dispatch(x, idx, weights)
            rows = received.tokens
            if mode == "low_latency":
                rows = torch.where((received.source_rank < 0).unsqueeze(-1), 0, rows)
            results = [ep.combine(rows, received), ep.combine(rows, received, weighted=False)]
            if mode == "low_latency":
                results.append(ep.combine(rows, received, logfmt=True))
            else:
                again = ep.dispatch(x * 2, previous=received)
                results.append(ep.combine(again.tokens, again, bias=x))
                results.append(ep.combine_weights(received.source_token.float(), again))
                results += [again.offsets, again.source_token]
            out = torch.empty_like(results[0])
            kept = ep.combine(rows, received, out=out)
            return [*results, out, kept, received.tokens_per_expert]

        compiled = torch.compile(calls, backend="aot_eager", fullgraph=True)
        for step in range(len(TOKENS)):
            given = inputs_of(step, ep)
            given[0].requires_grad_()  # of which the native face takes no notice
            got = compiled(*given)
            assert not any(tensor.requires_grad for tensor in got)
            assert_equal(got, [tensor.detach() for tensor in calls(*given)])


@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.long), 2])
@pytest.mark.parametrize("mode", ["high_throughput", "low_latency"])
def test_the_native_face(pools, mode, ranks):
    pools(ranks).run(native, mode)


class Watched(HighThroughput):
    """Notes its calls, and a number that tells them apart."""

    calls: list[tuple[str, float]]

    def dispatch(self, x: torch.Tensor, *args: object, **options: object) -> HighThroughputResult:
        if not torch.compiler.is_dynamo_compiling():
            self.calls.append(("dispatch", float(x.sum())))
        return super().dispatch(x, *args, **options)

    def combine(self, y: torch.Tensor, *args: object, **options: object) -> torch.Tensor:
        if not torch.compiler.is_dynamo_compiling():
            self.calls.append(("combine", 0.0))
        return super().combine(y, *args, **options)

    def combine_weights(self, *args: object) -> torch.Tensor:
        if not torch.compiler.is_dynamo_compiling():
            self.calls.append(("combine_weights", 0.0))
        return super().combine_weights(*args)


def in_order(group: object, backend: str) -> tuple[list[object], list[object]]:
    """The calls of a function whose parts do not depend on each other, without and with compiling:
    one dispatch twice, one whose result nobody uses, and two objects in turns."""
    torch._dynamo.reset()
    with (
        open_ep(group, "high_throughput", Watched) as first,
        open_ep(group, "high_throughput", Watched) as second,
    ):
        first.calls = second.calls = []

        def layer(x: torch.Tensor, idx: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
            functional.dispatch(first, x * 5, idx, weights)
            dispatched = [functional.dispatch(ep, x, idx, weights) for ep in (first, second, first)]
            outs = [
                functional.combine(ep, tokens, received, row_weights)
                for ep, (tokens, row_weights, received) in zip(
                    (second, first, first), (dispatched[1], dispatched[2], dispatched[0]),
                    strict=True,
                )
            ]  # fmt: skip
            return outs[0] + outs[1] * 2 + outs[2] * 4

        results: list[list[object]] = []
        for function in (layer, torch.compile(layer, backend=backend, fullgraph=True)):
            first.calls.clear()
            for step in range(len(TOKENS)):
                x, idx, weights = inputs_of(step, first)
                x.requires_grad_()
                weights.requires_grad_()
                function(x, idx, weights).sum().backward()
            results.append(list(first.calls))
        return results[0], results[1]


@pytest.mark.parametrize("backend", BACKENDS)
def test_no_call_is_dropped_or_made_once_for_two_and_ranks_agree_on_the_order(pools, backend):
    results = pools(2).run(in_order, backend)
    for plain, compiled in results:
        assert compiled == plain
    # Values differ from rank to rank, kinds must not.
    kinds = [[name for name, _ in compiled] for _, compiled in results]
    assert kinds[0] == kinds[1]


def moe(
    group: object, backend: str, options: MoEOptions, run: str, mode: str = "high_throughput"
) -> None:
    torch._dynamo.reset()
    hidden = options.latent or HIDDEN
    trained = mode == "high_throughput"
    sizes = {"num_experts": EXPERTS, "top_k": TOP_K, "hidden": hidden, "max_tokens": MOST}
    with open_dispatcher(mode, group, **sizes) as ep:
        layer = MoE(HIDDEN, 24, EXPERTS, TOP_K, dispatcher=ep, options=options).to(ep.device)
        compiled = torch.compile(layer, backend=backend, fullgraph=run == "plain")
        results, counts = [], []
        for function in (layer, compiled):
            layer.statistics.reset()
            results.append([])
            for step in range(len(TOKENS)):
                results[-1] += one_pass(layer, function, run, trained, step)
            fields = dataclasses.asdict(layer.statistics)
            sent = layer.statistics.bytes_sent, layer.statistics.bytes_returned
            counts.append((fields["tokens"], fields["expert_rows"].tolist(), sent))
        assert counts[0] == counts[1]
        assert counts[0][0] > 0
        of_a_step = len(results[0]) // len(TOKENS)
        for place, (got, want) in enumerate(zip(results[1], results[0], strict=True)):
            forward = place % of_a_step < 2  # output and balance loss
            if run == "autocast" and backend != "eager" and not forward:
                # PyTorch's backward graph takes the router's products in bfloat16.
                assert (got - want).norm() <= 0.02 * want.norm()
            elif backend == "inductor":  # which rounds the router and the shared expert its own way
                torch.testing.assert_close(got, want, rtol=1e-2, atol=1e-2)
            else:
                torch.testing.assert_close(got, want, rtol=0, atol=0)


def one_pass(layer: MoE, function: Layer, run: str, trained: bool, step: int) -> list[torch.Tensor]:
    ep = layer.dispatcher
    generator = torch.Generator().manual_seed(100 * step + ep.rank)
    x = torch.randn((TOKENS[step][ep.rank], HIDDEN), generator=generator).to(ep.device)
    if not trained:
        with torch.inference_mode():
            return [function(x), layer.balance_loss.clone()]
    layer.zero_grad()
    x.requires_grad_()
    with torch.autocast(ep.device.type, torch.bfloat16, enabled=run == "autocast"):
        again = run == "checkpoint"
        out = checkpoint(function, x, use_reentrant=False) if again else function(x)
    (out.float().square().sum() + layer.balance_loss).backward()
    average_gradients(layer)
    grads = [p.grad for p in layer.parameters()]
    assert x.grad is not None
    return [out.detach(), layer.balance_loss.detach(), x.grad, *grads]


LAYERS = {
    "plain": MoEOptions(shared_intermediate=16),
    "latent": MoEOptions(latent=16, score="sigmoid"),
    "bfloat16": MoEOptions(dtype=torch.bfloat16),
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("name", "ranks"),
    [
        ("plain", 2),
        ("latent", 1),
        ("bfloat16", 1),
        *(
            pytest.param(*more, marks=pytest.mark.long)
            for more in (("plain", 1), ("latent", 2), ("bfloat16", 2))
        ),
    ],
)
def test_a_layer_trains_alike(pools, backend, name, ranks):
    pools(ranks).run(moe, backend, LAYERS[name], "plain")


@pytest.mark.parametrize("backend", BACKENDS[:2])
@pytest.mark.parametrize("run", ["autocast", "checkpoint"])
def test_a_layer_trains_alike_under_autocast_and_in_a_checkpoint(pools, run, backend):
    pools(2).run(moe, backend, LAYERS["plain"], run)


@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.long), 2])
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_layer_infers_alike_in_low_latency(pools, backend, ranks):
    pools(ranks).run(moe, backend, LAYERS["plain"], "plain", "low_latency")


def checkpointed_inside(group: object, backend: str) -> tuple[list[object], list[object]]:
    """A compiled function with a checkpoint in it: gradients as without compiling; its calls."""
    torch._dynamo.reset()
    with open_ep(group, "high_throughput", Watched) as ep:
        ep.calls = []
        layer = layer_of(ep)

        def block(x: torch.Tensor, idx: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
            return checkpoint(layer, x.sin(), idx, weights, use_reentrant=False).cos()

        compiled = torch.compile(block, backend=backend)
        kinds = []
        for step in range(len(TOKENS)):
            want = gradients(block, step, ep)
            ep.calls.clear()
            got = gradients(compiled, step, ep)
            kinds.append([name for name, _ in ep.calls])
            for ours, theirs in zip(got, want, strict=True):
                torch.testing.assert_close(ours, theirs, rtol=2**-6, atol=2**-6)
        return kinds, [len(dispatchers._handles)]


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_checkpoint_inside_makes_the_same_calls_on_all_ranks(pools, backend):
    results = pools(2).run(checkpointed_inside, backend)
    assert results[0] == results[1]
    assert results[0][1] == [0]


def refused(group: object) -> list[str]:
    """A rank whose input is bad inside of a compiled function, and the others; then a good step."""
    torch._dynamo.reset()
    with open_ep(group, "high_throughput") as ep:
        layer = layer_of(ep)
        compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
        x, idx, weights = inputs_of(0, ep)
        bad = torch.full_like(idx, EXPERTS) if ep.rank == 0 else idx
        raised = ""
        try:
            compiled(x, bad, weights)
        except (ArgumentError, PeerRefused) as error:
            raised = type(error).__name__
        assert_equal(gradients(compiled, 0, ep), gradients(layer, 0, ep))
        return [raised]


def test_refusals_travel(pools):
    assert pools(2).run(refused) == [["ArgumentError"], ["PeerRefused"]]


def infer_nvfp4(group: object) -> None:
    """No operator takes the global scale, so the dispatch runs between two graphs."""
    torch._dynamo.reset()
    with open_ep(group, "low_latency", dispatch_dtype="nvfp4") as ep:

        def layer(x: torch.Tensor, idx: torch.Tensor, scale: torch.Tensor) -> list[torch.Tensor]:
            received = ep.dispatch(x * 2, idx, global_scale=scale + 1)
            assert received.scales is not None
            return [received.tokens, received.scales.float(), received.tokens_per_expert]

        scale = torch.full((), 299.0, device=ep.device)
        for step in range(len(TOKENS)):
            x, idx, _ = inputs_of(step, ep)
            idx[:] = EXPERTS // ep.ranks * ep.rank  # some rows of one expert of each rank
            want = layer(x, idx, scale)
            got = torch.compile(layer, backend="aot_eager")(x, idx, scale)
            count = int(want[2][0])
            assert count == len(x)
            assert torch.equal(got[2], want[2])
            assert torch.equal(got[0][0, :count], want[0][0, :count])
            assert torch.equal(got[1][0, 0, 0, :count, 0], want[1][0, 0, 0, :count, 0])


def test_nvfp4_rows(pools):
    pools(2).run(infer_nvfp4)
