"""y = x W^T + b, by the kernel that a matrix is best multiplied with: chosen here and nowhere else."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import torch

from workers.layers import compiled
from workers.layers.dense_linear import DenseLinear
from workers.layers.few_bits_linear import DynamicInt8Panels, Int4Panels, Int8Panels
from workers.layers.groups import GROUP
from workers.layers.panel_linear import PanelLinear, runs
from workers.layers.quantised import GroupedMatrix, by_channel, in_groups
from workers.layers.quantised_linear import DynamicInt8Linear, Int4Linear, Int8Linear

if TYPE_CHECKING:
    from workers.config import Quantization

# Rows that the 4-bit kernel takes at once.
_INT4_ROWS = 16


class Linear(Protocol):
    # Of its kernel.
    name: str

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[..., in_features] to [..., out_features], of x's dtype."""


def make_linear(
    weight: torch.Tensor | GroupedMatrix,
    bias: torch.Tensor | None = None,
    quantization: Quantization = "none",
    *,
    few_bits: bool = True,
) -> Linear:
    """`weight`: [out_features, in_features], or as its checkpoint has it, which only `native` asks for.

    few_bits: whether 4 bits will do; of a head, whose every error is one of the logits, 8 are kept.
    """
    if isinstance(weight, GroupedMatrix):
        if weight.bits == 4 and _can_pack_int4(weight.codes):
            return _int4(weight, bias)
        return _int8(weight.values(), bias)
    if quantization == "int4" and few_bits and _can_pack_int4(weight):
        return _int4(in_groups(weight), bias)
    if quantization in ("int4", "int8"):
        return _int8(weight, bias)
    if quantization == "int8_dynamic":
        return (DynamicInt8Panels if compiled.rounds(weight) else DynamicInt8Linear)(weight, bias)
    return PanelLinear(weight, bias) if runs(weight) else DenseLinear(weight, bias)


def _int4(matrix: GroupedMatrix, bias: torch.Tensor | None) -> Linear:
    return (Int4Panels if compiled.unpacks(matrix.codes) else Int4Linear)(matrix, bias)


def _int8(weight: torch.Tensor, bias: torch.Tensor | None) -> Linear:
    return (Int8Panels if compiled.unpacks(weight) else Int8Linear)(by_channel(weight), bias)


def _can_pack_int4(weight: torch.Tensor) -> bool:
    return weight.shape[0] % _INT4_ROWS == 0 and weight.shape[1] % GROUP == 0
