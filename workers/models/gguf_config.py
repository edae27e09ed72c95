"""A GGUF's header as the config.json of the same model. Neither torch nor ray here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from workers.errors import ConfigError
from workers.gguf_file import GGUFFile, open_gguf
from workers.models.registry import FAMILIES, GGUF_FAMILIES

_NEEDED = {
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "block_count": "num_hidden_layers",
    "attention.head_count": "num_attention_heads",
    "context_length": "max_position_embeddings",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
}
_OPTIONAL = {
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.sliding_window": "sliding_window",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
    "rope.freq_base": "rope_theta",
    "rope.freq_base_swa": "rope_local_base_freq",
}
_SCALING = {
    "rope.scaling.type": "rope_type",
    "rope.scaling.factor": "factor",
    "rope.scaling.original_context_length": "original_max_position_embeddings",
    "rope.scaling.yarn_beta_fast": "beta_fast",
    "rope.scaling.yarn_beta_slow": "beta_slow",
}


def read_gguf_config(path: Path) -> dict[str, Any]:
    """The keys of a config.json. ConfigError for an architecture that is not known, and for a key that is missing."""
    reader = open_gguf(path)
    family = str(reader.value("general.architecture"))
    if family not in GGUF_FAMILIES:
        known = ", ".join(GGUF_FAMILIES)
        raise ConfigError(f"{path}: unknown architecture {family}; known in GGUF are {known}", param="model")
    if reader.value(f"{family}.expert_count"):
        raise ConfigError(
            f"{path}: a mixture of experts is not supported in GGUF; use a folder of safetensors", param="model"
        )
    raw: dict[str, Any] = {"architectures": [FAMILIES[family].hf_class]}
    for key, name in _NEEDED.items():
        raw[name] = reader.value(f"{family}.{key}")
        if raw[name] is None:
            raise ConfigError(f"{path} lacks the key {family}.{key}; convert the model again", param="model")
    raw |= _given(reader, family, _OPTIONAL)
    raw["rope_scaling"] = _rope_scaling(reader, family)
    raw |= _from_tensors(reader, path)
    raw["eos_token_id"] = [reader.value(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot")]
    raw["bos_token_id"] = reader.value("tokenizer.ggml.bos_token_id")
    raw["query_pre_attn_scalar"] = _query_scalar(raw, family)
    return raw


def _given(reader: GGUFFile, family: str, keys: dict[str, str]) -> dict[str, Any]:
    values = {name: reader.value(f"{family}.{key}") for key, name in keys.items()}
    return {name: value for name, value in values.items() if value is not None}


def _rope_scaling(reader: GGUFFile, family: str) -> dict[str, Any] | None:
    for tensor in reader.tensors:
        if tensor.name == "rope_freqs.weight":
            return {"rope_type": "given", "divisors": np.asarray(tensor.data).tolist()}
    scaling = _given(reader, family, _SCALING)
    return None if scaling.get("rope_type", "none") == "none" else scaling


def _from_tensors(reader: GGUFFile, path: Path) -> dict[str, Any]:
    """What no key tells: GGUF lists dimensions innermost first."""
    shapes = {tensor.name: tensor.shape for tensor in reader.tensors}
    if "token_embd.weight" not in shapes:
        raise ConfigError(f"{path} lacks the tensor token_embd.weight; convert the model again", param="model")
    return {
        "vocab_size": int(shapes["token_embd.weight"][1]),
        "tie_word_embeddings": "output.weight" not in shapes,
        "attention_bias": "blk.0.attn_output.bias" in shapes,
        "mlp_bias": "blk.0.ffn_down.bias" in shapes,
    }


def _query_scalar(raw: dict[str, Any], family: str) -> int:
    per_head: int = raw["hidden_size"] // raw["num_attention_heads"]
    form = FAMILIES[family].gguf
    if form and form.scaled_by_hidden == raw["num_hidden_layers"]:
        return per_head
    return raw.get("head_dim") or per_head
