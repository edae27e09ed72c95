"""What of a model decides its cost, from a config.json or a GGUF's header: also of one that kvferry does not serve."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from workers.errors import ConfigError

# Feed-forwards of two matrices; all others have a gate, and so three.
_WITHOUT_GATE = frozenset({"gpt_neox", "falcon", "phi", "starcoder2", "nemotron", "stablelm_epoch"})


@dataclass(frozen=True)
class Attention:
    """Of one layer. Its KV of a token has `kv_elements` numbers."""

    kv_elements: int
    num_params: int
    # A multiply and an add for each: of one query with one key and its value, all heads together.
    score_macs: int


@dataclass(frozen=True)
class Experts:
    num_layers: int
    num_experts: int
    num_per_token: int
    expert_params: int


@dataclass(frozen=True)
class ModelShape:
    name: str
    num_layers: int
    attention: Attention
    # Of all matrices, and of those that one token goes through.
    num_params: int
    num_active_params: int
    # Of a table in which tokens are only looked up: no step reads it.
    num_lookup_params: int = 0
    experts: Experts | None = None
    max_position_embeddings: int = 0
    # Of the file, where its weights are in fewer bits than a config tells; 0: not known.
    file_bytes: int = 0
    # If every head had its own K and V.
    mha_kv_elements: int = 0

    def kv_bytes_per_layer(self, element_bytes: float) -> float:
        """Of one token: 2 x kv_heads x head_dim numbers (MHA and GQA), or one latent and its rotated part (MLA)."""
        return self.attention.kv_elements * element_bytes

    def kv_bytes(self, element_bytes: float) -> float:
        """Of one token."""
        return self.num_layers * self.kv_bytes_per_layer(element_bytes)

    def params_read(self, num_rows: float) -> float:
        """By a step of so many tokens that choose their experts evenly: an expert is read once, if anybody chose it."""
        num_params: float = self.num_params - self.num_lookup_params
        if self.experts is None:
            return num_params
        e = self.experts
        chosen: float = e.num_experts * (1 - (1 - e.num_per_token / e.num_experts) ** num_rows)
        return num_params - e.num_layers * (e.num_experts - chosen) * e.expert_params


def read_shape(path: Path) -> ModelShape:
    """Of a config.json, a folder with one, or a .gguf file. Raises ConfigError."""
    if path.suffix == ".gguf":
        from workers.models.gguf_config import read_gguf_config

        raw, file_bytes = read_gguf_config(path), path.stat().st_size
    else:
        path = path / "config.json" if path.is_dir() else path
        raw, file_bytes = _read_json(path), 0
    raw = {**raw, **(raw.get("text_config") or {})}
    try:
        return _from_raw(raw, path, file_bytes)
    except KeyError as error:
        raise ConfigError(f"{path} lacks the key {error.args[0]}; give --layers, --kv-heads, --head-dim") from error


def shape_of(num_layers: int, num_kv_heads: int, head_dim: int, num_params: int) -> ModelShape:
    """Of a model that is no file. Attention's own arithmetic is that of as many heads as have KV."""
    kv_elements = 2 * num_kv_heads * head_dim
    attention = Attention(kv_elements, 0, kv_elements)
    name = f"{num_layers} layers, {num_kv_heads} KV heads of {head_dim}"
    return ModelShape(name, num_layers, attention, num_params, num_params, mha_kv_elements=kv_elements)


def _from_raw(raw: Mapping[str, Any], path: Path, file_bytes: int) -> ModelShape:
    num_layers, hidden = int(raw["num_hidden_layers"]), int(raw["hidden_size"])
    attention, experts = _attention(raw, hidden), _experts(raw, hidden, num_layers)
    num_dense = num_layers - (experts.num_layers if experts else 0)
    dense = num_dense * _feed_forward(raw, hidden, int(raw["intermediate_size"])) if num_dense else 0
    embedding = int(raw["vocab_size"]) * hidden
    lookup = 0 if raw.get("tie_word_embeddings", False) else embedding
    num_active = num_layers * attention.num_params + dense + embedding
    num_params = num_active + lookup
    if experts:
        always = experts.num_layers * _always_computed(raw, hidden, experts.num_experts)
        every = experts.num_layers * experts.expert_params
        num_active += always + every * experts.num_per_token
        num_params += always + every * experts.num_experts
    return ModelShape(
        name=path.parent.name if path.name == "config.json" else path.name,
        num_layers=num_layers,
        attention=attention,
        num_params=num_params,
        num_active_params=num_active,
        num_lookup_params=lookup,
        experts=experts,
        max_position_embeddings=int(raw.get("max_position_embeddings") or 0),
        file_bytes=file_bytes,
        mha_kv_elements=_mha_kv_elements(raw, hidden),
    )


