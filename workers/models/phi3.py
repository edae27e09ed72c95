"""Phi-3 (Abdin et al. 2024): Llama whose checkpoint keeps q, k, v in one matrix, and gate and up in another."""

from __future__ import annotations

from torch.nn import functional

from workers.layers.attention_kernel import AttentionKernel
from workers.layers.mlp import GatedMLP
from workers.layers.rotary import RotaryEmbedding
from workers.layers.self_attention import SelfAttention
from workers.models.architecture import ArchitectureConfig
from workers.models.decoder import Decoder, pre_norm_decoder
from workers.models.layer_reader import LayerReader


def build(config: ArchitectureConfig, read: LayerReader) -> Decoder:
    return pre_norm_decoder(config, read, _attention, _feed_forward)


def _attention(read: LayerReader, rotary: RotaryEmbedding, kernel: AttentionKernel) -> SelfAttention:
    config = read.config
    rows = (config.num_heads + 2 * config.num_kv_heads) * config.head_dim
    qkv = read.linear({"self_attn.qkv_proj": rows}, config.hidden_size)
    return SelfAttention(qkv, read.attention_output(), rotary, kernel)


def _feed_forward(read: LayerReader) -> GatedMLP:
    hidden, inner = read.config.hidden_size, read.config.intermediate_size
    gate_up = read.linear({"mlp.gate_up_proj": 2 * inner}, hidden)
    return GatedMLP(gate_up, read.linear({"mlp.down_proj": hidden}, inner), functional.silu)
