"""Megatron-LM's flexible dispatcher over ``deep_ep`` on GPUs, against plain products.
``make test-frameworks-gpu`` installs what it needs."""

from __future__ import annotations

import pytest
import torch

from tests.frameworks.test_megatron import (
    LAYERS,
    PADDED,
    Layer,
    assert_near,
    layer_results,
    without_communication,
)
from tests.gpu.conftest import GpuPools, gpu_count, gpus, needs_gpu

__all__ = ["gpus", "needs_gpu"]  # fixtures

pytestmark = [pytest.mark.frameworks, pytest.mark.gpu, pytest.mark.timeout(600)]

GPU = torch.device("cuda")


def check(gpus: GpuPools, layer: Layer, kind: str) -> None:
    if layer.ranks > max(2, gpu_count()):
        pytest.skip(f"needs {layer.ranks} GPUs, there is {gpu_count()}")
    plain = [without_communication(layer, rank) for rank in range(layer.ranks)]
    assert_near(gpus.run(layer.ranks, layer_results, layer, kind, GPU), plain)


@pytest.mark.parametrize("layer", LAYERS, ids=lambda layer: f"{layer.tokens}-{layer.seed}")
@pytest.mark.parametrize("kind", ["deepep", "hybridep"])
def test_like_plain_products(gpus: GpuPools, layer: Layer, kind: str) -> None:
    check(gpus, layer, kind)


def test_experts_of_a_fixed_number_of_rows(gpus: GpuPools) -> None:
    check(gpus, PADDED, "hybridep")
