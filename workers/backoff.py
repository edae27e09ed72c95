"""How long to wait before one tries again."""

from __future__ import annotations

import random


def pause_s(first_s: float, num_failed: int, key: str, longest_s: float = 10.0) -> float:
    """Before the next try, after so many that failed in a row: doubled with each, up to `longest_s`.

    Between half and the whole of that, so that those who lost one worker do not all come back at one moment; which part
    is a function of `key` and `num_failed`, and therefore the same in a run that is repeated.
    """
    part = random.Random(f"{key}\0{num_failed}").random()
    return float(min(first_s * 2 ** (num_failed - 1), longest_s) * (0.5 + part / 2))
