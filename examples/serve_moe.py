"""An inference server for a byte-level MoE language model, its experts spread over ranks.

    python examples/serve_moe.py --ranks 2 --port 8080            # trains as `fanfold demo`, serves
    curl -N -d '{"prompt": "The ", "stream": true}' http://127.0.0.1:8080/generate

Every rank has a copy of attention and router, its part of the experts, and slots with a KV cache.
Rank 0 takes requests and gives each one a slot of a rank. Every step, rank 0 broadcasts a
:class:`Plan`; new prompts pass the model through ``fanfold.HighThroughput``, then all sequences
that were there before grow by a byte through ``fanfold.LowLatency``. So requests join and leave
the batch at every step. docs/serving.md explains the choices; ``--load`` starts load_moe.py.
"""

from __future__ import annotations

import argparse
import asyncio
import codecs
import contextlib
import importlib.util
import json
import signal
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from serve_moe_http import (
    MOST_HEAD,
    Refused,
    flush,
    head_of,
    read_request,
    send,
    send_event,
    send_json,
)
from serve_moe_model import Engine, Options, read_checkpoint, save, train

import fanfold
from fanfold.cli.demo_model import DemoSettings
from fanfold.config import Config
from fanfold.errors import ArgumentError, FanfoldError
from fanfold.geometry import check_integer
from fanfold.launch import LaunchError, RankFailure, RankPool, join

FOREVER_S = 1e8
GRACE_S = 5.0  # that other ranks have to end, and rank 0 to answer, once a rank has failed
HEARTBEAT_S = 0.25  # between empty steps, so that ranks notice the end of rank 0
SIZES = {"experts": "num_experts", "top-k": "top_k"}
LOAD = {"hidden": 1024, "experts": 512, "top-k": 22, "intermediate": 16, "layers": 2, "heads": 8}
NOTHING = -1  # in a rank's answer: the slot got no byte in this step


# ---- requests, and which of them a step takes ---------------------------------------------------


@dataclass(frozen=True)
class Plan:
    """One step of all ranks: for each rank its new prompts, and its slots to decode."""

    prefill: list[list[tuple[int, bytes]]]
    decode: list[list[int]]
    stop: bool = False


@dataclass(eq=False)
class Request:
    """One sequence. ``events`` gets its bytes, then None, or the reason why there are no more."""

    prompt: bytes
    max_tokens: int
    events: asyncio.Queue[int | str | None] = field(default_factory=asyncio.Queue)
    generated: int = 0
    cancelled: bool = False


class Scheduler:
    """Rank 0's requests. :meth:`submit` may be called from any thread, all else from the engine's.

    Attributes:
        draining: when SIGTERM came; None before.
    """

    def __init__(self, ranks: int, options: Options, deliver: Callable[..., None]) -> None:
        self.options, self._deliver = options, deliver
        self.waiting: deque[Request] = deque()
        self.slots: list[dict[int, Request]] = [{} for _ in range(ranks)]
        self.draining: float | None = None
        self.counts: Counter[str] = Counter()
        self._changed = threading.Condition()

    @property
    def active(self) -> int:
        """Sequences that have a slot."""
        return sum(map(len, self.slots))

    def submit(self, request: Request) -> None:
        """Has the request wait for a slot.

        Raises:
            Refused: with 503.
        """
        with self._changed:
            if self.draining is not None:
                raise Refused(503, "the server is shutting down")
            if len(self.waiting) >= self.options.queue:
                said = f"{len(self.waiting)} requests wait already; try again later"
                raise Refused(503, said, **{"Retry-After": "1"})
            self.waiting.append(request)
            self._changed.notify()

    def plan(self) -> Plan:
        """The next step; an empty one if nothing has come for :data:`HEARTBEAT_S`."""
        with self._changed:
            ready = lambda: self.waiting or self.active or self.draining is not None  # noqa: E731
            self._changed.wait_for(ready, HEARTBEAT_S)
            self._drop_cancelled()
            if self.draining is not None and self._drained(self.draining):
                return Plan([], [], stop=True)
            decode = [sorted(slots) for slots in self.slots]
            return Plan(self._admit(), decode)

    def _drained(self, since: float) -> bool:
        if time.monotonic() - since > self.options.drain_s:
            self.fail("the server was shut down before the request had ended")
        return not self.waiting and not self.active

    def _drop_cancelled(self) -> None:
        for slots in self.slots:
            for slot in [slot for slot, request in slots.items() if request.cancelled]:
                del slots[slot]
                self.counts["cancelled"] += 1
        kept = [request for request in self.waiting if not request.cancelled]
        self.counts["cancelled"] += len(self.waiting) - len(kept)
        self.waiting = deque(kept)

    def _admit(self) -> list[list[tuple[int, bytes]]]:
        """Gives waiting requests, in order, slots of the ranks that have most of them free."""
        admitted: list[list[tuple[int, bytes]]] = [[] for _ in self.slots]
        room = [self.options.prefill_tokens] * len(self.slots)
        while self.waiting:
            request = self.waiting[0]
            fits = [
                rank
                for rank, slots in enumerate(self.slots)
                if len(slots) < self.options.slots and room[rank] >= len(request.prompt)
            ]
            if not fits:
                break
            rank = min(fits, key=lambda rank: (len(self.slots[rank]), -room[rank]))
            slot = min(set(range(self.options.slots)) - set(self.slots[rank]))
            self.slots[rank][slot] = self.waiting.popleft()
            admitted[rank].append((slot, request.prompt))
            room[rank] -= len(request.prompt)
        return admitted

    def take(self, tokens: list[list[int]]) -> None:
        """Hands out what a step made: for each rank and slot a byte or :data:`NOTHING`."""
        events: list[tuple[Request, int | str | None]] = []
        for slots, made in zip(self.slots, tokens, strict=True):
            for slot, request in list(slots.items()):
                if made[slot] == NOTHING:
                    continue
                events.append((request, made[slot]))
                request.generated += 1
                if request.generated == request.max_tokens:
                    events.append((request, None))
                    del slots[slot]
        self.counts["tokens"] += sum(token is not None for _, token in events)
        self._deliver(events)

    def fail(self, reason: str) -> None:
        """Ends every request with ``reason``; later ones are refused."""
        with self._changed:
            self.draining = self.draining or time.monotonic()
            requests = [*self.waiting, *(r for slots in self.slots for r in slots.values())]
            self.waiting.clear()
            for slots in self.slots:
                slots.clear()
        self._deliver([(request, reason) for request in requests])


