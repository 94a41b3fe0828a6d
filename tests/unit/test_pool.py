"""Recycled memory is never handed out while anything can still see it."""

from __future__ import annotations

import torch

from fanfold.pool import OutputPool

SHAPE = (4, 256, 128)


def test_memory_comes_back_with_the_last_tensor_over_it() -> None:
    pool = OutputPool()
    first = pool.empty(SHAPE, torch.bfloat16)
    address = first.data_ptr()
    view, storage = first[1], first.untyped_storage()
    del first
    assert pool.empty(SHAPE, torch.bfloat16).data_ptr() != address
    del view
    assert pool.empty(SHAPE, torch.bfloat16).data_ptr() != address
    del storage
    assert pool.empty(SHAPE, torch.bfloat16).data_ptr() == address


def test_sizes_that_differ_a_little_share_memory() -> None:
    pool = OutputPool()
    address = pool.empty((1000, 1000), torch.float32).data_ptr()
    assert pool.empty((1001, 1000), torch.float32).data_ptr() == address


def test_shapes_and_dtypes() -> None:
    pool = OutputPool()
    for shape in [(), (0,), (3, 0, 5), (7,), (300, 300)]:
        for dtype in (torch.float8_e4m3fn, torch.bfloat16, torch.int64):
            tensor = pool.empty(shape, dtype)
            assert (tensor.shape, tensor.dtype) == (torch.Size(shape), dtype)
            assert tensor.is_contiguous()
            tensor.view(torch.uint8).fill_(7) if tensor.dim() else None


def test_tensors_outlive_the_pool() -> None:
    tensor = OutputPool().empty(SHAPE, torch.float32)
    tensor.fill_(2.0)
    assert float(tensor.sum()) == 2.0 * tensor.numel()


def test_keeps_no_more_than_was_in_use_at_once() -> None:
    pool = OutputPool()
    for kibibytes in range(100, 2000, 50):
        pool.empty((kibibytes, 1024), torch.uint8)
    kept = sum(map(len, pool._free))
    assert 0 < kept <= pool._most_lent_bytes < 2.3 * 2**20


def test_an_unused_block_serves_smaller_results() -> None:
    pool = OutputPool()
    address = pool.empty((1000, 1000), torch.float32).data_ptr()
    assert pool.empty((600, 1000), torch.float32).data_ptr() == address
    assert pool.empty((100, 1000), torch.float32).data_ptr() != address
