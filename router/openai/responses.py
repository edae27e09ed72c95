"""/v1/responses: input items in, output items out, whole or as typed events. Nothing is stored."""

from __future__ import annotations

import functools
import json
import time
from collections.abc import AsyncGenerator, Iterable
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from fastapi import FastAPI, Request
from starlette.responses import JSONResponse, Response
from starlette.types import Send

from router.answer import TextChunk, TextRequest
from router.http.answers import EventStream, WatchedResponse, read_json, send_events, wants_timeline
from router.openai.chat import with_calls, with_marks
from router.openai.logprobs import ChatScribe
from router.openai.response_items import Event, ResponseItems, Status
from router.openai.responses_schema import ResponseBody
from router.openai.tool_reader import ToolReader
from router.openai.tool_syntax import ToolSyntax
from router.openai.wire import explained
from router.text import TextService
from workers.errors import KVFerryError
from workers.request import FinishReason


def add_response_routes(app: FastAPI, text: TextService, of_model: ToolSyntax | None) -> None:
    """`of_model`: how it writes calls of functions."""

    async def responses(request: Request) -> Response:
        body = ResponseBody.parse(await read_json(request))
        answer = await _answer(text, body, request.state.request_id, of_model)
        answer.show_timeline = wants_timeline(request)

        async def whole(send: Send) -> Response:
            async with aclosing(_events(text, answer)) as events:
                async for _ in events:
                    pass
            return JSONResponse(answer.response())

        async def streamed(send: Send) -> None:
            await send_events(send, functools.partial(_say, text, answer))

        return WatchedResponse(streamed if body.stream else whole)

    # Past FastAPI: there is nothing that it could read for us.
    app.add_route("/v1/responses", responses, methods=["POST"])

    @app.post("/v1/responses/input_tokens")
    async def input_tokens(request: Request) -> Response:
        body = ResponseBody.parse(await read_json(request))
        text.model_name(body.model)
        token_ids = await text.tokenised(body.chat(body.tool_use()))
        return JSONResponse({"object": "response.input_tokens", "input_tokens": len(token_ids)})


async def _answer(text: TextService, body: ResponseBody, request_id: str, of_model: ToolSyntax | None) -> _Answer:
    use = body.tool_use()
    syntax = use.syntax(of_model)
    options = with_marks(body.options(), syntax)
    params = with_calls(body.sampling_params(), use, syntax)
    request = await text.prepared(body.chat(use), params, request_id, options)
    reader = ToolReader(syntax, use.parallel) if syntax is not None else None
    return _Answer(body, text.model_name(body.model), request, ResponseItems(reader))


@dataclass
class _Answer:
    """One response, as far as it is known."""

    body: ResponseBody
    model: str
    request: TextRequest
    output: ResponseItems
    status: str = "in_progress"
    error: dict[str, str] | None = None
    last: TextChunk | None = None
    show_timeline: bool = False
    created: int = field(default_factory=lambda: int(time.time()))

    def response(self) -> dict[str, Any]:
        cut = self.status == "incomplete"
        params, body = self.request.params, self.body
        timeline = self.last.timeline if self.last is not None and self.show_timeline else None
        return {
            "id": self.request.request_id,
            "object": "response",
            "created_at": self.created,
            "status": self.status,
            "error": self.error,
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "model": self.model,
            "output": list(self.output.items),
            "usage": _usage(self.last) if self.last is not None else None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata or {},
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": None,
            "background": False,
            "store": False,
            "temperature": params.temperature,
            "top_p": params.top_p,
            "top_logprobs": body.top_logprobs or 0,
            "text": {"format": body.text.format if body.text and body.text.format else {"type": "text"}},
            "tool_choice": body.tool_choice or "auto",
            "tools": [{"strict": False, "parameters": None, **tool} for tool in body.tools or []],
            "truncation": "disabled",
            **({"kvferry": explained(timeline)} if timeline is not None else {}),
        }


async def _say(text: TextService, answer: _Answer, stream: EventStream) -> None:
    """A failure after the first token is the last event."""
    number = 0
    try:
        async with aclosing(_events(text, answer)) as events:
            async for some in events:
                await stream.put(b"".join(_line(event, number + at) for at, event in enumerate(some)))
                number += len(some)
    except KVFerryError as error:
        if not number:
            raise
        answer.status, answer.error = "failed", {"code": "server_error", "message": error.message}
        await stream.put(_line({"type": "response.failed", "response": answer.response()}, number))


async def _events(text: TextService, answer: _Answer) -> AsyncGenerator[list[Event], None]:
    wanted = answer.body.wanted().logprobs
    scribe = None if wanted is None else ChatScribe(text.tokenizer, wanted, skip_special_tokens=True)
    begun = False
    async with aclosing(text.stream(answer.request)) as chunks:
        async for chunk in chunks:
            events: list[Event] = []
            if not begun:
                # Before the first token a failure is still an HTTP error.
                kinds = ("response.created", "response.in_progress")
                events, begun = [{"type": kind, "response": answer.response()} for kind in kinds], True
            logprobs = scribe.piece(chunk.logprobs)["content"] if scribe else []
            events += answer.output.push(chunk.text, logprobs, chunk.finish_reason is not None)
            if chunk.finish_reason is not None:
                events += _ending(answer, chunk)
            yield events


def _ending(answer: _Answer, chunk: TextChunk) -> Iterable[Event]:
    status: Status = "incomplete" if chunk.finish_reason is FinishReason.LENGTH else "completed"
    yield from answer.output.close(status)
    answer.status, answer.last = status, chunk
    yield {"type": f"response.{status}", "response": answer.response()}


def _line(event: Event, number: int) -> bytes:
    data = json.dumps({**event, "sequence_number": number}, separators=(",", ":"))
    return f"event: {event['type']}\ndata: {data}\n\n".encode()


def _usage(last: TextChunk) -> dict[str, Any]:
    return {
        "input_tokens": last.num_prompt_tokens,
        "input_tokens_details": {"cached_tokens": last.num_cached_tokens, "cache_write_tokens": 0},
        "output_tokens": last.num_completion_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": last.num_prompt_tokens + last.num_completion_tokens,
    }
