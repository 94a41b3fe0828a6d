"""The fused MoE layer of GPUs with its kernel on CPUs: ranks of one process, each a thread.

Everything from :class:`fanfold.fused_moe.cuda.CudaLayer` to the kernel's roles is what runs on a
GPU. Plain loops replace what only its hardware does: the tensor cores (``device/wgmma.cuh``) and
copies of boxes (``device/tensor_copy.cuh``). See :mod:`tests.emulation.world` for the rest.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import threading
import time
import types
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar
from unittest import mock

import torch

from fanfold import _core, jit, kernel_reports
from fanfold.config import Config
from fanfold.fused_moe import cuda
from fanfold.fused_moe.call import FusedCall
from fanfold.fused_moe.cuda import CudaLayer
from fanfold.fused_moe.tuning import FusedMoeTuning
from fanfold.fused_moe.weights import ExpertWeights
from fanfold.geometry import Geometry
from fanfold.jit import KernelSource
from tests.distributed.fused_layers import FusedShape, FusedTokens, weights_of
from tests.emulation.deep_ep import Memory
from tests.emulation.pinned import PAGEABLE
from tests.emulation.world import CORE, HERE, Builder, Grid, ThreadGroup

__all__ = ["Received", "Settings", "World", "emulated"]

_Result = TypeVar("_Result")
_SOURCES = (
    *(HERE / f"{name}.cpp" for name in ("fused_moe", "tensor_map")),
    *(CORE / "cuda" / f"{name}.cpp" for name in ("fused_moe", "kernel", "driver")),
)


# ---- what the bindings do, where no driver makes maps of tensors ---------------------------------


class _Sizes(ctypes.Structure):
    """``FusedMoeSizes`` of csrc/cuda/fused_moe.h."""

    NAMES = ("ranks", "experts", "top_k", "hidden", "intermediate", "tokens")
    _fields_ = [(name, ctypes.c_int32) for name in NAMES]

    def _core(self) -> _core.CudaFusedMoeSizes:
        return _core.CudaFusedMoeSizes(**{name: getattr(self, name) for name in self.NAMES})

    bytes = property(lambda self: self._core().bytes)
    zeroed = property(lambda self: self._core().zeroed)
    rows = property(lambda self: self._core().rows)


class _Call(ctypes.Structure):
    """``FusedMoeCall`` of csrc/cuda/fused_moe.h."""

    _fields_ = [
        ("tokens", ctypes.c_int32),
        *((name, ctypes.c_size_t) for name in ("x", "x_scales")),
        ("scale_strides", ctypes.c_int64 * 2),
        *(
            (name, ctypes.c_size_t)
            for name in (
                "topk_idx", "topk_weights", "l1", "l1_scales", "l2", "l2_scales", "addend", "y",
                "statistics", "spans",
            )
        ),
        ("clamp", ctypes.c_float),
    ]  # fmt: skip

    def set_scale_strides(self, token: int, block: int) -> None:
        self.scale_strides[:] = token, block


class _Layer(ctypes.Structure):
    """``FusedMoeLayer`` of fused_moe.cpp, in place of ``_core.CudaFusedMoe``."""

    _fields_ = [
        ("sizes", _Sizes),
        ("rank", ctypes.c_int32),
        ("peers", ctypes.POINTER(ctypes.c_size_t)),
        ("reports", ctypes.c_size_t),
        ("timeout_ns", ctypes.c_int64),
        ("rows_for_groups", ctypes.c_int32),
    ]

    def __init__(self, sizes: _Sizes, rank: int, peers: list[int], reports: int) -> None:
        super().__init__(sizes, rank, (ctypes.c_size_t * len(peers))(*peers), reports)

    def set_rows_for_groups(self, rows: int) -> None:
        self.rows_for_groups = rows

    def launch(
        self, call: _Call, kernel: _Kernel, ctas: int, threads: int, shared: int, stream: int
    ) -> None:
        del threads, shared, stream
        kernel.run(self, ctypes.byref(call), ctas)

    def refuse(self, kernel: _Kernel, ctas: int, threads: int, shared: int, stream: int) -> None:
        del threads, shared, stream
        kernel.run(self, None, ctas)


class Settings:
    """Of calls to come.

    Attributes:
        clusters: of every rank's kernel, taken when a layer is made.
        seed: of the order in which the threads of a CTA run, another one in each launch.
        late_us: by ranks, how much later the last cluster begins.
        launched: the kernel of each launch so far, by what it is made from.
        host: the library made from fused_moe.cpp.
    """

    def __init__(self, host: ctypes.CDLL) -> None:
        self.host = host
        self.clusters, self.seed = 1, 1
        self.late_us: dict[int, int] = {}
        self.launched: list[KernelSource] = []


class _Kernel:
    """A kernel as the layer takes it."""

    def __init__(
        self, host: ctypes.CDLL, library: ctypes.CDLL, source: KernelSource, settings: Settings
    ) -> None:
        self._run, self._source, self._settings = host.run_fused_moe, source, settings
        self._emulate, self._launches = library.emulate_grid, 0

    def allow_shared_bytes(self, nbytes: int) -> None:
        assert nbytes <= 227 << 10

    def most_clusters(self, threads: int, shared_bytes: int, cluster: int) -> int:
        """Of the whole GPU, which ranks that are threads share."""
        assert (threads, shared_bytes, cluster) == (384, 227 << 10, 2)
        return self._settings.clusters

    def run(self, layer: _Layer, call: Any, ctas: int) -> None:
        settings = self._settings
        settings.launched.append(self._source)
        self._launches += 1
        seed = 1000 * settings.seed + 37 * self._launches + layer.rank
        grid = Grid(ctas, cluster=2, seed=seed, late_us=settings.late_us.get(layer.rank, 0))
        self._run(ctypes.byref(layer), call, self._emulate, ctypes.byref(grid))


@contextlib.contextmanager
def emulated(builder: Builder) -> Iterator[Settings]:
    """Within it a CudaLayer takes the CPU for a GPU."""
    host = builder.load_host("fused_moe", *_SOURCES)
    for name in ("stored", "counted", "row_calls", "counters"):
        getattr(host, f"fused_moe_{name}").restype = ctypes.c_int64
    settings = Settings(host)
    core = types.SimpleNamespace(
        **{name: value for name, value in vars(_core).items() if name.startswith("CUDA_FUSED_MOE")},
        CudaFusedMoeSizes=_Sizes,
        CudaFusedMoeCall=_Call,
        CudaFusedMoe=_Layer,
    )
    replaced: dict[str, Any] = {
        "_core": core,
        "memory_of_gpus": lambda group, nbytes, config: Memory(group, nbytes),
        "are_threads": lambda group: group.size > 1,
        "wait_for_kernels": lambda memory: None,
        "_launch_orders": {},
    }
    with (
        mock.patch.multiple(cuda, **replaced),
        mock.patch.object(
            jit,
            "load_all",
            lambda sources, *_: [
                _Kernel(host, builder.load(each), each, settings) for each in sources
            ],
        ),
        mock.patch.multiple(
            torch.cuda,
            device=lambda device: contextlib.nullcontext(),
            is_current_stream_capturing=lambda: False,
            get_device_name=lambda device: "the emulation",
            current_stream=lambda device: types.SimpleNamespace(synchronize=lambda: None),
        ),
        mock.patch.object(torch._C, "_cuda_getCurrentRawStream", create=True, return_value=0),
        mock.patch.object(kernel_reports, "torch", PAGEABLE),
        _one_thread(),
    ):
        yield settings


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    """Within it PyTorch's operators have no threads, which would spin where CTAs run."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


