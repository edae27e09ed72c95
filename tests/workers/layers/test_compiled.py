"""The kernels in C against the same in torch, which takes their place where there was no compiler."""

from __future__ import annotations

import random

import pytest
import torch
from torch.nn import functional

from tests.workers.scheduled import scheduled
from workers.engine.batch import StepBatch, build_batch
from workers.engine.scheduler import SchedulerOutput
from workers.layers import compiled
from workers.layers.attention import PagedAttention
from workers.layers.mlp import gated
from workers.layers.norm import RMSNorm
from workers.layers.rotary import RotaryEmbedding, rotate
from workers.models.rope import Rope
from workers.request import SamplingParams

pytestmark = pytest.mark.skipif(not compiled.available(), reason="the kernels were not built: no compiler here")
CPU = torch.device("cpu")
GREEDY = SamplingParams(temperature=0.0)
BLOCK_SIZE, NUM_BLOCKS = 8, 400
# Rounding once where torch rounds in between: of bfloat16's 8 bits.
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2e-2}


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)


@pytest.fixture
def without(monkeypatch):
    """Calls a function with torch alone."""

    def call(function, *args):
        with monkeypatch.context() as patch:
            patch.setattr(compiled, "_kernels", None)
            return function(*args)

    return call


def assert_same(got, want):
    assert got.dtype is want.dtype
    assert got.shape == want.shape
    torch.testing.assert_close(got, want, rtol=TOLERANCE[got.dtype], atol=TOLERANCE[got.dtype])


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("num_rows", [1, 3, 200])
@pytest.mark.parametrize("size", [16, 576])
def test_norm_and_gate(without, dtype, num_rows, size):
    x = (torch.randn(num_rows, 2 * size) * 30).to(dtype)
    x[0, :4] = torch.tensor([-1e4, 1e4, -90.0, 0.0])
    for weight in (torch.randn(2 * size).to(dtype), torch.randn(2 * size)):
        if weight.dtype is dtype or dtype is torch.bfloat16:
            norm = RMSNorm(weight, 1e-5)
            assert compiled.rms_norm(x, weight, 1e-5) is not None
            assert_same(norm(x), without(norm, x))
    assert compiled.silu_mul(x) is not None
    assert_same(gated(x, functional.silu), without(gated, x, functional.silu))


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("turned_dim", [64, 32])
def test_rotation_in_place(without, dtype, turned_dim):
    heads = torch.randn(40, 6, 64).to(dtype)
    angles = RotaryEmbedding(Rope(1e4, turned_dim), CPU).angles(torch.arange(100, 140), dtype)
    want = without(rotate, heads[:, :4].clone(), angles)
    left = heads[:, 4:].clone()
    assert compiled.rotate_in_place(heads[:, :4], *angles)
    assert_same(heads[:, :4], want)
    assert torch.equal(heads[:, 4:], left)


