"""Tensors of a checkpoint by their Hugging Face names, read one at a time, each straight into its place."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
from gguf import GGMLQuantizationType, ReaderTensor, quants
from safetensors import SafetensorError, safe_open

from workers.errors import ConfigError
from workers.models.architecture import ArchitectureConfig
from workers.models.gguf_reader import open_gguf

_FROM_GGUF = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_FROM_GGUF_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_GGUF_DTYPES = {
    GGMLQuantizationType.F32: torch.float32,
    GGMLQuantizationType.F16: torch.float16,
    GGMLQuantizationType.BF16: torch.bfloat16,
}
_SAFETENSORS_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
# The library dequantises 16 rows at a time; rows glued together by eight cost a third of the time.
_GLUED_ROWS = 8


@dataclass(frozen=True)
class StoredTensor:
    shape: tuple[int, ...]
    read: Callable[[], torch.Tensor]


class Weights:
    """Every tensor is taken once; what is missing, left over or of another shape is a ConfigError naming it."""

    def __init__(self, path: Path, stored: dict[str, StoredTensor], dtype: torch.dtype, quantisation: str) -> None:
        self.path = path
        # The checkpoint's own dtype; for quantised tensors the one they are best computed in.
        self.dtype = dtype
        self.quantisation = quantisation
        self._stored = stored

    def copy_into(self, name: str, out: torch.Tensor) -> None:
        """Read tensor `name` into `out`, converting to its dtype."""
        stored = self._stored.pop(name, None)
        if stored is None:
            raise ConfigError(f"{self.path} lacks the tensor {name}; download it again", param="model")
        if stored.shape != tuple(out.shape):
            raise ConfigError(
                f"{self.path}: tensor {name} has shape {stored.shape}, its config says {tuple(out.shape)}",
                param="model",
            )
        out.copy_(stored.read())

    def skip(self, name: str) -> None:
        """Accept tensor `name` without using it."""
        self._stored.pop(name, None)

    def require_all_taken(self) -> None:
        left = sorted(name for name in self._stored if not name.endswith("rotary_emb.inv_freq"))
        if left:
            more = f" and {len(left) - 1} more" if len(left) > 1 else ""
            raise ConfigError(f"{self.path}: unexpected tensor {left[0]}{more} for its architecture", param="model")


def open_weights(path: Path, config: ArchitectureConfig) -> Weights:
    """The tensors of a .gguf file or of a Hugging Face folder (one safetensors file, or shards and their index)."""
    return _from_safetensors(path) if path.is_dir() else _from_gguf(path, config)


def weight_files(path: Path) -> list[Path]:
    """Files that hold the tensors, in a fixed order."""
    if path.is_file():
        return [path]
    index = path / "model.safetensors.index.json"
    if not index.exists():
        files = [path / "model.safetensors"]
    else:
        try:
            files = [path / name for name in sorted(set(json.loads(index.read_text("utf-8"))["weight_map"].values()))]
        except (ValueError, KeyError, AttributeError) as error:
            raise ConfigError(f"{index} is no index of shards: {error!r}; download it again", param="model") from error
    for file in files:
        if not file.exists():
            raise ConfigError(f"{path} lacks {file.name}; download it again", param="model")
    return files


def _from_safetensors(path: Path) -> Weights:
    stored: dict[str, StoredTensor] = {}
    dtype = torch.float32
    for file in weight_files(path):
        try:
            handle = safe_open(file, framework="pt")
        except (SafetensorError, OSError) as error:
            raise ConfigError(
                f"{file} is not a readable safetensors file ({error}); download it again", param="model"
            ) from error
        for name in handle.keys():  # type: ignore[no-untyped-call]  # noqa: SIM118 - a handle is no mapping
            view = handle.get_slice(name)  # type: ignore[no-untyped-call]
            stored[name] = StoredTensor(tuple(view.get_shape()), partial(handle.get_tensor, name))
            dtype = _SAFETENSORS_DTYPES.get(view.get_dtype(), dtype)
    return Weights(path, stored, dtype, "none")


def _from_gguf(path: Path, config: ArchitectureConfig) -> Weights:
    stored: dict[str, StoredTensor] = {}
    tensors = open_gguf(path).tensors
    for tensor in tensors:
        shape = tuple(int(size) for size in reversed(tensor.shape))
        stored[_hf_name(tensor.name)] = StoredTensor(shape, partial(_read_gguf, tensor, shape, config, path))
    largest = max(tensors, key=lambda tensor: (len(tensor.shape), tensor.name.startswith("blk."))).tensor_type
    kind = "none" if largest in _GGUF_DTYPES else largest.name
    return Weights(path, stored, _GGUF_DTYPES.get(largest, torch.bfloat16), kind)


def _hf_name(name: str) -> str:
    """Names that have no counterpart stay as they are, to be reported as unexpected."""
    match name.split("."):
        case ["blk", layer, kind, "weight"] if kind in _FROM_GGUF_LAYER:
            return f"model.layers.{layer}.{_FROM_GGUF_LAYER[kind]}.weight"
        case _:
            return _FROM_GGUF.get(name, name)


def _read_gguf(tensor: ReaderTensor, shape: tuple[int, ...], config: ArchitectureConfig, path: Path) -> torch.Tensor:
    data = np.asarray(tensor.data)
    if config.architecture == "llama" and tensor.name.endswith(("attn_q.weight", "attn_k.weight")):
        data = _unpermute(data, config.num_heads if "attn_q" in tensor.name else config.num_kv_heads)
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
    """Undo the row order GGUF gives Llama's q and k, whose rope turns pairs (2i, 2i + 1), not (i, i + head_dim / 2)."""
    rows = data.shape[0]
    return data.reshape(num_heads, rows // num_heads // 2, 2, -1).swapaxes(1, 2).reshape(data.shape)
