"""Shared by the tests of this folder."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from fanfold.cli.main import main
from fanfold.jit import Binary, KernelSource
from fanfold.jit.cache import Cache
from fanfold.jit.kernel import KERNELS, compile_in
from tests.emulation.world import Builder

Command = Callable[..., tuple[int, str, str]]
Compiled = Callable[[KernelSource, str], Binary]


@pytest.fixture(scope="session")
def common_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that all of pytest-xdist's processes share for the time of the run."""
    base = tmp_path_factory.getbasetemp()
    return base.parent if "PYTEST_XDIST_WORKER" in os.environ else base


@pytest.fixture(scope="session")
def builder(common_folder: Path) -> Builder:
    """Kernels compiled for the CPU, each once for all tests, whichever process runs them."""
    folder = common_folder / "kernels"
    folder.mkdir(exist_ok=True)
    return Builder(folder)


@pytest.fixture(scope="session")
def compiled(common_folder: Path) -> Compiled:
    """``compiled(source, arch)`` compiles a kernel for a GPU, once for all tests and processes."""
    cache = Cache(common_folder / "cache")
    return lambda source, arch: compile_in(KERNELS, cache, source, arch)


@pytest.fixture
def inside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Command:
    """``inside(*arguments)`` runs ``fanfold`` in this process, which has imported what takes a new
    one seconds: its exit code, standard output and standard error. Kernels are kept in
    ``tmp_path / "cache"``."""

    def run(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setenv("FANFOLD_CACHE_DIR", str(tmp_path / "cache"))
        return main(arguments), *capfd.readouterr()

    return run
