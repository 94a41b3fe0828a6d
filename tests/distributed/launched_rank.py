"""A rank that torchrun starts: takes steps from its command line, and prints a line for each.

    python -m torch.distributed.run ... -m tests.distributed.launched_rank FOLDER STEP...

Files in FOLDER tell ranks when to go on.
"""

from __future__ import annotations

import dataclasses
import itertools
import random
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

import fanfold
from fanfold.config import Config
from fanfold.deep_ep import Buffer
from fanfold.group import as_group
from fanfold.launch import join
from fanfold.memory.hosts import find_hosts
from tests.distributed import routings, test_high_throughput, test_low_latency
from tests.distributed.layers import Shape, good_call, works

BOUND_S = 100.0
LOST_AFTER_S = 4.0
WIDE = Shape(num_experts=12, top_k=3, hidden=512, max_tokens=64)
STREAMED = dataclasses.replace(WIDE, mode="high_throughput")


def say(text: str) -> None:
    """One write for each line: ranks share a log."""
    sys.stdout.write(f"rank {dist.get_rank()} {text}\n")
    sys.stdout.flush()


def await_file(path: Path) -> None:
    deadline = time.monotonic() + BOUND_S
    while not path.exists():
        assert time.monotonic() < deadline, f"no {path.name} within {BOUND_S:.0f} s"
        time.sleep(0.02)


def low_latency(group: dist.ProcessGroup) -> None:
    rank, ranks = as_group(group).rank, as_group(group).size
    case = test_low_latency.Case(
        ranks=ranks,
        experts_per_rank=5,
        top_k=4,
        hidden=144,
        tokens=tuple((11, 0, 7, 16)[r % 4] for r in range(ranks)),
        max_tokens=16,
        dispatch_dtype="bf16",
        scale_format="float32",
        routing="spread",
        weighted=True,
        logfmt=False,
        seed=0,
    )
    found = test_low_latency._run(group, case)
    sources = [test_low_latency._tokens(case, peer) for peer in range(ranks)]
    test_low_latency._check_dispatch(case, sources, found, rank)
    expected, _ = test_low_latency._expected_out(case, sources[rank])
    assert test_high_throughput.same_bits(found["out"], expected.bfloat16())


def high_throughput(group: dist.ProcessGroup, host: tuple[int, ...]) -> None:
    routings.PLACED[:] = host
    numbers = random.Random(len(host))
    cases = [routings.random_case(numbers, len(host)) for _ in range(2)]
    assert test_high_throughput.run_cases(group, cases) == 2


def deep_ep(group: dist.ProcessGroup, host: tuple[int, ...]) -> None:
    """Each token comes back as the sum of its copies: on the own host in float32, on each other
    host rounded once."""
    rank, ranks = as_group(group).rank, as_group(group).size
    call = good_call(Shape(num_experts=4 * ranks, top_k=3, hidden=64), rank)
    buffer = Buffer(group, 1 << 20, explicitly_destroy=True)
    try:
        per_rank, per_host, per_expert, in_rank, _ = buffer.get_dispatch_layout(
            call.topk_idx, 4 * ranks
        )
        rows, _, _, _, handle, _ = buffer.dispatch(
            call.x,
            topk_idx=call.topk_idx,
            topk_weights=call.topk_weights,
            num_tokens_per_rank=per_rank,
            num_tokens_per_rdma_rank=per_host,
            is_token_in_rank=in_rank,
            num_tokens_per_expert=per_expert,
        )
        out, _, _ = buffer.combine(rows, handle)
    finally:
        buffer.destroy()
    total = torch.zeros(call.x.shape, dtype=torch.float32, device="cpu")
    for there in dict.fromkeys((host[rank], *host)):
        copies = in_rank[:, [h == there for h in host]].sum(1, keepdim=True)
        part = call.x.float() * copies
        total += part if there == host[rank] else part.bfloat16().float()
    assert test_high_throughput.same_bits(out, total.bfloat16())


def check(group: dist.ProcessGroup, folder: Path) -> None:
    """Both modes and the face of DeepEP, bit for bit."""
    hosts = find_hosts(as_group(group), Config.resolve())
    low_latency(group)
    high_throughput(group, hosts.host)
    deep_ep(group, hosts.host)
    say(f"right on hosts {list(hosts.host)}")


def until_file(group: dist.ProcessGroup, folder: Path) -> None:
    """Rounds of both modes, all right, until the file ``enough`` is there."""
    with WIDE.open(group) as low, STREAMED.open(group) as high:
        rounds, enough = 0, torch.zeros(1, dtype=torch.float32, device="cpu")
        while not enough:
            assert works(low, WIDE)
            assert works(high, STREAMED)
            rounds += 1
            say(f"has done {rounds} rounds")
            enough.fill_((folder / "enough").exists())
            dist.broadcast(enough, 0)
    say("right to the end")


def until_failure(group: dist.ProcessGroup, folder: Path, mode: str, name: str) -> None:
    """Rounds of one mode until a call fails, which must be because of a rank elsewhere."""
    ranks, rank = as_group(group).size, as_group(group).rank
    host = find_hosts(as_group(group), Config.resolve()).host
    ep = {"low_latency": WIDE, "high_throughput": STREAMED}[mode].open(
        group, config=Config.resolve(timeout_s=LOST_AFTER_S)
    )
    call = good_call(WIDE, rank)
    try:
        for number in itertools.count():
            ep.combine((received := ep.dispatch(*vars(call).values())).tokens, received)
            if number == 2:
                say(f"is in {name}")
    except (fanfold.PeerTimeout, fanfold.TransportError) as error:
        ep.close()
        elsewhere = 0 <= error.peer < ranks and host[error.peer] != host[rank]
        where = "elsewhere" if elsewhere else "here"
        say(f"lost in {name} a peer {where}: {type(error).__name__}: {error}")
    (folder / f"{name}.{rank}").touch()
    # torchrun ends the ranks of a host when the first one fails.
    for peer in (peer for peer in range(ranks) if host[peer] == host[rank]):
        await_file(folder / f"{name}.{peer}")


def run(group: dist.ProcessGroup, folder: Path, step: str) -> None:
    word, *rest = step.split(":")
    if word == "await":
        await_file(folder / rest[0])
    elif word == "fail":
        raise SystemExit(3)
    elif word == "until_failure":
        until_failure(group, folder, *rest)
    else:
        {"check": check, "until_file": until_file}[word](group, folder)


def main() -> None:
    torch.set_num_threads(1)
    group = join()
    assert group is not None
    for step in sys.argv[2:]:
        run(group, Path(sys.argv[1]), step)
    say("is done")


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
