"""Token ids -> text, piece by piece."""

from __future__ import annotations

import codecs
from collections.abc import Iterable

from workers.tokenizer import Tokenizer


class Detokenizer:
    """One answer's text. A character split over tokens is held back until its last byte; the pieces of `push` and
    `flush` together are exactly `decode` of all the ids. A token costs its own bytes, however long the answer.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._is_held_back = False
        self._strip = tokenizer.strip_leading_space

    def push(self, token_ids: Iterable[int]) -> str:
        data = self._tokenizer.bytes_of(token_ids, self._skip_special_tokens)
        if self._strip and data:
            data, self._strip = data.removeprefix(b" "), False
        if not self._is_held_back and data.isascii():
            return data.decode()
        text = self._utf8.decode(data)
        self._is_held_back = bool(self._utf8.getstate()[0])
        return text

    def flush(self) -> str:
        """What is still held back: half a character, as U+FFFD."""
        return self._utf8.decode(b"", final=True)
