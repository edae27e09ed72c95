"""Llama: RMSNorm, rotary attention with shared KV heads, SwiGLU. SmolLM2 is one."""

from __future__ import annotations

import torch
from torch.nn import functional

from workers.engine.batch import StepBatch
from workers.layers.attention import PagedAttention
from workers.layers.linear import Linear
from workers.layers.rotary import Angles, RotaryEmbedding, rotate
from workers.models.architecture import ArchitectureConfig
from workers.models.layer_reader import LayerReader
from workers.models.loader import Weights


class Llama:
    def __init__(self, config: ArchitectureConfig, weights: Weights, dtype: torch.dtype, device: torch.device) -> None:
        read = LayerReader(weights, dtype, device)
        self._vocab_size = config.vocab_size
        self._embedding = read.tensor("model.embed_tokens.weight", config.vocab_size, config.hidden_size)
        self._rotary = RotaryEmbedding(config.head_dim, config.rope_theta, device)
        attention = PagedAttention(config.num_heads, config.num_kv_heads, config.head_dim)
        self._layers = [LlamaLayer(config, read, f"model.layers.{i}.", attention) for i in range(config.num_layers)]
        self._norm = read.norm("model.norm.weight", config.hidden_size, config.rms_norm_eps)
        if config.tie_word_embeddings:
            weights.skip("lm_head.weight")
            self._head = Linear(self._embedding)
        else:
            self._head = read.linear({"lm_head.weight": config.vocab_size}, config.hidden_size)
        weights.require_all_taken()

    def forward(self, batch: StepBatch, kv_cache: torch.Tensor) -> torch.Tensor:
        """Logits [len(sample_rows), vocab_size]; writes the KV of every row. kv_cache: [num_layers, 2, ...]."""
        x = functional.embedding(batch.token_ids, self._embedding)
        angles = self._rotary.angles(batch.positions, x.dtype)
        for layer, layer_cache in zip(self._layers, kv_cache.unbind(), strict=True):
            layer(x, angles, layer_cache, batch)
        if not len(batch.sample_rows):
            return x.new_empty((0, self._vocab_size))
        return self._head(self._norm(x[batch.sample_rows]))


class LlamaLayer:
    def __init__(self, config: ArchitectureConfig, read: LayerReader, prefix: str, attention: PagedAttention) -> None:
        self._num_heads, self._num_kv_heads, self._head_dim = config.num_heads, config.num_kv_heads, config.head_dim
        q_rows, kv_rows = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        hidden, inner, eps = config.hidden_size, config.intermediate_size, config.rms_norm_eps
        at, mlp = prefix + "self_attn.", prefix + "mlp."
        self._attention = attention
        self._input_norm = read.norm(prefix + "input_layernorm.weight", hidden, eps)
        self._qkv = read.linear(
            {at + "q_proj.weight": q_rows, at + "k_proj.weight": kv_rows, at + "v_proj.weight": kv_rows}, hidden
        )
        self._out = read.linear({at + "o_proj.weight": hidden}, q_rows)
        self._mlp_norm = read.norm(prefix + "post_attention_layernorm.weight", hidden, eps)
        self._gate_up = read.linear({mlp + "gate_proj.weight": inner, mlp + "up_proj.weight": inner}, hidden)
        self._down = read.linear({mlp + "down_proj.weight": hidden}, inner)

    def __call__(self, x: torch.Tensor, angles: Angles, kv_cache: torch.Tensor, batch: StepBatch) -> None:
        """Add the layer to x, [num_tokens, hidden_size], in place."""
        x += self._out(self._attend(self._input_norm(x), angles, kv_cache, batch))
        gate, up = self._gate_up(self._mlp_norm(x)).chunk(2, dim=-1)
        x += self._down(functional.silu(gate).mul_(up))

    def _attend(self, x: torch.Tensor, angles: Angles, kv_cache: torch.Tensor, batch: StepBatch) -> torch.Tensor:
        # [num_tokens, num_heads + 2 * num_kv_heads, head_dim]
        heads = self._qkv(x).view(x.shape[0], -1, self._head_dim)
        turned = rotate(heads[:, : self._num_heads + self._num_kv_heads], angles)
        q, k = turned.tensor_split((self._num_heads,), dim=1)
        return self._attention(q, k, heads[:, -self._num_kv_heads :], kv_cache, batch)
