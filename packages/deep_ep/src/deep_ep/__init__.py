"""DeepEP's interface, by Fanfold: everything here is defined in ``fanfold.deep_ep``."""

from deep_ep import buffers, utils
from fanfold.deep_ep import (
    Buffer,
    Config,
    ElasticBuffer,
    EPHandle,
    EventHandle,
    EventOverlap,
    HybridEPBuffer,
    __version__,
    get_logical_domain_size,
    get_physical_domain_size,
    topk_idx_t,
)

__all__ = [
    "Buffer",
    "Config",
    "EPHandle",
    "ElasticBuffer",
    "EventHandle",
    "EventOverlap",
    "HybridEPBuffer",
    "__version__",
    "buffers",
    "get_logical_domain_size",
    "get_physical_domain_size",
    "topk_idx_t",
    "utils",
]
