"""What a checkpoint is, read from its metadata alone. The router imports this module: neither torch nor ray here."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from workers.errors import ConfigError
from workers.models.gguf_config import read_gguf_config
from workers.models.registry import FAMILIES, FAMILY_OF_CLASS
from workers.models.rope import Rope, rope_kind, scaled_rope
from workers.models.windows import Windows


@dataclass(frozen=True)
class ExpertsConfig:
    """The feed-forward half of a mixture of experts."""

    num_experts: int
    num_experts_per_tok: int
    intermediate_size: int
    # Whether the weights of a token's experts are made to sum to one.
    norm_topk_prob: bool
    # Layers with one dense feed-forward instead.
    dense_layers: frozenset[int]


@dataclass(frozen=True)
class ArchitectureConfig:
    """The shape of a decoder-only transformer, whatever file it came from."""

    architecture: str
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope: Rope
    # Of layers with a window, where those have one of their own.
    local_rope: Rope
    windows: Windows
    attention_scale: float
    attention_softcap: float | None
    final_softcap: float | None
    attention_bias: bool
    mlp_bias: bool
    experts: ExpertsConfig | None
    tie_word_embeddings: bool
    eos_token_ids: frozenset[int]
    bos_token_id: int | None


def read_architecture(path: Path) -> ArchitectureConfig:
    """From a .gguf file or a Hugging Face folder. ConfigError for what this version cannot compute."""
    if path.is_dir():
        source, raw = path / "config.json", _read_json(path / "config.json")
        generation = path / "generation_config.json"
        eos = [raw.get("eos_token_id"), _read_json(generation).get("eos_token_id") if generation.exists() else None]
        raw["eos_token_id"] = [token for ids in eos for token in (ids if isinstance(ids, list) else [ids])]
    else:
        source, raw = path, read_gguf_config(path)
    names = raw.get("architectures") or ["(none)"]
    require_known(names[0], FAMILY_OF_CLASS, path)
    family = FAMILY_OF_CLASS[names[0]]
    raw = {**FAMILIES[family].defaults, **raw}
    _refuse_variants(raw, family, path)
    try:
        return _from_raw(raw, family, path)
    except KeyError as error:
        raise ConfigError(f"{source} lacks the key {error.args[0]}", param="model") from error


def require_known(name: str, known: Iterable[str], path: Path) -> None:
    if name not in known:
        raise ConfigError(f"{path}: unknown architecture {name}; known are {', '.join(known)}", param="model")


def unsupported(path: Path, what: str) -> ConfigError:
    return ConfigError(f"{path}: {what} is not supported yet; use a checkpoint without it", param="model")


def _from_raw(raw: Mapping[str, Any], family: str, path: Path) -> ArchitectureConfig:
    num_heads = int(raw["num_attention_heads"])
    num_kv_heads = int(raw.get("num_key_value_heads") or num_heads)
    if num_heads % num_kv_heads:
        raise ConfigError(f"{path}: {num_heads} heads cannot share {num_kv_heads} KV heads evenly", param="model")
    head_dim = int(raw.get("head_dim") or raw["hidden_size"] // num_heads)
    rope = _rope(raw, "full_attention", "rope_theta", head_dim, path)
    return ArchitectureConfig(
        architecture=family,
        hidden_size=int(raw["hidden_size"]),
        intermediate_size=int(raw["intermediate_size"]),
        num_layers=int(raw["num_hidden_layers"]),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        vocab_size=int(raw["vocab_size"]),
        max_position_embeddings=rope.max_positions or int(raw["max_position_embeddings"]),
        rms_norm_eps=float(raw.get("rms_norm_eps", 1e-6)),
        rope=rope,
        local_rope=_local_rope(raw, head_dim, path) or rope,
        windows=FAMILIES[family].windows(raw),
        attention_scale=float(raw.get("query_pre_attn_scalar") or head_dim) ** -0.5,
        attention_softcap=raw.get("attn_logit_softcapping"),
        final_softcap=raw.get("final_logit_softcapping"),
        attention_bias=bool(raw.get("attention_bias", False)),
        mlp_bias=bool(raw.get("mlp_bias", False)),
        experts=_experts(raw),
        tie_word_embeddings=bool(raw.get("tie_word_embeddings", False)),
        eos_token_ids=frozenset(int(token) for token in raw["eos_token_id"] if token is not None),
        bos_token_id=raw.get("bos_token_id"),
    )


def _rope(raw: Mapping[str, Any], layer_type: str, theta_key: str, head_dim: int, path: Path) -> Rope:
    """`rope_parameters` as newer configs have it, maybe one for each type of layer, or the older flat keys."""
    parameters: dict[str, Any] = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    parameters = {**(parameters.get(layer_type) or {})} if layer_type in parameters else {**parameters}
    if raw.get("original_max_position_embeddings"):
        parameters["original_max_position_embeddings"] = raw["original_max_position_embeddings"]
    theta = float(parameters.get("rope_theta") or raw.get(theta_key) or 10000.0)
    turned = float(parameters.get("partial_rotary_factor") or raw.get("partial_rotary_factor") or 1.0)
    dim = int(head_dim * turned)
    try:
        rope = scaled_rope(theta, dim, parameters, int(raw["max_position_embeddings"]))
    except ValueError as error:
        raise unsupported(path, f"rope scaling ({error})") from error
    if rope.divisors and len(rope.divisors) != dim // 2:
        raise ConfigError(
            f"{path}: rope scaling ({rope_kind(parameters)}) lists {len(rope.divisors)} factors for {dim // 2} pairs",
            param="model",
        )
    return rope


def _local_rope(raw: Mapping[str, Any], head_dim: int, path: Path) -> Rope | None:
    if "rope_local_base_freq" not in raw:
        return None
    by_type = raw.get("rope_parameters") or {}
    only_local = {"sliding_attention": by_type.get("sliding_attention") or {}}
    return _rope({**raw, "rope_parameters": only_local}, "sliding_attention", "rope_local_base_freq", head_dim, path)


def _experts(raw: Mapping[str, Any]) -> ExpertsConfig | None:
    num_experts = raw.get("num_local_experts") or raw.get("num_experts")
    if not num_experts:
        return None
    step, layers = int(raw.get("decoder_sparse_step", 1)), range(int(raw["num_hidden_layers"]))
    return ExpertsConfig(
        num_experts=int(num_experts),
        num_experts_per_tok=int(raw["num_experts_per_tok"]),
        intermediate_size=int(raw.get("moe_intermediate_size") or raw["intermediate_size"]),
        norm_topk_prob=bool(raw.get("norm_topk_prob", False)),
        dense_layers=frozenset(raw.get("mlp_only_layers") or ()) | {i for i in layers if (i + 1) % step},
    )


def _refuse_variants(raw: Mapping[str, Any], family: str, path: Path) -> None:
    activation = raw.get("hidden_activation") or raw.get("hidden_act") or FAMILIES[family].activation
    if activation != FAMILIES[family].activation:
        raise unsupported(path, f"the activation {activation}")
    if raw.get("quantization_config"):
        raise unsupported(path, "quantised safetensors")
    if raw.get("use_bidirectional_attention"):
        raise unsupported(path, "bidirectional attention")


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read {path}: {error}; a model folder needs it", param="model") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{path} does not hold a JSON object", param="model")
    return value
