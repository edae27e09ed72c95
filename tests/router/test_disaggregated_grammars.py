"""Law 2 for grammars: nothing crosses the wire but tokens, and the answer is the same wherever it goes on."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence

from router.structured import grammar_of
from tests.factories import by_choice
from tests.prompts import MODEL, tokenizer
from tests.router.test_disaggregated_sampling import ask_all, cluster
from workers.config import Role
from workers.errors import UnavailableError
from workers.models.resolve import resolve_model
from workers.request import FinishReason, SamplingParams

REGEXES = [r"[a-z]{1,6}( [a-z]{1,6}){2}\.", '"(yes|no)": [1-9][0-9]{2,4}', "(ab|cd){4}(ö|€)?"]


def requests() -> list[tuple[list[int], SamplingParams]]:
    prompt = tokenizer().encode("Once upon a time there were two sisters who lived in a house by the sea")
    params = [
        SamplingParams(
            temperature=temperature, seed=seed, max_tokens=60, presence_penalty=seed * 0.4, n=1 + seed // 2,
            grammar=grammar_of("regex", regex, "regex"),
        )
        for temperature, seed in ((1.0, 0), (1.3, 2))
        for regex in REGEXES
    ]  # fmt: skip
    return [(prompt, one) for one in [*params, SamplingParams(temperature=1.0, seed=3, max_tokens=12)]]


def run(roles: Sequence[Role], lose: bool = False) -> list[dict[int, list[int]]]:
    """Each request's choices; `lose`: all that the last worker is at ends there once, in the midst of an answer."""

    async def script() -> list[dict[int, list[int]]]:
        async with cluster(resolve_model(MODEL), roles) as (router, workers):
            answers, last, still = asyncio.create_task(ask_all(router, requests())), workers[roles[-1]], lose
            while still and not answers.done():
                await asyncio.sleep(0.001)
                if any(request.num_output_tokens > 3 for request in last.engine.sequences()):
                    last._fail_all(UnavailableError("lost, says the test"))
                    still = False
            assert not still, "over before anything could be lost"
            for answer, (_, params) in zip(await answers, requests(), strict=True):
                reasons = [output.finish_reason for output in answer if output.finish_reason]
                assert reasons == [FinishReason.STOP if params.grammar else FinishReason.LENGTH] * params.n
            return [by_choice(answer) for answer in answers.result()]

    return asyncio.run(script())


def test_an_answer_in_a_grammar_is_the_same_handed_over_and_resumed():
    together = run(["colocated"])
    for at, answer in enumerate(together[:-1]):
        for token_ids in answer.values():
            assert re.fullmatch(REGEXES[at % len(REGEXES)], tokenizer().decode(token_ids))
    assert run(["prefill", "decode"], lose=True) == together
