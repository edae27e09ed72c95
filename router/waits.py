"""Waits for a worker's answers, which end as soon as it is known that none will come."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from workers.errors import KVFerryError


class Failable(Protocol):
    def fail(self, error: KVFerryError) -> None:
        """End whoever waits for it with this error; one that has ended is left as it is."""


class RemoteCall(Protocol):
    def cancel(self) -> Any: ...


class Wait:
    """For a call that is under way. `fail` cancels it."""

    __slots__ = ("_call", "error")

    def __init__(self, call: RemoteCall) -> None:
        self._call = call
        self.error: KVFerryError | None = None

    def fail(self, error: KVFerryError) -> None:
        self.error = self.error or error
        self._call.cancel()


class Waits:
    """All that end together."""

    def __init__(self) -> None:
        # A dict for a set: in order, so that equal seeds give equal runs.
        self._all: dict[Failable, None] = {}

    def fail(self, error: KVFerryError) -> None:
        for wait in list(self._all):
            wait.fail(error)

    @contextmanager
    def end(self, wait: Failable) -> Iterator[None]:
        """Until the end of the block, `fail` ends this too."""
        self._all[wait] = None
        try:
            yield
        finally:
            del self._all[wait]

    @contextmanager
    def end_call(self, call: RemoteCall) -> Iterator[Wait]:
        """Until the end of the block, which waits for the call, `fail` cancels it; the block then raises the error."""
        wait = Wait(call)
        try:
            with self.end(wait):
                yield wait
        except (KVFerryError, asyncio.CancelledError):
            task = asyncio.current_task()
            if wait.error is None or (task is not None and task.cancelling()):
                raise
            raise wait.error from None


class StillLimit:
    """Until the end of its block, fails a wait when a number stays the same for so long."""

    __slots__ = ("_error", "_number", "_seconds", "_timer", "_wait")

    def __init__(self, number: Callable[[], int], seconds: float, wait: Failable, error: KVFerryError) -> None:
        self._number, self._seconds, self._wait, self._error = number, seconds, wait, error

    def __enter__(self) -> None:
        self._arm()

    def __exit__(self, *_: object) -> None:
        self._timer.cancel()

    def _arm(self) -> None:
        # Cancelled, the timer lets go of this: no cycle keeps what the wait holds, a whole prompt.
        self._timer = asyncio.get_running_loop().call_later(self._seconds, self._look, self._number())

    def _look(self, before: int) -> None:
        if self._number() == before:
            self._wait.fail(self._error)
        else:
            self._arm()
