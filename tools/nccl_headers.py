"""Fetches the headers of a version of NCCL: ``python tools/nccl_headers.py VERSION FOLDER``.

Its wheel has them, beside a library of 200 MB, which is not kept.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path


def main(version: str, folder: str) -> None:
    """Puts them into ``FOLDER/VERSION/nvidia/nccl/include``."""
    with tempfile.TemporaryDirectory() as downloads:
        subprocess.run(
            [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary=:all:",
             "-d", downloads, f"nvidia-nccl-cu13=={version}"],
            check=True,
        )  # fmt: skip
        with zipfile.ZipFile(next(Path(downloads).glob("*.whl"))) as wheel:
            names = [name for name in wheel.namelist() if name.startswith("nvidia/nccl/include/")]
            if not names:
                sys.exit(f"{wheel.filename} has no headers below nvidia/nccl/include")
            wheel.extractall(Path(folder, version), names)


if __name__ == "__main__":
    main(*sys.argv[1:])
