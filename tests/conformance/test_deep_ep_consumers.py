"""Sequences of calls as vLLM, SGLang and Megatron-LM make them, on a layer with known results."""

from __future__ import annotations

import gc
import os
import random
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from fanfold.deep_ep import (
    Buffer,
    Config,
    EventHandle,
    EventOverlap,
    get_logical_domain_size,
    get_physical_domain_size,
)
from fanfold.errors import ArgumentError, FanfoldError, UsageError
from fanfold.group import as_group
from fanfold.launch import RankPool
from tests import nvfp4
from tests.conformance import deep_ep_reference as reference
from tests.conformance.deep_ep_reference import Case, inputs
from tests.conformance.test_deep_ep_high_throughput import check_received, good_dispatch
from tests.conformance.test_deep_ep_low_latency import (
    FORMATS,
    GLOBAL_SCALE,
    check_dispatched,
    outputs,
)
from tests.environment import environment
from tests.waiting import wait_until

pytestmark = pytest.mark.placements("threads")

Pools = Callable[[int], RankPool]

CASE = Case(experts=8, top_k=3, hidden=128, tokens=(6, 9, 4, 8), seed=11)


@pytest.fixture(autouse=True)
def _defaults() -> Any:
    """Buffer.num_sms is of the class; what a test sets must not reach the next one."""
    before = Buffer.num_sms
    yield
    Buffer.num_sms = before


def matrix(case: Case, expert: int) -> torch.Tensor:
    """The one linear map of an expert."""
    generator = torch.Generator().manual_seed(expert)
    return (
        torch.randn(
            (case.hidden, case.hidden), generator=generator, dtype=torch.float32, device="cpu"
        )
        / case.hidden**0.5
    )


