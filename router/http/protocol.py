"""HTTP/1.1 as the router reads it: httptools, which unlike h11 knows no limit for the head of a request."""

from __future__ import annotations

from typing import Any

from uvicorn._types import ASGI3Application
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

# As uvicorn's for h11.
MAX_HEAD_BYTES = 64 << 10


class HttpProtocol(HttpToolsProtocol):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._num_head_bytes = 0
        self._in_head = False
        self._answering: RequestResponseCycle | None = None
        # What comes is no HTTP any more.
        self._is_deaf = False

    def data_received(self, data: bytes) -> None:
        if self._is_deaf:
            return
        super().data_received(data)
        if self._in_head:
            self._num_head_bytes += len(data)
            if self._num_head_bytes > MAX_HEAD_BYTES and not self.transport.is_closing():
                self.send_400_response(f"the request line and headers are over {MAX_HEAD_BYTES} bytes")

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._in_head, self._num_head_bytes = True, 0

    def on_headers_complete(self) -> None:
        super().on_headers_complete()
        self._in_head = False

    def send_400_response(self, msg: str) -> None:
        """Where the answer to the request before has begun: its end, then that of the connection. uvicorn would put an
        answer of its own into the middle of it."""
        answering = self._answering
        if answering is not None and answering.response_started and not answering.response_complete:
            answering.keep_alive, self._is_deaf = False, True
            # Else what is not read at the end would cost the client the answer.
            self.flow.resume_reading()
        else:
            self.refuse(msg)

    def refuse(self, reason: str) -> None:
        """Answer 400 and close the connection."""
        super().send_400_response(reason)

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGI3Application) -> None:
        self._answering = cycle
        super()._start_asgi_task(cycle, app)
