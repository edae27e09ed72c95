"""Several choices of one request over the whole path: one hand-off, and each choice exactly once whatever happens."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from dataclasses import replace

import pytest

from cluster.sim.loop import run
from cluster.sim.network import corrupt, drop, duplicate
from tests.factories import BLOCK_SIZE, GREEDY, SEEDED, prompt_of, sim_cluster
from tests.fake_model import expected_choices, expected_tokens
from tests.router.simulated import tokens_until
from workers.errors import InvalidRequestError, UnavailableError
from workers.request import FinishReason

LENGTHS = [1, BLOCK_SIZE - 1, BLOCK_SIZE, BLOCK_SIZE + 1, 15, 16, 17, 90]
THREE = replace(SEEDED, n=3)
LONG = replace(THREE, max_tokens=40)
PLACES = {"1P1D": (1, 1, 0), "2P3D": (2, 3, 0), "colocated": (0, 0, 1)}


@pytest.mark.parametrize("caching", [False, True])
@pytest.mark.parametrize("place", PLACES)
def test_every_way_to_serve_gives_each_choice_as_if_it_were_alone(place, caching):
    async def main() -> None:
        async with sim_cluster(*PLACES[place], enable_prefix_caching=caching) as cluster:
            for length in LENGTHS:
                assert await cluster.choices(prompt_of(length), THREE) == expected_choices(prompt_of(length), THREE)
            asked = [cluster.choices(prompt_of(n), replace(THREE, n=n % 3 + 1), f"r{n}") for n in LENGTHS]
            wanted = [expected_choices(prompt_of(n), replace(THREE, n=n % 3 + 1)) for n in LENGTHS]
            assert await asyncio.gather(*asked) == wanted
            for name, worker in cluster.workers.items():
                assert (worker.engine.num_prompt_tokens_computed == 0) == (name[0] == "d")

    run(main())


def test_c3_all_samples_of_one_request_share_one_hand_off_and_all_end():
    """A known failure of such systems: the samples of n > 1 share one transfer's id, and the request never ends."""

    async def main() -> None:
        async with sim_cluster() as cluster:
            async with asyncio.timeout(1.0):
                assert await cluster.choices(prompt_of(37), THREE) == expected_choices(prompt_of(37), THREE)
            prefill, decode = cluster.workers["p0"], cluster.workers["d0"]
            assert prefill.engine.num_prompt_tokens_computed == 37
            # Its KV went over once, not once for each of them.
            assert decode.stats().kv_bytes_received == 37 * decode.layout.token_bytes
            assert decode.engine.num_output_tokens == 3 * 7

    run(main())


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("max_tokens", [1, 2])
def test_a_choice_that_token_1_ends_is_not_handed_over(place, max_tokens):
    async def main() -> None:
        async with sim_cluster(*PLACES[place]) as cluster:
            firsts = [tokens[0] for tokens in expected_choices(prompt_of(10), THREE).values()]
            for stops in ((), (firsts[0],), (firsts[2],), tuple(firsts)):
                params = replace(THREE, stop_token_ids=stops, max_tokens=max_tokens)
                assert await cluster.choices(prompt_of(10), params) == expected_choices(prompt_of(10), params)
            if max_tokens == 1:
                assert all(worker.engine.num_steps == 0 for name, worker in cluster.workers.items() if name[0] == "d")

    run(main())


@pytest.mark.parametrize("name", ["decode", "p0"])
@pytest.mark.parametrize("count", [1, 5, 30])
def test_a_worker_that_dies_mid_stream_costs_no_choice_a_token_or_gives_it_twice(name, count):
    async def main() -> None:
        async with sim_cluster(2, 2) as cluster:
            asking = asyncio.create_task(cluster.choices(prompt_of(20), LONG))
            busy = await tokens_until(cluster, count)
            await cluster.kill(busy if name == "decode" else name)
            assert await asking == expected_choices(prompt_of(20), LONG)

    run(main())


def test_a_choice_that_has_ended_is_not_asked_for_again():
    async def main() -> None:
        # One that stops early, while the others go on.
        prompt, early = prompt_of(20), expected_choices(prompt_of(20), LONG)[1][5]
        params = replace(LONG, stop_token_ids=(early,))
        wanted = expected_choices(prompt, params)
        assert [len(tokens) < 10 for tokens in wanted.values()] == [False, True, False]
        async with sim_cluster(1, 2) as cluster:
            asking = asyncio.create_task(cluster.choices(prompt, params))
            busy = await tokens_until(cluster, 20)
            await cluster.kill(busy)
            assert await asking == wanted
            (other,) = (worker for name, worker in cluster.alive().items() if name[0] == "d")
            assert other.engine.num_output_tokens < 2 * 20

    run(main())


