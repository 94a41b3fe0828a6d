"""Events, where DeepEP 2 keeps them."""

from fanfold.deep_ep.utils import EventHandle, EventOverlap

__all__ = ["EventHandle", "EventOverlap"]
