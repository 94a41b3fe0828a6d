"""Fanfold: expert-parallel dispatch and combine for Mixture-of-Experts models.

Fans tokens out to their experts and folds the results back, for any geometry, between the
processes of one host, or in CPU memory of several. Start with :class:`LowLatency` for decoding,
with :class:`HighThroughput` for training and prefill, or with ``fanfold.nn.MoE`` for a whole layer,
or with :class:`FusedMoE` for one with FP8 experts; ``fanfold.deep_ep`` has DeepEP's interface.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

# Type checkers read these imports. At run time a name is imported when a program first uses it, so
# that `fanfold doctor` runs where torch or the core do not, and `import fanfold` costs nothing.
if TYPE_CHECKING:
    from fanfold import deep_ep, functional, fused_moe, metrics, nn
    from fanfold.config import Config
    from fanfold.errors import (
        ArgumentError,
        CompileError,
        ConfigError,
        CopyError,
        DriverFailure,
        FanfoldError,
        LatePeerWarning,
        PeerRefused,
        PeerTimeout,
        SignalTimeout,
        SystemFailure,
        TransportError,
        UnavailableError,
        UsageError,
    )
    from fanfold.fused_moe.layer import FusedMoE
    from fanfold.high_throughput import HighThroughput
    from fanfold.low_latency import Hook, LowLatency
    from fanfold.results import DispatchResult, HighThroughputResult, LowLatencyResult

__all__ = [
    "ArgumentError",
    "CompileError",
    "Config",
    "ConfigError",
    "CopyError",
    "DispatchResult",
    "DriverFailure",
    "FanfoldError",
    "FusedMoE",
    "HighThroughput",
    "HighThroughputResult",
    "Hook",
    "LatePeerWarning",
    "LowLatency",
    "LowLatencyResult",
    "PeerRefused",
    "PeerTimeout",
    "SignalTimeout",
    "SystemFailure",
    "TransportError",
    "UnavailableError",
    "UsageError",
    "__version__",
    "deep_ep",
    "deep_gemm",
    "functional",
    "fused_moe",
    "metrics",
    "nn",
]

__version__ = "0.1.0"

# What Fanfold logs goes nowhere, not even to stderr, until the program configures logging.
logging.getLogger(__name__).addHandler(logging.NullHandler())

# A type checker that saw this function would believe every name.
if not TYPE_CHECKING:
    _MODULES = ("deep_ep", "deep_gemm", "functional", "fused_moe", "metrics", "nn")
    _HOMES = {
        "Config": "fanfold.config",
        "DispatchResult": "fanfold.results",
        "FusedMoE": "fanfold.fused_moe",
        "HighThroughput": "fanfold.high_throughput",
        "HighThroughputResult": "fanfold.results",
        "Hook": "fanfold.low_latency",
        "LowLatency": "fanfold.low_latency",
        "LowLatencyResult": "fanfold.results",
    }

    def __getattr__(name):
        """Imports a public name at its first use."""
        import importlib

        if name not in __all__:
            raise AttributeError(f"module 'fanfold' has no attribute {name!r}")
        if name in _MODULES:
            return importlib.import_module(f"fanfold.{name}")
        value = getattr(importlib.import_module(_HOMES.get(name, "fanfold.errors")), name)
        globals()[name] = value  # the next use finds it without this function
        return value

    def __dir__():
        """The public names, whether imported yet or not."""
        hidden = {"TYPE_CHECKING", "annotations", "logging"}
        return sorted({*globals(), *__all__} - hidden)
