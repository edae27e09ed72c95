"""The ways of old give the same tokens at another cost."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest

from cluster.sim.loop import run
from tests.factories import BLOCK_SIZE, GREEDY, SEEDED, make_engine, make_request, prompt_of, run_engine, runner_of
from tests.fake_model import expected_tokens
from workers.engine.baselines import ContiguousKV, NoKVCache, StaticBatching
from workers.engine.engine import Engine
from workers.engine.scheduler import MakeScheduler, Scheduler
from workers.request import Request

MAX_MODEL_LEN = 40
BASELINES: list[MakeScheduler] = [NoKVCache, partial(ContiguousKV, max_model_len=MAX_MODEL_LEN), StaticBatching]
NAMES = ["no cache", "contiguous", "static"]


def requests_of(*sizes: tuple[int, int]) -> list[Request]:
    """By (tokens of the prompt, tokens of the answer)."""
    return [
        make_request(prompt_of(prompt, i), replace((GREEDY, SEEDED)[i % 2], max_tokens=answer), f"r{i}")
        for i, (prompt, answer) in enumerate(sizes)
    ]


def answer(engine: Engine, requests: list[Request]) -> None:
    """All of them to their ends; AssertionError unless the tokens are right."""

    async def main() -> None:
        for request in requests:
            engine.add(request)
        await run_engine(engine)

    run(main())
    for request in requests:
        assert request.output_token_ids == expected_tokens(request.prompt_token_ids, request.params)
    assert engine.block_manager.num_free + engine.block_manager.num_cached == engine.block_manager.num_blocks


def who_ran(engine: Engine) -> list[set[str]]:
    return [{request_id for request_id, _, _ in step} for step in runner_of(engine).steps]


@pytest.mark.parametrize("enable_prefix_caching", [False, True])
@pytest.mark.parametrize("num_blocks", [16, 64])
@pytest.mark.parametrize("baseline", BASELINES, ids=NAMES)
def test_tokens_are_the_same(baseline, num_blocks, enable_prefix_caching):
    """Prompts longer than a step, more requests than places, a pool that makes some of them wait or start again."""
    sizes = [(1, 9), (3, 20), (4, 4), (15, 1), (17, 12), (20, 20), (5, 20), (31, 9), (2, 2), (12, 20)]
    requests = [*requests_of(*sizes), make_request(prompt_of(20, 5), replace(GREEDY, max_tokens=3), "like r5")]
    settings = {"max_model_len": MAX_MODEL_LEN, "enable_prefix_caching": enable_prefix_caching, "max_num_seqs": 4}
    engine = make_engine(make_scheduler=baseline, num_gpu_blocks_override=num_blocks, **settings)
    answer(engine, requests)


def test_without_a_cache_each_token_costs_all_before_it():
    engine = make_engine(make_scheduler=NoKVCache)
    answer(engine, requests_of((5, 4)))
    assert runner_of(engine).steps == [[("r0", 0, n)] for n in (5, 6, 7, 8)]


def test_without_a_cache_a_pass_longer_than_a_step_goes_on_in_the_next():
    engine = make_engine(make_scheduler=NoKVCache, max_num_batched_tokens=16)
    answer(engine, requests_of((16, 3)))
    # A step takes half for the oldest first and then what is left: the whole 16.
    assert runner_of(engine).steps == [
        [("r0", 0, 16)], [("r0", 0, 16)], [("r0", 16, 1)], [("r0", 0, 16)], [("r0", 16, 2)],
    ]  # fmt: skip


def test_contiguous_requests_take_the_longest_that_they_may_become_and_wait_for_it():
    engine = make_engine(make_scheduler=BASELINES[1], num_gpu_blocks_override=2 * MAX_MODEL_LEN // BLOCK_SIZE)
    answer(engine, requests_of(*[(2, 5)] * 5))
    assert max(map(len, who_ran(engine))) == 2
    assert engine.scheduler.num_preemptions == 0
    paged = make_engine(num_gpu_blocks_override=2 * MAX_MODEL_LEN // BLOCK_SIZE)
    answer(paged, requests_of(*[(2, 5)] * 5))
    assert max(map(len, who_ran(paged))) == 5


def test_a_static_batch_lets_nobody_in_before_its_last_is_done():
    sizes = [(2, 2), (2, 9), (2, 3), (2, 3)]
    engine = make_engine(make_scheduler=StaticBatching, max_num_seqs=2)
    answer(engine, requests_of(*sizes))
    assert who_ran(engine) == [{"r0", "r1"}] * 2 + [{"r1"}] * 7 + [{"r2", "r3"}] * 3
    continuous = make_engine(make_scheduler=Scheduler, max_num_seqs=2)
    answer(continuous, requests_of(*sizes))
    assert continuous.num_steps == 9
