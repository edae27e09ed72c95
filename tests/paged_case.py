"""A step's attention over a pool of shuffled blocks with garbage in the free ones, and what it must come to.

Needs torch alone: benchmarks/gpu.py checks the kernels of a GPU by it too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from workers.layers.block_tables import BlockTables, block_tables
from workers.layers.kv_codec import decode, encode, pool_width

# Queries of a request: (first position, number).
Share = tuple[int, int]


@dataclass(frozen=True)
class Shape:
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 64
    block_size: int = 16
    dtype: torch.dtype = torch.float32
    pool_dtype: torch.dtype | None = None
    window: int | None = None
    softcap: float | None = None


@dataclass(frozen=True)
class Queried:
    """As much of a ScheduledRequest as attention looks at."""

    token_ids: Sequence[int]
    start: int
    block_table: Sequence[int]


@dataclass(frozen=True)
class PagedCase:
    shape: Shape
    shares: Sequence[Share]
    q: torch.Tensor
    # Of the step's own tokens; those before are in the pool.
    k: torch.Tensor
    v: torch.Tensor
    kv_cache: torch.Tensor
    slot_mapping: torch.Tensor
    tables: BlockTables
    # Of each request: K and V as they are kept, [2, context, num_kv_heads, head_dim].
    contexts: Sequence[torch.Tensor]


def make_case(shape: Shape, shares: Sequence[Share], device: str = "cpu", seed: int = 0) -> PagedCase:
    """Requests with one query come first in `shares`; q, k and v are slices of one tensor, as in a model."""
    generator = torch.Generator().manual_seed(seed)
    pool_dtype = shape.pool_dtype or shape.dtype
    num_tokens = sum(n for _, n in shares)
    num_heads = shape.num_heads + 2 * shape.num_kv_heads
    qkv = torch.randn((num_tokens, num_heads, shape.head_dim), generator=generator).to(shape.dtype)
    blocks = [-(-(start + n) // shape.block_size) for start, n in shares]
    free = torch.randperm(sum(blocks) + 3, generator=generator).tolist()
    width = pool_width(pool_dtype, shape.head_dim)
    pool = torch.full((2, len(free), shape.block_size, shape.num_kv_heads, width), 77, dtype=pool_dtype)
    requests, contexts, slots, row = [], [], [], 0
    for (start, n), num_blocks in zip(shares, blocks, strict=True):
        table = [free.pop() for _ in range(num_blocks)]
        requests.append(Queried(range(n), start, table))
        before = torch.randn((2, start, shape.num_kv_heads, shape.head_dim), generator=generator).to(shape.dtype)
        own = qkv[row : row + n, shape.num_heads :].unflatten(1, (2, -1)).transpose(0, 1)
        kept = encode(torch.cat((before, own), dim=1), pool_dtype)
        at = [table[p // shape.block_size] * shape.block_size + p % shape.block_size for p in range(start + n)]
        pool.flatten(1, 2)[:, at[:start]] = kept[:, :start]
        slots += at[start:]
        contexts.append(decode(kept, shape.dtype).to(device))
        row += n
    q, k, v = qkv.to(device).split_with_sizes([shape.num_heads, shape.num_kv_heads, shape.num_kv_heads], dim=1)
    num_decodes = sum(n == 1 for _, n in shares)
    tables = block_tables(requests, num_decodes, torch.device(device))  # type: ignore[arg-type]
    slot_mapping = torch.tensor(slots, device=device)
    return PagedCase(shape, shares, q, k, v, pool.to(device), slot_mapping, tables, contexts)


def naive_attention(case: PagedCase) -> torch.Tensor:
    """[num_tokens, num_heads * head_dim] in fp64: each query against its keys, softmax written out."""
    shape, outs, row = case.shape, [], 0
    for (start, n), context in zip(case.shares, case.contexts, strict=True):
        k, v = context.double().repeat_interleave(shape.num_heads // shape.num_kv_heads, dim=2)
        q = case.q[row : row + n].double()
        scores = torch.einsum("qhd,khd->hqk", q, k) * shape.head_dim**-0.5
        if shape.softcap is not None:
            scores = shape.softcap * torch.tanh(scores / shape.softcap)
        back = start + torch.arange(n, device=q.device)[:, None] - torch.arange(start + n, device=q.device)
        scores[:, (back < 0) | (back >= (shape.window or start + n))] = float("-inf")
        outs.append(torch.einsum("hqk,khd->qhd", scores.softmax(-1), v).flatten(1))
        row += n
    return torch.cat(outs)


def with_garbage_behind_tables(case: PagedCase) -> PagedCase:
    """Block ids of wider tables than any request needs, as a CUDA graph has them, point nowhere."""
    wide = torch.full((case.tables.block_ids.shape[0], case.tables.block_ids.shape[1] + 40), 1 << 30)
    wide = wide.to(case.tables.block_ids)
    for i, table in enumerate(case.tables.block_ids):
        used = -(-int(case.tables.seq_lens[i]) // case.shape.block_size)
        wide[i, :used] = table[:used]
    return replace(case, tables=replace(case.tables, block_ids=wide))
