"""docs/api.md says of every parameter what the code does with it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from router.openai.chat import ChatBody
from router.openai.completions import CompletionBody
from router.openai.responses_schema import ResponseBody
from router.openai.schema import Body
from tests.router.openai_calls import OPENAPI

DOC = Path(__file__).parents[2] / "docs/api.md"
BODIES: dict[str, type[Body]] = {"completions": CompletionBody, "chat": ChatBody, "responses": ResponseBody}
SCHEMAS = {"completions": "CreateCompletionRequest", "chat": "CreateChatCompletionRequest"}


def told() -> dict[str, dict[str, str]]:
    """By parameter, what the table says of each kind of body."""
    rows = re.findall(r"^\| `(\w+)` \| (\w+) \| (\w+) \| (\w+) \|", DOC.read_text(encoding="utf-8"), re.MULTILINE)
    names = [row[0] for row in rows]
    assert len(set(names)) == len(names)
    return {name: dict(zip(BODIES, states, strict=True)) for name, *states in rows}


def done(body: type[Body], name: str) -> str:
    if name in body.no_ops:
        return "refused"
    return "yes" if name in body.model_fields else "ignored"


def test_every_parameter_is_there_with_what_happens_to_it():
    known = {name for body in BODIES.values() for name in (*body.model_fields, *body.no_ops)}
    table = told()
    assert known <= table.keys(), known - table.keys()
    for name, states in table.items():
        assert states == {kind: done(body, name) for kind, body in BODIES.items()}, name


@pytest.mark.skipif(not OPENAPI.is_file(), reason=f"needs OpenAI's description at {OPENAPI}")
@pytest.mark.parametrize("kind", SCHEMAS)
def test_every_parameter_of_openai_is_there(kind: str):
    schemas: dict[str, Any] = json.loads(OPENAPI.read_text())["components"]["schemas"]

    def names(schema: dict[str, Any]) -> set[str]:
        if "$ref" in schema:
            return names(schemas[schema["$ref"].rpartition("/")[2]])
        return set(schema.get("properties", ())).union(*(names(one) for one in schema.get("allOf", ())))

    missing = names(schemas[SCHEMAS[kind]]) - told().keys()
    assert not missing
