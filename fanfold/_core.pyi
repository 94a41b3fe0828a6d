"""The C++ core (csrc/bindings). Shapes are in csrc/host/*.h.

Memory of the host is a pair of address and bytes (fanfold/lending.py), or None. Addresses on GPUs
are integers; 0 is null.
"""

import enum

from fanfold.lending import Lent

def quantize_fp8(
    x: Lent, tokens: int, hidden: int, power_of_two: bool, values: Lent, scales: Lent
) -> None: ...
def fork_generation() -> int: ...

class SymmetricMemory:
    def __init__(
        self,
        rank: int,
        ranks: int,
        bytes: int,
        timeout_seconds: float,
        spin_seconds: float,
        mask_late_peers: bool,
    ) -> None: ...
    def address(self) -> tuple[int, int]: ...
    def map(self, peers: list[tuple[int, int]]) -> None: ...
    def seal(self) -> None: ...
    def close(self) -> None: ...
    def barrier(self) -> None: ...
    def masked(self, peer: int) -> bool: ...
    def set_masked(self, peer: int, value: bool) -> None: ...
    @property
    def late(self) -> int: ...
    def late_peer(self, index: int) -> tuple[int, str, float, bool]: ...
    def check_usable(self) -> None: ...
    def window(self, peer: int, offset: int, bytes: int) -> int: ...
    @property
    def bytes(self) -> int: ...
    @property
    def mapped_bytes(self) -> int: ...

class LowLatencyGeometry:
    def __init__(
        self, ranks: int, experts: int, top_k: int, hidden: int, max_tokens: int
    ) -> None: ...
    @property
    def bytes(self) -> int: ...

class RowEncoding(enum.Enum):
    BF16 = 0
    FP8 = 1
    FP8_POWER_OF_TWO = 2

class ScaleFormat(enum.Enum):
    FLOAT32 = 0
    UE8M0 = 1

class LowLatencyTokens:
    tokens: int
    weighted: bool
    encoding: RowEncoding
    x: Lent | None
    topk_idx: Lent | None
    topk_weights: Lent | None

class LowLatencyReceived:
    encoding: RowEncoding
    scale_format: ScaleFormat
    rows: Lent | None
    scales: Lent | None
    counts: Lent | None
    source_tokens: Lent | None
    ranges: Lent | None
    row_weights: Lent | None
    source_counts: Lent | None
    experts: Lent | None
    weights: Lent | None
    expert_totals: Lent | None
    wait_ns: Lent | None

class LowLatencyOutputs:
    expert_stride: int
    row_stride: int
    logfmt: bool
    y: Lent | None
    ranges: Lent | None
    source_counts: Lent | None
    experts: Lent | None
    weights: Lent | None

class LowLatencyResult:
    tokens: int
    out: Lent | None
    topk_idx: Lent | None
    wait_ns: Lent | None

class LowLatency:
    def __init__(self, memory: SymmetricMemory, offset: int, bytes: int) -> None: ...
    def dispatch_send(self, geometry: LowLatencyGeometry, tokens: LowLatencyTokens) -> int: ...
    def dispatch_receive(self, epoch: int, received: LowLatencyReceived) -> None: ...
    def combine_send(
        self,
        geometry: LowLatencyGeometry,
        outputs: LowLatencyOutputs,
        late: LowLatencyTokens | None = None,
    ) -> int: ...
    def combine_receive(self, epoch: int, result: LowLatencyResult) -> None: ...
    def refuse_dispatch(self, reason: str) -> None: ...
    def refuse_combine(self, reason: str) -> None: ...
    def quiesce(self) -> None: ...
    def reset(self) -> None: ...

class HighThroughputTokens:
    row_bytes: int
    scale_words: int
    scale_token_stride: int
    scale_word_stride: int
    weighted: bool
    tokens: int
    experts: int
    top_k: int
    rows: Lent | None
    scales: Lent | None
    topk_idx: Lent | None
    topk_weights: Lent | None

