"""Speculative decoding by prompt lookup: what followed the last tokens when they stood there before, is tried again.

Source: Saxena, "Prompt Lookup Decoding" (2023). A draft costs one row of a step that is taken anyway; the step samples
the token at each drafted position as if the drafts before it were right, and they are kept as long as that is so. Since
a token is a function of the tokens before it, the answer is the same as without drafts.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from workers.config import SpeculativeConfig

_TOKEN_BYTES = array("i").itemsize


def propose(tokens: Sequence[int], config: SpeculativeConfig) -> list[int]:
    """Up to num_speculative_tokens tokens that may follow `tokens`; none where nothing like their end came before.

    The longest end is tried first, and of its occurrences the latest that was followed by as many tokens as wanted.
    """
    data = array("i", tokens).tobytes()
    most = config.num_speculative_tokens
    for size in range(min(config.prompt_lookup_max, len(tokens) - 1), config.prompt_lookup_min - 1, -1):
        for num_following in (most, 1):
            at = _last_occurrence(data, size, len(tokens) - num_following)
            if at is not None:
                return list(tokens[at + size : at + size + most])
    return []


def _last_occurrence(data: bytes, size: int, end: int) -> int | None:
    """Where the last `size` tokens of `data` stand for the last time within its first `end` tokens."""
    pattern, stop = data[-size * _TOKEN_BYTES :], max(0, end) * _TOKEN_BYTES
    while (at := data.rfind(pattern, 0, stop)) >= 0:
        if at % _TOKEN_BYTES == 0:
            return at // _TOKEN_BYTES
        stop = at + len(pattern) - 1
    return None
