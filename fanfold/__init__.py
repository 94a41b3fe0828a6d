"""Fanfold: expert-parallel dispatch and combine for Mixture-of-Experts models.

Fans tokens out to their experts and folds the results back, for any geometry, between the
processes of one host. Start with :class:`ExpertParallel`, or with ``fanfold.nn.MoE`` for a whole
layer; ``fanfold.deep_ep`` has DeepEP's interface.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fanfold.config import Config
    from fanfold.errors import (
        ArgumentError,
        ConfigError,
        FanfoldError,
        PeerRefused,
        PeerTimeout,
        SystemFailure,
        UnavailableError,
        UsageError,
    )
    from fanfold.expert_parallel import ExpertParallel
    from fanfold.received import Received

__all__ = [
    "ArgumentError",
    "Config",
    "ConfigError",
    "ExpertParallel",
    "FanfoldError",
    "PeerRefused",
    "PeerTimeout",
    "Received",
    "SystemFailure",
    "UnavailableError",
    "UsageError",
    "__version__",
]

__version__ = "0.1.0"

_HOMES = {
    "Config": "fanfold.config",
    "ExpertParallel": "fanfold.expert_parallel",
    "Received": "fanfold.received",
}


def __getattr__(name: str) -> Any:
    """Imports what is asked for, so that ``fanfold doctor`` runs where torch or the core do not."""
    if name in ("deep_ep", "functional", "nn"):
        return importlib.import_module(f"fanfold.{name}")
    if name not in __all__:
        raise AttributeError(f"module 'fanfold' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES.get(name, "fanfold.errors")), name)
