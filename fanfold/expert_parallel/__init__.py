"""The native face; see :class:`ExpertParallel`."""

from fanfold.expert_parallel.face import ExpertParallel
from fanfold.low_latency import Hook
from fanfold.received import Received

__all__ = ["ExpertParallel", "Hook", "Received"]
