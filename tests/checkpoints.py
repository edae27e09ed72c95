"""Small random Llama checkpoints, written as Hugging Face folders and as GGUF files."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType
from safetensors.torch import save_file


@dataclass(frozen=True)
class TinyLlama:
    """The shape of a random checkpoint; every matrix's rows are multiples of GGUF's block of 32."""

    hidden_size: int = 64
    intermediate_size: int = 96
    num_layers: int = 2
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 32
    vocab_size: int = 256
    max_position_embeddings: int = 512
    rope_theta: float = 10000.0
    tied: bool = False
    eos_token_ids: tuple[int, ...] = (2,)
    seed: int = 0

    def tensors(self) -> dict[str, torch.Tensor]:
        """By Hugging Face name. Large enough weights that tokens differ in their logits."""
        generator = torch.Generator().manual_seed(self.seed)
        tensors: dict[str, torch.Tensor] = {}
        for name, shape in self.shapes().items():
            noise = torch.randn(shape, generator=generator)
            tensors[name] = 1 + 0.1 * noise if len(shape) == 1 else noise * 1.5 / shape[1] ** 0.5
        return tensors

    def shapes(self) -> dict[str, tuple[int, ...]]:
        hidden, inner = self.hidden_size, self.intermediate_size
        q_rows, kv_rows = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        layer: dict[str, tuple[int, ...]] = {
            "input_layernorm": (hidden,),
            "self_attn.q_proj": (q_rows, hidden),
            "self_attn.k_proj": (kv_rows, hidden),
            "self_attn.v_proj": (kv_rows, hidden),
            "self_attn.o_proj": (hidden, q_rows),
            "post_attention_layernorm": (hidden,),
            "mlp.gate_proj": (inner, hidden),
            "mlp.up_proj": (inner, hidden),
            "mlp.down_proj": (hidden, inner),
        }
        shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (self.vocab_size, hidden)}
        for i in range(self.num_layers):
            shapes |= {f"model.layers.{i}.{name}.weight": shape for name, shape in layer.items()}
        shapes["model.norm.weight"] = (hidden,)
        if not self.tied:
            shapes["lm_head.weight"] = (self.vocab_size, hidden)
        return shapes

    def config(self) -> dict[str, object]:
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "vocab_size": self.vocab_size,
            "max_position_embeddings": self.max_position_embeddings,
            "rms_norm_eps": 1e-5,
            "rope_theta": self.rope_theta,
            "tie_word_embeddings": self.tied,
            "hidden_act": "silu",
            "bos_token_id": 1,
            "eos_token_id": self.eos_token_ids[0],
            "torch_dtype": "float32",
        }


def write_folder(folder: Path, model: TinyLlama | None = None, *, num_shards: int = 1) -> Path:
    """A Hugging Face folder without a tokenizer."""
    model = model or TinyLlama()
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(model.config()))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": list(model.eos_token_ids)}))
    write_tensors(folder, model.tensors(), num_shards=num_shards)
    return folder


def write_tensors(folder: Path, tensors: Mapping[str, torch.Tensor], *, num_shards: int = 1) -> None:
    if num_shards == 1:
        save_file(dict(tensors), folder / "model.safetensors", metadata={"format": "pt"})
        return
    names = sorted(tensors)
    files = {name: f"model-{i % num_shards + 1:05}-of-{num_shards:05}.safetensors" for i, name in enumerate(names)}
    for file in set(files.values()):
        save_file({n: tensors[n] for n in names if files[n] == file}, folder / file, metadata={"format": "pt"})
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": files}))


_GGUF_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def write_gguf(path: Path, kind: GGMLQuantizationType, model: TinyLlama | None = None) -> Path:
    """A GGUF without a vocabulary, its matrices of `kind`, its norms in F32."""
    model = model or TinyLlama()
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(model.num_layers)
    writer.add_context_length(model.max_position_embeddings)
    writer.add_embedding_length(model.hidden_size)
    writer.add_feed_forward_length(model.intermediate_size)
    writer.add_head_count(model.num_heads)
    writer.add_head_count_kv(model.num_kv_heads)
    writer.add_key_length(model.head_dim)
    writer.add_rope_freq_base(model.rope_theta)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(model.eos_token_ids[0])
    for name, tensor in model.tensors().items():
        data = gguf_rows(name, tensor, model).numpy()
        stored = kind if data.ndim == 2 else GGMLQuantizationType.F32
        writer.add_tensor(gguf_name(name), gguf.quants.quantize(data, stored), raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def gguf_name(name: str) -> str:
    stem = name.removesuffix(".weight")
    if stem.startswith("model.layers."):
        layer, part = stem.removeprefix("model.layers.").split(".", 1)
        return f"blk.{layer}.{_GGUF_NAMES[part]}.weight"
    return f"{_GGUF_NAMES[stem]}.weight"


def gguf_rows(name: str, tensor: torch.Tensor, model: TinyLlama) -> torch.Tensor:
    """Rows in GGUF's order: row i of either half of a q or k head goes beside its partner in the other half."""
    heads = {"q_proj": model.num_heads, "k_proj": model.num_kv_heads}.get(name.split(".")[-2])
    if heads is None:
        return tensor
    halves = tensor.view(heads, 2, model.head_dim // 2, tensor.shape[1])
    return halves.transpose(1, 2).reshape(tensor.shape).contiguous()


def dequantised(kind: GGMLQuantizationType, model: TinyLlama) -> dict[str, torch.Tensor]:
    """The tensors that a GGUF of `kind` holds, by Hugging Face name: what rounding left of them."""
    return {
        name: tensor if tensor.ndim == 1 else torch.from_numpy(_rounded(tensor.numpy(), kind))
        for name, tensor in model.tensors().items()
    }


def _rounded(values: np.ndarray, kind: GGMLQuantizationType) -> np.ndarray:
    rounded: np.ndarray = gguf.quants.dequantize(gguf.quants.quantize(values, kind), kind)
    return rounded.reshape(values.shape)
