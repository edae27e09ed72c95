"""HTTP/1.1 as the router reads it: httptools, which unlike h11 knows no limit for the head of a request.

A connection on which something is unread is not simply closed: the client would be told of a reset, and lose the answer
that was written last. It is read, by nobody, for a while longer.
"""

from __future__ import annotations

import json
from typing import Any

from uvicorn._types import ASGI3Application
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from router.openai.wire import error_object

# As uvicorn's for h11.
MAX_HEAD_BYTES = 64 << 10
# As nginx's.
_LINGER_S = 5.0


class HttpProtocol(HttpToolsProtocol):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # Of the head, or of the trailers behind a body in chunks, that are being read.
        self._num_head_bytes = 0
        self._in_head, self._in_tail, self._began_now = False, False, False
        self._answering: RequestResponseCycle | None = None
        # What comes is for nobody any more.
        self._is_deaf = False

    def data_received(self, data: bytes) -> None:
        if self._is_deaf:
            return
        super().data_received(data)
        self._count(len(data))

    def _count(self, num_bytes: int) -> None:
        """What began in the middle of a piece is counted from the next one on."""
        began_now, self._began_now = self._began_now, False
        if began_now or self._is_deaf or not (self._in_head or self._in_tail):
            return
        self._num_head_bytes += num_bytes
        if self._num_head_bytes > MAX_HEAD_BYTES and not self.transport.is_closing():
            self.send_400_response(f"the request line and headers are over {MAX_HEAD_BYTES} bytes")

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._in_head, self._num_head_bytes, self._began_now = True, 0, True

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._in_head:  # Trailers are for nobody.
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        super().on_headers_complete()
        self._in_head = False

    def on_chunk_header(self) -> None:
        """Of the last chunk, too, which is empty, and behind which trailers come."""
        self._in_tail, self._num_head_bytes, self._began_now = True, 0, True

    def on_body(self, body: bytes) -> None:
        self._in_tail = False
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._in_tail = False
        super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        """Where the answer to the request before has begun: its end, then that of the connection. uvicorn would put an
        answer of its own into the middle of it."""
        answering = self._answering
        if answering is not None and answering.response_started and not answering.response_complete:
            answering.keep_alive = False
            self._hear_no_more()
            return
        if answering is not None and not answering.response_complete:
            # It has nobody to answer any more.
            answering.disconnected, answering.waiting_for_100_continue = True, False
            answering.message_event.set()
        body = json.dumps(error_object(f"{msg.rstrip('.')}; send HTTP/1.1", "invalid_request_error"))
        head = ("HTTP/1.1 400 Bad Request", "content-type: application/json", f"content-length: {len(body)}")
        self.transport.write("\r\n".join((*head, "connection: close", "", body)).encode())
        self.close_unread()

    def close_unread(self) -> None:
        """Once the client has closed, too, or has had the time."""
        self._hear_no_more()
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self.loop.call_later(_LINGER_S, self.transport.close)

    def _hear_no_more(self) -> None:
        self._is_deaf = True
        self.pipeline.clear()
        self.flow.resume_reading()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGI3Application) -> None:
        self._answering = cycle
        cycle.transport = _OfOneAnswer(self, cycle)  # type: ignore[assignment]
        super()._start_asgi_task(cycle, app)


class _OfOneAnswer:
    """What uvicorn's cycle needs of the transport."""

    def __init__(self, protocol: HttpProtocol, cycle: RequestResponseCycle) -> None:
        self._protocol = protocol
        self._cycle = cycle
        self.write = protocol.transport.write

    def close(self) -> None:
        if self._cycle.more_body or self._protocol._is_deaf:
            self._protocol.close_unread()
        else:
            self._protocol.transport.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._protocol.transport, name)
