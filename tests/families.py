"""A small random checkpoint of each family, made by transformers' own classes; and the same as GGUF."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import torch
import transformers
from gguf import MODEL_ARCH, GGMLQuantizationType, GGUFWriter
from transformers import PreTrainedModel

# Shorter than the longest prompt of the tests, no multiple of a block.
WINDOW = 40
_SHAPE = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "rope_theta": 1e4}
_EXPERTS = {"num_local_experts": 5, "num_experts_per_tok": 2}


@dataclass(frozen=True)
class Tiny:
    """A class prefix of transformers, and what its config differs in from _SHAPE."""

    hf: str
    config: dict[str, Any]

    def build(self) -> PreTrainedModel:
        """Large enough weights that tokens differ in their logits, and every bias and norm counts."""
        config_class = getattr(transformers, self.hf + ("TextConfig" if self.hf == "Gemma3" else "Config"))
        config = config_class(**{**_SHAPE, **self.config})
        config._attn_implementation = "eager"  # The only one that knows soft caps.
        torch.manual_seed(0)
        model: PreTrainedModel = getattr(transformers, self.hf + "ForCausalLM")(config).eval()
        with torch.no_grad():
            for parameter in model.parameters():
                noise = torch.randn_like(parameter)
                if parameter.ndim == 1:
                    parameter.add_(0.2 * noise)
                else:
                    parameter.copy_(noise * 1.2 / parameter.shape[-1] ** 0.5)
        return model


TINY: dict[str, Tiny] = {
    "llama": Tiny("Llama", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    "llama3": Tiny("Llama", {"rope_parameters": {"rope_type": "llama3", "rope_theta": 1e4, **_LLAMA3}}),
    "llama-linear": Tiny("Llama", {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4}}),
    "llama-dynamic": Tiny("Llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}),
    "llama-yarn": Tiny("Llama", {"rope_parameters": _YARN}),
    "mistral": Tiny("Mistral", {"sliding_window": WINDOW, "head_dim": 32}),
    "qwen2": Tiny("Qwen2", {}),
    "qwen2-windows": Tiny(
        "Qwen2",
        {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 2, "rope_parameters": _YARN},
    ),
    "qwen3": Tiny("Qwen3", {"head_dim": 32, "tie_word_embeddings": True}),
    "phi3": Tiny("Phi3", {"sliding_window": WINDOW}),
    "phi3-longrope": Tiny(
        "Phi3",
        {
            "max_position_embeddings": 4096,
            "original_max_position_embeddings": 320,
            "partial_rotary_factor": 0.5,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 1e4,
                "partial_rotary_factor": 0.5,
                "short_factor": [1.0, 1.1, 1.3, 2.0],
                "long_factor": [1.0, 3.0, 5.0, 9.0],
            },
        },
    ),
    "gemma2": Tiny("Gemma2", {"head_dim": 32, "query_pre_attn_scalar": 32, "sliding_window": WINDOW}),
    "gemma2-caps": Tiny(
        "Gemma2",
        {
            "head_dim": 32,
            "query_pre_attn_scalar": 24,
            "sliding_window": WINDOW,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 3.0,
        },
    ),
    "gemma3": Tiny(
        "Gemma3",
        {
            "num_hidden_layers": 7,
            "head_dim": 32,
            "query_pre_attn_scalar": 32,
            "sliding_window": WINDOW,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
        },
    ),
    "mixtral": Tiny("Mixtral", _EXPERTS),
    "mixtral-windows": Tiny("Mixtral", {**_EXPERTS, "sliding_window": WINDOW}),
    "qwen3_moe": Tiny(
        "Qwen3Moe",
        {
            "head_dim": 32,
            "num_experts": 6,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 32,
            "norm_topk_prob": True,
            "mlp_only_layers": [2],
        },
    ),
    "qwen3_moe-raw-weights": Tiny(
        "Qwen3Moe",
        {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 32, "decoder_sparse_step": 2},
    ),
}

_GGUF_ARCHS = {
    "Llama": MODEL_ARCH.LLAMA,
    "Qwen2": MODEL_ARCH.QWEN2,
    "Qwen3": MODEL_ARCH.QWEN3,
    "Gemma2": MODEL_ARCH.GEMMA2,
    "Gemma3": MODEL_ARCH.GEMMA3,
}


def write_family_gguf(path: Path, name: str, model: PreTrainedModel) -> Path:
    """As llama.cpp's converter does: its tensor names from the gguf library, q and k permuted for llama alone, norms
    of the Gemmas plus one, llama3's scaling as a tensor of divisors."""
    arch, config = _GGUF_ARCHS[TINY[name].hf], model.config
    writer = GGUFWriter(path, gguf.MODEL_ARCH_NAMES[arch])
    _add_metadata(writer, config)
    names = gguf.get_tensor_name_map(arch, config.num_hidden_layers)
    for key, tensor in model.state_dict().items():
        if key == "lm_head.weight" and config.tie_word_embeddings:
            continue
        stored = names.get_name(key, try_suffixes=(".weight", ".bias"))
        assert stored is not None, key
        writer.add_tensor(stored, _converted(key, tensor, arch, config).contiguous().numpy(), raw_dtype=_F32)
    rope = config.rope_parameters
    if rope.get("rope_type") == "llama3":
        writer.add_tensor("rope_freqs.weight", _llama3_divisors(model).numpy(), raw_dtype=_F32)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


_F32 = GGMLQuantizationType.F32


def _add_metadata(writer: GGUFWriter, config: Any) -> None:
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    if getattr(config, "head_dim", None):
        writer.add_key_length(config.head_dim)
        writer.add_value_length(config.head_dim)
    if config.model_type.startswith("gemma"):
        writer.add_sliding_window(config.sliding_window)
    if config.model_type == "gemma2":
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
        writer.add_final_logit_softcapping(config.final_logit_softcapping)
    rope = config.rope_parameters.get("full_attention", config.rope_parameters)
    writer.add_rope_freq_base(rope["rope_theta"])
    if rope["rope_type"] in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(rope["rope_type"]))
        writer.add_rope_scaling_factor(rope["factor"])
    if rope["rope_type"] == "yarn":
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)


def _converted(key: str, tensor: torch.Tensor, arch: MODEL_ARCH, config: Any) -> torch.Tensor:
    if arch in (MODEL_ARCH.GEMMA2, MODEL_ARCH.GEMMA3) and key.endswith("norm.weight"):
        return tensor + 1
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}.get(key.split(".")[-2])
    if arch != MODEL_ARCH.LLAMA or heads is None:
        return tensor
    # [heads, 2 halves, head_dim / 2, ...]: row i of either half goes beside its partner in the other.
    halves = tensor.view(heads, 2, tensor.shape[0] // heads // 2, *tensor.shape[1:])
    return halves.transpose(1, 2).reshape(tensor.shape)


def _llama3_divisors(model: PreTrainedModel) -> torch.Tensor:
    config = model.config
    head_dim = config.head_dim or config.hidden_size // config.num_attention_heads
    exponents = -torch.arange(0, head_dim, 2).double() / head_dim
    unscaled = torch.pow(config.rope_parameters["rope_theta"], exponents)
    scaled: torch.Tensor = model.model.rotary_emb.inv_freq
    return (unscaled / scaled.double()).float()
