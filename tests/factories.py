"""Requests, engines, workers and whole clusters over the fake model, all in one process on the virtual clock."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import aclosing, asynccontextmanager
from typing import Any

from cluster.sim.executor import CopyTime, SimExecutor, StepTime, copy_time, step_time
from cluster.sim.network import Host, Latency, SimNetwork, fast_lan
from router.config import RouterConfig
from router.pool import WorkerPool
from router.router import Router
from tests.fake_model import VOCAB_SIZE, HashRunner
from workers.config import TransferConfig, WorkerConfig
from workers.engine.engine import Engine
from workers.engine.scheduler import MakeScheduler, Scheduler
from workers.request import FinishReason, Request, SamplingParams, TokenOutput
from workers.worker import Worker

BLOCK_SIZE = 4
LEASE_S = 10.0
GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
# Hand-offs may fill the whole pool; test_grant_room.py gives them less.
_TRANSFER: dict[str, Any] = {"frame_bytes": 1024, "credits": 2, "lease_s": LEASE_S, "max_grant_blocks": 10_000}
SEEDED = SamplingParams(temperature=1.0, seed=7, max_tokens=8, ignore_eos=True)


def prompt_of(num_tokens: int, seed: int = 0) -> list[int]:
    """Unlike any other prompt in all its tokens."""
    rng = random.Random(f"{num_tokens} {seed}")
    return [rng.randrange(VOCAB_SIZE) for _ in range(num_tokens)]


def make_request(
    prompt: int | Sequence[int] = 6, params: SamplingParams = GREEDY, request_id: str = "r", **fields: Any
) -> Request:
    token_ids = prompt_of(prompt) if isinstance(prompt, int) else list(prompt)
    return Request(request_id, token_ids, params, **fields)


def make_config(**settings: Any) -> WorkerConfig:
    """Small enough for every border to be near: blocks of 4, steps of 16 tokens, frames of 2 layers."""
    defaults: dict[str, Any] = {
        "block_size": BLOCK_SIZE,
        "hash_block_size": BLOCK_SIZE,
        # Off, so that every test counts what it computes itself; test_prefix_caching.py turns it on.
        "enable_prefix_caching": False,
        "num_gpu_blocks_override": 64,
        "max_model_len": 160,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 16,
        "transfer": {},
    }
    merged = defaults | settings
    return WorkerConfig(**{**merged, "transfer": TransferConfig(**(_TRANSFER | dict(merged["transfer"])))})


def make_engine(
    step_s: StepTime = step_time,
    make_scheduler: MakeScheduler = Scheduler,
    make_runner: Callable[[WorkerConfig], HashRunner] = HashRunner,
    **settings: Any,
) -> Engine:
    config = make_config(**{"num_gpu_blocks_override": 64} | settings)
    return Engine(SimExecutor(make_runner(config), step_s), config, config, make_scheduler)


def runner_of(engine: Engine) -> HashRunner:
    runner = engine.executor.runner
    assert isinstance(runner, HashRunner)
    return runner


async def run_engine(engine: Engine) -> dict[str, list[TokenOutput]]:
    """Step until nothing is left to do; every request's outputs."""
    outputs: dict[str, list[TokenOutput]] = {}
    while engine.has_work:
        for output in await engine.step():
            outputs.setdefault(output.request_id, []).append(output)
        engine.check_integrity()
    return outputs


def tokens_of(outputs: Sequence[TokenOutput]) -> list[int]:
    """Token ids of a whole answer. AssertionError when a token is missing or there twice."""
    tokens: list[int] = []
    for output in outputs:
        assert output.index == len(tokens), f"token {len(tokens)} is next, {output.index} came"
        tokens.extend(output.token_ids)
    return tokens


def by_choice(outputs: Iterable[TokenOutput]) -> dict[int, list[int]]:
    """The answer of each choice. AssertionError when a token is missing or there twice."""
    found: dict[int, list[TokenOutput]] = {}
    for output in outputs:
        found.setdefault(output.choice, []).append(output)
    return {choice: tokens_of(own) for choice, own in sorted(found.items())}


def make_worker(
    host: Host,
    *,
    incarnation: str = "",
    step_s: StepTime = step_time,
    copy_s: CopyTime = copy_time,
    fingerprint: str = "hash",
    **settings: Any,
) -> Worker:
    return Worker(
        make_config(**settings),
        network=host,
        make_executor=lambda config: SimExecutor(_runner(config, fingerprint), step_s, copy_s),
        incarnation=incarnation,
        # As its process would end.
        on_broken=lambda error: host.kill(),
    )


def _runner(config: WorkerConfig, fingerprint: str) -> HashRunner:
    if config.transfer.transport != "shm":
        return HashRunner(config, fingerprint)
    # It loads torch.
    from tests.pooled_model import PooledRunner

    return PooledRunner(config, fingerprint, share_pool=config.role == "prefill")


def in_use(worker: Worker) -> dict[str, int]:
    """Blocks that are not free, by reason; checks the engine's books."""
    worker.engine.check_integrity()
    stats = worker.stats()
    used = {"reserved": stats.blocks_reserved, "in_use": stats.blocks_in_use, "quarantined": stats.blocks_quarantined}
    assert stats.blocks_free + stats.blocks_cached + sum(used.values()) == stats.blocks_total
    return {reason: count for reason, count in used.items() if count}


