"""Where DeepEP 2 keeps ``ElasticBuffer``."""

from fanfold.deep_ep import ElasticBuffer, EPHandle, EventHandle, EventOverlap

__all__ = ["EPHandle", "ElasticBuffer", "EventHandle", "EventOverlap"]
