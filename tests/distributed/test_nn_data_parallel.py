"""Models with MoE layers under DDP and FSDP2, against the dense model in one process."""

from __future__ import annotations

import dataclasses
from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from fanfold import nn
from fanfold.errors import ArgumentError, FanfoldError, UsageError
from fanfold.nn.sharding import local_part
from tests.distributed import moe_models
from tests.distributed.moe_models import Model, Training, loss_of, open_ep

RANKS = 4
TRAININGS = {
    f"{wrapper}-{name}": Training(wrapper, **how)
    for wrapper in ("average", "ddp", "fsdp")
    for name, how in {
        "plain": {},
        "clipped": {"max_norm": 0.3},
        "replicas": {"replicas": 2},
        "accumulated": {"micro": 2, "steps": 2},
        "replicated-experts": {"replicas": 4, "steps": 2},
    }.items()
}


@cache
def initial() -> dict[str, torch.Tensor]:
    with open_ep(None) as ep:
        return moe_models.whole(Model(ep))


@cache
def dense(how: Training) -> dict[str, Any]:
    """The training of the dense model, which has no wrapper: one for all wrappers."""
    return moe_models.train_dense(how, RANKS)


@pytest.mark.parametrize("name", TRAININGS)
def test_training_is_that_of_the_dense_model(pools, name):
    how = TRAININGS[name]
    want = dense(dataclasses.replace(how, wrapper="dense"))
    results = pools(RANKS).run(moe_models.train, how)
    for got in results:
        assert got["norms"] == pytest.approx(want["norms"], rel=0.01)
        assert got["parameters"].keys() == {
            name.replace("moe.moe", "moe") for name in want["parameters"]
        }
        for name, value in want["parameters"].items():
            moved = value - initial()[name]
            error = (got["parameters"][name] - value).norm()
            assert error <= 0.02 * moved.norm(), f"{name}: off by {error} of {moved.norm()}"
            assert torch.equal(got["parameters"][name], results[0]["parameters"][name])


def test_a_training_of_the_dense_model_moves_every_parameter():
    """Else the comparison above would accept a model that does nothing."""
    trained = dense(Training("dense"))["parameters"]
    for name, value in initial().items():
        assert (trained[name] - value).norm() > 0.01 * value.norm(), name


def wrap_unprepared(group: dist.ProcessGroup, wrapper: str) -> str:
    with open_ep(group) as ep:
        model = Model(ep)
        before = moe_models.whole(model)
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        with pytest.raises(UsageError, match="prepare_data_parallel") as caught:  # noqa: PT012
            if wrapper == "ddp":
                DistributedDataParallel(model)
            else:
                fully_shard(model.moe[0] if wrapper == "fsdp layer" else model, mesh=mesh)
        for name, value in moe_models.whole(model).items():
            assert torch.equal(value, before[name]), name
        return str(caught.value)


@pytest.mark.parametrize("wrapper", ["ddp", "fsdp", "fsdp layer"])
def test_a_model_that_nobody_prepared_is_refused_with_the_reason(pools, wrapper):
    for text in pools(2).run(wrap_unprepared, wrapper):
        assert text.startswith("DistributedData" if wrapper == "ddp" else "fully_shard")


def prepare_for_others(group: dist.ProcessGroup) -> None:
    half = [dist.new_group([rank]) for rank in range(dist.get_world_size())][dist.get_rank()]
    with open_ep(group) as ep:
        model = Model(ep)
        for call in (nn.prepare_data_parallel, nn.average_gradients):
            with pytest.raises(ArgumentError, match="that share the experts"):
                call(model, half)
        nn.prepare_data_parallel(model)
        wrapped = DistributedDataParallel(model, process_group=half)
        with pytest.raises(UsageError, match="over 1 ranks runs a MoE that was prepared for 2"):
            loss_of(wrapped, 0, dist.get_rank())


def test_other_ranks_than_those_that_share_the_experts_are_refused(pools):
    pools(2).run(prepare_for_others)


def clip_infinite(group: dist.ProcessGroup) -> None:
    with open_ep(group) as ep:
        model = Model(ep)
        loss_of(model, 0, dist.get_rank()).backward()
        nn.average_gradients(model)
        if dist.get_rank() == 1:  # in one rank's expert
            local_part(model.moe[0].w_in.grad)[0, 0, 0] = float("inf")
        before = [local_part(p.grad).clone() for p in model.parameters()]
        with pytest.raises(FanfoldError, match="norm of the gradients is inf"):
            nn.clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)
        for old, parameter in zip(before, model.parameters(), strict=True):
            assert torch.equal(old, local_part(parameter.grad))


def test_a_norm_that_is_not_finite_is_refused_on_all_ranks(pools):
    pools(2).run(clip_infinite)
