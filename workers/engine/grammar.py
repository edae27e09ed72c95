"""Structured output: which tokens may come next, by llguidance.

What a grammar allows is a function of it and the output tokens so far. Matchers, which know where in its grammar an
answer is, are a cache of that function: one that is missing or elsewhere is brought to its place from the tokens.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from workers.deep_stack import deep_stack
from workers.errors import ConfigError, InvalidRequestError, KVFerryError
from workers.request import NextToken
from workers.tokenizer import Tokenizer

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

# Matchers and compiled grammars that are kept.
_MAX_MATCHERS = 1024
_MAX_GRAMMARS = 64

# Of a row: [vocab_size] bool, or why there is none.
Allowed = np.ndarray | KVFerryError
# Of one sequence: its request's id and choice.
Key = tuple[str, int]


@dataclass(slots=True)
class _Place:
    """A matcher and the output tokens that it has taken in."""

    matcher: LLMatcher
    grammar: str
    token_ids: list[int] = field(default_factory=list)

    def go_to(self, token_ids: Sequence[int]) -> None:
        """Forget what is not in `token_ids`, and take in the rest, as far as the grammar goes.

        It ends early at a draft that the grammar forbids, whose samples are thrown away, and nowhere else.
        """
        common = next(
            (i for i, (a, b) in enumerate(zip(self.token_ids, token_ids, strict=False)) if a != b),
            min(len(self.token_ids), len(token_ids)),
        )
        if common < len(self.token_ids):
            self.matcher.rollback(len(self.token_ids) - common)
        num_taken = self.matcher.try_consume_tokens(list(token_ids[common:]))
        self.token_ids = [*self.token_ids[:common], *token_ids[common : common + num_taken]]


class Grammars:
    """Belongs to a runner, and does its work on a thread of its own, beside the model's."""

    def __init__(
        self, load_tokenizer: Callable[[], Tokenizer], vocab_size: int, eos_token_ids: Collection[int]
    ) -> None:
        self._load_tokenizer = load_tokenizer
        self._vocab_size = vocab_size
        self._eos_token_ids = sorted(eos_token_ids)
        self._tokenizer: LLTokenizer | None = None
        self._compiled: OrderedDict[str, LLMatcher] = OrderedDict()
        self._places: OrderedDict[Key, _Place] = OrderedDict()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="grammar")

    def begin(self, request_ids: Sequence[str], samples: Sequence[NextToken]) -> Future[Mapping[int, Allowed]] | None:
        """Find out what each of `samples` that has a grammar may be, by its index; None where none has one.

        `request_ids`: whose each is.
        """
        rows = [row for row, sample in enumerate(samples) if sample.params.grammar]
        if not rows:
            return None
        with deep_stack():  # The first call starts the thread.
            return self._thread.submit(lambda: {row: self.allowed(request_ids[row], samples[row]) for row in rows})

    def allowed(self, request_id: str, sample: NextToken) -> Allowed:
        """After drafts that the grammar forbids: what was allowed in their place."""
        assert sample.tokens_so_far is not None, "a grammar's next token depends on those before it"
        key = request_id, sample.choice
        try:
            place = self._place(key, sample.params.grammar)
            place.go_to(sample.tokens_so_far.output_token_ids)
            return self._mask(place.matcher)
        except KVFerryError as error:
            self._places.pop(key, None)
            return error

    def _place(self, key: Key, grammar: str) -> _Place:
        place = self._places.get(key)
        if place is None or place.grammar != grammar:
            place = self._places[key] = _Place(self._compile(grammar).deep_copy(), grammar)
        self._places.move_to_end(key)
        if len(self._places) > _MAX_MATCHERS:
            self._places.popitem(last=False)
        return place

    def _compile(self, grammar: str) -> LLMatcher:
        if grammar not in self._compiled:
            vocabulary = self._vocabulary()
            from llguidance import LLMatcher

            self._compiled[grammar] = LLMatcher(vocabulary, grammar, log_level=0)
        self._compiled.move_to_end(grammar)
        if len(self._compiled) > _MAX_GRAMMARS:
            self._compiled.popitem(last=False)
        return self._compiled[grammar]

    def _vocabulary(self) -> LLTokenizer:
        """Loaded by the first request that needs it."""
        if self._tokenizer is None:
            try:
                from llguidance import LLTokenizer
            except ImportError:
                raise InvalidRequestError(
                    "structured output needs llguidance on every worker: pip install 'kvferry[structured]'"
                ) from None
            backend = self._load_tokenizer().to_json()
            eos_token_ids = self._eos_token_ids or None
            try:
                self._tokenizer = LLTokenizer(backend, n_vocab=self._vocab_size, eos_token=eos_token_ids)
            except ValueError as error:
                raise ConfigError(f"structured output does not go with this model's tokenizer: {error}") from error
        return self._tokenizer

    def _mask(self, matcher: LLMatcher) -> np.ndarray:
        _require_followed(matcher)
        bits = np.zeros(-(-self._vocab_size // 32), dtype=np.int32)
        matcher.unsafe_compute_mask_ptr(bits.ctypes.data, bits.nbytes)
        _require_followed(matcher)
        return np.unpackbits(bits.view(np.uint8), count=self._vocab_size, bitorder="little").view(bool)


def _require_followed(matcher: LLMatcher) -> None:
    if matcher.is_error():
        # Behind the reason comes the parser's whole state, with the grammar.
        reason = matcher.get_error().partition("\n<")[0]
        raise InvalidRequestError(f"the grammar cannot be followed: {reason}", param="grammar")
