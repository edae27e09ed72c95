"""What the clients can ask for reaches the router's workers, and what these answer comes back; over real gRPC."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from cluster.client import AsyncClient, Completion
from tests.router.scripted import ScriptedRouter, scores_of, smollm, words
from tests.router.serving import serving
from workers.errors import InvalidRequestError
from workers.request import FinishReason, SamplingParams


def ask(router: ScriptedRouter, prompt: Any = "Hi", **options: Any) -> Completion:
    async def run() -> Completion:
        async with serving(router) as server, AsyncClient(f"127.0.0.1:{server.grpc_port}") as client:
            return await client.generate(prompt, **options)

    return asyncio.run(run())


def test_every_parameter_reaches_the_workers():
    sampling = {
        "max_tokens": 9,
        "temperature": 0.5,
        "top_p": 0.25,
        "top_k": 3,
        "seed": 11,
        "ignore_eos": True,
        "min_p": 0.125,
        "repetition_penalty": 1.5,
        "presence_penalty": -1.0,
        "frequency_penalty": 0.75,
        "min_tokens": 2,
        "logprobs": 4,
        "prompt_logprobs": 0,
        "n": 2,
    }
    router = ScriptedRouter(words(" one two"))
    ask(router, **sampling, stop_token_ids=[7], logit_bias={9: -1.5, 8: 100}, cache_salt="mine")
    [(_, params, _)] = router.calls
    bias = ((8, 100.0), (9, -1.5))
    assert params == SamplingParams(**sampling, stop_token_ids=(7,), logit_bias=bias)  # type: ignore[arg-type]
    assert router.salts == ["mine"]
    ask(router, logit_bias=None, min_p=None, logprobs=None)
    assert router.calls[1][1].logprobs is router.calls[1][1].prompt_logprobs is None


def test_one_answer_is_itself_and_several_are_all_there_beside_the_first():
    router = ScriptedRouter(words(" one two"), others=[words(" three")])
    one = ask(router)
    assert (one.text, one.choices) == (" one two", ())
    both = ask(router, n=2)
    assert (both.text, [choice.text for choice in both.choices]) == (" one two", [" one two", " three"])
    assert [choice.usage.num_completion_tokens for choice in both.choices] == [2, 1]
    assert [choice.usage.num_prompt_tokens for choice in both.choices] == [1, 1]
    with pytest.raises(InvalidRequestError, match="n is 129; it must be 1 to 128"):
        ask(router, n=129)


def test_logprobs_and_cached_tokens_come_back():
    router = ScriptedRouter(words(" one two"), num_cached_tokens=2)
    completion = ask(router, [5, 6, 7], logprobs=3, prompt_logprobs=1)
    for scores, ids, num_top in (
        (completion.logprobs, completion.token_ids, 3),
        (completion.prompt_logprobs, (6, 7), 1),
    ):
        for one, token_id in zip(scores, ids, strict=True):
            want = scores_of(token_id, num_top)
            assert (one.token_id, one.rank, one.top_token_ids) == (token_id, 2, want.top_token_ids)
            assert (one.logprob, *one.top_logprobs) == pytest.approx((want.logprob, *want.top_logprobs), rel=1e-6)
    assert completion.usage.num_cached_tokens == 2
    plain = ask(ScriptedRouter(words("x")))
    assert (plain.logprobs, plain.prompt_logprobs, plain.usage.num_cached_tokens) == ((), (), 0)


def test_stop_strings_and_special_tokens():
    said = [*words(" one two three"), *words("never")]
    for stop in ("two", ["x", "two"]):
        completion = ask(ScriptedRouter(said), stop=stop)
        assert (completion.text, completion.finish_reason) == (" one ", FinishReason.STOP)
        assert ask(ScriptedRouter(said), stop=stop, include_stop_str_in_output=True).text == " one two"
    special = ScriptedRouter([smollm().encode("<|im_start|>user")])
    assert ask(special).text == "user"
    assert ask(special, skip_special_tokens=False).text == "<|im_start|>user"


@pytest.mark.parametrize(
    ("options", "param"),
    [({"logprobs": 21}, "logprobs"), ({"min_tokens": 5, "max_tokens": 4}, "min_tokens"), ({"stop": [""]}, "stop")],
)
def test_refusals_name_the_parameter(options: dict[str, Any], param: str):
    router = ScriptedRouter(words("never"))
    with pytest.raises(InvalidRequestError) as caught:
        ask(router, **options)
    assert caught.value.param == param
    assert not router.calls
