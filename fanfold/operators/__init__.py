"""Custom operators of PyTorch for dispatch and combine, so that ``torch.compile`` can trace them.

A compiled graph holds operators and tensors, and no objects. So an operator names its exchange, an
ExpertParallel as a rule, by a string. What a dispatch leaves for its combine is a tensor of one
number, the handle. Eager calls use none of this.
"""

from fanfold.operators.define import define
from fanfold.operators.exchanges import Exchange, Registration, Shapes, opened, register
from fanfold.operators.traced import (
    HandleSource,
    outside,
    traceable,
    traced_combine,
    traced_dispatch,
    traced_weights,
)

__all__ = [
    "Exchange",
    "HandleSource",
    "Registration",
    "Shapes",
    "define",
    "opened",
    "outside",
    "register",
    "traceable",
    "traced_combine",
    "traced_dispatch",
    "traced_weights",
]
