"""Grade-school problems (Cobbe et al. 2021): how many answers end in the right number."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path

import torch

from cluster.config import load_config
from workers.chat_template import Chat
from workers.config import EngineConfig, Quantization
from workers.engine.engine import Engine
from workers.engine.executor import Executor
from workers.engine.model_runner import ModelRunner
from workers.models.resolve import resolve_model
from workers.request import Request, SamplingParams
from workers.tokenizer import load_tokenizer

_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")
_PARAMS = SamplingParams(temperature=0.0, max_tokens=256)


def num_right(data: Path, quantization: Quantization, dtype: torch.dtype, count: int, threads: int) -> int:
    """Of the first `count` problems, asked as a user would, answered greedily."""
    defaults = load_config(None)
    settings = defaults.model_dump(include=set(EngineConfig.model_fields))
    name = str(dtype).removeprefix("torch.")
    changes = {"quantization": quantization, "dtype": name, "num_threads": threads, "max_num_seqs": 16}
    config = EngineConfig(**{**settings, **changes, "max_model_len": 1024, "kv_cache_memory_bytes": 1 << 30})
    rows = [json.loads(line) for line in (data / "gsm8k_test.jsonl").read_text("utf-8").splitlines()[:count]]
    tokenizer = load_tokenizer(resolve_model(defaults.model))
    chats = [Chat([{"role": "user", "content": row["question"]}]) for row in rows]
    prompts = [tokenizer.encode(tokenizer.apply_chat_template(chat), add_special_tokens=False) for chat in chats]
    answers = asyncio.run(_answer(config, prompts))
    right = (
        last_number(tokenizer.decode(got)) == last_number(row["answer"]) for got, row in zip(answers, rows, strict=True)
    )
    return sum(right)


def last_number(text: str) -> str | None:
    found = _NUMBER.findall(text)
    return found[-1].replace(",", "").removesuffix(".00") if found else None


async def _answer(config: EngineConfig, prompts: list[list[int]]) -> list[list[int]]:
    executor = Executor(ModelRunner(config))
    engine = Engine(executor, config, config)
    answers: dict[str, list[int]] = {str(i): [] for i in range(len(prompts))}
    for i, prompt in enumerate(prompts):
        engine.add(Request(str(i), prompt, _PARAMS))
    while engine.has_work:
        for output in await engine.step():
            answers[output.request_id] += output.token_ids
    executor.close()
    return list(answers.values())
