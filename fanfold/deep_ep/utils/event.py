"""What programs import from ``deep_ep.utils.event``."""

from __future__ import annotations

from fanfold.deep_ep.events import EventHandle, EventOverlap

__all__ = ["EventHandle", "EventOverlap"]
