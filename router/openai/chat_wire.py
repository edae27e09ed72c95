"""Bodies of /chat/completions answers: messages, and calls of tools in them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from router.openai.logprobs import ChatScribe
from router.openai.tool_calls import Piece
from router.openai.tool_reader import ToolReader
from router.openai.tool_syntax import ToolSyntax
from router.openai.wire import Choice, ChoiceEvents, CompletionShape, Extra, Logprobs, Pieces, StreamUsage, end_of
from workers.request import FinishReason


class ChatShape(CompletionShape):
    kind = "chat.completion"
    stream_kind = "chat.completion.chunk"
    scribe = ChatScribe

    def __init__(self, request_id: str, model: str, syntax: ToolSyntax | None = None, parallel: bool = True) -> None:
        """`syntax`: how calls of tools are written; None: there are none."""
        super().__init__(request_id, model)
        self._syntax = syntax
        self._parallel = parallel

    def whole(self, choices: Sequence[Choice], used: dict[str, Any]) -> dict[str, Any]:
        body = super().whole(choices, used)
        scores = choices[0].prompt_logprobs
        return body if scores is None else {**body, "prompt_logprobs": scores}

    def pieces(self, index: int, wanted: StreamUsage) -> ChoiceEvents:
        if self._syntax is None:
            return Pieces(
                before=self.opening_of(index) + ',"delta":{"content":',
                after='},"logprobs":',
                end=end_of(wanted),
                opening='"","role":"assistant"',
            )
        pieces = Pieces(before=self.opening_of(index) + ',"delta":', after=',"logprobs":', end=end_of(wanted))
        return ToolPieces(pieces, ToolReader(self._syntax, self._parallel))

    def _choice(self, index: int, choice: Choice) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": choice.text, "refusal": None}
        reason: str | None = choice.finish_reason
        if self._syntax is not None:
            reader = ToolReader(self._syntax, self._parallel)
            calls = collect(reader, choice.text)
            if calls.tool_calls:
                message |= {"content": calls.text or None, "tool_calls": calls.tool_calls}
            reason = reader.reason(choice.finish_reason)
        return {"index": index, "message": message, "logprobs": choice.logprobs, "finish_reason": reason}


@dataclass(slots=True)
class Calls:
    """A whole answer: its text, and its calls in OpenAI's shape."""

    text: str
    tool_calls: list[dict[str, Any]]


def collect(reader: ToolReader, text: str) -> Calls:
    answer = Calls("", [])
    for piece, call_id in reader.read(text, ended=True):
        if piece.call is None:
            answer.text += piece.text
        elif piece.name is not None:
            answer.tool_calls.append(_call(piece, call_id))
        else:
            answer.tool_calls[-1]["function"]["arguments"] += piece.text
    return answer


class ToolPieces:
    """An event for each piece of text or of a call."""

    def __init__(self, pieces: Pieces, reader: ToolReader) -> None:
        self._pieces = pieces
        self._reader = reader

    def start(self, echo: str, logprobs: Logprobs, extra: Extra) -> bytes:
        return self._pieces.render('{"role":"assistant","content":""}', None, logprobs, extra)

    def event(self, text: str, finish_reason: FinishReason | None, logprobs: Logprobs, extra: Extra) -> bytes:
        deltas = [_delta(*one) for one in self._reader.read(text, finish_reason is not None)]
        if not deltas and (finish_reason or logprobs):
            deltas = [{}]
        reason = self._reader.reason(finish_reason)
        events = b""
        for at, delta in enumerate(deltas, start=1):
            is_last = at == len(deltas)
            scores = logprobs if at == 1 else None
            events += self._pieces.render(json.dumps(delta), reason if is_last else None, scores, extra)
        return events


def _delta(piece: Piece, call_id: str) -> dict[str, Any]:
    if piece.call is None:
        return {"content": piece.text}
    call = _call(piece, call_id) if piece.name is not None else {"function": {"arguments": piece.text}}
    return {"tool_calls": [{"index": piece.call, **call}]}


def _call(piece: Piece, call_id: str) -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": piece.name, "arguments": piece.text}}
