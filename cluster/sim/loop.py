"""An event loop whose clock is a number: what waits for nobody is skipped, so an hour of timers takes no time at all.

Production coroutines run on it unchanged. They may not start threads or open sockets, which live on the real clock.
"""

from __future__ import annotations

import asyncio
import random
import selectors
from collections import deque
from collections.abc import Coroutine, Mapping
from contextvars import Context, ContextVar
from typing import Any, NoReturn, TypeVar

T = TypeVar("T")

# Whose code runs: tasks inherit it. What has none, a network or a test, can't be frozen.
PROCESS: ContextVar[object] = ContextVar("PROCESS", default=None)

# Turns of the loop at one instant, after which somebody is taken to spin.
_MAX_TURNS = 1_000_000


_Held = tuple[Any, Any, Any]


class VirtualTimeError(Exception):
    """What ran on the virtual clock can't go on, or left something behind."""


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """`random` is the seeded source of everything that the real world would decide: latencies, faults, arrivals."""

    # asyncio's own: what runs next, and a heap of timers.
    _ready: deque[Any]
    _scheduled: list[Any]

    def __init__(self, seed: int = 0, limit_s: float = 3600.0) -> None:
        self.random = random.Random(seed)
        self.failures: list[str] = []
        self._time_s = 0.0
        self._num_turns = 0
        self._limit_s = limit_s
        # Of each frozen process, what it would have run by now, in order.
        self._frozen: dict[object, list[_Held]] = {}
        super().__init__(_VirtualSelector(self))
        self.set_exception_handler(_note_failure)

    def time(self) -> float:
        return self._time_s

    def advance(self, timeout_s: float | None) -> None:
        """Go to the next timer, as nothing else is ready. Raises VirtualTimeError when there is none, or no end."""
        if timeout_s is None:
            raise VirtualTimeError(f"deadlock at {self._time_s:.6f} s: no timer runs, and\n{self._waiting()}")
        self._time_s += timeout_s
        self._num_turns = 0 if timeout_s else self._num_turns + 1
        if self._time_s > self._limit_s or self._num_turns > _MAX_TURNS:
            raise VirtualTimeError(f"not over at {self._time_s:.6f} virtual seconds:\n{self._waiting()}")

    def extend(self) -> None:
        """As much time again, to clean up in."""
        self._limit_s += self._time_s
        self._num_turns = 0

    def freeze(self, process: object) -> None:
        """As SIGSTOP: from now on nothing of `process` runs, and its timers do not go off, until `thaw`."""
        self._frozen[process] = []
        for handle in (*self._ready, *self._scheduled):
            self._hold(handle)

    def thaw(self, process: object) -> None:
        """As SIGCONT: all that was due in the meantime runs now. One that is not frozen is no error."""
        for handle, callback, args in self._frozen.pop(process, ()):
            if not handle._cancelled:
                handle._callback, handle._args = callback, args
                self._ready.append(handle)

    def call_soon(  # type: ignore[override]
        self, callback: Any, *args: Any, context: Context | None = None
    ) -> asyncio.Handle:
        handle = super().call_soon(callback, *args, context=context)
        if self._frozen:
            self._hold(handle)
        return handle

    def call_at(  # type: ignore[override]
        self, when: float, callback: Any, *args: Any, context: Context | None = None
    ) -> asyncio.TimerHandle:
        handle = super().call_at(when, callback, *args, context=context)
        if self._frozen:
            self._hold(handle)
        return handle

    def _hold(self, handle: Any) -> None:
        """Let it be kept, rather than run, should its process still be frozen when it is due."""
        process = handle._context.get(PROCESS)
        if process in self._frozen and not handle._cancelled:
            held = (handle, handle._callback, handle._args)
            handle._callback, handle._args = self._keep, (process, held)

    def _keep(self, process: object, held: _Held) -> None:
        if process in self._frozen:
            self._frozen[process].append(held)
        else:
            _, callback, args = held
            callback(*args)

    def run_in_executor(self, executor: Any, func: Any, *args: Any) -> NoReturn:  # type: ignore[override]
        raise VirtualTimeError("a thread was asked for: threads live on the real clock")

    def unfinished(self) -> list[asyncio.Task[Any]]:
        return sorted((t for t in asyncio.all_tasks(self) if not t.done()), key=lambda t: (len(t.get_name()), str(t)))

    def _waiting(self) -> str:
        return "\n".join(f"  {_where(task)}" for task in self.unfinished())


