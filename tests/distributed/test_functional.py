"""Gradients of dispatch and combine, against plain PyTorch over all ranks' tokens in one process.

The reference rounds where Fanfold rounds: a cast to bfloat16 in the forward pass is a cast of the
gradient in the backward pass, so casts at the right places round both.
"""

from __future__ import annotations

import gc
import weakref
from dataclasses import dataclass
from unittest import mock

import pytest
import torch

from fanfold import functional
from fanfold.errors import ArgumentError, PeerRefused, UsageError
from fanfold.high_throughput import HighThroughput
from fanfold.low_latency import LowLatency

pytestmark = pytest.mark.placements("threads")

RANKS = 3
EXPERTS = 12
HIDDEN = 32


@dataclass(frozen=True)
class Case:
    """One problem for all ranks; everything follows from it, on every rank alike."""

    seed: int
    top_k: int
    tokens: tuple[int, ...]
    integers: bool = False  # small ones: all arithmetic is exact, and finite differences too
    alignment: int = 1

    def inputs(self) -> list[dict[str, torch.Tensor]]:
        """Of each rank: x, idx, weights and the gradient of the output."""
        generator = torch.Generator().manual_seed(self.seed)

        def values(*shape: int) -> torch.Tensor:
            if self.integers:
                return torch.randint(-3, 4, shape, generator=generator).float()
            return torch.randn(shape, generator=generator)

        ranks = []
        for tokens in self.tokens:
            # With -1 and duplicates: drawn one by one.
            idx = torch.randint(-1, EXPERTS, (tokens, self.top_k), generator=generator)
            ranks.append(
                {
                    "x": values(tokens, HIDDEN).bfloat16(),
                    "idx": idx,
                    "weights": values(tokens, self.top_k),
                    "grad": values(tokens, HIDDEN).bfloat16(),
                }
            )
        return ranks


CASES = [
    Case(seed=1, top_k=1, tokens=(5, 3, 4)),
    Case(seed=2, top_k=4, tokens=(17, 0, 9)),
    Case(seed=3, top_k=8, tokens=(30, 31, 1), alignment=8),
    Case(seed=4, top_k=3, tokens=(0, 0, 6)),
    Case(seed=5, top_k=2, tokens=(0, 0, 0)),
    Case(seed=6, top_k=4, tokens=(8, 13, 0), integers=True),
]


def expert(index: int | torch.Tensor, rows: torch.Tensor, integers: bool) -> torch.Tensor:
    """What expert ``index``, or each row's, does to bf16 rows: not linear, unless exactness is
    wanted."""
    if integers:
        return rows * (index % 3 - 1)
    return torch.tanh(rows.float() * (0.5 + index)).bfloat16()


def open_ep(
    group: object, case: Case, kind: type[HighThroughput] = HighThroughput, **options: object
) -> HighThroughput:
    settings = {
        "num_experts": EXPERTS,
        "top_k": case.top_k,
        "hidden": HIDDEN,
        "max_tokens": 64,
        "expert_alignment": case.alignment,
    } | options
    return kind(group, **settings)


def run_layer(
    ep: HighThroughput, case: Case, x: torch.Tensor, weights: torch.Tensor, idx: torch.Tensor
) -> torch.Tensor:
    """Dispatch, experts, combine."""
    tokens, row_weights, received = functional.dispatch(ep, x, idx, weights)
    y = torch.full_like(tokens, float("nan"))  # padding rows must matter to nobody
    pieces = []
    for local in range(ep.experts_per_rank):
        rows = received.expert(local, of=tokens)
        begin = int(received.offsets[local])
        place = torch.arange(begin, begin + rows.shape[0])
        index = ep.rank * ep.experts_per_rank + local
        pieces.append((place, expert(index, rows, case.integers)))
    for place, rows in pieces:
        y = y.index_copy(0, place, rows)
    return functional.combine(ep, y, received, row_weights)