# ---- ranks --------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Received:
    """What a rank gets of a call."""

    y: torch.Tensor
    statistics: torch.Tensor


class World:
    """All ranks of a layer with the weights of its experts; only within :func:`emulated`.

    Args:
        ranks: their number.
        shape: of the layer.
        settings: as :func:`emulated` gives them.
        clusters: of each rank.
        weights: of all experts; random if None.
        tuning: of every rank.
    """

    def __init__(
        self,
        ranks: int,
        shape: FusedShape,
        settings: Settings,
        *,
        clusters: int = 1,
        weights: ExpertWeights | None = None,
        tuning: FusedMoeTuning | None = None,
    ) -> None:
        self.shape, self._settings = shape, settings
        self.weights = weights_of(shape) if weights is None else weights
        settings.clusters = clusters * ranks
        chosen = FusedMoeTuning() if tuning is None else tuning
        config = Config.resolve(
            timeout_s=60.0,
            fast_accumulation=shape.fast_accumulation,
            swap_ab_rows=chosen.swap_ab_rows,
            group_rows=chosen.group_rows,
        )
        sizes = (shape.num_experts, shape.top_k, shape.hidden, shape.max_tokens)
        values: list[Any] = [None] * ranks
        barrier = threading.Barrier(ranks, timeout=120.0)

        def open_layer(rank: int) -> CudaLayer:
            group = ThreadGroup(rank, values, barrier)
            geometry = Geometry(ranks, *sizes)
            clamps = shape.activation_clamp is not None
            return CudaLayer(group, geometry, shape.intermediate, clamps, config)

        with ThreadPoolExecutor(ranks) as pool:
            self.layers = list(pool.map(open_layer, range(ranks)))

    def run(self, program: Callable[[int, CudaLayer], _Result]) -> list[_Result]:
        """``program(rank, layer)`` on all ranks at once; their results."""
        with ThreadPoolExecutor(len(self.layers)) as pool:
            return list(pool.map(program, range(len(self.layers)), self.layers))

    def call(self, rank: int, tokens: FusedTokens, **rest: Any) -> Received:
        """One call of one rank; what the kernel does not write stays NaN."""
        experts = self.shape.num_experts // len(self.layers)
        received = Received(
            torch.full(tokens.x.shape, float("nan"), dtype=torch.bfloat16),
            torch.full((experts,), 5, dtype=torch.int32),
        )
        given: dict[str, Any] = {
            **vars(tokens),
            "weights": self.weights.shard(rank, len(self.layers)),
            "shared_expert": None,
            "statistics": received.statistics,
            "out": received.y,
            "clamp": self.shape.activation_clamp,
        }
        call = FusedCall(**{**given, **rest})
        self.layers[rank].run(call)
        return received

    def call_all(self, calls: list[FusedTokens], seed: int = 1) -> list[Received]:
        """One call of all ranks, whose CTAs run their threads in the order of ``seed``."""
        self._settings.seed = seed
        return self.run(lambda rank, _: self.call(rank, calls[rank]))

    def stored_rows(self, rank: int, gemm: int) -> torch.Tensor:
        """What a GEMM stores in a rank's memory, ``[rows, bytes]``: activations, results."""
        shape, sizes = self.shape, self._sizes()
        begin = self._settings.host.fused_moe_stored(ctypes.byref(sizes), gemm)
        row_bytes = shape.intermediate if gemm == 0 else 2 * shape.hidden
        memory: torch.Tensor = self.layers[rank]._memory.tensor
        return memory[begin:][: sizes.rows * row_bytes].view(sizes.rows, row_bytes)

    def await_counts(self, rank: int, number: int = 1) -> None:
        """Until all others have told ``rank`` how many rows they have in a call, from 1 on."""
        sizes = self._sizes()
        begin = self._settings.host.fused_moe_counted(ctypes.byref(sizes))
        words = self.layers[rank]._memory.tensor[begin:].view(torch.int32)
        epochs = words[1 : 4 * sizes.ranks * sizes.experts : 2].view(2, sizes.ranks, -1)
        others = [other for other in range(sizes.ranks) if other != rank]
        deadline = time.monotonic() + 60.0
        while not bool((epochs[(number - 1) % 2, others] == number).all()):
            assert time.monotonic() < deadline
            time.sleep(0.001)

    def counters(self, rank: int, number: int) -> torch.Tensor:
        """Into which a rank's CTAs have counted in the call of this number, from 1 on."""
        sizes = self._sizes()
        begin, end = (
            self._settings.host.fused_moe_counters(ctypes.byref(sizes), parity) for parity in (0, 1)
        )
        nbytes, first = end - begin, begin if number % 2 != 0 else end
        return self.layers[rank]._memory.tensor[first:][:nbytes].view(torch.int32)

    def arrived(self, rank: int, number: int) -> int:
        """How many rows of the call of this number, from 1 on, have come to a rank."""
        sizes = self._sizes()
        begin = self._settings.host.fused_moe_row_calls(ctypes.byref(sizes))
        words = self.layers[rank]._memory.tensor[begin:].view(torch.int32)[: sizes.rows]
        return int((words == number).sum())

    def _sizes(self) -> _Sizes:
        shape = self.shape
        return _Sizes(
            len(self.layers), shape.num_experts, shape.top_k, shape.hidden, shape.intermediate,
            shape.max_tokens,
        )  # fmt: skip

    def set_timeout(self, rank: int, timeout_s: float) -> None:
        """Of waits in the kernels of one rank."""
        self.layers[rank]._main._core.timeout_ns = int(timeout_s * 1e9)

    def close(self) -> None:
        """Raises what the layers have left to report."""
        for layer in self.layers:
            layer.check()
            layer.close()