# ---- HTTP ---------------------------------------------------------------------------------------


def parse_body(body: bytes, options: Options) -> tuple[Request, bool]:
    """The sequence that a POST to /generate asks for, and whether it is to be streamed."""
    try:
        fields = json.loads(body)
        if not isinstance(fields, dict):
            raise ValueError("it is no object")
    except (ValueError, RecursionError) as error:
        raise Refused(400, f"the body is no JSON object: {error}") from None
    if unknown := sorted(set(fields) - {"prompt", "max_tokens", "stream"}):
        raise Refused(400, f"unknown fields {unknown}: prompt, max_tokens and stream are known")
    prompt, stream = fields.get("prompt"), fields.get("stream", False)
    if not isinstance(prompt, str) or not isinstance(stream, bool):
        raise Refused(400, "prompt must be a string, and stream true or false")
    try:
        text = prompt.encode()
    except UnicodeEncodeError:
        raise Refused(400, "prompt has a lone surrogate, which has no UTF-8") from None
    most = min(options.model.context - 1, options.prefill_tokens)
    if not 1 <= len(text) <= most:
        raise Refused(400, f"prompt has {len(text)} bytes of UTF-8; 1 to {most} are possible")
    # The last byte is returned, and never read.
    room = options.model.context - len(text) + 1
    tokens = fields.get("max_tokens", min(16, room))
    if isinstance(tokens, bool) or not isinstance(tokens, int) or not 1 <= tokens <= room:
        said = f"max_tokens is {tokens!r}; 1 to {room} fit after {len(text)} bytes of prompt"
        raise Refused(400, said)
    return Request(text, tokens), stream


