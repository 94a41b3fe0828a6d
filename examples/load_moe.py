"""A load test of serve_moe.py over HTTP: ``python examples/serve_moe.py --load 6000``.

Starts the server as a program of its own, on random weights, keeps ``--concurrency`` requests under
way until all have been answered, ends it with SIGTERM, and reports tokens per second, the time to
the first token and between tokens. A request has failed if its answer is not 200, or has another
number of tokens than it asked for.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import itertools
import json
import random
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from serve_moe_model import Options

from fanfold.bench.report import append_json_line, check_writable, command_line, origin
from fanfold.geometry import check_integer

PERCENTILES = (50, 90, 95, 99)
REQUEST_S = 120.0  # after which one has failed
PROGRESS_S = 15.0


@dataclass
class Report:
    """What the clients have seen; times in seconds."""

    seconds: float = 0.0
    tokens: int = 0
    answered: int = 0
    first: list[float] = field(default_factory=list)
    between: list[float] = field(default_factory=list)
    whole: list[float] = field(default_factory=list)
    failures: Counter[str] = field(default_factory=Counter)

    def line(self) -> dict[str, Any]:
        """The fields of the JSON line."""
        return {
            "requests": self.answered + self.failures.total(),
            "failed": self.failures.total(),
            "failures": dict(self.failures),
            "seconds": round(self.seconds, 3),
            "tokens": self.tokens,
            "tokens_per_s": round(self.tokens / self.seconds, 1),
            "requests_per_s": round(self.answered / self.seconds, 2),
            "first_token_ms": percentiles(self.first),
            "per_token_ms": percentiles(self.between),
            "request_ms": percentiles(self.whole),
        }

    def print(self) -> None:
        """The same for people."""
        line = self.line()
        print(f"requests      {line['requests']}, of which {line['failed']} failed")
        for reason, count in self.failures.most_common(5):
            print(f"  {count} x {reason}")
        print(f"time          {line['seconds']} s, {line['requests_per_s']} requests/s")
        print(f"tokens        {line['tokens']}, {line['tokens_per_s']} tokens/s")
        for title, name in (("first token", "first_token_ms"), ("per token", "per_token_ms"),
                            ("request", "request_ms")):  # fmt: skip
            times = "  ".join(f"{key} {value:.1f}" for key, value in line[name].items())
            print(f"{title:<13} {times} ms")


def percentiles(seconds: Sequence[float]) -> dict[str, float]:
    """In ms: the smallest value that is not less than so many percent of all."""
    ordered = sorted(seconds)
    found = {}
    for percent in PERCENTILES if ordered else ():
        place = -(-len(ordered) * percent // 100) - 1
        found[f"p{percent}"] = round(1e3 * ordered[place], 2)
    return found


def run(args: argparse.Namespace, options: Options) -> int:
    """The load test: 0 if no request failed and the server ended well, else 1."""
    check_integer("--load", args.load, 1, 10**9)
    if args.json is not None:
        check_writable(args.json)
    concurrency = args.concurrency or args.ranks * options.slots
    print(describe(args, options, concurrency), flush=True)
    command = server_command(args, options)
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            device, port = place_of(server)
            report = asyncio.run(clients(args, port, concurrency))
        finally:
            server.send_signal(signal.SIGTERM)
            server.communicate(timeout=options.drain_s + 60.0)
    report.print()
    print(f"server        exit code {server.returncode} after SIGTERM")
    if args.json is not None:
        model = {f"model_{k}": v for k, v in dataclasses.asdict(options.model).items()}
        slow = {"slow_rank": options.slow_rank, "slow_ms": options.slow_ms}
        fields = {
            "bench": "serve_moe", "ranks": args.ranks, "slots": options.slots,
            "prefill_tokens": options.prefill_tokens, "concurrency": concurrency,
            **(slow if options.slow_rank >= 0 else {"slow_rank": None}),
            **report.line(), "server_exit": server.returncode, **model, **origin(),
            "device": device, "command": command_line(args.json),
        }  # fmt: skip
        append_json_line(args.json, fields)
    return 1 if report.failures or server.returncode else 0


def describe(args: argparse.Namespace, options: Options, concurrency: int) -> str:
    """One paragraph about what is sent to what."""
    m = options.model
    slow = ""
    if options.slow_rank >= 0:
        slow = f", rank {options.slow_rank} slowed by {options.slow_ms:g} ms a step"
    return (
        f"server        {args.ranks} ranks, {options.slots} slots each{slow}\n"
        f"model         {m.layers} layers, hidden {m.hidden}, top-{m.top_k} of {m.num_experts} "
        f"experts of {m.intermediate}, weights: {options.weights}\n"
        f"load          {args.load} requests, {concurrency} at a time"
    )


def server_command(args: argparse.Namespace, options: Options) -> list[str]:
    """The program that serves with these options on a free port."""
    m = options.model
    values = {
        "ranks": args.ranks, "port": 0, "weights": options.weights, "steps": m.steps,
        "hidden": m.hidden,
        "layers": m.layers, "heads": m.heads, "experts": m.num_experts, "top-k": m.top_k,
        "intermediate": m.intermediate, "context": m.context, "slots": options.slots,
        "prefill-tokens": options.prefill_tokens, "queue": options.queue,
        "drain-s": options.drain_s, "slow-rank": options.slow_rank, "slow-ms": options.slow_ms,
    }  # fmt: skip
    program = Path(__file__).with_name("serve_moe.py")
    return [sys.executable, str(program), *(f"--{name}={value}" for name, value in values.items())]


def place_of(server: subprocess.Popen[str]) -> tuple[str, int]:
    """The device of its model and the port where it listens, once the server says so.

    Raises:
        RuntimeError: it ended before.
    """
    assert server.stdout is not None
    for line in server.stdout:
        if found := re.match(r"listening on http://.*:(\d+), model on (.+)", line):
            return found[2], int(found[1])
    raise RuntimeError(f"the server ended with exit code {server.wait()} before it listened")


async def clients(args: argparse.Namespace, port: int, concurrency: int) -> Report:
    """Sends all requests, as many at a time as there are clients."""
    generator = random.Random(0)
    bodies = iter([body(generator, args.prompt_bytes, args.max_tokens) for _ in range(args.load)])
    report, begin = Report(), time.monotonic()

    async def client() -> None:
        for fields in bodies:
            await attempt(port, fields, report)

    async def progress() -> None:
        while True:
            await asyncio.sleep(PROGRESS_S)
            ended = report.answered + report.failures.total()
            print(f"  {ended} after {time.monotonic() - begin:.0f} s", file=sys.stderr)

    showing = asyncio.create_task(progress())
    await asyncio.gather(*(client() for _ in range(concurrency)))
    report.seconds = time.monotonic() - begin
    showing.cancel()
    return report


def body(generator: random.Random, prompt: int, tokens: int) -> dict[str, Any]:
    """A random request; lengths from half to one and a half times the means."""
    length = generator.randint(max(prompt // 2, 1), prompt * 3 // 2)
    text = "".join(chr(generator.randint(32, 126)) for _ in range(length))
    most = generator.randint(max(tokens // 2, 1), tokens * 3 // 2)
    return {"prompt": text, "max_tokens": most, "stream": True}


async def attempt(port: int, fields: dict[str, Any], report: Report) -> None:
    """One request, whose failure the report counts."""
    try:
        await asyncio.wait_for(request(port, fields, report), REQUEST_S)
    except (OSError, ValueError, asyncio.TimeoutError, EOFError) as error:
        report.failures[f"{type(error).__name__}: {error}"] += 1


async def request(port: int, fields: dict[str, Any], report: Report) -> None:
    """One request and its answer.

    Raises:
        ValueError: the answer is not what it must be.
    """
    begin = time.monotonic()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        data = json.dumps(fields).encode()
        writer.write(b"POST /generate HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n%s"
                     % (len(data), data))  # fmt: skip
        status = (await reader.readuntil(b"\r\n\r\n")).split(b" ", 2)[1]
        if status != b"200":
            raise ValueError(f"status {status.decode()}: {(await reader.read()).decode().strip()}")
        times = [time.monotonic() async for event in events(reader) if "token" in event]
    finally:
        writer.close()
    if len(times) != fields["max_tokens"]:
        raise ValueError(f"{len(times)} tokens instead of {fields['max_tokens']}")
    report.answered += 1
    report.tokens += len(times)
    report.first.append(times[0] - begin)
    report.between += [after - before for before, after in itertools.pairwise(times)]
    report.whole.append(time.monotonic() - begin)


async def events(reader: asyncio.StreamReader) -> Any:
    """The server-sent events of an answer, up to the last one.

    Raises:
        ValueError: the answer ends before it, or reports an error.
    """
    async for line in reader:
        if line == b"data: [DONE]\n":
            return
        if line.startswith(b"data: "):
            event = json.loads(line[6:])
            if "error" in event:
                raise ValueError(event["error"])
            yield event
    raise ValueError("the answer ended early")
