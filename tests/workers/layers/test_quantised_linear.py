"""Kernels of fewer bits against their matrices in fp32, and rows against the same rows alone."""

from __future__ import annotations

import pytest
import torch

from workers.config import Quantization
from workers.layers import compiled, quantised_linear
from workers.layers.linear import Linear, make_linear
from workers.layers.quantised import GroupedMatrix, by_channel, in_groups

MODES: tuple[Quantization, ...] = ("int8", "int8_dynamic", "int4")
# Relative to the norm of the exact product; random weights, so about what rounding leaves of a Gaussian.
ROUNDING = {"int8": 0.012, "int8_dynamic": 0.02, "int4": 0.11}


@pytest.fixture(autouse=True, params=["ours", "torch"])
def _kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    if request.param == "torch":
        monkeypatch.setattr(compiled, "unpacks", lambda weight: False)
        monkeypatch.setattr(compiled, "rounds", lambda weight: False)
    elif not compiled.unpacks(torch.zeros(16, 32)):
        pytest.skip("the kernels were not built: no compiler here, or a processor without their instructions")


def names() -> dict[str, str]:
    """Of the kernels that are used."""
    ours = compiled.unpacks(torch.zeros(16, 32))
    plain = "int8_vnni" if quantised_linear.has_vnni() else "int8_mm"
    dynamic = "int8 by int8 panels" if compiled.rounds(torch.zeros(16, 32)) else plain
    four, eight = ("int4 panels", "int8 panels") if ours else ("int4pack", "int8pack")
    return {"int8": eight, "int8_dynamic": dynamic, "int4": four}


