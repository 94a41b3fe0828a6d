"""Shared by the tests of this folder."""

from __future__ import annotations

import pytest

from tests.emulation.world import Builder


@pytest.fixture(scope="session")
def builder(tmp_path_factory: pytest.TempPathFactory) -> Builder:
    """Kernels compiled for the CPU, each once for all tests."""
    return Builder(tmp_path_factory.mktemp("kernels"))
