"""Attention of a step over block tables.

A kernel that reads blocks in place replaces PagedAttention: same constructor, same call.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch.nn import functional

from workers.engine.batch import StepBatch
from workers.layers import compiled
from workers.layers.attention_plan import DecodeGroup, PrefillChunk
from workers.layers.kv_codec import decode, encode

# scaled_dot_product_attention, with what it takes beside q, k and v.
Attend = Callable[..., torch.Tensor]


class PagedAttention:
    """By the kernels in C over blocks where they lie; elsewhere by torch's, over a copy of those of each group of rows.

    There, heads that share a KV head are the query rows of one problem (decode) or share K and V by a zero stride
    (prefill): K and V are never repeated. One instance serves all layers, one after another: the gathered copy is its
    workspace.
    """

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
        """Scores are q k^T * scale (None: head_dim^-0.5), then softcap * tanh(scores / softcap) where there is one."""
        self.num_heads = num_heads
        self.num_kv_heads = num_kv_heads
        self.head_dim = head_dim
        self._group = num_heads // num_kv_heads
        self._window = window
        scale = head_dim**-0.5 if scale is None else scale
        # None: not for the compiled kernel, which knows no cap.
        self._compiled_scale = scale if softcap is None else None
        self._attend: Attend = partial(functional.scaled_dot_product_attention, scale=scale)
        if softcap is not None:
            self._attend = partial(_soft_capped_attention, scale=scale, cap=softcap)
        self._workspace = torch.empty(0)

    def __call__(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, kv_cache: torch.Tensor, batch: StepBatch
    ) -> torch.Tensor:
        """Store k and v in their slots, then attend; returns [num_tokens, num_heads * head_dim].

        q: [num_tokens, num_heads, head_dim]; k, v: [num_tokens, num_kv_heads, head_dim];
        kv_cache: the layer's [2, num_blocks, block_size, num_kv_heads, pool_width].
        """
        plan = batch.plans[self._window]
        pages = compiled.pages(q.dtype, kv_cache.dtype, self.head_dim, q.device)
        k, v = self._keep(k, v, kv_cache, batch.slot_mapping, pages)
        scale = self._compiled_scale if pages else None
        if scale is None:
            parts = [self._decode(q[group.rows], kv_cache, group) for group in plan.decodes]
        else:
            parts = [self._attend_in_place(q, kv_cache, group) for group in plan.decodes]
        if scale is None or not compiled.attends_prompts(q.dtype, self.head_dim):
            parts += [self._prefill(q[c.rows], k[c.rows], v[c.rows], kv_cache, c) for c in plan.prefills]
        else:
            parts += [compiled.attend_prompt(q[c.rows], kv_cache, c, scale) for c in plan.prefills]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _keep(
        self, k: torch.Tensor, v: torch.Tensor, kv_cache: torch.Tensor, slot_mapping: torch.Tensor, pages: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store k and v in their slots; as they are kept."""
        if pages:
            compiled.keep(k, v, kv_cache, slot_mapping)
            return (k, v) if k.dtype is kv_cache.dtype else (k.to(kv_cache.dtype), v.to(kv_cache.dtype))
        k, v = encode(k, kv_cache.dtype), encode(v, kv_cache.dtype)
        slots = kv_cache.view(2, -1, self.num_kv_heads, kv_cache.shape[-1])
        slots[0].index_copy_(0, slot_mapping, k)
        slots[1].index_copy_(0, slot_mapping, v)
        return k, v

    def _attend_in_place(self, q: torch.Tensor, kv_cache: torch.Tensor, group: DecodeGroup) -> torch.Tensor:
        assert self._compiled_scale is not None
        own = q if group.num_requests == len(q) else q[group.rows]
        return compiled.attend(own, kv_cache, group.block_ids, group.visible, self._compiled_scale)

    def _decode(self, q: torch.Tensor, kv_cache: torch.Tensor, group: DecodeGroup) -> torch.Tensor:
        kv = self._gather(kv_cache, group.block_ids.flatten())
        kept = kv.view(2, group.num_requests, -1, self.num_kv_heads, kv_cache.shape[-1])
        # [2, num_requests, num_kv_heads, context, head_dim]
        k, v = decode(kept, q.dtype).transpose(2, 3)
        packed = q.view(-1, self.num_kv_heads, self._group, self.head_dim)
        out = self._attend(packed, k, v, attn_mask=group.mask)
        return out.reshape(q.shape[0], -1)

    def _prefill(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, kv_cache: torch.Tensor, chunk: PrefillChunk
    ) -> torch.Tensor:
        if chunk.start:
            assert chunk.mask is not None, "keys out of blocks are told apart by a mask"
            gathered = self._gather(kv_cache, chunk.block_ids).view(2, -1, self.num_kv_heads, kv_cache.shape[-1])
            k, v = gathered[:, : chunk.mask.shape[1]]
        # What is kept of a token counts from its own step on, so that chunks and prefix hits change nothing.
        k, v = decode(k, q.dtype), decode(v, q.dtype)
        # [num_kv_heads, group, num_tokens, head_dim]: the KV head is the batch dimension.
        heads = q.view(-1, self.num_kv_heads, self._group, self.head_dim).permute(1, 2, 0, 3)
        out = self._attend(heads, self._shared(k), self._shared(v), attn_mask=chunk.mask, is_causal=chunk.mask is None)
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


def _soft_capped_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    scale: float,
    cap: float,
    attn_mask: torch.Tensor | None = None,
    is_causal: bool = False,
) -> torch.Tensor:
    """As scaled_dot_product_attention, whose kernels know no cap."""
    scores = torch.tanh(q @ k.transpose(-2, -1) * (scale / cap)).mul_(cap)
    if is_causal:
        attn_mask = torch.full(scores.shape[-2:], float("-inf"), dtype=scores.dtype, device=scores.device).triu_(1)
    if attn_mask is not None:
        scores += attn_mask
    return torch.softmax(scores, dim=-1, dtype=torch.float32).to(v.dtype) @ v
