"""The output of a response as it grows: messages and calls of functions, and the typed events that tell of them."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from typing import Any, Literal

from router.openai.tool_calls import Piece
from router.openai.tool_reader import ToolReader

Event = dict[str, Any]
Status = Literal["completed", "incomplete"]


class ResponseItems:
    """Each call gives the events of what is new. An item is open until another begins, or the answer ends."""

    def __init__(self, reader: ToolReader | None) -> None:
        """`reader`: finds the calls of functions in the text; None: there are none."""
        self.items: list[dict[str, Any]] = []
        self._reader = reader
        self._open: dict[str, Any] | None = None
        # Of tokens whose text is not shown yet.
        self._logprobs: list[Any] = []

    def push(self, text: str, logprobs: list[Any], ended: bool) -> Iterator[Event]:
        self._logprobs += logprobs
        if self._reader is None:
            yield from self._text(text)
            return
        for piece, call_id in self._reader.read(text, ended):
            yield from self._text(piece.text) if piece.call is None else self._call(piece, call_id)

    def close(self, status: Status) -> Iterator[Event]:
        """The last events. An answer without a word is an empty message."""
        if not self.items:
            yield from self._begin(_message())
        yield from self._end(status)

    def _text(self, text: str) -> Iterator[Event]:
        if not text:
            return
        if self._open is None or self._open["type"] != "message":
            yield from self._begin(_message())
        part = self._item["content"][0]
        logprobs, self._logprobs = self._logprobs, []
        part["text"] += text
        part["logprobs"] += logprobs
        yield self._event("output_text.delta", content_index=0, delta=text, logprobs=logprobs)

    def _call(self, piece: Piece, call_id: str) -> Iterator[Event]:
        if piece.name is not None:
            yield from self._begin(_function_call(piece.name, call_id))
        if piece.text:
            self._item["arguments"] += piece.text
            yield self._event("function_call_arguments.delta", delta=piece.text)

    def _begin(self, item: dict[str, Any]) -> Iterator[Event]:
        yield from self._end("completed")
        self._open = item
        self.items.append(item)
        # An event tells how things stood, not how they will.
        shown = item | ({"content": []} if item["type"] == "message" else {})
        yield {"type": "response.output_item.added", "output_index": len(self.items) - 1, "item": shown}
        if item["type"] == "message":
            part = item["content"][0] | {"logprobs": []}
            yield self._event("content_part.added", content_index=0, part=part)

    def _end(self, status: Status) -> Iterator[Event]:
        if self._open is None:
            return
        item = self._item
        item["status"] = status
        if item["type"] == "message":
            part = item["content"][0]
            done = {"text": part["text"], "logprobs": part["logprobs"]}
            yield self._event("output_text.done", content_index=0, **done)
            yield self._event("content_part.done", content_index=0, part=part)
        else:
            done = {"name": item["name"], "arguments": item["arguments"]}
            yield self._event("function_call_arguments.done", **done)
        yield {"type": "response.output_item.done", "output_index": len(self.items) - 1, "item": item}
        self._open = None

    @property
    def _item(self) -> dict[str, Any]:
        assert self._open is not None
        return self._open

    def _event(self, kind: str, **fields: Any) -> Event:
        place = {"item_id": self._item["id"], "output_index": len(self.items) - 1}
        return {"type": f"response.{kind}", **place, **fields}


def _message() -> dict[str, Any]:
    part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
    return {"id": _id("msg"), "type": "message", "status": "in_progress", "role": "assistant", "content": [part]}


def _function_call(name: str, call_id: str) -> dict[str, Any]:
    head = {"id": _id("fc"), "type": "function_call", "status": "in_progress"}
    return {**head, "call_id": call_id, "name": name, "arguments": ""}


def _id(prefix: str) -> str:
    return f"{prefix}_{uuid.uuid4().hex}"
