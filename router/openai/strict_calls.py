"""A grammar that lets a model say what it likes until it begins a call, and holds this to its function's schema."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from router.openai.tool_syntax import CLOSER, OPENER
from router.structured import JSON_DEFAULTS, grammar_of

# Of functions whose arguments may be any.
_ANY = {"type": "object"}


def strict_calls(tools: Sequence[Mapping[str, Any]], strict: Collection[str]) -> str:
    """Calls stand in the text as Hermes models write them. Arguments are held to the parameters of functions whose
    names are in `strict`. Raises InvalidRequestError."""
    functions = [tool["function"] for tool in tools]
    calls, end = " | ".join(f"call_{at}" for at in range(len(functions))), _quoted("}\n" + CLOSER)
    # Once the lazy rule's mark is there, it is the beginning of a call and no text.
    rules = [
        "%llguidance {}",
        "start: call* TEXT",
        f"call: open ({calls}) {end}",
        f"open[lazy]: TEXT {_quoted(OPENER)}",
        "TEXT: /(.|\\n)*/",
    ]
    for at, function in enumerate(functions):
        begin = f'\n{{"name": {_quoted(function["name"])}, "arguments": '
        schema = function.get("parameters") or _ANY if function["name"] in strict else _ANY
        rules.append(f"call_{at}: {_quoted(begin)} %json {json.dumps(_written_as_json_dumps_does(schema))}")
    return grammar_of("grammar", "\n".join(rules) + "\n", "tools")


def _written_as_json_dumps_does(schema: Mapping[str, Any]) -> dict[str, Any]:
    own = schema.get("x-guidance", {})
    return {**schema, "x-guidance": {**JSON_DEFAULTS, "lenient": False, **own} if isinstance(own, dict) else own}


def _quoted(text: str) -> str:
    return json.dumps(text)
