"""``examples/serve_moe.py`` over HTTP: its answers are those of a plain model that sees a sequence
alone, whoever else is served; clients may leave; bad requests are refused; ranks may die."""

from __future__ import annotations

import contextlib
import http.client
import importlib.util
import json
import os
import re
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import prometheus_client
import pytest
import torch

from fanfold.cli.demo_model import ByteModel, PlainMoE
from fanfold.errors import ArgumentError
from tests.waiting import wait_until

EXAMPLES = Path(__file__).parents[2] / "examples"
sys.path.append(str(EXAMPLES))

import serve_moe  # noqa: E402
from serve_moe_model import Engine, read_checkpoint  # noqa: E402

pytestmark = pytest.mark.one_host

BOUND_S = 60.0
SIZES = ["--hidden", "64", "--layers", "2", "--heads", "4", "--experts", "8", "--top-k", "2",
         "--intermediate", "32"]  # fmt: skip
SLOTS = ["--slots", "3", "--prefill-tokens", "80"]
CLEARED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
PROMPTS = ["The ", "a", "Python's docs", "x = [1, 2", "é", "class A:\n    pass\n" * 3, "0" * 60,
           "import", "for i in", "yield from", "~", "zz top"]  # fmt: skip
# Logits have a standard deviation of 0.16. Rounding rows to bfloat16 moves them by thousandths;
# a token of which two experts are nearly tied can choose the other one, which moves its logits by
# some hundredths. With a wrong cache bytes lack 0.1 to 0.3, and half of them are not the likeliest.
TOLERANCE = 0.1


class Server:
    """The program, started with two ranks."""

    def __init__(self, folder: Path, *arguments: str) -> None:
        kept = {name: value for name, value in os.environ.items() if name not in CLEARED}
        command = [sys.executable, str(EXAMPLES / "serve_moe.py"), "--port=0", *SIZES, *SLOTS]
        self.log = folder / "log"
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [*command, *arguments],
                stdout=log,
                stderr=log,
                env={**kept, "FANFOLD_TIMEOUT_S": "10"},
            )
        wait_until(lambda: self.process.poll() is not None or self._port(), "it listens")
        found = self._port()
        assert found is not None, self.log.read_text()
        self.port = int(found[1])

    def _port(self) -> re.Match[str] | None:
        return re.search(r"listening on http://127.0.0.1:(\d+)", self.log.read_text())

    def request(self, method: str, path: str, body: Any = None) -> http.client.HTTPResponse:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=BOUND_S)
        connection.request(method, path, body if body is None else json.dumps(body))
        return connection.getresponse()

    def generate(self, prompt: str, tokens: int) -> list[int]:
        answer = self.request("POST", "/generate", {"prompt": prompt, "max_tokens": tokens})
        fields = json.loads(answer.read())
        assert answer.status == 200, fields
        assert fields["text"] == bytes(fields["tokens"]).decode(errors="replace")
        return fields["tokens"]

    def raw(self, data: bytes) -> bytes:
        with socket.create_connection(("127.0.0.1", self.port), timeout=BOUND_S) as connection:
            connection.sendall(data)
            return b"".join(iter(lambda: connection.recv(4096), b""))

    def ranks(self) -> list[int]:
        """Process ids of the ranks: the fork server's children."""
        parents = {}
        for path in Path("/proc").glob("[0-9]*/stat"):
            with contextlib.suppress(OSError):
                pid, rest = path.parent.name, path.read_text().rpartition(")")[2]
                parents[int(pid)] = int(rest.split()[1])
        children = [pid for pid, parent in parents.items() if parent == self.process.pid]
        return [pid for pid, parent in parents.items() if parent in children]

    def terminate(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(BOUND_S)


@contextlib.contextmanager
def served(folder: Path, *arguments: str) -> Iterator[Server]:
    server = Server(folder, *arguments)
    try:
        yield server
    finally:
        server.process.kill()
        server.process.wait()


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("weights") / "model.pt"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, checkpoint: Path) -> Iterator[Server]:
    """One that has trained for three steps and written its weights to ``checkpoint``."""
    folder = tmp_path_factory.mktemp("server")
    given = "--weights=train", "--steps=3", f"--save={checkpoint}", "--metrics-port=0"
    with served(folder, *given) as started:
        yield started
        assert started.terminate() == 0, started.log.read_text()


@pytest.fixture(scope="module")
def reference(server: Server, checkpoint: Path) -> ByteModel:
    """The same weights in a float32 model without Fanfold, without cache and without batches."""
    settings, state = read_checkpoint(checkpoint)
    alone = replace(settings, ranks=1)
    model = ByteModel(alone, lambda seed: PlainMoE(alone))
    model.load_state_dict(state)
    return model


