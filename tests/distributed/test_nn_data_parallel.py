"""Models with MoE layers under DDP and FSDP2, against the dense model in one process."""

from __future__ import annotations

from functools import cache

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from fanfold import nn
from fanfold.errors import ArgumentError, FanfoldError, UsageError
from fanfold.nn.sharding import DTensor, local_part
from tests.distributed import moe_models
from tests.distributed.moe_models import Model, Training, loss_of, open_ep, open_replicated

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


@pytest.mark.parametrize("name", TRAININGS)
def test_training_is_that_of_the_dense_model(pools, name):
    how = TRAININGS[name]
    want = moe_models.train_dense(how, RANKS)
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
    trained = moe_models.train_dense(Training("dense"), RANKS)["parameters"]
    for name, value in initial().items():
        assert (trained[name] - value).norm() > 0.01 * value.norm(), name
