from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.turns import turn


def test_turns_at_once(tmp_path: Path) -> None:
    together = threading.Barrier(3)

    def be() -> None:
        with turn(tmp_path, alone=False):
            together.wait(timeout=20)

    with ThreadPoolExecutor(3) as threads:
        for done in [threads.submit(be) for _ in range(3)]:
            done.result(timeout=30)


def test_one_alone(tmp_path: Path) -> None:
    alone, inside = {2, 5, 8, 11}, set[int]()
    seen: list[tuple[int, set[int]]] = []

    def be(number: int) -> None:
        with turn(tmp_path, alone=number in alone):
            inside.add(number)
            threading.Event().wait(0.005)
            seen.append((number, inside - {number}))
            inside.discard(number)

    with ThreadPoolExecutor(12) as threads:
        for done in [threads.submit(be, number) for number in range(12)]:
            done.result(timeout=30)
    assert len(seen) == 12
    for number, others in seen:
        assert not (others if number in alone else others & alone)
