"""The OpenAI HTTP API over a TextService."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any, Protocol

from fastapi import FastAPI, Request
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.responses import JSONResponse, Response
from starlette.types import Send

from router.answer import TextChunk, TextRequest
from router.config import RouterConfig
from router.http_answers import WatchedResponse, add_error_handlers, read_json, retry_headers, send_events
from router.http_edge import add_edge
from router.limits import check_num_answers
from router.merge import merge
from router.openai_logprobs import NO_LOGPROBS, LogprobsWanted, Scribe, prompt_logprobs
from router.openai_schema import ChatBody, CompletionBody
from router.openai_wire import DONE, ChatShape, Choice, CompletionShape, usage
from router.tenants import KeyRing
from router.text import TextService
from workers.request import FinishReason, TokenLogprobs
from workers.tokenizer import Tokenizer

_DEFAULTS = RouterConfig()


class Readiness(Protocol):
    def ready(self) -> tuple[bool, str]:
        """Whether a request could be answered now, and who is missing."""


@dataclass
class _Job:
    """One HTTP request: its prompts, and the shape of its answer. Choices are counted on from prompt to prompt."""

    requests: Sequence[TextRequest]
    shape: CompletionShape
    include_usage: bool = False
    # Choices shown of each prompt: the best, where more are generated.
    num_shown: int = 1
    # What the text of each prompt's choices begins with.
    echoes: Sequence[str] = ()
    # Nothing is generated, or shown of what is.
    echo_only: bool = False
    wanted: LogprobsWanted = NO_LOGPROBS

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


def build_app(
    text: TextService, pool: Readiness, config: RouterConfig = _DEFAULTS, keys: KeyRing | None = None
) -> FastAPI:
    app = FastAPI(title="kvferry", docs_url=None, redoc_url=None, openapi_url=None, redirect_slashes=False)
    add_edge(app, config, keys)
    add_error_handlers(app)
    _add_generation(app, text)
    _add_models(app, text)
    _add_probes(app, text, pool)
    return app


def _add_generation(app: FastAPI, text: TextService) -> None:
    @app.post("/v1/completions")
    async def completions(request: Request) -> Response:
        body = CompletionBody.parse(await read_json(request))
        shape = CompletionShape(request.state.request_id, text.model_name(body.model))
        requests = await _completion_requests(text, body, request.state.request_id)
        echoes = _echoes(text, body) if body.echo else ()
        job = _Job(requests, shape, body.include_usage, body.n or 1, echoes, body.echo_only, body.wanted())
        return _respond(text, job, bool(body.stream))

    @app.post("/v1/chat/completions")
    async def chat_completions(request: Request) -> Response:
        body = ChatBody.parse(await read_json(request))
        request_id = request.state.request_id
        shape = ChatShape(request_id, text.model_name(body.model))
        chat = await text.prepared(body.prompt(), body.sampling_params(), request_id, body.options())
        job = _Job([chat], shape, body.include_usage, body.n or 1, wanted=body.wanted())
        return _respond(text, job, bool(body.stream))


def _add_models(app: FastAPI, text: TextService) -> None:
    created = int(time.time())

    def card(name: str) -> dict[str, Any]:
        limit = text.max_model_len
        return {"id": name, "object": "model", "created": created, "owned_by": "kvferry", "max_model_len": limit}

    @app.get("/v1/models")
    async def models() -> Response:
        return JSONResponse({"object": "list", "data": [card(name) for name in text.served_model_names]})

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> Response:
        return JSONResponse(card(text.model_name(name)))


def _add_probes(app: FastAPI, text: TextService, pool: Readiness) -> None:
    @app.get("/health")
    async def health() -> Response:
        return JSONResponse({"status": "ok"})

    @app.get("/ready")
    async def ready() -> Response:
        is_ready, reason = pool.ready()
        if is_ready:
            return JSONResponse({"status": "ready"} | ({"reason": reason} if reason else {}))
        return JSONResponse({"status": "not ready", "reason": reason}, 503, headers=retry_headers(503))

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(text.metrics.exposition(), media_type=CONTENT_TYPE_LATEST)


async def _completion_requests(text: TextService, body: CompletionBody, request_id: str) -> list[TextRequest]:
    """Every prompt is checked before any is started."""
    prompts, params, options = body.prompts(), body.sampling_params(), body.options()
    check_num_answers(len(prompts), params.n)
    ids = [request_id] if len(prompts) == 1 else [f"{request_id}-{at}" for at in range(len(prompts))]
    return [await text.prepared(prompt, params, one, options) for prompt, one in zip(prompts, ids, strict=True)]


def _echoes(text: TextService, body: CompletionBody) -> list[str]:
    skip = body.options().skip_special_tokens
    return [prompt if isinstance(prompt, str) else text.tokenizer.decode(prompt, skip) for prompt in body.prompts()]


def _respond(text: TextService, job: _Job, stream: bool) -> Response:
    async def whole(send: Send) -> Response:
        answers = [Choice(text=job.echo(index)) for index in range(job.num_choices)]
        async with aclosing(_chunks(text, job)) as chunks:
            async for index, chunk in chunks:
                answers[index].add(chunk)
        for index, answer in enumerate(answers):
            _show_logprobs(answer, index, job, text.tokenizer)
        return JSONResponse(job.shape.whole(job.best(answers), usage(answers, job.num_per_prompt)))

    async def streamed(send: Send) -> None:
        await send_events(send, _events(text, job))

    return WatchedResponse(streamed if stream else whole)


def _show_logprobs(answer: Choice, index: int, job: _Job, tokenizer: Tokenizer) -> None:
    if job.wanted.prompt_logprobs is not None:
        answer.prompt_logprobs = prompt_logprobs(tokenizer, answer.prompt_scores, job.wanted.prompt_logprobs)
    scribe = job.scribe(index, tokenizer)
    if scribe is not None:
        echo, said = job.scored_echo(index, scribe, answer.prompt_scores), scribe.piece(answer.scores)
        answer.logprobs = {key: echo[key] + values for key, values in said.items()} if echo else said


async def _events(text: TextService, job: _Job) -> AsyncGenerator[bytes, None]:
    indices = range(job.num_choices)
    pieces = [job.shape.pieces(index, job.include_usage) for index in indices]
    scribes = [job.scribe(index, text.tokenizer) for index in indices]
    answers = [Choice() for _ in indices]
    silent = set(indices)
    async with aclosing(_chunks(text, job)) as chunks:
        async for index, chunk in chunks:
            scribe, start = scribes[index], b""
            if index in silent:
                silent.remove(index)
                start = pieces[index].start(job.echo(index), job.scored_echo(index, scribe, chunk.prompt_logprobs))
            logprobs = scribe.piece(chunk.logprobs) if scribe and chunk.logprobs else None
            yield start + pieces[index].event(chunk.text, chunk.finish_reason, logprobs)
            if chunk.finish_reason is not None:
                answers[index].add(chunk)
    if job.include_usage:
        yield job.shape.usage_event(usage(answers, job.num_per_prompt))
    yield DONE


async def _chunks(text: TextService, job: _Job) -> AsyncGenerator[tuple[int, TextChunk], None]:
    """The choices' pieces as they come."""

    def stream(request: TextRequest) -> AsyncGenerator[TextChunk, None]:
        return _without_output(text.stream(request)) if job.echo_only else text.stream(request)

    if job.echo_only and job.wanted == NO_LOGPROBS:
        for index in range(job.num_choices):
            num_prompt_tokens = len(job.requests[index // job.num_per_prompt].prompt_token_ids)
            yield index, TextChunk(0, (), "", FinishReason.LENGTH, num_prompt_tokens=num_prompt_tokens)
    elif len(job.requests) == 1:
        async with aclosing(stream(job.requests[0])) as chunks:
            async for chunk in chunks:
                yield chunk.choice, chunk
    else:
        async with aclosing(merge([stream(request) for request in job.requests])) as merged:
            async for at, chunk in merged:
                yield at * job.num_per_prompt + chunk.choice, chunk


async def _without_output(chunks: AsyncGenerator[TextChunk, None]) -> AsyncGenerator[TextChunk, None]:
    """What is known of the prompt: the one token that came with it is not shown."""
    async with aclosing(chunks):
        async for chunk in chunks:
            yield replace(
                chunk, token_ids=(), text="", finish_reason=FinishReason.LENGTH, num_completion_tokens=0, logprobs=()
            )
