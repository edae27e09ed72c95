"""KV into and out of the pool, as Triton kernels: of a step's tokens, and of the slots of a hand-off."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

# Slots that one program of a hand-off copies.
SLOT_TILE = 4


def store_kv(k: torch.Tensor, v: torch.Tensor, kv_cache: torch.Tensor, slot_mapping: torch.Tensor) -> None:
    """Put k and v [num_tokens, num_kv_heads, pool_width] into their slots; a slot below 0 is none.

    kv_cache: the layer's [2, num_blocks, block_size, num_kv_heads, pool_width], of the same dtype. Rows of k and v may
    be apart, their heads lie side by side.
    """
    size = k.shape[1] * k.shape[2]
    _store[(len(slot_mapping),)](
        kv_cache, k, v, slot_mapping, k.stride(0), v.stride(0), kv_cache[0].numel(), SIZE=size,
        TILE=triton.next_power_of_2(size), num_warps=4,
    )  # fmt: skip


def gather_slots(pool: torch.Tensor, slots: torch.Tensor, packed: torch.Tensor) -> None:
    """packed [layers, 2, num_slots, num_kv_heads, pool_width] of the slots of a pool
    [layers, 2, num_blocks, block_size, num_kv_heads, pool_width]; bits are copied, whatever the dtype."""
    _copy_slots(pool, slots, packed, to_pool=False)


def scatter_slots(pool: torch.Tensor, slots: torch.Tensor, packed: torch.Tensor) -> None:
    """What gather_slots gave elsewhere into the slots of this pool."""
    _copy_slots(pool, slots, packed, to_pool=True)


def _copy_slots(pool: torch.Tensor, slots: torch.Tensor, packed: torch.Tensor, to_pool: bool) -> None:
    words, room = pool.flatten(-2).view(torch.int32), packed.flatten(-2).view(torch.int32)
    size = words.shape[-1]
    _copy[(triton.cdiv(len(slots), SLOT_TILE), pool.shape[0] * 2)](
        words, room, slots, len(slots), words[0, 0].numel(), SIZE=size, TILE=triton.next_power_of_2(size),
        SLOT_TILE=SLOT_TILE, TO_POOL=to_pool, num_warps=4,
    )  # fmt: skip


@triton.jit
def _store(kv_ptr, k_ptr, v_ptr, slots_ptr, k_stride, v_stride, plane, SIZE: tl.constexpr, TILE: tl.constexpr):
    """A program has one token."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + token).to(tl.int64)
    if slot >= 0:
        at = tl.arange(0, TILE)
        mask = at < SIZE
        out_ptr = kv_ptr + slot * SIZE + at
        tl.store(out_ptr, tl.load(k_ptr + token * k_stride + at, mask=mask), mask=mask)
        tl.store(out_ptr + plane, tl.load(v_ptr + token * v_stride + at, mask=mask), mask=mask)


@triton.jit(do_not_specialize=["num_slots"])
def _copy(
    pool_ptr, packed_ptr, slots_ptr, num_slots, plane,
    SIZE: tl.constexpr, TILE: tl.constexpr, SLOT_TILE: tl.constexpr, TO_POOL: tl.constexpr,
):  # fmt: skip
    """A program has SLOT_TILE slots of K or V of one layer."""
    number = tl.program_id(0) * SLOT_TILE + tl.arange(0, SLOT_TILE)
    slots = tl.load(slots_ptr + number, mask=number < num_slots, other=0).to(tl.int64)
    at = tl.arange(0, TILE)[None, :]
    mask = (number < num_slots)[:, None] & (at < SIZE)
    half = tl.program_id(1).to(tl.int64)
    in_pool = pool_ptr + half * plane + slots[:, None] * SIZE + at
    in_packed = packed_ptr + (half * num_slots + number[:, None]) * SIZE + at
    if TO_POOL:
        tl.store(in_pool, tl.load(in_packed, mask=mask), mask=mask)
    else:
        tl.store(in_packed, tl.load(in_pool, mask=mask), mask=mask)
