"""Attention of prompts in C against the same in torch, and chunks against the whole prompt."""

from __future__ import annotations

import random

import pytest
import torch

from tests.workers.scheduled import scheduled
from workers.engine.batch import StepBatch, build_batch
from workers.engine.scheduler import SchedulerOutput
from workers.layers import compiled
from workers.layers.attention import PagedAttention
from workers.request import SamplingParams

CPU = torch.device("cpu")
GREEDY = SamplingParams(temperature=0.0)
BLOCK_SIZE, NUM_BLOCKS = 8, 200
LENGTH = 300
DTYPES = [torch.float32, torch.bfloat16]
# Of outputs that are means of values of about 1: weights are rounded to bfloat16 there.
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 3e-2}

pytestmark = pytest.mark.skipif(
    not compiled.available() or not compiled.attends_prompts(torch.bfloat16, 64),
    reason="the kernels were not built: no compiler here, or a processor without their instructions",
)


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)
    torch.manual_seed(0)


class Prompt:
    """Random heads of LENGTH tokens, and what an attention makes of them chunk by chunk."""

    def __init__(self, dtype, cache_dtype, num_heads=9, num_kv_heads=3, head_dim=64, window=None):
        self.heads = (num_heads, num_kv_heads, head_dim)
        self.qkv = torch.randn(LENGTH, num_heads + 2 * num_kv_heads, head_dim).to(dtype)
        self.qkv[:, : num_heads + num_kv_heads] *= 2
        self.window, self.cache_dtype = window, cache_dtype
        blocks = list(range(NUM_BLOCKS))
        random.Random(1).shuffle(blocks)
        self.table = blocks[: -(-LENGTH // BLOCK_SIZE)]

    def batch(self, start: int, end: int) -> StepBatch:
        chunk = scheduled("prompt", [7] * (end - start), start, self.table, GREEDY)
        output = SchedulerOutput((chunk,), end - start)
        return build_batch(output, BLOCK_SIZE, self.qkv.dtype, CPU, [self.window])

    def attend(self, *ends: int) -> torch.Tensor:
        num_heads, num_kv_heads, head_dim = self.heads
        attention = PagedAttention(num_heads, num_kv_heads, head_dim, window=self.window)
        # What no token was kept in is not to be read.
        cache = torch.full((2, NUM_BLOCKS, BLOCK_SIZE, num_kv_heads, head_dim), float("nan"), dtype=self.cache_dtype)
        made = []
        for start, end in zip((0, *ends), ends, strict=False):
            q, k, v = self.qkv[start:end].split([num_heads, num_kv_heads, num_kv_heads], dim=1)
            made.append(attention(q, k, v, cache, self.batch(start, end)))
        return torch.cat(made)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("cache_dtype", DTYPES)
@pytest.mark.parametrize(("num_heads", "num_kv_heads", "head_dim"), [(9, 3, 64), (4, 4, 128), (7, 1, 96), (2, 1, 256)])
@pytest.mark.parametrize("window", [None, 70])
def test_attention_of_a_prompt(monkeypatch, dtype, cache_dtype, num_heads, num_kv_heads, head_dim, window):
    prompt = Prompt(dtype, cache_dtype, num_heads, num_kv_heads, head_dim, window)
    got = prompt.attend(150, LENGTH)
    with monkeypatch.context() as patch:
        patch.setattr(compiled, "_kernels", None)
        want = prompt.attend(150, LENGTH)
    assert (got.dtype, got.shape) == (want.dtype, want.shape)
    torch.testing.assert_close(got, want, rtol=0, atol=TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [None, 3, 70])
def test_a_prompt_is_the_same_bit_for_bit_however_it_is_cut(dtype, window):
    prompt = Prompt(dtype, dtype, window=window)
    whole = prompt.attend(LENGTH)
    for ends in ((64, 128, LENGTH), (2, 65, 67, 200, LENGTH), (129, 131, 298, LENGTH)):
        assert torch.equal(prompt.attend(*ends), whole), ends


def test_threads_change_no_attention_of_a_prompt():
    prompt = Prompt(torch.float32, torch.float32)
    alone = prompt.attend(LENGTH)
    torch.set_num_threads(2)
    assert torch.equal(prompt.attend(LENGTH), alone)


def test_far_scores_hide_none_but_themselves():
    prompt = Prompt(torch.float32, torch.float32)
    prompt.qkv[:, :12] *= 40
    prompt.qkv[5, 9:12] = 0
    got = prompt.attend(LENGTH)
    assert got.isfinite().all()
    q, k, v = prompt.qkv.double().split([9, 3, 3], dim=1)
    scores = torch.einsum("qhd,khd->hqk", q, k.repeat_interleave(3, 1)) / 8
    scores = scores.masked_fill(torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1), float("-inf"))
    want = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v.repeat_interleave(3, 1)).flatten(1)
    torch.testing.assert_close(got.double(), want, rtol=0, atol=5e-3)


@pytest.mark.parametrize(("blocks", "start"), [([0], 1), ([NUM_BLOCKS], 0), ([-1], 0)])
def test_keys_outside_the_pool_are_refused(blocks, start):
    chunk = Prompt(torch.float32, torch.float32).batch(0, BLOCK_SIZE).plans[None].prefills[0]
    object.__setattr__(chunk, "block_ids", torch.tensor(blocks))
    object.__setattr__(chunk, "start", start)
    cache = torch.zeros(2, NUM_BLOCKS, BLOCK_SIZE, 3, 64)
    with pytest.raises(IndexError):
        compiled.attend_prompt(torch.zeros(BLOCK_SIZE, 9, 64), cache, chunk, 1.0)
