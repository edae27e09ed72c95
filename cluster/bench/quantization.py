"""`python -m cluster.bench.quantization`: what weights in fewer bits cost in accuracy, and what a step then takes.

Accuracy is over text of MT-bench and GSM8K (--data), against the model in fp32: the divergence of the distributions of
the next token (KL, in nats a token), how often the likeliest token is the same, and the text's perplexity. Steps are
forward passes of requests with --context tokens each, all quantizations in turn and the best of --rounds, in seconds of
this thread, so that what else runs on the machine counts little.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

import click
import torch

from cluster.bench.decode_step import decode_batch
from cluster.config import load_config
from workers.config import Quantization
from workers.engine.batch import build_batch
from workers.engine.scheduler import PromptScores, ScheduledRequest, SchedulerOutput
from workers.models.architecture import read_architecture
from workers.models.loader import Model, load_model, open_weights
from workers.models.resolve import resolve_model
from workers.tokenizer import Tokenizer, load_tokenizer

_CPU = torch.device("cpu")
_BLOCK_SIZE = 16
_CHUNK = 256
_MODES: tuple[Quantization, ...] = get_args(Quantization)
DATA = Path(__file__).parents[3] / "shared" / "data" / "prompts"


@dataclass(slots=True)
class Figures:
    quantization: Quantization
    dtype: torch.dtype
    kl: float
    same_likeliest: float
    perplexity: float


class Subject:
    """One model over a pool of its own."""

    def __init__(self, path: Path, quantization: Quantization, dtype: torch.dtype, num_tokens: int) -> None:
        config = read_architecture(path)
        self.quantization, self.dtype = quantization, dtype
        self.model: Model = load_model(config, open_weights(path, config), dtype, _CPU, quantization=quantization)
        num_blocks = -(-num_tokens // _BLOCK_SIZE)
        shape = (config.num_layers, 2, num_blocks, _BLOCK_SIZE, config.num_kv_heads, config.head_dim)
        self._kv_cache = torch.zeros(shape, dtype=dtype)
        self._windows = config.windows

    def step(self, output: SchedulerOutput) -> torch.Tensor:
        """Logits of the rows that are wanted."""
        return self.model.forward(build_batch(output, _BLOCK_SIZE, self.dtype, _CPU, self._windows), self._kv_cache)

    def read(self, token_ids: Sequence[int]) -> Iterator[torch.Tensor]:
        """Log-probabilities [num_tokens, vocab_size] of what follows each token, chunk by chunk."""
        table = tuple(range(-(-len(token_ids) // _BLOCK_SIZE)))
        for start in range(0, len(token_ids), _CHUNK):
            chunk = tuple(token_ids[start : start + _CHUNK])
            request = ScheduledRequest("text", chunk, start, table, prompt_scores=PromptScores(chunk, 0))
            yield self.step(SchedulerOutput((request,), len(chunk))).float().log_softmax(-1)


def text_of(data: Path, tokenizer: Tokenizer, num_tokens: int) -> list[int]:
    """Half of it MT-bench's questions, half GSM8K's with their answers."""
    mt_bench = [json.loads(line) for line in (data / "mt_bench_question.jsonl").read_text("utf-8").splitlines()]
    gsm8k = [json.loads(line) for line in (data / "gsm8k_test.jsonl").read_text("utf-8").splitlines()]
    halves = (
        "\n\n".join(turn for question in mt_bench for turn in question["turns"]),
        "\n\n".join(f"{row['question']}\n{row['answer']}" for row in gsm8k),
    )
    first, second = (tokenizer.encode(half[: 8 * num_tokens]) for half in halves)
    return [*first[: num_tokens // 2], *second[: num_tokens - num_tokens // 2]]


def compare(subject: Subject, token_ids: Sequence[int], exact: Sequence[torch.Tensor]) -> Figures:
    kl, same, loss = 0.0, 0, 0.0
    following = torch.tensor([*token_ids[1:], -1])
    for i, (p, q) in enumerate(zip(exact, subject.read(token_ids), strict=True)):
        kl += float((p.exp() * (p - q)).sum())
        same += int((p.argmax(-1) == q.argmax(-1)).sum())
        targets = following[i * _CHUNK : i * _CHUNK + len(q)]
        known = targets >= 0
        loss -= float(q[known].gather(1, targets[known, None]).sum())
    count = len(token_ids)
    return Figures(subject.quantization, subject.dtype, kl / count, same / count, math.exp(loss / (count - 1)))


def step_times_ms(subjects: Sequence[Subject], batch: SchedulerOutput, rounds: int) -> list[float]:
    """The best of each, in milliseconds of this thread."""
    best = [math.inf] * len(subjects)
    for _ in range(rounds):
        for i, subject in enumerate(subjects):
            for _ in range(2):  # The first finds the other models' weights in the cache.
                began_s = time.thread_time()
                subject.step(batch)
                best[i] = min(best[i], 1000 * (time.thread_time() - began_s))
    return best


def prompt_batch(num_tokens: int) -> SchedulerOutput:
    table = tuple(range(-(-num_tokens // _BLOCK_SIZE)))
    return SchedulerOutput((ScheduledRequest("prompt", tuple(range(100, 100 + num_tokens)), 0, table),), num_tokens)


def table(rows: Sequence[tuple[Figures, list[float]]], batches: Sequence[int], prompt: int) -> str:
    """In Markdown."""
    steps = [f"step of {batch}, ms" for batch in batches]
    head = [
        "quantization",
        "computed in",
        "KL, nats",
        "same likeliest, %",
        "perplexity",
        *steps,
        f"{prompt} tokens, ms",
    ]
    lines = [head, ["---"] * len(head)]
    for figures, times in rows:
        dtype = str(figures.dtype).removeprefix("torch.")
        accuracy = [f"{figures.kl:.4f}", f"{100 * figures.same_likeliest:.1f}", f"{figures.perplexity:.3f}"]
        lines.append([figures.quantization, dtype, *accuracy, *(f"{ms:.1f}" for ms in times)])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


@click.command()
@click.option("--data", type=click.Path(exists=True, file_okay=False, path_type=Path), default=DATA, show_default=True)
@click.option("--tokens", default=2000, show_default=True, help="Of text that is read.")
@click.option("--context", default=320, show_default=True, help="Tokens in the cache of each request of a step.")
@click.option("--rounds", default=8, show_default=True)
@click.option("--threads", default=1, show_default=True)
def main(data: Path, tokens: int, context: int, rounds: int, threads: int) -> None:
    """Accuracy and time of the default model with its weights in each quantization."""
    torch.set_num_threads(threads)
    path, batches = resolve_model(load_config(None).model), (1, 8)
    pool = max(tokens, max(batches) * (context + _BLOCK_SIZE))
    token_ids = text_of(data, load_tokenizer(path), tokens)
    modes = [("none", torch.float32), *((mode, torch.bfloat16) for mode in _MODES)]
    with torch.inference_mode():
        subjects = [Subject(path, mode, dtype, pool) for mode, dtype in modes]
        exact = list(subjects[0].read(token_ids))
        figures = [compare(subject, token_ids, exact) for subject in subjects]
        times = [step_times_ms(subjects, decode_batch(batch, context, _BLOCK_SIZE), rounds) for batch in batches]
        times.append(step_times_ms(subjects, prompt_batch(512), max(2, rounds // 4)))
    click.echo(table(list(zip(figures, map(list, zip(*times, strict=True)), strict=True)), batches, 512))


if __name__ == "__main__":
    main()