@pytest.mark.parametrize("method", ["Put", "Commit", "Prefill"])
def test_a_hand_off_that_fails_is_tried_again_from_what_each_choice_has(method):
    async def main() -> None:
        async with sim_cluster(
            1,
            2,
            router={"rpc_timeout_s": 2.0, "token_timeout_s": 8.0},
            idle_within_s=20.0,
            transfer={"rpc_timeout_s": 2.0},
        ) as cluster:
            cluster.network.fault(method, corrupt(-1) if method == "Put" else drop, count=1)
            assert await cluster.choices(prompt_of(30), LONG) == expected_choices(prompt_of(30), LONG)

    run(main())


@pytest.mark.parametrize("place", PLACES)
def test_outputs_sent_twice_reach_the_client_once(place):
    async def main() -> None:
        async with sim_cluster(*PLACES[place]) as cluster:
            cluster.network.fault("StreamOutputs", duplicate, answers=True)
            # Choices that end at different steps.
            stop = expected_choices(prompt_of(20), LONG)[1][5]
            params = replace(LONG, stop_token_ids=(stop,))
            assert await cluster.choices(prompt_of(20), params) == expected_choices(prompt_of(20), params)

    run(main())


@pytest.mark.parametrize("place", PLACES)
def test_a_step_that_fails_ends_every_choice_and_each_is_taken_up_again(place):
    async def main() -> None:
        async with sim_cluster(*PLACES[place]) as cluster:
            asking = asyncio.create_task(cluster.choices(prompt_of(20), LONG))
            await asyncio.sleep(0.05)
            (busy,) = (worker for worker in cluster.workers.values() if len([*worker.engine.sequences()]) == 3)
            busy._fail_all(UnavailableError("a step failed, says the test"))
            assert not busy.engine.requests
            assert await asking == expected_choices(prompt_of(20), LONG)

    run(main())


def test_when_all_tries_are_spent_the_error_is_typed_and_ends_every_choice():
    async def main() -> None:
        async with sim_cluster(router={"worker_wait_s": 0.1}) as cluster:
            asking = asyncio.create_task(cluster.choices(prompt_of(20), LONG))
            await tokens_until(cluster, 5)
            await cluster.kill("d0")
            await cluster.kill("p0")
            with pytest.raises(UnavailableError, match="no prefill and no decode worker answers"):
                await asking

    run(main())


@pytest.mark.parametrize("count", [1, 2, 10, 61])
@pytest.mark.parametrize("place", PLACES)
def test_closing_the_stream_at_any_token_aborts_every_choice(place, count):
    async def main() -> None:
        async with sim_cluster(*PLACES[place]) as cluster:
            async with aclosing(cluster.router.generate(prompt_of(20), LONG, "r")) as stream:
                for _ in range(count):
                    await anext(stream)
            await asyncio.sleep(0.05)
            assert cluster.busy() == {}

    run(main())


@pytest.mark.parametrize("place", PLACES)
def test_choices_that_preempt_each_other_are_all_answered(place):
    async def main() -> None:
        async with sim_cluster(*PLACES[place], num_gpu_blocks_override=40) as cluster:
            params = replace(THREE, n=6, max_tokens=60)
            assert await cluster.choices(prompt_of(30), params) == expected_choices(prompt_of(30), params)
            assert any(worker.engine.scheduler.num_preemptions for worker in cluster.workers.values())

    run(main())


@pytest.mark.parametrize("place", ["1P1D", "colocated"])
def test_each_choice_ends_with_a_timeline_of_its_own(place):
    async def main() -> None:
        async with sim_cluster(*PLACES[place]) as cluster:
            began = asyncio.get_running_loop().time()
            seen = set()
            async with aclosing(cluster.router.generate(prompt_of(30), THREE, "r")) as stream:
                async for output in stream:
                    if output.finish_reason is None:
                        continue
                    passed = asyncio.get_running_loop().time() - began
                    assert output.finish_reason is FinishReason.LENGTH
                    assert output.timeline is not None
                    known = output.timeline.prefill_s + output.timeline.decode_s
                    assert 0.5 * passed < known < passed
                    seen.add(output.choice)
            assert seen == {0, 1, 2}

    run(main())


@pytest.mark.parametrize("place", ["1P1D", "colocated"])
@pytest.mark.parametrize(
    ("n", "length", "message"),
    [
        (9, 10, r"n is 9.*max_num_seqs \(8\)"),
        (8, 130, "8 choices after 130 tokens need 40 KV blocks.* has 39; lower n"),
    ],
)
def test_more_choices_than_can_ever_fit_are_refused_at_once_with_the_numbers(place, n, length, message):
    async def main() -> None:
        async with sim_cluster(*PLACES[place], num_gpu_blocks_override=39, max_model_len=156) as cluster:
            with pytest.raises(InvalidRequestError, match=message) as caught:
                await cluster.choices(prompt_of(length), replace(GREEDY, n=n))
            assert caught.value.param == "n"
            # One less would do.
            params = replace(GREEDY, n=n - 1, max_tokens=2)
            found = await cluster.choices(prompt_of(length), params)
            assert found == dict.fromkeys(range(n - 1), expected_tokens(prompt_of(length), params))

    run(main())
