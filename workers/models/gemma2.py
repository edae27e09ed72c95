"""Gemma 2 (Riviere et al. 2024): attention and logits with soft caps, windows in every other layer."""

from __future__ import annotations

from workers.layers.rotary import RotaryEmbedding
from workers.layers.self_attention import SelfAttention
from workers.models.architecture import ArchitectureConfig
from workers.models.decoder import Decoder, attention_kernels
from workers.models.gemma import gemma_decoder, gemma_layer
from workers.models.layer_reader import LayerReader


def build(config: ArchitectureConfig, read: LayerReader) -> Decoder:
    rotary = RotaryEmbedding(config.rope, read.device)
    kernels = attention_kernels(config, read.device)
    bias = config.attention_bias
    layers = [
        gemma_layer(
            layer,
            SelfAttention(layer.qkv(bias=bias), layer.attention_output(bias=bias), rotary, kernels[window]),
        )
        for layer, window in zip(read.layers(), config.windows, strict=True)
    ]
    return gemma_decoder(read, [rotary], layers)
