"""The whole path, in one process on the virtual clock.

Whatever happens to the workers, the client sees the right tokens once each, or a typed error; and afterwards nothing
is reserved, in use or quarantined anywhere.
"""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from dataclasses import replace

import grpc
import pytest

from cluster.sim.loop import run, virtual_loop
from cluster.sim.rpc import Status
from tests.factories import BLOCK_SIZE, GREEDY, LEASE_S, SEEDED, prompt_of, sim_cluster, tokens_of
from tests.fake_model import EOS, expected, expected_tokens
from tests.router.simulated import LONG, PLACES, ask, tokens_until
from workers.errors import InvalidRequestError, UnavailableError
from workers.request import FinishReason, TokenOutput

LENGTHS = [1, 2, BLOCK_SIZE - 1, BLOCK_SIZE, BLOCK_SIZE + 1, 15, 16, 17, 31, 32, 33, 90]


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("params", [GREEDY, SEEDED], ids=["greedy", "seeded"])
def test_every_way_to_serve_gives_the_answers_of_a_model_without_a_cache(place, params):
    async def main() -> None:
        async with sim_cluster(*PLACES[place]) as cluster:
            for length in LENGTHS:
                assert await cluster.ask(prompt_of(length), params) == expected_tokens(prompt_of(length), params)
            together = await asyncio.gather(*(ask(cluster, length, params) for length in LENGTHS))
            assert together == [expected_tokens(prompt_of(length), params) for length in LENGTHS]
            for name, worker in cluster.workers.items():
                computed = worker.engine.num_prompt_tokens_computed
                assert (computed == 0) == (name[0] == "d")

    run(main())


@pytest.mark.parametrize("max_tokens", [1, 2, 3])
@pytest.mark.parametrize("place", PLACES)
def test_a_few_tokens_are_exactly_as_many_and_the_reason_is_right(place, max_tokens):
    async def main() -> None:
        async with sim_cluster(*PLACES[place]) as cluster:
            params = replace(GREEDY, max_tokens=max_tokens)
            outputs = await cluster.outputs(prompt_of(10), params)
            assert tokens_of(outputs) == expected_tokens(prompt_of(10), params)
            assert len(tokens_of(outputs)) == max_tokens
            assert outputs[-1].finish_reason is FinishReason.LENGTH

    run(main())


@pytest.mark.parametrize("place", PLACES)
def test_eos_and_stop_tokens_end_an_answer_at_any_index_the_handed_over_token_included(place):
    async def main() -> None:
        async with sim_cluster(*PLACES[place]) as cluster:
            prompt = prompt_of(10)
            whole = expected_tokens(prompt, GREEDY)
            cases = [replace(GREEDY, stop_token_ids=(token,)) for token in whole[:4]]
            cases += [replace(GREEDY, max_tokens=100, ignore_eos=False)]
            for params in cases:
                outputs = await cluster.outputs(prompt, params)
                assert (tokens_of(outputs), outputs[-1].finish_reason) == expected(prompt, params)
            first_is_eos = next(
                p for seed in range(2000) if expected_tokens(p := prompt_of(10, seed), GREEDY)[0] == EOS
            )
            assert await cluster.ask(first_is_eos, replace(GREEDY, ignore_eos=False)) == [EOS]

    run(main())


def test_32_requests_at_once_share_a_small_pool():
    async def main() -> None:
        async with sim_cluster(num_gpu_blocks_override=40) as cluster:
            tasks = [ask(cluster, 5 + i, replace(SEEDED, seed=i, max_tokens=10)) for i in range(32)]
            answers = await asyncio.gather(*tasks)
            for i, answer in enumerate(answers):
                assert answer == expected_tokens(prompt_of(5 + i), replace(SEEDED, seed=i, max_tokens=10))
            assert cluster.workers["d0"].engine.max_num_running > 1

    run(main())


def test_a_late_request_gets_its_second_token_while_all_others_still_decode():
    async def main() -> None:
        async with sim_cluster() as cluster:
            others = [ask(cluster, length) for length in (5, 6, 7)]
            await tokens_until(cluster, 5)
            async with aclosing(cluster.router.generate(prompt_of(9), GREEDY, "late")) as stream:
                seen: list[TokenOutput] = []
                async for output in stream:
                    seen.append(output)
                    if len(seen) == 2:
                        assert not any(task.done() for task in others)
            assert tokens_of(seen) == expected_tokens(prompt_of(9), GREEDY)
            await asyncio.gather(*others)

    run(main())


@pytest.mark.parametrize("after", [1, 2, 5, 30])
def test_a_decode_worker_killed_mid_stream_costs_no_token_and_repeats_none(after):
    async def main() -> None:
        async with sim_cluster(1, 2) as cluster:
            tasks = [ask(cluster, length, replace(SEEDED, max_tokens=60)) for length in (10, 20, 30, 40)]
            victim = await tokens_until(cluster, after)
            await cluster.kill(victim)
            answers = await asyncio.gather(*tasks)
            assert answers == [expected_tokens(prompt_of(n), replace(SEEDED, max_tokens=60)) for n in (10, 20, 30, 40)]

    run(main())


@pytest.mark.parametrize("at_s", [0.0, 0.0006, 0.002, 0.01, 0.03, 0.05, 0.1])
def test_a_prefill_worker_killed_at_any_moment_leaves_its_prompts_to_another(at_s):
    async def main() -> None:
        # A grant that a dead worker held is free when its lease ends, if no abort came before.
        async with sim_cluster(2, 1, idle_within_s=LEASE_S + 1) as cluster:
            tasks = [ask(cluster, length) for length in (50, 60, 70)]
            await asyncio.sleep(at_s)
            await cluster.kill("p0")
            assert await asyncio.gather(*tasks) == [expected_tokens(prompt_of(n), LONG) for n in (50, 60, 70)]

    run(main())


