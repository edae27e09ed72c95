"""What all families share: embedding, layers over a residual stream, norm, head."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

import torch

from workers.engine.batch import StepBatch
from workers.layers.attention_kernel import AttentionKernel, attention_kernel
from workers.layers.block import FeedForward, PreNormLayer, Step
from workers.layers.rotary import RotaryEmbedding
from workers.layers.self_attention import SelfAttention

if TYPE_CHECKING:
    # A GPU machine without what reads checkpoints runs a model all the same (benchmarks/gpu.py).
    from workers.models.architecture import ArchitectureConfig
    from workers.models.layer_reader import LayerReader


class Layer(Protocol):
    def __call__(self, x: torch.Tensor, step: Step, kv_cache: torch.Tensor) -> None:
        """Add the layer to x, [num_tokens, hidden_size], in place. kv_cache: the layer's [2, num_blocks, ...]."""


Transform = Callable[[torch.Tensor], torch.Tensor]


class Decoder:
    """Implements Model."""

    def __init__(
        self,
        embedding: Transform,
        rotaries: Sequence[RotaryEmbedding],
        layers: Sequence[Layer],
        norm: Transform,
        head: Transform,
        vocab_size: int,
    ) -> None:
        """`embedding`: [num_tokens] -> [num_tokens, hidden_size]; `rotaries`: all that the layers turn by."""
        self._embedding = embedding
        self._rotaries = rotaries
        self._layers = layers
        self._norm = norm
        self._head = head
        self._vocab_size = vocab_size
        self.kernels: Mapping[str, int] = {}
        self._layer_done: Callable[[int], None] | None = None

    def watch(self, layer_done: Callable[[int], None] | None) -> None:
        """Call `layer_done`(i) whenever layer i is computed: on a GPU, launched."""
        self._layer_done = layer_done

    def forward(self, batch: StepBatch, kv_cache: torch.Tensor) -> torch.Tensor:
        x = self._embedding(batch.token_ids)
        step = Step(batch, {rotary: rotary.angles(batch.positions, x.dtype) for rotary in self._rotaries})
        for i, (layer, layer_cache) in enumerate(zip(self._layers, kv_cache.unbind(), strict=True)):
            layer(x, step, layer_cache)
            if self._layer_done is not None:
                self._layer_done(i)
        if not len(batch.sample_rows):
            return x.new_empty((0, self._vocab_size))
        return self._head(self._norm(x[batch.sample_rows]))


def attention_kernels(config: ArchitectureConfig, device: torch.device) -> dict[int | None, AttentionKernel]:
    """One for each window; layers of the same window share one."""
    make = attention_kernel(device)
    return {
        window: make(
            config.num_heads,
            config.num_kv_heads,
            config.head_dim,
            scale=config.attention_scale,
            window=window,
            softcap=config.attention_softcap,
        )
        for window in set(config.windows)
    }


def pre_norm_decoder(
    config: ArchitectureConfig,
    read: LayerReader,
    attention: Callable[[LayerReader, RotaryEmbedding, AttentionKernel], SelfAttention],
    feed_forward: Callable[[LayerReader], FeedForward],
) -> Decoder:
    """Llama's frame: x += attention(norm(x)); x += feed_forward(norm(x)); one rope for all layers."""
    embedding = read.embedding()
    rotary = RotaryEmbedding(config.rope, read.device)
    kernels = attention_kernels(config, read.device)
    layers = [
        PreNormLayer(
            layer.norm("input_layernorm"),
            attention(layer, rotary, kernels[window]),
            layer.norm("post_attention_layernorm"),
            feed_forward(layer),
            read.ranks,
        )
        for layer, window in zip(read.layers(), config.windows, strict=True)
    ]
    norm, head = read.norm("model.norm"), read.head(embedding)
    return Decoder(embedding, [rotary], layers, norm, head, config.vocab_size)
