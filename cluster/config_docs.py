"""The tables of docs/configuration.md, made of the config's own models: `make docs`."""

from __future__ import annotations

import inspect
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from cluster.config import ClusterConfig
from cluster.config_errors import models_in
from cluster.config_schema import config_schema

MARK = "<!-- The rest is made by `make docs`. -->\n"


def tables() -> str:
    """What docs/configuration.md has below MARK: every key."""
    schema = config_schema()
    return "\n".join([*_root(schema), *_groups(ClusterConfig, "", schema, {})]) + "\n"


def _root(schema: dict[str, Any]) -> Iterator[str]:
    """A table for each class that has keys of the root."""
    for model in (ClusterConfig, *ClusterConfig.__mro__[1:]):
        own = [key for key in inspect.get_annotations(model) if key in ClusterConfig.model_fields]
        if own:
            yield from ("", f"## {_summary(model).partition('.')[0]}", "")
            yield from _table({key: schema["properties"][key] for key in own}, schema)


def _groups(model: type[BaseModel], place: str, schema: dict[str, Any], seen: dict[str, None]) -> Iterator[str]:
    """A table for each group of keys below; where several keys are alike, one for all of them."""
    for key, field in model.model_fields.items():
        for group in models_in(field.annotation):
            dotted = f"{place}{key}"
            if group.__name__ in seen:
                continue
            seen[group.__name__] = None
            alike = [name for name, other in model.model_fields.items() if group in models_in(other.annotation)]
            title = ", ".join(f"`{place}{name}`" for name in alike)
            properties = schema["$defs"][group.__name__]["properties"]
            yield from ("", f"## {title}{_tag(properties)}", "", _summary(group) or field.description or "", "")
            yield from _table(properties, schema)
            yield from _groups(group, f"{dotted}.", schema, seen)


def _tag(properties: dict[str, Any]) -> str:
    """What tells a group from others at its place: the only text that must be given and has a few values."""
    must = [value for value in properties.values() if "default" not in value]
    values = must[0].get("enum") or [must[0].get("const")] if must else []
    return f": {', '.join(f'`{value}`' for value in values)}" if any(values) else ""


def _summary(model: type[BaseModel]) -> str:
    return _line(vars(model).get("__doc__") or "")


def _line(text: str) -> str:
    return " ".join(text.split())


def _table(properties: dict[str, Any], schema: dict[str, Any]) -> Iterator[str]:
    yield "| key | what it may be | default | meaning |"
    yield "| --- | --- | --- | --- |"
    for key, value in properties.items():
        default = "must be given" if "default" not in value else f"`{_shown(value['default'])}`"
        if _is_group(value):
            default = "its keys' own"
        yield f"| `{key}` | {_values(value, schema)} | {default} | {_line(value.get('description', ''))} |"


def _is_group(value: dict[str, Any]) -> bool:
    return "$ref" in value


def _shown(value: Any) -> str:
    return value if isinstance(value, str) and value else json.dumps(value)


def _values(value: dict[str, Any], schema: dict[str, Any]) -> str:
    """In words what JSON schema says."""
    if "$ref" in value:
        return "keys: see below"
    if "anyOf" in value or "oneOf" in value:
        kinds = value.get("anyOf") or value["oneOf"]
        return " or ".join(dict.fromkeys(_values(one, schema) for one in kinds))
    if "enum" in value:
        return " or ".join(f"`{one}`" for one in value["enum"])
    if "const" in value:
        return f"`{value['const']}`"
    if value.get("type") == "array":
        return f"a list ({_values(value['items'], schema)})" if "items" in value else "a list"
    if value["type"] == "object":
        return f"names with values ({_values(value['additionalProperties'], schema)})"
    return _NAMES[value["type"]] + _bounds(value)


_NAMES = {
    "integer": "whole number",
    "number": "number",
    "string": "text",
    "boolean": "`true` or `false`",
    "null": "`null`",
}
_BOUNDS = {
    "minimum": "at least {}",
    "exclusiveMinimum": "more than {}",
    "maximum": "at most {}",
    "exclusiveMaximum": "less than {}",
}


def _bounds(value: dict[str, Any]) -> str:
    bounds = [words.format(value[name]) for name, words in _BOUNDS.items() if name in value]
    return f", {' and '.join(bounds)}" if bounds else ""


if __name__ == "__main__":
    document = Path(sys.argv[1])
    prose = document.read_text(encoding="utf-8").partition(MARK)[0]
    document.write_text(prose + MARK + tables(), encoding="utf-8")
