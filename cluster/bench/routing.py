"""What each routing policy makes of prompts that begin alike: `python -m cluster.bench.routing TRACE`.

The whole front and the workers behind it, without a model and on the virtual clock: Router, Admission, the policy, KV
events and index, prefill workers' engines with their prefix caches. One id of the trace, 512 tokens, is one block of 16
tokens here, so that a token stands for 32. A decode worker grants room and is sent nothing: answers end with token 1.
The last line is one JSON object.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass
from pathlib import Path

import click

from cluster.bench.mooncake_trace import BLOCK_TOKENS, TraceRequest, ceiling, read_mooncake_trace
from cluster.sim.executor import SimExecutor, h100_step_time
from cluster.sim.loop import run
from cluster.sim.network import SimNetwork
from cluster.sim.runner import EmptyRunner
from router.config import RouterConfig
from router.policy import policy_named
from router.pool import WorkerPool
from router.router import Router
from workers.config import Role, WorkerConfig
from workers.engine.scheduler import SchedulerOutput
from workers.errors import ConfigError
from workers.request import SamplingParams
from workers.worker import Worker

BLOCK_SIZE = 16
# Tokens of the trace for which one of ours stands; a step has room for 8,192 of them.
_SCALE = BLOCK_TOKENS // BLOCK_SIZE
_STEP_TOKENS = 8192 // _SCALE
_ONE_TOKEN = SamplingParams(temperature=0.0, max_tokens=1)


@dataclass(frozen=True, slots=True)
class Setting:
    policy: str
    num_workers: int = 4
    blocks_per_worker: int = 12_500


@dataclass(frozen=True, slots=True)
class Outcome:
    # Of all blocks of all prompts, those that were not computed.
    hit_rate: float
    # Prompt tokens computed: the most of any worker, by the mean.
    imbalance: float
    ttft_mean_s: float
    ttft_p90_s: float


def simulate(requests: Sequence[TraceRequest], setting: Setting) -> Outcome:
    return run(_Simulation(setting).main(requests), limit_s=1e6)


class _Simulation:
    def __init__(self, setting: Setting) -> None:
        self._setting = setting
        self._network = SimNetwork()
        self._num_cached_tokens = 0
        self._ttft_s: list[float] = []

    async def main(self, requests: Sequence[TraceRequest]) -> Outcome:
        setting = self._setting
        # Stats move little between two looks, and an hour has many.
        config = RouterConfig(policy=setting.policy, heartbeat_s=2.0, queue_timeout_s=1e5, max_num_queued_reqs=1 << 20)
        async with AsyncExitStack() as stack:
            prefill = [
                await self._start(stack, "prefill", setting.blocks_per_worker) for _ in range(setting.num_workers)
            ]
            decode = await self._start(stack, "decode", 1 << 17)
            addresses = [worker.address for worker in (*prefill, decode)]
            pool = WorkerPool(addresses, "router", config, self._network.host())
            await pool.start()
            stack.push_async_callback(pool.stop)
            router = Router(pool, config, "router")
            stack.push_async_callback(router.stop)
            await asyncio.gather(*(self._ask(router, i, request) for i, request in enumerate(requests)))
        computed = [worker.engine.num_prompt_tokens_computed for worker in prefill]
        return Outcome(
            self._num_cached_tokens / BLOCK_SIZE / sum(len(request.block_ids) for request in requests),
            max(computed) / statistics.mean(computed),
            statistics.mean(self._ttft_s),
            statistics.quantiles(self._ttft_s, n=10)[-1],
        )

    async def _start(self, stack: AsyncExitStack, role: Role, num_blocks: int) -> Worker:
        config = WorkerConfig(
            role=role,
            block_size=BLOCK_SIZE,
            hash_block_size=BLOCK_SIZE,
            num_gpu_blocks_override=num_blocks,
            max_model_len=1 << 20,
            max_num_batched_tokens=_STEP_TOKENS,
        )
        runner = EmptyRunner(num_blocks, BLOCK_SIZE, 1 << 20)
        worker = Worker(config, network=self._network.host(), make_executor=lambda _: SimExecutor(runner, _step_s))
        await worker.start()
        stack.push_async_callback(worker.stop)
        return worker

    async def _ask(self, router: Router, number: int, request: TraceRequest) -> None:
        loop = asyncio.get_running_loop()
        await asyncio.sleep(request.arrival_s - loop.time())
        arrived_s = loop.time()
        # One token more: the last is computed in any case.
        prompt = [block_id for block_id in request.block_ids for _ in range(BLOCK_SIZE)] + [number]
        async for output in router.generate(prompt, _ONE_TOKEN, f"r{number}"):
            self._num_cached_tokens += output.num_cached_tokens
        self._ttft_s.append(loop.time() - arrived_s)


def _step_s(batch: SchedulerOutput) -> float:
    return h100_step_time(_SCALE * batch.num_tokens)


def _checked(_: click.Context, __: click.Parameter, policies: tuple[str, ...]) -> tuple[str, ...]:
    for name in policies:
        try:
            policy_named(name)
        except ConfigError as error:
            raise click.BadParameter(error.message) from None
    return policies


@click.command()
@click.argument("trace", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option(
    "--policy", "policies", multiple=True, default=("prefix_aware", "round_robin"), callback=_checked, show_default=True
)
@click.option("--requests", "num_requests", type=int, help="The first so many.  [default: all]")
@click.option("--workers", "num_workers", default=4, show_default=True)
@click.option("--blocks", "blocks_per_worker", default=12_500, show_default=True, help="Of 512 tokens, of each worker.")
def main(
    trace: Path, policies: tuple[str, ...], num_requests: int | None, num_workers: int, blocks_per_worker: int
) -> None:
    """Hit rate and balance of policies on TRACE, one of Mooncake's."""
    requests = read_mooncake_trace(trace)[:num_requests]
    limit = ceiling(requests)
    click.echo(f"{len(requests)} requests; a cache without bounds would have {limit:.1%} of their blocks")
    click.echo(f"{'policy':14}{'hit rate':>10}{'of that':>10}{'imbalance':>11}{'TTFT':>9}{'p90':>9}{'took':>9}")
    result: dict[str, object] = {"num_requests": len(requests), "ceiling": round(limit, 4)}
    for policy in policies:
        began = time.perf_counter()
        found = simulate(requests, Setting(policy, num_workers, blocks_per_worker))
        took_s = time.perf_counter() - began
        click.echo(
            f"{policy:14}{found.hit_rate:10.1%}{found.hit_rate / limit:10.1%}{found.imbalance:11.2f}"
            f"{found.ttft_mean_s:7.2f} s{found.ttft_p90_s:7.2f} s{took_s:7.0f} s"
        )
        result[policy] = {key: round(value, 4) for key, value in asdict(found).items()}
    click.echo(json.dumps(result))


if __name__ == "__main__":
    main()
