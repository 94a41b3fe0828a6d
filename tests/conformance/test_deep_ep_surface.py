"""Names, signatures, sizes and events of DeepEP's interface; and the package ``deep_ep``."""

from __future__ import annotations

import inspect
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from fanfold import deep_ep
from fanfold.deep_ep.sizes import promised_top_k
from fanfold.errors import ArgumentError, UsageError
from tests.conformance import deep_ep_reference as reference

pytestmark = pytest.mark.one_host  # no test has two ranks

ROOT = Path(__file__).parents[2]
REQUIRED = inspect.Parameter.empty

_ORDERING = {
    "previous_event": None,
    "async_finish": False,
    "allocate_on_comm_stream": False,
}
_DISPATCH = {
    "x": REQUIRED,
    "handle": None,
    "num_tokens_per_rank": None,
    "num_tokens_per_rdma_rank": None,
    "is_token_in_rank": None,
    "num_tokens_per_expert": None,
    "topk_idx": None,
    "topk_weights": None,
    "expert_alignment": 1,
    "num_worst_tokens": 0,
    "config": None,
    **_ORDERING,
}
_COMBINE = {
    "x": REQUIRED,
    "handle": REQUIRED,
    "topk_weights": None,
    "bias": None,
    "config": None,
    **_ORDERING,
}
# Those of the branches that SGLang's single-batch overlap uses. There they follow the handle, where
# DeepEP has others.
_OVERLAP = {
    "overlap": False,
    "packed_recv_count": None,
    "comp_signal": None,
    "block_m": 64,
    "threshold": 0,
    "num_sms": 3,
    "src_signals": None,
    "src_signal_expect_value": 0,
}
# DeepEP's parameters, in order, with their defaults.
SIGNATURES = {
    "__init__": {
        "group": REQUIRED,
        "num_nvl_bytes": 0,
        "num_rdma_bytes": 0,
        "low_latency_mode": False,
        "num_qps_per_rank": 24,
        "allow_nvlink_for_low_latency_mode": True,
        "allow_mnnvl": False,
        "explicitly_destroy": False,
        "enable_shrink": False,
        "comm": None,
        "use_fabric": False,
        "is_intranode": False,
    },
    "destroy": {},
    "is_sm90_compiled": {},
    "set_num_sms": {"new_num_sms": REQUIRED},
    "capture": {},
    "get_low_latency_rdma_size_hint": {
        "num_max_dispatch_tokens_per_rank": REQUIRED,
        "hidden": REQUIRED,
        "num_ranks": REQUIRED,
        "num_experts": REQUIRED,
    },
    "get_comm_stream": {},
    "get_local_buffer_tensor": {
        "dtype": REQUIRED,
        "size": None,
        "offset": 0,
        "use_rdma_buffer": False,
    },
    "get_dispatch_config": {"num_ranks": REQUIRED},
    "get_combine_config": {"num_ranks": REQUIRED},
    "get_dispatch_layout": {"topk_idx": REQUIRED, "num_experts": REQUIRED, **_ORDERING},
    "dispatch": _DISPATCH,
    "combine": _COMBINE,
    "internode_dispatch": _DISPATCH,
    "internode_combine": _COMBINE,
    "clean_low_latency_buffer": {
        "num_max_dispatch_tokens_per_rank": REQUIRED,
        "hidden": REQUIRED,
        "num_experts": REQUIRED,
    },
    "low_latency_dispatch": {
        "x": REQUIRED,
        "topk_idx": REQUIRED,
        "num_max_dispatch_tokens_per_rank": REQUIRED,
        "num_experts": REQUIRED,
        "cumulative_local_expert_recv_stats": None,
        "dispatch_wait_recv_cost_stats": None,
        "use_fp8": True,
        "round_scale": False,
        "use_ue8m0": False,
        "async_finish": False,
        "return_recv_hook": False,
        # Of the branch hybrid-ep, which has them before async_finish.
        "use_nvfp4": False,
        "x_global_scale": None,
    },
    "low_latency_combine": {
        "x": REQUIRED,
        "topk_idx": REQUIRED,
        "topk_weights": REQUIRED,
        "handle": REQUIRED,
        "use_logfmt": False,
        "zero_copy": False,
        "async_finish": False,
        "return_recv_hook": False,
        "out": None,
        "combine_wait_recv_cost_stats": None,
        **_OVERLAP,
    },
    "low_latency_update_mask_buffer": {"rank_to_mask": REQUIRED, "mask": False},
    "low_latency_query_mask_buffer": {"mask_status": REQUIRED},
    "low_latency_clean_mask_buffer": {},
    "get_next_low_latency_combine_buffer": {"handle": REQUIRED},
    # UCCL-EP's.
    "reset_rdma_buffer": {},
    "connect_atomic_buffer": {"proxy": REQUIRED},
}
_STREAMS = {
    "previous_event": None,
    "previous_event_before_epilogue": None,
    "async_with_compute_stream": False,
    "allocate_on_comm_stream": False,
}
_OF_SIZE = {
    "group": REQUIRED,
    "num_max_tokens_per_rank": REQUIRED,
    "hidden": REQUIRED,
    "num_topk": 0,
    "use_fp8_dispatch": False,
    "allow_hybrid_mode": True,
    "allow_multiple_reduction": True,
}
ELASTIC_SIGNATURES = {
    "__init__": {
        "group": REQUIRED,
        "num_bytes": None,
        "num_cpu_bytes": 0,
        "num_max_tokens_per_rank": 0,
        "hidden": 0,
        "num_topk": 0,
        "use_fp8_dispatch": False,
        "deterministic": False,
        "allow_hybrid_mode": True,
        "allow_multiple_reduction": True,
        "prefer_overlap_with_compute": True,
        "sl_idx": 3,
        "num_allocated_qps": 0,
        "num_cpu_timeout_secs": 300,
        "num_gpu_timeout_secs": 100,
        "explicitly_destroy": False,
    },
    "dispatch": {
        "x": REQUIRED,
        "topk_idx": None,
        "topk_weights": None,
        "cumulative_local_expert_recv_stats": None,
        "num_experts": None,
        "num_max_tokens_per_rank": None,
        "expert_alignment": None,
        "num_sms": 0,
        "num_qps": 0,
        **_STREAMS,
        "handle": None,
        "do_handle_copy": True,
        "do_cpu_sync": None,
        "do_expand": False,
        "do_zero_padding": False,
        "use_tma_aligned_col_major_sf": False,
    },
    "combine": {
        "x": REQUIRED,
        "handle": REQUIRED,
        "topk_weights": None,
        "bias": None,
        "num_sms": 0,
        "num_qps": 0,
        **_STREAMS,
    },
    "barrier": {"use_comm_stream": True, "with_cpu_sync": False, "sequential": True},
    "capture": {},
    "destroy": {},
    "get_comm_stream": {},
    "get_physical_domain_size": {},
    "get_logical_domain_size": {},
    "get_buffer_size_hint": _OF_SIZE,
    "get_theoretical_num_sms": {
        "num_experts": REQUIRED,
        "num_topk": REQUIRED,
        "num_scaleout_topk": 0,
        "rdma_gbs": 0,
        "nvlink_gbs": 0,
        "sm_read_gbs": 200,
        "sm_write_gbs": 50,
    },
    "get_theoretical_num_qps": {"num_sms": REQUIRED},
}
ELASTIC_STATIC = ("capture", "get_buffer_size_hint")