@torch.no_grad()
def check(model: ByteModel, prompt: str, tokens: list[int]) -> None:
    """Every token is the most likely one after all before it, but for rounding."""
    text = torch.tensor([*prompt.encode(), *tokens[:-1]], dtype=torch.int64, device="cpu")
    logits = model(text[None])[0, len(prompt.encode()) - 1 :]
    chosen = logits.gather(1, torch.tensor(tokens, device="cpu")[:, None])[:, 0]
    short = logits.max(-1).values - chosen
    assert short.max() <= TOLERANCE, (prompt, tokens, short)
    assert (short == 0).float().mean() > 0.85


def test_answers_are_those_of_sequences_alone(server: Server, reference: ByteModel) -> None:
    lengths = [min(8 + 3 * i, 65 - len(p.encode())) for i, p in enumerate(PROMPTS)]
    with ThreadPoolExecutor(len(PROMPTS)) as pool:  # twice as many as there are slots
        answers = list(pool.map(server.generate, PROMPTS, lengths))
    assert [len(tokens) for tokens in answers] == lengths
    for prompt, tokens in zip(PROMPTS, answers, strict=True):
        check(reference, prompt, tokens)


def test_metrics(server: Server, reference: ByteModel) -> None:
    before = server.request("GET", "/metrics").read().decode()
    server.generate("a", 5)
    after = server.request("GET", "/metrics").read().decode()
    name = r'^fanfold_calls_total{call="dispatch",layer="%s",rank="0"} (\d+)'
    for layer, calls in (
        ("prefill", 2),
        ("decode", 4 * 2),
    ):  # two layers; the first byte is prefill's
        counts = [re.search(name % layer, text, re.MULTILINE) for text in (before, after)]
        assert float(counts[1][1]) - float(counts[0][1]) == calls
    assert "serve_waiting 0\n" in after


def test_metrics_of_each_rank(server: Server) -> None:
    listed = r"rank (\d): metrics on (http://127.0.0.1:\d+)"
    urls = dict(re.findall(listed, server.log.read_text()))
    assert sorted(urls) == ["0", "1"]

    def calls(rank: str) -> float:
        with urllib.request.urlopen(urls[rank], timeout=BOUND_S) as answer:
            text = answer.read().decode()
        name = rf'^fanfold_calls_total{{call="combine",layer="decode",rank="{rank}"}} (\d+)'
        return float(re.search(name, text, re.MULTILINE)[1])

    before = [calls(rank) for rank in sorted(urls)]
    server.generate("a", 5)  # four by decoding, in two layers
    assert [calls(rank) - count for rank, count in zip(sorted(urls), before, strict=True)] == [8, 8]


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        (["a list"], "no JSON object"),
        ({}, "prompt must be a string"),
        ({"prompt": ""}, "0 bytes"),
        ({"prompt": "é" * 32}, "64 bytes of UTF-8; 1 to 63"),
        ({"prompt": "\ud800"}, "lone surrogate"),
        ({"prompt": "a", "stream": 1}, "stream true or false"),
        ({"prompt": "a", "max_tokens": 65}, "1 to 64 fit"),
        ({"prompt": "a", "max_tokens": True}, "max_tokens is True"),
        ({"prompt": "a", "temperature": 1}, "unknown fields ['temperature']"),
    ],
)
def test_bodies_that_are_refused(server: Server, fields: Any, said: str) -> None:
    answer = server.request("POST", "/generate", fields)
    assert answer.status == 400
    assert said in json.loads(answer.read())["error"]


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (b"GET /health HTTP/1.1\r\n\r\n", 200),
        (b"GET /other HTTP/1.1\r\n\r\n", 404),
        (b"GET /generate HTTP/1.1\r\n\r\n", 405),
        (b"hello\r\n\r\n", 400),
        (b"GET /health HTTP/1.1\r\nno header\r\n\r\n", 400),
        (b"POST /generate HTTP/1.1\r\n\r\n", 411),
        (b"POST /generate HTTP/1.1\r\nContent-Length: +1\r\n\r\n", 400),
        (b"POST /generate HTTP/1.1\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n", 400),
        (b"POST /generate HTTP/1.1\r\nContent-Length: 99999999999\r\n\r\n", 413),
        (b"POST /generate HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n", 501),
        (b"POST /generate HTTP/1.1\r\nContent-Length: 9000\r\n\r\n" + b"[" * 9000, 400),
        (b"GET /health HTTP/1.1\r\nX: " + b"x" * 20000 + b"\r\n\r\n", 431),
    ],
)
def test_requests_that_are_refused(server: Server, data: bytes, status: int) -> None:
    assert server.raw(data).startswith(b"HTTP/1.1 %d " % status)


