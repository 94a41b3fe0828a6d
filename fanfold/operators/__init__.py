"""Custom operators of PyTorch for dispatch and combine, so that ``torch.compile`` can trace them.

A compiled graph holds operators and tensors, and no objects. So an operator names its dispatcher, a
LowLatency or HighThroughput as a rule, by a string. The handle that connects a combine with its
dispatch is a tensor of one number. Eager calls use none of this. What traces them is
:mod:`fanfold.operators.traced`.
"""

from fanfold.operators.define import define
from fanfold.operators.dispatchers import Dispatcher, Registration, Shapes, opened, register
from fanfold.operators.handles import HandleSource

__all__ = ["Dispatcher", "HandleSource", "Registration", "Shapes", "define", "opened", "register"]
