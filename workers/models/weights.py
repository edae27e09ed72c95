"""Tensors of a checkpoint by their Hugging Face names, read one at a time, each straight into its place."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from workers.config import Quantization
from workers.errors import ConfigError
from workers.layers.quantised import GroupedMatrix
from workers.models.stored import Stored, require_quantisable


@dataclass(frozen=True)
class StoredTensor:
    shape: tuple[int, ...]
    read: Callable[[], torch.Tensor]
    # Row i of the first dimension alone, where the file can give it.
    read_row: Callable[[int], torch.Tensor] | None = None
    # In the bits that it is stored in, where a kernel takes those, and how many they are.
    read_groups: Callable[[], GroupedMatrix] | None = None
    bits: int | None = None


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
        out.copy_(self._take(name, tuple(out.shape)).read())

    def bits(self, name: str) -> int | None:
        """How many `take_groups` gives of tensor `name`; None: it is read by `copy_into` only."""
        stored = self._stored.get(name)
        return None if stored is None else stored.bits

    def require_quantisable(self, quantization: Quantization) -> None:
        """Raise ConfigError when matrices cannot be kept as `quantization` says."""
        stored = [Stored(name, tensor.shape, "", tensor.bits) for name, tensor in self._stored.items()]
        require_quantisable(quantization, stored, self.path)

    def take_groups(self, name: str, shape: tuple[int, int]) -> GroupedMatrix:
        """Tensor `name` in its own bits."""
        read = self._take(name, shape).read_groups
        assert read is not None, "bits() tells of tensors that have groups"
        return read()

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

    def _take(self, name: str, shape: tuple[int, ...]) -> StoredTensor:
        stored = self._stored.pop(name, None)
        if stored is None:
            raise ConfigError(f"{self.path} lacks the tensor {name}; download it again", param="model")
        if stored.shape != shape:
            raise ConfigError(
                f"{self.path}: tensor {name} has shape {stored.shape}, its config says {shape}", param="model"
            )
        return stored