def run_layer_by_row(
    ep: HighThroughput, case: Case, capacity: int | None, x: torch.Tensor, weights: torch.Tensor,
    idx: torch.Tensor,
) -> torch.Tensor:  # fmt: skip
    """The same without a look at any number; what autograd leaves in unused rows is spoilt."""
    tokens, row_weights, received = functional.dispatch(ep, x, idx, weights, capacity=capacity)
    assert capacity is None or len(tokens) == len(row_weights) == capacity
    unused = received.source_rank < 0
    for tensor in (tokens, row_weights):
        mask = unused.view([-1] + [1] * (tensor.dim() - 1))
        tensor.register_hook(lambda grad, mask=mask: grad.masked_fill(mask, float("nan")))
    places = torch.arange(tokens.shape[0], device=tokens.device)
    local = torch.searchsorted(received.offsets[1:].contiguous(), places, right=True)
    index = ep.rank * ep.experts_per_rank + local.clamp(max=ep.experts_per_rank - 1)
    return functional.combine(
        ep, expert(index.unsqueeze(1), tokens, case.integers), received, row_weights
    )


def layer_gradients(group: object, case: Case) -> tuple[torch.Tensor, ...]:
    """Output and gradients of one rank."""
    with open_ep(group, case) as ep:
        inputs = case.inputs()[ep.rank]
        x, weights = inputs["x"].requires_grad_(), inputs["weights"].requires_grad_()
        out = run_layer(ep, case, x, weights, inputs["idx"])
        out.backward(inputs["grad"])
        return out.detach(), x.grad, weights.grad


def reference_layer(
    case: Case, x: torch.Tensor, weights: torch.Tensor, idx: torch.Tensor
) -> torch.Tensor:
    """The same for one rank's tokens in plain PyTorch, rounding where Fanfold rounds."""
    ranks = len(case.tokens)
    local = EXPERTS // ranks
    total = torch.zeros(x.shape[0], HIDDEN)
    exact = x.float()
    for rank in range(ranks):
        copy = exact.bfloat16().float()  # in the backward pass: one row per (token, rank)
        part = torch.zeros(x.shape[0], HIDDEN)
        for index in range(rank * local, (rank + 1) * local):
            here = idx == index
            weight = (weights * here).sum(1, keepdim=True)
            y = expert(index, copy.bfloat16(), case.integers)
            part = part + weight * y.float() * here.any(1, keepdim=True)
        total = total + part.bfloat16().float()
    return total.bfloat16()


def reference_gradients(case: Case, rank: int) -> tuple[torch.Tensor, ...]:
    inputs = case.inputs()[rank]
    x, weights = inputs["x"].requires_grad_(), inputs["weights"].requires_grad_()
    out = reference_layer(case, x, weights, inputs["idx"])
    out.backward(inputs["grad"])
    return out.detach(), x.grad, weights.grad


@pytest.fixture
def pool(pools):
    return pools(RANKS)


@pytest.mark.placements("processes", "threads")
@pytest.mark.parametrize("case", CASES, ids=lambda case: f"seed{case.seed}")
def test_gradients_are_those_of_plain_pytorch(pool, case):
    for rank, (out, grad_x, grad_weights) in enumerate(pool.run(layer_gradients, case)):
        want_out, want_x, want_weights = reference_gradients(case, rank)
        if case.integers:
            assert torch.equal(out, want_out)
            assert torch.equal(grad_x, want_x)
            assert torch.equal(grad_weights, want_weights)
            continue
        # fp32 sums in another order may round to the neighbouring bf16 value, once per rounding;
        # where large terms cancel, a step of the terms is many steps of the sum.
        torch.testing.assert_close(out, want_out, rtol=2**-7, atol=2**-6)
        torch.testing.assert_close(grad_x, want_x, rtol=2**-7, atol=2**-5)
        torch.testing.assert_close(grad_weights, want_weights, rtol=1e-4, atol=1e-4)


class Unwritten(HighThroughput):
    """Has rows behind the others as GPUs do: nobody has written them."""

    def dispatch(self, x, *args, **options):
        received = super().dispatch(x, *args, **options)
        received.tokens[int(received.offsets[-1]) :] = float("nan")
        return received