class Frontend:
    """Rank 0's HTTP server, in a thread of its own with an event loop."""

    def __init__(self, options: Options, engine: Engine, ranks: int) -> None:
        self.options = options
        self.scheduler = Scheduler(ranks, options, self.deliver)
        self._fanfold_metrics = metrics_text(engine)
        self._handlers: set[asyncio.Task[None]] = set()
        self._ready: Future[int] = Future()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._main()), daemon=True)
        self._thread.start()
        port = self._ready.result()
        print(f"listening on http://{options.host}:{port}, model on {engine.device}", flush=True)

    async def _main(self) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        try:
            server = await asyncio.start_server(
                self._handle, self.options.host, self.options.port, limit=MOST_HEAD, backlog=1024
            )
        except OSError as error:
            self._ready.set_exception(error)
            return
        self._ready.set_result(server.sockets[0].getsockname()[1])
        await self._stop.wait()
        server.close()
        if self._handlers:
            await asyncio.wait(self._handlers, timeout=5.0)

    def close(self) -> None:
        """Ends the server when the answers under way have been written, at most 5 s later."""
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(10.0)

    def deliver(self, events: list[tuple[Request, int | str | None]]) -> None:
        """Wakes the handlers of these requests; from any thread."""

        def put() -> None:
            for request, event in events:
                request.events.put_nowait(event)

        self._loop.call_soon_threadsafe(put)

    async def _handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._handlers.add(task)
        try:
            await self._answer(reader, writer)
        except (OSError, asyncio.TimeoutError):  # the client is gone, or does not read
            pass
        finally:
            self._handlers.discard(task)
            writer.close()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        status = 200
        try:
            method, path, body = await read_request(reader)
            allowed = {"/generate": "POST", "/health": "GET", "/metrics": "GET"}.get(path)
            if allowed is None:
                raise Refused(404, f"no {path[:80]}: /generate, /health and /metrics are there")
            if method != allowed:
                raise Refused(405, f"{path} takes {allowed}", Allow=allowed)
            if path == "/health":
                await send_json(writer, 200, self._health())
            elif path == "/metrics":
                await send(writer, 200, self._metrics().encode(), "text/plain; version=0.0.4")
            else:
                await self._generate(body, reader, writer)
        except Refused as refusal:
            status = refusal.status
            await send_json(writer, status, {"error": str(refusal)}, refusal.headers)
        finally:
            self.scheduler.counts[f"status {status}"] += 1

    async def _generate(
        self, body: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        request, stream = parse_body(body, self.options)
        self.scheduler.submit(request)
        watching = asyncio.create_task(watch(reader, request))
        try:
            await (stream_answer if stream else whole_answer)(writer, request)
        finally:
            request.cancelled = True  # changes nothing if it has ended
            watching.cancel()

    def _health(self) -> dict[str, Any]:
        scheduler = self.scheduler
        if scheduler.draining is not None:
            raise Refused(503, "the server is shutting down")
        return {"status": "ok", "active": scheduler.active, "waiting": len(scheduler.waiting)}

    def _metrics(self) -> str:
        scheduler, lines = self.scheduler, []
        for name, count in sorted(dict(scheduler.counts).items()):
            kind, _, status = name.partition(" ")
            label = f'{{status="{status}"}}' if status else ""
            lines.append(f"serve_{'answers' if status else kind}_total{label} {count}")
        lines += [f"serve_active {scheduler.active}", f"serve_waiting {len(scheduler.waiting)}"]
        return self._fanfold_metrics() + "\n".join(lines) + "\n"


async def watch(reader: asyncio.StreamReader, request: Request) -> None:
    """Ends the request's events when the client closes its connection, or its half of it."""
    with contextlib.suppress(OSError):
        while await reader.read(4096):
            pass
    request.events.put_nowait("the client is gone")


async def whole_answer(writer: asyncio.StreamWriter, request: Request) -> None:
    """Writes all bytes as one JSON object when the last one is there."""
    tokens: list[int] = []
    while isinstance(event := await request.events.get(), int):
        tokens.append(event)
    if event is not None:
        raise Refused(503, event)
    text = bytes(tokens).decode(errors="replace")
    await send_json(writer, 200, {"text": text, "tokens": tokens, "finish_reason": "length"})


async def stream_answer(writer: asyncio.StreamWriter, request: Request) -> None:
    """Writes each byte as a server-sent event as soon as it is there."""
    event = await request.events.get()
    if isinstance(event, str):
        raise Refused(503, event)  # nothing was sent yet, so the status can still say it
    writer.write(head_of(200, "text/event-stream", {"Cache-Control": "no-cache"}))
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    while isinstance(event, int):
        await send_event(writer, {"token": event, "text": decoder.decode(bytes([event]))})
        event = await request.events.get()
    if isinstance(event, str):
        await send_event(writer, {"error": event})
        return
    await send_event(writer, {"text": decoder.decode(b"", True), "finish_reason": "length"})
    await flush(writer, b"data: [DONE]\n\n")


def fanfold_registry(engine: Engine) -> Any:
    """Fanfold's metrics of this rank, as ``prometheus_client`` takes them."""
    import prometheus_client

    registry = prometheus_client.CollectorRegistry()
    layers = {"prefill": engine.prefill_ep, "decode": engine.decode_ep}
    registry.register(fanfold.metrics.collector(**layers))
    return registry


def metrics_text(engine: Engine) -> Callable[[], str]:
    """The same as Prometheus's text; "" without prometheus_client."""
    try:
        from prometheus_client import generate_latest
    except ImportError:
        return lambda: ""
    registry = fanfold_registry(engine)
    return lambda: generate_latest(registry).decode()


@contextlib.contextmanager
def metrics_served(engine: Engine, options: Options, rank: int) -> Iterator[None]:
    """Within it this rank serves Fanfold's metrics at its own port, if that is asked for."""
    if options.metrics_port is None:
        yield
        return
    from prometheus_client import start_http_server

    port = options.metrics_port + rank if options.metrics_port else 0
    try:
        server, thread = start_http_server(port, options.host, fanfold_registry(engine))
    except OSError as error:
        bound = f"such that rank {rank} can listen at port {port} ({error.strerror})"
        raise ArgumentError("--metrics-port", options.metrics_port, bound) from error
    print(f"rank {rank}: metrics on http://{options.host}:{server.server_port}", flush=True)
    try:
        yield
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


# ---- ranks --------------------------------------------------------------------------------------


def serve(group: dist.ProcessGroup, options: Options) -> None:
    """What every rank runs until rank 0 plans the end. Collective."""
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    model, state = options.model, None
    if options.weights not in ("train", "random"):
        model, state = read_checkpoint(Path(options.weights))
    options = replace(options, model=replace(model, ranks=ranks))
    # Rank 0 alone decides about the end, or ranks would leave in different steps.
    signal.signal(signal.SIGTERM, signal.SIG_DFL if rank == 0 else signal.SIG_IGN)
    engine = Engine(group, options)
    try:
        if state is not None:
            engine.model.load_state_dict(state)
        elif options.weights == "train":
            train(engine, group, options.model)
        if options.save:
            save(engine, options.model, Path(options.save))
        limit = timedelta(seconds=Config.resolve().timeout_s)
        control = dist.new_group(backend="gloo", timeout=limit)
        with metrics_served(engine, options, rank):
            (lead if rank == 0 else follow)(engine, control, options)
    finally:
        engine.close()


def lead(engine: Engine, control: dist.ProcessGroup, options: Options) -> None:
    """Rank 0: takes requests and plans steps."""
    frontend = Frontend(options, engine, dist.get_world_size(control))
    scheduler = frontend.scheduler

    def drain(number: int, frame: object) -> None:
        scheduler.draining = scheduler.draining or time.monotonic()

    signal.signal(signal.SIGTERM, drain)
    try:
        while not (plan := scheduler.plan()).stop:
            scheduler.take(step(engine, control, options, plan))
        step(engine, control, options, plan)
    except BaseException as error:
        scheduler.fail(f"the server failed: {type(error).__name__}")
        raise
    finally:
        frontend.close()


def follow(engine: Engine, control: dist.ProcessGroup, options: Options) -> None:
    """All other ranks: do what rank 0 planned."""
    while step(engine, control, options, None):
        pass


def step(
    engine: Engine, control: dist.ProcessGroup, options: Options, planned: Plan | None
) -> list[list[int]]:
    """One step of all ranks by rank 0's plan. Collective.

    Returns:
        On rank 0 for each rank and slot the new byte, or :data:`NOTHING`. On others an empty list
        means that rank 0 planned the end.
    """
    rank, box = dist.get_rank(control), [planned]
    dist.broadcast_object_list(box, group=control, group_src=0)
    plan = box[0]
    assert plan is not None
    if plan.stop:
        return []
    if rank == options.slow_rank and (any(plan.prefill) or any(plan.decode)):
        time.sleep(options.slow_ms / 1e3)
    made = torch.full((options.slots,), NOTHING, dtype=torch.int64, device="cpu")
    if any(plan.prefill):
        engine.prefill(plan.prefill[rank])
    if any(plan.decode):
        engine.decode(plan.decode[rank])
    slots = [slot for slot, _ in plan.prefill[rank]] + plan.decode[rank]
    made[slots] = engine.read(slots)
    parts = [torch.empty_like(made) for _ in plan.decode] if rank == 0 else None
    dist.gather(made, parts, group=control, group_dst=0)
    return [part.tolist() for part in parts] if parts is not None else [[]]


def run(ranks: int, options: Options) -> None:
    """Starts the ranks, or is one of those that torchrun, mpirun or srun started, and serves.

    Raises:
        LaunchError: a rank failed or was killed.
    """
    group = join()
    if group is not None:
        serve(group, options)
        del group
        dist.destroy_process_group()
        return
    with RankPool(ranks, timeout_s=FOREVER_S) as pool:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: pool.kill(0, signal.SIGTERM))
        pool.submit(serve, [(options,)] * ranks)
        outcomes = pool.collect(grace_s=GRACE_S)
        if failures := [each for each in outcomes if isinstance(each, RankFailure)]:
            raise LaunchError(failures)
    print("all ranks have ended")


