"""KV of fewer bits than the model's: the same tokens however the prompt was cut, found again, or handed over."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from tests.checkpoints import write_folder
from tests.factories import run_engine, tokens_of
from tests.families import TINY
from tests.kv import read_kv
from workers.config import EngineConfig, SpeculativeConfig
from workers.engine.engine import Engine
from workers.engine.executor import Executor
from workers.engine.model_runner import ModelRunner
from workers.request import Request, SamplingParams

PARAMS = [
    SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True),
    SamplingParams(temperature=1.0, seed=3, max_tokens=12, ignore_eos=True),
]
PROMPTS = [torch.randint(3, 256, (n,), generator=torch.Generator().manual_seed(n)).tolist() for n in (5, 33, 70)]
lossy = pytest.mark.parametrize("kv_cache_dtype", ["bf16", "fp8"])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tmp_path_factory.mktemp("tiny"))


def make_config(folder: Path, **settings: Any) -> EngineConfig:
    return EngineConfig(model=str(folder), num_gpu_blocks_override=64, max_model_len=128, **settings)


def answers(config: EngineConfig, prompts: Sequence[list[int]] = PROMPTS, together: bool = True) -> list[list[int]]:
    """Greedy and seeded, of each prompt."""
    executor = Executor(ModelRunner(config))
    requests = [Request(f"{i}.{j}", list(p), q) for i, p in enumerate(prompts) for j, q in enumerate(PARAMS)]

    async def main() -> dict[str, list[int]]:
        engine = Engine(executor, config, config)
        found: dict[str, list[int]] = {}
        for batch in [requests] if together else [[request] for request in requests]:
            for request in batch:
                engine.add(request)
            found |= {name: tokens_of(outputs) for name, outputs in (await run_engine(engine)).items()}
        return found

    found = asyncio.run(main())
    executor.close()
    return [found[request.request_id] for request in requests]


def require_alike(answers: Sequence[Sequence[int]], others: Sequence[Sequence[int]]) -> None:
    """Most tokens come before the first that differs: a last bit can tip a rounding, and that a token."""
    same = sum(
        next((i for i, (x, y) in enumerate(zip(a, b, strict=True)) if x != y), len(a))
        for a, b in zip(answers, others, strict=True)
    )
    assert same >= 0.8 * sum(map(len, answers))


@lossy
def test_tokens_depend_neither_on_chunks_nor_batch_mates_nor_prefix_hits(folder, kv_cache_dtype):
    whole = answers(make_config(folder, kv_cache_dtype=kv_cache_dtype, enable_prefix_caching=False))
    chunked = make_config(folder, kv_cache_dtype=kv_cache_dtype, max_num_batched_tokens=16, max_num_seqs=8)
    require_alike(answers(chunked), whole)
    require_alike(answers(make_config(folder, kv_cache_dtype=kv_cache_dtype), together=False), whole)
    drafted = make_config(folder, kv_cache_dtype=kv_cache_dtype, speculative_config=SpeculativeConfig())
    require_alike(answers(drafted), whole)
    assert whole != answers(make_config(folder)), "no loss at all: is anything rounded?"


@lossy
@pytest.mark.parametrize("family", ["mistral", "gemma2-caps", "gemma3", "phi3"])
def test_windows_and_caps_go_with_it(tmp_path, family, kv_cache_dtype):
    TINY[family].build().save_pretrained(tmp_path)
    whole = answers(make_config(tmp_path, kv_cache_dtype=kv_cache_dtype))
    cut = make_config(tmp_path, kv_cache_dtype=kv_cache_dtype, max_num_batched_tokens=24, max_num_seqs=8)
    require_alike(answers(cut), whole)


@lossy
def test_a_hand_off_in_any_precision_gives_the_tokens_of_one_worker(folder, kv_cache_dtype):
    config = make_config(folder, kv_cache_dtype=kv_cache_dtype)
    executors = [Executor(ModelRunner(config)) for _ in range(2)]

    async def hand_over(prompt: list[int], params: SamplingParams) -> list[int]:
        prefill, decode = (Engine(executor, config, config) for executor in executors)
        first = Request("r", prompt, params, output_limit=1, hold_blocks=True)
        second = Request("r", prompt, params)
        decode.reserve(second, decode.block_manager.num_blocks)
        prefill.add(first)
        outputs = (await run_engine(prefill))["r"]
        sent, placed = ([b * 16 + i for b in r.block_table for i in range(16)][: len(prompt)] for r in (first, second))
        decode.executor.runner.write_kv(placed, 0, 2, read_kv(prefill.executor.runner, sent, 0, 2))
        decode.commit(second, {0: outputs[0].token_ids[0]})
        prefill.release(first)
        return [*outputs[0].token_ids, *(t for o in (await run_engine(decode))["r"] for t in o.token_ids)]

    handed = [asyncio.run(hand_over(prompt, params)) for prompt in PROMPTS for params in PARAMS]
    require_alike(handed, answers(config))
    for executor in executors:
        executor.close()


def test_fp8_holds_nearly_four_times_the_tokens_of_fp32(folder):
    sizes = {}
    for name in ("auto", "fp32", "bf16", "fp8"):
        config = EngineConfig.model_validate(
            {"model": str(folder), "kv_cache_memory_bytes": 1 << 20, "max_model_len": 128, "kv_cache_dtype": name}
        )
        sizes[name] = ModelRunner(config).num_blocks
    # Heads of 32 numbers: 128, 64 and 36 bytes.
    assert sizes["auto"] == sizes["fp32"] == (1 << 20) // (2 * 2 * 2 * 128 * 16)
    assert sizes["bf16"] == 2 * sizes["fp32"]
    assert sizes["fp8"] == (1 << 20) // (2 * 2 * 2 * 36 * 16)


@pytest.mark.parametrize(("spelling", "meant"), [("fp8", "float8_e4m3"), ("bf16", "bfloat16"), ("float32", "float32")])
def test_short_names_are_understood(spelling, meant):
    assert EngineConfig.model_validate({"kv_cache_dtype": spelling}).kv_cache_dtype == meant


def test_other_dtypes_are_refused():
    with pytest.raises(ValidationError, match="kv_cache_dtype"):
        EngineConfig.model_validate({"kv_cache_dtype": "int4"})
