from __future__ import annotations

import pytest
import torch

from workers.layers.linear import make_linear
from workers.layers.norm import RMSNorm
from workers.layers.rotary import RotaryEmbedding, rotate
from workers.models.rope import Rope

CPU = torch.device("cpu")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("num_rows", [1, 7, 16, 300])
def test_linear_is_x_times_w_transposed(dtype: torch.dtype, num_rows: int) -> None:
    weight, x = torch.randn(48, 64).to(dtype), torch.randn(num_rows, 64).to(dtype)
    with torch.inference_mode():
        y = make_linear(weight)(x)
    want = x.double() @ weight.double().T
    assert y.dtype is dtype
    torch.testing.assert_close(y.double(), want, rtol=0, atol=1e-4 if dtype is torch.float32 else 0.15)


def test_rms_norm_is_its_formula() -> None:
    x, weight = torch.randn(5, 64), torch.randn(64)
    want = x / (x.pow(2).mean(dim=-1, keepdim=True) + 1e-5).sqrt() * weight
    torch.testing.assert_close(RMSNorm(weight, 1e-5)(x), want)


def test_rotation_turns_each_pair_by_its_angle() -> None:
    head_dim, theta = 8, 100.0
    x, positions = torch.randn(3, 2, head_dim), torch.tensor([0, 5, 1000])
    got = rotate(x, RotaryEmbedding(Rope(theta, head_dim), CPU).angles(positions, torch.float32))
    pairs = torch.complex(x[..., :4], x[..., 4:])
    angles = positions.double()[:, None] * theta ** (-torch.arange(4).double() * 2 / head_dim)
    want = pairs * torch.polar(torch.ones_like(angles), angles)[:, None]
    torch.testing.assert_close(got, torch.cat((want.real, want.imag), dim=-1).float(), rtol=0, atol=1e-4)
