"""Copies to the host and back, with the CPU itself in the role of a device far away."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import fanfold
from fanfold.backends import staging
from fanfold.backends.staging import Staging
from fanfold.errors import ArgumentError
from fanfold.nn import MoE

SIZES: dict[str, Any] = {"num_experts": 4, "top_k": 2, "hidden": 32, "max_tokens": 8}


class Copies:
    """Counts the copies, and gives each tensor memory of its own as a copy between devices does."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, value: Any, device: torch.device) -> Any:
        if isinstance(value, torch.Tensor):
            self.count += 1
            return value.detach().clone()
        if isinstance(value, tuple):
            return tuple(self(part, device) for part in value)
        return value


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> Copies:
    """Makes every call take the way of a device that is not the host."""
    counting = Copies()
    monkeypatch.setattr(staging, "_is_host", lambda device: False)
    monkeypatch.setattr(staging, "_move", counting)
    return counting


def test_nothing_moves_on_the_host() -> None:
    x = torch.ones(2)
    staged = Staging(x=x, y=(x, None), z="text")
    assert (staged.needed, staged.device) == (False, torch.device("cpu"))
    assert staged.host(x) is x
    assert staged.back((x,))[0] is x
    assert not Staging().needed
    assert not Staging(x=x, y=x.to("meta")).needed  # the call refuses what is on meta


def test_structure_stays(copies: Copies) -> None:
    x = torch.ones(2, requires_grad=True)
    staged = Staging(x=x)
    values, none, text = staged.host(((x, x), None, "text"))
    assert copies.count == 2
    assert (none, text) == (None, "text")
    assert all(torch.equal(value, x) and not value.requires_grad for value in values)
    out = torch.zeros(2)
    assert staged.result(x.detach(), out) is out
    assert torch.equal(out, x)


def test_devices_must_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staging, "_HOST_KINDS", ("cpu",))
    far, near = torch.ones(1, device="meta"), torch.ones(1)
    with pytest.raises(ArgumentError, match=r"bias\[1\].device is cpu, .* meta, as x is"):
        Staging(x=far, bias=(far, near))
    with pytest.raises(ArgumentError, match=r"y.device is meta, .* cpu, as x is"):
        Staging(x=near, y=far)


def round_trip(dtype: str) -> list[torch.Tensor]:
    """All tensors of a call of each kind, in high throughput."""
    generator = torch.Generator().manual_seed(3)
    x = torch.randn((8, 32), generator=generator).bfloat16()
    weights, idx = torch.rand((8, 4), generator=generator).topk(2)
    with fanfold.HighThroughput(None, dispatch_dtype=dtype, **SIZES) as ep:
        received = ep.dispatch(x, idx, weights)
        y = torch.zeros_like(received.tokens, dtype=torch.bfloat16)
        for expert in range(ep.experts_per_rank):
            rows = received.expert(expert).to(torch.bfloat16)
            received.expert(expert, of=y).copy_(rows * (expert + 1))
        bias, out = torch.ones((8, 32)).bfloat16(), torch.empty((8, 32)).bfloat16()
        results = [ep.combine(y, received), ep.combine(y, received, bias=bias)]
        assert ep.combine(y, received, weighted=False, out=out) is out
        again = ep.dispatch(x, previous=received)
        values = ep.combine_weights(torch.ones(received.tokens.shape[0]), received)
        places = [received.source_rank, received.source_token, received.tokens_per_expert]
        return [*results, out, again.tokens.float(), values, y, *places]


@pytest.mark.parametrize("dtype", ["bf16", "fp8"])
def test_staged_calls_give_the_same(copies: Copies, dtype: str) -> None:
    staged = round_trip(dtype)
    assert copies.count > 10
    with pytest.MonkeyPatch.context() as plain:
        plain.setattr(staging, "_is_host", lambda device: True)
        expected = round_trip(dtype)
    for ours, theirs in zip(staged, expected, strict=True):
        assert torch.equal(ours, theirs)


def train() -> list[torch.Tensor]:
    """The output and all gradients of a layer."""
    with fanfold.HighThroughput(None, **SIZES) as ep:
        layer = MoE(32, 16, num_experts=4, top_k=2, dispatcher=ep)
        x = torch.randn((8, 32), generator=torch.Generator().manual_seed(1)).requires_grad_()
        out = layer(x)
        (out.square().sum() + layer.balance_loss).backward()
        assert x.grad is not None
        gradients = [p.grad for p in layer.parameters() if p.grad is not None]
        return [out.detach(), x.grad, *gradients]


def test_a_staged_layer_trains(copies: Copies) -> None:
    staged = train()
    assert copies.count > 10
    with pytest.MonkeyPatch.context() as plain:
        plain.setattr(staging, "_is_host", lambda device: True)
        expected = train()
    assert len(staged) > 3
    for ours, theirs in zip(staged, expected, strict=True):
        assert torch.equal(ours, theirs)


def test_what_is_kept_of_a_dispatch_without_its_rows() -> None:
    x, idx = torch.randn((8, 32)).bfloat16(), torch.arange(16).reshape(8, 2) % 4
    with fanfold.HighThroughput(None, **SIZES) as ep:
        received = ep.dispatch(x, idx)
        kept = received.without_rows()
        assert (kept.tokens.shape, kept.tokens.dtype) == (received.tokens.shape, torch.bfloat16)
        assert kept.tokens.untyped_storage().nbytes() == 2
        assert torch.equal(ep.dispatch(x, previous=kept).tokens, received.tokens)
        again = ep.combine(received.tokens, kept, weighted=False)
        assert torch.equal(again, ep.combine(received.tokens, received, weighted=False))