def room_for(case: Case) -> int:
    """More rows than any rank receives."""
    return sum(case.tokens) * case.top_k + EXPERTS * case.alignment + 3


def gradients_of_capacities(group: object, case: Case) -> list[tuple[torch.Tensor, ...]]:
    """Output and gradients of one rank, with and without a capacity."""
    results = []
    for capacity in (None, room_for(case)):
        with open_ep(group, case, kind=Unwritten) as ep:
            inputs = case.inputs()[ep.rank]
            x, weights = inputs["x"].requires_grad_(), inputs["weights"].requires_grad_()
            out = run_layer_by_row(ep, case, capacity, x, weights, inputs["idx"])
            out.backward(inputs["grad"])
            results.append((out.detach(), x.grad, weights.grad))
    return results


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"seed{case.seed}")
def test_a_capacity_changes_no_gradient(pool, case):
    for rank, (without, within) in enumerate(pool.run(gradients_of_capacities, case)):
        assert all(map(torch.equal, without, within))
        if case.integers:
            assert all(map(torch.equal, within, reference_gradients(case, rank)))


def tensors_of_a_capacity(group: object, case: Case) -> None:
    capacity = room_for(case)
    with open_ep(group, case, kind=Unwritten) as ep:
        inputs = case.inputs()[ep.rank]
        x, weights = inputs["x"].requires_grad_(), inputs["weights"].requires_grad_()
        for weighted in (True, False):
            tokens, row_weights, received = functional.dispatch(
                ep, x, inputs["idx"], weights, capacity=capacity
            )
            assert received.capacity == tokens.shape[0] == row_weights.shape[0] == capacity
            unused = received.source_rank < 0
            assert unused[int(received.offsets[-1]) :].all()
            assert torch.equal(row_weights * unused, torch.zeros(capacity))
            y = tokens.detach().requires_grad_()
            factors = row_weights.detach().requires_grad_() if weighted else None
            functional.combine(ep, y, received, factors).backward(inputs["grad"])
            assert torch.equal(y.grad[unused], torch.zeros_like(y.grad[unused]))
            assert factors is None or not factors.grad[unused].any()
        with torch.no_grad():
            tokens, _, received = functional.dispatch(ep, x, inputs["idx"], capacity=capacity)
        assert received.capacity == tokens.shape[0] == capacity
        with pytest.raises((ArgumentError, PeerRefused), match=r"capacity|refused"):
            functional.dispatch(ep, x, inputs["idx"], weights, capacity=0)


def test_rows_that_hold_no_token_have_no_gradient(pool):
    pool.run(tensors_of_a_capacity, CASES[2])


def change_of_loss(
    group: object, case: Case, name: str, rank: int, at: tuple[int, int]
) -> tuple[float, float]:
    """On one rank: its gradient at one place, and by how much the loss grows for a step of 1."""
    with open_ep(group, case) as ep:
        inputs = case.inputs()[ep.rank]
        x, weights = inputs["x"].requires_grad_(), inputs["weights"].requires_grad_()
        grad = inputs["grad"].double()

        def loss() -> torch.Tensor:
            return (run_layer(ep, case, x, weights, inputs["idx"]).double() * grad).sum()

        before = loss()
        before.backward()
        gradient = 0.0
        if ep.rank == rank:
            tensor = {"x": x, "weights": weights}[name]
            gradient = float(tensor.grad[at])
            with torch.no_grad():
                tensor[at] += 1
        with torch.no_grad():
            return gradient, float(loss() - before)


@pytest.mark.parametrize(
    ("name", "rank", "at"),
    [("x", 0, (0, 3)), ("x", 1, (0, 0)), ("weights", 0, (2, 1)), ("weights", 1, (1, 2))],
)
def test_finite_differences_are_exact_on_small_integers(pool, name, rank, at):
    case = next(case for case in CASES if case.integers)
    results = pool.run(change_of_loss, case, name, rank, at)
    gradient, _ = results[rank]
    # The maps are linear in each argument, so a step of 1 is as good as an infinitesimal one; the
    # loss of all ranks together is what changes.
    assert sum(change for _, change in results) == gradient != 0


