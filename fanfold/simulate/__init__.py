"""A model of dispatch and combine across hosts: ``fanfold simulate``.

What it predicts for Fanfold itself is a prediction, not a measurement.
"""

from fanfold.simulate.machines import NETWORKS, SYSTEMS, Fixed, Network, System
from fanfold.simulate.model import PARTS, Phase, Scenario, simulate
from fanfold.simulate.published import (
    HELD_OUT_BOUND,
    Comparison,
    Row,
    beyond,
    compare,
    load,
    sources,
)

__all__ = [
    "HELD_OUT_BOUND",
    "NETWORKS",
    "PARTS",
    "SYSTEMS",
    "Comparison",
    "Fixed",
    "Network",
    "Phase",
    "Row",
    "Scenario",
    "System",
    "beyond",
    "compare",
    "load",
    "simulate",
    "sources",
]