def batch_of(lengths, window, dtype, grouped=True) -> StepBatch:
    """One decoding request of each length, in blocks that lie anywhere."""
    free = list(range(NUM_BLOCKS))
    random.Random(1).shuffle(free)
    requests = []
    for i, length in enumerate(lengths):
        table = [free.pop() for _ in range(-(-length // BLOCK_SIZE))]
        requests.append(scheduled(f"r{i}", [7], length - 1, table, GREEDY))
    return build_batch(SchedulerOutput(tuple(requests), len(lengths)), BLOCK_SIZE, dtype, CPU, [window], grouped)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("cache_dtype", TOLERANCE)
@pytest.mark.parametrize(("num_heads", "num_kv_heads", "head_dim"), [(9, 3, 64), (4, 4, 128), (10, 2, 16), (8, 1, 256)])
@pytest.mark.parametrize("window", [None, 13])
def test_attention_of_one_token_a_request(without, dtype, cache_dtype, num_heads, num_kv_heads, head_dim, window):
    lengths = (1, 7, 8, 9, 40, 300)
    qkv = (torch.randn(len(lengths), num_heads + 2 * num_kv_heads, head_dim) * 3).to(dtype)
    q, k, v = qkv.split([num_heads, num_kv_heads, num_kv_heads], dim=1)
    caches = [torch.full((2, NUM_BLOCKS, BLOCK_SIZE, num_kv_heads, head_dim), float("nan"), dtype=cache_dtype)] * 2
    caches = [torch.randn(caches[0].shape, generator=torch.Generator().manual_seed(1)).to(cache_dtype) for _ in caches]
    attention = PagedAttention(num_heads, num_kv_heads, head_dim, window=window)
    got = attention(q, k, v, caches[0], batch_of(lengths, window, dtype, grouped=False))
    want = without(attention, q, k, v, caches[1], batch_of(lengths, window, dtype))
    assert torch.equal(caches[0], caches[1])
    rounding = TOLERANCE[dtype] if cache_dtype is dtype else TOLERANCE[torch.bfloat16]
    torch.testing.assert_close(got, want, rtol=0, atol=10 * rounding)


def test_a_row_is_the_same_alone_and_beside_others_bit_for_bit():
    attention = PagedAttention(9, 3, 64)
    q, cache = torch.randn(5, 9, 64), torch.randn(2, NUM_BLOCKS, BLOCK_SIZE, 3, 64)
    cache[:, -1] = float("inf")
    blocks = torch.randperm(NUM_BLOCKS - 1)[: 5 * 30].view(5, 30)
    visible = torch.tensor([[0, 240], [3, 9], [0, 1], [100, 200], [7, 240]])
    together = compiled.attend(q, cache, blocks, visible, 0.125)
    for row in range(5):
        one = slice(row, row + 1)
        assert torch.equal(compiled.attend(q[one], cache, blocks[one], visible[one], 0.125), together[one])
    assert attention.head_dim == 64


@pytest.mark.parametrize(
    ("block", "visible"), [(NUM_BLOCKS, [0, 3]), (-1, [0, 3]), (0, [0, 9]), (0, [-1, 3]), (0, [3, 3])]
)
def test_keys_outside_the_pool_are_refused(block, visible):
    cache = torch.zeros(2, NUM_BLOCKS, BLOCK_SIZE, 3, 64)
    with pytest.raises(IndexError):
        compiled.attend(torch.zeros(1, 9, 64), cache, torch.tensor([[block]]), torch.tensor([visible]), 1.0)


def test_a_slot_outside_the_pool_is_refused():
    k = torch.zeros(1, 3, 64)
    with pytest.raises(IndexError, match="slot"):
        compiled.keep(k, k, torch.zeros(2, 4, BLOCK_SIZE, 3, 64), torch.tensor([4 * BLOCK_SIZE]))


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("num_outputs", [16, 32, 48, 80, 176])
def test_rows_times_a_matrix_are_the_same_bit_for_bit_beside_any_others(dtype, num_outputs):
    weight, bias = torch.randn(num_outputs, 70).to(dtype), torch.randn(num_outputs).to(dtype)
    if not compiled.multiplies(weight):
        pytest.skip("this processor lacks the instructions")
    x = torch.randn(19, 70).to(dtype)
    packed = compiled.pack_linear(weight)
    for offset in (None, bias):
        y = compiled.linear(x, packed, offset)
        want = x.double() @ weight.double().T + (0 if offset is None else offset.double())
        torch.testing.assert_close(y.double(), want, rtol=10 * TOLERANCE[dtype], atol=10 * TOLERANCE[dtype])
        for num_rows in range(1, 10):
            assert torch.equal(compiled.linear(x[:num_rows], packed, offset), y[:num_rows])


def test_rows_of_another_size_are_refused():
    with pytest.raises(ValueError, match="not for"):
        compiled.linear(torch.zeros(2, 32), torch.zeros(16, 64), None)


def test_threads_change_nothing():
    q, cache = torch.randn(8, 9, 64), torch.randn(2, NUM_BLOCKS, BLOCK_SIZE, 3, 64)
    blocks, visible = torch.randint(NUM_BLOCKS, (8, 40)), torch.tensor([[0, 320]] * 8)
    alone = compiled.attend(q, cache, blocks, visible, 0.125)
    torch.set_num_threads(2)
    assert torch.equal(compiled.attend(q, cache, blocks, visible, 0.125), alone)
