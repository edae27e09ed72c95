"""/v1/completions: prompts in, text out."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar, Self

from fastapi import FastAPI, Request
from starlette.responses import Response

from router.answer import TextRequest
from router.http.answers import read_json, wants_timeline
from router.limits import check_best_of, check_num_answers
from router.openai.generation import Job, respond
from router.openai.logprobs import LogprobsWanted
from router.openai.schema import NO_OPS, Body, NoOps, short
from router.openai.wire import CompletionShape
from router.text import TextService
from workers.errors import InvalidRequestError
from workers.request import SamplingParams


def add_completion_routes(app: FastAPI, text: TextService) -> None:
    async def completions(request: Request) -> Response:
        body = CompletionBody.parse(await read_json(request))
        shape = CompletionShape(request.state.request_id, text.model_name(body.model))
        requests = await _requests(text, body, request.state.request_id)
        job = Job(
            requests,
            shape,
            body.usage_wanted,
            num_shown=body.n or 1,
            echoes=_echoes(text, body) if body.echo else (),
            echo_only=body.echo_only,
            wanted=body.wanted(),
            show_timeline=wants_timeline(request),
        )
        return respond(text, job, bool(body.stream))

    # Past FastAPI: there is nothing that it could read for us.
    app.add_route("/v1/completions", completions, methods=["POST"])


class CompletionBody(Body):
    # OpenAI's, for /completions only.
    default_max_tokens: ClassVar[int | None] = 16
    no_ops: ClassVar[NoOps] = NO_OPS | {"tools": ([],), "tool_choice": ("none", "auto")}

    prompt: Any = None
    echo: bool | None = None
    logprobs: int | None = None
    # Answers to generate, of which the n best are shown.
    best_of: int | None = None

    @classmethod
    def parse(cls, body: dict[str, Any]) -> Self:
        parsed = super().parse(body)
        if parsed.best_of is not None:
            check_best_of(parsed.best_of, parsed.n or 1, bool(parsed.stream))
        return parsed

    @property
    def echo_only(self) -> bool:
        return bool(self.echo) and self.max_tokens == 0

    @property
    def token_limit(self) -> int | None:
        # The prompt is still checked like any other's.
        return 1 if self.echo_only else self.max_tokens

    def wanted(self) -> LogprobsWanted:
        return LogprobsWanted(self.logprobs, self.prompt_logprobs)

    def sampling_params(self) -> SamplingParams:
        params = super().sampling_params()
        if self.best_of is not None and self.best_of > params.n:
            params = replace(params, n=self.best_of, logprobs=params.logprobs or 0)
        if not self.echo or self.logprobs is None:
            return params
        # What is echoed has logprobs too.
        return replace(params, prompt_logprobs=max(self.logprobs, self.prompt_logprobs or 0))

    def prompts(self) -> list[str | list[int]]:
        """Each has choices of its own."""
        match self.prompt:
            case str() as text:
                return [text]
            case [first, *_] as items if _is_token_id(first):
                return [_token_ids(items, "prompt")]
            case [str(), *_] | [list(), *_] as items:
                return [_prompt(item, at) for at, item in enumerate(items)]
        raise InvalidRequestError(
            "prompt must be a string, a list of strings, a list of token ids or a list of such lists, and not empty; "
            f"got {short(self.prompt)}",
            param="prompt",
        )


async def _requests(text: TextService, body: CompletionBody, request_id: str) -> list[TextRequest]:
    """Every prompt is checked before any is charged or started."""
    prompts, params, options = body.prompts(), body.sampling_params(), body.options()
    check_num_answers(len(prompts), params.n)
    ids = [request_id] if len(prompts) == 1 else [f"{request_id}-{at}" for at in range(len(prompts))]
    requests = [
        await text.prepared(prompt, params, one, options, charge=False)
        for prompt, one in zip(prompts, ids, strict=True)
    ]
    text.charge(requests)
    return requests


def _echoes(text: TextService, body: CompletionBody) -> list[str]:
    skip = body.options().skip_special_tokens
    return [prompt if isinstance(prompt, str) else text.tokenizer.decode(prompt, skip) for prompt in body.prompts()]


def _is_token_id(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _token_ids(items: list[Any], where: str) -> list[int]:
    for at, item in enumerate(items):
        if not _is_token_id(item):
            raise InvalidRequestError(f"{where}[{at}] must be a token id; got {short(item)}", param="prompt")
    return items


def _prompt(item: Any, at: int) -> str | list[int]:
    if isinstance(item, str):
        return item
    if isinstance(item, list):
        return _token_ids(item, f"prompt[{at}]")
    raise InvalidRequestError(
        f"prompt[{at}] must be a string or a list of token ids; got {short(item)}", param="prompt"
    )