def test_the_only_decode_worker_replaced_at_its_address_takes_the_requests_up_again():
    async def main() -> None:
        async with sim_cluster(router={"max_attempts": 10}) as cluster:
            tasks = [ask(cluster, length) for length in (10, 20)]
            await tokens_until(cluster, 5)
            await cluster.kill("d0")
            await asyncio.sleep(1.0)
            await cluster.replace("d0")
            assert await asyncio.gather(*tasks) == [expected_tokens(prompt_of(n), LONG) for n in (10, 20)]

    run(main())


def test_with_no_decode_worker_left_a_prefill_worker_decodes_until_one_is_back():
    async def main() -> None:
        async with sim_cluster() as cluster:
            tasks = [ask(cluster, length) for length in (10, 20)]
            await tokens_until(cluster, 5)
            await cluster.kill("d0")
            tasks.append(ask(cluster, 30))
            assert await asyncio.gather(*tasks) == [expected_tokens(prompt_of(n), LONG) for n in (10, 20, 30)]
            assert cluster.pool.ready() == (True, "no decode worker answers: prefill workers decode")
            decode = await cluster.replace("d0")
            await asyncio.sleep(1.0)
            assert await ask(cluster, 40) == expected_tokens(prompt_of(40), LONG)
            assert decode.engine.num_output_tokens > 0

    run(main())


def test_when_all_tries_are_spent_the_error_is_typed():
    async def main() -> None:
        async with sim_cluster() as cluster:
            asking = ask(cluster, 20)
            await tokens_until(cluster, 5)
            await cluster.kill("d0")
            await cluster.kill("p0")
            with pytest.raises(UnavailableError, match="no prefill and no decode worker answers"):
                await asking

    run(main())


def test_a_router_that_is_gone_for_a_lease_costs_its_workers_nothing():
    async def main() -> None:
        async with sim_cluster(
            1, 1, 1, max_model_len=2000, num_gpu_blocks_override=600, router={"worker_wait_s": 0}
        ) as cluster:
            endless = replace(GREEDY, max_tokens=1900)
            tasks = [ask(cluster, length, endless) for length in (10, 20)]
            await tokens_until(cluster, 5)
            cluster.router_host.kill()
            results = await asyncio.gather(*tasks, return_exceptions=True)
            assert all(isinstance(error, UnavailableError) for error in results)
            decode = cluster.workers["d0"].engine
            assert len(decode.requests) == 2
            await asyncio.sleep(LEASE_S + 0.1)
            assert not decode.requests
            assert decode.num_output_tokens < 2 * 1900

    run(main())


def test_a_router_whose_stream_breaks_for_a_moment_goes_on():
    async def main() -> None:
        async with sim_cluster() as cluster:
            asking = ask(cluster, 20)
            await tokens_until(cluster, 10)
            for call in [c for c in cluster.router_host.calls if c.method.endswith("StreamOutputs")]:
                call.abandon(Status(grpc.StatusCode.UNAVAILABLE, "reset"))
            assert await asking == expected_tokens(prompt_of(20), LONG)

    run(main())


def test_a_bad_request_is_not_tried_again():
    async def main() -> None:
        async with sim_cluster() as cluster:
            began = virtual_loop().time()
            for prompt in ([], prompt_of(160)):
                with pytest.raises(InvalidRequestError):
                    await cluster.ask(prompt, GREEDY)
            assert virtual_loop().time() - began < 0.1

    run(main())


def test_a_timeline_adds_up_to_the_time_that_passed():
    async def main() -> None:
        async with sim_cluster() as cluster:
            for length in (5, 60):
                began = virtual_loop().time()
                outputs = await cluster.outputs(prompt_of(length), LONG)
                passed = virtual_loop().time() - began
                timeline = outputs[-1].timeline
                assert timeline is not None
                parts = (
                    timeline.queued_s, timeline.prefill_queued_s, timeline.prefill_s, timeline.transfer_unhidden_s,
                    timeline.decode_queued_s, timeline.decode_s,
                )  # fmt: skip
                assert all(part >= 0 for part in parts)
                # What is missing are five messages: Reserve and Prefill, both ways, and an output.
                assert passed - 5 * 0.0006 < sum(parts) < passed

    run(main())


def test_the_same_seed_gives_the_same_run():
    async def main(seed: int) -> tuple[float, list[list[tuple[str, int, int]]]]:
        async with sim_cluster(2, 2, seed=seed) as cluster:
            await asyncio.gather(*(ask(cluster, length) for length in (10, 20, 30, 40, 50)))
            steps = [step for worker in cluster.workers.values() for step in worker.engine.executor.runner.steps]  # type: ignore[attr-defined]
            return virtual_loop().time(), steps

    assert run(main(1)) == run(main(1)) != run(main(2))


def test_drafts_change_no_answer_when_the_kv_came_from_elsewhere_and_decode_dies(monkeypatch):
    monkeypatch.setattr("tests.fake_model.VOCAB_SIZE", 3)
    ngram = {"prompt_lookup_min": 1, "prompt_lookup_max": 3}

    async def main() -> None:
        async with sim_cluster(1, 2, speculative_config=ngram) as cluster:
            tasks = [ask(cluster, length, replace(SEEDED, max_tokens=60)) for length in (10, 20, 30)]
            await tokens_until(cluster, 20)
            await cluster.kill("d0")
            wanted = [expected_tokens(prompt_of(n), replace(SEEDED, max_tokens=60)) for n in (10, 20, 30)]
            assert await asyncio.gather(*tasks) == wanted
            assert cluster.workers["d1"].stats().num_accepted_tokens > 10
            assert not cluster.workers["p0"].stats().num_draft_tokens

    run(main())
