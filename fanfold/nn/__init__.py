"""A Mixture-of-Experts layer whose experts are spread over the ranks of a group::

    ep = fanfold.HighThroughput(group, num_experts=64, top_k=8, hidden=1024, max_tokens=4096)
    layer = fanfold.nn.MoE(1024, 2048, num_experts=64, top_k=8, dispatcher=ep)
    out = layer(x)                                  # x [..., 1024] on each rank
    (loss(out) + layer.balance_loss).backward()
    fanfold.nn.average_gradients(layer)             # over the ranks; experts need no all-reduce

Every rank runs the layer on tokens of its own and holds ``num_experts / ranks`` experts. Calls are
collective, backward passes too (see :mod:`fanfold.functional`). Each parameter of the experts is a
``DTensor`` that is sharded over the group, so PyTorch's checkpoints hold all experts.
:func:`prepare_data_parallel` prepares a model for DDP and FSDP2.
"""

from fanfold.nn.data_parallel import (
    average_gradients,
    clip_grad_norm_,
    expert_parameters,
    parameter_groups,
    prepare_data_parallel,
)
from fanfold.nn.layer import MoE
from fanfold.nn.router import MoEOptions, Router
from fanfold.nn.seeding import seeded_normal
from fanfold.nn.statistics import MoEStatistics

__all__ = [
    "MoE",
    "MoEOptions",
    "MoEStatistics",
    "Router",
    "average_gradients",
    "clip_grad_norm_",
    "expert_parameters",
    "parameter_groups",
    "prepare_data_parallel",
    "seeded_normal",
]