STATIC = (
    "is_sm90_compiled",
    "set_num_sms",
    "capture",
    "get_low_latency_rdma_size_hint",
    "get_dispatch_config",
    "get_combine_config",
)


@pytest.mark.parametrize("method", SIGNATURES)
def test_signature(method: str) -> None:
    parameters = dict(inspect.signature(getattr(deep_ep.Buffer, method)).parameters)
    parameters.pop("self", None)
    found = {name: parameter.default for name, parameter in parameters.items()}
    assert list(found.items()) == list(SIGNATURES[method].items())
    assert isinstance(inspect.getattr_static(deep_ep.Buffer, method), staticmethod) == (
        method in STATIC
    )
    # v1.2.1 and later releases have the first at different places, so it goes by keyword.
    by_keyword = {"use_fabric", "is_intranode"}
    if method == "low_latency_combine":
        by_keyword = set(_OVERLAP)
    for name, parameter in parameters.items():
        keyword_only = parameter.kind is inspect.Parameter.KEYWORD_ONLY
        assert keyword_only == (name in by_keyword)


@pytest.mark.parametrize("method", ELASTIC_SIGNATURES)
def test_signature_of_the_second_interface(method: str) -> None:
    parameters = dict(inspect.signature(getattr(deep_ep.ElasticBuffer, method)).parameters)
    parameters.pop("self", None)
    found = {name: parameter.default for name, parameter in parameters.items()}
    assert list(found.items()) == list(ELASTIC_SIGNATURES[method].items())
    is_static = isinstance(inspect.getattr_static(deep_ep.ElasticBuffer, method), staticmethod)
    assert is_static == (method in ELASTIC_STATIC)
    for parameter in parameters.values():
        assert parameter.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD


def test_nothing_public_goes_beyond_the_second_interface() -> None:
    public = {name for name in vars(deep_ep.ElasticBuffer) if not name.startswith("_")}
    assert public <= set(ELASTIC_SIGNATURES) | {"runtime"}


def test_nothing_public_goes_beyond_deep_ep() -> None:
    public = {name for name in vars(deep_ep.Buffer) if not name.startswith("_")}
    for base in deep_ep.Buffer.__mro__[1:-1]:
        public |= {name for name in vars(base) if not name.startswith("_")}
    # Who observes a program needs one name of every object: its metrics are Fanfold's own.
    assert public <= set(SIGNATURES) | {"num_sms", "metrics"}


def test_names_of_the_package() -> None:
    assert deep_ep.topk_idx_t is torch.int64
    assert deep_ep.__version__.startswith("2.1.0+fanfold")
    from fanfold.deep_ep.utils import EventHandle, EventOverlap  # as Megatron-LM imports them

    assert (EventHandle, EventOverlap) == (deep_ep.EventHandle, deep_ep.EventOverlap)


# ---- configurations and sizes -------------------------------------------------------------------


def test_config_defaults_and_rounding() -> None:
    config = deep_ep.Config()
    assert (config.num_sms, config.num_max_nvl_chunked_send_tokens) == (20, 6)
    assert config.num_max_rdma_chunked_recv_tokens == 258  # 256 rounded up to a multiple of 6
    by_name = deep_ep.Config(num_sms=24, num_max_nvl_chunked_recv_tokens=512)
    assert (by_name.num_sms, by_name.num_max_nvl_chunked_recv_tokens) == (24, 512)
    assert deep_ep.Config(24, 8, 256) == deep_ep.Config(
        num_sms=24, num_max_nvl_chunked_send_tokens=8
    )


@pytest.mark.parametrize(
    ("values", "argument"),
    [
        ((-1,), "num_sms"),
        ((20, 0), "num_max_nvl_chunked_send_tokens"),
        ((20, 256, 256), "num_max_nvl_chunked_send_tokens"),
        ((20, 6, 256, 0), "num_max_rdma_chunked_send_tokens"),
        ((20, 6, 256, 128, 128), "num_max_rdma_chunked_send_tokens"),
        (("20",), "num_sms"),
    ],
)
def test_config_refuses(values: tuple[object, ...], argument: str) -> None:
    with pytest.raises(ArgumentError) as caught:
        deep_ep.Config(*values)
    assert caught.value.argument == argument


