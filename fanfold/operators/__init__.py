"""Custom operators of PyTorch for dispatch and combine, so that ``torch.compile`` can trace them.

A compiled graph holds operators and tensors, and no objects. So an operator names its exchange, an
ExpertParallel as a rule, by a string. What a dispatch leaves for its combine is a tensor of one
number, the handle. Eager calls use none of this. What traces them is
:mod:`fanfold.operators.traced`.
"""

from fanfold.operators.define import define
from fanfold.operators.exchanges import Exchange, Registration, Shapes, opened, register
from fanfold.operators.handles import HandleSource

__all__ = ["Exchange", "HandleSource", "Registration", "Shapes", "define", "opened", "register"]
