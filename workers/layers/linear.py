"""y = x W^T + b, by the kernel that a matrix is best multiplied with: chosen here and nowhere else."""

from __future__ import annotations

from typing import Protocol

import torch
from torch.nn import functional

from workers.config import Quantization
from workers.layers.quantised import GROUP, GroupedMatrix, by_channel, in_groups
from workers.layers.quantised_linear import DynamicInt8Linear, Int4Linear, Int8Linear

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
            return Int4Linear(weight, bias)
        return Int8Linear(by_channel(weight.values()), bias)
    if quantization == "int4" and few_bits and _can_pack_int4(weight):
        return Int4Linear(in_groups(weight), bias)
    if quantization in ("int4", "int8"):
        return Int8Linear(by_channel(weight), bias)
    if quantization == "int8_dynamic":
        return DynamicInt8Linear(by_channel(weight), bias)
    return DenseLinear(weight, bias)


class DenseLinear:
    """Keeps W [out_features, in_features] in the order that its device multiplies fastest.

    On CPU that is oneDNN's blocked order: measured on one AVX-512 core in fp32 it takes half the time of a plain W for
    8 rows and two thirds for 512.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self.name = str(weight.dtype).removeprefix("torch.")
        self._packed = _can_pack(weight)
        # The plain W is free to go once packed.
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight, None) if self._packed else weight
        self._bias = bias

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if self._packed:
            y: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, self._weight, self._bias, "none", [], "")
            return y
        return functional.linear(x, self._weight, self._bias)


def _can_pack(weight: torch.Tensor) -> bool:
    if weight.device.type != "cpu" or not torch._C._has_mkldnn:
        return False
    if weight.dtype is torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return weight.dtype is torch.float32


def _can_pack_int4(weight: torch.Tensor) -> bool:
    return weight.shape[0] % _INT4_ROWS == 0 and weight.shape[1] % GROUP == 0
