"""What a decode worker lacks little of it computes itself, unless its running requests would wait too long for it."""

from __future__ import annotations

import asyncio
import math
from dataclasses import replace
from typing import Any

import pytest

from cluster.sim.loop import run
from protos.worker_pb2 import WorkerStats
from router.interference import interference
from tests.factories import BLOCK_SIZE, GREEDY, SEEDED, SimCluster, prompt_of, sim_cluster
from tests.fake_model import expected_tokens

# A decode step takes 5.1 ms here, and prefill's of some 16 tokens 0.44 ms a token: 22 of them are two decode steps.
TWO_STEPS: dict[str, Any] = {"router": {"max_interference": 2.0}, "enable_prefix_caching": True}
LONG = replace(GREEDY, max_tokens=40)
PREFIX = prompt_of(10 * BLOCK_SIZE)


def stats(decode_step_s: float = 0.0, prompt_token_s: float = 0.0) -> WorkerStats:
    return WorkerStats(decode_step_s=decode_step_s, prompt_token_s=prompt_token_s)


@pytest.mark.parametrize(
    ("decode", "prefill", "expected"),
    [
        (stats(0.02, 0.001), stats(), 0.5),
        (stats(0.02), stats(0.0, 0.001), 0.5),
        (stats(0.02, 0.001), stats(0.0, 0.004), 0.5),
        (stats(0.02), stats(), math.inf),
        (stats(0.0, 0.001), stats(), math.inf),
    ],
)
def test_interference_is_in_steps_of_the_decode_worker_as_measured_there_or_at_prefill(decode, prefill, expected):
    assert interference(10, decode, prefill) == pytest.approx(expected)


async def measured(cluster: SimCluster, prompt: list[int] = PREFIX) -> None:
    """Both sides have taken steps, and the router has heard of it."""
    await cluster.ask(prompt, LONG, "first")
    await asyncio.sleep(1.0)


def test_workers_measure_what_their_steps_take():
    async def main() -> None:
        async with sim_cluster(**TWO_STEPS) as cluster:
            assert cluster.workers["d0"].stats().decode_step_s == 0
            await measured(cluster)
            assert cluster.workers["d0"].stats().decode_step_s == pytest.approx(0.0051)
            await cluster.ask([*PREFIX, 1, 2, 3], GREEDY, "second")
            # A step with three prompt tokens instead of one of a decode: 0.2 ms more.
            assert cluster.workers["d0"].stats().prompt_token_s == pytest.approx(0.0002 / 3)

    run(main())


def computed_by(cluster: SimCluster, name: str) -> int:
    return cluster.workers[name].engine.num_prompt_tokens_computed


@pytest.mark.parametrize(("num_more", "stays"), [(1, True), (20, True), (28, False), (70, False)])
def test_a_prompt_stays_with_decode_if_little_of_it_is_missing_there(num_more, stays):
    async def main() -> None:
        async with sim_cluster(**TWO_STEPS) as cluster:
            await measured(cluster)
            before = computed_by(cluster, "p0")
            prompt = PREFIX + prompt_of(num_more)
            assert await cluster.ask(prompt) == expected_tokens(prompt, GREEDY)
            assert computed_by(cluster, "d0") == (num_more if stays else 0)
            assert (computed_by(cluster, "p0") == before) is stays

    run(main())


def test_a_second_turn_computes_only_what_is_new_where_the_answer_was_given():
    async def main() -> None:
        async with sim_cluster(2, 2, **TWO_STEPS) as cluster:
            await measured(cluster)
            answer = expected_tokens(PREFIX, LONG)
            sent = sum(worker.stats().kv_bytes_sent for worker in cluster.workers.values())
            prompt = PREFIX + answer + prompt_of(8)
            assert await cluster.ask(prompt, LONG, "second") == expected_tokens(prompt, LONG)
            assert sum(worker.stats().kv_bytes_sent for worker in cluster.workers.values()) == sent
            # The answer's last token, too, and what of it filled no block.
            assert 8 < computed_by(cluster, "d0") <= 8 + 1 + BLOCK_SIZE

    run(main())


def test_off_by_default():
    async def main() -> None:
        async with sim_cluster(enable_prefix_caching=True) as cluster:
            await measured(cluster)
            await cluster.ask([*PREFIX, 1], LONG, "second")
            assert computed_by(cluster, "d0") == 0

    run(main())


def test_what_waits_at_decode_counts_so_many_short_prompts_are_shared_out():
    async def main() -> None:
        async with sim_cluster(max_num_seqs=16, **TWO_STEPS) as cluster:
            await measured(cluster)
            before = computed_by(cluster, "p0")
            prompts = [PREFIX + prompt_of(10, seed=seed) for seed in range(8)]
            answers = await asyncio.gather(*(cluster.ask(p, GREEDY, f"r{i}") for i, p in enumerate(prompts)))
            assert answers == [expected_tokens(prompt, GREEDY) for prompt in prompts]
            assert 10 <= computed_by(cluster, "d0") < 80
            assert computed_by(cluster, "p0") > before

    run(main())


def test_a_prompt_whose_logprobs_are_wanted_is_missing_as_a_whole():
    async def main() -> None:
        async with sim_cluster(**TWO_STEPS) as cluster:
            await measured(cluster)
            outputs = await cluster.outputs([*PREFIX, 1], replace(GREEDY, prompt_logprobs=0))
            assert len(outputs[0].prompt_logprobs) == len(PREFIX)
            assert computed_by(cluster, "d0") == 0

    run(main())


@pytest.mark.parametrize("params", [GREEDY, SEEDED, replace(SEEDED, n=3)], ids=["greedy", "seeded", "n=3"])
def test_answers_are_those_of_one_worker_wherever_prompts_are_computed(params):
    async def main() -> None:
        async with sim_cluster(1, 2, max_num_seqs=16, **TWO_STEPS) as cluster:
            await measured(cluster)
            prompts = [PREFIX[: 4 * i] + prompt_of(3 * i + 1, seed=i) for i in range(10)]
            answers = await asyncio.gather(*(cluster.choices(p, params, f"r{i}") for i, p in enumerate(prompts)))
            for prompt, answer in zip(prompts, answers, strict=True):
                assert answer == {choice: expected_tokens(prompt, params, choice) for choice in range(params.n)}
            assert computed_by(cluster, "d0") + computed_by(cluster, "d1") > 0

    run(main())


def test_a_decode_worker_with_other_weights_computes_no_prompt_however_little_is_missing():
    async def main() -> None:
        async with sim_cluster(**TWO_STEPS) as cluster:
            decode = cluster.workers["d0"]
            decode.config = decode.config.model_copy(update={"quantization": "native"})
            await measured(cluster)
            for num_more in (0, 1):
                await cluster.ask(PREFIX + prompt_of(num_more), GREEDY, f"{num_more} more")
            assert computed_by(cluster, "d0") == 0

    run(main())
