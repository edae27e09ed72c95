"""A long text is tokenised beside the loop: other requests go on meanwhile."""

from __future__ import annotations

import asyncio

import pytest

from router.text import Prompt
from tests.router.scripted import ScriptedRouter, smollm, text_service
from workers.chat_template import Chat
from workers.errors import InvalidRequestError
from workers.request import SamplingParams

LONG = "The quick brown fox jumps over the lazy dog. " * 3000
PARAMS = SamplingParams(max_tokens=1)


CHAT = Chat([{"role": "user", "content": LONG}])


@pytest.mark.parametrize("prompt", [LONG, CHAT], ids=["text", "chat"])
def test_the_loop_turns_while_a_long_text_is_tokenised_and_the_ids_are_the_same(prompt: Prompt):
    async def main() -> None:
        text = text_service(ScriptedRouter([]), max_model_len=100_000)
        preparing = asyncio.create_task(text.prepared(prompt, PARAMS, "r"))
        num_turns = 0
        while not preparing.done():
            await asyncio.sleep(0.001)
            num_turns += 1
        assert num_turns > 3
        assert preparing.result().prompt_token_ids == text.token_ids(prompt)
        assert text.token_ids(LONG) == smollm().encode(LONG)

    asyncio.run(main())


def test_what_is_wrong_with_a_long_text_is_said_as_of_a_short_one():
    async def main() -> None:
        for max_model_len in (64, 10_000):
            text = text_service(ScriptedRouter([]), max_model_len)
            with pytest.raises(
                InvalidRequestError, match=f"maximum context length is {max_model_len} tokens"
            ) as caught:
                await text.prepared(LONG, PARAMS, "r")
            assert (caught.value.param, caught.value.code) == ("prompt", "context_length_exceeded")
        text = text_service(ScriptedRouter([]), 100_000)
        with pytest.raises(InvalidRequestError, match="lone surrogate"):
            await text.prepared(LONG + "\ud800", PARAMS, "r")

    asyncio.run(main())
