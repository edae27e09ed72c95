"""What the KV pool keeps of a head, against the definition written out number by number."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from workers.kv_transfer.layout import KVLayout
from workers.layers.kv_codec import POOL_DTYPES, decode, encode, pool_width


def heads(*shape: int, seed: int = 0) -> torch.Tensor:
    """Of very different sizes, as K's channels are."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator) * torch.exp(torch.randn(*shape[:-1], 1, generator=generator) * 3)


def fp8_values() -> np.ndarray:
    """All finite numbers of e4m3: sign, 4 bits of exponent with bias 7, 3 bits of mantissa; 0x7f is no number."""
    values = []
    for code in range(0x7F):
        exponent, mantissa = code >> 3, code & 7
        values.append((mantissa / 8) * 2**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7))
    return np.array(sorted({*values, *(-v for v in values)}))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fp8_is_the_nearest_number_under_a_scale_of_each_token_and_head(dtype):
    x = heads(7, 3, 8).to(dtype)
    got = decode(encode(x, torch.uint8), torch.float32).numpy()
    grid = fp8_values()
    assert grid.max() == 448
    for token, head in np.ndindex(7, 3):
        row = x[token, head].float().numpy().astype(np.float64)
        scale = np.float64(np.float32(np.abs(row).max() / np.float32(448)))
        for number, kept in zip(row, got[token, head], strict=True):
            assert abs(kept - number) <= np.abs(grid * scale - number).min() + 1e-6 * abs(number)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_what_is_kept_of_a_token_depends_on_no_other(dtype):
    x = heads(5, 2, 16)
    together = encode(x, torch.uint8)
    for token in range(5):
        assert torch.equal(encode(x[token : token + 1], torch.uint8)[0], together[token])


def test_to_keep_what_was_kept_changes_nothing():
    once = decode(encode(heads(50, 4, 32), torch.uint8), torch.float32)
    assert torch.allclose(decode(encode(once, torch.uint8), torch.float32), once, rtol=1e-6, atol=0)


def test_zeros_stay_zeros():
    x = heads(3, 2, 8)
    x[1] = 0
    kept = decode(encode(x, torch.uint8), torch.float32)
    assert torch.equal(kept[1], torch.zeros(2, 8))
    assert torch.isfinite(kept).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_models_own_dtype_is_kept_without_a_copy(dtype):
    x = heads(3, 2, 8).to(dtype)
    assert encode(x, dtype) is x
    assert decode(x, dtype) is x


@pytest.mark.parametrize("name", POOL_DTYPES)
def test_the_layout_counts_the_bytes_that_the_pool_has(name):
    layout = KVLayout("f", num_layers=3, num_kv_heads=2, head_dim=64, block_size=16, dtype=name)
    assert layout.head_bytes == pool_width(POOL_DTYPES[name], 64) * POOL_DTYPES[name].itemsize
    assert layout.head_bytes == {"float32": 256, "bfloat16": 128, "float16": 128, "float8_e4m3": 68}[name]
