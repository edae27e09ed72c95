"""The part of a checkpoint's tensors that one rank keeps, under the same names."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from workers.models.architecture import ArchitectureConfig
from workers.models.shard import kv_heads_of, share
from workers.models.weights import StoredTensor, Weights

_OUT, _IN = -2, -1


@dataclass(frozen=True)
class _Section:
    """Of `size` rows or columns, those that a rank keeps."""

    size: int
    kept: range


@dataclass(frozen=True)
class _Cut:
    """Through the outputs (_OUT) or the inputs (_IN) of a matrix, whose sections lie one after another."""

    dim: int
    sections: tuple[_Section, ...]

    def shape(self, whole: tuple[int, ...]) -> tuple[int, ...]:
        """`whole` itself where it is not the expected one, to be reported as it is."""
        if whole[self.dim] != sum(section.size for section in self.sections):
            return whole
        shape = list(whole)
        shape[self.dim] = sum(len(section.kept) for section in self.sections)
        return tuple(shape)

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        parts = tensor.split_with_sizes([section.size for section in self.sections], self.dim)
        kept = [part.narrow(self.dim, s.kept.start, len(s.kept)) for part, s in zip(parts, self.sections, strict=True)]
        return kept[0] if len(kept) == 1 else torch.cat(kept, self.dim)


def cut_weights(weights: Weights, config: ArchitectureConfig, rank: int, size: int) -> Weights:
    """Those of one rank of `size`; `config` is the whole model's, and can be divided."""
    return weights.mapped(_Cuts(config, rank, size).cut)


class _Cuts:
    def __init__(self, config: ArchitectureConfig, rank: int, size: int) -> None:
        self._rank, self._size = rank, size
        q = _scaled(config.num_heads, share(config.num_heads, rank, size), config.head_dim)
        kv = _scaled(config.num_kv_heads, kv_heads_of(config.num_kv_heads, rank, size), config.head_dim)
        self._attention = {
            "q_proj": _Cut(_OUT, (q,)),
            "k_proj": _Cut(_OUT, (kv,)),
            "v_proj": _Cut(_OUT, (kv,)),
            "qkv_proj": _Cut(_OUT, (q, kv, kv)),
            "o_proj": _Cut(_IN, (q,)),
        }
        self._dense = self._feed_forward(config.intermediate_size)
        self._expert = self._feed_forward(config.experts.intermediate_size) if config.experts else {}

    def cut(self, name: str, stored: StoredTensor) -> StoredTensor:
        *path, module = name.removesuffix(".weight").removesuffix(".bias").split(".")
        cut = {**self._attention, **(self._expert if "experts" in path else self._dense)}.get(module)
        if cut is None:
            return stored
        if len(stored.shape) > 1:
            return _cut(stored, cut)
        if cut.dim == _OUT:
            return _cut(stored, _Cut(-1, cut.sections))
        # Of outputs that the ranks add up.
        return stored if self._rank == 0 else StoredTensor(stored.shape, lambda: torch.zeros(stored.shape))

    def _feed_forward(self, inner: int) -> dict[str, _Cut]:
        own = _Section(inner, share(inner, self._rank, self._size))
        up, down = _Cut(_OUT, (own,)), _Cut(_IN, (own,))
        # The second names are Mixtral's.
        return {
            "gate_proj": up, "up_proj": up, "down_proj": down, "gate_up_proj": _Cut(_OUT, (own, own)),
            "w1": up, "w3": up, "w2": down,
        }  # fmt: skip


def _scaled(total: int, kept: range, width: int) -> _Section:
    return _Section(total * width, range(kept.start * width, kept.stop * width))


def _cut(stored: StoredTensor, cut: _Cut) -> StoredTensor:
    read_row = stored.read_row
    return StoredTensor(
        cut.shape(stored.shape),
        lambda: cut(stored.read()),
        None if read_row is None else partial(_cut_row, read_row, cut),
    )


def _cut_row(read_row: Callable[[int], torch.Tensor], cut: _Cut, row: int) -> torch.Tensor:
    return cut(read_row(row))
