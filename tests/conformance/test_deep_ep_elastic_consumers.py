"""Sequences of calls as the back ends for DeepEP 2 of vLLM and SGLang, and UCCL-EP's tests, make
them, on a layer with known results."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from fanfold.deep_ep import Buffer, ElasticBuffer, EPHandle
from fanfold.group import as_group
from tests.conformance.deep_ep_reference import Case, Inputs, inputs, weighted_sum
from tests.conformance.test_deep_ep_consumers import Pools, close, dense, matrix, shared
from tests.conformance.test_deep_ep_elastic import open_buffer
from tests.conformance.test_deep_ep_low_latency import check_dispatched, outputs

pytestmark = pytest.mark.placements("threads")

CASE = Case(experts=8, top_k=3, hidden=128, tokens=(6, 9, 0, 8), seed=12)


def grouped(
    case: Case, rank: int, rows: torch.Tensor, ends: list[int], begins: list[int]
) -> torch.Tensor:
    """The experts' products of rows sorted by expert; nothing else is read."""
    y = torch.zeros(rows.shape, dtype=torch.float32, device="cpu")
    for expert, (begin, end) in enumerate(zip(begins, ends, strict=True)):
        y[begin:end] = rows[begin:end].float() @ matrix(case, rank * case.local + expert)
    return y


def reaches(case: Case, rank: int, mine: Inputs, out: torch.Tensor) -> None:
    assert close(out, dense(case, mine.x, mine.topk_idx, mine.topk_weights), 0.01), rank


# ---- vLLM: deepep_v2 ----------------------------------------------------------------------------


def _vllm_prefill(group: dist.ProcessGroup) -> None:
    """Expanded, the CPU knows the counts, and the experts apply the weights."""
    rank, case = as_group(group).rank, CASE
    buffer, mine = open_buffer(group, num_max_tokens_per_rank=16), inputs(case, rank)
    for asynchronous in (False, True):
        rows, idx, weights, handle, event = buffer.dispatch(
            mine.x, topk_idx=mine.topk_idx, topk_weights=mine.topk_weights,
            num_experts=case.experts, expert_alignment=128, do_expand=True, do_cpu_sync=True,
            async_with_compute_stream=asynchronous,
        )  # fmt: skip
        if event.event is not None:
            event.current_stream_wait()
        assert idx is None
        padded = handle.num_recv_tokens_per_expert_list
        assert all(count % 128 == 0 for count in padded)
        assert sum(padded) == len(rows) == handle.num_expanded_tokens
        begins = [sum(padded[:expert]) for expert in range(case.local)]
        ends = handle.psum_num_recv_tokens_per_expert.tolist()
        counts = handle.num_unaligned_recv_tokens_per_expert.tolist()
        assert ends == [begin + count for begin, count in zip(begins, counts, strict=True)]
        y = grouped(case, rank, rows, ends, begins) * weights.unsqueeze(1)
        out, nothing, event = buffer.combine(
            y.to(torch.bfloat16), handle, async_with_compute_stream=asynchronous
        )
        if event.event is not None:
            event.current_stream_wait()
        assert nothing is None
        reaches(case, rank, mine, out)
    buffer.destroy()


def test_vllm_prefill(pools: Pools) -> None:
    pools(4).run(_vllm_prefill)


def _decode_half(
    buffer: ElasticBuffer, case: Case, rank: int, most: int
) -> tuple[torch.Tensor, EPHandle]:
    """Plain, no CPU waits: how many rows have come only the prefix sum says."""
    mine = inputs(case, rank)
    rows, idx, weights, handle, event = buffer.dispatch(
        mine.x, topk_idx=mine.topk_idx, topk_weights=mine.topk_weights, num_experts=case.experts,
        num_max_tokens_per_rank=most, do_cpu_sync=False, async_with_compute_stream=True,
        previous_event=ElasticBuffer.capture(), allocate_on_comm_stream=True,
    )  # fmt: skip
    event.current_stream_wait()
    assert len(rows) == case.ranks * most
    known = int(handle.psum_num_recv_tokens_per_scaleup_rank[-1])
    y = rows.new_zeros(rows.shape)
    everywhere = torch.where(idx[:known] == -1, case.experts, idx[:known] + rank * case.local)
    y[:known] = dense(case, rows[:known], everywhere, weights[:known]).to(torch.bfloat16)
    return y, handle


