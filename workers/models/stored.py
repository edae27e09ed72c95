"""The tensors of a checkpoint as its headers list them. Neither torch nor ray here."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from workers.config import Quantization
from workers.errors import ConfigError
from workers.gguf_file import open_gguf
from workers.layers.groups import GROUP

_LENGTH = struct.Struct("<Q")
_SAFETENSORS_DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_GGUF_DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
# Of formats that kernels take as they are (workers/models/gguf_blocks.py).
_GGUF_BITS = {"Q4_0": 4, "Q4_1": 4, "Q8_0": 8}
_IN_LAYERS = ("model.layers.", "blk.")
_EMBEDDINGS = ("model.embed_tokens.weight", "token_embd.weight")


@dataclass(frozen=True, slots=True)
class Stored:
    name: str
    shape: tuple[int, ...]
    # What it is best computed in.
    dtype: str
    # Where a kernel takes it in its own bits.
    bits: int | None = None

    @property
    def num_weights(self) -> int:
        return prod(self.shape)

    @property
    def is_embedding(self) -> bool:
        return self.name in _EMBEDDINGS


def stored_tensors(path: Path) -> list[Stored]:
    """Of a .gguf file or of a Hugging Face folder. ConfigError when a file is missing or is not whole."""
    if path.is_dir():
        return [tensor for file in weight_files(path) for tensor in _in_safetensors(file)]
    return [
        Stored(
            tensor.name,
            tuple(int(size) for size in reversed(tensor.shape)),
            _GGUF_DTYPES.get(tensor.tensor_type.name, "bfloat16"),
            _GGUF_BITS.get(tensor.tensor_type.name),
        )
        for tensor in open_gguf(path).tensors
    ]


def checkpoint_dtype(stored: Sequence[Stored]) -> str:
    """What a checkpoint is best computed in: that of its layers' matrices."""
    return max(stored, key=lambda tensor: (len(tensor.shape), tensor.name.startswith(_IN_LAYERS))).dtype


def require_quantisable(quantization: Quantization, stored: Sequence[Stored], path: Path) -> None:
    """Raise ConfigError when a checkpoint's matrices cannot be kept so."""
    matrices = [tensor for tensor in stored if len(tensor.shape) > 1]
    if quantization == "native" and all(tensor.bits is None for tensor in matrices):
        raise ConfigError(
            f"quantization: native keeps a checkpoint's own bits, GGUF's Q4_0, Q4_1 or Q8_0, and {path} has none of "
            "these; set int8, int8_dynamic or int4, or none",
            param="quantization",
        )
    odd = next((tensor for tensor in matrices if tensor.shape[-1] % GROUP), None)
    if quantization == "int4" and odd:
        raise ConfigError(
            f"quantization: int4 has a scale for {GROUP} columns, and {odd.name} of {path} has "
            f"{odd.shape[-1]}; set int8",
            param="quantization",
        )


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


def _in_safetensors(file: Path) -> Iterator[Stored]:
    header, num_bytes = _header(file)
    for name, entry in header.items():
        if name != "__metadata__":
            yield Stored(name, tuple(entry["shape"]), _SAFETENSORS_DTYPES.get(entry["dtype"], "float32"))
            if entry["data_offsets"][1] > num_bytes:
                raise ConfigError(f"{file} is cut off: {name} is not all there; download it again", param="model")


def _header(file: Path) -> tuple[dict[str, Any], int]:
    """And how many bytes come after it. Source: the safetensors format, a length and a JSON object before the data."""
    try:
        with file.open("rb") as opened:
            (length,) = _LENGTH.unpack(opened.read(_LENGTH.size))
            size = file.stat().st_size - _LENGTH.size - length
            if size < 0:
                raise ValueError("its header is longer than the file")
            header: dict[str, Any] = json.loads(opened.read(length))
            return header, size
    except (OSError, ValueError, struct.error) as error:
        raise ConfigError(
            f"{file} is not a readable safetensors file ({error}); download it again", param="model"
        ) from error
