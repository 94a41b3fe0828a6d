"""The fast path of a low-latency call accepts what the tensors of nearly all calls are, nothing
that is not so, and writes down where they are."""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from fanfold import _core
from fanfold.backends.low_latency import RoutingLayout
from fanfold.backends.low_latency.sizes import core_geometry
from fanfold.backends.low_latency.validation import check_apart, fast_path_of
from fanfold.errors import ArgumentError
from fanfold.geometry import Geometry, is_plain

CPU = torch.device("cpu")
GEOMETRY = Geometry(ranks=3, num_experts=6, top_k=2, hidden=32, max_tokens=4)
LOCAL, CAPACITY, HIDDEN = 2, 12, 32
LAYOUT = RoutingLayout.of(GEOMETRY, _core.cuda_table_bytes(core_geometry(GEOMETRY)))
PART_BYTES = [4 * at for at in (LAYOUT.table_at, LAYOUT.source_tokens_at, LAYOUT.row_weights_at)]
FIELDS = {
    _core.CudaDispatchArgs: (
        "tokens", "x", "topk_idx", "topk_weights", "rows", "scales", "counts", "source_tokens",
        "ranges", "row_weights", "table", "expert_totals", "wait_ns", "phases", "refused",
    ),
    _core.CudaCombineArgs: (
        "tokens", "y", "expert_stride", "row_stride", "ranges", "table", "weighted", "topk_idx",
        "topk_weights", "out", "wait_ns", "phases", "refused",
    ),
}  # fmt: skip


class Derived(torch.Tensor):
    """A class of its own."""


