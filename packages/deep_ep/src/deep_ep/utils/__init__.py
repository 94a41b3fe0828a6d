"""Events, where DeepEP's callers import them from."""

from fanfold.deep_ep.utils import EventHandle, EventOverlap

__all__ = ["EventHandle", "EventOverlap"]
