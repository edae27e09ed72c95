"""Random schedules: whatever order things happen in, every client gets the right tokens and no block is lost."""

from __future__ import annotations

import asyncio
import random
from contextlib import aclosing
from dataclasses import replace
from typing import Any

import pytest

from cluster.sim.loop import run
from cluster.sim.network import Fault, corrupt, delay, drop, duplicate
from tests.factories import GREEDY, SEEDED, SimCluster, prompt_of, sim_cluster
from tests.fake_model import expected, expected_tokens
from workers.request import FinishReason


def heavy_tailed(rng: random.Random, num_bytes: int) -> float:
    """Mostly a fast network; now and then a message takes far longer than a retry's wait."""
    return rng.uniform(1e-4, 1e-3) if rng.random() < 0.97 else rng.expovariate(1 / 0.3)


class Schedule:
    """Clients that come, go and lose patience, a worker that dies, and messages that fare badly, all by one seed."""

    def __init__(self, seed: int, with_faults: bool) -> None:
        self.seed = seed
        self.rng = random.Random(seed)
        self.with_faults = with_faults

    async def play(self) -> None:
        rng = self.rng
        router: dict[str, Any] = {"max_attempts": 12, "rpc_timeout_s": 3.0, "token_timeout_s": 20.0}
        worker: dict[str, Any] = {
            "num_gpu_blocks_override": rng.choice((40, 48, 64)),
            "transfer": {"lease_s": 5.0, "rpc_timeout_s": 3.0},
        }
        counts = rng.randint(2, 3), rng.randint(2, 3)
        async with sim_cluster(
            *counts, seed=self.seed, latency=heavy_tailed, router=router, idle_within_s=30.0, **worker
        ) as cluster:
            if self.with_faults:
                self._spoil(cluster)
            clients = [asyncio.create_task(self._client(cluster, number)) for number in range(12)]
            await asyncio.sleep(rng.uniform(0, 1))
            if rng.random() < 0.6:
                await cluster.kill(rng.choice(("p0", "d0")))
            await asyncio.gather(*clients)
            cluster.network.hooks.clear()

    def _spoil(self, cluster: SimCluster) -> None:
        """One message in fifty gets lost, comes twice or late; a frame may be damaged too."""
        for method in ("Connect", "Reserve", "Prefill", "Put", "Commit", "Release", "Renew", "Abort", "GetStats"):
            for answers in (False, True):
                cluster.network.fault(method, self._misfortune(damage=method == "Put" and not answers), answers=answers)

    def _misfortune(self, damage: bool) -> Fault:
        faults: list[Fault] = [drop, duplicate, delay(self.rng.uniform(0, 4))]
        if damage:
            faults.append(lambda data: corrupt(self.rng.randrange(len(data)), 1 << self.rng.randrange(8))(data))
        return lambda data: self.rng.choice(faults)(data) if self.rng.random() < 0.02 else ((0.0, data),)

    async def _client(self, cluster: SimCluster, number: int) -> None:
        rng = self.rng
        await asyncio.sleep(rng.uniform(0, 1))
        prompt = prompt_of(rng.choice((1, 3, 4, 5, 16, rng.randint(1, 60))), number)
        params = replace(rng.choice((GREEDY, SEEDED)), max_tokens=rng.randint(1, 25), ignore_eos=rng.random() < 0.5)
        params = replace(params, n=rng.choice((1, 1, 2, 3)))
        patience_s = rng.uniform(0, 0.5) if rng.random() < 0.3 else 600.0
        seen: dict[int, list[int]] = {choice: [] for choice in range(params.n)}
        reasons: dict[int, FinishReason] = {}
        stream = cluster.router.generate(prompt, params, f"r{number}")
        try:
            async with asyncio.timeout(patience_s), aclosing(stream):
                async for output in stream:
                    assert output.index == len(seen[output.choice])
                    assert output.choice not in reasons
                    seen[output.choice] += output.token_ids
                    if output.finish_reason is not None:
                        reasons[output.choice] = output.finish_reason
        except TimeoutError:
            assert patience_s < 1, "a request did not end"
            for choice, tokens in seen.items():
                assert tokens == expected_tokens(prompt, params, choice)[: len(tokens)]
        else:
            for choice, tokens in seen.items():
                assert (tokens, reasons[choice]) == expected(prompt, params, choice)


@pytest.mark.parametrize("with_faults", [False, True], ids=["calm", "faults"])
@pytest.mark.parametrize("seeds", range(10))
def test_random_schedules_give_every_client_the_right_tokens_and_leak_nothing(seeds, with_faults):
    for seed in range(10 * seeds, 10 * seeds + 10):
        run(Schedule(seed, with_faults).play())
