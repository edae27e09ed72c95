"""Logits against Hugging Face transformers, however a prompt is cut and whoever shares the step."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from gguf import GGMLQuantizationType
from transformers import LlamaConfig, LlamaForCausalLM

from tests.checkpoints import TinyLlama, dequantised, write_folder, write_gguf
from tests.workers.models.paged import BLOCK_SIZE, CPU, PROMPT_LENGTHS, Paged, assert_close, prompt, share
from workers.engine.batch import build_batch
from workers.engine.scheduler import ScheduledRequest, SchedulerOutput


def oracle(model: TinyLlama, tensors: dict[str, torch.Tensor]) -> LlamaForCausalLM:
    hf: LlamaForCausalLM = LlamaForCausalLM(LlamaConfig.from_dict(model.config())).eval()
    missing, unexpected = hf.load_state_dict(tensors, strict=False)
    assert not unexpected
    assert set(missing) <= {"lm_head.weight"}
    hf.tie_weights()
    return hf


def expected(hf: LlamaForCausalLM, ids: Sequence[int]) -> torch.Tensor:
    with torch.inference_mode():
        logits: torch.Tensor = hf(torch.tensor([ids])).logits[0]
    return logits


@pytest.mark.parametrize(("tied", "num_shards"), [(False, 1), (True, 1), (False, 3)])
def test_logits_equal_transformers_whole_and_chunked(tmp_path: Path, tied: bool, num_shards: int) -> None:
    model = TinyLlama(tied=tied)
    folder = write_folder(tmp_path, model, num_shards=num_shards)
    hf = LlamaForCausalLM.from_pretrained(folder)
    for length in PROMPT_LENGTHS:
        ids = prompt(length)
        want = expected(hf, ids)
        paged = Paged(folder, seed=length)
        for size in {length, 1 if length < 20 else 33, 16}:
            for end, logits in paged.chunked(ids, size):
                assert_close(logits, want[end - 1])


@pytest.mark.parametrize("num_kv_heads", [1, 2, 4])
def test_any_number_of_kv_heads(tmp_path: Path, num_kv_heads: int) -> None:
    model = TinyLlama(num_kv_heads=num_kv_heads, rope_theta=500.0)
    paged = Paged(write_folder(tmp_path, model))
    ids = prompt(60)
    want = expected(oracle(model, model.tensors()), ids)
    for end, logits in paged.chunked(ids, 25):
        assert_close(logits, want[end - 1])


def test_a_mixed_step_gives_each_request_its_own_logits(tmp_path: Path) -> None:
    model = TinyLlama()
    paged = Paged(write_folder(tmp_path, model))
    hf = oracle(model, model.tensors())
    prompts = [prompt(length, seed=length) for length in (1, 150, 18, 90, 17, 16, 31, 200)]
    tables = [paged.table(len(ids)) for ids in prompts]
    # Requests 1, 2, 4, 6 decode their last token; 3 and 7 are in the middle of their prompts; 0 and 5 have just come.
    cached = [0, 149, 17, 40, 16, 0, 30, 64]
    for ids, done, table in zip(prompts, cached, tables, strict=True):
        if done:
            paged.step(share(ids, 0, done, table))
    got = paged.step(*(share(*r) for r in zip(prompts, cached, map(len, prompts), tables, strict=True)))
    for ids, logits in zip(prompts, got, strict=True):
        assert_close(logits, expected(hf, ids)[-1])


def test_batch_mates_change_a_row_by_rounding_only(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, TinyLlama())
    ids, mate = prompt(40), prompt(200, seed=9)
    alone, crowded = Paged(folder), Paged(folder)
    steps = list(range(30, 40))
    table, mate_table = crowded.table(40), crowded.table(200)
    crowded.step(share(mate, 0, 100, mate_table))
    own_table = alone.table(40)
    alone.step(share(ids, 0, 30, own_table))
    crowded.step(share(ids, 0, 30, table), share(mate, 100, 150, mate_table))
    for at in steps:
        want = alone.step(share(ids, at, at + 1, own_table))[0]
        got = crowded.step(share(mate, at + 120, at + 121, mate_table), share(ids, at, at + 1, table))[1]
        assert_close(got, want, 1e-5)


def test_rows_that_do_not_sample_get_no_logits(tmp_path: Path) -> None:
    paged = Paged(write_folder(tmp_path, TinyLlama()))
    table = paged.table(32)
    middle = ScheduledRequest("r", prompt(20), 0, table)
    batch = build_batch(SchedulerOutput((middle,), 20), BLOCK_SIZE, torch.float32, CPU)
    with torch.inference_mode():
        assert paged.model.forward(batch, paged.kv_cache).shape == (0, paged.config.vocab_size)


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "Q4_1", "F16", "BF16", "F32"])
@pytest.mark.parametrize("tied", [True, False])
def test_gguf_logits_equal_transformers_on_the_same_rounded_weights(tmp_path: Path, kind: str, tied: bool) -> None:
    model = TinyLlama(tied=tied)
    quantisation = GGMLQuantizationType[kind]
    paged = Paged(write_gguf(tmp_path / f"m.{kind}.gguf", quantisation, model))
    ids = prompt(50)
    want = expected(oracle(model, dequantised(quantisation, model)), ids)
    for end, logits in paged.chunked(ids, 30):
        assert_close(logits, want[end - 1])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_stays_near_fp32(tmp_path: Path, dtype: torch.dtype) -> None:
    model = TinyLlama()
    paged = Paged(write_folder(tmp_path, model), dtype)
    ids = prompt(50)
    want = expected(oracle(model, model.tensors()), ids)
    got = [(end, logits) for end, logits in paged.chunked(ids, 20)]
    assert [end for end, _ in got] == [20, 40, 50]
    for end, logits in got:
        assert torch.nn.functional.cosine_similarity(logits.float(), want[end - 1], dim=0) > 0.99
