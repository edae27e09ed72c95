"""Gemma 3 (Kamath et al. 2025): q and k normalised; five layers of six with a window and a rope of their own."""

from __future__ import annotations

from workers.layers.rotary import RotaryEmbedding
from workers.layers.self_attention import SelfAttention
from workers.models.architecture import ArchitectureConfig
from workers.models.decoder import Decoder, attention_kernels
from workers.models.gemma import NORM_OFFSET, gemma_decoder, gemma_layer
from workers.models.layer_reader import LayerReader


def build(config: ArchitectureConfig, read: LayerReader) -> Decoder:
    everywhere = RotaryEmbedding(config.rope, read.device)
    local = RotaryEmbedding(config.local_rope, read.device)
    kernels = attention_kernels(config, read.device)
    bias = config.attention_bias
    layers = [
        gemma_layer(
            layer,
            SelfAttention(
                layer.qkv(bias=bias),
                layer.attention_output(bias=bias),
                everywhere if window is None else local,
                kernels[window],
                layer.head_norm(offset=NORM_OFFSET),
            ),
        )
        for layer, window in zip(read.layers(), config.windows, strict=True)
    ]
    return gemma_decoder(read, [everywhere, local], layers)
