"""KV in and out of the pool, against picking it by hand."""

from __future__ import annotations

import os
import random
from dataclasses import replace

import google_crc32c
import numpy as np
import pytest
import torch

from workers.engine.kv_pool import KVPool
from workers.errors import FrameError
from workers.kv_transfer.kv_rows import KVRows
from workers.kv_transfer.layout import DTYPE_BYTES, KVLayout
from workers.kv_transfer.segment import PLACE_BYTES, Mappings
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


def shared_pool(dtype: str, block_size: int, seed: int) -> KVPool:
    layout = KVLayout("f", LAYERS, 2, 8, block_size, dtype)
    pool = KVPool(layout, 48 // block_size, torch.device("cpu"), shared=True)
    everything = random.Random(seed).randbytes(48 * layout.token_bytes)
    bytes_of(pool)[:] = np.frombuffer(everything, np.uint8).reshape(bytes_of(pool).shape)
    return pool


@every_dtype
@every_range
@pytest.mark.parametrize("block_sizes", [(4, 4), (4, 8), (8, 4), (12, 8)])
@pytest.mark.parametrize("checked", [True, False])
def test_what_is_pulled_out_of_another_pool_is_what_would_be_read_there(dtype, tokens, block_sizes, checked):
    (start, end), layers = tokens, (1, LAYERS)
    sender, receiver = (shared_pool(dtype, size, seed) for seed, size in enumerate(block_sizes))
    ours, theirs = (
        slots_of(random.Random(size).sample(range(48 // size), 24 // size), start, end, size) for size in block_sizes
    )
    payload = bytearray((end - start) * 2 * sender._layout.token_bytes_per_layer)
    sender.read(ours, *layers, memoryview(payload))
    want = bytes_of(receiver).copy()
    for at, slot in enumerate(theirs):
        want[1:, :, slot] = bytes_of(sender)[1:, :, ours[at]]

    rows = sender.locate(ours, *layers)
    assert bytes(rows) == payload
    there = KVRows.decode(rows.encode(), Mappings())
    if checked:
        size = sender._layout.token_bytes_per_layer // 2
        tokens_of_it = [bytes(payload[at : at + size]) for at in range(0, len(payload), size)]
        assert receiver.pull_and_check(theirs, *layers, there).tolist() == [*map(google_crc32c.value, tokens_of_it)]
    else:
        receiver.pull(theirs, *layers, there)
    assert (bytes_of(receiver) == want).all()


def test_a_pool_of_its_own_memory_is_nowhere_to_be_read_by_others():
    assert not make_pool("float32", seed=1).locate([0, 1], 0, 1).place


def test_a_pool_is_there_where_no_memory_can_be_shared(monkeypatch, caplog):
    def no_memfd(name: str, flags: int) -> int:
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(os, "memfd_create", no_memfd)
    pool = shared_pool("float32", 4, seed=1)
    assert not pool.locate([0, 1], 0, 1).place
    assert "Function not implemented" in caplog.text
    room = bytearray(2 * pool._layout.token_bytes)
    pool.read([0, 1], 0, LAYERS, memoryview(room))
    assert room == bytes_of(pool)[:, :, [0, 1]].tobytes()


def test_kv_of_another_shape_is_not_pulled():
    pool = shared_pool("float32", 4, seed=1)
    rows = pool.locate(range(8), 0, 2)
    receiver = shared_pool("float32", 4, seed=2)
    with pytest.raises(FrameError, match="KV of 7 tokens and 2 layers is"):
        receiver.pull(range(7), 0, 2, rows)
    with pytest.raises(FrameError, match="2 tokens of K or V are"):
        receiver.pull(range(8), 0, 2, replace(rows, row_tokens=2))


@pytest.mark.parametrize(
    "elsewhere", [{"plane_rows": 13}, {"num_planes": 9}, {"first_plane": 99}, {"row_bytes": 0}, {"row_tokens": 0}]
)
def test_rows_outside_the_memory_that_is_shared_are_refused(elsewhere):
    pool = shared_pool("float32", 4, seed=1)
    rows = pool.locate(range(8, 48), 0, LAYERS)
    with pytest.raises(FrameError, match="lies outside the memory"):
        KVRows.decode(replace(rows, **elsewhere).encode(), Mappings())
    for index in ([12], [-1]):
        with pytest.raises(FrameError, match="lies outside the memory"):
            KVRows.decode(replace(rows, index=np.array(index)).encode(), Mappings())
    whole = rows.encode()
    for end in (*range(PLACE_BYTES + 24), len(whole) - 1):
        with pytest.raises(FrameError):
            KVRows.decode(whole[:end], Mappings())
