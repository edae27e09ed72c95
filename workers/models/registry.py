"""Families of models: one row each."""

from __future__ import annotations

from typing import Protocol

import torch

from workers.engine.batch import StepBatch
from workers.models.architecture import ArchitectureConfig
from workers.models.llama import Llama
from workers.models.loader import Weights


class Model(Protocol):
    def forward(self, batch: StepBatch, kv_cache: torch.Tensor) -> torch.Tensor:
        """Write the KV of the step's tokens; logits [num_sample_rows, vocab_size] of the rows that sample."""


class ModelFamily(Protocol):
    def __call__(
        self, config: ArchitectureConfig, weights: Weights, dtype: torch.dtype, device: torch.device
    ) -> Model: ...


MODELS: dict[str, ModelFamily] = {
    "llama": Llama,
}
