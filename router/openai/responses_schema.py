"""Bodies of /v1/responses: the part of that API that needs nothing stored."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict

from router.limits import check_num_logprobs
from router.openai.logprobs import LogprobsWanted
from router.openai.messages import ChatMessage, template_messages
from router.openai.schema import NO_OPS, Body, NoOps, short, validated
from router.openai.tools import ToolUse, read_tools
from router.structured import grammar_of
from workers.chat_template import Chat
from workers.errors import InvalidRequestError
from workers.request import SamplingParams

# Answers are not kept, so that nothing can refer to one; what chats have by another name is refused, not dropped.
_NO_OPS: NoOps = NO_OPS | {
    "previous_response_id": (),
    "conversation": (),
    "background": (False,),
    "prompt": (),
    "truncation": ("disabled",),
    "reasoning": ({}, {"effort": "none"}, {"effort": None}),
    "context_management": ([],),
    "n": (1,),
    "prompt_logprobs": (),
    "max_tokens": (),
    "response_format": (),
    "messages": (),
}
_LOGPROBS = "message.output_text.logprobs"


class TextFormat(BaseModel):
    model_config = ConfigDict(strict=True, frozen=True)

    format: dict[str, Any] | None = None


class ResponseBody(Body):
    no_ops: ClassVar[NoOps] = _NO_OPS

    input: Any = None
    instructions: str | None = None
    max_output_tokens: int | None = None
    text: TextFormat | None = None
    tools: Any = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    include: list[str] | None = None
    top_logprobs: int | None = None
    metadata: dict[str, str] | None = None

    @property
    def token_limit(self) -> int | None:
        if self.max_output_tokens is not None and self.max_output_tokens < 1:
            raise InvalidRequestError("max_output_tokens must be at least 1", param="max_output_tokens")
        return self.max_output_tokens

    def wanted(self) -> LogprobsWanted:
        check_num_logprobs("top_logprobs", self.top_logprobs)
        return LogprobsWanted((self.top_logprobs or 0) if _LOGPROBS in (self.include or ()) else None)

    def sampling_params(self) -> SamplingParams:
        params = super().sampling_params()
        grammar = _grammar(self.text.format) if self.text is not None and self.text.format else ""
        return replace(params, grammar=grammar) if grammar else params

    def tool_use(self) -> ToolUse:
        return read_tools(_nested(self.tools), _nested_choice(self.tool_choice), self.parallel_tool_calls)

    def chat(self, use: ToolUse) -> Chat:
        messages = [{"role": "system", "content": self.instructions}] if self.instructions else []
        return Chat([*messages, *_messages(self.input)], use.tools)


def _grammar(form: Mapping[str, Any]) -> str:
    match form:
        case {"type": "text"}:
            return ""
        case {"type": "json_object"}:
            return grammar_of("json_object", True, "text")
        case {"type": "json_schema", "schema": dict() as schema}:
            return grammar_of("json", schema, "text")
    raise InvalidRequestError(
        'text.format must be {"type": "text"}, {"type": "json_object"} or '
        '{"type": "json_schema", "name": ..., "schema": {...}}',
        param="text",
    )


def _messages(given: Any) -> list[dict[str, Any]]:
    if isinstance(given, str) and given:
        return [{"role": "user", "content": given}]
    if not isinstance(given, list) or not given:
        raise InvalidRequestError("input must be a string or a list of items, and not empty", param="input")
    messages: list[dict[str, Any]] = []
    items = [validated(ChatMessage, _chat_message(item, f"input[{at}]"), "input") for at, item in enumerate(given)]
    for message in template_messages(items, "input"):
        if messages and message.get("tool_calls") and messages[-1]["role"] == "assistant":
            # A turn's text and calls are items of their own here, one message to templates.
            messages[-1]["tool_calls"] = [*messages[-1].get("tool_calls", ()), *message["tool_calls"]]
        else:
            messages.append(message)
    return messages


def _chat_message(item: Any, where: str) -> dict[str, Any]:
    match item:
        case {"type": "function_call", "call_id": call_id, "name": name, "arguments": arguments}:
            function = {"name": name, "arguments": arguments}
            return {"role": "assistant", "tool_calls": [{"id": call_id, "function": function}]}
        case {"type": "function_call_output", "call_id": call_id, "output": output}:
            return {"role": "tool", "tool_call_id": call_id, "content": output}
        case {"role": role, "content": content, **rest} if rest.get("type", "message") == "message":
            return {"role": role, "content": content}
        case {"type": str() as kind} if kind not in ("message", "function_call", "function_call_output"):
            raise InvalidRequestError(
                f"{where} is of type {kind[:40]!r}; supported: message, function_call, function_call_output",
                param="input",
            )
    raise InvalidRequestError(
        f"{where} must be a message, a function_call or a function_call_output; got {short(item)}", param="input"
    )


def _nested(tools: Any) -> Any:
    """As chats have them: what describes a function is in an object of its own."""
    return [_nested_tool(tool) for tool in tools] if isinstance(tools, list) else tools


def _nested_tool(tool: Any) -> Any:
    match tool:
        case {"type": "function", "name": _, **function}:
            return {"type": "function", "function": {**function, "name": tool["name"]}}
    return tool


def _nested_choice(choice: Any) -> Any:
    match choice:
        case {"type": "function", "name": name}:
            return {"type": "function", "function": {"name": name}}
        case {"type": "allowed_tools", "mode": mode, "tools": tools}:
            return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": _nested(tools)}}
    return choice
