"""The frame of the Gemmas: a norm before and after each half of a layer, an embedding scaled by sqrt(hidden_size)."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from torch.nn import functional

from workers.layers.block import SandwichLayer
from workers.layers.head import SoftCappedHead
from workers.layers.rotary import RotaryEmbedding
from workers.layers.self_attention import SelfAttention
from workers.models.decoder import Decoder, Layer
from workers.models.layer_reader import LayerReader

# Norms multiply by 1 + their stored weight.
NORM_OFFSET = 1.0


def gemma_layer(read: LayerReader, attention: SelfAttention) -> SandwichLayer:
    return SandwichLayer(
        read.norm("input_layernorm", offset=NORM_OFFSET),
        attention,
        read.norm("post_attention_layernorm", offset=NORM_OFFSET),
        read.norm("pre_feedforward_layernorm", offset=NORM_OFFSET),
        read.gated_mlp(partial(functional.gelu, approximate="tanh")),
        read.norm("post_feedforward_layernorm", offset=NORM_OFFSET),
        read.ranks,
    )


def gemma_decoder(read: LayerReader, rotaries: Sequence[RotaryEmbedding], layers: Sequence[Layer]) -> Decoder:
    config = read.config
    embedding = read.embedding(config.hidden_size**0.5)
    head = read.head(embedding)
    return Decoder(
        embedding,
        rotaries,
        layers,
        read.norm("model.norm", offset=NORM_OFFSET),
        SoftCappedHead(head, config.final_softcap) if config.final_softcap else head,
        config.vocab_size,
    )
