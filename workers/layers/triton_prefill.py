"""Paged attention of prompts and chunks of them, as a Triton kernel that reads blocks in place.

Flash attention (Dao et al. 2022) whose tiles of keys begin at multiples of KEY_TILE whatever the chunk: how a prompt
is cut into chunks does not change a bit.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from workers.layers.block_tables import QUERY_TILE, BlockTables
from workers.layers.triton_heads import fold, load_heads, scores_of
from workers.layers.triton_shape import Heads


def paged_prefill(
    q: torch.Tensor, kv_cache: torch.Tensor, tables: BlockTables, heads: Heads, out: torch.Tensor
) -> None:
    """Of the requests behind the decoding ones: out [num_tokens, num_heads, head_dim] of q likewise, all rows of the
    step; the rows of decoding requests are left alone. kv_cache: as in paged_decode."""
    tile = prefill_tile(q.dtype, heads.dims)
    _attend[(heads.num_heads, len(tables.tile_requests), QUERY_TILE // tile["QUERIES"])](
        out, q, *heads.pool(kv_cache), tables.block_ids, tables.seq_lens, tables.query_starts,
        tables.tile_requests, tables.tile_starts,
        out.stride(0), q.stride(0), tables.block_ids.stride(0), heads.log2_scale, heads.log2_softcap,
        **heads.constants(kv_cache), QUERY_TILE=QUERY_TILE, **tile,
    )  # fmt: skip


def prefill_tile(dtype: torch.dtype, dims: int) -> dict[str, int]:
    """Queries and keys at a time: what fits into the registers and the shared memory of one multiprocessor."""
    if dtype is torch.float32:
        return {"QUERIES": 32, "KEY_TILE": 32, "num_warps": 4, "num_stages": 1}
    if dims > 128:
        return {"QUERIES": 64, "KEY_TILE": 32, "num_warps": 4, "num_stages": 3}
    return {"QUERIES": 128, "KEY_TILE": 64, "num_warps": 8, "num_stages": 3}


@triton.jit(do_not_specialize=["table_stride"])
def _attend(
    out_ptr, q_ptr, kv_ptr, scale_ptr, plane, tables_ptr, lens_ptr, query_starts_ptr,
    tile_requests_ptr, tile_starts_ptr, out_stride, q_stride, table_stride, scale, softcap,
    GROUP: tl.constexpr, NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, DIMS: tl.constexpr, WIDTH: tl.constexpr,
    FP8: tl.constexpr, SOFTCAP: tl.constexpr, WINDOW: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    QUERY_TILE: tl.constexpr, QUERIES: tl.constexpr, KEY_TILE: tl.constexpr,
):  # fmt: skip
    """A program has one head and QUERIES queries of one request; heads that share a KV head run side by side."""
    head, tile = tl.program_id(0), tl.program_id(1)
    request = tl.load(tile_requests_ptr + tile).to(tl.int64)
    length = tl.load(lens_ptr + request)
    first_row = tl.load(query_starts_ptr + request)
    num_queries = tl.load(query_starts_ptr + request + 1) - first_row
    query = tl.load(tile_starts_ptr + tile) + tl.program_id(2) * QUERIES
    if query < num_queries:
        queries, dims = query + tl.arange(0, QUERIES), tl.arange(0, DIMS)
        within = (queries < num_queries)[:, None] & (dims < HEAD_DIM)[None, :]
        rows = (first_row + queries).to(tl.int64)[:, None]
        spots = head * HEAD_DIM + dims[None, :]
        q = tl.load(q_ptr + rows * q_stride + spots, mask=within, other=0.0)
        position = length - num_queries + query
        positions = length - num_queries + queries
        # The keys [first, end) that any of the queries sees.
        first = tl.maximum(position - WINDOW + 1, 0) if WINDOW else 0
        end = tl.minimum(position + QUERIES, length)
        largest = tl.full((QUERIES,), float("-inf"), tl.float32)
        total = tl.zeros((QUERIES,), tl.float32)
        acc = tl.zeros((QUERIES, DIMS), tl.float32)
        for start in range(first // KEY_TILE * KEY_TILE, end, KEY_TILE):
            keys = start + tl.arange(0, KEY_TILE)
            there = (keys >= first) & (keys < end)
            block = tl.load(tables_ptr + request * table_stride + keys // BLOCK_SIZE, mask=there, other=0)
            at = (block.to(tl.int64) * BLOCK_SIZE + keys % BLOCK_SIZE) * NUM_KV_HEADS + head // GROUP
            k = load_heads(kv_ptr, scale_ptr, at, there, dims, HEAD_DIM, WIDTH, FP8).to(q.dtype)
            v = load_heads(kv_ptr, scale_ptr, at + plane, there, dims, HEAD_DIM, WIDTH, FP8).to(q.dtype)
            seen = keys[None, :] <= positions[:, None]
            if WINDOW:
                seen = seen & (keys[None, :] > positions[:, None] - WINDOW)
            scores = tl.where(seen, scores_of(q, k, scale, softcap, SOFTCAP), float("-inf"))
            largest, total, acc = fold(scores, v, largest, total, acc)
        # Queries behind the last may have seen no key.
        acc = acc / tl.where(total == 0.0, 1.0, total)[:, None]
        tl.store(out_ptr + rows * out_stride + spots, acc.to(out_ptr.dtype.element_ty), mask=within)
