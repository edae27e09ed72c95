"""KV of a hand-off out of one pool and into another: the bits of the slots, and of no others."""

from __future__ import annotations

import pytest
import torch

from workers.layers.kv_codec import pool_width

pytest.importorskip("triton", reason="the kernels of a GPU need Triton: pip install triton")
from workers.layers.triton_kv import gather_slots, scatter_slots


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8], ids=str)
@pytest.mark.parametrize("num_slots", [1, 4, 9])
def test_slots_come_and_go_bit_for_bit(dtype: torch.dtype, num_slots: int) -> None:
    generator = torch.Generator().manual_seed(num_slots)
    shape = (3, 2, 5, 4, 2, pool_width(dtype, 20))
    of, to = (torch.randint(-100, 100, shape, generator=generator).to(dtype) for _ in range(2))
    slots, others = torch.randperm(20, generator=generator)[:num_slots], torch.randperm(20)[:num_slots]
    packed = torch.empty((3, 2, num_slots, *shape[4:]), dtype=dtype)
    gather_slots(of, slots, packed)
    assert torch.equal(packed, of.flatten(2, 3)[:, :, slots])
    want = to.clone()
    want.flatten(2, 3)[:, :, others] = packed
    scatter_slots(to, others, packed)
    assert torch.equal(to, want)


def test_some_layers_of_a_pool() -> None:
    pool = torch.randn((4, 2, 3, 4, 1, 8))
    packed = torch.empty((2, 2, 5, 1, 8))
    slots = torch.tensor([11, 0, 3, 4, 7])
    gather_slots(pool[1:3], slots, packed)
    assert torch.equal(packed, pool[1:3].flatten(2, 3)[:, :, slots])