def _vllm_decode(group: dist.ProcessGroup) -> None:
    """Two half batches, whose handles alternate, with room for the next power of two."""
    rank = as_group(group).rank
    buffer = open_buffer(group, num_max_tokens_per_rank=64)
    for step in range(6):
        tokens = tuple((3 * step + 5 * peer) % 11 for peer in range(CASE.ranks))
        most = 1 << max(max(tokens) - 1, 0).bit_length()
        halves = [replace(CASE, tokens=tokens, seed=2 * step + half) for half in range(2)]
        sent = [_decode_half(buffer, case, rank, most) for case in halves]
        done = [
            buffer.combine(y, handle, async_with_compute_stream=True,
                           previous_event=ElasticBuffer.capture(), allocate_on_comm_stream=True)
            for y, handle in sent
        ]  # fmt: skip
        for case, (out, _, event) in zip(halves, done, strict=True):
            event.current_stream_wait()
            reaches(case, rank, inputs(case, rank), out)
    buffer.destroy()


def test_vllm_decode(pools: Pools) -> None:
    pools(4).run(_vllm_decode)


# ---- SGLang: deepep_v2 --------------------------------------------------------------------------


def _sglang(group: dist.ProcessGroup) -> None:
    """Prefill expanded, decode plain; a Buffer is made anew when the geometry changes."""
    rank = as_group(group).rank
    for hidden in (128, 64):
        case = replace(CASE, hidden=hidden)
        nbytes = ElasticBuffer.get_buffer_size_hint(group, 16, hidden, case.top_k)
        buffer = open_buffer(
            group, num_bytes=nbytes, num_max_tokens_per_rank=16, hidden=hidden,
            num_topk=case.top_k, allow_hybrid_mode=False,
        )  # fmt: skip
        mine = inputs(case, rank)
        rows, _, weights, handle, event = buffer.dispatch(
            mine.x, mine.topk_idx, mine.topk_weights, num_experts=case.experts, do_expand=True,
            do_cpu_sync=True, expert_alignment=1, async_with_compute_stream=True,
        )  # fmt: skip
        event.current_stream_wait()
        ends = handle.psum_num_recv_tokens_per_expert.tolist()
        y = grouped(case, rank, rows, ends, [0, *ends[:-1]]) * weights.unsqueeze(1)
        out, *_ = buffer.combine(y.to(torch.bfloat16), handle)
        reaches(case, rank, mine, out)
        y, handle = _decode_half(buffer, case, rank, 16)
        received = handle.psum_num_recv_tokens_per_scaleup_rank[-1].item()
        assert 0 <= received <= handle.num_recv_tokens == 16 * case.ranks
        out, *_ = buffer.combine(y, handle)
        reaches(case, rank, mine, out)
        buffer.destroy()


def test_sglang(pools: Pools) -> None:
    pools(4).run(_sglang)


# ---- UCCL-EP's tests ----------------------------------------------------------------------------


def _uccl(group: dist.ProcessGroup) -> None:
    """Low latency, with a reset between cases, and all scratch zero afterwards."""
    rank, case = as_group(group).rank, CASE
    hint = Buffer.get_low_latency_rdma_size_hint(
        case.max_tokens, case.hidden, case.ranks, case.experts
    )
    buffer = shared(
        group, num_rdma_bytes=hint, low_latency_mode=True, num_qps_per_rank=2,
        allow_nvlink_for_low_latency_mode=True, allow_mnnvl=False, explicitly_destroy=True,
        is_intranode=True,
    )  # fmt: skip
    buffer.connect_atomic_buffer(object())
    buffer.reset_rdma_buffer()
    mine = inputs(case, rank)
    for _ in range(2):
        result = buffer.low_latency_dispatch(
            mine.x, mine.topk_idx, case.max_tokens, case.experts, use_fp8=False,
            return_recv_hook=True,
        )  # fmt: skip
        result[4]()
        y = outputs(case, rank, "bf16")
        out, _, _ = buffer.low_latency_combine(y, mine.topk_idx, mine.topk_weights, result[2])
        scratch = buffer.get_local_buffer_tensor(torch.int8, use_rdma_buffer=True)
        scratch.fill_(3)
        buffer.reset_rdma_buffer()
        assert not scratch.any()
        check_dispatched(case, rank, "bf16", result)
        wanted = weighted_sum(case, rank, [outputs(case, peer, "bf16") for peer in range(4)])
        assert torch.equal(out, wanted)
    buffer.destroy()


def test_uccl(pools: Pools) -> None:
    pools(4).run(_uccl)
