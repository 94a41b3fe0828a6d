"""Checkpoints of models with MoE layers: from any number of ranks to any other."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)

from fanfold import nn
from fanfold.nn.sharding import local_part
from tests.distributed.moe_models import (
    EXPERTS,
    HIDDEN,
    Model,
    loss_of,
    open_ep,
    open_replicated,
    optimizer_of,
    whole,
    whole_tensor,
    wrap,
)

# What a checkpoint holds does not depend on hosts; test_nn.py trains the layers across hosts.
pytestmark = pytest.mark.one_host


def step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
    optimizer.zero_grad()
    loss_of(model, number, dist.get_rank() if dist.is_initialized() else 0).backward()
    nn.average_gradients(model)  # again, where DDP or FSDP2 did it already
    optimizer.step()


def everything(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Parameters and AdamW's state, whole, by parameter name. Collective."""
    named = {name.removeprefix("module."): p for name, p in model.named_parameters()}
    state = {
        f"{name} {kind}": whole_tensor(optimizer.state[parameter][kind])
        for name, parameter in named.items()
        for kind in ("exp_avg", "exp_avg_sq")
    }
    return {name: whole_tensor(p) for name, p in named.items()} | state


def save(group: dist.ProcessGroup, path: Path, wrapper: str, replicas: int) -> dict[str, Any]:
    """Trains two steps and saves."""
    experts_group, mesh = open_replicated(group, replicas)
    with open_ep(experts_group) as ep:
        inner = Model(ep, mesh)
        model = wrap(inner, wrapper)
        optimizer = optimizer_of(nn.parameter_groups(inner), foreach=True)
        for number in range(2):
            step(model, optimizer, number)
        state, optimizer_state = get_state_dict(model, optimizer)
        dcp.save({"model": state, "optimizer": optimizer_state}, checkpoint_id=path)
        return everything(model, optimizer)


def load(
    group: dist.ProcessGroup | None, path: Path, wrapper: str, replicas: int
) -> dict[str, Any]:
    """What a new model holds after it has loaded, and that it can go on."""
    experts_group, mesh = (None, None) if group is None else open_replicated(group, replicas)
    with open_ep(experts_group) as ep:
        inner = Model(ep, mesh)
        with torch.no_grad():
            for parameter in inner.parameters():
                local_part(parameter).fill_(7.0)
        model = wrap(inner, wrapper)
        optimizer = optimizer_of(nn.parameter_groups(inner), foreach=True)
        state, optimizer_state = get_state_dict(model, optimizer)
        both = {"model": state, "optimizer": optimizer_state}
        dcp.load(both, checkpoint_id=path)
        set_state_dict(
            model,
            optimizer,
            model_state_dict=both["model"],
            optim_state_dict=both["optimizer"],
        )
        loaded = everything(model, optimizer)
        step(model, optimizer, 2)
        return loaded


