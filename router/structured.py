"""What an answer must match: from a request's wish to a grammar in llguidance's form, checked before any work.

JSON is written as Python's json.dumps does, with one space behind commas and colons: free whitespace would let a model
go on for ever without a word. A schema's own "x-guidance" may say otherwise.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from protos import router_pb2
from workers.deep_stack import call_in_deep_stack
from workers.errors import InvalidRequestError

if TYPE_CHECKING:
    from llguidance import LLMatcher

MAX_GRAMMAR_CHARS = 1 << 16
# A message quotes the grammar between what is wrong and why.
_MAX_PROBLEM_CHARS = 400
_HALF = _MAX_PROBLEM_CHARS // 2
JSON_DEFAULTS = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
# Fields of OpenAI bodies and what each holds, as vLLM named them first; `structured_outputs` has them as keys.
_GUIDED = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
}
OPENAI_FIELDS = ("response_format", "structured_outputs", *_GUIDED)
_NATIVE = {"json_schema": "json"}


def openai_grammar(fields: Mapping[str, Any]) -> str:
    """Of OPENAI_FIELDS, of which one may be given; empty when none is, or it asks for plain text."""
    given = {name: value for name, value in fields.items() if value is not None}
    if len(given) > 1:
        names = sorted(given)
        raise InvalidRequestError(f"{' and '.join(names)} do not go together; send one of them", param=names[1])
    for name, value in given.items():
        if name == "response_format":
            return _response_format(value)
        if name == "structured_outputs":
            return _structured_outputs(value)
        return grammar_of(_GUIDED[name], value, name)
    return ""


def native_grammar(request: router_pb2.GenerateRequest) -> str:
    if request.params.grammar:
        raise InvalidRequestError(
            "params.grammar is between router and workers; set structured_output", param="params.grammar"
        )
    message = request.structured_output
    kind = message.WhichOneof("constraint")
    if kind is None:
        return ""
    value = list(message.choice.strings) if kind == "choice" else getattr(message, kind)
    return grammar_of(_NATIVE.get(kind, kind), value, kind)


def grammar_of(kind: str, value: Any, param: str) -> str:
    """`kind` is json, json_object, regex, choice or grammar. Raises InvalidRequestError with llguidance's reason."""
    try:
        grammar = _MAKERS[kind](_matcher(param), value)
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidRequestError(f"{param} is no {_WANTED[kind]}: {error}", param=param) from None
    if grammar:
        _check(grammar, param)
    return grammar


def _response_format(value: Any) -> str:
    param = "response_format"
    match value:
        case {"type": "text"}:
            return ""
        case {"type": "json_object"}:
            return grammar_of("json_object", True, param)
        case {"type": "json_schema", "json_schema": {"schema": dict() as schema}}:
            return grammar_of("json", schema, param)
    raise InvalidRequestError(
        'response_format must be {"type": "text"}, {"type": "json_object"} or '
        '{"type": "json_schema", "json_schema": {"name": ..., "schema": {...}}}',
        param=param,
    )


def _structured_outputs(value: Any) -> str:
    param = "structured_outputs"
    kinds = ", ".join(_MAKERS)
    if not isinstance(value, dict):
        raise InvalidRequestError(f"{param} must be an object with one of {kinds}", param=param)
    given = {kind: one for kind, one in value.items() if one is not None and one is not False}
    if len(given) != 1 or not given.keys() <= _MAKERS.keys():
        raise InvalidRequestError(f"{param} has {', '.join(given) or 'nothing'}; give one of {kinds}", param=param)
    ((kind, wish),) = given.items()
    return grammar_of(kind, wish, f"{param}.{kind}")


def _matcher(param: str) -> type[LLMatcher]:
    try:
        from llguidance import LLMatcher
    except ImportError:
        raise InvalidRequestError(
            f"{param} needs llguidance where the router runs: pip install 'kvferry[structured]'", param=param
        ) from None
    return LLMatcher


def _json_grammar(matcher: type[LLMatcher], value: Any) -> str:
    schema = json.loads(value) if isinstance(value, str) else value
    if not isinstance(schema, dict):
        raise TypeError("give an object")
    # `lenient` would drop what it does not know from the schema without a word.
    return matcher.grammar_from_json_schema(schema, JSON_DEFAULTS, {"lenient": False})  # type: ignore[arg-type]


def _any_object(matcher: type[LLMatcher], value: Any) -> str:
    return _json_grammar(matcher, {"type": "object"}) if value else ""


def _regex_grammar(matcher: type[LLMatcher], value: Any) -> str:
    return matcher.grammar_from_regex(_text(value))


def _choice_grammar(matcher: type[LLMatcher], value: Any) -> str:
    if not isinstance(value, list) or not value:
        raise TypeError("give at least one string")
    # One expression: as rules of their own, choices that begin alike are bounded at 2000.
    return matcher.grammar_from_regex("|".join(map(_escaped, value)))


def _escaped(choice: Any) -> str:
    """As a regular expression, whatever characters it has."""
    return "".join(c if c.isascii() and c.isalnum() else f"\\x{{{ord(c):x}}}" for c in _text(choice))


def _lark_grammar(matcher: type[LLMatcher], value: Any) -> str:
    return matcher.grammar_from_lark(_text(value))


def _text(value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise TypeError("give text, and not an empty one")
    value.encode()
    return value


_MAKERS: dict[str, Callable[[type[LLMatcher], Any], str]] = {
    "json": _json_grammar,
    "json_object": _any_object,
    "regex": _regex_grammar,
    "choice": _choice_grammar,
    "grammar": _lark_grammar,
}
_WANTED = {
    "json": "JSON Schema",
    "json_object": "boolean",
    "regex": "regular expression",
    "choice": "list of strings",
    "grammar": "Lark grammar",
}


def _check(grammar: str, param: str) -> None:
    if len(grammar) > MAX_GRAMMAR_CHARS:
        raise InvalidRequestError(
            f"{param} makes a grammar of {len(grammar)} characters; at most {MAX_GRAMMAR_CHARS} are taken", param=param
        )
    if problems := _problems(grammar):
        raise InvalidRequestError(f"{param} cannot be followed: {problems}", param=param)


@lru_cache(maxsize=256)
def _problems(grammar: str) -> str:
    """Errors and warnings: what llguidance would not enforce is no more welcome than what it cannot read."""
    from llguidance import LLMatcher

    _, messages = call_in_deep_stack(lambda: LLMatcher.validate_grammar_with_warnings(grammar))
    text = "; ".join(" ".join(message.split()) for message in messages)
    return text if len(text) <= _MAX_PROBLEM_CHARS else f"{text[:_HALF]} ... {text[-_HALF:]}"
