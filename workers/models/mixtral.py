"""Mixtral (Jiang et al. 2024): Mistral with a mixture of experts in each layer."""

from __future__ import annotations

from torch.nn import functional

from workers.layers.attention_kernel import AttentionKernel
from workers.layers.experts import Experts
from workers.layers.rotary import RotaryEmbedding
from workers.layers.self_attention import SelfAttention
from workers.models.architecture import ArchitectureConfig
from workers.models.decoder import Decoder, pre_norm_decoder
from workers.models.expert_reader import ExpertNames, read_experts
from workers.models.layer_reader import LayerReader

_NAMES = ExpertNames("block_sparse_moe", gate="w1", up="w3", down="w2")


def build(config: ArchitectureConfig, read: LayerReader) -> Decoder:
    return pre_norm_decoder(config, read, _attention, _feed_forward)


def _attention(read: LayerReader, rotary: RotaryEmbedding, kernel: AttentionKernel) -> SelfAttention:
    return SelfAttention(read.qkv(), read.attention_output(), rotary, kernel)


def _feed_forward(read: LayerReader) -> Experts:
    return read_experts(read, _NAMES, functional.silu)
