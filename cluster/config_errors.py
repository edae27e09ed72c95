"""What is wrong with a config file, in one line: file and line, key, what it must be, and the mend."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator
from typing import Any, get_args

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from cluster.config_file import ConfigFile, Place, kind
from workers.errors import ConfigError


def refuse_unknown_keys(file: ConfigFile, root: type[BaseModel]) -> None:
    """Raise ConfigError for a key that is not known where it stands, naming the nearest that is."""
    _refuse_in(file.data, [root], (), file, root)


def _refuse_in(
    value: Any, models: list[type[BaseModel]], place: Place, file: ConfigFile, root: type[BaseModel]
) -> None:
    """`models`: of which `value`, or each item of it, may be one."""
    if isinstance(value, list):
        for i, item in enumerate(value):
            _refuse_in(item, models, (*place, i), file, root)
    if not isinstance(value, dict) or not models:
        return
    fields = {name: field for model in _of_kind(models, value) for name, field in model.model_fields.items()}
    for key, inner in value.items():
        if key not in fields:
            dotted = _dotted((*place, str(key)))
            mend = _nearest(str(key), list(fields), place, root)
            raise ConfigError(f"{file.at((*place, str(key)))}: {dotted}: unknown key; {mend}", param=dotted)
        _refuse_in(inner, list(models_in(fields[key].annotation)), (*place, key), file, root)


def _of_kind(models: list[type[BaseModel]], value: dict[str, Any]) -> list[type[BaseModel]]:
    """Those whose tag (`fault: kill`) `value` has; all of them if it has none that is known."""
    tagged = [
        model
        for model in models
        if any(field.is_required() and value.get(name) in get_args(field.annotation) for name, field in _fields(model))
    ]
    return tagged or models


def _fields(model: type[BaseModel]) -> Iterator[tuple[str, Any]]:
    return iter(model.model_fields.items())


def _nearest(key: str, here: list[str], place: Place, root: type[BaseModel]) -> str:
    """The nearest key of the same group, else the nearest of any group."""
    if close := difflib.get_close_matches(key, here, n=1, cutoff=0.7):
        return f"did you mean {_dotted((*place, close[0]))}?"
    last_parts = {dotted.rsplit(".", 1)[-1]: dotted for dotted in reversed(dotted_keys(root))}
    # Within a group, what is meant lies farther only if it is very like.
    anywhere = difflib.get_close_matches(key, last_parts, n=1, cutoff=0.75 if place else 0.5)
    if anywhere:
        return f"did you mean {last_parts[anywhere[0]]}?"
    return f"known keys here: {', '.join(here)}"


def models_in(annotation: Any) -> Iterator[type[BaseModel]]:
    """All that a key's value, or its list's items, may be."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for inner in get_args(annotation):
        yield from models_in(inner)


def dotted_keys(model: type[BaseModel], place: Place = ()) -> list[str]:
    keys = []
    for name, field in model.model_fields.items():
        keys.append(_dotted((*place, name)))
        for inner in models_in(field.annotation):
            keys += dotted_keys(inner, (*place, name))
    return keys


def _dotted(place: Place) -> str:
    return ".".join(map(str, place))


def first_problem(exc: ValidationError, file: ConfigFile, root: type[BaseModel]) -> ConfigError:
    """One line of pydantic's first error; the branches of a union are not part of a key's place."""
    errors = exc.errors(include_url=False)
    error = max((e for e in errors if e["loc"][:1] == errors[0]["loc"][:1]), key=lambda e: len(e["loc"]))
    dotted = dotted_keys(root)
    known = {part for key in dotted for part in key.split(".")}
    place: Place = tuple(part for part in error["loc"] if isinstance(part, int) or part in known)
    got = f", not {_shown(error['input'])}" if place and error["type"] not in _ABOUT_KEYS else ""
    said = complaint(error) + got
    meant = place or _named_in(said, dotted, file)
    return ConfigError(": ".join(filter(None, (file.at(meant), _dotted(place), said))), param=_dotted(meant) or None)


def _named_in(message: str, dotted: list[str], file: ConfigFile) -> Place:
    """Of settings that contradict each other, the first that the message names, of those in the file if there are."""
    words = re.findall(r"\w+(?:\.\w+)*", message)
    named: list[Place] = [tuple(word.split(".")) for word in words if word in dotted]
    return next((place for place in named if place in file.lines), named[0] if named else ())


# What pydantic calls an error, and what a reader of the file wants to hear.
_COMPLAINTS = {
    "bool_parsing": "must be true or false",
    "bool_type": "must be true or false",
    "dict_type": "must be names with values",
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
    "model_attributes_type": "must be keys with values, as in `{{replicas: 1}}`",
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
