"""Bodies of OpenAI's answers. A streamed piece costs one string join: what does not vary is rendered once."""

from __future__ import annotations

import enum
import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from json.encoder import encode_basestring_ascii
from typing import Any, Protocol

from router.answer import TextChunk
from router.openai.logprobs import ChatScribe, CompletionScribe
from workers.errors import KVFerryError
from workers.request import FinishReason, TokenLogprobs
from workers.timeline import Timeline

DONE = b"data: [DONE]\n\n"
# The end of every piece.
_CLOSE = "}\n\n"


class StreamUsage(enum.Enum):
    """Where a stream tells the usage."""

    NONE = enum.auto()
    # In an event of its own, the last.
    LAST = enum.auto()
    # There, and in each piece that of its choice so far.
    EVERY = enum.auto()


Logprobs = dict[str, Any] | None
# Members of a piece beside its choice.
Extra = dict[str, Any]


@dataclass(slots=True)
class Choice:
    """One whole answer."""

    text: str = ""
    finish_reason: FinishReason | None = None
    num_prompt_tokens: int = 0
    num_completion_tokens: int = 0
    num_cached_tokens: int = 0
    scores: list[TokenLogprobs] = field(default_factory=list)
    prompt_scores: Sequence[TokenLogprobs] = ()
    # What the answer shows of them.
    logprobs: dict[str, Any] | None = None
    prompt_logprobs: list[Any] | None = None
    timeline: Timeline = field(default_factory=Timeline)

    @property
    def mean_logprob(self) -> float:
        """Of a token: what OpenAI calls the best answer has the highest."""
        return sum(one.logprob for one in self.scores) / max(len(self.scores), 1)

    def add(self, chunk: TextChunk) -> None:
        self.text += chunk.text
        self.scores += chunk.logprobs
        self.prompt_scores = self.prompt_scores or chunk.prompt_logprobs
        self.finish_reason = chunk.finish_reason
        self.num_prompt_tokens = chunk.num_prompt_tokens
        self.num_completion_tokens = chunk.num_completion_tokens
        self.num_cached_tokens = chunk.num_cached_tokens
        self.timeline = chunk.timeline or self.timeline


def error_body(error: KVFerryError) -> dict[str, Any]:
    return error_object(error.message, error.openai_type, error.param, error.code)


def error_object(message: str, kind: str, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def usage(choices: Sequence[Choice], num_per_prompt: int) -> dict[str, Any]:
    """Of all that was generated; what several choices have in common, their prompt, counts once."""
    firsts = choices[::num_per_prompt]
    prompt = sum(choice.num_prompt_tokens for choice in firsts)
    completion = sum(choice.num_completion_tokens for choice in choices)
    cached = sum(choice.num_cached_tokens for choice in firsts)
    return {**counts(prompt, completion), "prompt_tokens_details": {"cached_tokens": cached}}


def counts(prompt: int, completion: int) -> dict[str, int]:
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


def explained(timeline: Timeline) -> dict[str, Any]:
    """What an answer tells beyond OpenAI's, where asked for: seconds of each phase."""
    return {"timeline": {name: round(seconds, 6) for name, seconds in asdict(timeline).items()}}


def event(body: dict[str, Any]) -> bytes:
    return f"data: {json.dumps(body, separators=(',', ':'))}\n\n".encode()


class ChoiceEvents(Protocol):
    """Server-sent events of one choice."""

    def start(self, echo: str, logprobs: Logprobs, extra: Extra) -> bytes:
        """What goes before the first token's."""

    def event(self, text: str, finish_reason: FinishReason | None, logprobs: Logprobs, extra: Extra) -> bytes:
        """Of new text; there may be none as long as it is not sure what it is."""


class CompletionShape:
    """The JSON of one /completions answer, whole or streamed."""

    kind = stream_kind = "text_completion"
    scribe: type[CompletionScribe | ChatScribe] = CompletionScribe

    def __init__(self, request_id: str, model: str) -> None:
        self._request_id = request_id
        self._model = model
        self._created = int(time.time())

    def whole(self, choices: Sequence[Choice], used: dict[str, Any]) -> dict[str, Any]:
        body = self._head(self.kind)
        body["choices"] = [self._choice(at, choice) for at, choice in enumerate(choices)]
        body["usage"] = used
        return body

    def pieces(self, index: int, wanted: StreamUsage) -> ChoiceEvents:
        return Pieces(before=self.opening_of(index) + ',"text":', after=',"logprobs":', end=end_of(wanted))

    def usage_event(self, used: dict[str, Any]) -> bytes:
        return event({**self._head(self.stream_kind), "choices": [], "usage": used})

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self._request_id, "object": kind, "created": self._created, "model": self._model}

    def opening_of(self, index: int) -> str:
        head = json.dumps(self._head(self.stream_kind), separators=(",", ":"))
        return f'data: {head[:-1]},"choices":[{{"index":{index}'

    def _choice(self, index: int, choice: Choice) -> dict[str, Any]:
        shown = {"index": index, "text": choice.text, "logprobs": choice.logprobs}
        shown["finish_reason"] = choice.finish_reason
        return shown if choice.prompt_logprobs is None else {**shown, "prompt_logprobs": choice.prompt_logprobs}


@dataclass(frozen=True, slots=True)
class Pieces:
    """An event for each piece of text."""

    before: str
    after: str
    end: str
    # Stands for the text in an event before the first; empty: there is none.
    opening: str = ""

    def start(self, echo: str, logprobs: Logprobs, extra: Extra) -> bytes:
        value = self.opening or (json.dumps(echo) if echo or logprobs else "")
        return self.render(value, None, logprobs, extra) if value else b""

    def event(self, text: str, finish_reason: FinishReason | None, logprobs: Logprobs, extra: Extra) -> bytes:
        # What json.dumps calls in the end.
        return self.render(encode_basestring_ascii(text), finish_reason and finish_reason.value, logprobs, extra)

    def render(self, value: str, finish_reason: str | None, logprobs: Logprobs, extra: Extra) -> bytes:
        """`value`: JSON of what is new."""
        scores = json.dumps(logprobs, separators=(",", ":")) if logprobs else "null"
        reason = f'"{finish_reason}"' if finish_reason else "null"
        end = self.end
        if extra:
            end = f"{end.removesuffix(_CLOSE)},{json.dumps(extra, separators=(',', ':'))[1:-1]}{_CLOSE}"
        return f'{self.before}{value}{self.after}{scores},"finish_reason":{reason}{end}'.encode()


def end_of(wanted: StreamUsage) -> str:
    return ('}],"usage":null' if wanted is StreamUsage.LAST else "}]") + _CLOSE
