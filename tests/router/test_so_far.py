"""An answer that goes on after tokens which its client has from another router: text, logprobs and usage fit on."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import aclosing

import pytest

from router.answer import TextChunk, TextOptions
from tests.router.scripted import ScriptedRouter, smollm, text_service, words
from workers.errors import InvalidRequestError
from workers.request import FinishReason, SamplingParams

# Characters of several tokens, and the beginnings of a stop string that does not come to its end.
SAID = " one 🤗🤗 two STOP it, STO STOPP é ẞ!"
PARAMS = SamplingParams(max_tokens=60, seed=5, logprobs=2, prompt_logprobs=0)
OPTIONS = [
    TextOptions(),
    TextOptions(stops=(" it, STO S", "STOPP e")),
    TextOptions(stops=("STOPP é", "never"), include_stop_str_in_output=True),
    TextOptions(stops=("🤗 t",)),
]


def chunks_of(
    said: Sequence[Sequence[int]],
    params: SamplingParams,
    options: TextOptions,
    so_far: Mapping[int, Sequence[int]] = {},
) -> list[TextChunk]:
    async def main() -> list[TextChunk]:
        text = text_service(ScriptedRouter(said), max_model_len=99)
        asked = TextOptions(options.stops, options.include_stop_str_in_output, so_far=so_far)
        async with aclosing(text.complete("Once upon", params, "r1", asked)) as chunks:
            return [chunk async for chunk in chunks]

    return asyncio.run(main())


@pytest.mark.parametrize("options", OPTIONS, ids=["no stop", "across", "shown", "half a character"])
def test_an_answer_cut_at_any_token_goes_on_as_if_it_had_not_been(options):
    whole = chunks_of(words(SAID), PARAMS, options)
    assert [chunk.index for chunk in whole] == list(range(len(whole)))
    assert whole[-1].finish_reason is (FinishReason.STOP if options.stops else FinishReason.LENGTH)
    for cut in range(1, len(whole)):
        held = [token_id for chunk in whole[:cut] for token_id in chunk.token_ids]
        rest = chunks_of(words(SAID), PARAMS, options, {0: held})
        assert [(c.index, c.token_ids, c.text, c.finish_reason) for c in rest] == [
            (c.index, c.token_ids, c.text, c.finish_reason) for c in whole[cut:]
        ]
        assert [c.logprobs for c in rest] == [c.logprobs for c in whole[cut:]]
        assert not any(c.prompt_logprobs for c in rest)
        assert rest[-1].num_completion_tokens == whole[-1].num_completion_tokens
        assert rest[-1].num_prompt_tokens == whole[-1].num_prompt_tokens


def test_the_seed_in_effect_comes_with_each_choices_first_token():
    for seed, wanted in ((5, 5), (-1, 2**64 - 1)):
        chunks = chunks_of(words(" a b"), SamplingParams(n=2, seed=seed), TextOptions())
        assert [(c.choice, c.seed) for c in chunks] == [(0, wanted), (1, wanted), (0, None), (1, None)]
    unseeded = [chunks_of(words(" a"), SamplingParams(), TextOptions())[0].seed for _ in range(2)]
    assert unseeded[0] == unseeded[1] is not None


def test_a_choice_that_the_client_saw_end_is_not_asked_for_again():
    said = words(" one two three")
    chunks = chunks_of(said, SamplingParams(n=3, seed=1), TextOptions(), {0: said[0] + said[1], 2: []})
    assert [(c.choice, c.index) for c in chunks] == [(2, 0), (2, 1), (0, 2), (2, 2)]
    assert [c.num_completion_tokens for c in chunks if c.finish_reason] == [3, 3]


@pytest.mark.parametrize(
    ("so_far", "seed", "param", "says"),
    [
        ({2: [5]}, 1, "output_token_ids", "of choices 0 to 1"),
        ({0: [5, 49152]}, 1, "output_token_ids", "has 49152"),
        ({0: [5, 5, 5, 5]}, 1, "output_token_ids", "4 tokens of choice 0; it must be fewer than max_tokens"),
        ({1: smollm().encode(" STOP")}, 1, "output_token_ids", "hold a stop string"),
        ({0: [5]}, None, "seed", "need the seed"),
    ],
)
def test_tokens_that_no_answer_can_have_are_refused(so_far, seed, param, says):
    params = SamplingParams(max_tokens=4, n=2, seed=seed)
    with pytest.raises(InvalidRequestError, match=says) as caught:
        chunks_of(words(" never"), params, TextOptions(stops=("STOP",)), so_far)
    assert caught.value.param == param
