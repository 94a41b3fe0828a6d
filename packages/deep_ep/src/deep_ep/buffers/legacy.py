"""Where DeepEP 2 keeps ``Buffer``."""

from fanfold.deep_ep import Buffer, Config, EventHandle, EventOverlap

__all__ = ["Buffer", "Config", "EventHandle", "EventOverlap"]
