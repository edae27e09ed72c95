"""Output token 0, which prefill samples and hands over, ends an answer and counts in it as any other token does."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import replace

import pytest

from cluster.sim.loop import run
from router.answer import TextChunk, TextOptions
from router.text import TextService
from tests.factories import BLOCK_SIZE, GREEDY, SimCluster, prompt_of, sim_cluster
from tests.fake_model import EOS, VOCAB_SIZE, expected_tokens
from tests.router.scripted import smollm
from workers.request import FinishReason, SamplingParams

PLACES = {"1P1D": (1, 1, 0), "colocated": (0, 0, 1)}
PROMPT = prompt_of(10)
WHOLE = expected_tokens(PROMPT, GREEDY)
LONG = replace(GREEDY, max_tokens=60)


async def complete(
    cluster: SimCluster, prompt: Sequence[int], params: SamplingParams, stops: tuple[str, ...] = ()
) -> list[TextChunk]:
    text = TextService(cluster.router, smollm(), ["fake"], max_model_len=160, vocab_size=VOCAB_SIZE)
    async with aclosing(text.complete(list(prompt), params, "r", TextOptions(stops))) as chunks:
        return [chunk async for chunk in chunks]


def first_of(prompt: Sequence[int]) -> int:
    return expected_tokens(prompt, replace(GREEDY, max_tokens=1))[0]


# What ends an answer, as it ends one at token 1: (prompt, params, stop strings, reason).
_EOS_FIRST = next(prompt for seed in range(2000) if first_of(prompt := prompt_of(10, seed)) == EOS)
ENDS = {
    "length": (PROMPT, replace(GREEDY, max_tokens=1), (), FinishReason.LENGTH),
    "stop token": (PROMPT, replace(LONG, stop_token_ids=(WHOLE[0],)), (), FinishReason.STOP),
    "EOS": (_EOS_FIRST, replace(LONG, ignore_eos=False), (), FinishReason.STOP),
    "stop string": (PROMPT, LONG, (smollm().decode(WHOLE[:1]),), FinishReason.STOP),
}


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("place", PLACES)
def test_what_ends_an_answer_ends_it_at_token_1_too(place, end):
    prompt, params, stops, reason = ENDS[end]

    async def main() -> None:
        async with sim_cluster(*PLACES[place]) as cluster:
            chunks = await complete(cluster, prompt, params, stops)
            assert [token for chunk in chunks for token in chunk.token_ids] == [first_of(prompt)]
            assert (chunks[-1].finish_reason, chunks[-1].num_completion_tokens) == (reason, 1)
            await cluster.until_idle(0.5)
            if place == "1P1D" and not stops:
                # A stop string is the router's: until it says so, decode runs ahead.
                assert cluster.workers["d0"].engine.num_steps == 0

    run(main())


@pytest.mark.parametrize("max_tokens", [1, 2, 9])
@pytest.mark.parametrize("place", PLACES)
def test_usage_counts_token_1_and_exactly_the_prompt_tokens_that_were_not_computed(place, max_tokens):
    async def main() -> None:
        async with sim_cluster(*PLACES[place], enable_prefix_caching=True) as cluster:
            engine = next(iter(cluster.workers.values())).engine
            params = replace(GREEDY, max_tokens=max_tokens)
            for length, num_cached in ((10, 0), (10, 2 * BLOCK_SIZE), (8, BLOCK_SIZE)):
                computed = engine.num_prompt_tokens_computed
                last = (await complete(cluster, PROMPT[:length], params))[-1]
                assert (last.num_prompt_tokens, last.num_completion_tokens) == (length, max_tokens)
                assert last.num_cached_tokens == num_cached
                assert engine.num_prompt_tokens_computed - computed == length - num_cached

    run(main())
