"""`messages` of a chat, as chat templates know them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from pydantic import BaseModel, ConfigDict

from router.openai.schema import short
from workers.errors import InvalidRequestError

# Parts of a message that are text, by type and the key that has it.
_TEXTS = {"text": "text", "refusal": "refusal", "input_text": "text", "output_text": "text"}


class ChatMessage(BaseModel):
    model_config = ConfigDict(strict=True, frozen=True)

    role: str
    content: Any = None
    name: str | None = None
    # An assistant's.
    tool_calls: list[Any] | None = None
    refusal: str | None = None
    # A tool's: which call it answers.
    tool_call_id: str | None = None


def template_messages(messages: Sequence[ChatMessage], param: str = "messages") -> list[dict[str, Any]]:
    """Raises InvalidRequestError that names the message; `param` is where they stand."""
    if not messages:
        raise InvalidRequestError(f"{param} is empty; give at least one message", param=param)
    return [_message(message, param, f"{param}[{at}]") for at, message in enumerate(messages)]


def text_of(content: Any, where: str, param: str) -> str:
    """Parts of text are joined by line ends."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list) or not content:
        raise InvalidRequestError(
            f'{where} must be a string or a list of {{"type": "text", "text": ...}}; got {short(content)}', param=param
        )
    return "\n".join(_part(part, f"{where}[{at}]", param) for at, part in enumerate(content))


def _part(part: Any, where: str, param: str) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    if isinstance(kind, str) and kind not in _TEXTS:
        raise InvalidRequestError(f"{where} is a part of type {short(kind)}; only text is supported", param=param)
    text = part.get(_TEXTS[kind]) if isinstance(kind, str) else None
    if not isinstance(text, str):
        raise InvalidRequestError(f'{where} must be {{"type": "text", "text": ...}}; got {short(part)}', param=param)
    return text


def _message(message: ChatMessage, param: str, where: str) -> dict[str, Any]:
    is_assistant = message.role == "assistant"
    if (message.tool_calls and not is_assistant) or (message.tool_call_id is not None and message.role != "tool"):
        key = "tool_call_id" if message.tool_call_id is not None else "tool_calls"
        raise InvalidRequestError(f"{where}.{key} is not for the role {message.role[:40]!r}", param=param)
    if message.role == "tool" and message.tool_call_id is None:
        raise InvalidRequestError(f"{where}.tool_call_id is missing; name the call that it answers", param=param)
    content = message.content if message.content is not None else message.refusal
    has_no_text = content is None and bool(message.tool_calls)
    shown: dict[str, Any] = {
        "role": message.role,
        "content": "" if has_no_text else text_of(content, f"{where}.content", param),
    }
    if message.tool_calls:
        shown["tool_calls"] = [
            _call(call, param, f"{where}.tool_calls[{at}]") for at, call in enumerate(message.tool_calls)
        ]
    if message.tool_call_id is not None:
        shown["tool_call_id"] = message.tool_call_id
    return shown if message.name is None else shown | {"name": message.name}


def _call(call: Any, param: str, where: str) -> dict[str, Any]:
    """Its arguments as an object, which is what templates want."""
    match call:
        case {"id": str() as call_id, "function": {"name": str() as name, "arguments": str() as arguments}}:
            try:
                value = json.loads(arguments or "{}")
            except (ValueError, RecursionError) as error:
                raise InvalidRequestError(
                    f"{where}.function.arguments is not valid JSON: {error}", param=param
                ) from None
            return {"id": call_id, "type": "function", "function": {"name": name, "arguments": value}}
        case {"type": "custom"}:
            raise InvalidRequestError(f"{where} is of type 'custom'; only functions are supported", param=param)
    raise InvalidRequestError(
        f'{where} must be {{"id": ..., "type": "function", "function": {{"name": ..., "arguments": "..."}}}}',
        param=param,
    )
