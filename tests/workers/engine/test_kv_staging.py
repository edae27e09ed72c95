"""KV by way of staging buffers, as on a GPU: what the pool itself reads and writes."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from workers.engine.kv_pool import KVPool
from workers.errors import FrameError
from workers.kv_transfer.layout import KVLayout

pytest.importorskip("triton", reason="the kernels of a GPU need Triton: pip install triton")
from workers.engine import kv_staging
from workers.engine.kv_staging import KVStaging

LAYOUT = KVLayout("f", num_layers=3, num_kv_heads=2, head_dim=8, block_size=4, dtype="float32")
SLOTS = [9, 8, 3, 20, 1]


def filled_pool(seed: int) -> KVPool:
    pool = KVPool(LAYOUT, 8, torch.device("cpu"))
    pool.tensor.copy_(torch.randn(pool.tensor.shape, generator=torch.Generator().manual_seed(seed)))
    return pool


def room_for(num_layers: int) -> bytearray:
    return bytearray(num_layers * len(SLOTS) * LAYOUT.token_bytes_per_layer)


@pytest.mark.parametrize("piece_bytes", [100, 1 << 20])
def test_it_reads_and_writes_what_the_pool_does(monkeypatch: pytest.MonkeyPatch, piece_bytes: int) -> None:
    monkeypatch.setattr(kv_staging, "PIECE_BYTES", piece_bytes)
    source, target, other = filled_pool(0), filled_pool(1), filled_pool(1)
    staging, received = KVStaging(source.tensor), KVStaging(target.tensor)
    # The buffers of the first are there for the second, smaller one.
    for layers in (slice(0, 3), slice(1, 2)):
        room, want = room_for(layers.stop - layers.start), room_for(layers.stop - layers.start)
        staging.read(SLOTS, layers, memoryview(room))
        source.read(SLOTS, layers.start, layers.stop, memoryview(want))
        assert room == want
        places = np.array(SLOTS) + 2
        received.write(places, layers, bytes(room))
        other.write(places, layers.start, layers.stop, bytes(room))
        assert torch.equal(target.tensor, other.tensor)


def test_another_size_is_refused() -> None:
    staging = KVStaging(filled_pool(0).tensor)
    for num_bytes in (0, len(room_for(2)) - 1, len(room_for(3))):
        with pytest.raises(FrameError, match="KV of 5 tokens"):
            staging.read(SLOTS, slice(1, 3), memoryview(bytearray(num_bytes)))
        with pytest.raises(FrameError, match="KV of 5 tokens"):
            staging.write(SLOTS, slice(1, 3), bytes(num_bytes))
