"""HTTP/1.1 with clients that must send the head of a request, and read its answer, in time.

Bodies have their time in edge.py.
"""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn._types import ASGI3Application
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from router.http.protocol import HttpProtocol


class PatientProtocol(HttpProtocol):
    """uvicorn's own waits for ever: for the head of a connection's first request, for the rest of any other's head, and
    for whoever does not read."""

    def __init__(self, *args: Any, timeout_s: float, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self._timeout_s = timeout_s
        self._head_timer: asyncio.TimerHandle | None = None
        self._read_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._expect_head()

    def data_received(self, data: bytes) -> None:
        before: RequestResponseCycle | None = self.cycle
        if self._head_timer is None and (before is None or before.response_complete):
            self._expect_head()
        super().data_received(data)
        if self.cycle is not before:
            self._forget_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._forget_head()
        self._forget_reader()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._expect_reading()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._forget_reader()
        if self._answering is None or self._answering.response_complete:
            self._expect_reading_of_rest()

    def on_response_complete(self) -> None:
        self._expect_reading_of_rest()
        super().on_response_complete()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGI3Application) -> None:
        # From now on more is written.
        self._forget_reader()
        super()._start_asgi_task(cycle, app)

    def _expect_head(self) -> None:
        self._head_timer = self.loop.call_later(self._timeout_s, self.transport.close)

    def _expect_reading_of_rest(self) -> None:
        """Less than what pauses writing may be unread for ever, too, and keep the connection from being closed."""
        if self._read_timer is None and self.transport.get_write_buffer_size():
            self._expect_reading()

    def _expect_reading(self) -> None:
        self._forget_reader()
        left = self.transport.get_write_buffer_size()
        self._read_timer = self.loop.call_later(self._timeout_s, self._look_whether_read, left)

    def _look_whether_read(self, left_before: int) -> None:
        left = self.transport.get_write_buffer_size()
        if not left:
            self._read_timer = None
        elif left < left_before:
            self._expect_reading()
        else:
            # Nothing of what is not read yet can be said any more.
            self.transport.abort()

    def _forget_reader(self) -> None:
        if self._read_timer is not None:
            self._read_timer.cancel()
            self._read_timer = None

    def _forget_head(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None