class Like:
    """Answers as a tensor does."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tensor, name)


@pytest.fixture
def fast_path() -> _core.CudaFastPath:
    if not hasattr(torch.Tensor, "__dlpack_c_exchange_api__"):
        pytest.skip(f"PyTorch {torch.__version__} does not let tensors be read from C++")
    return fast_path_of(GEOMETRY, LAYOUT, CPU)


def dispatch_arguments() -> _core.CudaDispatchArgs:
    return _mode().dispatch_arguments(0, 0)


def combine_arguments() -> _core.CudaCombineArgs:
    return _mode().combine_arguments(False, 0)


def _mode() -> _core.CudaLowLatency:
    place = _core.CudaLowLatencyPlace(
        rank=0, peers=[4096] * 3, state=0, reports=0, timeout_ns=1, mask_late=False
    )
    return _core.CudaLowLatency(place, core_geometry(GEOMETRY), False, 4, 1)


def fields(args: Any) -> dict[str, int]:
    return {name: getattr(args, name) for name in FIELDS[type(args)]}


def shifted(tensor: torch.Tensor, elements: int = 1) -> torch.Tensor:
    """A copy that lies so many elements behind a 16-byte boundary."""
    room = torch.empty(tensor.numel() + 64, dtype=tensor.dtype)
    begin = -room.data_ptr() % 64 // tensor.element_size() + elements
    copy = room[begin : begin + tensor.numel()].view(tensor.shape)
    assert not len(tensor) or copy.data_ptr() % 64 == elements * tensor.element_size() % 64
    return copy.copy_(tensor)


def variants(tensor: torch.Tensor) -> Iterator[Any]:
    """The tensor, what is as good, and what is like it in most."""
    yield from (tensor, shifted(tensor), shifted(tensor, 8), tensor.clone())
    yield from (tensor.to(other) for other in _DTYPES if other is not tensor.dtype)
    yield from (tensor.view(torch.uint8), tensor.to("meta"), tensor.to_sparse())
    yield from (torch.nn.Parameter(tensor, False), tensor.as_subclass(Derived))
    yield from (tensor[:0], tensor[:1], tensor[:-1], torch.cat((tensor, tensor)))
    yield from (tensor[..., :-1], tensor[..., ::2], tensor[..., :-1].contiguous())
    yield from (tensor.flip(0), tensor.mT, tensor.mT.contiguous().mT, tensor.flatten())
    yield from (
        tensor[None],
        tensor[..., None],
        tensor[:1].expand(tensor.shape),
        tensor.unflatten(0, (-1, 1)),
    )
    yield torch.zeros((), dtype=tensor.dtype)
    if len(tensor) == 1:
        yield tensor.as_strided(tensor.shape, (7, *tensor.stride()[1:]))
    wide = torch.zeros((*tensor.shape[:-1], tensor.shape[-1] + 8), dtype=tensor.dtype)
    yield wide[..., : tensor.shape[-1]]
    if tensor.is_floating_point():
        yield tensor.clone().requires_grad_()
        yield torch._neg_view(tensor)
        yield tensor.clone().requires_grad_() * 1
        yield torch.complex(tensor.float(), tensor.float()).conj()
    yield from (Like(tensor), tensor.tolist(), None, 7, "x", torch.Tensor, object(), tensor.numpy)


_DTYPES = (
    torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.int16, torch.int32,
    torch.int64, torch.uint16, torch.bool, torch.complex64, torch.float8_e4m3fn,
)  # fmt: skip


def tokens(count: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    shape = (count, 2)
    x = torch.ones((count, HIDDEN), dtype=torch.bfloat16)
    return x, torch.ones(shape, dtype=torch.int64), torch.ones(shape)


def one_at_a_time(*good: torch.Tensor) -> Iterator[tuple[Any, ...]]:
    for place, tensor in enumerate(good):
        for variant in variants(tensor):
            yield *good[:place], variant, *good[place + 1 :]


def verdict_on(
    fast_path: _core.CudaFastPath, make: Callable[[], Any], name: str, given: tuple[Any, ...]
) -> Any:
    """What it says of a call, and the arguments, which it has filled in only if it accepts."""
    args = make()
    before = fields(args)
    verdict = getattr(fast_path, name)(args, *given)
    after = fields(args)
    assert verdict is True or (verdict is not False and verdict >= 0) or after == before
    return verdict, after


# ---- a dispatch's tokens ------------------------------------------------------------------------


@pytest.mark.parametrize("count", range(6))
def test_dispatch(fast_path: _core.CudaFastPath, count: int) -> None:
    passed = 0
    for x, idx, weights in (*one_at_a_time(*tokens(count)), (*tokens(count)[:2], None)):
        verdict, args = verdict_on(fast_path, dispatch_arguments, "dispatch", (x, idx, weights))
        right = (
            is_plain(x, (count, HIDDEN), torch.bfloat16, CPU)
            and x.data_ptr() % 16 == 0
            and is_plain(idx, (count, 2), torch.int64, CPU)
            and (weights is None or is_plain(weights, (count, 2), torch.float32, CPU))
            and count <= 4
        )
        assert verdict == (count if right else -1), (x, idx, weights)
        passed += right
        if right:
            assert (args["tokens"], args["x"], args["topk_idx"]) == (
                count, x.data_ptr(), idx.data_ptr(),
            )  # fmt: skip
            assert args["topk_weights"] == (0 if weights is None else weights.data_ptr())
    assert (passed > 10) == (count <= 4)


def test_dispatch_of_any_pair(fast_path: _core.CudaFastPath) -> None:
    for given in itertools.product(*map(variants, tokens(1)[:2])):
        verdict, _ = verdict_on(fast_path, dispatch_arguments, "dispatch", (*given, None))
        right = (
            is_plain(given[0], (verdict, HIDDEN), torch.bfloat16, CPU)
            and given[0].data_ptr() % 16 == 0
            and is_plain(given[1], (verdict, 2), torch.int64, CPU)
        )
        assert right if verdict >= 0 else not _fits(*given), given


def _fits(x: Any, idx: Any) -> bool:
    """Whether these are plain, and of as many tokens, up to four."""
    count = len(x) if isinstance(x, torch.Tensor) and x.dim() else 0
    return (
        count <= 4
        and is_plain(x, (count, HIDDEN), torch.bfloat16, CPU)
        and x.data_ptr() % 16 == 0
        and is_plain(idx, (count, 2), torch.int64, CPU)
    )


def test_other_numbers_of_tokens_each_time(fast_path: _core.CudaFastPath) -> None:
    for count in (3, 0, 4, 5, 1, 4):
        for idx_count, weights_count in itertools.product((count, 2), repeat=2):
            given = tokens(count)[0], tokens(idx_count)[1], tokens(weights_count)[2]
            verdict, _ = verdict_on(fast_path, dispatch_arguments, "dispatch", given)
            right = idx_count == weights_count == count <= 4
            assert verdict == (count if right else -1)


# ---- a combine ----------------------------------------------------------------------------------


@pytest.mark.parametrize("count", range(6))
def test_late(fast_path: _core.CudaFastPath, count: int) -> None:
    ranges, passed = torch.ones((LOCAL, 3), dtype=torch.int64), 0
    for given in one_at_a_time(ranges, *tokens(count)[1:]):
        verdict, args = verdict_on(fast_path, combine_arguments, "late", given)
        right = (
            is_plain(given[0], (LOCAL, 3), torch.int64, CPU)
            and is_plain(given[1], (count, 2), torch.int64, CPU)
            and is_plain(given[2], (count, 2), torch.float32, CPU)
            and count <= 4
        )
        assert verdict == (count if right else -1), given
        passed += right
        if right:
            addresses = [args[name] for name in ("ranges", "topk_idx", "topk_weights")]
            assert addresses == [tensor.data_ptr() for tensor in given]
    assert (passed > 10) == (count <= 4)


@pytest.mark.parametrize("count", [0, 1, 4])
def test_combine(fast_path: _core.CudaFastPath, count: int) -> None:
    y = torch.ones((LOCAL, CAPACITY, HIDDEN), dtype=torch.bfloat16)
    out = torch.ones((count, HIDDEN), dtype=torch.bfloat16)
    block = torch.zeros(LAYOUT.words, dtype=torch.int32)
    for outputs, result in one_at_a_time(y, out):
        for kept in (block, None):
            given = (count, outputs, result, kept)
            verdict, args = verdict_on(fast_path, combine_arguments, "combine", given)
            right = (
                is_plain(outputs, tuple(y.shape), torch.bfloat16, CPU)
                and is_plain(result, (count, HIDDEN), torch.bfloat16, CPU)
                and outputs.data_ptr() % 16 == result.data_ptr() % 16 == 0
            )
            assert verdict is right, given
            if right:
                assert (args["y"], args["out"]) == (outputs.data_ptr(), result.data_ptr())
                assert (args["expert_stride"], args["row_stride"]) == (64 * CAPACITY, 64)
                assert args["tokens"] == count
                assert args["table"] == (0 if kept is None else kept.data_ptr() + PART_BYTES[0])
    for odd in (block.as_subclass(Derived), block.to("meta").as_subclass(Derived), 7):
        assert verdict_on(fast_path, combine_arguments, "combine", (count, y, out, odd))[0] is False
    assert (
        verdict_on(fast_path, combine_arguments, "combine", (count + 1, y, out, block))[0] is False
    )


def test_results_in_the_memory_of_outputs(fast_path: _core.CudaFastPath) -> None:
    rows = LOCAL * CAPACITY
    room = torch.zeros((rows + 8, HIDDEN), dtype=torch.bfloat16)
    y = room[4 : 4 + rows].view(LOCAL, CAPACITY, HIDDEN)
    for begin in range(rows + 6):
        out = room[begin : begin + 2]
        apart = begin + 2 <= 4 or begin >= 4 + rows
        assert verdict_on(fast_path, combine_arguments, "combine", (2, y, out, None))[0] is apart
        empty = room[begin:begin]
        assert verdict_on(fast_path, combine_arguments, "combine", (0, y, empty, None))[0] is True
    ahead = room.flatten()[4 * HIDDEN - 56 :][: 2 * HIDDEN].view(2, HIDDEN)  # by 8 elements
    assert verdict_on(fast_path, combine_arguments, "combine", (2, y, ahead, None))[0] is False


@pytest.mark.parametrize(
    "strides", [(6, 2, 1), (8, 2, 1), (40, 8, 1), (3, 16, 1), (5, 0, 1), (0, 0, 1), (1, 1, 1)]
)
def test_rows_with_gaps_between_them(strides: tuple[int, int, int]) -> None:
    room = torch.arange(96, dtype=torch.bfloat16)
    y = room.as_strided((2, 3, 2), strides, 8)
    taken = {int(element) for element in y.flatten()}
    for begin, rows in itertools.product(range(90), (0, 1, 2)):
        out = room[begin : begin + 2 * rows].view(rows, 2)
        if taken.isdisjoint(range(begin, begin + 2 * rows)):
            check_apart(y, out)
        else:
            with pytest.raises(ArgumentError, match=r"out is .*, but must be memory of its own"):
                check_apart(y, out)


# ---- the DeepEP face ----------------------------------------------------------------------------


@pytest.mark.parametrize("count", [0, 1, 4, 5])
def test_columns_tell_the_geometry(fast_path: _core.CudaFastPath, count: int) -> None:
    passed = 0
    for given in one_at_a_time(*tokens(count)[:2]):
        right = all(
            type(matrix) is torch.Tensor and matrix.dim() == 2 and matrix.shape[1] == columns
            for matrix, columns in zip(given, (HIDDEN, 2), strict=True)
        )
        # DLPack has no words for some.
        told = all(not isinstance(m, torch.Tensor) or not (m.is_meta or m.is_sparse) for m in given)
        assert fast_path.suits(*given) is (right and told), given
        passed += right
    assert passed > 20


def test_handles(fast_path: _core.CudaFastPath) -> None:
    y = torch.ones((LOCAL, CAPACITY, HIDDEN), dtype=torch.bfloat16)
    source_tokens = torch.ones((LOCAL, CAPACITY), dtype=torch.int32)
    ranges, idx = torch.ones((LOCAL, 3), dtype=torch.int64), tokens(2)[1]
    passed = 0
    for given in one_at_a_time(y, source_tokens, ranges):
        right = (
            is_plain(given[0], tuple(y.shape), torch.bfloat16, CPU)
            and is_plain(given[1], (LOCAL, CAPACITY), torch.int32, CPU)
            and is_plain(given[2], (LOCAL, 3), torch.int64, CPU)
        )
        for choices in (idx, tokens(2)[0], idx[0], None):
            found = fast_path.suits_handle(*given, choices)
            assert found is (right and choices is idx), (given, choices)
        passed += right
    assert passed > 10


# ---- what a dispatch writes ---------------------------------------------------------------------


def test_places(fast_path: _core.CudaFastPath) -> None:
    made = [torch.zeros(size, dtype=torch.int32) for size in range(1, 7)]
    rows, scales, counts, ranges, source_tokens, weights = made
    block = torch.zeros(LAYOUT.words, dtype=torch.int32)
    routing = (ranges, source_tokens)
    found: list[dict[str, int]] = []
    for given, weighted in itertools.product((scales, None), (True, False)):
        args = dispatch_arguments()
        fast_path.place(args, rows, given, counts, block, weighted)
        found.append(fields(args))
        args = dispatch_arguments()
        fast_path.place_late(args, rows, given, counts, *routing, weights if weighted else None)
        found.append(fields(args))
    whole, late, *_, bare, bare_late = found
    for filled in (whole, late):
        places = [filled[name] for name in ("rows", "scales", "counts")]
        assert places == [tensor.data_ptr() for tensor in (rows, scales, counts)]
    parts = [whole[name] for name in ("ranges", "table", "source_tokens", "row_weights")]
    assert parts == [block.data_ptr() + at for at in (0, *PART_BYTES)]
    parts = [late[name] for name in ("ranges", "source_tokens", "row_weights")]
    assert parts == [tensor.data_ptr() for tensor in (*routing, weights)]
    for filled in (bare, bare_late):
        assert (filled["scales"], filled["row_weights"], filled["rows"]) == (0, 0, rows.data_ptr())


def test_places_of_tensors_of_another_class(fast_path: _core.CudaFastPath) -> None:
    block, rows = torch.zeros(LAYOUT.words, dtype=torch.int32), torch.zeros(1)
    derived = rows.as_subclass(Derived), block.as_subclass(Derived)
    blind = _core.CudaFastPath(None, core_geometry(GEOMETRY), *PART_BYTES)
    for each in (fast_path, blind):
        args = dispatch_arguments()
        each.place(args, derived[0], None, rows, derived[1], False)
        assert (args.rows, args.counts, args.ranges) == (
            rows.data_ptr(), rows.data_ptr(), block.data_ptr(),
        )  # fmt: skip
        with pytest.raises(AttributeError, match="data_ptr"):
            each.place(args, 7, None, rows, block, True)  # type: ignore[arg-type]


# ---- what PyTorch offers ------------------------------------------------------------------------

_new_capsule = ctypes.pythonapi.PyCapsule_New
_new_capsule.restype = ctypes.py_object
_new_capsule.argtypes = (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)


class Described(ctypes.Structure):
    """A tensor in DLPack's words."""

    _fields_ = (
        ("data", ctypes.c_uint64),
        ("device", ctypes.c_int32 * 2),
        ("dimensions", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )

    @classmethod
    def of(cls, device: tuple[int, int], code: int, bits: int, *shape: int) -> Described:
        strides = [1] * len(shape)
        for place in range(len(shape) - 1, 0, -1):
            strides[place - 1] = strides[place] * shape[place]
        sizes = ctypes.c_int64 * len(shape)
        return cls(
            1 << 20, device, len(shape), code, bits, 1, sizes(*shape), sizes(*strides), 1 << 12
        )


@ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)
def _read(tensor: int, out: int) -> int:
    """What the object says of itself, or a tensor of no dimensions."""
    described = getattr(ctypes.cast(tensor, ctypes.py_object).value, "described", Described())
    ctypes.memmove(out, ctypes.addressof(described), ctypes.sizeof(Described))
    return 0


