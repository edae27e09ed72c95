"""`python -m cluster.bench.gsm8k`: grade-school problems (Cobbe et al. 2021) answered with weights in fewer bits.

Each answer is a line of a file in --answers as soon as it is whole, so that a run that was ended goes on where it was.
A small model gets few right; how often its last number is that of fp32 says more about what the bits cost.
"""

from __future__ import annotations

import asyncio
import json
import re
import statistics
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

import click

from cluster.bench.quantization import DATA
from cluster.config import load_config
from workers.chat_template import Chat
from workers.config import EngineConfig, Quantization
from workers.engine.engine import Engine
from workers.engine.executor import Executor
from workers.engine.model_runner import ModelRunner
from workers.models.resolve import resolve_model
from workers.request import Request, SamplingParams
from workers.tokenizer import Tokenizer, load_tokenizer

_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")
# What an engine is told, by the name of its row; all others are compared with the first.
MODES: Mapping[str, Mapping[str, str]] = {
    "fp32": {"dtype": "float32"},
    "bf16": {"dtype": "bfloat16"},
    **{mode: {"quantization": mode} for mode in get_args(Quantization) if mode != "none"},
}


def last_number(text: str) -> str | None:
    found = _NUMBER.findall(text)
    return found[-1].replace(",", "").removesuffix(".00") if found else None


def num_alike(one: Sequence[int], other: Sequence[int]) -> int:
    """Tokens before the first that differs."""
    pairs = zip(one, other, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))


def read_answers(path: Path) -> dict[int, list[int]]:
    """Token ids by the index of the question; none, where there is no such file yet."""
    lines = path.read_text("utf-8").splitlines() if path.exists() else []
    return {row["question"]: row["token_ids"] for row in map(json.loads, lines)}


def add_answers(path: Path, prompts: Sequence[list[int]], config: EngineConfig, max_tokens: int) -> None:
    """Append to the file the greedy answers that it lacks."""
    done = read_answers(path)
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens)
    requests = [Request(str(i), prompt, params) for i, prompt in enumerate(prompts) if i not in done]

    async def write() -> None:
        with path.open("a", encoding="utf-8") as file:
            async for request in _answered(requests, config):
                row = {"question": int(request.request_id), "token_ids": request.output_token_ids}
                print(json.dumps(row), file=file, flush=True)

    if requests:
        asyncio.run(write())


async def _answered(requests: Sequence[Request], config: EngineConfig) -> AsyncIterator[Request]:
    executor = Executor(ModelRunner(config))
    engine = Engine(executor, config, config)
    by_id = {request.request_id: request for request in requests}
    for request in requests:
        engine.add(request)
    while engine.has_work:
        for output in await engine.step():
            if output.finish_reason is not None:
                yield by_id[output.request_id]
    executor.close()


def table(answers: Mapping[str, Sequence[list[int]]], rows: Sequence[dict[str, Any]], tokenizer: Tokenizer) -> str:
    """In Markdown. `answers`: of each mode, one a question; the first mode's are what the others are held against."""
    heads = ("weights", "right", "last number as fp32's", "whole answer as fp32's", "tokens alike, median")
    lines = [f"| {' | '.join(heads)} |", f"|{' --- |' * len(heads)}"]
    numbers = {mode: [last_number(tokenizer.decode(one)) for one in of_mode] for mode, of_mode in answers.items()}
    first, want = next(iter(answers)), [last_number(row["answer"]) for row in rows]
    for mode, of_mode in answers.items():
        pairs = ((numbers[mode], want), (numbers[mode], numbers[first]), (of_mode, answers[first]))
        shares = [sum(a == b for a, b in zip(*pair, strict=True)) / len(rows) for pair in pairs]
        alike = statistics.median(map(num_alike, of_mode, answers[first]))
        lines.append(f"| {mode} | {' | '.join(f'{share:.0%}' for share in shares)} | {alike:.0f} |")
    return "\n".join(lines)


@click.command()
@click.argument("modes", nargs=-1, type=click.Choice(list(MODES)))
@click.option("--data", type=click.Path(exists=True, file_okay=False, path_type=Path), default=DATA, show_default=True)
@click.option("--questions", default=100, show_default=True)
@click.option("--max-tokens", default=256, show_default=True, help="Of an answer.")
@click.option("--batch", default=32, show_default=True, help="Answers at a time.")
@click.option("--threads", default=1, show_default=True)
@click.option("--answers", "folder", type=click.Path(file_okay=False, path_type=Path), required=True)
def main(
    modes: Sequence[str], data: Path, questions: int, max_tokens: int, batch: int, threads: int, folder: Path
) -> None:
    """Answer as each of MODES (all), then compare them: the first is what the others are held against."""
    defaults = load_config(None)
    shared = defaults.model_dump(include=set(EngineConfig.model_fields))
    shared |= {"num_threads": threads, "max_num_seqs": batch, "max_model_len": 1024}
    rows = [json.loads(line) for line in (data / "gsm8k_test.jsonl").read_text("utf-8").splitlines()[:questions]]
    tokenizer = load_tokenizer(resolve_model(defaults.model))
    chats = [Chat([{"role": "user", "content": row["question"]}]) for row in rows]
    prompts = [tokenizer.encode(tokenizer.apply_chat_template(chat), add_special_tokens=False) for chat in chats]
    folder.mkdir(parents=True, exist_ok=True)
    answers = {}
    for mode in modes or MODES:
        path = folder / f"{mode}.jsonl"
        add_answers(path, prompts, EngineConfig(**{**shared, **MODES[mode]}), max_tokens)
        done = read_answers(path)
        answers[mode] = [done[i] for i in range(len(prompts))]
    click.echo(table(answers, rows, tokenizer))


if __name__ == "__main__":
    main()
