"""What a client gets, and what it should get."""

from __future__ import annotations

from contextlib import aclosing
from dataclasses import replace

from router.router import Router
from tests.factories import prompt_of
from tests.fake_model import expected_samples, expected_tokens
from tests.schedules.schedule import Ask
from workers.request import FinishReason, SamplingParams, TokenLogprobs, TokenOutput


class Answer:
    """So far."""

    def __init__(self, ask: Ask) -> None:
        self.prompt = prompt_of(60, ask.prompt)[: ask.num_prompt_tokens]
        self.params = params_of(ask, self.prompt)
        self.seen: dict[int, list[int]] = {choice: [] for choice in range(ask.n)}
        self.logprobs: dict[int, list[TokenLogprobs]] = {choice: [] for choice in range(ask.n)}
        self.prompt_logprobs: dict[int, int] = {}
        self.reasons: dict[int, FinishReason] = {}

    async def read(self, router: Router, request_id: str) -> None:
        async with aclosing(router.generate(self.prompt, self.params, request_id)) as stream:
            async for output in stream:
                self._take(output)

    def _take(self, output: TokenOutput) -> None:
        tokens = self.seen[output.choice]
        assert output.choice not in self.reasons, f"choice {output.choice} goes on after its end"
        assert output.index == len(tokens), f"token {len(tokens)} of choice {output.choice} is next, {output} came"
        if output.index == 0 and output.token_ids:
            self.prompt_logprobs[output.choice] = len(output.prompt_logprobs)
        tokens += output.token_ids
        self.logprobs[output.choice] += output.logprobs
        if output.finish_reason is not None:
            self.reasons[output.choice] = output.finish_reason

    def require_a_beginning(self) -> None:
        for choice, tokens in self.seen.items():
            assert tokens == expected_tokens(self.prompt, self.params, choice)[: len(tokens)]

    def require_whole(self) -> None:
        wanted_prompt_logprobs = len(self.prompt) - 1 if self.params.prompt_logprobs is not None else 0
        for choice, tokens in self.seen.items():
            samples, reason = expected_samples(self.prompt, self.params, choice)
            assert (tokens, self.reasons[choice]) == ([one.token_id for one in samples], reason)
            assert self.logprobs[choice] == [one.logprobs for one in samples if one.logprobs is not None]
            assert self.prompt_logprobs[choice] == wanted_prompt_logprobs


def params_of(ask: Ask, prompt: list[int]) -> SamplingParams:
    params = SamplingParams(
        temperature=0.0 if ask.seed is None else 1.0,
        seed=ask.seed,
        max_tokens=ask.max_tokens,
        ignore_eos=ask.ignore_eos,
        n=ask.n,
        logprobs=0 if ask.logprobs else None,
        prompt_logprobs=0 if ask.prompt_logprobs else None,
    )
    if ask.stop_at is None:
        return params
    return replace(params, stop_token_ids=tuple(expected_tokens(prompt, params)[ask.stop_at :][:1]))