class Producer:
    """A class with DLPack's exchange API.

    Args:
        major: its version.
        name: of the capsule.
        older: the API behind it.
        reads: whether it can read tensors.
    """

    def __init__(
        self,
        major: int,
        *,
        name: bytes = b"dlpack_exchange_api",
        older: Producer | None = None,
        reads: bool = True,
    ) -> None:
        read = ctypes.cast(_read, ctypes.c_void_p).value if reads else 0
        behind = 0 if older is None else ctypes.addressof(older.table)
        self.table = (ctypes.c_uint64 * 7)(major, behind, 0, 0, 0, read or 0, 0)
        self.name, self.older = name, older
        self.capsule = _new_capsule(ctypes.addressof(self.table), name, None)

        self.kind: Any = type("Kind", (), {"__dlpack_c_exchange_api__": self.capsule})

    def made(self, described: Described) -> Any:
        """An object of the class."""
        tensor = self.kind()
        tensor.described = described
        return tensor

    def fast_path(self, like: Any = None) -> _core.CudaFastPath:
        """For objects of the class."""
        like = self.kind() if like is None else like
        return _core.CudaFastPath(like, core_geometry(GEOMETRY), *PART_BYTES)

    @property
    def is_read(self) -> bool:
        """Whether objects of the class are."""
        like = self.made(Described.of((1, 0), 4, 16, 0, HIDDEN))
        choices = self.made(Described.of((1, 0), 0, 64, 0, 2))
        return self.fast_path(like).suits(like, choices)


