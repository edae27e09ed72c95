"""Qwen 3 with a mixture of experts in all layers but those that its config lists as dense."""

from __future__ import annotations

from torch.nn import functional

from workers.layers.block import FeedForward
from workers.models.architecture import ArchitectureConfig
from workers.models.decoder import Decoder, pre_norm_decoder
from workers.models.expert_reader import ExpertNames, read_experts
from workers.models.layer_reader import LayerReader
from workers.models.qwen3 import attention
from workers.models.qwen3 import feed_forward as dense

_NAMES = ExpertNames("mlp", gate="gate_proj", up="up_proj", down="down_proj")


def build(config: ArchitectureConfig, read: LayerReader) -> Decoder:
    return pre_norm_decoder(config, read, attention, _feed_forward)


def _feed_forward(read: LayerReader) -> FeedForward:
    experts = read.config.experts
    if experts is None or read.index in experts.dense_layers:
        return dense(read)
    return read_experts(read, _NAMES, functional.silu)
