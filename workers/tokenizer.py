"""Text <-> token ids, and messages -> prompt text."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from workers.chat_template import Chat, ChatTemplate
from workers.errors import ConfigError, InvalidRequestError
from workers.tokenizer_sources import TokenizerSource, from_folder, from_gguf

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def load_tokenizer(path: Path) -> Tokenizer:
    """From a .gguf file or a Hugging Face folder. ConfigError when its tokenizer is of an unknown kind."""
    if path.is_dir():
        return Tokenizer(from_folder(path))
    if path.is_file():
        return Tokenizer(from_gguf(path))
    raise ConfigError(f"model {path} does not exist; give a .gguf file or a Hugging Face folder", param="model")


# Some milliseconds' worth of tokenising: more is done on another thread than the event loop's.
LONG_CHARS = 20_000


class Tokenizer:
    """Decoding goes through the bytes of each token: text is their concatenation read as UTF-8, so it can be cut
    anywhere and put together again (workers/detokenizer.py). Bytes that are no UTF-8 become U+FFFD.
    """

    def __init__(self, source: TokenizerSource) -> None:
        self._backend = source.backend
        self._byte_level = source.byte_level
        self._chat_template = (
            ChatTemplate(source.chat_template, source.special_tokens) if source.chat_template is not None else None
        )
        added = source.backend.get_added_tokens_decoder()
        self._special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        # Filled on demand: most of a vocabulary is never said.
        self._bytes: dict[int, bytes] = {token_id: token.content.encode() for token_id, token in added.items()}
        self.strip_leading_space = source.strip_leading_space
        self.max_token_chars = source.max_token_chars
        self.eos_token_ids = source.eos_token_ids
        self.vocab_size = source.backend.get_vocab_size(with_added_tokens=True)

    def to_json(self) -> str:
        """As a tokenizer.json."""
        return self._backend.to_str()

    @property
    def chat_template(self) -> str | None:
        """Its source."""
        return None if self._chat_template is None else self._chat_template.source

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        try:
            if len(text) > LONG_CHARS:
                # Only a batch lets go of the GIL.
                return self._backend.encode_batch([text], add_special_tokens=add_special_tokens)[0].ids
            return self._backend.encode(text, add_special_tokens=add_special_tokens).ids
        except TypeError as error:  # The backend's answer to a str that has no UTF-8 form.
            at = next((at for at, char in enumerate(text) if "\ud800" <= char <= "\udfff"), None)
            raise InvalidRequestError(
                f"the prompt is not valid Unicode: a lone surrogate at character {at}; send UTF-8 text", param="prompt"
            ) from error

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        data = self.bytes_of(token_ids, skip_special_tokens)
        return (data.removeprefix(b" ") if self.strip_leading_space else data).decode("utf-8", "replace")

    def bytes_of(self, token_ids: Iterable[int], skip_special_tokens: bool = True) -> bytes:
        skipped = self._special_ids if skip_special_tokens else ()
        known = self._bytes
        return b"".join([known.get(one) or self.token_bytes(one) for one in token_ids if one not in skipped])

    def token_bytes(self, token_id: int) -> bytes:
        """What the token adds to the text. Ids past the vocabulary (a padded embedding has such) add nothing."""
        data = self._bytes.get(token_id)
        if data is None:
            token = self._backend.id_to_token(token_id) or ""
            data = _from_byte_level(token) if self._byte_level else _from_sentencepiece(token)
            self._bytes[token_id] = data
        return data

    def apply_chat_template(self, chat: Chat) -> str:
        if self._chat_template is None:
            raise InvalidRequestError(
                "this model has no chat template; use /v1/completions with a prompt", param="messages"
            )
        return self._chat_template.render(chat)


def _byte_level_alphabet() -> dict[str, int]:
    """GPT-2's: printable Latin-1 stands for itself, the other bytes for U+0100 and up."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + at): byte for at, byte in enumerate(others)}


_ALPHABET = _byte_level_alphabet()


def _from_byte_level(token: str) -> bytes:
    try:
        return bytes(_ALPHABET[char] for char in token)
    except KeyError:  # An added token, written as plain text.
        return token.encode()


def _from_sentencepiece(token: str) -> bytes:
    byte = _BYTE_TOKEN.fullmatch(token)
    return bytes([int(byte[1], 16)]) if byte else token.replace("▁", " ").encode()