@pytest.mark.parametrize("like", [None, 7, "x", [], torch.float32, object(), torch.Tensor])
def test_without_an_exchange_api_it_accepts_nothing(like: object) -> None:
    blind = _core.CudaFastPath(like, core_geometry(GEOMETRY), *PART_BYTES)
    x, idx, weights = tokens(2)
    y, out = torch.ones((LOCAL, CAPACITY, HIDDEN), dtype=torch.bfloat16), x.clone()
    ranges = torch.ones((LOCAL, 3), dtype=torch.int64)
    assert verdict_on(blind, dispatch_arguments, "dispatch", (x, idx, weights))[0] == -1
    assert verdict_on(blind, combine_arguments, "late", (ranges, idx, weights))[0] == -1
    assert verdict_on(blind, combine_arguments, "combine", (2, y, out, None))[0] is False
    assert blind.suits(x, idx) is False
    sources = torch.ones((LOCAL, CAPACITY), dtype=torch.int32)
    assert blind.suits_handle(y, sources, ranges, idx) is False


def test_which_exchange_api_is_taken() -> None:
    known = Producer(1)
    assert known.is_read
    assert Producer(1 | 9 << 32).is_read  # 1.9
    assert Producer(2, older=known).is_read
    assert Producer(3, older=Producer(2, older=known)).is_read
    assert not Producer(1, name=b"another").is_read
    assert not Producer(1, reads=False).is_read
    assert not Producer(0).is_read
    assert not Producer(2).is_read
    assert not Producer(2, older=Producer(0)).is_read


