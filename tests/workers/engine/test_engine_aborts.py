"""Ends of requests in every state: blocks are free at once, but not under a step or a reader."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from cluster.sim.loop import run
from tests.factories import GREEDY, make_engine, make_request, prompt_of, run_engine
from tests.fake_model import expected_tokens
from workers.engine.engine import Engine
from workers.request import FinishReason, Request, RequestStatus


async def _reach(engine: Engine, state: str) -> Request:
    """A request of id r in `state`, with the engine between two steps."""
    request = make_request(12, replace(GREEDY, max_tokens=20))
    if state == "waiting":
        engine.add(request)
    elif state == "waiting_for_kv":
        engine.reserve(request, engine.block_manager.num_blocks)
    elif state == "handed_over":
        engine.reserve(request, engine.block_manager.num_blocks)
        engine.commit(request, {0: 5})
    elif state == "mid_prompt":
        # An older long prompt leaves it only a part of the step.
        engine.add(make_request(60, request_id="elder"))
        engine.add(request)
        await engine.step()
        assert 0 < request.num_computed_tokens < 12
    elif state == "preempted":
        engine.add(make_request(8, replace(GREEDY, max_tokens=40), "elder"))
        engine.add(request)
        while request.status is not RequestStatus.PREEMPTED:
            await engine.step()
    else:
        engine.add(request)
        await engine.step()
    return request


@pytest.mark.parametrize("state", ["waiting", "waiting_for_kv", "handed_over", "mid_prompt", "preempted", "decoding"])
def test_an_abort_between_steps_frees_everything_at_once(state):
    async def main() -> None:
        small: dict[str, Any] = {"num_gpu_blocks_override": 9, "max_model_len": 36} if state == "preempted" else {}
        engine = make_engine(**small)
        request = await _reach(engine, state)
        assert engine.abort("r")
        assert (request.status, request.finish_reason, request.block_table) == (
            RequestStatus.FINISHED, FinishReason.ABORTED, [],
        )  # fmt: skip
        engine.check_integrity()
        assert not engine.abort("r")
        for elder in list(engine.requests):
            engine.abort(elder)
        assert engine.block_manager.num_free == engine.block_manager.num_blocks

    run(main())


@pytest.mark.parametrize("state", ["waiting", "handed_over", "mid_prompt", "decoding"])
def test_blocks_of_a_request_aborted_during_a_step_are_given_away_only_when_it_is_over(state):
    async def main() -> None:
        engine = make_engine()
        request = await _reach(engine, state)
        # A step that admits it, or goes on with it, is under way when it is aborted.
        step = asyncio.create_task(engine.step())
        await asyncio.sleep(0.001)
        blocks, free = list(request.block_table), engine.block_manager.num_free
        assert blocks
        engine.abort("r")
        assert (request.block_table, engine.block_manager.num_free) == (blocks, free)
        engine.check_integrity()
        # Its successor of the same id takes other blocks, and is not taken for it.
        successor = make_request(prompt_of(10, seed=1))
        engine.add(successor)
        assert "r" not in [output.request_id for output in await step]
        assert (request.block_table, successor.num_output_tokens) == ([], 0)
        assert engine.block_manager.num_free == free + len(blocks)
        await run_engine(engine)
        assert successor.output_token_ids == expected_tokens(prompt_of(10, seed=1), GREEDY)

    run(main())


@pytest.mark.parametrize("when", ["before", "during", "after"])
def test_a_held_request_keeps_its_blocks_until_it_is_released_and_no_step_writes_to_them(when):
    async def main() -> None:
        engine = make_engine()
        request = make_request(9, hold_blocks=True)
        engine.add(request)
        await engine.step()
        assert len(engine.blocks_in_use()) == 3
        if when == "after":
            engine.abort("r")
        else:
            step = asyncio.create_task(engine.step())
            await asyncio.sleep(0.001)
            engine.abort("r")
            if when == "before":
                engine.release(request)
                assert len(engine.blocks_in_use()) == 3
            await step
        if when != "before":
            assert len(engine.blocks_in_use()) == 3
            engine.check_integrity()
            engine.release(request)
        engine.check_integrity()
        assert len(engine.blocks_in_use()) == 0
        engine.release(request)

    run(main())
