"""Which NVRTC is taken, and what is said where there is none."""

from __future__ import annotations

import importlib.machinery
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from fanfold import errors
from fanfold.jit import nvrtc


@pytest.fixture
def nowhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """No compiler is found, but in what a test puts under the folder: site/, toolkit/, usr/ or
    wheel/."""
    monkeypatch.setattr(nvrtc, "_refused", {})
    spec = importlib.machinery.ModuleSpec("torch", None)
    spec.submodule_search_locations = [str(tmp_path / "site/torch")]
    monkeypatch.setattr(nvrtc.importlib.util, "find_spec", lambda name: spec)
    monkeypatch.setattr(nvrtc, "cuda_toolkit", lambda: tmp_path / "toolkit")
    monkeypatch.setattr(nvrtc.shutil, "which", lambda name: None)
    monkeypatch.setattr(nvrtc, "sys", SimpleNamespace(path=[str(tmp_path / "wheel")]))
    monkeypatch.setattr(nvrtc, "_SONAMES", ("libnone.so.0",))
    monkeypatch.setattr(nvrtc, "_USUAL", tmp_path / "usr")
    return tmp_path


def put(folder: Path, *names: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        (folder / name).write_text("no library")


def real_wheels() -> Path:
    """The folder of installed packages that has NVRTC in it."""
    folders = (Path(entry) for entry in sys.path)
    return next(path for path in folders if (path / "nvidia/cu13/lib/libnvrtc.so.13").exists())


def test_order_of_places(nowhere: Path) -> None:
    put(nowhere / "wheel/nvidia/cu13/lib", "libnvrtc.so.13")
    put(nowhere / "usr/cuda-12.9/lib64", "libnvrtc.so.12")
    put(nowhere / "usr/cuda-13.1/lib64", "libnvrtc.so.13", "libnvrtc-builtins.so.13.1")
    put(nowhere / "toolkit/lib64", "libnvrtc.so.13.0.88", "libnvrtc.alt.so.13")
    (nowhere / "toolkit/lib64/libnvrtc.so").symlink_to("libnvrtc.so.13.0.88")
    put(nowhere / "site/nvidia/cuda_nvrtc/lib", "libnvrtc.so.12", "libnvrtc-builtins.so.12.8")
    put(nowhere / "site/nvidia/cu13/lib", "libnvrtc.so.13", "libnvrtc-builtins.so.13.0")
    places = [
        (found.path.removeprefix(f"{nowhere}/").split("/lib")[0], Path(found.builtins or "").name)
        for found in nvrtc.candidates()
    ]
    assert places == [
        ("site/nvidia/cu13", "libnvrtc-builtins.so.13.0"),
        ("site/nvidia/cuda_nvrtc", "libnvrtc-builtins.so.12.8"),
        ("toolkit", ""),
        ("usr/cuda-13.1", "libnvrtc-builtins.so.13.1"),
        ("usr/cuda-12.9", ""),
        ("wheel/nvidia/cu13", ""),
    ]
    # PyTorch's own CUDA comes first, whatever lies beside it.
    put(nowhere / "site/torch")
    (nowhere / "site/torch/version.py").write_text("cuda: Optional[str] = '12.8'\n")
    assert nvrtc.find().path.endswith("cuda_nvrtc/lib/libnvrtc.so.12")


def test_one_that_only_the_loader_knows_is_told_by_its_file(
    nowhere: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An update changes what a soname means, and with it the key of what was compiled."""
    monkeypatch.setattr(nvrtc, "_SONAMES", ("libnone.so.0", "libstdc++.so.6"))
    (found,) = nvrtc.candidates()
    assert Path(found.path).name.startswith("libstdc++.so.6")
    real = Path(found.path).resolve(strict=True)
    assert found.identity == f"{real.name}={real.stat().st_size}"


def test_none_says_where_was_looked(nowhere: Path) -> None:
    with pytest.raises(errors.UnavailableError, match="no NVRTC") as caught:
        nvrtc.library()
    told = str(caught.value)
    for part in ("site/nvidia/cuda_nvrtc/lib", "toolkit/lib64", "wheel/nvidia", "libnone.so.0"):
        assert part in told
    assert "pip install nvidia-cuda-nvrtc" in told


def test_one_that_cannot_be_opened_is_passed_over(nowhere: Path) -> None:
    real = real_wheels()
    put(nowhere / "site/nvidia/cu13/lib", "libnvrtc.so.13")
    with pytest.raises(errors.UnavailableError, match=r"of no use: .*cu13/lib/libnvrtc.so.13: "):
        nvrtc.library()
    (nowhere / "wheel").symlink_to(real)
    found = nvrtc.library()
    assert found.version >= (13, 0)
    assert found.path.startswith(str(nowhere / "wheel"))
    assert 90 in found.architectures


def test_one_that_is_too_old(nowhere: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvrtc, "OLDEST", (99, 0))
    real = real_wheels()
    (nowhere / "wheel").symlink_to(real)
    nvrtc._opened.cache_clear()
    with pytest.raises(errors.UnavailableError, match=r"is NVRTC 13\.\d, but 12\.0"):
        nvrtc.library()
    nvrtc._opened.cache_clear()
