"""PagedAttention on a GPU: the same constructor and call, by kernels that read the pool's blocks in place."""

from __future__ import annotations

import torch

from workers.engine.batch import StepBatch
from workers.layers.kv_codec import encode
from workers.layers.triton_decode import paged_decode
from workers.layers.triton_kv import store_kv
from workers.layers.triton_prefill import paged_prefill
from workers.layers.triton_shape import Heads


class TritonPagedAttention:
    """Works on the step's block tables; nothing in it waits for the GPU, so that a CUDA graph can hold it."""

    def __init__(
        self,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        *,
        scale: float | None = None,
        window: int | None = None,
        softcap: float | None = None,
    ) -> None:
        """As PagedAttention."""
        self.num_heads = num_heads
        self.num_kv_heads = num_kv_heads
        self.head_dim = head_dim
        scale = head_dim**-0.5 if scale is None else scale
        self._heads = Heads(num_heads, num_kv_heads, head_dim, scale, window, softcap)

    def __call__(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, kv_cache: torch.Tensor, batch: StepBatch
    ) -> torch.Tensor:
        """As PagedAttention; rows of q, k and v may be apart, the heads of a row lie side by side."""
        tables = batch.tables
        assert tables is not None, "a step for a GPU has block tables"
        store_kv(encode(k, kv_cache.dtype), encode(v, kv_cache.dtype), kv_cache, batch.slot_mapping)
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        if tables.num_decodes:
            paged_decode(q, kv_cache, tables, self._heads, out)
        if len(tables.tile_requests):
            paged_prefill(q, kv_cache, tables, self._heads, out)
        return out.flatten(1)
