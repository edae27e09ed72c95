"""A chat template: messages -> the prompt text, rendered as Hugging Face renders it."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2 import meta, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from workers.errors import ConfigError, InvalidRequestError
from workers.spelled_tools import spell_calls, spell_tools

# role and content; an assistant's may have tool_calls whose arguments are objects, a tool's its tool_call_id.
Message = Mapping[str, Any]
# As OpenAI describes it: {"type": "function", "function": {...}}.
Tool = Mapping[str, Any]
# What a template is given in any case.
_RESERVED = ("messages", "tools", "documents", "add_generation_prompt")
# Stands at the end of a message that is to be continued, to find that place again.
_MARK = "\ue000kvferry\ue001"


@dataclass(frozen=True, slots=True)
class Chat:
    """Messages, and what else a template may want to know."""

    messages: Sequence[Message]
    tools: Sequence[Tool] = ()
    # The answer is a message of its own; or else the last one goes on.
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    # The template's own, such as enable_thinking.
    variables: Mapping[str, Any] = field(default_factory=dict)


class ChatTemplate:
    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        self.source = source
        try:
            environment = _environment()
            self._takes_tools = "tools" in meta.find_undeclared_variables(environment.parse(source))
            self._template = environment.from_string(source)
        except jinja2.TemplateError as error:
            raise ConfigError(
                f"the model's chat template does not compile: {error}; mend chat_template.jinja", param="model"
            ) from error
        self._special_tokens = dict(special_tokens)

    def render(self, chat: Chat) -> str:
        """InvalidRequestError with the template's own reason when it refuses the messages."""
        if taken := sorted(chat.variables.keys() & {*_RESERVED, *self._special_tokens}):
            raise InvalidRequestError(
                f"chat_template_kwargs has {taken[0]}, which is not free; leave it out", param="chat_template_kwargs"
            )
        try:
            text = self._template.render(
                messages=self._messages(chat),
                tools=[dict(tool) for tool in chat.tools] if chat.tools and self._takes_tools else None,
                documents=None,
                add_generation_prompt=chat.add_generation_prompt,
                **self._special_tokens,
                **chat.variables,
            )
        except (jinja2.TemplateError, TypeError, ValueError, KeyError, RecursionError) as error:
            raise InvalidRequestError(
                f"messages do not fit the model's chat template: {error}", param="messages"
            ) from error
        return _before_mark(text) if chat.continue_final_message else text

    def _messages(self, chat: Chat) -> list[dict[str, Any]]:
        """In the words that the template knows."""
        messages = [dict(message) for message in chat.messages]
        if "developer" not in self.source:
            messages = [m | {"role": "system"} if m["role"] == "developer" else m for m in messages]
        if "tool_calls" not in self.source:
            messages = [spell_calls(message) for message in messages]
        if chat.tools and not self._takes_tools:
            messages = spell_tools(messages, chat.tools)
        if chat.continue_final_message:
            messages[-1]["content"] += _MARK
        return messages


def _before_mark(text: str) -> str:
    before, mark, _ = text.rpartition(_MARK)
    if not mark:
        raise InvalidRequestError(
            "the model's chat template does not show the last message, so that it cannot be continued; leave out "
            "continue_final_message",
            param="continue_final_message",
        )
    return before


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


class _Generation(Extension):
    """{% generation %} marks the assistant's words for training; here it is transparent."""

    def __init__(self, environment: jinja2.Environment) -> None:
        super().__init__(environment)
        self.tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_body"), [], [], body).set_lineno(line)

    def _body(self, caller: Callable[[], str]) -> str:
        return caller()


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own escapes HTML, which no model was trained on.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)
