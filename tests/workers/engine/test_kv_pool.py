"""KV in and out of the pool, against picking it by hand."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from workers.engine.kv_pool import KVPool
from workers.errors import FrameError
from workers.kv_transfer.layout import DTYPE_BYTES, KVLayout
from workers.kv_transfer.slots import slots_of

LAYERS, BLOCKS, BLOCK_SIZE = 3, 12, 4
TABLE = [7, 2, 3, 11, 0]

every_dtype = pytest.mark.parametrize("dtype", DTYPE_BYTES)
# Of the block table's 20 positions: whole blocks, one of them, their parts, and neighbours in the pool.
every_range = pytest.mark.parametrize(
    "tokens", [(0, 20), (4, 8), (4, 12), (0, 3), (1, 4), (3, 9), (2, 10), (6, 20), (17, 18)]
)


def make_pool(dtype: str, seed: int) -> KVPool:
    layout = KVLayout("f", LAYERS, 2, 8, BLOCK_SIZE, dtype)
    pool = KVPool(layout, BLOCKS, torch.device("cpu"))
    everything = random.Random(seed).randbytes(BLOCKS * BLOCK_SIZE * layout.token_bytes)
    bytes_of(pool)[:] = np.frombuffer(everything, np.uint8).reshape(bytes_of(pool).shape)
    return pool


def bytes_of(pool: KVPool) -> np.ndarray:
    """[layers, 2, slots, bytes of a token's K or V]: the pool's own memory."""
    return pool.tensor.view(torch.uint8).view(LAYERS, 2, BLOCKS * BLOCK_SIZE, -1).numpy()


@every_dtype
@every_range
@pytest.mark.parametrize("layers", [(0, LAYERS), (1, 2), (1, 3)])
def test_what_is_read_is_what_lies_at_each_position_and_writing_puts_it_just_there(dtype, tokens, layers):
    (start, end), (first, last) = tokens, layers
    pool = make_pool(dtype, seed=1)
    slots = [TABLE[p // BLOCK_SIZE] * BLOCK_SIZE + p % BLOCK_SIZE for p in range(start, end)]
    by_hand = b"".join(
        bytes_of(pool)[layer, k_or_v, slot].tobytes()
        for layer in range(first, last)
        for k_or_v in (0, 1)
        for slot in slots
    )
    room = bytearray(len(by_hand))
    pool.read(slots_of(TABLE, start, end, BLOCK_SIZE), first, last, memoryview(room))
    assert room == by_hand

    other = make_pool(dtype, seed=2)
    want = bytes_of(other).copy()
    table = TABLE[::-1]
    targets = [table[p // BLOCK_SIZE] * BLOCK_SIZE + p % BLOCK_SIZE for p in range(start, end)]
    for slot, target in zip(slots, targets, strict=True):
        want[first:last, :, target] = bytes_of(pool)[first:last, :, slot]
    other.write(slots_of(table, start, end, BLOCK_SIZE), first, last, bytes(room))
    assert (bytes_of(other) == want).all()


def test_blocks_of_another_size_take_the_same_kv():
    sender, layout = make_pool("float32", seed=3), KVLayout("f", LAYERS, 2, 8, 6, "float32")
    receiver = KVPool(layout, 4, torch.device("cpu"))
    room = bytearray(20 * layout.token_bytes)
    sender.read(slots_of(TABLE, 0, 20, BLOCK_SIZE), 0, LAYERS, memoryview(room))
    receiver.write(slots_of([3, 1, 0, 2], 0, 20, 6), 0, LAYERS, room)
    again = bytearray(len(room))
    receiver.read(slots_of([3, 1, 0, 2], 0, 20, 6), 0, LAYERS, memoryview(again))
    assert again == room


def test_a_room_of_another_size_is_refused():
    pool = make_pool("float32", seed=4)
    for size in (1, -1):
        room = memoryview(bytearray(2 * pool._layout.token_bytes + size))
        with pytest.raises(FrameError, match="KV of 2 tokens and 3 layers is"):
            pool.read([1, 2], 0, LAYERS, room)
