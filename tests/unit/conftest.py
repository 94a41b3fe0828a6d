"""Shared by the tests of this folder."""

from __future__ import annotations

import os

import pytest

from tests.emulation.world import Builder


@pytest.fixture(scope="session")
def builder(tmp_path_factory: pytest.TempPathFactory) -> Builder:
    """Kernels compiled for the CPU, each once for all tests, whichever of pytest-xdist's processes
    runs them."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "kernels"
    folder.mkdir(exist_ok=True)
    return Builder(folder)
