"""How hosts divide ranks."""

from __future__ import annotations

import pytest

from fanfold.memory.hosts import Hosts


@pytest.mark.parametrize(
    ("host", "even"),
    [
        ((0,), (0,)),
        ((0, 0, 1, 1), (0, 0, 1, 1)),
        ((0, 1, 0, 1), (0, 1, 0, 1)),
        ((0, 0, 1), (0, 0, 0)),
    ],
)
def test_hosts_of_different_sizes_are_one(host: tuple[int, ...], even: tuple[int, ...]) -> None:
    assert Hosts(host, 1, False, 1, "world", "a reason", "").even == even
