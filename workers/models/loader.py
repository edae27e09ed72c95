"""From the files of a checkpoint to a model: its weights, and the family that is built of them."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Protocol, cast

import torch
from safetensors import SafetensorError, safe_open

from workers.config import Quantization
from workers.engine.batch import StepBatch
from workers.errors import ConfigError
from workers.layers.ranks import ALONE, Ranks
from workers.models.architecture import ArchitectureConfig
from workers.models.cut_weights import cut_weights
from workers.models.gguf_weights import open_gguf_weights
from workers.models.layer_reader import LayerReader
from workers.models.shard import shard_of
from workers.models.stored import weight_files
from workers.models.weights import StoredTensor, Weights

_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


class Model(Protocol):
    # How many matrices each kernel of workers/layers/linear.py multiplies.
    kernels: Mapping[str, int]

    def forward(self, batch: StepBatch, kv_cache: torch.Tensor) -> torch.Tensor:
        """Write the KV of the step's tokens; logits [num_sample_rows, vocab_size] of the rows that sample.

        kv_cache: [num_layers, 2, num_blocks, block_size, the rank's KV heads, head_dim].
        """

    def watch(self, layer_done: Callable[[int], None] | None) -> None:
        """Call `layer_done`(i) whenever layer i is computed: on a GPU, launched."""


class FamilyModule(Protocol):
    """What workers/models/FAMILY.py is."""

    def build(self, config: ArchitectureConfig, read: LayerReader) -> Model: ...


def load_model(
    config: ArchitectureConfig,
    weights: Weights,
    dtype: torch.dtype,
    device: torch.device,
    ranks: Ranks = ALONE,
    quantization: Quantization = "none",
) -> Model:
    """The part of one of the `ranks`; quantised weights are for a single one.

    ConfigError when a tensor is missing, left over or of another shape.
    """
    family = cast(FamilyModule, importlib.import_module(f"workers.models.{config.architecture}"))
    if ranks.size > 1:
        weights = cut_weights(weights, config, ranks.rank, ranks.size)
        config = shard_of(config, ranks.rank, ranks.size)
    reader = LayerReader(config, weights, dtype, device, quantization, ranks)
    model = family.build(config, reader)
    model.kernels = reader.kernels
    weights.require_all_taken()
    return model


def open_weights(path: Path, config: ArchitectureConfig) -> Weights:
    """The tensors of a .gguf file or of a Hugging Face folder (one safetensors file, or shards and their index)."""
    return _from_safetensors(path) if path.is_dir() else open_gguf_weights(path, config)


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
            stored[name] = StoredTensor(
                tuple(view.get_shape()), partial(handle.get_tensor, name), partial(_read_row, view)
            )
            dtype = _DTYPES.get(view.get_dtype(), dtype)
    return Weights(path, stored, dtype, "none")


def _read_row(view: Any, row: int) -> torch.Tensor:
    values: torch.Tensor = view[row]
    return values
