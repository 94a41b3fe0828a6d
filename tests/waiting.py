"""Waits of tests for what other threads and processes do."""

from __future__ import annotations

import time
from collections.abc import Callable

BOUND_S = 60.0


def wait_until(condition: Callable[[], object], what: str, *, pause_s: float = 0.01) -> None:
    """Waits until ``condition()`` holds. Fails after :data:`BOUND_S` with ``what``."""
    deadline = time.monotonic() + BOUND_S
    while not condition():
        assert time.monotonic() < deadline, f"not within {BOUND_S:.0f} s: {what}"
        time.sleep(pause_s)
