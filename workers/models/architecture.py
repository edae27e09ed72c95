"""What a checkpoint is, read from its metadata alone. The router imports this module: neither torch nor ray here."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from workers.errors import ConfigError
from workers.models.gguf_reader import HeaderReader, open_gguf

# Hugging Face's class name -> family; a family's own name is what GGUF calls it.
FAMILY_OF_CLASS = {"LlamaForCausalLM": "llama"}
FAMILIES = tuple(sorted(set(FAMILY_OF_CLASS.values())))


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
    rope_theta: float
    tie_word_embeddings: bool
    eos_token_ids: frozenset[int]
    bos_token_id: int | None


def read_architecture(path: Path) -> ArchitectureConfig:
    """From a .gguf file or a Hugging Face folder. ConfigError for what this version cannot compute."""
    config = _from_folder(path) if path.is_dir() else _from_gguf(path)
    if config.num_heads % config.num_kv_heads:
        raise ConfigError(
            f"{path}: {config.num_heads} heads cannot share {config.num_kv_heads} KV heads evenly", param="model"
        )
    return config


def _from_gguf(path: Path) -> ArchitectureConfig:
    reader = open_gguf(path)
    family = str(reader.value("general.architecture"))
    _require_known(family, FAMILIES, path)
    _refuse_gguf_variants(reader, family, path)

    def need(key: str) -> Any:
        value = reader.value(f"{family}.{key}")
        if value is None:
            raise ConfigError(f"{path} lacks the key {family}.{key}; convert the model again", param="model")
        return value

    hidden_size, num_heads = int(need("embedding_length")), int(need("attention.head_count"))
    shapes = {tensor.name: tensor.shape for tensor in reader.tensors}
    if "token_embd.weight" not in shapes:
        raise ConfigError(f"{path} lacks the tensor token_embd.weight; convert the model again", param="model")
    return ArchitectureConfig(
        architecture=family,
        hidden_size=hidden_size,
        intermediate_size=int(need("feed_forward_length")),
        num_layers=int(need("block_count")),
        num_heads=num_heads,
        num_kv_heads=int(reader.value(f"{family}.attention.head_count_kv") or num_heads),
        head_dim=int(reader.value(f"{family}.attention.key_length") or hidden_size // num_heads),
        # GGUF lists dimensions innermost first.
        vocab_size=int(shapes["token_embd.weight"][1]),
        max_position_embeddings=int(need("context_length")),
        rms_norm_eps=float(need("attention.layer_norm_rms_epsilon")),
        rope_theta=float(reader.value(f"{family}.rope.freq_base") or 10000.0),
        tie_word_embeddings="output.weight" not in shapes,
        eos_token_ids=_ids(reader.value(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot")),
        bos_token_id=reader.value("tokenizer.ggml.bos_token_id"),
    )


def _refuse_gguf_variants(reader: HeaderReader, family: str, path: Path) -> None:
    scaling = reader.value(f"{family}.rope.scaling.type")
    if scaling not in (None, "none") or any(tensor.name == "rope_freqs.weight" for tensor in reader.tensors):
        raise _unsupported(path, f"rope scaling ({scaling or 'rope_freqs.weight'})")
    if reader.value(f"{family}.expert_count"):
        raise _unsupported(path, "a mixture of experts")


def _from_folder(path: Path) -> ArchitectureConfig:
    raw = _read_json(path / "config.json")
    names = raw.get("architectures") or ["(none)"]
    _require_known(names[0], tuple(FAMILY_OF_CLASS), path)
    _refuse_hf_variants(raw, path)
    generation = _read_json(path / "generation_config.json") if (path / "generation_config.json").exists() else {}
    try:
        return _from_hf(raw, generation, FAMILY_OF_CLASS[names[0]])
    except KeyError as error:
        raise ConfigError(f"{path / 'config.json'} lacks the key {error.args[0]}", param="model") from error


def _from_hf(raw: dict[str, Any], generation: dict[str, Any], family: str) -> ArchitectureConfig:
    num_heads = int(raw["num_attention_heads"])
    theta = raw.get("rope_theta") or (raw.get("rope_parameters") or {}).get("rope_theta") or 10000.0
    eos = [raw.get("eos_token_id"), generation.get("eos_token_id")]
    return ArchitectureConfig(
        architecture=family,
        hidden_size=int(raw["hidden_size"]),
        intermediate_size=int(raw["intermediate_size"]),
        num_layers=int(raw["num_hidden_layers"]),
        num_heads=num_heads,
        num_kv_heads=int(raw.get("num_key_value_heads") or num_heads),
        head_dim=int(raw.get("head_dim") or raw["hidden_size"] // num_heads),
        vocab_size=int(raw["vocab_size"]),
        max_position_embeddings=int(raw["max_position_embeddings"]),
        rms_norm_eps=float(raw.get("rms_norm_eps", 1e-6)),
        rope_theta=float(theta),
        tie_word_embeddings=bool(raw.get("tie_word_embeddings", False)),
        eos_token_ids=_ids(token for ids in eos for token in (ids if isinstance(ids, list) else [ids])),
        bos_token_id=raw.get("bos_token_id"),
    )


def _refuse_hf_variants(raw: dict[str, Any], path: Path) -> None:
    for key in ("rope_scaling", "rope_parameters"):
        kind = (raw.get(key) or {}).get("rope_type") or (raw.get(key) or {}).get("type") or "default"
        if kind != "default":
            raise _unsupported(path, f"rope scaling ({kind})")
    if raw.get("hidden_act", "silu") != "silu":
        raise _unsupported(path, f"the activation {raw['hidden_act']}")
    for key in ("attention_bias", "mlp_bias"):
        if raw.get(key):
            raise _unsupported(path, key)
    if raw.get("quantization_config"):
        raise _unsupported(path, "quantised safetensors")


def _require_known(name: str, known: Iterable[str], path: Path) -> None:
    if name not in known:
        raise ConfigError(f"{path}: unknown architecture {name}; known are {', '.join(known)}", param="model")


def _unsupported(path: Path, what: str) -> ConfigError:
    return ConfigError(f"{path}: {what} is not supported yet; use a checkpoint without it", param="model")


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read {path}: {error}; a model folder needs it", param="model") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{path} does not hold a JSON object", param="model")
    return value


def _ids(values: Iterable[int | None]) -> frozenset[int]:
    return frozenset(int(value) for value in values if value is not None)