class HighThroughputPlan:
    experts: int
    top_k: int
    tokens: int
    received: int
    is_token_in_rank: Lent | None
    source_prefix: Lent | None
    tokens_per_expert: Lent | None
    offsets: Lent | None
    source_token: Lent | None
    topk_idx: Lent | None
    topk_weights: Lent | None
    rows_of: Lent | None

class HighThroughputReceived:
    capacity: int
    expert_major: bool
    rows: Lent | None
    scales: Lent | None
    row_weights: Lent | None
    row_source_rank: Lent | None
    row_source_token: Lent | None

class HighThroughputOutputs:
    hidden: int
    lanes: bool
    expert_major: bool
    y: Lent | None
    row_weights: Lent | None
    lane_weights: Lent | None

class HighThroughputResult:
    out: Lent | None
    weights: Lent | None
    def set_bias(self, place: int, lent: Lent | None) -> None: ...

class HighThroughput:
    def __init__(self, memory: SymmetricMemory, offset: int, bytes: int) -> None: ...
    @staticmethod
    def required_bytes(ranks: int, staging_bytes: int) -> int: ...
    @property
    def ranks(self) -> int: ...
    def exchange_counts(
        self, tokens: HighThroughputTokens, plan: HighThroughputPlan, alignment: int
    ) -> None: ...
    def dispatch_rows(
        self,
        tokens: HighThroughputTokens,
        plan: HighThroughputPlan,
        received: HighThroughputReceived,
    ) -> None: ...
    def dispatch_cached(
        self,
        tokens: HighThroughputTokens,
        plan: HighThroughputPlan,
        received: HighThroughputReceived,
    ) -> None: ...
    def combine(
        self,
        outputs: HighThroughputOutputs,
        plan: HighThroughputPlan,
        result: HighThroughputResult,
    ) -> None: ...
    def refuse_dispatch(self, reason: str) -> None: ...
    def refuse_combine(self, reason: str) -> None: ...

def cuda_driver_version() -> int: ...

class CudaKernel:
    def __init__(self, image: bytes, entry: str, symbol: str) -> None: ...
    @property
    def entry(self) -> str: ...
    @property
    def registers(self) -> int: ...
    @property
    def local_bytes(self) -> int: ...
    @property
    def static_shared_bytes(self) -> int: ...
    def allow_shared_bytes(self, bytes: int) -> None: ...
    def launch(
        self,
        arguments: int,
        bytes: int,
        ctas: int,
        threads: int,
        shared_bytes: int = 0,
        stream: int = 0,
        early: bool = False,
    ) -> None: ...

CUDA_FEW_RANKS: int
CUDA_STATE_BYTES: int
CUDA_STATE_EPOCHS_BYTES: int
CUDA_STATE_PEERS_AT: int
CUDA_REPORT_BYTES: int
CUDA_REPORT_KINDS: int
CUDA_FIRST_EPOCH: int
CUDA_MOST_CTAS: int

def cuda_low_latency_bytes(geometry: LowLatencyGeometry, late: bool) -> tuple[int, int]: ...
def cuda_table_bytes(geometry: LowLatencyGeometry) -> int: ...
def cuda_least_receivers(ranks: int) -> int: ...
def check_cuda_geometry(geometry: LowLatencyGeometry) -> None: ...

class CudaDispatchArgs:
    x: int
    topk_idx: int
    topk_weights: int
    rows: int
    scales: int
    counts: int
    source_tokens: int
    ranges: int
    voided: int
    row_weights: int
    table: int
    expert_totals: int
    wait_ns: int
    tokens: int
    phases: int
    refused: bool
    @property
    def address(self) -> int: ...
    def copy(self) -> CudaDispatchArgs: ...
    def launch(
        self, kernel: CudaKernel, ctas: int, threads: int, stream: int, early: bool
    ) -> None: ...

