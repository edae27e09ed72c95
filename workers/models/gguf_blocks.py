"""GGUF's formats of 32 weights to a block that kernels take as they are: bytes in, codes and scales out.

Source: block_q4_0, block_q4_1 and block_q8_0 of ggml (ggml-common.h). d and m are fp16; nibble j of a block is the low
half of byte j for weight j, and its high half for weight j + 16.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from gguf import GGMLQuantizationType

from workers.layers.groups import GROUP
from workers.layers.quantised import GroupedMatrix

_HALF = 2  # Bytes of an fp16.


@dataclass(frozen=True, slots=True)
class BlockFormat:
    bits: int
    num_bytes: int
    # uint8 [rows, blocks, num_bytes]
    _read: Callable[[np.ndarray], GroupedMatrix]

    def read(self, rows: np.ndarray) -> GroupedMatrix:
        """uint8 [rows, blocks * num_bytes], as the file has them."""
        return self._read(rows.reshape(rows.shape[0], -1, self.num_bytes))


def _q4_0(blocks: np.ndarray) -> GroupedMatrix:
    """w = d (q - 8)."""
    scale = _halves(blocks, 0)
    return _grouped(_nibbles(blocks[..., _HALF:]), scale, torch.zeros_like(scale), 4)


def _q4_1(blocks: np.ndarray) -> GroupedMatrix:
    """w = d q + m = d (q - 8) + (m + 8 d)."""
    scale = _halves(blocks, 0)
    return _grouped(_nibbles(blocks[..., 2 * _HALF :]), scale, _halves(blocks, _HALF) + 8 * scale, 4)


def _q8_0(blocks: np.ndarray) -> GroupedMatrix:
    """w = d q."""
    scale = _halves(blocks, 0)
    return _grouped(blocks[..., _HALF:].view(np.int8), scale, torch.zeros_like(scale), 8)


def _halves(blocks: np.ndarray, start: int) -> torch.Tensor:
    """The fp16 at byte `start` of each block, as fp32 [rows, blocks]."""
    values = np.ascontiguousarray(blocks[..., start : start + _HALF]).view(np.float16)[..., 0]
    return torch.from_numpy(values.astype(np.float32))


def _nibbles(packed: np.ndarray) -> np.ndarray:
    """Less 8, int8 [rows, blocks, GROUP]."""
    return np.concatenate((packed & 15, packed >> 4), axis=-1).view(np.int8) - np.int8(8)


def _grouped(codes: np.ndarray, scale: torch.Tensor, offset: torch.Tensor, bits: int) -> GroupedMatrix:
    flat = np.ascontiguousarray(codes).reshape(codes.shape[0], -1)
    return GroupedMatrix(torch.from_numpy(flat), scale, offset, bits)


BLOCKS = {
    GGMLQuantizationType.Q4_0: BlockFormat(4, _HALF + GROUP // 2, _q4_0),
    GGMLQuantizationType.Q4_1: BlockFormat(4, 2 * _HALF + GROUP // 2, _q4_1),
    GGMLQuantizationType.Q8_0: BlockFormat(8, _HALF + GROUP, _q8_0),
}