def dense(case: Case, x: torch.Tensor, idx: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """The layer without expert parallelism, in fp32."""
    out = torch.zeros((len(x), case.hidden), dtype=torch.float32, device="cpu")
    for expert in range(case.experts):
        share = (weights * (idx == expert)).sum(1, keepdim=True)
        out = out + share * (x.float() @ matrix(case, expert))
    return out


def close(found: torch.Tensor, wanted: torch.Tensor, part: float) -> bool:
    """Whether the error is at most this part of the size, in norms."""
    return bool((found.float() - wanted).norm() <= part * wanted.norm() + 1e-6)


def shared(group: dist.ProcessGroup, *arguments: Any, **named: Any) -> Buffer:
    with environment(FANFOLD_TIMEOUT_S="20"):
        return Buffer(group, *arguments, **named)


# ---- vLLM ---------------------------------------------------------------------------------------


def _vllm_prefill(group: dist.ProcessGroup) -> None:
    rank, case = as_group(group).rank, CASE
    mine = inputs(case, rank)
    buffer = shared(
        group=group, num_nvl_bytes=1 << 30, num_rdma_bytes=0, low_latency_mode=False,
        num_qps_per_rank=1,
    )  # fmt: skip
    Buffer.set_num_sms(20)
    with pytest.raises(UsageError, match="explicitly_destroy"):
        buffer.destroy()
    for asynchronous in (False, True):
        per_rank, per_host, per_expert, in_rank, event = buffer.get_dispatch_layout(
            topk_idx=mine.topk_idx, num_experts=case.experts, previous_event=None,
            async_finish=False, allocate_on_comm_stream=False,
        )  # fmt: skip
        x, idx, weights, counts, handle, event = buffer.dispatch(
            x=mine.x, handle=None, num_tokens_per_rank=per_rank,
            num_tokens_per_rdma_rank=per_host, is_token_in_rank=in_rank,
            num_tokens_per_expert=per_expert, topk_idx=mine.topk_idx,
            topk_weights=mine.topk_weights, expert_alignment=1,
            config=Buffer.get_dispatch_config(case.ranks), previous_event=None,
            async_finish=asynchronous, allocate_on_comm_stream=False,
        )  # fmt: skip
        assert (event.event is not None) == asynchronous
        if event.event is not None:
            event.current_stream_wait()
        # vLLM turns local ids into global ones, with a foreign expert for those elsewhere.
        everywhere = torch.where(idx == -1, case.experts, idx + rank * case.local)
        y = dense(case, x, everywhere, weights).to(torch.bfloat16)
        out, none, event = buffer.combine(
            x=y, handle=handle, topk_weights=None, config=Buffer.get_combine_config(case.ranks),
            previous_event=None, async_finish=asynchronous, allocate_on_comm_stream=False,
        )  # fmt: skip
        if event.event is not None:
            event.current_stream_wait()
        assert none is None
        assert sum(counts) == int((idx >= 0).sum())
        assert close(out, dense(case, mine.x, mine.topk_idx, mine.topk_weights), 0.01)


def test_vllm_prefill(pools: Pools) -> None:
    pools(4).run(_vllm_prefill)


def _vllm_decode(group: dist.ProcessGroup) -> None:
    rank, case, max_tokens = as_group(group).rank, CASE, 16
    mine = inputs(case, rank)
    nbytes = Buffer.get_low_latency_rdma_size_hint(
        num_max_dispatch_tokens_per_rank=max_tokens, hidden=case.hidden, num_ranks=case.ranks,
        num_experts=case.experts,
    )  # fmt: skip
    buffer = shared(
        group=group, num_nvl_bytes=1 << 30, num_rdma_bytes=nbytes, low_latency_mode=True,
        num_qps_per_rank=case.local, allow_nvlink_for_low_latency_mode=True, allow_mnnvl=False,
        explicitly_destroy=True, enable_shrink=False,
    )  # fmt: skip
    for form, options in FORMATS.items():
        four_bits = {name: options[name] for name in options if name.startswith(("use_nv", "x_"))}
        received, counts, handle, _, hook = buffer.low_latency_dispatch(
            mine.x, mine.topk_idx, max_tokens, case.experts,
            use_fp8=options.get("use_fp8", True), round_scale=options.get("round_scale", False),
            use_ue8m0=options.get("use_ue8m0", False), **four_bits,
            async_finish=False, return_recv_hook=True,
        )  # fmt: skip
        hook()
        if form == "nvfp4":
            # vLLM passes both on as they are; FlashInfer reads them by these orders of dimensions.
            received = received[0].permute(2, 0, 1), received[1].permute(5, 2, 4, 0, 1, 3)
        y = torch.empty(
            (case.local, case.ranks * max_tokens, case.hidden), dtype=torch.bfloat16, device="cpu"
        )
        for e in range(case.local):
            count = int(counts[e])
            if form == "nvfp4":
                scales = nvfp4.by_row(received[1], e, count, case.hidden // 16)
                x = nvfp4.dequantized(received[0][e, :count], scales, GLOBAL_SCALE)
            elif isinstance(received, tuple):
                scales = received[1][e, :count]
                if scales.dtype == torch.int32:  # one block, so one exponent
                    scales = torch.exp2(scales.float() - 127)
                x = reference.dequantized(received[0][e, :count], scales)
            else:
                x = received[e, :count].float()
            y[e, :count] = (x @ matrix(case, rank * case.local + e)).to(torch.bfloat16)
        out = torch.empty((case.tokens[rank], case.hidden), dtype=torch.bfloat16, device="cpu")
        _, _, hook = buffer.low_latency_combine(
            y, mine.topk_idx, mine.topk_weights, handle, async_finish=False, zero_copy=False,
            return_recv_hook=True, out=out,
        )  # fmt: skip
        hook()
        part = {"bf16": 0.01, "nvfp4": 0.25}.get(form, 0.06)
        assert close(out, dense(case, mine.x, mine.topk_idx, mine.topk_weights), part)
    buffer.destroy()


def test_vllm_decode(pools: Pools) -> None:
    pools(4).run(_vllm_decode)


# ---- SGLang: one Buffer for prefill and decode --------------------------------------------------


def _sglang(group: dist.ProcessGroup, seed: int) -> None:
    rank, case = as_group(group).rank, CASE
    nvl_bytes = rdma_bytes = 0
    tuned = {"num_sms": 16, "num_max_nvl_chunked_send_tokens": 12}
    for config in (Config(**tuned), Buffer.get_combine_config(case.ranks)):
        nvl_bytes = max(config.get_nvl_buffer_size_hint(case.hidden * 2, case.ranks), nvl_bytes)
        rdma_bytes = max(config.get_rdma_buffer_size_hint(case.hidden * 2, case.ranks), rdma_bytes)
    hint = Buffer.get_low_latency_rdma_size_hint(16, case.hidden, case.ranks, case.experts)
    buffer = shared(
        group, nvl_bytes, max(rdma_bytes, hint), low_latency_mode=True, num_qps_per_rank=24,
        allow_mnnvl=True, use_fabric=True,
    )  # fmt: skip
    assert (buffer.low_latency_mode, buffer.group_size, Buffer.num_sms) == (True, 4, 20)
    was_normal = True
    order = random.Random(seed)
    for round_ in range(16):
        draw = [order.randint(0, 16) for _ in range(case.ranks)]
        shape = Case(**{**vars(case), "tokens": tuple(draw), "seed": seed * 100 + round_})
        if order.random() < 0.5:
            _sglang_prefill(buffer, shape, rank, Config(**tuned))
            was_normal = True
            continue
        if was_normal:
            buffer.clean_low_latency_buffer(16, case.hidden, case.experts)
            was_normal = False
        _sglang_decode(buffer, shape, rank, hook=order.random() < 0.5)


def _sglang_prefill(buffer: Buffer, case: Case, rank: int, config: Config) -> None:
    mine = inputs(case, rank)
    previous = Buffer.capture()
    per_rank, per_host, per_expert, in_rank, previous = buffer.get_dispatch_layout(
        mine.topk_idx, case.experts, previous_event=previous, async_finish=True,
        allocate_on_comm_stream=previous is not None,
    )  # fmt: skip
    x, idx, weights, counts, handle, event = buffer.dispatch(
        mine.x, topk_idx=mine.topk_idx, topk_weights=mine.topk_weights,
        num_tokens_per_rank=per_rank, num_tokens_per_rdma_rank=per_host,
        is_token_in_rank=in_rank, num_tokens_per_expert=per_expert, previous_event=previous,
        async_finish=True, allocate_on_comm_stream=True, expert_alignment=128, config=config,
    )  # fmt: skip
    event.current_stream_wait()
    assert all(count % 128 == 0 for count in counts)
    everywhere = torch.where(idx == -1, case.experts, idx + rank * case.local)
    y = dense(case, x, everywhere, weights).to(torch.bfloat16)
    out, _, event = buffer.combine(
        y, handle, async_finish=True, previous_event=Buffer.capture(),
        allocate_on_comm_stream=True, config=config,
    )  # fmt: skip
    event.current_stream_wait()
    check_received(case, rank, (x, idx, weights))
    assert close(out, dense(case, mine.x, mine.topk_idx, mine.topk_weights), 0.01)


def _sglang_decode(buffer: Buffer, case: Case, rank: int, hook: bool) -> None:
    mine = inputs(case, rank)
    padded = Case(**{**vars(case), "tokens": case.tokens})
    result = buffer.low_latency_dispatch(
        mine.x, mine.topk_idx, 16, case.experts, use_fp8=False, round_scale=False,
        use_ue8m0=False, async_finish=not hook, return_recv_hook=hook,
    )  # fmt: skip
    result[4]() if hook else result[3].current_stream_wait()
    y = torch.zeros_like(result[0])
    capacity = case.ranks * case.max_tokens
    y[:, :capacity] = outputs(padded, rank, "bf16").nan_to_num()
    out, event, receive = buffer.low_latency_combine(
        x=y, topk_idx=mine.topk_idx, topk_weights=mine.topk_weights, handle=result[2],
        async_finish=not hook, return_recv_hook=hook,
    )  # fmt: skip
    receive() if hook else event.current_stream_wait()
    assert result[1].tolist() == [len(p.source_rank) for p in reference.packed(case, rank)]
    y_of = [outputs(case, peer, "bf16") for peer in range(case.ranks)]
    assert torch.equal(out, reference.weighted_sum(case, rank, y_of))


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_sglang_switches_between_modes(pools: Pools, seed: int) -> None:
    pools(4).run(_sglang, seed)


def _overlapped(group: dist.ProcessGroup) -> None:
    """A prefill between the halves of a decoding step."""
    rank, case = as_group(group).rank, CASE
    mine = inputs(case, rank)
    hint = Buffer.get_low_latency_rdma_size_hint(case.max_tokens, case.hidden, 4, case.experts)
    buffer = shared(group, 1 << 16, hint, True)
    for _ in range(3):
        sent = buffer.low_latency_dispatch(
            mine.x, mine.topk_idx, case.max_tokens, case.experts, return_recv_hook=True
        )
        result = buffer.dispatch(**good_dispatch(buffer, case, rank))
        sent[4]()
        y = outputs(case, rank, "fp8")
        combined, _, hook = buffer.low_latency_combine(
            y, mine.topk_idx, mine.topk_weights, sent[2], return_recv_hook=True
        )
        summed, _, _ = buffer.combine(result[0], result[4])
        hook()
        check_dispatched(case, rank, "fp8", sent)
        check_received(case, rank, result)
        everybody = reference.everybody(case)
        rows_of = [
            reference.arrivals(case, peer).gather([theirs.x for theirs in everybody])
            for peer in range(case.ranks)
        ]
        assert torch.equal(summed, reference.combined(case, rank, rows_of))
        y_of = [outputs(case, peer, "fp8") for peer in range(case.ranks)]
        assert torch.equal(combined, reference.weighted_sum(case, rank, y_of))


def test_modes_in_flight_together(pools: Pools) -> None:
    pools(4).run(_overlapped)


# ---- Megatron-LM: autograd over reused handles --------------------------------------------------


class _MegatronDispatch(torch.autograd.Function):
    """Dispatch; its gradient is a combine with the same handle."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, idx: torch.Tensor, probs: torch.Tensor, call: Any
    ) -> Any:
        buffer, experts, overlap = call
        previous = EventOverlap(EventHandle()) if overlap else None
        per_rank, per_host, per_expert, in_rank, event = buffer.get_dispatch_layout(
            idx, experts, previous_event=previous, async_finish=overlap,
            allocate_on_comm_stream=overlap,
        )  # fmt: skip
        received, ids, received_probs, counts, handle, after = buffer.dispatch(
            x, topk_idx=idx, topk_weights=probs, num_tokens_per_rank=per_rank,
            num_tokens_per_rdma_rank=per_host, is_token_in_rank=in_rank,
            num_tokens_per_expert=per_expert, previous_event=event if overlap else None,
            async_finish=overlap, allocate_on_comm_stream=overlap,
        )  # fmt: skip
        if overlap:
            after.current_stream_wait()
        ctx.call, ctx.handle = call, handle
        return (
            received,
            ids,
            received_probs,
            torch.tensor(counts, dtype=torch.int64, device="cpu"),
            handle,
        )

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        buffer, _, overlap = ctx.call
        previous = EventOverlap(EventHandle()) if overlap else None
        grad_x, grad_probs, after = buffer.combine(
            grads[0].contiguous(), ctx.handle, topk_weights=grads[2].float(),
            previous_event=previous, async_finish=overlap, allocate_on_comm_stream=overlap,
        )  # fmt: skip
        if overlap:
            after.current_stream_wait()
        return grad_x, None, grad_probs, None


class _MegatronCombine(torch.autograd.Function):
    """Combine; its gradient is a dispatch with the same handle."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, buffer: Buffer, handle: Any) -> torch.Tensor:
        ctx.buffer, ctx.handle = buffer, handle
        return buffer.combine(x, handle=handle)[0]

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return ctx.buffer.dispatch(grad.contiguous(), handle=ctx.handle)[0], None, None


def _megatron(group: dist.ProcessGroup, overlap: bool) -> None:
    rank, case = as_group(group).rank, CASE
    mine = inputs(case, rank)
    nvl_bytes = rdma_bytes = 0
    ranks = as_group(group).size
    for config in (Buffer.get_dispatch_config(ranks), Buffer.get_combine_config(4)):
        nvl_bytes = max(config.get_nvl_buffer_size_hint(case.hidden * 2, ranks), nvl_bytes)
        rdma_bytes = max(config.get_rdma_buffer_size_hint(case.hidden * 2, 4), rdma_bytes)
    buffer = shared(group, nvl_bytes, rdma_bytes)
    assert buffer.group == group
    assert (buffer.num_nvl_bytes, buffer.num_rdma_bytes) == (nvl_bytes, rdma_bytes)
    Buffer.set_num_sms(20)
    for _ in range(2):
        x, probs = mine.x.clone().requires_grad_(), mine.topk_weights.clone().requires_grad_()
        received, ids, weights, counts, handle = _MegatronDispatch.apply(
            x, mine.topk_idx, probs, (buffer, case.experts, overlap)
        )
        assert torch.equal(counts, torch.stack([(ids == e).sum() for e in range(case.local)]))
        everywhere = torch.where(ids == -1, case.experts, ids + rank * case.local)
        y = dense(case, received, everywhere, weights).to(torch.bfloat16)
        out = _MegatronCombine.apply(y, buffer, handle)
        target = torch.randn(
            out.shape,
            generator=torch.Generator().manual_seed(rank),
            dtype=torch.float32,
            device="cpu",
        )
        (out.float() * target).sum().backward()

        own_x, own_probs = mine.x.float().requires_grad_(), mine.topk_weights.clone()
        own_probs.requires_grad_()
        wanted = dense(case, own_x, mine.topk_idx, own_probs)
        (wanted * target).sum().backward()
        assert close(out, wanted.detach(), 0.01)
        assert close(x.grad, own_x.grad, 0.01)
        assert close(probs.grad, own_probs.grad, 0.01)


@pytest.mark.parametrize("overlap", [False, True])
def test_megatron_forward_and_backward(pools: Pools, overlap: bool) -> None:
    pools(4).run(_megatron, overlap)


# ---- construction and the rest of the object ----------------------------------------------------


class _Communicator:
    """What mpi4py.MPI.Comm offers, over another group."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group

    def Get_rank(self) -> int:  # noqa: N802 (mpi4py's name)
        return as_group(self._group).rank

    def Get_size(self) -> int:  # noqa: N802
        return as_group(self._group).size

    def allgather(self, value: object) -> list[object]:
        return as_group(self._group).all_gather(value)


def _communicator(group: dist.ProcessGroup) -> None:
    rank, case, comm = as_group(group).rank, CASE, _Communicator(group)
    nbytes = Buffer.get_low_latency_rdma_size_hint(case.max_tokens, case.hidden, 4, case.experts)
    buffer = shared(None, 1 << 20, nbytes, True, comm=comm)
    assert (buffer.rank, buffer.group_size, buffer.group) == (rank, 4, comm)
    check_received(case, rank, buffer.dispatch(**good_dispatch(buffer, case, rank)))
    mine = inputs(case, rank)
    result = buffer.low_latency_dispatch(mine.x, mine.topk_idx, case.max_tokens, case.experts)
    check_dispatched(case, rank, "fp8", result)
    assert isinstance(buffer.get_comm_stream(), torch.cpu.Stream)
    assert buffer.runtime.is_available()
    assert not buffer.runtime.is_internode_available()
    assert buffer.runtime.get_num_rdma_ranks() == 1
    assert Buffer.is_sm90_compiled()
    hosts = int(os.environ.get("FANFOLD_HOSTS") or 1)
    assert get_physical_domain_size(group) == (hosts, 4 // hosts)
    assert get_logical_domain_size(group, allow_hybrid_mode=False) == (1, 4)


def test_mpi_communicator_and_small_calls(pools: Pools) -> None:
    pools(4).run(_communicator)


def _constructed(group: dist.ProcessGroup, alike: list[Any], changes: dict[str, Any]) -> Exception:
    rank = as_group(group).rank
    arguments = {"num_nvl_bytes": 1 << 16, "num_rdma_bytes": 1 << 16}
    with pytest.raises(FanfoldError) as caught:
        shared(group, **arguments | (changes if rank in alike else {}))
    shared(group, **arguments)
    return caught.value


@pytest.mark.parametrize(
    "changes",
    [
        {"num_nvl_bytes": -1},
        {"num_rdma_bytes": "64"},
        {"num_qps_per_rank": 0},
        {"num_nvl_bytes": 1 << 17},
        {"low_latency_mode": True},
        {"enable_shrink": True},
    ],
)
def test_refused_construction(pools: Pools, changes: dict[str, Any]) -> None:
    for error in pools(4).run(_constructed, [2], changes):
        assert next(iter(changes)) in str(error)


def _lifetime(group: dist.ProcessGroup) -> None:
    with pytest.raises(ArgumentError, match="group"):
        Buffer(None)
    with pytest.raises(ArgumentError, match="group"):
        Buffer("world")
    shared_bytes = _mapped_bytes()
    for _ in range(10):
        buffer = shared(group, 1 << 20, 1 << 20, True)
        buffer.get_local_buffer_tensor(torch.uint8, use_rdma_buffer=True)[0] = 1
        assert _mapped_bytes() >= shared_bytes + 4 * (2 << 20)
        del buffer  # not explicitly_destroy: the memory goes with the object
        as_group(group).all_gather(None)
    gc.collect()
    # Between hosts a thread closes what is left to the garbage collector.
    wait_until(lambda: _mapped_bytes() <= shared_bytes, "the buffers' memory is unmapped")
    view = shared(group, 1 << 20).get_local_buffer_tensor(torch.uint8)
    gc.collect()
    view.fill_(1)  # keeps what it shows
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        forgotten = shared(group, explicitly_destroy=True)
        del forgotten
        gc.collect()
    assert [w.category for w in caught] == [ResourceWarning]
    kept = shared(group, explicitly_destroy=True)
    kept.destroy()
    assert kept.runtime is None
    with pytest.raises(UsageError, match="destroyed"):
        kept.destroy()
    with pytest.raises(UsageError, match="destroyed"):
        kept.get_comm_stream()


def _mapped_bytes() -> int:
    """Bytes of shared anonymous memory that this process maps."""
    total = 0
    for line in Path("/proc/self/maps").read_text().splitlines():
        if "memfd" in line:
            begin, end = line.split()[0].split("-")
            total += int(end, 16) - int(begin, 16)
    return total


@pytest.mark.placements("processes")  # counts what a process maps
def test_lifetime(pools: Pools) -> None:
    pools(4).run(_lifetime)
