"""The operators by which torch.compile traces dispatch and combine: what one process can show."""

from __future__ import annotations

import gc
import subprocess
import sys
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from fanfold import functional
from fanfold.errors import UsageError
from fanfold.high_throughput import HighThroughput
from fanfold.low_latency import LowLatency
from fanfold.nn import MoE, MoEOptions, experts
from fanfold.operators import calls, dispatchers
from fanfold.results import DispatchResult

EXPERTS, TOP_K, HIDDEN = 8, 2, 32


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()
    gc.collect()
    assert not dispatchers._handles, "something outlives the test that dispatched it"


def open_ep(mode: str = "high_throughput", kind: type | None = None, **options: object) -> Any:
    if kind is None:
        kind = LowLatency if mode == "low_latency" else HighThroughput
    return kind(None, num_experts=EXPERTS, top_k=TOP_K, hidden=HIDDEN, max_tokens=64, **options)


def inputs(tokens: int = 9, grad: bool = False) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(tokens)
    x = torch.randn((tokens, HIDDEN), generator=generator).bfloat16()
    idx = torch.randint(-1, EXPERTS, (tokens, TOP_K), generator=generator)
    weights = torch.rand((tokens, TOP_K), generator=generator)
    return x.requires_grad_(grad), idx, weights.requires_grad_(grad)