def _attention(raw: Mapping[str, Any], hidden: int) -> Attention:
    if raw.get("kv_lora_rank"):
        return _latent_attention(raw, hidden)
    num_heads, head_dim = int(raw["num_attention_heads"]), _head_dim(raw, hidden)
    num_kv_heads = int(raw.get("num_key_value_heads") or num_heads)
    num_params = 2 * hidden * num_heads * head_dim + 2 * hidden * num_kv_heads * head_dim
    return Attention(2 * num_kv_heads * head_dim, num_params, 2 * num_heads * head_dim)


def _latent_attention(raw: Mapping[str, Any], hidden: int) -> Attention:
    """MLA (DeepSeek-V2, arXiv:2405.04434, section 2.1): of a token, one latent of kv_lora_rank is kept for all heads,
    and a key of qk_rope_head_dim that has its position. Scores and values are formed with the latent itself, as in
    decode."""
    num_heads, latent, rotated = (int(raw[key]) for key in ("num_attention_heads", "kv_lora_rank", "qk_rope_head_dim"))
    plain, value = int(raw["qk_nope_head_dim"]), int(raw["v_head_dim"])
    queries = num_heads * (plain + rotated)
    rank = raw.get("q_lora_rank")
    num_params = int(rank) * (hidden + queries) if rank else hidden * queries
    num_params += hidden * (latent + rotated) + latent * num_heads * (plain + value) + num_heads * value * hidden
    return Attention(latent + rotated, num_params, num_heads * (2 * latent + rotated))


def _experts(raw: Mapping[str, Any], hidden: int, num_layers: int) -> Experts | None:
    num = raw.get("num_local_experts") or raw.get("num_experts") or raw.get("n_routed_experts")
    if not num:
        return None
    first, step = int(raw.get("first_k_dense_replace") or 0), int(raw.get("decoder_sparse_step") or 1)
    dense = set(raw.get("mlp_only_layers") or ()) | {i for i in range(num_layers) if i < first or (i + 1) % step}
    size = _feed_forward(raw, hidden, int(raw.get("moe_intermediate_size") or raw["intermediate_size"]))
    return Experts(num_layers - len(dense), int(num), int(raw["num_experts_per_tok"]), size)


def _always_computed(raw: Mapping[str, Any], hidden: int, num_experts: int) -> int:
    """The router of a layer's experts, and experts that every token goes through."""
    shared = int(raw.get("n_shared_experts") or 0) * int(raw.get("moe_intermediate_size") or 0)
    shared += int(raw.get("shared_expert_intermediate_size") or 0)
    return hidden * num_experts + _feed_forward(raw, hidden, shared)


def _feed_forward(raw: Mapping[str, Any], hidden: int, intermediate: int) -> int:
    return (2 if raw.get("model_type") in _WITHOUT_GATE else 3) * hidden * intermediate


def _head_dim(raw: Mapping[str, Any], hidden: int) -> int:
    return int(raw.get("head_dim") or hidden // int(raw["num_attention_heads"]))


def _mha_kv_elements(raw: Mapping[str, Any], hidden: int) -> int:
    num_heads = int(raw["num_attention_heads"])
    if raw.get("kv_lora_rank"):
        return num_heads * sum(int(raw[key]) for key in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"))
    return 2 * num_heads * _head_dim(raw, hidden)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        raw = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"cannot read {path}: {error}; give a config.json, a model's folder or a .gguf file"
        ) from error
    if not isinstance(raw, dict):
        raise ConfigError(f"{path} holds no JSON object")
    return raw
