"""Tensors of a checkpoint by their Hugging Face names, read one at a time, each straight into its place."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from workers.errors import ConfigError


@dataclass(frozen=True)
class StoredTensor:
    shape: tuple[int, ...]
    read: Callable[[], torch.Tensor]
    # Row i of the first dimension alone, where the file can give it.
    read_row: Callable[[int], torch.Tensor] | None = None


class Weights:
    """Every tensor is taken once; what is missing, left over or of another shape is a ConfigError naming it."""

    def __init__(self, path: Path, stored: dict[str, StoredTensor], dtype: torch.dtype, quantisation: str) -> None:
        self.path = path
        # The checkpoint's own dtype; for quantised tensors the one they are best computed in.
        self.dtype = dtype
        self.quantisation = quantisation
        self._stored = stored

    def mapped(self, change: Callable[[str, StoredTensor], StoredTensor]) -> Weights:
        """With `change`(name, tensor) in the place of each tensor."""
        stored = {name: change(name, tensor) for name, tensor in self._stored.items()}
        return Weights(self.path, stored, self.dtype, self.quantisation)

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

    def unstack(self, name: str) -> bool:
        """Where there is a tensor `name`, make its rows tensors of their own: `name`.0.weight, `name`.1.weight, ..."""
        stored = self._stored.get(name)
        if stored is None or stored.read_row is None:
            return False
        del self._stored[name]
        for i in range(stored.shape[0]):
            self._stored[f"{name}.{i}.weight"] = StoredTensor(stored.shape[1:], partial(stored.read_row, i))
        return True

    def skip(self, name: str) -> None:
        """Accept tensor `name` without using it."""
        self._stored.pop(name, None)

    def require_all_taken(self) -> None:
        left = sorted(name for name in self._stored if not name.endswith("rotary_emb.inv_freq"))
        if left:
            more = f" and {len(left) - 1} more" if len(left) > 1 else ""
            raise ConfigError(f"{self.path}: unexpected tensor {left[0]}{more} for its architecture", param="model")