def run(main: Coroutine[Any, Any, T], *, seed: int = 0, limit_s: float = 3600.0) -> T:
    """Run `main` to its end on a virtual clock, then end what it left.

    Raises VirtualTimeError on a deadlock, past `limit_s` virtual seconds, and when `main` left a task unfinished, a
    task's error unseen or an error in a callback.
    """
    loop = VirtualTimeLoop(seed, limit_s)
    try:
        result = _run_to_end(loop, main)
        _require_tidy(loop)
        return result
    finally:
        _end(loop)


def virtual_loop() -> VirtualTimeLoop:
    """The running loop, for what wants its `random`."""
    loop = asyncio.get_running_loop()
    assert isinstance(loop, VirtualTimeLoop)
    return loop


def _run_to_end(loop: VirtualTimeLoop, main: Coroutine[Any, Any, T]) -> T:
    failed: list[asyncio.Task[Any]] = []
    loop.set_task_factory(lambda loop, coroutine, **options: _watched(asyncio.Task(coroutine, loop=loop, **options)))

    def _watched(task: asyncio.Task[Any]) -> asyncio.Task[Any]:
        task.add_done_callback(keep_failure)
        return task

    def keep_failure(task: asyncio.Task[Any]) -> None:
        # Not .exception(), which would count as having seen it.
        if not task.cancelled() and task._exception is not None:
            failed.append(task)

    result = loop.run_until_complete(main)
    loop.run_until_complete(asyncio.sleep(0))
    loop.failures += [f"{_where(task)} raised {task._exception!r}, unseen" for task in failed if task._log_traceback]
    return result


def _require_tidy(loop: VirtualTimeLoop) -> None:
    left = [f"{_where(task)} is not over" for task in loop.unfinished()]
    if problems := left + loop.failures:
        raise VirtualTimeError("left behind:\n" + "\n".join(f"  {problem}" for problem in problems))


def _end(loop: VirtualTimeLoop) -> None:
    left = loop.unfinished()
    loop.extend()
    for task in left:
        task.cancel()
    try:
        if left:
            loop.run_until_complete(_all_over(left))
        loop.run_until_complete(loop.shutdown_asyncgens())
    except VirtualTimeError as error:
        raise VirtualTimeError(f"does not end when cancelled: {error}") from None
    finally:
        loop.close()


async def _all_over(tasks: list[asyncio.Task[Any]]) -> None:
    """End them without looking at their errors."""
    await asyncio.gather(*tasks, return_exceptions=True)


def _note_failure(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    assert isinstance(loop, VirtualTimeLoop)
    loop.failures.append(f"{context['message']}: {context.get('exception')!r}")


def _where(task: asyncio.Task[Any]) -> str:
    """The task's name and the lines that it waits in, the innermost last."""
    coroutine: Any = task.get_coro()
    frames = []
    while coroutine is not None:
        if frame := getattr(coroutine, "cr_frame", None) or getattr(coroutine, "ag_frame", None):
            frames.append(f"{frame.f_code.co_qualname}:{frame.f_lineno}")
        coroutine = getattr(coroutine, "cr_await", None) or getattr(coroutine, "ag_await", None)
    return " > ".join((task.get_name(), *frames))


class _VirtualSelector(selectors.BaseSelector):
    """Never waits. The loop's own wake-up pipe is the only file it knows."""

    def __init__(self, loop: VirtualTimeLoop) -> None:
        self._loop = loop
        self._keys: dict[int, selectors.SelectorKey] = {}

    def register(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        if self._keys:
            raise VirtualTimeError("a socket or file was opened: they live on the real clock")
        fd = fileobj if isinstance(fileobj, int) else fileobj.fileno()
        self._keys[fd] = selectors.SelectorKey(fileobj, fd, events, data)
        return self._keys[fd]

    def unregister(self, fileobj: Any) -> selectors.SelectorKey:
        return self._keys.pop(fileobj if isinstance(fileobj, int) else fileobj.fileno())

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        self._loop.advance(timeout)
        return []

    def get_map(self) -> Mapping[Any, selectors.SelectorKey]:
        return self._keys

    def get_key(self, fileobj: Any) -> selectors.SelectorKey:
        return self._keys[fileobj if isinstance(fileobj, int) else fileobj.fileno()]