def test_devices_and_dtypes_are_told_apart() -> None:
    producer, gpu = Producer(1), (2, 3)
    fast_path = producer.fast_path(producer.made(Described.of(gpu, 2, 32, 0)))

    def verdict(**changes: Any) -> int:
        given = {
            "x": Described.of(gpu, 4, 16, 3, HIDDEN),
            "topk_idx": Described.of(gpu, 0, 64, 3, 2),
            "topk_weights": Described.of(gpu, 2, 32, 3, 2),
        }
        args = dispatch_arguments()
        found = fast_path.dispatch(args, *map(producer.made, (given | changes).values()))
        assert args.x == (0 if found < 0 else (1 << 20) + (1 << 12))
        return found

    assert verdict() == 3
    for device in ((2, 0), (2, 4), (1, 3), (1, 0), (10, 3), (13, 3)):
        assert verdict(x=Described.of(device, 4, 16, 3, HIDDEN)) == -1
        assert verdict(topk_idx=Described.of(device, 0, 64, 3, 2)) == -1
        assert verdict(topk_weights=Described.of(device, 2, 32, 3, 2)) == -1
    for code, bits in ((2, 16), (4, 8), (4, 32), (0, 16)):
        assert verdict(x=Described.of(gpu, code, bits, 3, HIDDEN)) == -1
    pairs = Described.of(gpu, 4, 16, 3, HIDDEN)
    pairs.lanes = 2
    assert verdict(x=pairs) == -1
    moved = Described.of(gpu, 4, 16, 3, HIDDEN)
    moved.byte_offset += 8
    assert verdict(x=moved) == -1
    bare = Described.of(gpu, 4, 16, 3, HIDDEN)
    bare.strides = None
    assert verdict(x=bare) == -1
