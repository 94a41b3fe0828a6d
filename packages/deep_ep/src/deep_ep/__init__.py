"""DeepEP's interface, by Fanfold: everything here is defined in ``fanfold.deep_ep``."""

from deep_ep import utils
from fanfold.deep_ep import (
    Buffer,
    Config,
    EventHandle,
    EventOverlap,
    __version__,
    get_logical_domain_size,
    get_physical_domain_size,
    topk_idx_t,
)

__all__ = [
    "Buffer",
    "Config",
    "EventHandle",
    "EventOverlap",
    "__version__",
    "get_logical_domain_size",
    "get_physical_domain_size",
    "topk_idx_t",
    "utils",
]
