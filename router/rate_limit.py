"""So much a minute: a bucket that fills evenly, on the event loop's clock.

Not the `limits` package: what an answer costs is known when it is there, and must count though the bucket is empty by
then.
"""

from __future__ import annotations

import asyncio


class Bucket:
    def __init__(self, per_minute: int) -> None:
        self.per_minute = per_minute
        self._left = float(per_minute)
        self._at_s = _now()

    @property
    def left(self) -> float:
        """Below 0: spent already, of what is still to come."""
        now_s = _now()
        self._left = min(self.per_minute, self._left + (now_s - self._at_s) * self.per_minute / 60)
        self._at_s = now_s
        return self._left

    @property
    def full_in_s(self) -> float:
        return (self.per_minute - self.left) * 60 / self.per_minute

    def wait_s(self, amount: float) -> float:
        """Seconds until so much is there; 0: it is. More than there ever will be needs a full bucket."""
        missing = min(amount, self.per_minute) - self.left
        return max(0.0, missing * 60 / self.per_minute)

    def spend(self, amount: float) -> None:
        self._left = self.left - amount


def _now() -> float:
    return asyncio.get_running_loop().time()
