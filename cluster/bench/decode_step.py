"""Where the time of one decode step goes: `python -m cluster.bench.decode_step` (or `make bench-step`).

Times the step of a ModelRunner alone: no scheduler, no network; beside it the two floors of floors.py. Then counts its
torch operations and calls of compiled kernels, and prints the dearest of both. What neither accounts for is Python
between them. Times of one thread are those that it ran. The last line is one JSON object.
"""

from __future__ import annotations

import json
import os
import statistics
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import click
import torch
from torch.profiler import ProfilerActivity, profile

from cluster.bench.floors import Floors, Rates, floors, measure_rates, now, weight_bytes
from cluster.config import load_config
from workers.config import EngineConfig
from workers.engine.model_runner import ModelRunner
from workers.engine.scheduler import ScheduledRequest, SchedulerOutput
from workers.layers import compiled
from workers.models.architecture import read_architecture
from workers.models.resolve import resolve_model
from workers.request import NextToken, SamplingParams

_GREEDY = SamplingParams(temperature=0.0)
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def decode_batch(num_requests: int, context: int, block_size: int) -> SchedulerOutput:
    """Each request computes its token at position `context` and samples the next; no two share a block."""
    blocks = -(-(context + 1) // block_size)
    next_token = NextToken(_GREEDY, context + 1)
    requests = tuple(
        ScheduledRequest(f"r{i}", (100 + i,), context, tuple(range(i * blocks, (i + 1) * blocks)), (next_token,))
        for i in range(num_requests)
    )
    return SchedulerOutput(requests, num_requests)


def step_times_ms(runner: ModelRunner, batch: SchedulerOutput, num_steps: int) -> list[float]:
    times = []
    for _ in range(num_steps + 2):
        start = now()
        runner.execute(batch)
        times.append(1000 * (now() - start))
    return times[2:]  # The first two warm caches and allocator.


class KernelTimes:
    """Stands before the compiled kernels, with the seconds and the calls of each."""

    def __init__(self, kernels: Any) -> None:
        self._kernels = kernels
        self.seconds: Counter[str] = Counter()
        self.calls: Counter[str] = Counter()

    def __getattr__(self, name: str) -> Callable[..., object]:
        kernel = getattr(self._kernels, name)

        def timed(*args: object) -> object:
            start = now()
            result: object = kernel(*args)
            self.seconds[name] += now() - start  # type: ignore[assignment]
            self.calls[name] += 1
            return result

        return timed


@contextmanager
def kernel_times() -> Iterator[KernelTimes]:
    kernels = vars(compiled)["_kernels"]
    times = KernelTimes(kernels)
    if kernels is not None:
        setattr(compiled, "_kernels", times)  # noqa: B010 - a private name, for as long as this measures
    try:
        yield times
    finally:
        setattr(compiled, "_kernels", kernels)  # noqa: B010


def operations(runner: ModelRunner, batch: SchedulerOutput, num_steps: int) -> list[tuple[str, float, float]]:
    """(operation, ms a step, calls a step) of torch's, the dearest first."""
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        for _ in range(num_steps):
            runner.execute(batch)
    rows = [
        (event.key, event.self_cpu_time_total / 1000 / num_steps, event.count / num_steps)
        for event in profiled.key_averages()
    ]
    return sorted(rows, key=lambda row: -row[1])


def outside_kernels(runner: ModelRunner, batch: SchedulerOutput, num_steps: int) -> tuple[float, KernelTimes]:
    """Which part of a step is not in compiled kernels: the median of some steps."""
    shares = []
    with kernel_times() as times:
        for _ in range(num_steps):
            before, start = times.seconds.total(), now()
            runner.execute(batch)
            shares.append(1 - (times.seconds.total() - before) / (now() - start))
    return statistics.median(shares), times


def show(runner: ModelRunner, batch: SchedulerOutput, num_steps: int) -> dict[str, float]:
    """Print the dearest operations and kernels; the numbers that sum them up."""
    ops = operations(runner, batch, num_steps)
    share, kernels = outside_kernels(runner, batch, num_steps)
    for name, ms, calls in ops[:8]:
        click.echo(f"  {ms:8.2f} ms  {calls:6.0f} calls  {name}")
    for name, spent in kernels.seconds.most_common():
        click.echo(f"  {1000 * spent / num_steps:8.2f} ms  {kernels.calls[name] / num_steps:6.0f} calls  kernel {name}")
    layers = runner.layout.num_layers
    # Allocations and views are entered as operations, too.
    own = sum(calls for name, _, calls in ops if name.startswith("aten::"))
    a_layer = {"aten_per_layer": own / layers, "kernels_per_layer": kernels.calls.total() / num_steps / layers}
    click.echo("  a layer: {aten_per_layer:.1f} torch operations, {kernels_per_layer:.1f} kernels".format(**a_layer))
    click.echo(f"  {share:.0%} of the step is outside of the kernels")
    return {**{key: round(value, 1) for key, value in a_layer.items()}, "outside_kernels": round(share, 3)}


def line(times: list[float], floor: Floors) -> str:
    best = min(times)
    return (
        f"{statistics.median(times):.1f} ms a step, {best:.1f} at best; floors: {floor.read_ms:.1f} ms of reading "
        f"({best / floor.read_ms:.2f} x), {floor.compute_ms:.1f} ms of computing ({best / floor.compute_ms:.2f} x)"
    )


@click.command()
@click.option("--context", default=320, show_default=True, help="Tokens in each request's cache.")
@click.option("--batch", "batches", multiple=True, default=(1, 8, 16), show_default=True, help="Requests in a step.")
@click.option("--steps", default=20, show_default=True, help="Steps timed of each batch.")
@click.option("--threads", default=1, show_default=True)
@click.option("--dtype", type=click.Choice(list(_DTYPES)), default="float32", show_default=True)
def main(context: int, batches: tuple[int, ...], steps: int, threads: int, dtype: str) -> None:
    """Time and profile the decode step of the default model."""
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:threads])
    defaults = load_config(None).model_dump(include=set(EngineConfig.model_fields))
    runner = ModelRunner(EngineConfig(**{**defaults, "num_threads": threads, "dtype": dtype}))
    config = read_architecture(resolve_model(str(defaults["model"])))
    rates = measure_rates(_DTYPES[dtype])
    result: dict[str, object] = {"threads": threads, "context": context, "dtype": dtype, "torch": torch.__version__}
    for num_requests in batches:
        batch = decode_batch(num_requests, context, runner.layout.block_size)
        times = step_times_ms(runner, batch, steps)
        if num_requests == 1:
            # A step may read faster than a sum does.
            step_rate = weight_bytes(config, _DTYPES[dtype]) / min(times) * 1000
            rates = Rates(max(rates.read_bytes_per_s, step_rate), rates.operations_per_s)
        kv_bytes = num_requests * context * runner.layout.token_bytes
        floor = floors(config, rates, _DTYPES[dtype], num_requests, context, kv_bytes)
        click.echo(f"\nbatch {num_requests}, {context} tokens of context, {threads} threads: {line(times, floor)}")
        sums = show(runner, batch, max(3, steps // 4))
        result[f"batch_{num_requests}"] = {
            "median_ms": round(statistics.median(times), 2), "best_ms": round(min(times), 2),
            "read_floor_ms": round(floor.read_ms, 2), "compute_floor_ms": round(floor.compute_ms, 2), **sums,
        }  # fmt: skip
    result["read_gb_per_s"] = round(rates.read_bytes_per_s / 1e9, 1)
    result["gflop_per_s"] = round(rates.operations_per_s / 1e9, 1)
    click.echo(json.dumps(result))


if __name__ == "__main__":
    main()