def layer_of(ep: object) -> Callable[..., torch.Tensor]:
    def layer(x: torch.Tensor, idx: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        tokens, row_weights, received = functional.dispatch(ep, x, idx, weights)
        return functional.combine(ep, tokens * 2, received, row_weights)

    return layer


def compiled(function: Callable[..., object], **options: object) -> Callable[..., torch.Tensor]:
    return torch.compile(function, **({"backend": "aot_eager", "fullgraph": True} | options))


# ---- opcheck ------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["high_throughput", "low_latency"])
@pytest.mark.parametrize("dtype", ["bf16", "fp8"])
def test_operators_are_what_they_declare(mode, dtype):
    train = mode == "high_throughput" and dtype == "bf16"

    def check(operator: object, *args: object) -> None:
        tests = ["test_faketensor", "test_autograd_registration"]
        if dtype == "bf16":  # of fp8 the check cannot take products
            tests.append("test_schema")
        if train and operator is not calls.dispatch:  # whose results it cannot add: their dtypes
            tests.append("test_aot_dispatch_dynamic")
        torch.library.opcheck(operator, args, test_utils=tests)

    with open_ep(mode, dispatch_dtype=dtype) as ep:
        x, idx, weights = inputs(grad=train)
        name = ep.registration.name
        check(calls.dispatch, x, idx, weights, None, name, None, True, train)
        check(calls.dispatch, x.detach(), idx, None, None, name, None, False, False)
        if mode == "high_throughput":
            check(calls.dispatch, x, idx, weights, None, name, 40, True, train)
        results = calls.dispatch(x, idx, weights, None, name, None, True, train)
        handle, tokens, scales, row_weights = (result.detach() for result in results[:4])
        y = tokens.to(torch.bfloat16).requires_grad_(train)
        tokens.requires_grad_(train)
        row_weights.requires_grad_(train)
        check(calls.row_sources, handle, tokens)
        given = row_weights if train else None
        check(calls.combine, y, handle, given, None, 9, True, False, train)
        w_in = torch.randn((EXPERTS, 24, HIDDEN)).requires_grad_(train)
        w_out = torch.randn((EXPERTS, HIDDEN, 12)).requires_grad_(train)
        given = scales if dtype == "fp8" else None
        check(experts._experts, tokens, given, w_in, w_out, handle, train, None)
        if train:
            check(calls.dispatch, x.detach(), None, None, handle, name, len(tokens), True, False)
            check(calls.combine, y, handle, row_weights, x, 9, True, False, True)
            check(calls.combine_weights, row_weights.detach(), handle, 9, TOP_K)
            check(calls._backward_of_dispatch, handle, y.detach(), row_weights.detach(), 9, TOP_K)
            grad = torch.ones_like(x).detach()
            check(
                calls._backward_of_combine, handle, grad, y.detach(), row_weights.detach(),
                len(y), True, True,
            )  # fmt: skip


def test_names_hold_the_shapes_and_are_never_the_same():
    with open_ep() as one, open_ep() as two, open_ep("low_latency") as three:
        names = {ep.registration.name for ep in (one, two, three)}
        assert len(names) == 3
        assert all(str(HIDDEN) in name for name in names)
        assert dispatchers.shapes_of(three.registration.name).rows == 64


# ---- life ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_what_a_dispatch_left_goes_with_the_graph_that_needs_it(backend):
    with open_ep() as ep:
        function = compiled(layer_of(ep), backend=backend)
        out = function(*inputs(grad=True))
        gc.collect()
        assert len(dispatchers._handles) == 1
        del out  # whose backward pass never runs
        gc.collect()
        assert not dispatchers._handles
        out = function(*inputs(grad=True))
        with torch._functorch.config.patch(donated_buffer=False):
            out = function(*inputs(grad=True))
            out.sum().backward(retain_graph=True)
        out.sum().backward()
        del out
        gc.collect()
        assert not dispatchers._handles


def test_a_copy_of_a_handle_stands_for_nothing_once_the_handle_is_gone():
    with open_ep() as ep:
        x, idx, weights = inputs()
        handle = calls.dispatch(x, idx, weights, None, ep.registration.name, None, True, False)[0]
        copied = handle.clone()
        assert dispatchers.opened(copied).dispatcher is ep
        del handle
        gc.collect()
        with pytest.raises(UsageError, match="copy"):
            calls.row_sources(copied, x)


def test_rows_are_not_kept_for_a_backward_pass_that_does_not_read_them():
    with open_ep() as ep:
        x, idx, weights = inputs()
        results = calls.dispatch(x, idx, weights, None, ep.registration.name, None, True, False)
        left = dispatchers.opened(results[0]).received
        for tensor in results[1:]:
            for kept in vars(left.source.dispatched.plan).values():
                if isinstance(kept, torch.Tensor) and kept.numel():
                    assert kept.untyped_storage().data_ptr() != tensor.untyped_storage().data_ptr()
        assert left.tokens.untyped_storage().nbytes() == 2


def test_a_closed_object_and_one_that_is_gone_say_so():
    ep = open_ep()
    function = compiled(layer_of(ep))
    function(*inputs())
    name = ep.registration.name
    x, idx, weights = inputs()
    ep.close()
    with pytest.raises(UsageError, match="closed"):
        function(x, idx, weights)
    gone = weakref.ref(ep)
    del function, ep
    torch._dynamo.reset()
    gc.collect()
    assert gone() is None
    with pytest.raises(UsageError, match="no longer exists"):
        calls.dispatch(x, idx, weights, None, name, None, True, False)


def test_two_objects_do_not_share_a_graph():
    def layer(ep: HighThroughput, *given: torch.Tensor) -> torch.Tensor:
        return layer_of(ep)(*given)

    with open_ep() as one, open_ep(expert_alignment=16) as two:
        function = compiled(layer)
        for _ in range(2):
            for ep in (one, two):
                assert torch.equal(function(ep, *inputs()), layer(ep, *inputs()))
        one.close()
        assert torch.equal(function(two, *inputs()), layer(two, *inputs()))
        with pytest.raises(UsageError, match="closed"):
            function(one, *inputs())


# ---- graphs -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("dynamic", "most"), [(None, 4), (True, 3)])
@pytest.mark.parametrize("mode", ["high_throughput", "low_latency"])
def test_varying_numbers_of_tokens_take_few_graphs(mode, dynamic, most):
    """One each for 0 and 1, one for all others, and the first, whose size is taken as fixed."""
    with open_ep(mode) as ep, torch.no_grad():
        counter = CompileCounterWithBackend("aot_eager")
        function = torch.compile(layer_of(ep), backend=counter, fullgraph=True, dynamic=dynamic)
        for tokens in (5, 9, 0, 33, 1, 64, 2, 7, 0, 1, 21):
            assert torch.equal(function(*inputs(tokens)), layer_of(ep)(*inputs(tokens)))
        assert counter.frame_count <= most


def test_a_result_may_leave_the_graph_and_come_back():
    with open_ep() as ep, open_ep("low_latency") as fast:
        for face in (ep, fast):
            x, idx, weights = inputs()
            want = layer_of(face)(x, idx, weights)
            inside = compiled(lambda *given, face=face: functional.dispatch(face, *given)[2])
            received = inside(x, idx, weights)
            assert isinstance(received, DispatchResult)
            plain = functional.dispatch(face, x, idx, weights)[2]
            assert received.expert_ranges() == plain.expert_ranges()
            valid = plain.source_rank >= 0
            assert torch.equal(received.source_rank, plain.source_rank)
            assert torch.equal(received.source_token[valid], plain.source_token[valid])
            y = received.tokens * 2
            assert torch.equal(face.combine(y, received), want)
            assert torch.equal(functional.combine(face, y, received, received.weights), want)
            back = compiled(lambda y, r, face=face: face.combine(y, r))
            assert torch.equal(back(y, received), want)


def test_a_gradient_of_a_result_that_has_left_the_graph():
    with open_ep() as ep:
        outs = []
        inside = compiled(lambda *given: functional.dispatch(ep, *given))
        for dispatch in (inside, lambda *given: functional.dispatch(ep, *given)):
            x, idx, weights = inputs(grad=True)
            tokens, row_weights, received = dispatch(x, idx, weights)
            assert not received.tokens.requires_grad
            functional.combine(ep, tokens * 2, received, row_weights).sum().backward()
            outs.append((x.grad, weights.grad))
        assert all(map(torch.equal, *outs))


def test_what_operators_do_not_take_runs_between_graphs():
    class Doubled:
        """A user's own dispatcher, which has all that it does not define from another."""

        def __init__(self, ep: HighThroughput) -> None:
            self._ep = ep

        def __getattr__(self, name: str) -> object:
            return getattr(self._ep, name)

        def dispatch(self, x: torch.Tensor, *args: object, **options: object) -> DispatchResult:
            return self._ep.dispatch(x * 2, *args, **options)

    with open_ep() as ep, open_ep("low_latency") as fast:
        x, idx, weights = inputs()
        wrapped = layer_of(Doubled(ep))
        want = wrapped(x, idx, weights)
        assert torch.equal(want, layer_of(ep)(x * 2, idx, weights))
        assert torch.equal(compiled(wrapped, fullgraph=False)(x, idx, weights), want)
        torch._dynamo.reset()
        with pytest.raises(torch._dynamo.exc.Unsupported, match=r"outside of graphs"):
            compiled(wrapped)(x, idx, weights)

        def hooked(x: torch.Tensor) -> torch.Tensor:
            received, receive = fast.dispatch(x, idx, weights, return_hook=True)
            receive()
            out, finish = fast.combine(received.tokens * 2, received, return_hook=True)
            finish()
            return out + 1

        assert torch.equal(compiled(hooked, fullgraph=False)(x), hooked(x))
        plain = ep.dispatch(x, idx, weights)
        combine = compiled(lambda y: ep.combine(y * 2, plain) + 1, fullgraph=False)
        assert torch.equal(combine(plain.tokens), ep.combine(plain.tokens * 2, plain) + 1)


def test_calls_of_a_derived_class_are_made_once():
    class Counted(HighThroughput):
        calls = 0

        def dispatch(self, x: torch.Tensor, *args: object, **options: object) -> DispatchResult:
            self.calls += 1
            return super().dispatch(x + 1, *args, **options)

    with open_ep(kind=Counted) as ep:
        x, idx, weights = inputs()

        def layer(x: torch.Tensor) -> torch.Tensor:
            received = ep.dispatch(x, idx, weights)
            return ep.combine(received.tokens, received)

        want = layer(x)
        assert torch.equal(compiled(layer)(x), want)
        assert ep.calls == 2
        assert torch.equal(compiled(layer_of(ep))(x, idx, weights), want * 2)
        assert ep.calls == 3


# ---- refusals -----------------------------------------------------------------------------------


def test_gradients_that_do_not_exist_are_refused():
    with open_ep("low_latency") as fast, open_ep(dispatch_dtype="fp8") as rounded:
        with pytest.raises(UsageError, match="no_grad"):
            compiled(layer_of(fast))(*inputs(grad=True))
        with pytest.raises(UsageError, match="fp8"):
            compiled(lambda *given: functional.dispatch(rounded, *given)[0])(*inputs(grad=True))
        with torch.no_grad():  # both are as usable as before
            compiled(layer_of(fast))(*inputs())
            compiled(lambda *given: functional.dispatch(rounded, *given)[0])(*inputs())


def test_a_second_derivative_is_refused():
    with open_ep() as ep:
        for backend, kind, text in (
            ("eager", UsageError, "second derivatives"),
            ("aot_eager", RuntimeError, "double backward|create_graph"),
        ):
            x, idx, weights = inputs(grad=True)
            loss = compiled(layer_of(ep), backend=backend)(x, idx, weights).float().square().sum()
            with pytest.raises(kind, match=text):
                torch.autograd.grad(loss, weights, create_graph=True)[0].square().sum().backward()
            del loss


# ---- a layer ------------------------------------------------------------------------------------


def test_a_layer_changes_over_between_compiled_calls():
    with open_ep() as ep, open_ep("low_latency") as fast:
        layer = MoE(HIDDEN, 16, EXPERTS, TOP_K, dispatcher=ep, options=MoEOptions())
        function = compiled(layer)
        x = torch.randn((9, HIDDEN), generator=torch.Generator().manual_seed(1))
        outs = []
        for face in (ep, fast, ep):
            layer.dispatcher = face
            with torch.no_grad():
                outs.append(function(x))
        assert torch.equal(outs[0], outs[1])
        assert torch.equal(outs[0], outs[2])


# ---- copies of the library ----------------------------------------------------------------------

RELOADED = """
import importlib, sys, torch
from fanfold import functional
from fanfold import HighThroughput

def layer_of(functional, ep):
    def layer(x, idx):
        tokens, _, received = functional.dispatch(ep, x, idx)
        return functional.combine(ep, tokens, received)
    return torch.compile(layer, backend="aot_eager", fullgraph=True)

def open_ep(kind):
    return kind(None, num_experts=4, top_k=1, hidden=16, max_tokens=8)

def reload():
    for name in ("define", "calls", "traced"):
        importlib.reload(sys.modules["fanfold.operators." + name])

def copy():
    names = [n for n in sys.modules if n.partition(".")[0] == "fanfold" and "_core" not in n]
    kept.update({name: sys.modules.pop(name) for name in names})
    from fanfold import functional as second
    from fanfold import HighThroughput as Second
    assert second is not functional
    new = layer_of(second, open_ep(Second))
    assert torch.equal(new(x, idx), x)

kept = {}
x, idx = torch.ones((3, 16)).bfloat16(), torch.tensor([[0], [3], [1]])
before = open_ep(HighThroughput)
old = layer_of(functional, before)
assert torch.equal(old(x, idx), x)
for again in (reload, copy):
    again()
    assert torch.equal(old(x, idx), x), again
    torch._dynamo.reset()
    old = layer_of(functional, before)
    assert torch.equal(old(x, idx), x), again
"""


def test_who_compiles_nothing_imports_no_compiler():
    program = (
        "import sys, torch, fanfold.nn; from fanfold import LowLatency\n"
        "ep = LowLatency(None, num_experts=4, top_k=1, hidden=16, max_tokens=8)\n"
        "ep.dispatch(torch.ones((3, 16)).bfloat16(), torch.tensor([[0], [3], [1]]))\n"
        "assert 'torch._dynamo' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=100)


def test_copies_of_the_library_have_operators_each():
    subprocess.run([sys.executable, "-c", RELOADED], check=True, timeout=100)