def assert_equal(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> None:
    assert got.keys() == want.keys()
    for name, value in want.items():
        assert torch.equal(got[name], value), name


@pytest.mark.parametrize(
    ("wrapper", "replicas"), [("average", 1), ("ddp", 1), ("fsdp", 1), ("ddp", 2)]
)
def test_a_checkpoint_of_4_ranks_loads_on_any_number(pools, tmp_path, wrapper, replicas):
    saved = pools(4).run(save, tmp_path, wrapper, replicas)
    assert saved[0]["moe.0.w_in"].shape[0] == EXPERTS
    for other in saved[1:]:
        assert_equal(other, saved[0])
    for ranks, how, copies in [(2, wrapper, 1), (8, wrapper, replicas), (4, "average", 1)]:
        for loaded in pools(ranks).run(load, tmp_path, how, copies):
            assert_equal(loaded, saved[0])
    assert_equal(load(None, tmp_path, "average", 1), saved[0])


def test_a_checkpoint_of_one_process_loads_on_4_ranks(pools, tmp_path):
    (saved,) = pools(1).run(save, tmp_path, "average", 1)
    for loaded in pools(4).run(load, tmp_path, "average", 1):
        assert_equal(loaded, saved)


def load_plain(group: dist.ProcessGroup, full: dict[str, torch.Tensor]) -> list[str]:
    """Loads tensors of all experts, then those of this rank; the names that came out wrong."""
    with open_ep(group) as ep:
        wrong = []
        begin, count = ep.rank * ep.experts_per_rank, ep.experts_per_rank
        local = {
            name: value[begin : begin + count] if name.endswith((".w_in", ".w_out")) else value
            for name, value in full.items()
            if "shared" not in name
        } | {name: value for name, value in full.items() if "shared" in name}
        for state in (full, local):
            for assign in (False, True):
                model = Model(ep)
                with torch.no_grad():
                    for parameter in model.parameters():
                        local_part(parameter).zero_()
                model.load_state_dict(copy.deepcopy(state), assign=assign)
                wrong += [n for n, v in whole(model).items() if not torch.equal(v, full[n])]
                assert len(nn.expert_parameters(model)) == 4
                assert model.moe[0].w_in.expert_parallel
        set_model_state_dict(model, dict(full), options=StateDictOptions(full_state_dict=True))
        wrong += [n for n, v in whole(model).items() if not torch.equal(v, full[n])]
        fetched = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
        wrong += [n for n, v in fetched.items() if not torch.equal(v, full[n])]
        state = dict(full) | {"moe.0.w_in": full["moe.0.w_in"][:3]}
        with pytest.raises(RuntimeError, match=r"moe\.0\.w_in"):
            model.load_state_dict(state)
        return wrong


def test_plain_tensors_load_too(pools):
    """As checkpoints held them before the parameters were DTensors, or one process has them."""
    with open_ep(None) as ep:
        model = Model(ep)
    generator = torch.Generator().manual_seed(1)
    full = {
        name: torch.randn(value.shape, generator=generator)
        for name, value in model.state_dict().items()
    }
    assert pools(4).run(load_plain, full) == [[]] * 4


def make_on_meta(group: dist.ProcessGroup, how: str) -> list[str]:
    """Names of parameters that are not as a model has them that was made on the CPU."""
    with open_ep(group) as ep:
        want = whole(Model(ep))
        torch.manual_seed(dist.get_rank())  # what an initialisation must not depend on
        with torch.device("meta"):
            model = Model(ep) if how == "context" else Model(ep, device="meta")
        experts = nn.expert_parameters(model)
        assert all(parameter.device.type == "meta" for parameter in experts)
        assert tuple(experts[0].shape) == (EXPERTS, 80, HIDDEN)
        if how == "fsdp":
            wrap(model, "fsdp")
        model.to_empty(device="cpu")
        for module in model.modules():
            if hasattr(module, "reset_parameters"):
                module.reset_parameters()
        assert model.moe[0].w_in.expert_parallel
        assert model.moe[0](torch.zeros(2, HIDDEN)).shape == (2, HIDDEN) or how == "fsdp"
        got = whole(model)
        linear = ("first.weight", "last.weight")  # of torch.nn, whose values come from elsewhere
        return [n for n, v in want.items() if n not in linear and not torch.equal(v, got[n])]


@pytest.mark.parametrize("how", ["context", "device", "fsdp"])
def test_a_model_made_on_the_meta_device_gets_the_same_values(pools, how):
    assert pools(2).run(make_on_meta, how) == [[]] * 2


def convert(group: dist.ProcessGroup) -> None:
    with open_ep(group) as ep:
        layer = Model(ep).moe[0].to(torch.bfloat16)
        assert layer.w_in.dtype == torch.bfloat16
        assert tuple(layer.w_in.shape) == (EXPERTS, 80, HIDDEN)
        assert layer.w_in.expert_parallel
        layer(torch.ones(3, HIDDEN)).sum().backward()
        assert layer.w_in.grad.dtype == torch.bfloat16
        nn.average_gradients(layer)


def test_a_layer_on_ranks_may_change_its_dtype(pools):
    pools(2).run(convert)