def product(weight: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return x.double() @ weight.double().T


def error(y: torch.Tensor, want: torch.Tensor) -> float:
    return float((y.double() - want).norm() / want.norm())


@torch.inference_mode()
def test_four_bits_are_multiplied_as_they_are() -> None:
    codes = torch.randint(-8, 8, (48, 96), dtype=torch.int8)
    matrix = GroupedMatrix(codes, torch.rand(48, 3) / 8, torch.randn(48, 3) / 8, bits=4)
    linear, x = make_linear(matrix, quantization="native"), torch.randn(9, 96)
    assert linear.name == names()["int4"]
    # All that is lost is what bf16 loses of x, scales and offsets.
    assert error(linear(x), product(matrix.values(), x)) < 6e-3


@torch.inference_mode()
def test_eight_bits_in_groups_become_eight_bits_by_channel() -> None:
    codes = torch.randint(-127, 128, (48, 64), dtype=torch.int8)
    matrix = GroupedMatrix(codes, torch.rand(48, 2) / 8, torch.zeros(48, 2), bits=8)
    linear, x = make_linear(matrix, quantization="native"), torch.randn(9, 64)
    assert linear.name == names()["int8"]
    assert error(linear(x), product(matrix.values(), x)) < ROUNDING["int8"]


@torch.inference_mode()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("quantization", MODES)
# Of each number of rows that the kernels in C have code for, and of several such.
@pytest.mark.parametrize("num_rows", [1, 2, 3, 4, 5, 6, 7, 8, 40])
def test_a_matrix_made_smaller_gives_nearly_the_same(quantization, dtype, num_rows) -> None:
    weight, bias, x = torch.randn(112, 192).to(dtype), torch.randn(112).to(dtype), torch.randn(num_rows, 192).to(dtype)
    linear = make_linear(weight, bias, quantization)
    y = linear(x)
    assert (linear.name, y.dtype, y.shape) == (names()[quantization], dtype, (num_rows, 112))
    assert error(y - bias, product(weight, x)) < ROUNDING[quantization]


@torch.inference_mode()
@pytest.mark.parametrize("quantization", ["none", *MODES])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_is_the_same_alone_and_beside_an_outlier(quantization, dtype) -> None:
    linear = make_linear(torch.randn(96, 192).to(dtype), None, quantization)
    rows = torch.randn(33, 192).to(dtype)
    together = linear(rows)
    outliers = torch.cat((rows[:5], rows[:1] * 1e4))
    assert torch.equal(linear(outliers)[:5], together[:5])
    for size in (1, 2, 4, 8, 17):
        assert torch.equal(linear(rows[:size]), together[:size]), size


@torch.inference_mode()
def test_one_great_activation_leaves_the_others_their_bits() -> None:
    weight, x = torch.randn(64, 192), torch.randn(4, 192)
    weight[:, 7] = 0
    x[:, 7] = 300
    linear = make_linear(weight, None, "int8_dynamic")
    unrotated = product(by_channel(weight).values(), (x / 300 * 127).round() * 300 / 127)
    want = product(weight, x)
    assert error(linear(x), want) < error(unrotated, want) / 3


@torch.inference_mode()
@pytest.mark.parametrize("in_features", [192, 96, 33])
def test_without_vnni_whole_numbers_give_the_same(monkeypatch: pytest.MonkeyPatch, in_features: int) -> None:
    weight, x = torch.randn(48, in_features), torch.randn(5, in_features)
    fast = make_linear(weight, None, "int8_dynamic")
    monkeypatch.setattr(quantised_linear, "has_vnni", lambda: False)
    monkeypatch.setattr(compiled, "rounds", lambda weight: False)
    slow = make_linear(weight, None, "int8_dynamic")
    assert slow.name == "int8_mm"
    torch.testing.assert_close(fast(x), slow(x), rtol=1e-5, atol=1e-5)


@torch.inference_mode()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("in_features", [576, 96, 80])
# Whole panels of 48 outputs, and what is left of one.
@pytest.mark.parametrize("out_features", [96, 64, 16])
def test_eight_by_eight_bits_are_as_torch_has_them(monkeypatch, dtype, in_features, out_features) -> None:
    weight, bias = torch.randn(out_features, in_features).to(dtype), torch.randn(out_features).to(dtype)
    x = (torch.randn(130, in_features) * torch.logspace(-30, 30, 130)[:, None]).to(dtype)
    fast = make_linear(weight, bias, "int8_dynamic")
    monkeypatch.setattr(compiled, "rounds", lambda weight: False)
    slow = make_linear(weight, bias, "int8_dynamic")
    errors = sorted(error(got, want.double()) for got, want in zip(fast(x), slow(x), strict=True))
    # In bf16 torch rounds before it adds the bias. A sum that ends just between two codes may fall to either.
    assert errors[len(errors) // 2] < (2**-8 if dtype is torch.bfloat16 else 1e-6)
    assert errors[-1] < 1e-2


@torch.inference_mode()
def test_threads_change_no_product_of_eight_bits() -> None:
    linear, x = make_linear(torch.randn(208, 192), None, "int8_dynamic"), torch.randn(300, 192)
    alone = linear(x)
    torch.set_num_threads(2)
    assert torch.equal(linear(x), alone)


def test_rows_of_another_size_are_no_rows_of_eight_bits() -> None:
    linear = make_linear(torch.randn(32, 64), None, "int8_dynamic")
    if linear.name == names()["int8_dynamic"] == "int8 by int8 panels":
        with pytest.raises(ValueError, match="not for weights of 64 inputs"):
            linear(torch.zeros(2, 32))


@torch.inference_mode()
def test_rows_of_zeros_stay_zeros() -> None:
    weight = torch.cat((torch.zeros(16, 64), torch.randn(16, 64)))
    for quantization in MODES:
        linear: Linear = make_linear(weight, None, quantization)
        assert not linear(torch.zeros(2, 64)).any()
        assert not linear(torch.randn(2, 64))[:, :16].any(), quantization


def test_a_constant_group_is_kept_to_bf16() -> None:
    weight = torch.full((16, 32), 0.3)
    torch.testing.assert_close(in_groups(weight).values(), weight, rtol=2**-8, atol=0)


def test_a_head_keeps_eight_bits_and_odd_shapes_do_without_four() -> None:
    assert make_linear(torch.randn(32, 64), None, "int4", few_bits=False).name == names()["int8"]
    assert make_linear(torch.randn(24, 64), None, "int4").name == "int8pack"
    assert make_linear(torch.randn(32, 48), None, "int4").name == names()["int8"]