def test_clients_that_leave_and_the_end(
    tmp_path: Path, checkpoint: Path, reference: ByteModel
) -> None:
    slow = ("--slow-rank=1", "--slow-ms=10")
    with served(tmp_path, f"--weights={checkpoint}", *slow) as server:
        check_that_others_stay(server, reference)
        check_that_all_are_served(server, reference)
        assert server.process.wait(BOUND_S) == 0, server.log.read_text()


def check_that_others_stay(server: Server, reference: ByteModel) -> None:
    """Clients that leave free their slots, and disturb no other."""
    body = {"prompt": "leaving", "max_tokens": 58, "stream": True}
    with ThreadPoolExecutor(4) as pool:
        staying = [pool.submit(server.generate, prompt, 50) for prompt in PROMPTS[:4]]
        leaving = server.request("POST", "/generate", body)
        assert leaving.getheader("Content-Type") == "text/event-stream"
        assert leaving.readline().startswith(b'data: {"token": ')
        leaving.close()
        with socket.create_connection(("127.0.0.1", server.port)) as silent:  # gets one answer
            data = json.dumps(body | {"stream": False}).encode()
            silent.sendall(b"POST /generate HTTP/1.1\r\nContent-Length: %d\r\n\r\n" % len(data))
            silent.sendall(data)
        for prompt, answer in zip(PROMPTS, staying, strict=False):
            check(reference, prompt, answer.result())
    health = lambda: json.loads(server.request("GET", "/health").read())  # noqa: E731
    wait_until(lambda: health() == {"status": "ok", "active": 0, "waiting": 0}, "slots are free")
    assert "serve_cancelled_total 2\n" in server.request("GET", "/metrics").read().decode()


def check_that_all_are_served(server: Server, reference: ByteModel) -> None:
    """After SIGTERM new requests are refused, and those under way are served to their end."""
    body = {"prompt": "The ", "max_tokens": 60, "stream": True}
    answer = server.request("POST", "/generate", body)
    first = answer.readline()
    server.process.send_signal(signal.SIGTERM)
    wait_until(lambda: server.request("GET", "/health").status == 503, "it drains")
    late = server.request("POST", "/generate", {"prompt": "a"})
    assert (late.status, "shutting down" in late.read().decode()) == (503, True)
    lines = [line for line in (first + answer.read()).split(b"\n") if line]
    assert lines[-1] == b"data: [DONE]"
    events = [json.loads(line[6:]) for line in lines[:-1]]
    assert len(events) == 61
    check(reference, "The ", [event["token"] for event in events[:-1]])


def test_a_rank_that_dies_ends_the_server(tmp_path: Path) -> None:
    with served(tmp_path, "--weights=random", "--slow-rank=0", "--slow-ms=100") as server:
        body = {"prompt": "The ", "max_tokens": 60, "stream": True}
        answer = server.request("POST", "/generate", body)
        answer.readline()
        ranks = server.ranks()
        assert len(ranks) == 2
        os.kill(max(ranks), signal.SIGKILL)
        with contextlib.suppress(OSError):
            assert b"[DONE]" not in answer.read()
        assert server.process.wait(BOUND_S) == 1
        assert "was killed by signal 9 (SIGKILL)" in server.log.read_text()


def test_load_with_a_slow_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "lines.jsonl"
    slow = ["--slow-rank=1", "--slow-ms=2", f"--json={out}"]
    program = [str(EXAMPLES / "serve_moe.py"), "--load=20", *SIZES, *SLOTS, *slow]
    monkeypatch.setattr(sys, "argv", program)
    for name in CLEARED:
        monkeypatch.delenv(name, raising=False)
    assert serve_moe.main() == 0, capsys.readouterr()
    assert "20, of which 0 failed" in capsys.readouterr().out
    line = json.loads(out.read_text())
    assert (line["requests"], line["failed"], line["server_exit"]) == (20, 0, 0)
    assert (line["slow_rank"], line["slow_ms"], line["device"]) == (1, 2.0, "cpu")
    assert line["command"].startswith("examples/serve_moe.py --load=20")
    for name in ("first_token_ms", "per_token_ms", "request_ms"):
        assert 0 < line[name]["p50"] <= line[name]["p90"] <= line[name]["p99"]
    assert line["per_token_ms"]["p50"] >= 2.0


