"""DeepEP's interface on Fanfold: the same names, arguments, return values and layouts.

``packages/deep_ep`` installs this under the name ``deep_ep``, so that a program written for DeepEP
runs unchanged. It is DeepEP's first interface (``Buffer``), its second one (``ElasticBuffer``) and
that of its branch ``hybrid-ep`` (``HybridEPBuffer``), on GPUs or the CPU; what each call does here
and where it differs stands in ``docs/deep_ep.md``.
"""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

import torch

from fanfold.deep_ep import utils
from fanfold.deep_ep.buffer import Buffer, get_logical_domain_size, get_physical_domain_size
from fanfold.deep_ep.elastic import ElasticBuffer
from fanfold.deep_ep.ep_handle import EPHandle
from fanfold.deep_ep.events import EventHandle, EventOverlap
from fanfold.deep_ep.hybrid import HybridEPBuffer, HybridEPConfig, HybridEPHandle
from fanfold.deep_ep.sizes import Config

__all__ = [
    "Buffer",
    "Config",
    "EPHandle",
    "ElasticBuffer",
    "EventHandle",
    "EventOverlap",
    "HybridEPBuffer",
    "HybridEPConfig",
    "HybridEPHandle",
    "__version__",
    "get_logical_domain_size",
    "get_physical_domain_size",
    "topk_idx_t",
    "utils",
]

topk_idx_t = torch.int64
"""The dtype of ``topk_idx``."""


def _version() -> str:
    # The release of DeepEP whose interface this is; what follows the plus says whose it really is.
    try:
        return f"2.1.0+fanfold.{version('fanfold')}"
    except PackageNotFoundError:
        return "2.1.0+fanfold"


__version__ = _version()
