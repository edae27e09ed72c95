"""Attention of a step over block tables.

A kernel that reads blocks in place replaces PagedAttention: same constructor, same call.
"""

from __future__ import annotations

import torch
from torch.nn import functional

from workers.engine.batch import DecodeGroup, PrefillChunk, StepBatch


class PagedAttention:
    """Gathers the blocks of each group of rows and runs one scaled dot product attention over it.

    Heads that share a KV head are the query rows of one problem (decode) or share K and V by a zero stride (prefill):
    K and V are never repeated. One instance serves all layers, one after another: the gathered copy is its workspace.
    """

    def __init__(self, num_heads: int, num_kv_heads: int, head_dim: int) -> None:
        self._num_kv_heads = num_kv_heads
        self._group = num_heads // num_kv_heads
        self._head_dim = head_dim
        self._workspace = torch.empty(0)

    def __call__(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, kv_cache: torch.Tensor, batch: StepBatch
    ) -> torch.Tensor:
        """Store k and v in their slots, then attend; returns [num_tokens, num_heads * head_dim].

        q: [num_tokens, num_heads, head_dim]; k, v: [num_tokens, num_kv_heads, head_dim];
        kv_cache: the layer's [2, num_blocks, block_size, num_kv_heads, head_dim].
        """
        slots = kv_cache.view(2, -1, self._num_kv_heads, self._head_dim)
        slots[0].index_copy_(0, batch.slot_mapping, k)
        slots[1].index_copy_(0, batch.slot_mapping, v)
        parts = [self._decode(q[group.rows], kv_cache, group) for group in batch.decodes]
        parts += [self._prefill(q[c.rows], k[c.rows], v[c.rows], kv_cache, c) for c in batch.prefills]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _decode(self, q: torch.Tensor, kv_cache: torch.Tensor, group: DecodeGroup) -> torch.Tensor:
        kv = self._gather(kv_cache, group.block_ids)
        # [2, num_requests, num_kv_heads, context, head_dim]
        k, v = kv.view(2, group.num_requests, -1, self._num_kv_heads, self._head_dim).transpose(2, 3)
        packed = q.view(-1, self._num_kv_heads, self._group, self._head_dim)
        out = functional.scaled_dot_product_attention(packed, k, v, attn_mask=group.mask)
        return out.reshape(q.shape[0], -1)

    def _prefill(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, kv_cache: torch.Tensor, chunk: PrefillChunk
    ) -> torch.Tensor:
        mask = None
        if chunk.context is not None:
            block_ids, mask = chunk.context
            k, v = self._gather(kv_cache, block_ids).view(2, -1, self._num_kv_heads, self._head_dim)[:, : mask.shape[1]]
        # [num_kv_heads, group, num_tokens, head_dim]: the KV head is the batch dimension.
        heads = q.view(-1, self._num_kv_heads, self._group, self._head_dim).permute(1, 2, 0, 3)
        out = functional.scaled_dot_product_attention(
            heads, self._shared(k), self._shared(v), attn_mask=mask, is_causal=mask is None
        )
        return out.permute(2, 0, 1, 3).reshape(q.shape[0], -1)

    def _shared(self, x: torch.Tensor) -> torch.Tensor:
        """[context, num_kv_heads, head_dim] -> [num_kv_heads, group, context, head_dim] without a copy."""
        return x.transpose(0, 1).unsqueeze(1).expand(-1, self._group, -1, -1)

    def _gather(self, kv_cache: torch.Tensor, block_ids: torch.Tensor) -> torch.Tensor:
        """A flat copy [2 * blocks * block elements]: K of the blocks, then V."""
        out = self._reserve(kv_cache, 2 * block_ids.numel() * kv_cache[0, 0].numel()).view(2, block_ids.numel(), -1)
        for part in (0, 1):
            torch.index_select(kv_cache[part].flatten(1), 0, block_ids, out=out[part])
        return out.view(-1)

    def _reserve(self, like: torch.Tensor, num_elements: int) -> torch.Tensor:
        if self._workspace.numel() < num_elements or self._workspace.dtype != like.dtype:
            self._workspace = torch.empty(num_elements, dtype=like.dtype, device=like.device)
        return self._workspace[:num_elements]
