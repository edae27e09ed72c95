"""How a model writes calls of tools: as configured, or as its chat template shows."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from dataclasses import dataclass

from router.config import ToolCallParserName
from router.openai.tool_calls import JsonCalls, PythonicCalls, ToolCallParser


@dataclass(frozen=True, slots=True)
class ToolSyntax:
    parser: Callable[[], ToolCallParser]
    # Its marks are special tokens, which an answer's text leaves out unless asked for them.
    special: bool = False
    # Calls stand between OPENER and CLOSER, as Hermes models write them.
    tagged: bool = False
    # Of a call's id.
    prefix: str = "call_"
    num_chars: int = 24

    def new_id(self) -> str:
        return self.prefix + uuid.uuid4().hex[: self.num_chars]


# Of answers that a grammar makes a list of calls.
CONSTRAINED = ToolSyntax(lambda: JsonCalls(bare=True))
OPENER, CLOSER = "<tool_call>", "</tool_call>"
_HERMES = ToolSyntax(lambda: JsonCalls(OPENER, CLOSER), tagged=True)
_BY_NAME: dict[ToolCallParserName, ToolSyntax] = {
    "hermes": _HERMES,
    "llama3_json": ToolSyntax(lambda: JsonCalls("<|python_tag|>", bare=True), special=True),
    # Its templates refuse ids of any other length.
    "mistral": ToolSyntax(lambda: JsonCalls("[TOOL_CALLS]", named=True), special=True, prefix="", num_chars=9),
    "pythonic": ToolSyntax(PythonicCalls),
}
# What a template has that shows a model its form of calls.
_SIGNS: dict[str, ToolCallParserName] = {
    OPENER: "hermes",
    "[TOOL_CALLS]": "mistral",
    "[func_name1(": "pythonic",
    '"parameters": dictionary of argument name': "llama3_json",
    "<|python_tag|>": "llama3_json",
}


def tool_syntax(name: ToolCallParserName, chat_template: str | None) -> ToolSyntax | None:
    """None: the model takes tools, but in a form that is not known. A template that takes none gets them spelled out as
    Hermes does (workers/spelled_tools.py)."""
    if name != "auto":
        return _BY_NAME[name]
    template = chat_template or ""
    sign = next((sign for sign in _SIGNS if sign in template), None)
    if sign is not None:
        return _BY_NAME[_SIGNS[sign]]
    return None if "tools" in template else _HERMES