def gradients_in_part(group: object, case: Case, needs_x: bool, needs_weights: bool) -> list[bool]:
    with open_ep(group, case) as ep:
        inputs = case.inputs()[ep.rank]
        x = inputs["x"].requires_grad_(needs_x)
        weights = inputs["weights"].requires_grad_(needs_weights)
        run_layer(ep, case, x, weights, inputs["idx"]).backward(inputs["grad"])
        reference = reference_gradients(case, ep.rank)
        return [
            got is None if not needed else torch.equal(got, want)
            for got, want, needed in [
                (x.grad, reference[1], needs_x),
                (weights.grad, reference[2], needs_weights),
            ]
        ]


@pytest.mark.parametrize(("needs_x", "needs_weights"), [(True, False), (False, True)])
def test_only_the_gradients_asked_for_are_computed(pool, needs_x, needs_weights):
    case = next(case for case in CASES if case.integers)
    for right in pool.run(gradients_in_part, case, needs_x, needs_weights):
        assert all(right)


def unweighted(group: object, case: Case) -> tuple[torch.Tensor, ...]:
    with open_ep(group, case) as ep:
        inputs = case.inputs()[ep.rank]
        x = inputs["x"].requires_grad_()
        tokens, weights, received = functional.dispatch(ep, x, inputs["idx"])
        assert weights is None
        out = functional.combine(ep, tokens, received)
        out.backward(inputs["grad"])
        return out.detach(), x.grad


def test_without_weights_both_are_plain_sums(pool):
    case = next(case for case in CASES if case.integers)
    for rank, (out, grad) in enumerate(pool.run(unweighted, case)):
        inputs = case.inputs()[rank]
        experts = torch.arange(EXPERTS)
        copies = (inputs["idx"].unsqueeze(2) == experts).any(1).sum(1, keepdim=True)
        assert torch.equal(out, inputs["x"] * copies)
        assert torch.equal(grad, inputs["grad"] * copies)


def biased(group: object, case: Case) -> list[tuple[torch.Tensor, ...]]:
    """Output and gradients of one rank where all inputs want one, and where the bias alone does."""
    results = []
    for alone in (False, True):
        with open_ep(group, case) as ep:
            inputs = case.inputs()[ep.rank]
            x, weights = inputs["x"], inputs["weights"]
            bias = (3 - x).requires_grad_()
            if not alone:
                x.requires_grad_()
                weights.requires_grad_()
            tokens, row_weights, received = functional.dispatch(ep, x, inputs["idx"], weights)
            out = functional.combine(ep, tokens, received, row_weights, bias=bias)
            with mock.patch.object(ep, "dispatch", wraps=ep.dispatch) as dispatch:
                out.backward(inputs["grad"])
            assert dispatch.call_count == int(not alone), "a bias alone needs nobody else"
            assert alone == (x.grad is None) == (weights.grad is None)
            with torch.no_grad():
                again = functional.combine(ep, tokens, received, row_weights, bias=bias)
            assert torch.equal(again, out)
            results.append((out.detach(), bias.grad, x.grad, weights.grad))
    return results


def test_a_bias_has_the_gradient_of_the_output(pool):
    case = next(case for case in CASES if case.integers)
    for rank, (full, alone) in enumerate(pool.run(biased, case)):
        inputs = case.inputs()[rank]
        x, weights = inputs["x"].requires_grad_(), inputs["weights"].requires_grad_()
        bias = (3 - inputs["x"]).detach().requires_grad_()
        total = (weights * (inputs["idx"] >= 0)).sum(1, keepdim=True)
        want = (total * x.float() + bias.float()).bfloat16()
        want.backward(inputs["grad"])
        for got, expected in zip(full, (want, bias.grad, x.grad, weights.grad), strict=True):
            assert torch.equal(got, expected)
        assert torch.equal(alone[0], want)
        assert torch.equal(alone[1], inputs["grad"])


