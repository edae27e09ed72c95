"""Matrices in fewer bits: how they are stored, and how they are made of others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from workers.layers.groups import GROUP

_INT8_MAX = 127
# In the place of a scale of 0, whose codes are 0.
_TINY = torch.finfo(torch.float32).tiny


@dataclass(frozen=True, slots=True)
class GroupedMatrix:
    """w = codes * scale + offset, with a scale and an offset for every GROUP columns of a row."""

    # int8 [out_features, in_features]; of 4 bits: -8 to 7.
    codes: torch.Tensor
    # fp32 [out_features, in_features / GROUP]
    scale: torch.Tensor
    offset: torch.Tensor
    bits: int

    def values(self) -> torch.Tensor:
        """fp32 [out_features, in_features]."""
        groups = self.codes.view(*self.scale.shape, GROUP)
        return torch.addcmul(self.offset[..., None], groups, self.scale[..., None]).view_as(self.codes)


@dataclass(frozen=True, slots=True)
class ChannelMatrix:
    """w = codes * scale, with a scale for every row."""

    # int8 [out_features, in_features]
    codes: torch.Tensor
    # fp32 [out_features]
    scale: torch.Tensor

    def values(self) -> torch.Tensor:
        """fp32 [out_features, in_features]."""
        return self.codes * self.scale[:, None]


def stacked(parts: Sequence[GroupedMatrix]) -> GroupedMatrix:
    """One under another; all have the same number of bits."""
    if len(parts) == 1:
        return parts[0]
    codes, scale, offset = (torch.cat([getattr(part, name) for part in parts]) for name in ("codes", "scale", "offset"))
    return GroupedMatrix(codes, scale, offset, parts[0].bits)


def in_groups(weight: torch.Tensor) -> GroupedMatrix:
    """4 bits from the least to the greatest of each group, which must divide the columns.

    Scale and offset are those that the kernel will read, in bf16, so that codes make up for their rounding.
    """
    groups = weight.float().view(weight.shape[0], -1, GROUP)
    low, high = groups.amin(-1, keepdim=True), groups.amax(-1, keepdim=True)
    scale = ((high - low) / 15).bfloat16().float()
    offset = (low + 8 * scale).bfloat16().float()
    codes = ((groups - offset) / scale.clamp_min(_TINY)).round_().clamp_(-8, 7)
    return GroupedMatrix(codes.to(torch.int8).view(weight.shape), scale[..., 0], offset[..., 0], 4)


def by_channel(weight: torch.Tensor) -> ChannelMatrix:
    """8 bits, symmetric about 0, up to the greatest of each row."""
    codes, scale = by_row(weight.float())
    return ChannelMatrix(codes.to(torch.int8), scale[:, 0])


def by_row(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Whole numbers from -127 to 127, as fp32, and each row's own scale, fp32 [num_rows, 1]."""
    scale = x.abs().amax(-1, keepdim=True).float() / _INT8_MAX
    return (x / scale.clamp_min(_TINY)).round_(), scale
