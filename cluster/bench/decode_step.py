"""Where the time of one decode step goes: `python -m cluster.bench.decode_step` (or `make bench-step`).

Times the step of a ModelRunner alone: no scheduler, no network. Then profiles it and prints the ten dearest operations;
what no operation accounts for is Python between them. The last line is one JSON object.
"""

from __future__ import annotations

import json
import os
import statistics
import time

import click
import torch
from torch.profiler import ProfilerActivity, profile

from cluster.config import load_config
from workers.config import EngineConfig
from workers.engine.model_runner import ModelRunner
from workers.engine.scheduler import ScheduledRequest, SchedulerOutput
from workers.request import NextToken, SamplingParams

_GREEDY = SamplingParams(temperature=0.0)


def decode_batch(num_requests: int, context: int, block_size: int) -> SchedulerOutput:
    """Each request computes its token at position `context` and samples the next; no two share a block."""
    blocks = -(-(context + 1) // block_size)
    next_token = NextToken(_GREEDY, context + 1)
    requests = tuple(
        ScheduledRequest(f"r{i}", (100 + i,), context, tuple(range(i * blocks, (i + 1) * blocks)), (next_token,))
        for i in range(num_requests)
    )
    return SchedulerOutput(requests, num_requests)


def median_ms(runner: ModelRunner, batch: SchedulerOutput, num_steps: int) -> float:
    times = []
    for _ in range(num_steps + 2):
        start = time.perf_counter()
        runner.execute(batch)
        times.append(time.perf_counter() - start)
    return 1000 * statistics.median(times[2:])  # The first two warm caches and allocator.


def top_operations(runner: ModelRunner, batch: SchedulerOutput, num_steps: int) -> list[tuple[str, float, float]]:
    """(operation, ms a step, calls a step), the dearest first."""
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        for _ in range(num_steps):
            runner.execute(batch)
    rows = [
        (event.key, event.self_cpu_time_total / 1000 / num_steps, event.count / num_steps)
        for event in profiled.key_averages()
    ]
    return sorted(rows, key=lambda row: -row[1])


@click.command()
@click.option("--context", default=320, show_default=True, help="Tokens in each request's cache.")
@click.option("--batch", "batches", multiple=True, default=(1, 8, 16), show_default=True, help="Requests in a step.")
@click.option("--steps", default=20, show_default=True, help="Steps timed of each batch.")
@click.option("--threads", default=1, show_default=True)
def main(context: int, batches: tuple[int, ...], steps: int, threads: int) -> None:
    """Time and profile the decode step of the default model."""
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:threads])
    defaults = load_config(None).model_dump(include=set(EngineConfig.model_fields))
    runner = ModelRunner(EngineConfig(**{**defaults, "num_threads": threads}))
    result: dict[str, object] = {"threads": threads, "context": context, "torch": torch.__version__}
    for num_requests in batches:
        batch = decode_batch(num_requests, context, runner.layout.block_size)
        step_ms = median_ms(runner, batch, steps)
        operations = top_operations(runner, batch, max(3, steps // 4))
        click.echo(f"\nbatch {num_requests}, {context} tokens of context, {threads} threads: {step_ms:.1f} ms a step")
        for name, ms, calls in operations[:10]:
            click.echo(f"  {ms:8.2f} ms  {calls:6.0f} calls  {name}")
        in_operations = sum(ms for _, ms, _ in operations)
        click.echo(f"  {in_operations:8.2f} ms  in all operations, profiled")
        result[f"batch_{num_requests}_ms"] = round(step_ms, 2)
    click.echo(json.dumps(result))


if __name__ == "__main__":
    main()
