"""`python -m cluster.bench.resume`: from a decode worker's death to the next token, and what copies cost until then.

For each value of transfer.resume: a prefill and two decode workers in this process, one thread each, answer one prompt
by the default model; after some tokens the worker that decodes stops, and the stream goes on. The last line is one JSON
object. The time includes what the router waits before its next try (router.retry_s).
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import statistics
import time
from contextlib import aclosing
from pathlib import Path
from typing import Any, Literal, get_args

import click

from cluster.config import ClusterConfig
from router.config import RouterConfig
from router.pool import WorkerPool
from router.router import Router
from workers.config import Role, WorkerConfig
from workers.models.resolve import resolve_model
from workers.request import SamplingParams
from workers.rpc import GrpcNetwork
from workers.tokenizer import load_tokenizer
from workers.worker import Worker

Resume = Literal["recompute", "replicate"]

_LICENSE = Path(__file__).parents[2] / "LICENSE"
_ROLES: tuple[Role, ...] = ("prefill", "decode", "decode")


async def start_workers(resume: Resume) -> list[Worker]:
    workers = [
        Worker(WorkerConfig(name=f"w{i}", role=role, num_threads=1, transfer={"resume": resume}))  # type: ignore[arg-type]
        for i, role in enumerate(_ROLES)
    ]
    for worker in workers:
        await worker.start()
    return workers


async def measure(resume: Resume, prompt: list[int], num_tokens: int, forget: bool) -> dict[str, Any]:
    """Stop the decode worker after `num_tokens`; a few more, and all is said."""
    workers = await start_workers(resume)
    times, copied = await run(workers, prompt, num_tokens, forget)
    gaps = [b - a for a, b in itertools.pairwise(times[1:num_tokens])]
    return {
        "seconds_to_next_token": round(times[num_tokens] - times[num_tokens - 1], 3),
        "tokens_per_s": round(1 / statistics.mean(gaps), 2),
        "median_step_ms": round(1000 * statistics.median(gaps), 1),
        "mib_copied": round(copied / 2**20, 1),
    }


async def run(workers: list[Worker], prompt: list[int], num_tokens: int, forget: bool) -> tuple[list[float], int]:
    """When each token came, and bytes copied until the death."""
    config = RouterConfig()
    pool = WorkerPool([worker.address for worker in workers], "bench", config, GrpcNetwork())
    await pool.start()
    router = Router(pool, config, "bench")
    times: list[float] = []
    copied = 0
    params = SamplingParams(temperature=0.0, max_tokens=num_tokens + 4, ignore_eos=True)
    async with aclosing(router.generate(prompt, params, "r")) as outputs:
        async for output in outputs:
            times += [time.perf_counter()] * len(output.token_ids)
            if len(times) >= num_tokens and len(workers) == len(_ROLES):
                copied = sum(worker.stats().kv_bytes_replicated for worker in workers)
                decoding = next(worker for worker in workers if worker.engine.scheduler.running)
                workers.remove(decoding)
                if forget:
                    blocks = workers[0].engine.block_manager
                    blocks.free(blocks.allocate(blocks.num_free + blocks.num_cached))
                await decoding.stop()
    await router.stop()
    await pool.stop()
    for worker in workers:
        await worker.stop()
    return times, copied


@click.command()
@click.option("--prompt-tokens", default=1000, show_default=True)
@click.option("--tokens", default=200, show_default=True, help="Of the answer, until its decode worker dies.")
@click.option("--forget", is_flag=True, help="The prefill worker has given the prompt's KV away by then.")
def main(prompt_tokens: int, tokens: int, forget: bool) -> None:
    """Time a stream's resume with and without copies of its KV."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    tokenizer = load_tokenizer(resolve_model(ClusterConfig().model))
    prompt = tokenizer.encode(_LICENSE.read_text(encoding="utf-8"))[:prompt_tokens]
    result: dict[str, Any] = {"num_prompt_tokens": len(prompt), "num_tokens": tokens, "forget": forget}
    for resume in get_args(Resume):
        result[resume] = asyncio.run(measure(resume, prompt, tokens, forget))
        click.echo(f"{resume}: {result[resume]}")
    click.echo(json.dumps(result))


if __name__ == "__main__":
    main()
