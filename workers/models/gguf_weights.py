"""Tensors of a GGUF file under Hugging Face's names and with Hugging Face's values."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGMLQuantizationType, ReaderTensor, quants

from workers.errors import ConfigError
from workers.gguf_file import open_gguf
from workers.models.architecture import ArchitectureConfig
from workers.models.gguf_blocks import BLOCKS
from workers.models.registry import FAMILIES, GgufForm
from workers.models.weights import StoredTensor, Weights

_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_DTYPES = {
    GGMLQuantizationType.F32: torch.float32,
    GGMLQuantizationType.F16: torch.float16,
    GGMLQuantizationType.BF16: torch.bfloat16,
}
# Part of the architecture, not of the weights.
_IN_CONFIG = "rope_freqs.weight"
Rows = Callable[[], np.ndarray]
# The library dequantises 16 rows at a time; rows glued together by eight cost a third of the time.
_GLUED_ROWS = 8


def open_gguf_weights(path: Path, config: ArchitectureConfig) -> Weights:
    form = FAMILIES[config.architecture].gguf
    assert form is not None, f"{config.architecture} is not read from GGUF"
    tensors = [tensor for tensor in open_gguf(path).tensors if tensor.name != _IN_CONFIG]
    stored: dict[str, StoredTensor] = {}
    for tensor in tensors:
        shape = tuple(int(size) for size in reversed(tensor.shape))
        rows = partial(_rows, tensor, config, form)
        read = partial(_read, tensor, rows, shape, form, path)
        stored[_hf_name(tensor.name, form)] = StoredTensor(shape, read, **_groups(tensor, rows, shape))
    largest = max(tensors, key=lambda tensor: (len(tensor.shape), tensor.name.startswith("blk."))).tensor_type
    kind = "none" if largest in _DTYPES else largest.name
    return Weights(path, stored, _DTYPES.get(largest, torch.bfloat16), kind)


def _hf_name(name: str, form: GgufForm) -> str:
    """Names that have no counterpart stay as they are, to be reported as unexpected."""
    layer_names = {**_LAYER_NAMES, "ffn_norm": form.ffn_norm}
    match name.split("."):
        case ["blk", layer, kind, ("weight" | "bias") as part] if kind in layer_names:
            return f"model.layers.{layer}.{layer_names[kind]}.{part}"
        case [kind, "weight"] if kind in _NAMES:
            return f"{_NAMES[kind]}.weight"
        case _:
            return name


def _groups(tensor: ReaderTensor, rows: Rows, shape: tuple[int, ...]) -> dict[str, Any]:
    """StoredTensor's fields for a matrix in one of the formats that kernels take."""
    format = BLOCKS.get(tensor.tensor_type)
    if format is None or len(shape) != 2:
        return {}
    return {"bits": format.bits, "read_groups": lambda: format.read(rows())}


def _rows(tensor: ReaderTensor, config: ArchitectureConfig, form: GgufForm) -> np.ndarray:
    """As stored, but in Hugging Face's order."""
    data, kind = np.asarray(tensor.data), _kind(tensor)
    if form.permuted and kind in ("attn_q", "attn_k"):
        return _unpermute(data, config.num_heads if kind == "attn_q" else config.num_kv_heads)
    return data


def _kind(tensor: ReaderTensor) -> str:
    return tensor.name.split(".")[-2]


def _read(tensor: ReaderTensor, rows: Rows, shape: tuple[int, ...], form: GgufForm, path: Path) -> torch.Tensor:
    values = _dequantise(tensor, rows(), shape, path)
    return values - form.norm_offset if _kind(tensor).endswith("norm") and form.norm_offset else values


def _dequantise(tensor: ReaderTensor, data: np.ndarray, shape: tuple[int, ...], path: Path) -> torch.Tensor:
    if tensor.tensor_type in (GGMLQuantizationType.F32, GGMLQuantizationType.F16):
        return torch.from_numpy(np.array(data))
    glue = _GLUED_ROWS if data.shape[0] % _GLUED_ROWS == 0 else 1
    try:
        values = quants.dequantize(data.reshape(data.shape[0] // glue, -1), tensor.tensor_type)
    except NotImplementedError as error:
        raise ConfigError(
            f"{path}: tensor {tensor.name} is {tensor.tensor_type.name}, which cannot be dequantised; "
            "use another quantisation",
            param="model",
        ) from error
    return torch.from_numpy(values).view(shape)


def _unpermute(data: np.ndarray, num_heads: int) -> np.ndarray:
    """Undo the row order of a rope that turns pairs (2i, 2i + 1): ours turns (i, i + head_dim / 2)."""
    rows = data.shape[0]
    return data.reshape(num_heads, rows // num_heads // 2, 2, -1).swapaxes(1, 2).reshape(data.shape)
