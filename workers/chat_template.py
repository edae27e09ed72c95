"""A chat template: messages -> the prompt text, rendered as Hugging Face renders it."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from workers.errors import ConfigError, InvalidRequestError

Message = Mapping[str, str]


class ChatTemplate:
    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        try:
            self._template = _environment().from_string(source)
        except jinja2.TemplateError as error:
            raise ConfigError(
                f"the model's chat template does not compile: {error}; mend chat_template.jinja", param="model"
            ) from error
        self._special_tokens = dict(special_tokens)

    def render(self, messages: Sequence[Message], add_generation_prompt: bool = True) -> str:
        """InvalidRequestError with the template's own reason when it refuses the messages."""
        try:
            return self._template.render(
                messages=[dict(message) for message in messages],
                tools=None,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **self._special_tokens,
            )
        except (jinja2.TemplateError, TypeError, ValueError, KeyError) as error:
            raise InvalidRequestError(
                f"messages do not fit the model's chat template: {error}", param="messages"
            ) from error


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
