"""Calls of tools in the text of an answer, piece by piece as it comes.

A whole answer is read by the same parser as a streamed one. What looks like a call and is none stays text.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from router.stop_strings import overlap

# So far the name, and what follows are the arguments.
_HEAD = re.compile(r'\{\s*"name"\s*:\s*"([^"\\]*)"\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)')
# A name before its arguments, as Mistral's later models write it; and what may still become one.
_NAMED = re.compile(r"([\w.-]{1,64})(?:\[ARGS\])?(?=\{)")
_MAYBE_NAMED = re.compile(r"[\w.-]{1,64}(?:\[[ARGS]{0,4}\]?)?")
_BETWEEN = " \t\r\n,;[]"


@dataclass(frozen=True, slots=True)
class Piece:
    """Text that is shown; or, with `call`, some of that call's arguments, after its name in the first of them."""

    text: str
    call: int | None = None
    name: str | None = None


class ToolCallParser(Protocol):
    def push(self, text: str) -> Iterator[Piece]:
        """What `text` makes sure."""

    def flush(self) -> Iterator[Piece]:
        """The answer has ended: what was held back."""


class JsonCalls:
    """Calls that are JSON objects, one or a list, between `opener` and `closer`; `bare`: or at the answer's start;
    `named`: or a name and an object each."""

    def __init__(self, opener: str = "", closer: str = "", bare: bool = False, named: bool = False) -> None:
        self._opener = opener
        self._closer = closer
        self._named_form = named
        self._held = ""
        # What stood around a call; text, if it is none.
        self._marks = ""
        self._num_calls = 0
        self._call = _JsonCall(0)
        self._read = self._start if bare else self._text

    def push(self, text: str) -> Iterator[Piece]:
        self._held += text
        while self._held:
            before = len(self._held), self._read
            yield from self._read()
            if before == (len(self._held), self._read):
                return

    def flush(self) -> Iterator[Piece]:
        if self._read == self._in_call:
            yield from self._named(self._call.flush())
        rest, self._held = self._held, ""
        yield from self._as_text(rest if rest.strip() or not self._num_calls else "")

    def _start(self) -> Iterator[Piece]:
        text = self._held.lstrip()
        if text:
            self._read = self._gap if text[0] in "{[" else self._text
        yield from ()

    def _text(self) -> Iterator[Piece]:
        """Up to the opener; white space before that is no part of the answer."""
        found = self._held.find(self._opener) if self._opener else -1
        if found >= 0:
            shown, rest = self._held[:found].rstrip(), self._held[found + len(self._opener) :]
            self._marks, self._held, self._read = self._held[len(shown) : found] + self._opener, rest, self._gap
        else:
            end = len(self._held) - overlap(self._held, self._opener)
            shown = self._held[:end].rstrip() if self._opener else self._held
            self._held = self._held[len(shown) :]
        if shown:
            yield Piece(shown)

    def _gap(self) -> Iterator[Piece]:
        """Before, between and behind calls."""
        if self._held.startswith(self._closer or "\0"):
            self._held, self._read = self._held[len(self._closer) :], self._text
            yield from self._as_text(self._closer if self._marks.strip(_BETWEEN) else "")
        elif self._held.startswith(self._opener or "\0"):
            self._mark(len(self._opener))
        elif self._may_be(self._opener) or self._may_be(self._closer):
            return
        elif self._held[0] in _BETWEEN:
            self._mark(1)
        else:
            yield from self._begin()

    def _begin(self) -> Iterator[Piece]:
        """A call, or text after all."""
        name = _NAMED.match(self._held) if self._named_form else None
        if self._held[0] == "{" or name is not None:
            self._held = self._held[name.end() :] if name else self._held
            self._call, self._read = _JsonCall(self._num_calls, name and name[1]), self._in_call
        elif not (self._named_form and _MAYBE_NAMED.fullmatch(self._held)):
            self._read = self._text
            yield from self._as_text("")

    def _mark(self, end: int) -> None:
        self._marks, self._held = self._marks + self._held[:end], self._held[end:]

    def _may_be(self, mark: str) -> bool:
        """Whether what is held is the beginning of it."""
        return mark.startswith(self._held)

    def _in_call(self) -> Iterator[Piece]:
        pieces, rest = self._call.push(self._held)
        self._held = rest or ""
        if rest is not None:
            self._read = self._gap
        yield from self._named(pieces)

    def _named(self, pieces: list[Piece]) -> Iterator[Piece]:
        for piece in pieces:
            if piece.call is None:
                self._read = self._text
                yield from self._as_text(piece.text)
                continue
            if piece.name is not None:
                self._num_calls, self._marks = self._num_calls + 1, ""
            yield piece

    def _as_text(self, text: str) -> Iterator[Piece]:
        """No call after all. Behind a call, what separates it from others is dropped."""
        marks, self._marks = self._marks, ""
        shown = text if self._num_calls and not marks.strip(_BETWEEN) else marks + text
        if shown:
            yield Piece(shown)