# ---- the command line ---------------------------------------------------------------------------


def parser() -> argparse.ArgumentParser:
    """The options."""
    made = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add, model = made.add_argument, DemoSettings()
    add("--ranks", type=int, default=2, help="processes (default %(default)s)")
    add("--host", default="127.0.0.1", help="where rank 0 listens (default %(default)s)")
    add("--port", type=int, default=8080, help="0: a free one (default %(default)s)")
    add("--metrics-port", type=int, metavar="P",
        help="rank r serves its metrics at port P + r; 0: a free one (default: none)")  # fmt: skip
    add("--weights", help="train, random, or a file of --save (default: train; random with --load)")
    add("--save", default="", metavar="FILE", help="write a checkpoint before serving")
    add("--steps", type=int, default=model.steps, help="of training (default %(default)s)")
    for name in ("hidden", "layers", "heads", "experts", "top-k", "intermediate", "context"):
        default = getattr(model, SIZES.get(name, name))
        said = (
            f"(default {default}; {LOAD[name]} in a load test)"
            if name in LOAD
            else f"(default {default})"
        )
        add(f"--{name}", type=int, metavar="N", help=said)
    add("--slots", type=int, default=32, help="sequences decoded by a rank (default %(default)s)")
    add("--prefill-tokens", type=int, default=256,
        help="bytes of prompts that a rank takes in a step (default %(default)s)")  # fmt: skip
    add("--queue", type=int, default=1024, help="requests that may wait (default %(default)s)")
    add("--drain-s", type=float, default=30.0,
        help="seconds for requests to end after SIGTERM (default %(default)s)")  # fmt: skip
    add("--slow-rank", type=int, default=-1, help="a rank that sleeps before every step")
    add("--slow-ms", type=float, default=5.0, help="how long it sleeps (default %(default)s)")
    add("--load", type=int, metavar="REQUESTS", help="test: start a server, send it requests")
    add("--concurrency", type=int, default=0, help="of the test (default: all slots of all ranks)")
    add("--prompt-bytes", type=int, default=16, help="of the test, a mean (default %(default)s)")
    add("--max-tokens", type=int, default=8, help="of the test, a mean (default %(default)s)")
    add("--json", type=Path, metavar="FILE", help="append the test's report to FILE as one line")
    return made


