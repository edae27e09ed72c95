"""Qwen 2 and 2.5 (Yang et al. 2024): Llama with biases on q, k and v; upper layers may have a sliding window."""

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
    return SelfAttention(read.qkv(bias=True), read.attention_output(), rotary, kernel)


def _feed_forward(read: LayerReader) -> GatedMLP:
    return read.gated_mlp(functional.silu)
