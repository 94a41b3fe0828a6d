"""``examples/dashboard.py`` starts ranks, or reads those of a program, and draws what they do."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import prometheus_client
import pytest
import torch

import fanfold

PROGRAM = Path(__file__).parents[2] / "examples" / "dashboard.py"


@pytest.fixture(scope="module")
def dashboard() -> ModuleType:
    spec = importlib.util.spec_from_file_location("dashboard", PROGRAM)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["dashboard"] = module  # where dataclasses look for it
    spec.loader.exec_module(module)
    return module


def drawn(tmp_path: Path, *arguments: str) -> str:
    out = tmp_path / "dashboard.svg"
    command = [sys.executable, PROGRAM, "--out", out, "--every", "0.2", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    assert out.read_text().rstrip().endswith("</svg>")
    return done.stdout


@pytest.mark.one_host
def test_its_own_ranks(tmp_path: Path) -> None:
    assert "4 ranks" in drawn(tmp_path, "--seconds", "1.5")


def test_ranks_that_serve_their_metrics(tmp_path: Path) -> None:
    registry = prometheus_client.CollectorRegistry()
    with fanfold.LowLatency(num_experts=4, top_k=1, hidden=64, max_tokens=4) as ep:
        registry.register(fanfold.metrics.collector(ep))
        server, thread = prometheus_client.start_http_server(0, "127.0.0.1", registry)
        try:
            url = f"http://127.0.0.1:{server.server_port}"
            assert "1 ranks, " in drawn(tmp_path, "--seconds", "0.8", url)
        finally:
            server.shutdown()
            thread.join()
            server.server_close()


def text_of(calls: int, rows: int, to_itself: int) -> str:
    return f"""# TYPE fanfold_calls counter
fanfold_calls_total{{call="dispatch",layer="a",rank="0"}} {calls}
fanfold_calls_total{{call="combine",layer="a",rank="0"}} {calls}
# TYPE fanfold_row_bytes counter
fanfold_row_bytes_total{{layer="a",phase="p",peer="0",rank="0"}} {to_itself}
fanfold_row_bytes_total{{layer="a",phase="p",peer="1",rank="0"}} {rows}
# TYPE other gauge
other 1.0
"""


def test_rates_are_increases_per_second(dashboard: ModuleType) -> None:
    rank = dashboard.Watched()
    for at, calls, nbytes in ((1.0, 10, 500), (3.0, 30, 500), (4.0, 30, 900)):
        rank.add(at, text_of(calls, nbytes, 10**9 * calls))
    assert rank.rates("calls_total", ("rank",)) == {("0",): [(3.0, 20.0), (4.0, 0.0)]}
    # What a rank sends to itself is no traffic.
    assert rank.rates("row_bytes_total", ("rank",)) == {("0",): [(3.0, 0.0), (4.0, 400.0)]}
    both = [rank.rates("calls_total", ("call",))] * 2
    assert dashboard.summed(both)["dispatch",] == [(3.0, 20.0), (4.0, 0.0)]
    torch.testing.assert_close(dashboard.mean([(0.0, 1.0), (1.0, 4.0)]), 2.5)