def test_a_checkpoint_that_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    other = tmp_path / "other"
    monkeypatch.setattr(sys, "argv", ["serve_moe.py", f"--weights={other}"])
    assert serve_moe.main() == 1
    assert f"--weights is {other}, but must be" in capsys.readouterr().err
    other.write_text("text")
    with pytest.raises(ArgumentError, match="a file that --save wrote"):
        read_checkpoint(other)


# ---- parts, in this process ---------------------------------------------------------------------


def options(*arguments: str) -> serve_moe.Options:
    return serve_moe.options_of(serve_moe.parser().parse_args([*SIZES, *SLOTS, *arguments]))


@pytest.mark.parametrize("port", [-1, 65535])
def test_ports_that_there_are_not(port: int) -> None:
    with pytest.raises(ArgumentError, match="--metrics-port"):
        options(f"--metrics-port={port}")  # two ranks
    assert options("--metrics-port=65534").metrics_port == 65534


@pytest.mark.parametrize(("asked", "rank", "port"), [(9400, 0, 9400), (9400, 3, 9403), (0, 3, 0)])
def test_the_port_of_each_rank(
    monkeypatch: pytest.MonkeyPatch, asked: int, rank: int, port: int
) -> None:
    taken: list[int] = []

    def start(port: int, host: str, registry: Any) -> None:
        taken.append(port)
        raise OSError(98, "Address already in use")

    monkeypatch.setattr(prometheus_client, "start_http_server", start)
    monkeypatch.setattr(serve_moe, "fanfold_registry", lambda engine: None)
    serving = serve_moe.metrics_served(None, options(f"--metrics-port={asked}"), rank)
    with pytest.raises(ArgumentError, match=f"rank {rank} can listen at port {port} "), serving:
        raise AssertionError("it serves")
    assert taken == [port]


def test_metrics_without_their_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ArgumentError, match=r"fanfold\[prometheus\]"):
        options("--metrics-port=9400")


def test_a_full_queue_refuses() -> None:
    delivered: list[Any] = []
    scheduler = serve_moe.Scheduler(2, options("--queue=4"), delivered.extend)
    requests = [serve_moe.Request(b"x" * n, 2) for n in (50, 30, 60, 20)]
    for request in requests:
        scheduler.submit(request)
    with pytest.raises(serve_moe.Refused, match="4 requests wait") as refused:
        scheduler.submit(serve_moe.Request(b"late", 1))
    assert refused.value.status == 503
    # Each rank has room for 80 bytes, so the third does not fit, and the fourth waits behind it.
    plan = scheduler.plan()
    assert plan.prefill == [[(0, b"x" * 50)], [(0, b"x" * 30)]]
    assert plan.decode == [[], []]
    scheduler.take([[7, -1, -1], [8, -1, -1]])
    requests[0].cancelled = True
    plan = scheduler.plan()
    assert plan.prefill == [[(0, b"x" * 60)], [(1, b"x" * 20)]]
    assert plan.decode == [[], [0]]
    scheduler.take([[1, -1, -1], [9, 2, -1]])
    third = [(requests[2], 1), (requests[1], 9), (requests[1], None), (requests[3], 2)]
    assert delivered == [(requests[0], 7), (requests[1], 8), *third]
    scheduler.fail("over")
    assert delivered[6:] == [(requests[2], "over"), (requests[3], "over")]
    assert scheduler.plan().stop


NO_GROUPED_GEMMS = pytest.mark.skipif(
    not hasattr(torch.nn.functional, "grouped_mm"), reason="before PyTorch 2.10"
)


@pytest.mark.parametrize("groups", [False, pytest.param(True, marks=NO_GROUPED_GEMMS)])
def test_the_passes_of_gpus(reference: ByteModel, checkpoint: Path, groups: bool) -> None:
    """The decode pass that a CUDA graph holds, and both kinds of prefills."""
    _, state = read_checkpoint(checkpoint)
    engine = Engine(None, options())
    try:
        engine.model.load_state_dict(state)
        engine.copy_experts()
        engine.groups = groups
        prompts = [(2, b"The "), (0, b"import")]
        engine.prefill(prompts)
        engine.active[[0, 2]] = True
        found = [engine.read(range(3))]
        for _ in range(12):
            engine.decode_all()
            found.append(engine.last.clone())
        tokens = torch.stack(found, dim=1).tolist()
        for slot, prompt in prompts:
            check(reference, prompt.decode(), tokens[slot])
        assert tokens[1] == [0] * 13
        rows = engine.decode_ep.metrics()["expert_rows_total"]
        assert sum(rows.values()) == 12 * 2 * 2 * 2  # passes, layers, active slots, top-k
        assert engine.position.tolist() == [6 + 12, 0, 4 + 12]
    finally:
        engine.close()