def test_recommended_configs_follow_num_sms() -> None:
    before = deep_ep.Buffer.num_sms
    try:
        deep_ep.Buffer.set_num_sms(16)
        for ranks in (1, 2, 3, 4, 5, 8, 16, 48, 96, 160, 200):
            assert deep_ep.Buffer.get_dispatch_config(ranks).num_sms == 16
            assert deep_ep.Buffer.get_combine_config(ranks).num_sms == 16
        with pytest.raises(ArgumentError, match="even"):
            deep_ep.Buffer.set_num_sms(15)
    finally:
        deep_ep.Buffer.set_num_sms(before)
    assert deep_ep.Buffer.get_dispatch_config(3) == deep_ep.Buffer.get_dispatch_config(4)
    assert deep_ep.Buffer.get_dispatch_config(2) == deep_ep.Config(before, 24, 256, 6, 128)
    with pytest.raises(ArgumentError):
        deep_ep.Buffer.get_combine_config(0)


def test_high_throughput_hints() -> None:
    for ranks in (1, 2, 3, 8, 16):
        for config in (
            deep_ep.Buffer.get_dispatch_config(ranks),
            deep_ep.Buffer.get_combine_config(ranks),
        ):
            # DeepEP's data buffer alone is channels * ranks * chunk * row.
            row = 7168 * 2
            theirs = 10 * min(ranks, 8) * config.num_max_nvl_chunked_recv_tokens * row
            assert 0 < config.get_nvl_buffer_size_hint(row, ranks) <= theirs
            assert config.get_rdma_buffer_size_hint(row, ranks) == 0


# The hidden sizes that DeepEP's low-latency kernels are built for.
DEEP_EP_HIDDEN = (2048, 2560, 3072, 4096, 5120, 6144, 7168, 8192)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8, 16, 64])
def test_low_latency_hint_never_exceeds_deep_ep(ranks: int) -> None:
    hint = deep_ep.Buffer.get_low_latency_rdma_size_hint
    for per_rank in (1, 2, 3, 8, 32):
        experts = ranks * per_rank
        for hidden in DEEP_EP_HIDDEN:
            for tokens in (1, 2, 16, 128, 511, 1024):
                bound = reference.low_latency_bytes(tokens, hidden, experts)
                assert hint(tokens, hidden, ranks, experts) <= bound, (per_rank, hidden, tokens)
                # Enough for what DeepEP allows, and for top-k 32 wherever memory decides it.
                promised = promised_top_k(tokens, hidden, ranks, experts)
                assert promised >= min(11, experts)
                if hidden >= 4112 or per_rank > 1:
                    assert promised == 32


def test_promised_top_k_with_one_expert_per_rank() -> None:
    promised = {hidden: promised_top_k(128, hidden, 64, 64) for hidden in (2048, 2560, 4096, 7168)}
    assert promised == {2048: 15, 2560: 19, 4096: 31, 7168: 32}  # as docs/deep_ep.md says


def test_low_latency_hint_for_hidden_sizes_that_deep_ep_lacks() -> None:
    hint = deep_ep.Buffer.get_low_latency_rdma_size_hint
    for hidden in (128, 512, 1024, 1536):
        for ranks in (2, 8):
            for per_rank in (2, 8, 64):
                experts = ranks * per_rank
                bound = reference.low_latency_bytes(128, hidden, experts)
                assert hint(128, hidden, ranks, experts) <= bound
    assert hint(num_max_dispatch_tokens_per_rank=8, hidden=16, num_ranks=2, num_experts=4) > 0
    with pytest.raises(ArgumentError, match="num_experts"):
        hint(8, 64, 4, 6)
    with pytest.raises(ArgumentError, match="hidden"):
        hint(8, 17, 4, 8)


# ---- events -------------------------------------------------------------------------------------


