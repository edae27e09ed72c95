"""Structured output: from what a client asks of the answer's form to a grammar in llguidance's form, checked."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from workers.errors import InvalidRequestError

MAX_GRAMMAR_CHARS = 1 << 16
_MAX_CHOICES = 1024
# Between the parts of a JSON answer. A bound, since a small model would go on with line ends for ever.
_WHITESPACE = r"[ \n\t]{1,16}"

# vLLM's names of each form in `structured_outputs`, and the older parameters.
_KINDS = ("json", "json_object", "regex", "choice", "grammar")
LEGACY = {"guided_json": "json", "guided_regex": "regex", "guided_choice": "choice", "guided_grammar": "grammar"}


def grammar_of_body(body: Mapping[str, Any]) -> str:
    """Of an OpenAI request's parameters; "" where they ask for no form. Raises InvalidRequestError, also for two."""
    asked = [
        *_of_response_format(body.get("response_format")),
        *_of_structured_outputs(body.get("structured_outputs")),
        *((name, kind, body[name]) for name, kind in LEGACY.items() if body.get(name) is not None),
    ]
    if len(asked) > 1:
        raise InvalidRequestError(
            f"{asked[0][0]} and {asked[1][0]} both say what the answer must be; leave out one", param=asked[1][0]
        )
    if body.get("ignore_eos") and asked:
        raise InvalidRequestError(
            f"ignore_eos does not go with {asked[0][0]}, whose answers have an end; leave out either",
            param="ignore_eos",
        )
    return grammar_of(*asked[0]) if asked else ""


def grammar_of(param: str, kind: str, value: Any) -> str:
    """`kind` is one of _KINDS; `param` names the client's field in errors. Raises InvalidRequestError."""
    try:
        from llguidance import LLMatcher
    except ImportError:
        raise InvalidRequestError(
            f"{param} needs llguidance, which is not installed here: pip install 'kvferry[structured]'", param=param
        ) from None
    try:
        grammar = _MAKERS[kind](LLMatcher, value)
    except (TypeError, ValueError) as error:
        raise InvalidRequestError(f"{param}: {error}", param=param) from None
    if len(grammar) > MAX_GRAMMAR_CHARS:
        raise InvalidRequestError(
            f"{param} makes a grammar of {len(grammar)} characters; at most {MAX_GRAMMAR_CHARS} are taken", param=param
        )
    # Warnings are about what would not be enforced: an answer could break its promise.
    _, problems = LLMatcher.validate_grammar_with_warnings(grammar)
    if problems:
        raise InvalidRequestError(f"{param} cannot be used: {' '.join(problems[0].split())[:500]}", param=param)
    return grammar


def _of_response_format(value: Any) -> Sequence[tuple[str, str, Any]]:
    match value:
        case None | {"type": "text"}:
            return []
        case {"type": "json_object"}:
            return [("response_format", "json_object", True)]
        case {"type": "json_schema", "json_schema": {"schema": dict() as schema}}:
            return [("response_format", "json", schema)]
    raise InvalidRequestError(
        'response_format must be {"type": "text"}, {"type": "json_object"} or '
        '{"type": "json_schema", "json_schema": {"name": ..., "schema": {...}}}',
        param="response_format",
    )


def _of_structured_outputs(value: Any) -> Sequence[tuple[str, str, Any]]:
    if value is None:
        return []
    if not isinstance(value, dict) or not value.keys() <= set(_KINDS):
        raise InvalidRequestError(
            f"structured_outputs must be an object with one of {', '.join(_KINDS)}", param="structured_outputs"
        )
    wanted = {kind: one for kind, one in value.items() if one is not None and one is not False}
    return [(f"structured_outputs.{kind}", kind, one) for kind, one in wanted.items()]


def _json(matcher: Any, schema: Any) -> str:
    if isinstance(schema, str):
        schema = json.loads(schema)
    if not isinstance(schema, dict):
        raise TypeError("a JSON schema must be an object, or the text of one")
    grammar: str = matcher.grammar_from_json_schema(schema, defaults={"whitespace_pattern": _WHITESPACE})
    return grammar


def _json_object(matcher: Any, wanted: Any) -> str:
    if wanted is not True:
        raise TypeError("must be true")
    return _json(matcher, {"type": "object"})


def _regex(matcher: Any, regex: Any) -> str:
    grammar: str = matcher.grammar_from_regex(_text(regex))
    return grammar


def _choice(matcher: Any, choices: Any) -> str:
    if isinstance(choices, str) or not isinstance(choices, Sequence) or not 0 < len(choices) <= _MAX_CHOICES:
        raise TypeError(f"must be a list of 1 to {_MAX_CHOICES} strings")
    if not all(isinstance(choice, str) and choice for choice in choices):
        raise TypeError("must be strings of at least one character")
    return _grammar(matcher, "start: " + " | ".join(json.dumps(choice, ensure_ascii=False) for choice in choices))


def _grammar(matcher: Any, lark: Any) -> str:
    grammar: str = matcher.grammar_from_lark(_text(lark))
    return grammar


def _text(value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise TypeError("must be text of at least one character")
    return value


_MAKERS: dict[str, Callable[[Any, Any], str]] = {
    "json": _json,
    "json_object": _json_object,
    "regex": _regex,
    "choice": _choice,
    "grammar": _grammar,
}
