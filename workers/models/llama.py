"""Llama 2 and 3 (Touvron et al. 2023): RMSNorm, rotary attention with shared KV heads, SwiGLU. SmolLM2 is one."""

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
    bias = read.config.attention_bias
    return SelfAttention(read.qkv(bias=bias), read.attention_output(bias=bias), rotary, kernel)


def _feed_forward(read: LayerReader) -> GatedMLP:
    return read.gated_mlp(functional.silu, bias=read.config.mlp_bias)
