"""Bodies of OpenAI's answers. A streamed piece costs one string join: what does not vary is rendered once."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from router.text import TextChunk
from workers.errors import KVFerryError
from workers.request import FinishReason

DONE = b"data: [DONE]\n\n"


@dataclass(slots=True)
class Choice:
    """One prompt's whole answer."""

    text: str = ""
    finish_reason: FinishReason | None = None
    num_prompt_tokens: int = 0
    num_completion_tokens: int = 0

    def add(self, chunk: TextChunk) -> None:
        self.text += chunk.text
        self.finish_reason = chunk.finish_reason
        self.num_prompt_tokens = chunk.num_prompt_tokens
        self.num_completion_tokens = chunk.num_completion_tokens


def error_body(error: KVFerryError) -> dict[str, Any]:
    return error_object(error.message, error.openai_type, error.param, error.code)


def error_object(message: str, kind: str, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def usage(choices: Sequence[Choice]) -> dict[str, int]:
    prompt = sum(choice.num_prompt_tokens for choice in choices)
    completion = sum(choice.num_completion_tokens for choice in choices)
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


def event(body: dict[str, Any]) -> bytes:
    return f"data: {json.dumps(body, separators=(',', ':'))}\n\n".encode()


class CompletionShape:
    """The JSON of one /completions answer, whole or streamed."""

    kind = stream_kind = "text_completion"

    def __init__(self, request_id: str, model: str) -> None:
        self._request_id = request_id
        self._model = model
        self._created = int(time.time())

    def whole(self, choices: Sequence[Choice]) -> dict[str, Any]:
        body = self._head(self.kind)
        body["choices"] = [self._choice(at, choice) for at, choice in enumerate(choices)]
        body["usage"] = usage(choices)
        return body

    def pieces(self, index: int, include_usage: bool) -> Pieces:
        return Pieces(
            before=self._open(index) + ',"text":',
            after=',"logprobs":null,"finish_reason":',
            end=_end(include_usage),
        )

    def usage_event(self, choices: Sequence[Choice]) -> bytes:
        return event({**self._head(self.stream_kind), "choices": [], "usage": usage(choices)})

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self._request_id, "object": kind, "created": self._created, "model": self._model}

    def _open(self, index: int) -> str:
        head = json.dumps(self._head(self.stream_kind), separators=(",", ":"))
        return f'data: {head[:-1]},"choices":[{{"index":{index}'

    def _choice(self, index: int, choice: Choice) -> dict[str, Any]:
        return {"index": index, "text": choice.text, "logprobs": None, "finish_reason": choice.finish_reason}


class ChatShape(CompletionShape):
    kind = "chat.completion"
    stream_kind = "chat.completion.chunk"

    def pieces(self, index: int, include_usage: bool) -> Pieces:
        return Pieces(
            before=self._open(index) + ',"delta":{"content":',
            after='},"logprobs":null,"finish_reason":',
            end=_end(include_usage),
            opening='"","role":"assistant"',
        )

    def _choice(self, index: int, choice: Choice) -> dict[str, Any]:
        message = {"role": "assistant", "content": choice.text, "refusal": None}
        return {"index": index, "message": message, "logprobs": None, "finish_reason": choice.finish_reason}


@dataclass(frozen=True, slots=True)
class Pieces:
    """Server-sent events of one choice."""

    before: str
    after: str
    end: str
    # Stands for the text in an event before the first; empty: there is none.
    opening: str = ""

    def start(self, echo: str) -> bytes:
        """What goes before the first token's event."""
        value = self.opening or (json.dumps(echo) if echo else "")
        return f"{self.before}{value}{self.after}null{self.end}".encode() if value else b""

    def event(self, text: str, finish_reason: FinishReason | None) -> bytes:
        reason = f'"{finish_reason.value}"' if finish_reason else "null"
        return f"{self.before}{json.dumps(text)}{self.after}{reason}{self.end}".encode()


def _end(include_usage: bool) -> str:
    return '}],"usage":null}\n\n' if include_usage else "}]}\n\n"
