"""What is wrong with a config file, in one line: file, key, what it must be, and the mend."""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from typing import Any, get_args

import yaml
from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from workers.errors import ConfigError


def refuse_unknown_keys(
    data: dict[str, Any], model: type[BaseModel], source: str, root: type[BaseModel], place: tuple[str, ...] = ()
) -> None:
    """Raise ConfigError for a key that `model`, found at `place` below `root`, does not know, naming the nearest."""
    for key, value in data.items():
        if key not in model.model_fields:
            dotted = ".".join((*place, str(key)))
            raise ConfigError(
                f"{source}: {dotted}: unknown key; {_nearest(str(key), model, root, place)}", param=dotted
            )
        inner = _group(model.model_fields[key])
        if inner and isinstance(value, dict):
            refuse_unknown_keys(value, inner, source, root, (*place, key))


def _nearest(key: str, model: type[BaseModel], root: type[BaseModel], place: tuple[str, ...]) -> str:
    """The nearest key of the same group, else the nearest of any group."""
    here = difflib.get_close_matches(key, model.model_fields, n=1, cutoff=0.7)
    if here:
        return f"did you mean {'.'.join((*place, here[0]))}?"
    known = _dotted_keys(root, ())
    last_parts = {dotted.rsplit(".", 1)[-1]: dotted for dotted in reversed(known)}
    # Within a group, what is meant lies farther only if it is very like.
    anywhere = difflib.get_close_matches(key, last_parts, n=1, cutoff=0.75 if place else 0.5)
    if anywhere:
        return f"did you mean {last_parts[anywhere[0]]}?"
    return f"known keys here: {', '.join(model.model_fields)}"


def _group(field: FieldInfo) -> type[BaseModel] | None:
    """The keys below a key, also where null may stand for all of them."""
    kinds = get_args(field.annotation) or (field.annotation,)
    return next((kind for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseModel)), None)


def _models_in(annotation: Any) -> Iterator[type[BaseModel]]:
    """All that a key's value, or its list's items, may be."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for inner in get_args(annotation):
        yield from _models_in(inner)


def _dotted_keys(model: type[BaseModel], place: tuple[str, ...]) -> list[str]:
    keys = []
    for name, field in model.model_fields.items():
        keys.append(".".join((*place, name)))
        for inner in _models_in(field.annotation):
            keys += _dotted_keys(inner, (*place, name))
    return keys


def yaml_problem(exc: yaml.YAMLError) -> str:
    if isinstance(exc, yaml.MarkedYAMLError) and exc.problem_mark:
        return f"line {exc.problem_mark.line + 1}, column {exc.problem_mark.column + 1}: {exc.problem}"
    return " ".join(str(exc).split())


def first_problem(exc: ValidationError, source: str, root: type[BaseModel]) -> ConfigError:
    """One line of pydantic's first error; the branches of a union are not part of a key's place."""
    errors = exc.errors(include_url=False)
    error = max((e for e in errors if e["loc"][:1] == errors[0]["loc"][:1]), key=lambda e: len(e["loc"]))
    known = {part for dotted in _dotted_keys(root, ()) for part in dotted.split(".")}
    dotted = ".".join(str(part) for part in error["loc"] if isinstance(part, int) or part in known)
    got = f", not {_shown(error['input'])}" if dotted and error["type"] not in _ABOUT_KEYS else ""
    return ConfigError(": ".join(filter(None, (source, dotted, complaint(error) + got))), param=dotted or None)


# What pydantic calls an error, and what a reader of the file wants to hear.
_COMPLAINTS = {
    "bool_parsing": "must be true or false",
    "bool_type": "must be true or false",
    "extra_forbidden": "{key} is no key here",
    "float_parsing": "must be a number",
    "float_type": "must be a number",
    "greater_than": "must be more than {gt}",
    "greater_than_equal": "must be at least {ge}",
    "int_from_float": "must be a whole number",
    "int_parsing": "must be a whole number",
    "int_type": "must be a whole number",
    "less_than_equal": "must be at most {le}",
    "literal_error": "must be {expected}",
    "missing": "must be given",
    "model_type": "must be keys with values, as in `{{replicas: 1}}`",
    "string_type": "must be text",
    "tuple_type": "must be a list",
    "union_tag_invalid": "{tag} is none of {expected_tags}",
    "union_tag_not_found": "needs the key {discriminator}",
}


# Complaints about a key, not about its value.
_ABOUT_KEYS = ("extra_forbidden", "missing", "union_tag_invalid", "union_tag_not_found")


def complaint(error: ErrorDetails) -> str:
    known = _COMPLAINTS.get(error["type"])
    return (
        known.format(key=error["loc"][-1] if error["loc"] else "", **error.get("ctx", {}))
        if known
        else error["msg"].removeprefix("Value error, ")
    )


def _shown(value: Any) -> str:
    return kind(value) if isinstance(value, (dict, list, tuple)) else repr(value)


def kind(value: Any) -> str:
    names: dict[type, str] = {dict: "a mapping", list: "a list", str: "text"}
    return names.get(type(value), type(value).__name__)
