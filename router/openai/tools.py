"""`tools` and `tool_choice`: which functions a model may call, and whether it must."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from router.openai.strict_calls import strict_calls
from router.openai.tool_syntax import CONSTRAINED, ToolSyntax
from router.structured import grammar_of
from workers.errors import InvalidRequestError

# OpenAI's.
MAX_TOOLS = 128
# Far beyond any function's, and far from where recursion ends.
MAX_SCHEMA_DEPTH = 100
_NAME = re.compile(r"[a-zA-Z0-9_.-]{1,64}")
_CHOICES = (
    '"none", "auto", "required", {"type": "function", "function": {"name": ...}} or '
    '{"type": "allowed_tools", "allowed_tools": {"mode": ..., "tools": [...]}}'
)
# Any object, for functions that describe none.
_ANY = {"type": "object", "properties": {}}


@dataclass(frozen=True, slots=True)
class ToolUse:
    """Tools that the model may call, as OpenAI describes them; none: the answer is text."""

    tools: Sequence[Mapping[str, Any]] = ()
    mode: Literal["auto", "required"] = "auto"
    # Several calls in one answer.
    parallel: bool = True

    # Names of those whose arguments must follow their schema.
    strict: frozenset[str] = frozenset()

    def grammar(self, syntax: ToolSyntax | None) -> str:
        """What holds an answer whose calls are written so: where it must be calls, and where the form of a call that it
        may make is known. Raises InvalidRequestError."""
        if syntax is None:
            return ""
        if self.mode == "required":
            return grammar_of("json", _calls_schema(self), "tools")
        return strict_calls(self.tools, self.strict) if self.strict and syntax.tagged else ""

    def syntax(self, of_model: ToolSyntax | None) -> ToolSyntax | None:
        """How the calls are written; None: there are none."""
        if not self.tools:
            return None
        if self.mode == "required":
            return replace(of_model or CONSTRAINED, parser=CONSTRAINED.parser, special=False)
        if of_model is None:
            raise InvalidRequestError(
                "the form in which this model calls tools is not known: set router.tool_call_parser, or ask with "
                'tool_choice: "required"',
                param="tool_choice",
            )
        return of_model


def read_tools(tools: Any, tool_choice: Any, parallel: bool | None) -> ToolUse:
    """Raises InvalidRequestError that names `tools` or `tool_choice`."""
    named = _by_name(tools or [])
    mode, names = _choice(tool_choice)
    if not named and (mode == "required" or names):
        raise InvalidRequestError(f"tool_choice = {tool_choice!r} needs tools; give them", param="tool_choice")
    if unknown := [name for name in names or () if name not in named]:
        raise InvalidRequestError(
            f"tool_choice names {unknown[0][:80]!r}, which is none of tools: {', '.join(named)}", param="tool_choice"
        )
    if mode == "none" or not named:
        return ToolUse()
    chosen = [named[name] for name in names] if names is not None else list(named.values())
    single = isinstance(tool_choice, dict) and tool_choice.get("type") == "function"
    strict = frozenset(tool["function"]["name"] for tool in tools or () if tool["function"].get("strict") is True)
    strict &= {tool["function"]["name"] for tool in chosen}
    return ToolUse(chosen, "required" if mode == "required" else "auto", parallel is not False and not single, strict)


def _by_name(tools: Any) -> dict[str, Mapping[str, Any]]:
    if not isinstance(tools, list) or len(tools) > MAX_TOOLS:
        raise InvalidRequestError(f"tools must be a list of at most {MAX_TOOLS}", param="tools")
    by_name: dict[str, Mapping[str, Any]] = {}
    for at, tool in enumerate(tools):
        function = _function(tool, f"tools[{at}]")
        if function["name"] in by_name:
            raise InvalidRequestError(f"tools[{at}] is a second {function['name']}; give each one name", param="tools")
        by_name[function["name"]] = {"type": "function", "function": function}
    return by_name


def _function(tool: Any, where: str) -> dict[str, Any]:
    match tool:
        case {"type": "function", "function": {"name": str() as name, **rest}} if _NAME.fullmatch(name):
            description, parameters = rest.get("description"), rest.get("parameters")
            if not isinstance(description, str | None) or not isinstance(parameters, dict | None):
                raise InvalidRequestError(
                    f"{where}: description must be a string and parameters a JSON Schema object", param="tools"
                )
            if not _is_within(parameters, MAX_SCHEMA_DEPTH):
                raise InvalidRequestError(
                    f"{where}: parameters are nested over {MAX_SCHEMA_DEPTH} deep; flatten them", param="tools"
                )
            given = {"description": description, "parameters": parameters}
            return {"name": name, **{key: value for key, value in given.items() if value is not None}}
        case {"type": str() as kind} if kind != "function":
            raise InvalidRequestError(f"{where} is of type {kind[:40]!r}; only functions are supported", param="tools")
    raise InvalidRequestError(
        f'{where} must be {{"type": "function", "function": {{"name": ..., "parameters": {{...}}}}}}, its name up to '
        "64 letters, digits, ., _ and -",
        param="tools",
    )


def _is_within(value: Any, depth: int) -> bool:
    """Whether nothing in it is nested deeper."""
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return depth >= 0 and all(_is_within(one, depth - 1) for one in inner)


def _choice(tool_choice: Any) -> tuple[str, list[str] | None]:
    """(none, auto or required, the names it is about; None: all)."""
    match tool_choice:
        case None | "auto":
            return "auto", None
        case "none" | "required":
            return tool_choice, None
        case {"type": "function", "function": {"name": str() as name}}:
            return "required", [name]
        case {
            "type": "allowed_tools",
            "allowed_tools": {"mode": "auto" | "required" as mode, "tools": [*tools]},
        }:
            return mode, [_name(tool) for tool in tools]
    raise InvalidRequestError(f"tool_choice must be {_CHOICES}", param="tool_choice")


def _name(allowed: Any) -> str:
    match allowed:
        case {"type": "function", "function": {"name": str() as name}}:
            return name
    raise InvalidRequestError(
        'tool_choice.allowed_tools.tools must each be {"type": "function", "function": {"name": ...}}',
        param="tool_choice",
    )


def _calls_schema(use: ToolUse) -> dict[str, Any]:
    """A list of calls, each to one of the tools and with its parameters."""
    return {
        "type": "array",
        "items": {"anyOf": [_call_schema(tool["function"], at) for at, tool in enumerate(use.tools)]},
        "minItems": 1,
        **({} if use.parallel else {"maxItems": 1}),
    }


def _call_schema(function: Mapping[str, Any], at: int) -> dict[str, Any]:
    place = f"#/items/anyOf/{at}/properties/parameters"
    parameters = _moved(function.get("parameters") or _ANY, place)
    return {
        "type": "object",
        "properties": {"name": {"const": function["name"]}, "parameters": parameters},
        "required": ["name", "parameters"],
        "additionalProperties": False,
    }


def _moved(schema: Any, place: str) -> Any:
    """The schema with what it refers to within itself where it is now."""
    match schema:
        case {"$ref": str() as ref} if ref.startswith("#"):
            return {key: _moved(value, place) for key, value in schema.items()} | {"$ref": place + ref[1:]}
        case dict():
            return {key: _moved(value, place) for key, value in schema.items()}
        case list():
            return [_moved(value, place) for value in schema]
    return schema
