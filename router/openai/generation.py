"""Answers of /completions and /chat/completions, whole or streamed, over a TextService."""

from __future__ import annotations

import functools
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any

from starlette.responses import JSONResponse, Response
from starlette.types import Send

from router.answer import TextChunk, TextRequest
from router.http.answers import EventStream, WatchedResponse, send_events
from router.merge import merge
from router.openai.logprobs import NO_LOGPROBS, LogprobsWanted, Scribe, prompt_logprobs
from router.openai.wire import DONE, Choice, CompletionShape, Extra, StreamUsage, counts, explained, usage
from router.text import TextService
from workers.request import FinishReason, TokenLogprobs
from workers.timeline import Timeline
from workers.tokenizer import Tokenizer


@dataclass
class Job:
    """One HTTP request: its prompts, and the shape of its answer. Choices are counted on from prompt to prompt."""

    requests: Sequence[TextRequest]
    shape: CompletionShape
    usage_wanted: StreamUsage = StreamUsage.NONE
    # Choices shown of each prompt: the best, where more are generated.
    num_shown: int = 1
    # What the text of each prompt's choices begins with.
    echoes: Sequence[str] = ()
    # Nothing is generated, or shown of what is.
    echo_only: bool = False
    wanted: LogprobsWanted = NO_LOGPROBS
    show_timeline: bool = False

    @property
    def num_per_prompt(self) -> int:
        """Choices generated."""
        return self.requests[0].params.n

    @property
    def num_choices(self) -> int:
        return len(self.requests) * self.num_per_prompt

    def echo(self, index: int) -> str:
        return self.echoes[index // self.num_per_prompt] if self.echoes else ""

    def scribe(self, index: int, tokenizer: Tokenizer) -> Scribe | None:
        if self.wanted.logprobs is None:
            return None
        options = self.requests[index // self.num_per_prompt].options
        return self.shape.scribe(tokenizer, self.wanted.logprobs, options.skip_special_tokens)

    def scored_echo(
        self, index: int, scribe: Scribe | None, logprobs: Sequence[TokenLogprobs]
    ) -> dict[str, Any] | None:
        """The logprobs of an echoed prompt."""
        if scribe is None or not self.echoes:
            return None
        request = self.requests[index // self.num_per_prompt]
        return scribe.echo(self.echo(index), request.prompt_token_ids, logprobs)

    def extra(self, index: int, num_tokens: int, timeline: Timeline | None = None) -> Extra:
        """What is told with one choice's piece: how much it has used so far, and at its end where the time went."""
        extra: dict[str, Any] = {}
        if self.usage_wanted is StreamUsage.EVERY:
            prompt = self.requests[index // self.num_per_prompt].prompt_token_ids
            extra["usage"] = counts(len(prompt), num_tokens)
        if self.show_timeline and timeline is not None:
            extra["kvferry"] = explained(timeline)
        return extra

    def best(self, answers: Sequence[Choice]) -> Sequence[Choice]:
        """Those that are shown."""
        num = self.num_per_prompt
        if num == self.num_shown:
            return answers
        ranked = [
            sorted(answers[start : start + num], key=lambda choice: choice.mean_logprob, reverse=True)
            for start in range(0, len(answers), num)
        ]
        return [choice for of_prompt in ranked for choice in of_prompt[: self.num_shown]]


def respond(text: TextService, job: Job, stream: bool) -> Response:
    async def whole(send: Send) -> Response:
        answers = [Choice(text=job.echo(index)) for index in range(job.num_choices)]
        async with aclosing(_chunks(text, job)) as chunks:
            async for chunk in chunks:
                answers[chunk.choice].add(chunk)
        for index, answer in enumerate(answers):
            _show_logprobs(answer, index, job, text.tokenizer)
        body = job.shape.whole(job.best(answers), usage(answers, job.num_per_prompt))
        if job.show_timeline:
            # Of several answers, of the one that took longest.
            body["kvferry"] = explained(max((one.timeline for one in answers), key=lambda timeline: timeline.total_s))
        return JSONResponse(body)

    async def streamed(send: Send) -> None:
        await send_events(send, functools.partial(_say, text, job))

    return WatchedResponse(streamed if stream else whole)


def _show_logprobs(answer: Choice, index: int, job: Job, tokenizer: Tokenizer) -> None:
    if job.wanted.prompt_logprobs is not None:
        answer.prompt_logprobs = prompt_logprobs(tokenizer, answer.prompt_scores, job.wanted.prompt_logprobs)
    scribe = job.scribe(index, tokenizer)
    if scribe is not None:
        echo, said = job.scored_echo(index, scribe, answer.prompt_scores), scribe.piece(answer.scores)
        answer.logprobs = {key: echo[key] + values for key, values in said.items()} if echo else said


async def _say(text: TextService, job: Job, stream: EventStream) -> None:
    indices = range(job.num_choices)
    pieces = [job.shape.pieces(index, job.usage_wanted) for index in indices]
    scribes = [job.scribe(index, text.tokenizer) for index in indices]
    answers = [Choice() for _ in indices]
    silent, num_running, data = set(indices), job.num_choices, b""
    async with aclosing(_chunks(text, job)) as chunks:
        async for chunk in chunks:
            index = chunk.choice
            scribe, start = scribes[index], b""
            if index in silent:
                silent.remove(index)
                echoed = job.scored_echo(index, scribe, chunk.prompt_logprobs)
                start = pieces[index].start(job.echo(index), echoed, job.extra(index, 0))
            logprobs = scribe.piece(chunk.logprobs) if scribe and chunk.logprobs else None
            extra = job.extra(index, chunk.index + len(chunk.token_ids), chunk.timeline)
            data = start + pieces[index].event(chunk.text, chunk.finish_reason, logprobs, extra)
            if chunk.finish_reason is not None:
                answers[index].add(chunk)
                num_running -= 1
                if not num_running:
                    break
            if data:
                await stream.put(data)
    # One write: each costs about as much as all else that is done for a token.
    used = b"" if job.usage_wanted is StreamUsage.NONE else job.shape.usage_event(usage(answers, job.num_per_prompt))
    await stream.put(data + used + DONE, last=True)


def _chunks(text: TextService, job: Job) -> AsyncGenerator[TextChunk, None]:
    """The choices' pieces as they come, counted on from prompt to prompt."""

    def stream(request: TextRequest) -> AsyncGenerator[TextChunk, None]:
        return _without_output(text.stream(request)) if job.echo_only else text.stream(request)

    if job.echo_only and job.wanted == NO_LOGPROBS:
        return _prompts(job)
    if len(job.requests) == 1:
        return stream(job.requests[0])
    return _merged([stream(request) for request in job.requests], job.num_per_prompt)


async def _prompts(job: Job) -> AsyncGenerator[TextChunk, None]:
    """Nothing is asked of the model."""
    for index in range(job.num_choices):
        num_prompt_tokens = len(job.requests[index // job.num_per_prompt].prompt_token_ids)
        yield TextChunk(0, (), "", FinishReason.LENGTH, num_prompt_tokens=num_prompt_tokens, choice=index)


async def _merged(
    streams: Sequence[AsyncGenerator[TextChunk, None]], num_per_prompt: int
) -> AsyncGenerator[TextChunk, None]:
    async with aclosing(merge(streams)) as merged:
        async for at, chunk in merged:
            chunk.choice += at * num_per_prompt
            yield chunk


async def _without_output(chunks: AsyncGenerator[TextChunk, None]) -> AsyncGenerator[TextChunk, None]:
    """What is known of the prompt: the one token that came with it is not shown."""
    async with aclosing(chunks):
        async for chunk in chunks:
            yield replace(
                chunk, token_ids=(), text="", finish_reason=FinishReason.LENGTH, num_completion_tokens=0, logprobs=()
            )
