"""Counter-based random numbers: a pure function of (seed, choice index, position), so a request resumes anywhere."""

from __future__ import annotations

import numpy as np

_WORD = (1 << 64) - 1


def uniform(seed: int, choice: int, position: int) -> float:
    """The draw in [0, 1) for the token of `choice` at `position` of its whole sequence (Philox 4x64-10)."""
    key = np.array([seed & _WORD, choice & _WORD], dtype=np.uint64)
    # The low word counts the blocks of one stream; a position starts a stream of its own.
    counter = np.array([0, position, 0, 0], dtype=np.uint64)
    return float(np.random.Generator(np.random.Philox(key=key, counter=counter)).random())
