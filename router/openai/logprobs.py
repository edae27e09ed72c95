"""Log-probabilities in OpenAI's shapes, and prompt_logprobs in vLLM's."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from workers.detokenizer import Detokenizer
from workers.request import TokenLogprobs
from workers.tokenizer import Tokenizer

# JSON has no infinity; OpenAI's word for "very unlikely".
_LEAST = -9999.0


@dataclass(frozen=True, slots=True)
class LogprobsWanted:
    """How many of the likeliest tokens to show; None: no such field in the answer."""

    logprobs: int | None = None
    prompt_logprobs: int | None = None


NO_LOGPROBS = LogprobsWanted()


class Scribe(Protocol):
    """Writes the `logprobs` of one choice, piece by piece."""

    def piece(self, logprobs: Sequence[TokenLogprobs]) -> dict[str, Any]: ...

    def echo(self, text: str, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs]) -> dict[str, Any]:
        """Of the prompt, which the choice's text begins with."""


class CompletionScribe:
    """/completions: four lists; text_offset goes on from piece to piece."""

    def __init__(self, tokenizer: Tokenizer, num_top: int, skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._num_top = num_top
        self._detokenizer = Detokenizer(tokenizer, skip_special_tokens)
        self._offset = 0

    def piece(self, logprobs: Sequence[TokenLogprobs]) -> dict[str, Any]:
        ids = [one.token_id for one in logprobs]
        return self._lists(ids, logprobs, self._offsets(self._detokenizer, ids))

    def echo(self, text: str, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs]) -> dict[str, Any]:
        # A prompt's special tokens are part of the text where it was given as text.
        skip_special_tokens = self._tokenizer.decode(token_ids, skip_special_tokens=False) != text
        offsets = self._offsets(Detokenizer(self._tokenizer, skip_special_tokens), token_ids)
        self._offset = len(text)
        # Nothing comes before the first token, so that it has no probability.
        return self._lists(token_ids, [None, *logprobs], offsets)

    def _offsets(self, detokenizer: Detokenizer, token_ids: Sequence[int]) -> list[int]:
        offsets = []
        for token_id in token_ids:
            offsets.append(self._offset)
            self._offset += len(detokenizer.push((token_id,)))
        return offsets

    def _lists(
        self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs | None], offsets: list[int]
    ) -> dict[str, Any]:
        return {
            "text_offset": offsets,
            "token_logprobs": [one and _number(one.logprob) for one in logprobs],
            "tokens": [self._name(token_id) for token_id in token_ids],
            "top_logprobs": [one and self._top(one) for one in logprobs],
        }

    def _top(self, one: TokenLogprobs) -> dict[str, float]:
        """With the token itself. Where several have one name, the likeliest stands for all."""
        top: dict[str, float] = {}
        for token_id, logprob, _ in _candidates(one, self._num_top):
            top.setdefault(self._name(token_id), _number(logprob))
        return top

    def _name(self, token_id: int) -> str:
        """Its text; as OpenAI does it, its bytes where they are only a part of a character."""
        data = self._tokenizer.token_bytes(token_id)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + data.decode("utf-8", "backslashreplace")


class ChatScribe:
    """/chat/completions: one object for each token."""

    def __init__(self, tokenizer: Tokenizer, num_top: int, skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._num_top = num_top

    def piece(self, logprobs: Sequence[TokenLogprobs]) -> dict[str, Any]:
        return {"content": [self._token(one) for one in logprobs], "refusal": None}

    def echo(self, text: str, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs]) -> dict[str, Any]:
        raise AssertionError("chats have no echo")

    def _token(self, one: TokenLogprobs) -> dict[str, Any]:
        top = zip(one.top_token_ids[: self._num_top], one.top_logprobs, strict=False)
        return {**self._entry(one.token_id, one.logprob), "top_logprobs": [self._entry(*pair) for pair in top]}

    def _entry(self, token_id: int, logprob: float) -> dict[str, Any]:
        data = self._tokenizer.token_bytes(token_id)
        return {"token": data.decode("utf-8", "replace"), "logprob": _number(logprob), "bytes": list(data)}


def prompt_logprobs(
    tokenizer: Tokenizer, logprobs: Sequence[TokenLogprobs], num_top: int
) -> list[dict[str, dict[str, Any]] | None]:
    """By token id, for each token of a prompt; null for the first."""
    return [
        None,
        *(
            {
                str(token_id): {
                    "logprob": _number(logprob),
                    "rank": rank,
                    "decoded_token": _text(tokenizer, token_id),
                }
                for token_id, logprob, rank in _candidates(one, num_top)
            }
            for one in logprobs
        ),
    ]


def _candidates(one: TokenLogprobs, num_top: int) -> Iterator[tuple[int, float, int]]:
    """(id, logprob, rank) of the likeliest tokens, and of the token itself if it is none of them."""
    for rank, (token_id, logprob) in enumerate(zip(one.top_token_ids, one.top_logprobs, strict=True), start=1):
        if rank <= num_top:
            yield token_id, logprob, rank
    if one.rank > num_top:
        yield one.token_id, one.logprob, one.rank


def _text(tokenizer: Tokenizer, token_id: int) -> str:
    return tokenizer.token_bytes(token_id).decode("utf-8", "replace")


def _number(logprob: float) -> float:
    return max(logprob, _LEAST)