def doubled(group: object, case: Case) -> tuple[torch.Tensor, ...]:
    with open_ep(group, case, expert_alignment=8) as ep:
        inputs = case.inputs()[ep.rank]
        x, weights = inputs["x"].requires_grad_(), inputs["weights"].requires_grad_()
        tokens, row_weights, received = functional.dispatch(ep, x, inputs["idx"], weights)
        row_weights.retain_grad()
        padding = (received.source_rank < 0).unsqueeze(1)
        assert padding.any()
        y = tokens.masked_fill(padding, float("nan"))
        out = functional.combine(ep, y, received, row_weights * 2)
        out.backward(inputs["grad"])
        assert torch.equal(row_weights.grad * padding.squeeze(1), torch.zeros_like(row_weights))
        with torch.no_grad():
            assert torch.equal(functional.combine(ep, y, received, row_weights * 2), out)
        return out.detach(), x.grad, weights.grad


def test_row_weights_may_be_changed_on_the_way(pool):
    case = next(case for case in CASES if case.integers)
    for rank, (out, grad_x, grad_weights) in enumerate(pool.run(doubled, case)):
        inputs = case.inputs()[rank]
        x, weights = inputs["x"].requires_grad_(), inputs["weights"].requires_grad_()
        total = (weights * (inputs["idx"] >= 0)).sum(1, keepdim=True)
        want = (2 * total * x.float()).bfloat16()
        want.backward(inputs["grad"])
        assert torch.equal(out, want)
        assert torch.equal(grad_x, x.grad)
        assert torch.equal(grad_weights, weights.grad)


def graph_is_freed(group: object, case: Case) -> bool:
    with open_ep(group, case) as ep:
        inputs = case.inputs()[ep.rank]
        x, weights = inputs["x"].requires_grad_(), inputs["weights"].requires_grad_()
        gc.disable()  # a circle through the graph is out of the collector's sight in any case
        tokens, row_weights, received = functional.dispatch(ep, x, inputs["idx"], weights)
        out = functional.combine(ep, tokens, received, row_weights)
        nodes = weakref.ref(tokens.grad_fn), weakref.ref(out.grad_fn), weakref.ref(received)
        assert all(node() is not None for node in nodes)
        del tokens, row_weights, received, out
        gc.enable()
        return all(node() is None for node in nodes)


@pytest.mark.placements("processes")  # without the garbage collector
def test_a_graph_that_never_ran_backward_is_freed(pool):
    assert all(pool.run(graph_is_freed, CASES[0]))


class Addresses(HighThroughput):
    """Notes where the tensors lie that it is called with."""

    def __init__(self, *args: object, **options: object) -> None:
        super().__init__(*args, **options)
        self.seen: list[int] = []

    def dispatch(self, x, *args, **options):
        self.seen.append(x.data_ptr())
        return super().dispatch(x, *args, **options)

    def combine(self, y, *args, **options):
        self.seen.append(y.data_ptr())
        return super().combine(y, *args, **options)

    def combine_weights(self, row_values, received):
        self.seen.append(row_values.data_ptr())
        return super().combine_weights(row_values, received)


def test_gradients_come_to_the_calls_where_kernels_can_read_them():
    """Autograd hands out parts of larger tensors, of which no caller knows where they begin."""
    case = Case(seed=7, top_k=2, tokens=(6,), integers=True)
    grad, idx = case.inputs()[0]["grad"], torch.arange(12).reshape(6, 2)
    gradients = []
    for odd in (0, 1):
        x = case.inputs()[0]["x"].requires_grad_()
        weights = case.inputs()[0]["weights"].requires_grad_()
        with open_ep(None, case, kind=Addresses) as ep:
            tokens, row_weights, received = functional.dispatch(ep, x, idx, weights)
            before = torch.zeros(odd)
            rows = torch.cat([before.bfloat16(), tokens.flatten()])[odd:].view_as(tokens)
            out = functional.combine(
                ep, rows.clone(), received, torch.cat([before, row_weights])[odd:]
            )
            joined = torch.cat([before.bfloat16(), out.flatten()])
            joined.backward(torch.cat([before.bfloat16(), grad.flatten()]))
            assert all(address % 16 == 0 for address in ep.seen)
            assert len(ep.seen) == 5
        gradients.append((x.grad, weights.grad))
    assert all(map(torch.equal, *gradients))