def options_of(args: argparse.Namespace) -> Options:
    """The options of the server.

    Raises:
        ArgumentError: one is out of its bound.
    """
    sizes: dict[str, int] = {}
    for name in ("hidden", "layers", "heads", "experts", "top-k", "intermediate", "context"):
        value = getattr(args, name.replace("-", "_"))
        if value is None and args.load is not None:
            value = LOAD.get(name)
        if value is not None:
            check_integer(f"--{name}", value, 1, 1 << 20)
            sizes[SIZES.get(name, name)] = value
    model = DemoSettings(ranks=args.ranks, steps=args.steps, **sizes)
    if model.hidden % model.heads:
        raise ArgumentError("--heads", model.heads, f"a divisor of the hidden size {model.hidden}")
    for name in ("slots", "prefill-tokens", "queue", "steps"):
        check_integer(f"--{name}", getattr(args, name.replace("-", "_")), 1, 1 << 20)
    if args.metrics_port is not None:
        check_integer("--metrics-port", args.metrics_port, 0, 65536 - args.ranks)
        if importlib.util.find_spec("prometheus_client") is None:
            bound = "used where prometheus_client is installed: pip install 'fanfold[prometheus]'"
            raise ArgumentError("--metrics-port", args.metrics_port, bound)
    weights = args.weights or ("train" if args.load is None else "random")
    if weights not in ("train", "random") and not Path(weights).is_file():
        raise ArgumentError("--weights", weights, "train, random, or a file that --save wrote")
    return Options(
        model, weights, args.save, args.slots, args.prefill_tokens, args.queue, args.host,
        args.port, args.metrics_port, args.drain_s, args.slow_rank, args.slow_ms,
    )  # fmt: skip


def main() -> int:
    """Serves until SIGTERM or Ctrl-C; 1 if a rank failed or a request of a load test did."""
    args = parser().parse_args()
    try:
        options = options_of(args)
        if args.load is not None:
            import load_moe

            return load_moe.run(args, options)
        run(args.ranks, options)
    except FanfoldError as error:
        print(f"serve_moe: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
