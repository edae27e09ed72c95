"""transfer.resume: replicate. A stream goes on from the copy of its KV; with or without one its answer is the same."""

from __future__ import annotations

import asyncio
import random
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from typing import Any

import pytest

from cluster.sim.loop import run
from tests.factories import BLOCK_SIZE, GREEDY, SEEDED, SimCluster, prompt_of, runner_of, sim_cluster, tokens_of
from tests.fake_model import expected_choices, expected_tokens
from workers.request import SamplingParams

LONG = replace(GREEDY, max_tokens=60)
# A token more than a block may be missing: the one that was sampled last has no KV yet.
SHORT = 3 * BLOCK_SIZE


def replicating(
    prefill: int = 1, decode: int = 2, colocated: int = 0, resume: str = "replicate", **settings: Any
) -> AbstractAsyncContextManager[SimCluster]:
    merged: dict[str, Any] = {
        "enable_prefix_caching": True,
        "router": {"short_prefill_tokens": SHORT},
        # What was under way to a dead worker ends by its deadline.
        "idle_within_s": 12.0,
    } | settings
    merged["transfer"] = {"resume": resume} | merged.get("transfer", {})
    return sim_cluster(prefill, decode, colocated, **merged)


def ask(cluster: SimCluster, length: int, params: SamplingParams = LONG) -> asyncio.Task[list[int]]:
    return asyncio.create_task(cluster.ask(prompt_of(length), params, f"r{length}"))


async def decoding(cluster: SimCluster, num_tokens: int) -> str:
    """Wait until some answer has so many tokens; the worker it is on."""
    while True:
        for name, worker in cluster.alive().items():
            if any(r.num_output_tokens >= num_tokens for r in worker.engine.scheduler.running):
                return name
        await asyncio.sleep(0.001)


def computed(cluster: SimCluster) -> list[tuple[str, int, int]]:
    """What the steps of those alive have computed: (attempt, start, number of tokens)."""
    steps = [step for worker in cluster.alive().values() for step in runner_of(worker.engine).steps]
    return [entry for step in steps for entry in step]


def workers_of(cluster: SimCluster, attempt: str) -> set[str]:
    """Those that computed anything of the attempt whose id ends so."""
    steps = {name: runner_of(worker.engine).steps for name, worker in cluster.alive().items()}
    return {name for name in steps for step in steps[name] for entry in step if entry[0].endswith(attempt)}


def computed_again(cluster: SimCluster, num_known: int) -> int:
    """Of the only request's first `num_known` tokens, those that its second attempt computed."""
    again = [(start, start + n) for request_id, start, n in computed(cluster) if request_id.endswith(".2")]
    assert again
    return sum(max(0, min(end, num_known) - start) for start, end in again)


PLACES = {"1P2D": (1, 2, 0), "1P1D": (1, 1, 0), "2P3D": (2, 3, 0), "2C": (0, 0, 2)}


@pytest.mark.parametrize("num_tokens", [2, 5, 30, 55])
@pytest.mark.parametrize("place", PLACES)
def test_a_stream_whose_worker_dies_goes_on_from_its_copy_at_any_token(place, num_tokens):
    async def main() -> None:
        async with replicating(*PLACES[place]) as cluster:
            asking = ask(cluster, 50)
            await cluster.kill(await decoding(cluster, num_tokens))
            assert await asking == expected_tokens(prompt_of(50), LONG)
            assert computed_again(cluster, 50 + num_tokens) <= 2 * BLOCK_SIZE

    run(main())


@pytest.mark.parametrize("resume", ["recompute", "replicate"])
def test_what_is_computed_again_is_a_block_or_two_instead_of_prompt_and_answer(resume):
    async def main() -> None:
        async with replicating(1, 2, resume=resume) as cluster:
            asking = ask(cluster, 50)
            # P forgets the prompt.
            victim = await decoding(cluster, 30)
            blocks = cluster.workers["p0"].engine.block_manager
            blocks.free(blocks.allocate(blocks.num_free + blocks.num_cached))
            await cluster.kill(victim)
            assert await asking == expected_tokens(prompt_of(50), LONG)
            again = computed_again(cluster, 50 + 30)
            assert again == 50 + 30 if resume == "recompute" else 0 < again <= 2 * BLOCK_SIZE
            # Without a hand-off: P has seen the prompt once.
            prefills = cluster.workers["p0"].engine.num_prompt_tokens_computed
            assert prefills == (100 if resume == "recompute" else 50)

    run(main())


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("seed", range(3))
def test_answers_are_right_whenever_a_worker_dies_while_copies_are_under_way(place, seed):
    """Copies take as long as steps, so that some of every kind are always in flight."""

    async def main() -> None:
        rng = random.Random(f"{place} {seed}")
        async with replicating(*PLACES[place], seed=seed, copy_s=lambda num_slots: 0.004) as cluster:
            seeded = replace(SEEDED, seed=seed, max_tokens=50)
            three = replace(seeded, n=3, max_tokens=30)
            asking = [ask(cluster, length, seeded) for length in (3, 16, 33, 70)]
            choices = asyncio.create_task(cluster.choices(prompt_of(21), three, "choices"))
            await asyncio.sleep(rng.uniform(0.02, 0.35))
            await cluster.kill(rng.choice([name for name in cluster.workers if name[0] in "dc"]))
            assert await asyncio.gather(*asking) == [expected_tokens(prompt_of(n), seeded) for n in (3, 16, 33, 70)]
            assert await choices == expected_choices(prompt_of(21), three)

    run(main())