class SimCluster:
    """Workers and a router on one simulated network. Names: p0, p1, d0, c0."""

    def __init__(self, roles: dict[str, str], seed: int, latency: Latency, router: RouterConfig, **worker: Any) -> None:
        self.network = SimNetwork(seed, latency)
        self.hosts: dict[str, Host] = {}
        self.workers: dict[str, Worker] = {}
        self.dead: list[str] = []
        self._roles = roles
        self._router_config = router
        # By role, what its workers have other than the rest.
        self._role_settings: dict[str, dict[str, Any]] = worker.pop("of_role", {})
        self._worker_settings = worker
        self._num_started = 0

    async def start(self) -> None:
        for name in self._roles:
            await self.launch(name)
        await self.launch_router()

    async def launch_router(self, router_id: str = "router-1") -> None:
        self.router_host = self.network.host()
        addresses = [worker.address for worker in self.workers.values()]
        self.pool = WorkerPool(addresses, router_id, self._router_config, self.router_host)
        await self.pool.start()
        self.router = Router(self.pool, self._router_config, router_id)

    async def launch(self, name: str, port: int = 0) -> Worker:
        self._num_started += 1
        self.hosts[name] = self.network.host()
        worker = make_worker(
            self.hosts[name],
            incarnation=f"{self._num_started:032x}",
            name=name,
            role=self._roles[name],
            port=port,
            **(self._worker_settings | self._role_settings.get(self._roles[name], {})),
        )
        self.workers[name] = worker
        await self.hosts[name].run(worker.start())
        return worker

    async def kill(self, name: str) -> None:
        """As kill -9: nothing more of it reaches anybody."""
        self.hosts[name].kill()
        self.dead.append(name)
        await self.workers[name].stop()

    async def replace(self, name: str) -> Worker:
        """A new incarnation where a dead worker was, at the same address."""
        self.dead.remove(name)
        return await self.launch(name, port=int(self.workers[name].address.rsplit(":", 1)[1]))

    async def replace_elsewhere(self, name: str) -> Worker:
        """On another host, at another address, of which nobody is told."""
        self.dead.remove(name)
        return await self.launch(name)

    async def ask(self, prompt: Sequence[int], params: SamplingParams = GREEDY, request_id: str = "r") -> list[int]:
        """A whole answer. Raises what the router raises."""
        return tokens_of(await self.outputs(prompt, params, request_id))

    async def outputs(
        self, prompt: Sequence[int], params: SamplingParams = GREEDY, request_id: str = "r"
    ) -> list[TokenOutput]:
        async with aclosing(self.router.generate(prompt, params, request_id)) as stream:
            outputs = [output async for output in stream]
        assert [o.finish_reason is None for o in outputs] == [True] * (len(outputs) - 1) + [False]
        assert outputs[-1].finish_reason in (FinishReason.STOP, FinishReason.LENGTH)
        return outputs

    async def choices(
        self, prompt: Sequence[int], params: SamplingParams, request_id: str = "r"
    ) -> dict[int, list[int]]:
        """The whole answer of each choice, every one of which ends once."""
        async with aclosing(self.router.generate(prompt, params, request_id)) as stream:
            outputs = [output async for output in stream]
        assert sorted(o.choice for o in outputs if o.finish_reason) == list(range(params.n))
        return by_choice(outputs)

    def alive(self) -> dict[str, Worker]:
        return {name: worker for name, worker in self.workers.items() if name not in self.dead}

    def busy(self) -> dict[str, Any]:
        """All that is not idle, anywhere: empty when every request is over on both sides."""
        found: dict[str, Any] = {name: used for name, worker in self.alive().items() if (used := in_use(worker))}
        counts = {
            "running": self.router.num_running,
            "queued": self.router.num_queued,
            "queued tokens": sum(abs(w.num_queued_tokens) for w in self.pool.workers),
        }
        return found | {what: count for what, count in counts.items() if count}

    async def until_idle(self, within_s: float) -> None:
        deadline_s = asyncio.get_running_loop().time() + within_s
        while busy := self.busy():
            assert asyncio.get_running_loop().time() < deadline_s, f"still busy after {within_s} s: {busy}"
            await asyncio.sleep(0.01)

    async def stop(self) -> None:
        await self.router.stop()
        await self.pool.stop()
        for worker in self.alive().values():
            await worker.stop()


@asynccontextmanager
async def sim_cluster(
    prefill: int = 1,
    decode: int = 1,
    colocated: int = 0,
    *,
    seed: int = 0,
    latency: Latency = fast_lan,
    router: dict[str, Any] | None = None,
    idle_within_s: float = 0.5,
    **worker: Any,
) -> AsyncIterator[SimCluster]:
    """A running cluster. At the end: every block is free within `idle_within_s`, much less than a lease."""
    counts = {"prefill": prefill, "decode": decode, "colocated": colocated}
    roles = {f"{role[0]}{i}": role for role, count in counts.items() for i in range(count)}
    config = RouterConfig(**(router or {}))
    cluster = SimCluster(roles, seed, latency, config, **worker)
    await cluster.start()
    try:
        yield cluster
        await cluster.until_idle(idle_within_s)
    finally:
        await cluster.stop()