class CudaCombineArgs:
    y: int
    expert_stride: int
    row_stride: int
    ranges: int
    voided: int
    table: int
    weighted: int
    topk_idx: int
    topk_weights: int
    out: int
    wait_ns: int
    tokens: int
    phases: int
    refused: bool
    @property
    def address(self) -> int: ...
    def copy(self) -> CudaCombineArgs: ...
    def launch(
        self, kernel: CudaKernel, ctas: int, threads: int, stream: int, early: bool
    ) -> None: ...

class CudaQuickLook:
    @staticmethod
    def of(
        like: object,
        geometry: LowLatencyGeometry,
        table_at: int,
        source_tokens_at: int,
        row_weights_at: int,
    ) -> CudaQuickLook | None: ...
    def dispatch(
        self, args: CudaDispatchArgs, x: object, topk_idx: object, topk_weights: object
    ) -> int: ...
    def late(
        self, args: CudaCombineArgs, ranges: object, topk_idx: object, topk_weights: object
    ) -> int: ...
    def combine(
        self, args: CudaCombineArgs, tokens: int, y: object, out: object, block: object
    ) -> bool: ...
    def suits(self, x: object, topk_idx: object) -> bool: ...
    def suits_handle(
        self, y: object, source_tokens: object, ranges: object, topk_idx: object
    ) -> bool: ...
    def place(
        self,
        args: CudaDispatchArgs,
        rows: object,
        scales: object,
        counts: object,
        block: object,
        weighted: bool,
    ) -> None: ...
    def place_late(
        self,
        args: CudaDispatchArgs,
        rows: object,
        scales: object,
        counts: object,
        ranges: object,
        source_tokens: object,
        row_weights: object,
    ) -> None: ...

class CudaLowLatencyPlace:
    def __init__(
        self,
        rank: int,
        peers: list[int],
        state: int,
        reports: int,
        timeout_ns: int,
        mask_late: bool,
    ) -> None: ...

class CudaLowLatency:
    def __init__(
        self,
        place: CudaLowLatencyPlace,
        geometry: LowLatencyGeometry,
        late: bool,
        ctas: int,
        senders: int,
    ) -> None: ...
    def dispatch_arguments(self, encoding: int, weights: int) -> CudaDispatchArgs: ...
    def combine_arguments(self, logfmt: bool, weights: int) -> CudaCombineArgs: ...

CUDA_HIGH_THROUGHPUT_STATE: tuple[int, int]
CUDA_HIGH_THROUGHPUT_REPORT_BYTES: int
CUDA_HIGH_THROUGHPUT_MOST_CTAS: int
CUDA_HIGH_THROUGHPUT_MOST_RANKS: int
CUDA_HIGH_THROUGHPUT_MOST_EXPERTS: int
CUDA_BATCH_TOKENS: int
CUDA_MOST_SLICES: int

def cuda_high_throughput_bytes(ranks: int, ring_bytes: int) -> tuple[int, int]: ...
def cuda_dispatch_batches(tokens: int, short_tokens: int) -> int: ...

class CudaLaunch:
    def __init__(self, ctas: int, threads: int, shared_bytes: int, early: bool) -> None: ...
    @property
    def ctas(self) -> int: ...
    @property
    def threads(self) -> int: ...
    @property
    def shared_bytes(self) -> int: ...
    @property
    def early(self) -> bool: ...

class CudaQuantizeArgs:
    tokens: int
    x: int
    values: int
    scales: int
    def __init__(self) -> None: ...
    @property
    def address(self) -> int: ...
    def launch(
        self, kernel: CudaKernel, ctas: int, threads: int, stream: int, early: bool
    ) -> None: ...

class CudaDispatchLayoutArgs:
    tokens: int
    topk_idx: int
    tokens_per_rank: int
    tokens_per_expert: int
    is_token_in_rank: int
    def __init__(self) -> None: ...
    @property
    def address(self) -> int: ...
    def launch(self, kernel: CudaKernel, shape: CudaLaunch, stream: int) -> None: ...

