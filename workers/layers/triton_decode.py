"""Paged attention of requests with one query each, as Triton kernels that read blocks in place.

A context is cut into splits of SPLIT_TOKENS keys, always at the same places, and the splits are put together in order
(Flash-Decoding, Dao et al. 2023, with fixed splits): a row's bits depend neither on its batch mates nor on the GPU.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from workers.layers.block_tables import BlockTables
from workers.layers.triton_heads import fold, load_heads, scores_of
from workers.layers.triton_shape import Heads

SPLIT_TOKENS = 256
# tl.dot takes no fewer rows.
MIN_ROWS = 16
# Splits put together at a time.
SPLIT_TILE = 16
# Programs that fill a large GPU; further splits are the programs' next ones.
TARGET_PROGRAMS = 1024


def paged_decode(q: torch.Tensor, kv_cache: torch.Tensor, tables: BlockTables, heads: Heads, out: torch.Tensor) -> None:
    """out [num_decodes, num_heads, head_dim] of q likewise; q's rows may be apart, its heads lie side by side.

    kv_cache: the layer's [2, num_blocks, block_size, num_kv_heads, pool_width].
    """
    num_rows, block_size = tables.num_decodes, kv_cache.shape[2]
    num_splits = triton.cdiv(tables.block_ids.shape[1] * block_size, SPLIT_TOKENS)
    partial = torch.empty((num_rows, num_splits, *q.shape[1:]), dtype=torch.float32, device=q.device)
    softmax = torch.empty((2, num_rows, num_splits, heads.num_heads), dtype=torch.float32, device=q.device)
    programs = min(num_splits, triton.cdiv(TARGET_PROGRAMS, num_rows * heads.num_kv_heads))
    _attend_to_splits[(num_rows, heads.num_kv_heads, programs)](
        partial, softmax[0], softmax[1], q, *heads.pool(kv_cache), tables.block_ids, tables.seq_lens,
        q.stride(0), tables.block_ids.stride(0), num_splits, heads.log2_scale, heads.log2_softcap,
        **heads.constants(kv_cache), GROUP_ROWS=max(MIN_ROWS, triton.next_power_of_2(heads.group)),
        KEY_TILE=key_tile(q.dtype), SPLIT=SPLIT_TOKENS, num_warps=4, num_stages=3,
    )  # fmt: skip
    _join_splits[(num_rows, heads.num_heads)](
        out, partial, softmax[0], softmax[1], tables.seq_lens, out.stride(0), num_splits,
        HEAD_DIM=heads.head_dim, DIMS=heads.dims, WINDOW=heads.window or 0,
        SPLIT=SPLIT_TOKENS, SPLIT_TILE=SPLIT_TILE, num_warps=4,
    )  # fmt: skip


def key_tile(dtype: torch.dtype) -> int:
    """Keys at a time."""
    return 32 if dtype is torch.float32 else 64


# Whatever a step's tables look like, it is the same kernel: no other is compiled while requests wait.
@triton.jit(do_not_specialize=["table_stride", "num_splits"])
def _attend_to_splits(
    partial_ptr, largest_ptr, total_ptr, q_ptr, kv_ptr, scale_ptr, plane, tables_ptr, lens_ptr,
    q_stride, table_stride, num_splits, scale, softcap,
    GROUP: tl.constexpr, NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, DIMS: tl.constexpr, WIDTH: tl.constexpr,
    FP8: tl.constexpr, SOFTCAP: tl.constexpr, WINDOW: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    GROUP_ROWS: tl.constexpr, KEY_TILE: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """A program has one request, one KV head with the query heads that share it, and every n-th split."""
    request = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1)
    length = tl.load(lens_ptr + request)
    first = tl.maximum(length - WINDOW, 0) if WINDOW else 0
    rows, dims = tl.arange(0, GROUP_ROWS), tl.arange(0, DIMS)
    heads = kv_head * GROUP + rows
    within = (rows < GROUP)[:, None] & (dims < HEAD_DIM)[None, :]
    spots = heads[:, None] * HEAD_DIM + dims[None, :]
    q = tl.load(q_ptr + request * q_stride + spots, mask=within, other=0.0)
    for split in range(first // SPLIT + tl.program_id(2), tl.cdiv(length, SPLIT), tl.num_programs(2)):
        largest = tl.full((GROUP_ROWS,), float("-inf"), tl.float32)
        total = tl.zeros((GROUP_ROWS,), tl.float32)
        acc = tl.zeros((GROUP_ROWS, DIMS), tl.float32)
        for start in range(split * SPLIT, tl.minimum(split * SPLIT + SPLIT, length), KEY_TILE):
            keys = start + tl.arange(0, KEY_TILE)
            seen = (keys >= first) & (keys < length)
            block = tl.load(tables_ptr + request * table_stride + keys // BLOCK_SIZE, mask=seen, other=0)
            at = (block.to(tl.int64) * BLOCK_SIZE + keys % BLOCK_SIZE) * NUM_KV_HEADS + kv_head
            k = load_heads(kv_ptr, scale_ptr, at, seen, dims, HEAD_DIM, WIDTH, FP8).to(q.dtype)
            v = load_heads(kv_ptr, scale_ptr, at + plane, seen, dims, HEAD_DIM, WIDTH, FP8).to(q.dtype)
            scores = tl.where(seen[None, :], scores_of(q, k, scale, softcap, SOFTCAP), float("-inf"))
            largest, total, acc = fold(scores, v, largest, total, acc)
        row = (request * num_splits + split) * (NUM_KV_HEADS * GROUP)
        tl.store(partial_ptr + row * HEAD_DIM + spots, acc, mask=within)
        tl.store(largest_ptr + row + heads, largest, mask=rows < GROUP)
        tl.store(total_ptr + row + heads, total, mask=rows < GROUP)


@triton.jit(do_not_specialize=["num_splits"])
def _join_splits(
    out_ptr, partial_ptr, largest_ptr, total_ptr, lens_ptr, out_stride, num_splits,
    HEAD_DIM: tl.constexpr, DIMS: tl.constexpr, WINDOW: tl.constexpr, SPLIT: tl.constexpr, SPLIT_TILE: tl.constexpr,
):  # fmt: skip
    """A program has one request and one head."""
    request = tl.program_id(0).to(tl.int64)
    head, num_heads = tl.program_id(1), tl.num_programs(1)
    length = tl.load(lens_ptr + request)
    first = tl.maximum(length - WINDOW, 0) if WINDOW else 0
    end = tl.cdiv(length, SPLIT)
    dims = tl.arange(0, DIMS)
    largest, total, acc = float("-inf"), 0.0, tl.zeros((DIMS,), tl.float32)
    for start in range(first // SPLIT, end, SPLIT_TILE):
        splits = start + tl.arange(0, SPLIT_TILE)
        there = splits < end
        at = (request * num_splits + splits) * num_heads + head
        maxima = tl.load(largest_ptr + at, mask=there, other=float("-inf"))
        totals = tl.load(total_ptr + at, mask=there, other=0.0)
        mask = there[:, None] & (dims < HEAD_DIM)[None, :]
        parts = tl.load(partial_ptr + at[:, None] * HEAD_DIM + dims[None, :], mask=mask, other=0.0)
        new = tl.maximum(largest, tl.max(maxima, 0))
        kept, weights = tl.exp2(largest - new), tl.exp2(maxima - new)
        total = total * kept + tl.sum(totals * weights, 0)
        acc = acc * kept + tl.sum(parts * weights[:, None], 0)
        largest = new
    # A row that only pads has no key.
    acc = acc / tl.where(total == 0.0, 1.0, total)
    out = out_ptr + request * out_stride + head * HEAD_DIM + dims
    tl.store(out, acc.to(out_ptr.dtype.element_ty), mask=dims < HEAD_DIM)
