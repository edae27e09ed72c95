"""Families of models: one row each. Neither torch nor ray here; what a row names is imported when it is loaded."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from workers.models.windows import WindowRule, by_pattern, every_layer, no_layer, upper_layers


@dataclass(frozen=True)
class GgufForm:
    """How llama.cpp's converter changes a family's tensors; the family's name is its general.architecture."""

    # Rows of q and k reordered for a rope that turns pairs (2i, 2i + 1).
    permuted: bool = False
    # Added to every norm's weight.
    norm_offset: float = 0.0
    # What its ffn_norm is called in Hugging Face's layer.
    ffn_norm: str = "post_attention_layernorm"
    # Number of layers of the size whose attention scale is (hidden_size / heads)^-0.5: the file does not tell it.
    scaled_by_hidden: int | None = None


@dataclass(frozen=True)
class Family:
    """workers/models/NAME.py builds it; NAME is its key below."""

    hf_class: str
    windows: WindowRule = no_layer
    activation: str = "silu"
    # What its class assumes where config.json is silent.
    defaults: Mapping[str, Any] = field(default_factory=dict)
    # None: not read from GGUF.
    gguf: GgufForm | None = None


_GEMMA = {"tie_word_embeddings": True, "query_pre_attn_scalar": 256, "head_dim": 256, "sliding_window": 4096}
_GEMMA2 = {"sliding_window_pattern": 2, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}
_GEMMA3 = {"sliding_window_pattern": 6, "rope_theta": 1e6, "rope_local_base_freq": 1e4}

FAMILIES: dict[str, Family] = {
    "llama": Family("LlamaForCausalLM", gguf=GgufForm(permuted=True)),
    "mistral": Family("MistralForCausalLM", every_layer, defaults={"sliding_window": 4096}),
    "qwen2": Family("Qwen2ForCausalLM", upper_layers, defaults={"max_window_layers": 28}, gguf=GgufForm()),
    "qwen3": Family("Qwen3ForCausalLM", upper_layers, defaults={"max_window_layers": 28}, gguf=GgufForm()),
    "phi3": Family("Phi3ForCausalLM", every_layer, defaults={"rms_norm_eps": 1e-5}),
    "gemma2": Family(
        "Gemma2ForCausalLM",
        by_pattern,
        activation="gelu_pytorch_tanh",
        defaults=_GEMMA | _GEMMA2,
        gguf=GgufForm(norm_offset=1.0, ffn_norm="pre_feedforward_layernorm", scaled_by_hidden=46),
    ),
    "gemma3": Family(
        "Gemma3ForCausalLM",
        by_pattern,
        activation="gelu_pytorch_tanh",
        defaults=_GEMMA | _GEMMA3,
        gguf=GgufForm(norm_offset=1.0, ffn_norm="pre_feedforward_layernorm", scaled_by_hidden=62),
    ),
    "mixtral": Family("MixtralForCausalLM", every_layer, defaults={"norm_topk_prob": True, "rms_norm_eps": 1e-5}),
    "qwen3_moe": Family("Qwen3MoeForCausalLM", every_layer, defaults={"use_sliding_window": False}),
}
FAMILY_OF_CLASS = {family.hf_class: name for name, family in FAMILIES.items()}
GGUF_FAMILIES = tuple(name for name, family in FAMILIES.items() if family.gguf)
