"""A model cut into ranks: their parts add up to transformers' logits and tokens, and their KV to the whole's."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.exact import Comparator
from tests.families import TINY, write_family_gguf
from tests.prompts import MODEL
from tests.workers.models.paged import Paged, assert_close, prompt, share
from tests.workers.models.ranked import paged_over_ranks
from tests.workers.models.test_families import write
from workers.errors import ConfigError
from workers.models.architecture import read_architecture
from workers.models.resolve import resolve_model
from workers.models.shard import kv_heads_of, require_divisible
from workers.request import SamplingParams

NUM_TOKENS = 12
GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
# The variant of each architecture that has most to cut; the others are slow for their number. They have 4 heads and 2
# KV heads, so that with 4 ranks two share a KV head.
RICHEST = {"llama", "mistral", "qwen2-windows", "qwen3", "phi3", "gemma2-caps", "gemma3", "mixtral", "qwen3_moe"}
CASES = [
    pytest.param(name, size, marks=() if name in RICHEST and (size == 2 or name == "llama") else pytest.mark.slow)
    for size in (2, 4)
    for name in TINY
]


def greedy(paged: Paged, prompts: Sequence[Sequence[int]]) -> list[list[int]]:
    """All in one batch, each prompt in two chunks."""
    ids = [list(p) for p in prompts]
    tables = [paged.table(len(p) + NUM_TOKENS) for p in prompts]
    done = [len(p) // 2 for p in prompts]
    paged.step(*(share(p, 0, half, table) for p, half, table in zip(prompts, done, tables, strict=True)))
    for _ in range(NUM_TOKENS):
        shares = [share(i, start, len(i), table) for i, start, table in zip(ids, done, tables, strict=True)]
        done = [len(i) for i in ids]
        for i, logits in zip(ids, paged.step(*shares), strict=True):
            i.append(int(logits.argmax()))
    return [i[len(p) :] for i, p in zip(ids, prompts, strict=True)]


@pytest.mark.parametrize(("name", "size"), CASES)
def test_ranks_give_the_logits_and_tokens_of_transformers(tmp_path: Path, name: str, size: int) -> None:
    made = write(name, tmp_path)
    paged, _ = paged_over_ranks(tmp_path, size)
    ids = prompt(90)
    want = made.expected(ids)
    for end, logits in paged.chunked(ids, 33):
        assert_close(logits, want[end - 1])
    comparator = Comparator(made, ())
    prompts = [prompt(length, seed=length) for length in (2, 17, 60)]
    for p, answer in zip(prompts, greedy(paged, prompts), strict=True):
        comparator.require_same(p, GREEDY, answer)
    comparator.check()
    require_kv_of_the_whole(tmp_path, size)


def require_kv_of_the_whole(folder: Path, size: int) -> None:
    """Each rank has the KV of its heads, in the model's order."""
    whole, (paged, model) = Paged(folder), paged_over_ranks(folder, size)
    for one in (whole, paged):
        list(one.chunked(prompt(40), 25))
    for heads, cache in zip(model.kv_heads, model.caches, strict=True):
        assert_close(cache, whole.kv_cache[..., heads.start : heads.stop, :])
    assert {head for heads in model.kv_heads for head in heads} == set(range(whole.config.num_kv_heads))


@pytest.mark.parametrize("name", ["llama", pytest.param("gemma3", marks=pytest.mark.slow)])
def test_a_gguf_is_cut_as_a_folder_is(tmp_path: Path, name: str) -> None:
    made = write(name, tmp_path / "hf")
    paged, _ = paged_over_ranks(write_family_gguf(tmp_path / "m.gguf", name, made.model), 2)
    ids = prompt(40)
    for end, logits in paged.chunked(ids, 25):
        assert_close(logits, made.expected(ids)[end - 1])


@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe"])
def test_stacked_experts_are_cut_as_published_ones_are(tmp_path: Path, name: str) -> None:
    made = write(name, tmp_path / "published")
    made.model.save_pretrained(tmp_path / "stacked", save_original_format=False)
    paged, _ = paged_over_ranks(tmp_path / "stacked", 2)
    ((_, logits),) = paged.chunked(prompt(40), 40)
    assert_close(logits, made.expected(prompt(40))[-1])


def test_bfloat16_over_ranks_stays_near_fp32(tmp_path: Path) -> None:
    made = write("qwen3", tmp_path)
    paged, _ = paged_over_ranks(tmp_path, 2, torch.bfloat16)
    ids = prompt(40)
    ((_, logits),) = paged.chunked(ids, 40)
    assert torch.nn.functional.cosine_similarity(logits.float(), made.expected(ids)[-1], dim=0) > 0.98


def test_smollm2_can_be_divided_by_one_and_three_and_is_refused_otherwise_with_its_numbers() -> None:
    config = read_architecture(resolve_model(MODEL))
    for size in (1, 3):
        require_divisible(config, size)
    for size in (2, 4, 5, 6):
        says = rf"^9 attention heads cannot be divided by tensor_parallel_size {size}; this model can have 1, 3$"
        with pytest.raises(ConfigError, match=says) as caught:
            require_divisible(config, size)
        assert caught.value.param == "tensor_parallel_size"
    with pytest.raises(ConfigError, match=r"^a feed-forward of 1536 cannot be divided by tensor_parallel_size 9"):
        require_divisible(config, 9)


def test_kv_heads_are_divided_or_shared_evenly_or_refused(tmp_path: Path) -> None:
    write("llama", tmp_path)
    config = replace(read_architecture(tmp_path), num_heads=12, intermediate_size=96)
    for kv_heads, sizes in {
        12: "1, 2, 3, 4, 6, 12",
        4: "1, 2, 4, 12",
        6: "1, 2, 3, 6, 12",
        1: "1, 2, 3, 4, 6, 12",
    }.items():
        with pytest.raises(ConfigError, match=f"this model can have {sizes}$"):
            require_divisible(replace(config, num_kv_heads=kv_heads), 5)
    with pytest.raises(ConfigError, match=r"^4 KV heads cannot be divided by tensor_parallel_size 3"):
        require_divisible(replace(config, num_kv_heads=4), 3)


@pytest.mark.parametrize(("kv_heads", "size"), [(8, 2), (8, 8), (4, 8), (2, 8), (1, 4), (3, 3), (6, 12)])
def test_a_rank_has_the_kv_heads_that_its_attention_heads_share(kv_heads: int, size: int) -> None:
    group = 3 * max(1, size // kv_heads)
    num_heads = kv_heads * group
    for rank in range(size):
        own = range(rank * num_heads // size, (rank + 1) * num_heads // size)
        assert list(kv_heads_of(kv_heads, rank, size)) == sorted({head // group for head in own})


def test_a_mixture_is_refused_by_the_size_of_its_experts(tmp_path: Path) -> None:
    write("mixtral", tmp_path)
    raw = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(raw | {"intermediate_size": 90, "num_attention_heads": 4}))
    with pytest.raises(ConfigError, match=r"^a feed-forward of 90 cannot be divided by tensor_parallel_size 4"):
        require_divisible(read_architecture(tmp_path), 4)
