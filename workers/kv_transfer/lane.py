"""A thread for what blocks on behalf of one peer."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from workers.errors import UnavailableError

T = TypeVar("T")


class Lane:
    """Calls one after the other, until one of them fails: after that there are none."""

    def __init__(self, name: str, errors: tuple[type[Exception], ...], on_end: Callable[[], None]) -> None:
        """`errors` are what its calls raise when the peer or the network fails. `on_end` is called once, on the loop:
        it ends what may be waiting on the thread."""
        self.name = name
        self.ended = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._errors = errors
        self._on_end = on_end
        self._calls = ThreadPoolExecutor(1, thread_name_prefix=f"kv-{name}")
        self._waiting: set[asyncio.Future[Any]] = set()

    async def run(self, call: Callable[[], T]) -> T:
        """Raises UnavailableError when the lane is over, or is over now."""
        return await self.start(call)

    def start(self, call: Callable[[], T]) -> Coroutine[Any, Any, T]:
        """As run, and its turn on the thread is the one of this moment, whoever waits for it or does not."""
        if self.ended.is_set():
            raise self._gone("it was ended")
        work = self._loop.run_in_executor(self._calls, call)
        self._waiting.add(work)
        work.add_done_callback(self._done)
        return self._outcome(work)

    def _done(self, work: asyncio.Future[Any]) -> None:
        self._waiting.discard(work)
        if not work.cancelled():
            work.exception()  # Seen, even if nobody waits for it.

    async def _outcome(self, work: asyncio.Future[T]) -> T:
        try:
            return await work
        except self._errors as error:
            self.end()
            raise self._gone((str(error) or type(error).__name__).splitlines()[0]) from error
        except asyncio.CancelledError:
            self.end()
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            raise self._gone("it was ended") from None

    def end(self) -> None:
        """Whoever waits gets UnavailableError now; what is on the thread ends alone. Again is no error."""
        if self.ended.is_set() or self._loop.is_closed():
            return  # After the loop the process ends: no thread may be started that late.
        self.ended.set()
        for work in list(self._waiting):
            work.cancel()
        self._on_end()
        self._calls.shutdown(wait=False)

    def beside(self, call: Callable[[], None]) -> None:
        """Now, on a thread of its own, since the lane's may be the one that waits; from `on_end`."""
        # No daemon: one that is cut off inside a library of C++ ends the process.
        threading.Thread(target=call).start()

    def finally_run(self, call: Callable[[], None]) -> None:
        """The last thing on the thread, from `on_end`."""
        self._calls.submit(call)

    def _gone(self, reason: str) -> UnavailableError:
        return UnavailableError(f"{self.name} is no more: {reason}")