class CudaPlanArgs:
    alignment: int
    capacity: int
    topk_idx: int
    counted: int
    rows: int
    places: int
    choices: int
    tokens_per_expert: int
    offsets: int
    source_prefix: int
    first_rows: int
    totals: int
    tokens: int
    refused: bool
    @property
    def address(self) -> int: ...
    @property
    def slots(self) -> int: ...
    @property
    def facts(self) -> int: ...
    def copy(self) -> CudaPlanArgs: ...
    def launch(self, kernel: CudaKernel, shape: CudaLaunch, stream: int) -> None: ...

class CudaHighThroughputDispatchArgs:
    scale_token_stride: int
    scale_word_stride: int
    capacity: int
    result_rows: int
    marks_absent: bool
    batch_stride: int
    x: int
    scales: int
    rows: int
    first_rows: int
    lanes: int
    weights: int
    source_prefix: int
    offsets: int
    tokens_per_expert: int
    out: int
    out_scales: int
    row_weights: int
    row_source_rank: int
    row_source_token: int
    offsets_copy: int
    tokens_per_expert_copy: int
    rows_of: int
    topk_idx: int
    topk_weights: int
    source_token: int
    batches: int
    tokens: int
    refused: bool
    @property
    def address(self) -> int: ...
    @property
    def slots(self) -> int: ...
    @property
    def facts(self) -> int: ...
    def copy(self) -> CudaHighThroughputDispatchArgs: ...
    def launch(self, kernel: CudaKernel, shape: CudaLaunch, stream: int) -> None: ...

class CudaHighThroughputCombineArgs:
    kept: int
    lag: int
    last_lag: int
    biases: int
    batch_stride: int
    batches: int
    source_prefix: int
    rows_of: int
    y: int
    row_weights: int
    lane_weights: int
    rows: int
    out: int
    out_weights: int
    tokens: int
    refused: bool
    @property
    def address(self) -> int: ...
    @property
    def slots(self) -> int: ...
    @property
    def facts(self) -> int: ...
    def copy(self) -> CudaHighThroughputCombineArgs: ...
    def launch(self, kernel: CudaKernel, shape: CudaLaunch, stream: int) -> None: ...
    def set_bias(self, place: int, address: int) -> None: ...

class CudaHighThroughputPlace:
    def __init__(
        self,
        rank: int,
        peers: list[int],
        state: int,
        reports: int,
        timeout_ns: int,
        max_tokens: int,
        ring_bytes: int,
    ) -> None: ...

class CudaHighThroughputPhase:
    PLAN: CudaHighThroughputPhase
    DISPATCH: CudaHighThroughputPhase
    COMBINE: CudaHighThroughputPhase

class CudaHighThroughputShape:
    row_bytes: int
    scale_words: int
    slot_bytes: int
    expert_major: int
    in_place: int
    slices: int
    variant: int
    alignment: int
    def __init__(self, phase: CudaHighThroughputPhase, experts: int, top_k: int) -> None: ...

class CudaHighThroughput:
    def __init__(self, place: CudaHighThroughputPlace) -> None: ...
    def plan_arguments(
        self, shape: CudaHighThroughputShape, ctas: int, senders: int
    ) -> CudaPlanArgs: ...
    def dispatch_arguments(
        self, shape: CudaHighThroughputShape, ctas: int, senders: int
    ) -> CudaHighThroughputDispatchArgs: ...
    def combine_arguments(
        self, shape: CudaHighThroughputShape, ctas: int, senders: int
    ) -> CudaHighThroughputCombineArgs: ...

def count_routes(
    topk_idx: Lent,
    sizes: tuple[int, int, int, int],
    tokens_per_rank: Lent,
    tokens_per_expert: Lent,
    is_token_in_rank: Lent,
) -> None: ...