class _JsonCall:
    """One object {"name": ..., "arguments": {...}} as it comes. In any other order it is held until it is whole. With a
    `name` it is the arguments themselves."""

    def __init__(self, index: int, name: str | None = None) -> None:
        self._index = index
        self._name = name
        self._raw = ""
        self._depth = 0
        self._quoted = self._escaped = False
        # Arguments are raw[sent:end]; end is not known before they are whole.
        self._sent: int | None = None if name is None else 0
        self._end: int | None = None
        self._depth_of_arguments = 1 if name is None else 0

    def push(self, text: str) -> tuple[list[Piece], str | None]:
        """With what follows the object; None: it goes on."""
        for at, char in enumerate(text, start=1):
            if self._closes(char):
                if self._depth == self._depth_of_arguments and self._end is None:
                    self._end = len(self._raw) + at
                if self._depth == 0:
                    self._raw += text[:at]
                    return self._pieces() or self._whole(), text[at:]
        self._raw += text
        return self._pieces(), None

    def flush(self) -> list[Piece]:
        return [Piece(self._raw)] if self._sent is None else []

    def _closes(self, char: str) -> bool:
        if self._quoted:
            self._quoted = self._escaped or char != '"'
            self._escaped = char == "\\" and not self._escaped
            return False
        self._quoted = char == '"'
        self._depth += (char in "{[") - (char in "}]")
        return char in "}]"

    def _pieces(self) -> list[Piece]:
        name, self._name = self._name, None
        if self._sent is None:
            if (head := _HEAD.match(self._raw)) is None:
                return []
            name, self._sent = head[1], head.end()
        new, self._sent = self._raw[self._sent : self._end], max(self._sent, self._end or len(self._raw))
        return [Piece(new, self._index, name)] if new or name is not None else []

    def _whole(self) -> list[Piece]:
        if self._sent is not None:
            return []
        try:
            call = json.loads(self._raw, strict=False)
        except (ValueError, RecursionError):
            return [Piece(self._raw)]
        arguments = call.get("arguments", call.get("parameters")) or {}
        if not isinstance(call.get("name"), str) or not isinstance(arguments, dict):
            return [Piece(self._raw)]
        return [Piece(json.dumps(arguments, ensure_ascii=False), self._index, call["name"])]


class PythonicCalls:
    """Calls that are Python: [f(a=1), g(b="x")] and nothing else. They are known when the answer has ended."""

    def __init__(self) -> None:
        self._held = ""
        self._is_text = False

    def push(self, text: str) -> Iterator[Piece]:
        self._held += text
        begun = self._held.lstrip()
        if self._is_text or (begun and begun[0] != "["):
            self._is_text = True
            shown, self._held = self._held, ""
            yield Piece(shown)

    def flush(self) -> Iterator[Piece]:
        text, self._held = self._held, ""
        try:
            calls = list(_python_calls(text))
        except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
            calls = []
        if not calls:
            yield Piece(text)
        for index, (name, arguments) in enumerate(calls):
            yield Piece(arguments, index, name)


def _python_calls(text: str) -> Iterator[tuple[str, str]]:
    """(name, arguments as JSON). Raises what ast and json do, and ValueError for what is no list of such calls."""
    body = ast.parse(text.strip(), mode="eval").body
    for call in body.elts if isinstance(body, ast.List) else [body]:
        if not isinstance(call, ast.Call) or call.args or not all(word.arg for word in call.keywords):
            raise ValueError("no call by keywords")
        arguments = {word.arg: ast.literal_eval(word.value) for word in call.keywords}
        yield ast.unparse(call.func), json.dumps(arguments, ensure_ascii=False, allow_nan=False)
