"""Kernels of matrices in fewer bits. A row's result depends on that row alone, to the last bit."""

from __future__ import annotations

import math

import torch

from workers.layers.dense_linear import DenseLinear
from workers.layers.groups import GROUP
from workers.layers.quantised import ChannelMatrix, GroupedMatrix, by_channel, by_row

_ZERO_POINT = 128
# Columns that are rotated together; a power of 2.
_MAX_ROTATED = 64


class Int4Linear:
    """4-bit weights in groups; x, scales and offsets in bf16, sums in fp32."""

    name = "int4pack"

    def __init__(self, weight: GroupedMatrix, bias: torch.Tensor | None) -> None:
        codes = weight.codes.to(torch.int32) + 8
        self._weight = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes, 1)
        # [in_features / GROUP, out_features, 2]
        scales = torch.stack((weight.scale.t(), weight.offset.t()), dim=-1)
        self._scales = scales.to(torch.bfloat16).contiguous()
        self._bias = bias

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.reshape(-1, x.shape[-1]).to(torch.bfloat16)
        y = torch.ops.aten._weight_int4pack_mm_for_cpu(rows, self._weight, GROUP, self._scales)
        return finished(y, x, self._bias)


class Int8Linear:
    """8-bit weights by channel; x and scales in bf16, sums in fp32."""

    name = "int8pack"

    def __init__(self, weight: ChannelMatrix, bias: torch.Tensor | None) -> None:
        self._codes = weight.codes
        self._scale = weight.scale.to(torch.bfloat16)
        self._bias = bias

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.reshape(-1, x.shape[-1]).to(torch.bfloat16)
        return finished(torch._weight_int8pack_mm(rows, self._codes, self._scale), x, self._bias)


class DynamicInt8Linear:
    """8-bit weights by channel and 8-bit activations, each row of x by its own greatest; sums in whole numbers.

    Both are rotated first (QuaRot, Ashkboos et al. 2024): y = (x H) (W H / n)^T, so that one great activation does not
    take all others' bits.

    With VNNI by oneDNN, on x + 128 without a sign and a W in its blocked order: measured on one core it takes two
    thirds of torch._int_mm's time for 8 rows. Without VNNI its sums of two products could overflow 16 bits.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        matrix, self._rotated = rotated_by_channel(weight)
        self._rotate = DenseLinear(_hadamard(self._rotated))
        self._vnni = has_vnni()
        self.name = "int8_vnni" if self._vnni else "int8_mm"
        self._scale = matrix.scale
        self._zero = torch.zeros_like(matrix.scale, dtype=torch.int64)
        self._bias = bias
        if self._vnni:
            self._weight = torch.ops.onednn.qlinear_prepack(matrix.codes, [1, matrix.codes.shape[1]])
        else:
            self._weight = matrix.codes.t()

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        turned = self._rotate(x.reshape(-1, self._rotated).float())
        codes, scale = by_row(turned.view(-1, x.shape[-1]))
        y = self._unsigned(codes) if self._vnni else torch._int_mm(codes.to(torch.int8), self._weight) * self._scale
        return finished(y.mul_(scale), x, self._bias)

    def _unsigned(self, codes: torch.Tensor) -> torch.Tensor:
        """fp32 [num_rows, out_features], without the rows' scales."""
        y: torch.Tensor = torch.ops.onednn.qlinear_pointwise(
            codes.add_(_ZERO_POINT).to(torch.uint8), 1.0, _ZERO_POINT, self._weight, self._scale, self._zero,
            None, 1.0, 0, torch.float32, "none", [], "",
        )  # fmt: skip
        return y


def rotated_by_channel(weight: torch.Tensor) -> tuple[ChannelMatrix, int]:
    """W H / n in 8 bits, and how many columns n are rotated together."""
    hadamard = _hadamard(math.gcd(weight.shape[1], _MAX_ROTATED))
    turned = weight.float().view(-1, len(hadamard)) @ hadamard / len(hadamard)
    return by_channel(turned.view_as(weight)), len(hadamard)


def has_vnni() -> bool:
    return bool(torch._C._has_mkldnn) and torch.cpu._is_vnni_supported()


def _hadamard(size: int) -> torch.Tensor:
    """Sylvester's symmetric matrix of 1 and -1, fp32 [size, size], whose square is size times the identity."""
    matrix = torch.ones(1, 1)
    while len(matrix) < size:
        matrix = torch.cat((torch.cat((matrix, matrix), 1), torch.cat((matrix, -matrix), 1)))
    return matrix


def finished(y: torch.Tensor, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    y = y.to(x.dtype).view(*x.shape[:-1], y.shape[-1])
    return y if bias is None else y + bias
