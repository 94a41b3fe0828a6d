"""Where DeepEP 2 keeps its buffers."""

from deep_ep.buffers.elastic import ElasticBuffer
from deep_ep.buffers.legacy import Buffer

__all__ = ["Buffer", "ElasticBuffer"]