def test_event_overlap() -> None:
    empty = deep_ep.EventOverlap()
    assert empty.event is None
    with pytest.raises(UsageError, match="not asynchronous"):
        empty.current_stream_wait()
    with empty as same:  # nothing to wait for, and no error, as in DeepEP
        assert same is empty

    event = deep_ep.EventOverlap(
        deep_ep.EventHandle(), (torch.ones(1, dtype=torch.float32, device="cpu"),)
    )
    assert event.current_stream_wait() is None
    calls = []
    event.register_hook_after_wait(lambda: calls.append(len(calls)) or "done")
    with pytest.raises(UsageError, match="registered"):
        event.register_hook_after_wait(print)
    assert event.wait() == "done"
    assert event.current_stream_wait() is None
    assert calls == [0]
    assert event.event is not None
    with event(release_handle=True):
        assert event.event is not None
    assert event.event is None
    captured = deep_ep.Buffer.capture()
    captured.current_stream_wait(release_handle=True)
    assert captured.event is None
    with pytest.raises(ArgumentError, match="event"):
        deep_ep.EventOverlap(torch.ones(1, dtype=torch.float32, device="cpu"))


# ---- the installed package ----------------------------------------------------------------------

USE_OF_THE_PACKAGE = """
import deep_ep, fanfold.deep_ep, torch
from deep_ep import Buffer, Config, EventHandle, EventOverlap, topk_idx_t, __version__
from deep_ep.utils import EventHandle as FromUtils, EventOverlap as OverlapFromUtils
from deep_ep.utils.event import EventOverlap as OverlapFromEvent
from deep_ep.utils.math import align, calc_diff, per_token_cast_to_fp8
from deep_ep.utils.semantic import value_or
from deep_ep.utils.envs import dist_print, get_nvlink_gbs, init_dist, init_seed
from deep_ep.utils.testing import bench, bench_kineto
assert init_dist is fanfold.deep_ep.utils.envs.init_dist
assert bench is fanfold.deep_ep.utils.testing.bench
import importlib.metadata
assert importlib.metadata.version("deep_ep") == __version__
assert align(5, 4) == value_or(None, 8) == 8
from deep_ep.buffer import Buffer as FromBuffer
from deep_ep.buffers.legacy import Buffer as FromLegacy
from deep_ep.buffers.elastic import ElasticBuffer as FromElastic, EPHandle as HandleFromElastic
assert deep_ep.ElasticBuffer is FromElastic is deep_ep.buffers.ElasticBuffer
assert FromElastic is fanfold.deep_ep.ElasticBuffer
assert deep_ep.EPHandle is HandleFromElastic is fanfold.deep_ep.EPHandle
assert Buffer is FromBuffer is FromLegacy is fanfold.deep_ep.Buffer
assert EventHandle is FromUtils and EventOverlap is OverlapFromUtils is OverlapFromEvent
assert deep_ep.utils.EventHandle is EventHandle and topk_idx_t is torch.int64
assert deep_ep.get_physical_domain_size and deep_ep.get_logical_domain_size
import torch.distributed as dist
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
assert deep_ep.get_physical_domain_size(dist.group.WORLD) == (1, 1)
buffer = Buffer(dist.group.WORLD, 1 << 20)
topk_idx = torch.tensor([[0, 1], [1, -1]])
layout = buffer.get_dispatch_layout(topk_idx, 2)
x = torch.ones((2, 16), dtype=torch.bfloat16)
routing = (layout[0], layout[1], layout[3], layout[2], topk_idx, torch.ones(2, 2))
got = buffer.dispatch(x, None, *routing)
assert got[3] == [1, 2] and torch.equal(got[0], x)
print(deep_ep.__file__, __version__)
del buffer  # it holds the group, whose threads abort a process that ends before them
dist.destroy_process_group()
"""


def test_installed_under_the_name_deep_ep(tmp_path: Path) -> None:
    source = tmp_path / "source"
    subprocess.run(["cp", "-r", ROOT / "packages" / "deep_ep", source], check=True)
    target = tmp_path / "target"
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation"]
    subprocess.run([*pip, "--target", target, source], check=True, timeout=100)
    search = os.pathsep.join([str(target), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        [sys.executable, "-c", USE_OF_THE_PACKAGE],
        env={**os.environ, "PYTHONPATH": search},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    file, version = done.stdout.split()
    assert Path(file) == target / "deep_ep" / "__init__.py"
    assert version == deep_ep.__version__
