"""How much of the KV memory that requests take holds KV: `python -m cluster.lab.memory_waste TRACE`.

The engine itself, on the virtual clock and without a model, serves a stretch of one of Azure's traces: once with paged
KV, once with room for max_model_len reserved for every request. The last line is one JSON object.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import click

from cluster.lab.azure_trace import TraceRequest, read_azure_trace
from cluster.sim.executor import SimExecutor, h100_step_time
from cluster.sim.loop import run
from cluster.sim.runner import EmptyRunner
from workers.config import CacheConfig, SchedulerConfig
from workers.engine.baselines import ContiguousKV
from workers.engine.engine import Engine
from workers.engine.scheduler import MakeScheduler, Scheduler, SchedulerOutput
from workers.request import Request, SamplingParams


@dataclass(frozen=True, slots=True)
class SlotPool:
    """What is the same for both ways. A slot holds the KV of one token; a block is block_size of them."""

    num_slots: int = 1 << 17
    block_size: int = 16
    max_model_len: int = 4096
    max_num_seqs: int = 128
    max_num_batched_tokens: int = 512


@dataclass(slots=True)
class MemoryUse:
    """Sums over time, in slots x seconds and requests x seconds, of what holds while a step is computed."""

    step_s: float = 0.0
    reserved: float = 0.0
    # Of the slots reserved: those with KV, and those that tokens already known will take (prefill).
    held: float = 0.0
    awaited: float = 0.0
    running: float = 0.0

    def add(self, engine: Engine, step_s: float) -> None:
        """A step of `step_s` begins; what it computes is not held before its end."""
        requests = engine.scheduler.running
        self.step_s += step_s
        self.reserved += step_s * len(engine.blocks_in_use()) * engine.block_manager.block_size
        self.held += step_s * sum(r.num_computed_tokens for r in requests)
        self.awaited += step_s * sum(r.num_tokens - r.num_computed_tokens for r in requests)
        self.running += step_s * len(requests)

    @property
    def waste(self) -> float:
        """Share of the reserved slots without KV, averaged over time."""
        return 1 - self.held / self.reserved

    @property
    def waste_in_prefill(self) -> float:
        """The part of `waste` that a step to come will fill."""
        return self.awaited / self.reserved

    @property
    def mean_num_running(self) -> float:
        return self.running / self.step_s


def stretch(trace: Sequence[TraceRequest], num_requests: int, seed: int, max_model_len: int) -> list[TraceRequest]:
    """Consecutive requests from a random place on, without those that max_model_len would refuse."""
    fitting = [request for request in trace if request.num_tokens <= max_model_len]
    start = random.Random(seed).randrange(max(1, len(fitting) - num_requests))
    return fitting[start : start + num_requests]


def measure(requests: Sequence[TraceRequest], pool: SlotPool) -> dict[str, MemoryUse]:
    """Both ways, by name."""
    ways: dict[str, MakeScheduler] = {
        "paged": Scheduler,
        "contiguous": partial(ContiguousKV, max_model_len=pool.max_model_len),
    }
    return {name: run(_serve(requests, pool, way), limit_s=1e6) for name, way in ways.items()}


async def _serve(requests: Sequence[TraceRequest], pool: SlotPool, make_scheduler: MakeScheduler) -> MemoryUse:
    use = MemoryUse()

    def step_s(batch: SchedulerOutput) -> float:
        seconds = h100_step_time(batch.num_tokens)
        use.add(engine, seconds)
        return seconds

    runner = EmptyRunner(pool.num_slots // pool.block_size, pool.block_size, pool.max_model_len)
    # The trace says nothing of what prompts share.
    cache = CacheConfig(block_size=pool.block_size, enable_prefix_caching=False)
    config = SchedulerConfig(max_num_seqs=pool.max_num_seqs, max_num_batched_tokens=pool.max_num_batched_tokens)
    engine = Engine(SimExecutor(runner, step_s), cache, config, make_scheduler)
    arrivals = asyncio.create_task(_arrive(engine, requests))
    while engine.num_output_tokens < sum(request.num_output_tokens for request in requests):
        await engine.wait_for_work()
        await engine.step()
    await arrivals
    engine.check_integrity()
    return use


async def _arrive(engine: Engine, requests: Sequence[TraceRequest]) -> None:
    loop = asyncio.get_running_loop()
    for i, request in enumerate(requests):
        await asyncio.sleep(request.arrival_s - requests[0].arrival_s - loop.time())
        params = SamplingParams(temperature=0.0, max_tokens=request.num_output_tokens)
        engine.add(Request(f"r{i}", [0] * request.num_prompt_tokens, params))


@click.command()
@click.argument("trace", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--requests", "num_requests", default=300, show_default=True)
@click.option("--seed", default=0, show_default=True, help="Where in the trace to begin.")
@click.option("--max-model-len", default=4096, show_default=True)
@click.option("--block-size", default=16, show_default=True)
def main(trace: Path, num_requests: int, seed: int, max_model_len: int, block_size: int) -> None:
    """Waste of KV memory on TRACE, a CSV of Azure's, paged and contiguous."""
    pool = SlotPool(max_model_len=max_model_len, block_size=block_size)
    requests = stretch(read_azure_trace(trace), num_requests, seed, max_model_len)
    found = measure(requests, pool)
    click.echo(f"{'KV':12}{'waste':>9}{'of it in prefill':>18}{'requests at once':>18}")
    for name, use in found.items():
        click.echo(f"{name:12}{use.waste:9.1%}{use.waste_in_prefill:18.1%}{use.mean_num_running:18.1f}")
    waste = {f"{name}_waste": round(use.waste, 4) for name, use in found.items()}
    click.echo(json.dumps(asdict(pool) | {"num_requests": len(requests), "seed": seed} | waste))


if __name__ == "__main__":
    main()