def low_latency_calls(group: object, case: Case) -> tuple[str, bool]:
    with LowLatency(
        group, num_experts=EXPERTS, top_k=case.top_k, hidden=HIDDEN, max_tokens=64
    ) as ep:
        inputs = case.inputs()[ep.rank]
        x, weights = inputs["x"].requires_grad_(), inputs["weights"]
        with pytest.raises(UsageError) as caught:
            functional.dispatch(ep, x, inputs["idx"], weights)
        with torch.no_grad(), pytest.raises(ArgumentError, match="capacity"):
            functional.dispatch(ep, x, inputs["idx"], weights, capacity=64)
        with torch.no_grad():
            tokens, row_weights, received = functional.dispatch(ep, x, inputs["idx"], weights)
            with pytest.raises(ArgumentError, match="bias"):
                functional.combine(ep, tokens, received, row_weights, bias=torch.zeros_like(x))
        with torch.no_grad():
            out = run_layer_low_latency(ep, case, x, weights, inputs["idx"])
        return str(caught.value), torch.equal(out, reference_gradients(case, ep.rank)[0])


def run_layer_low_latency(
    ep: HighThroughput, case: Case, x: torch.Tensor, weights: torch.Tensor, idx: torch.Tensor
) -> torch.Tensor:
    tokens, row_weights, received = functional.dispatch(ep, x, idx, weights)
    y = torch.empty_like(tokens)
    for local in range(ep.experts_per_rank):
        index = ep.rank * ep.experts_per_rank + local
        received.expert(local, of=y).copy_(expert(index, received.expert(local), case.integers))
    with pytest.raises(UsageError, match="other weights"):
        functional.combine(ep, y, received, torch.zeros_like(row_weights))
    return functional.combine(ep, y, received, row_weights)


def test_low_latency_infers_and_says_why_it_does_not_train(pool):
    case = next(case for case in CASES if case.integers)
    for message, right in pool.run(low_latency_calls, case):
        assert "fanfold.HighThroughput" in message
        assert "no_grad" in message
        assert right


def refused_then_right(group: object, case: Case) -> tuple[str, bool]:
    with open_ep(group, case) as ep:
        inputs = case.inputs()[ep.rank]
        x, weights = inputs["x"].requires_grad_(), inputs["weights"].requires_grad_()
        idx = inputs["idx"].clone()
        if ep.rank == 0:
            idx[0, 0] = EXPERTS
        with pytest.raises((ArgumentError, PeerRefused)) as caught:
            functional.dispatch(ep, x, idx, weights)
        out = run_layer(ep, case, x, weights, inputs["idx"])
        out.backward(inputs["grad"])
        return str(caught.value), torch.equal(x.grad, reference_gradients(case, ep.rank)[1])


def test_bad_input_on_one_rank_leaves_training_possible(pool):
    case = next(case for case in CASES if case.integers)
    for message, right in pool.run(refused_then_right, case):
        assert f"topk_idx[0, 0] is {EXPERTS}" in message
        assert right


def fp8_message(group: object, case: Case) -> str:
    with open_ep(group, case, dispatch_dtype="fp8") as ep:
        inputs = case.inputs()[ep.rank]
        with pytest.raises(UsageError) as caught:
            functional.dispatch(ep, inputs["x"].requires_grad_(), inputs["idx"], inputs["weights"])
        return str(caught.value)


def test_rows_that_travel_as_fp8_have_no_gradient(pool):
    for message in pool.run(fp8_message, CASES[0]):
        assert "bf16" in message
