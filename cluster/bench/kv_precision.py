"""`python -m cluster.bench.kv_precision`: what fewer bits of KV cost in accuracy, and what they save.

A text is read in chunks, so that all but the first see KV out of the pool. Compared with float32 KV: the
log-probability of each next token of the text (in nats), the perplexity that comes of them, and how often the likeliest
token is the same.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Sequence
from pathlib import Path

import click

from cluster.config import load_config
from workers.config import EngineConfig
from workers.engine.model_runner import ModelRunner
from workers.engine.scheduler import PromptScores, ScheduledRequest, SchedulerOutput
from workers.models.resolve import resolve_model
from workers.request import TokenLogprobs
from workers.tokenizer import load_tokenizer

_DTYPES = ("float32", "bfloat16", "float8_e4m3")
_CHUNK = 64
_LICENSE = Path(__file__).parents[2] / "LICENSE"


def read_text(runner: ModelRunner, token_ids: Sequence[int]) -> list[TokenLogprobs]:
    """What the model thinks of each token from the second on, with the likeliest at its place."""
    table = tuple(range(-(-len(token_ids) // runner.layout.block_size)))
    scores: list[TokenLogprobs] = []
    for start in range(0, len(token_ids) - 1, _CHUNK):
        chunk = token_ids[start : start + _CHUNK]
        wanted = PromptScores(token_ids[start + 1 : start + 1 + len(chunk)], 1)
        request = ScheduledRequest("text", chunk, start, table, prompt_scores=wanted)
        (result,) = runner.execute(SchedulerOutput((request,), len(chunk)))
        scores += result.prompt_logprobs
    return scores


def compare(exact: Sequence[TokenLogprobs], scores: Sequence[TokenLogprobs]) -> dict[str, float]:
    gaps = [abs(a.logprob - b.logprob) for a, b in zip(exact, scores, strict=True)]
    same = sum(a.top_token_ids == b.top_token_ids for a, b in zip(exact, scores, strict=True))
    return {
        "perplexity": round(math.exp(-sum(score.logprob for score in scores) / len(scores)), 4),
        "mean_logprob_error": round(sum(gaps) / len(gaps), 6),
        "max_logprob_error": round(max(gaps), 6),
        "same_likeliest_percent": round(100 * same / len(scores), 2),
    }


@click.command()
@click.option("--text", type=click.Path(exists=True, dir_okay=False, path_type=Path), default=_LICENSE)
@click.option("--tokens", default=2048, show_default=True, help="So many of the text's first tokens are read.")
@click.option("--threads", default=1, show_default=True)
def main(text: Path, tokens: int, threads: int) -> None:
    """Accuracy and size of the KV cache of the default model in each kv_cache_dtype."""
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:threads])
    defaults = load_config(None)
    tokenizer = load_tokenizer(resolve_model(defaults.model))
    token_ids = tokenizer.encode(text.read_text(encoding="utf-8"))[:tokens]
    settings = defaults.model_dump(include=set(EngineConfig.model_fields)) | {"num_threads": threads}
    exact: list[TokenLogprobs] = []
    result: dict[str, object] = {"text": text.name, "num_tokens": len(token_ids)}
    for dtype in _DTYPES:
        runner = ModelRunner(EngineConfig(**{**settings, "kv_cache_dtype": dtype}))
        scores = read_text(runner, token_ids)
        exact = exact or scores
        token_bytes = runner.layout.token_bytes
        figures = {"token_bytes": token_bytes, "tokens_in_1_gib": (1 << 30) // token_bytes, **compare(exact, scores)}
        click.echo("  ".join([f"{dtype:12}", *(f"{name} {value}" for name, value in figures.items())]))
        result[dtype] = figures
    click.echo(json.dumps(result))


if __name__ == "__main__":
    main()