def test_every_choice_goes_on_from_its_own_copy():
    async def main() -> None:
        async with replicating() as cluster:
            three = replace(SEEDED, n=3, max_tokens=60)
            asking = asyncio.create_task(cluster.choices(prompt_of(50), three, "r"))
            await cluster.kill(await decoding(cluster, 40))
            assert await asking == expected_choices(prompt_of(50), three)
            later = [(start, n) for request_id, start, n in computed(cluster) if not request_id.endswith(".1")]
            again = [n for start, n in later if start < 50 + 40]
            assert len(again) >= 3
            assert sum(again) <= 3 * 2 * BLOCK_SIZE

    run(main())


def test_a_copy_at_a_worker_that_died_too_is_only_a_loss_of_time():
    async def main() -> None:
        async with replicating(1, 3) as cluster:
            asking = ask(cluster, 50)
            victim = await decoding(cluster, 20)
            (holder,) = (name for name in ("d0", "d1", "d2") if cluster.workers[name].stats().blocks_cached)
            assert holder != victim
            await cluster.kill(holder)
            await decoding(cluster, 30)
            await cluster.kill(victim)
            assert await asking == expected_tokens(prompt_of(50), LONG)

    run(main())


def test_a_copy_that_was_given_away_is_only_a_loss_of_time():
    async def main() -> None:
        async with replicating() as cluster:
            asking = ask(cluster, 50)
            victim = await decoding(cluster, 30)
            holder = cluster.workers["d1" if victim == "d0" else "d0"]
            blocks = holder.engine.block_manager
            blocks.free(blocks.allocate(blocks.num_free + blocks.num_cached))
            await cluster.kill(victim)
            assert await asking == expected_tokens(prompt_of(50), LONG)
            # P, which knows the prompt, computes the answer so far and hands all of it over.
            assert computed_again(cluster, 50 + 30) >= 30
            assert holder.stats().num_frames_received > 0

    run(main())


def test_streams_of_a_dead_worker_are_right_when_no_other_has_room_for_copies():
    async def main() -> None:
        async with replicating(1, 2, num_gpu_blocks_override=44, router={"max_attempts": 10}) as cluster:
            lengths = [20 + i for i in range(8)]
            asking = [ask(cluster, length) for length in lengths]
            await decoding(cluster, 30)
            refused = sum(worker.stats().num_replicas_refused for worker in cluster.workers.values())
            assert refused > 0
            await cluster.kill("d0")
            assert await asyncio.gather(*asking) == [expected_tokens(prompt_of(n), LONG) for n in lengths]

    run(main())


def test_a_stream_never_goes_on_from_the_copy_of_another_salt():
    async def main() -> None:
        async with replicating() as cluster:
            first = [o async for o in cluster.router.generate(prompt_of(50), LONG, "a", cache_salt="a")]
            assert first[-1].finish_reason
            holder = next(name for name in ("d0", "d1") if not cluster.workers[name].engine.num_output_tokens)
            cached = cluster.workers[holder].stats().blocks_cached
            assert cached > 10
            # The same prompt and answer under another salt find nothing of it anywhere.
            received = sum(cluster.workers[name].stats().kv_bytes_received for name in ("d0", "d1"))
            again = [o async for o in cluster.router.generate(prompt_of(50), LONG, "b", cache_salt="b")]
            assert tokens_of(again) == tokens_of(first) == expected_tokens(prompt_of(50), LONG)
            assert sum(cluster.workers[name].stats().kv_bytes_received for name in ("d0", "d1")) >= 1.9 * received

    run(main())


def test_once_a_decode_worker_is_back_the_prefill_worker_with_the_copy_hands_it_over():
    async def main() -> None:
        settings = {"max_attempts": 10, "short_prefill_tokens": SHORT, "retry_s": 3.0}
        async with replicating(3, 1, router=settings) as cluster:
            asking = ask(cluster, 50)
            victim = await decoding(cluster, 30)
            await cluster.kill(victim)
            await cluster.replace(victim)
            assert await asking == expected_tokens(prompt_of(50), LONG)
            assert computed_again(cluster, 50 + 30) <= 2 * BLOCK_SIZE
            assert cluster.workers[victim].stats().num_frames_received > 0

    run(main())


def test_a_stream_goes_where_its_copy_is_though_another_has_less_to_do():
    async def main() -> None:
        async with replicating(1, 3) as cluster:
            asking = [ask(cluster, length) for length in (50, 60)]
            await decoding(cluster, 20)
            # d1 has the copy of what d0 decodes, and a request of its own; d2 is idle.
            assert [len(cluster.workers[name].engine.requests) for name in ("d0", "d1", "d2")] == [1, 1, 0]
            await cluster.kill("d0")
            assert await asyncio.gather(*asking) == [expected_tokens(prompt_of(n), LONG) for n in (50, 60)]
            assert workers_of(cluster, ".3") == {"d1"}

    run(main())


def test_with_no_decode_worker_left_the_prefill_worker_with_the_copy_decodes():
    async def main() -> None:
        # A policy that does not see who has what.
        settings = {"policy": "least_loaded", "short_prefill_tokens": SHORT}
        async with replicating(3, 1, router=settings) as cluster:
            # So that the first prompt goes to another prefill worker than the next does.
            others = [ask(cluster, length) for length in (90, 91)]
            await asyncio.sleep(0.001)
            asking = ask(cluster, 50)
            await asyncio.gather(*others)
            await cluster.kill("d0")
            assert await asking == expected_tokens(prompt_of(50), LONG)
            assert workers_of(cluster, ".4") == {"p2"}
            # All but a block or two of its prompt and of what d0 had decoded was there.
            assert min(start for attempt, start, _ in computed(cluster) if attempt.endswith(".4")) > 50

    run(main())
