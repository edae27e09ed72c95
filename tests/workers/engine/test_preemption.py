"""A pool that is too small for what runs: who gives way, how often, and what is left of it."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest

from cluster.sim.loop import run
from tests.factories import BLOCK_SIZE, GREEDY, make_engine, make_request, prompt_of, runner_of
from tests.fake_model import expected_tokens
from workers.engine.engine import Engine
from workers.request import Request, RequestStatus

SMALL: dict[str, Any] = {"num_gpu_blocks_override": 14, "max_model_len": 48}


async def step_and_watch(engine: Engine) -> None:
    """One step. AssertionError when a request gives way to one that came later."""
    ran = set(engine.scheduler.running)
    await engine.step()
    victims = [r for r in ran if r.status is RequestStatus.PREEMPTED]
    latest = max((r.arrival for r in engine.scheduler.running), default=0)
    assert all(latest < victim.arrival for victim in victims)


@pytest.mark.parametrize("seed", range(10))
def test_nobody_gives_way_to_a_later_arrival_and_a_cascade_ends(seed):
    rng = random.Random(seed)

    async def main() -> None:
        engine = make_engine(**SMALL)
        params = replace(GREEDY, max_tokens=30)
        requests = [make_request(prompt_of(rng.randint(1, 12), i), params, f"r{i}") for i in range(8)]
        arriving = list(requests)
        while engine.has_work or arriving:
            if arriving and (not engine.has_work or rng.random() < 0.2):
                engine.add(arriving.pop(0))
            await step_and_watch(engine)
            engine.check_integrity()
        assert [r.output_token_ids for r in requests] == [expected_tokens(r.prompt_token_ids, params) for r in requests]
        # Someone gives way only for a block that an elder's answer, or its own, grows into.
        assert 0 < engine.scheduler.num_preemptions <= sum(30 // BLOCK_SIZE + 1 for _ in requests)
        assert computed(engine, requests[0]) == requests[0].num_tokens - 1

    run(main())


def computed(engine: Engine, request: Request) -> int:
    """Tokens of the request that steps have computed, again or not."""
    return sum(n for step in runner_of(engine).steps for request_id, _, n in step if request_id == request.request_id)


def test_a_newcomer_leaves_the_block_that_each_running_request_needs_next():
    async def main() -> None:
        engine = make_engine(num_gpu_blocks_override=8, max_model_len=32)
        elders = [make_request(prompt_of(2 * BLOCK_SIZE, i), request_id=f"elder{i}") for i in range(2)]
        for request in elders:
            engine.add(request)
        await engine.step()
        # 4 of 8 blocks are taken, and the elders grow into 2 more: 2 are left.
        newcomer = make_request(3 * BLOCK_SIZE, request_id="newcomer")
        engine.add(newcomer)
        while any(r.request_id in engine.requests for r in elders):
            assert newcomer.status is RequestStatus.WAITING
            await engine.step()
        while engine.has_work:
            await engine.step()
        assert newcomer.output_token_ids == expected_tokens(newcomer.prompt_token_ids, GREEDY)
        assert engine.scheduler.num_preemptions == 0

    run(main())
